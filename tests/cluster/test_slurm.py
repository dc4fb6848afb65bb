"""``cluster/slurm/dkrr.sbatch`` under Slurm itself: stopped by its time limit, requeued, finished to the same bytes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.helpers import ByHandJob
from tests.cluster.programs import CLUSTER, programs
from tests.cluster.slurm import Slurm, slurm_of_our_own
from tests.faults import wait_until

SCRIPT = CLUSTER / "slurm/dkrr.sbatch"


def slowly(seconds: float) -> str:
    return f"compute.cholesky.tile:1:sleep={seconds}"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_of_our_own(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@dataclass
class Submitted:
    """A job that names no scheduler, in the hands of Slurm."""

    slurm: Slurm
    job: ByHandJob
    number: str

    @property
    def log(self) -> str:
        path = self.job.folder / f"dkrr-{self.number}.log"
        return path.read_text() if path.exists() else ""

    def wait_for_tiles(self, count: int) -> dict[str, int]:
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}

        def enough() -> bool:
            assert self.slurm.job(self.number).get("JobState") not in over, self.log
            return len(self.job.tiles()) >= count

        wait_until(enough, 120)
        return self.job.tiles()

    def folder(self) -> set[str]:
        return {path.name for path in (self.job.folder / ".dkrr").iterdir()}


def submit(slurm: Slurm, folder: Path, n: int, *options: str, **environment: str) -> Submitted:
    job = ByHandJob(folder / "job", "", n=n)
    number = slurm.submit(
        SCRIPT, job.file.name, cwd=job.folder, options=["--mem-per-cpu=1100M", *options],
        DKRR_BIN=str(programs(folder / "bin")), DKRR_MEMORY="1GiB", **environment,
    )  # fmt: skip
    return Submitted(slurm, job, number)


@pytest.mark.system
@pytest.mark.short
@pytest.mark.timeout(300)
def test_told_to_stop_it_is_requeued_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    submitted = submit(slurm, tmp_path, 700, DKRR_FAILPOINTS=slowly(0.1))
    submitted.wait_for_tiles(5)
    slurm.run("scancel", "--signal=USR1", "--batch", submitted.number)  # as Slurm does before the time limit
    wait_until(lambda: "driver ended with status 75" in submitted.log, 60)
    written = submitted.job.fewer_than_all(5)
    ended = slurm.wait(submitted.number, 120)
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("COMPLETED", "1", "0:0"), submitted.log
    assert written.items() <= submitted.job.tiles().items()  # no valid tile was written again
    assert re.findall(r"start \d|status \d+", submitted.log) == ["start 0", "status 75", "start 1", "status 0"]
    # a scheduler file for each start, and none is left; everything was on TLS
    starts = [f"{submitted.number}-{start}" for start in (0, 1)]
    logs = {f"{kind}-{start}{end}.log" for start in starts for kind, end in (("scheduler", ""), ("worker", "-1"))}
    assert submitted.folder() >= {*logs, "tls"}
    assert not [name for name in submitted.folder() if name.endswith(".json")]
    said = (submitted.job.folder / f".dkrr/scheduler-{submitted.number}-1.log").read_text()
    assert "tls://" in said
    assert "tcp://" not in said


def through_its_time_limit(slurm: Slurm, folder: Path) -> tuple[Submitted, dict[str, int], dict[str, str]]:
    """A job that its limit of one minute stops in mid-factorisation: the tiles it had then, and how it ended."""
    # Slurm looks at limits every half minute: it warns between 5 and 35 s before the end
    submitted = submit(slurm, folder, 1200, "--time=1", "--signal=B:USR1@5", DKRR_FAILPOINTS=slowly(1.5))
    wait_until(lambda: "driver ended with status" in submitted.log, 180)
    assert "time limit: the driver is told to stop" in submitted.log
    written = submitted.job.fewer_than_all(5)
    return submitted, written, slurm.wait(submitted.number, 600)


def test_without_a_job_file_that_it_can_use_it_says_so(tmp_path: Path) -> None:
    elsewhere = ByHandJob(tmp_path / "job", "tcp://127.0.0.1:8786").file
    expected = "one job file that exists expected"
    cases = [((), expected), (("missing.toml",), expected), (("a", "b"), expected)]
    for arguments, said in [*cases, ((str(elsewhere),), "job.toml names a [cluster] scheduler")]:
        done = subprocess.run(
            [str(SCRIPT), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
        )
        assert (done.returncode, said in done.stdout) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["job"]
