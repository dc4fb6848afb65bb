"""`dask scheduler` and `dask worker` by hand: a killed scheduler, other versions, late workers, other people's work."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

import dkrr
from dkrr.engine.cluster import connect
from dkrr.engine.workers import roster
from dkrr.errors import ClusterError
from tests.cluster.helpers import ByHandJob, byte_for_byte, fit_again_on_new_servers
from tests.faults import finish, stopped, wait_until
from tests.servers import by_hand, import_path

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SLOWLY = "cholesky.tile.after_compute:1:sleep=0.05"


def shadow(folder: Path, version: str) -> str:
    """A copy of the package that says it is another version; an import path with it in front."""
    source = Path(dkrr.__file__).parent
    shutil.copytree(source, folder / "dkrr", ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / "dkrr/_version.py").read_text()
    changed = text.replace(dkrr.__version__, version)
    assert changed != text
    (folder / "dkrr/_version.py").write_text(changed)
    return os.pathsep.join([str(folder), import_path()])


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


def test_a_scheduler_that_stands_still_is_lost_within_half_a_minute(tmp_path: Path) -> None:
    with by_hand(tmp_path / "servers", DKRR_FAILPOINTS=SLOWLY) as cluster:
        job = ByHandJob(tmp_path / "job", cluster.address)
        process = job.start_until_tiles(5)
        assert cluster.scheduler is not None
        with stopped(cluster.scheduler.pid):
            began = time.monotonic()
            ended = finish(process, 90)
            assert time.monotonic() - began < 45
        assert ended.code == 6, ended.err
        assert "start the same job again" in ended.err


def test_no_scheduler_and_too_few_workers(tmp_path: Path) -> None:
    with by_hand(tmp_path / "servers", workers=1) as cluster:
        began = time.monotonic()
        with pytest.raises(ClusterError, match="has 1 workers after 30 s, 2 expected"):
            connect(cluster.address, workers=2)
        assert time.monotonic() - began < 40
    began = time.monotonic()
    with pytest.raises(ClusterError, match="no connection to the scheduler"):
        connect(cluster.address)
    assert time.monotonic() - began < 40


def test_a_worker_with_another_version_is_refused_and_named(tmp_path: Path) -> None:
    other = shadow(tmp_path / "shadow", "0.0.0+other")
    with by_hand(tmp_path / "servers", workers=1) as cluster:
        cluster.start_worker("--name", "odd", PYTHONPATH=other)
        with Client(cluster.address, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
            workers = roster(client)
        odd = next(address for address, worker in workers.items() if worker["name"] == "odd")
        job = ByHandJob(tmp_path / "job", cluster.address)
        ended = job.command().run(90)
        assert ended.code == 6, ended.err
        (row,) = [line for line in ended.err.splitlines() if line.split()[:1] == ["dkrr"]]
        assert f"0.0.0+other on 1 worker ({odd})" in row
        assert job.tiles() == {}


def test_one_that_joins_late_is_named_and_gets_no_task(tmp_path: Path) -> None:
    other = shadow(tmp_path / "shadow", "0.0.0+other")
    with by_hand(tmp_path / "servers", DKRR_FAILPOINTS=SLOWLY) as cluster:
        job = ByHandJob(tmp_path / "job", cluster.address)
        process = job.start_until_tiles(3)
        process.send_signal(signal.SIGSTOP)  # the fit waits for both, however long they take to start
        cluster.start_worker("--name", "odd", PYTHONPATH=other)
        cluster.start_worker("--name", "good")
        with Client(cluster.address, set_as_default=False) as client:
            client.wait_for_workers(4, timeout=60)
            process.send_signal(signal.SIGCONT)
            addresses = {w["name"]: a for a, w in roster(client).items()}
            ended = finish(process, 180)
            assert ended.code == 0, ended.err
            ran = client.run_on_scheduler(tasks_by_worker)
        assert ran[addresses["odd"]] == 0
        assert f"worker {addresses['odd']} (odd) gets no task: dkrr 0.0.0+other" in ended.err


def tasks_by_worker(dask_scheduler: Any) -> dict[str, int]:
    """How many tasks each worker was ever given, from the scheduler's log of transitions."""
    given = dict.fromkeys(dask_scheduler.workers, 0)
    for entry in dask_scheduler.transition_log:
        for worker in given:
            given[worker] += worker in repr(entry) and "processing" in repr(entry)
    return given


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


def test_plain_tcp_to_another_machine_is_refused_in_the_job_file(tmp_path: Path) -> None:
    job = ByHandJob(tmp_path / "job", "tcp://10.0.0.1:8786")
    ended = job.command().run(60)
    assert ended.code == 2
    assert "insecure = true" in ended.err
    job = ByHandJob(tmp_path / "insecure", "tcp://dkrr.invalid:8786", more="insecure = true\n")
    ended = job.command().run(90)
    assert (ended.code, "no connection" in ended.err) == (6, True)
