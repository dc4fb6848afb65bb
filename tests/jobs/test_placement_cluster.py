"""A driver is started on a worker that offers itself, as a process of its own, once both see the run's directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, LocalCluster

from dkrr.engine import checks, remote
from dkrr.engine.checks import DRIVER_RESOURCE
from dkrr.errors import ClusterError, JobFileError
from dkrr.jobs import placement_cluster
from dkrr.jobs.placement_cluster import start_on_cluster
from dkrr.jobs.spec import JobSpec
from tests.faults import wait_until


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0",
        protocol="tcp://", host="127.0.0.1", resources={DRIVER_RESOURCE: 1},
    ) as cluster:  # fmt: skip
        yield cluster


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(placement_cluster, "DRIVER_MODULE", "tests.jobs.fake_driver")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def job(scheduler: str) -> JobSpec:
    return JobSpec.from_dict({"data": {"path": "sklearn:digits"}, "cluster": {"scheduler": scheduler}})


def test_the_driver_is_a_process_of_its_own(cluster: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVER_SECONDS", "60")
    record = start_on_cluster(str(run), job(cluster.scheduler_address))
    process = psutil.Process(record["pid"])
    try:
        note = json.loads(wait_until(lambda: (run / "ran.json").exists() and (run / "ran.json").read_text()))
        assert note == {"pid": record["pid"], "session": record["pid"], "cwd": "/", "terminal": False}
        assert (record["kind"], record["log"]) == ("cluster", str(run / "driver.log"))
        assert record["worker"] in cluster.scheduler_info["workers"]
        assert record["host"] == os.uname().nodename
        with Client(cluster, set_as_default=False) as client:  # no task, no thread of the worker is held
            assert client.submit(pow, 2, 5).result(timeout=30) == 32
        assert {path.name for path in run.iterdir()} == {"ran.json", "driver.log"}
        assert "the driver was here" in (run / "driver.log").read_text()
    finally:
        process.kill()
    wait_until(lambda: not psutil.pid_exists(record["pid"]))  # somebody waited for it: no zombie


def test_a_busy_worker_starts_it_as_well(cluster: Any, run: Path) -> None:
    import time

    with Client(cluster, set_as_default=False) as client:
        busy = client.submit(time.sleep, 3, pure=False)
        start_on_cluster(str(run), job(cluster.scheduler_address))
        assert not busy.done()
    wait_until(lambda: (run / "ran.json").exists())


def test_no_worker_offers_itself(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "OFFER_SECONDS", 0.5)
    with (
        LocalCluster(
            n_workers=1, processes=False, dashboard_address="127.0.0.1:0", host="127.0.0.1", protocol="tcp://"
        ) as other,
        pytest.raises(ClusterError, match="none of the 1 workers declares the resource dkrr-driver") as caught,
    ):
        start_on_cluster(str(run), job(other.scheduler_address))
    assert "--resources dkrr-driver=1" in caught.value.hint
    assert list(run.iterdir()) == []


def test_the_worker_does_not_see_the_directory(cluster: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "answer_challenge", lambda _: "cannot see what was written elsewhere")
    with pytest.raises(ClusterError, match=f"cannot use {run}: it cannot see what was written") as caught:
        start_on_cluster(str(run), job(cluster.scheduler_address))
    assert "both machines reach" in caught.value.hint
    assert list(run.iterdir()) == []


def test_what_the_worker_writes_is_not_seen_here(cluster: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "write_json", lambda *_: None)
    monkeypatch.setattr(remote, "SEEN_SECONDS", 0.5)
    with pytest.raises(ClusterError, match="is not seen here"):
        start_on_cluster(str(run), job(cluster.scheduler_address))
    assert list(run.iterdir()) == []


def test_a_worker_with_another_version(cluster: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = checks.process_versions()
    answers = iter([{**here, "dkrr": "0.0"}, here])  # the worker is this process, and is asked first
    monkeypatch.setattr(checks, "process_versions", lambda: next(answers))
    with pytest.raises(ClusterError, match=f"dkrr 0.0, {here['dkrr']} here"):
        start_on_cluster(str(run), job(cluster.scheduler_address))
    assert list(run.iterdir()) == []


def test_a_local_scheduler_has_no_such_worker(run: Path) -> None:
    with pytest.raises(JobFileError, match='driver = "cluster"'):
        start_on_cluster(str(run), job("local"))


def test_where_a_run_has_no_folder_the_process_is_told_its_log(tmp_path: Path) -> None:
    out = tmp_path / "arguments"
    code = "import pathlib, sys; print('said'); pathlib.Path(sys.argv[1]).write_text(' '.join(sys.argv[2:]))"
    record = remote.start_detached(["-c", code, str(out)], "")
    log = Path(record["log"])
    try:
        assert wait_until(lambda: out.exists() and out.read_text()) == f"--log {log}"
        wait_until(lambda: not psutil.pid_exists(record["pid"]))
        assert log.read_text() == "said\n"
    finally:
        log.unlink()
