"""`dask scheduler` and `dask worker` by hand: a killed scheduler, other people's work."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from distributed import Client

from tests.cluster.helpers import ByHandJob, byte_for_byte, fit_again_on_new_servers
from tests.faults import finish, wait_until
from tests.servers import by_hand

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
        fit_again_on_new_servers(job, cluster, 20)
        byte_for_byte(local, job)


def test_the_work_of_others_on_the_same_scheduler_is_not_touched(tmp_path: Path) -> None:
    with (
        by_hand(tmp_path / "servers", DKRR_FAILPOINTS=SLOWLY) as cluster,
        Client(cluster.address, set_as_default=False) as other,
    ):
        other.wait_for_workers(2, timeout=60)
        pids = other.run(os.getpid)
        array = np.arange(1000.0)
        kept = other.submit(np.sum, array, key="kept")
        (scattered,) = other.scatter([array])
        job = ByHandJob(tmp_path / "job", cluster.address)
        process = job.start_until_tiles(10)
        slow = other.submit(time.sleep, 1, pure=False, priority=100)
        process.send_signal(signal.SIGTERM)
        ended = finish(process, 60)
        assert ended.code == 75, ended.err
        assert slow.result(timeout=60) is None
        assert kept.result() == array.sum()
        assert np.array_equal(scattered.result(), array)
        assert other.run(os.getpid) == pids  # nothing was restarted
        wait_until(lambda: len(other.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks))) == 3)
        written = job.tiles()
        time.sleep(2)
        assert job.tiles() == written  # no tile is written after the end
        job.fit()
        assert kept.result() == array.sum()
        assert other.run(os.getpid) == pids
