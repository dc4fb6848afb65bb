"""Clusters that others start: a time limit of Slurm in mid-factorisation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.helpers import ByHandJob, is_identical
from tests.cluster.slurm import slurm_of_our_own
from tests.cluster.test_slurm import through_its_time_limit
from tests.measure.figures import Judge

pytestmark = [pytest.mark.measure, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> ByHandJob:
    """The same job on a cluster of its own, undisturbed."""
    job = ByHandJob(tmp_path_factory.mktemp("local") / "job")
    job.fit()
    return job


def test_measure_a_time_limit(judge: Judge, folder: Path, local: ByHandJob) -> None:
    with slurm_of_our_own(folder / "slurm") as slurm:
        submitted, written, ended = through_its_time_limit(slurm, folder)
        again = dict(written.items() - submitted.job.tiles().items())
        same = is_identical(local, submitted.job)
    judge(
        "Slurm: a time limit in mid-factorisation",
        f"{ended['JobState']} after {ended['Restarts']} requeue; {len(again)} of {len(written)} valid tiles written "
        f"again; factor, model and predictions {'equal' if same else 'DIFFER'}",
        "COMPLETED; 0; equal",
        ended["JobState"] == "COMPLETED" and int(ended["Restarts"]) >= 1 and not again and same,
    )
