"""`dask scheduler` and `dask worker` by hand: a killed scheduler, other people's work."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.helpers import ByHandJob, by_hand, is_identical
from tests.faults import finish

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SLOWLY = "compute.cholesky.tile:1:sleep=0.05"


@pytest.mark.short
def test_a_killed_scheduler_and_another_one_at_its_address(tmp_path: Path) -> None:
    local = ByHandJob(tmp_path / "local")
    local.fit()
    with by_hand(tmp_path / "servers", DKRR_FAILPOINTS=SLOWLY) as cluster:
        job = ByHandJob(tmp_path / "job", cluster.address)
        process = job.start_until_tiles(20)
        cluster.kill_scheduler()
        began = time.monotonic()
        ended = finish(process, 60)
        assert time.monotonic() - began < 30
        assert ended.code == 6, ended.err
        assert "start the same job again" in ended.err
        cluster.wait_for_the_end_of_workers()  # Dask's behaviour: nothing of them reconnects
        written = job.fewer_than_all(20)
        cluster.start_scheduler()
        cluster.start_worker()
        cluster.start_worker()
        job.fit()
        assert written.items() <= job.tiles().items()  # no valid tile was written again
        assert is_identical(local, job)
