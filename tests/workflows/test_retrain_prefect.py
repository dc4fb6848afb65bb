"""The Prefect flow: once without a server, twice by its own scheduler on data that grows. Needs ``dkrr[prefect]``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dkrr.jobs import toml
from tests.faults import wait_until
from tests.jobs.retrain.project import Project
from tests.servers import free_port, import_path

pytestmark = [pytest.mark.system, pytest.mark.timeout(290)]

FLOW = Path(__file__).parent.parent.parent / "workflows" / "retrain" / "prefect_flow.py"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    pytest.importorskip("prefect")
    project = Project(tmp_path / "p", cluster={"workers": 1, "memory_limit": "1GiB"})
    (project.folder / "RETRAIN.toml").write_text(toml.dumps(project.document))
    project.deliver("n1", seed=1)
    return project


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {
        **kept,
        "PYTHONPATH": import_path(),
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "DKRR_RETRY_SECONDS": "1,1",
        **more,
    }


def run_once(project: Project, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FLOW), str(project.folder / "RETRAIN.toml")],
        env=environment(folder, **more), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def test_once_without_a_server(project: Project, tmp_path: Path) -> None:
    done = run_once(project, tmp_path)
    assert done.returncode == 0, done.stderr
    assert project.production is not None
    assert "promoted" in done.stdout + done.stderr


def test_an_interruption_is_retried_and_a_refusal_is_not(project: Project, tmp_path: Path) -> None:
    # an error that ends with 75 happens once: the first attempt finds its batch changed while it is read
    interrupted = tmp_path / "sitecustomize.py"
    interrupted.write_text(
        "import os, sys\n"
        f"mark = {str(tmp_path / 'mark')!r}\n"
        "if 'retrain' in sys.argv and not os.path.exists(mark):\n"
        "    open(mark, 'w').close()\n"
        "    os._exit(75)\n"
    )
    path = os.pathsep.join([str(tmp_path), import_path()])
    done = run_once(project, tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mark").exists()
    first = project.production
    assert first is not None
    project.deliver("n2", seed=2, change=lambda rows: rows * 100)
    done = run_once(project, tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "exit code 7" in said
    assert "etry" not in said.partition("exit code 7")[0].rpartition("Created task run")[2]
    assert project.production == first


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a Prefect server of our own."""
    pytest.importorskip("prefect")
    port = free_port()
    log = tmp_path / "server.log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            env=environment(tmp_path), stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}/api"
    try:
        wait_until(lambda: process.poll() is not None or _answers(f"{url}/health"), 120)
        assert process.poll() is None, log.read_text()
        yield url
    finally:
        _end(process)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:  # noqa: S310
            return bool(reply.status == 200)
    except OSError:
        return False


def _end(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ask(url: str, path: str, document: dict[str, Any]) -> Any:
    request = urllib.request.Request(  # noqa: S310
        f"{url}/{path}", data=json.dumps(document).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as reply:  # noqa: S310
        return json.load(reply)


def completed(url: str) -> list[dict[str, Any]]:
    runs = ask(url, "flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}})
    return [run for run in runs if run["auto_scheduled"]]


def test_its_own_scheduler_retrains_twice(project: Project, server: str, tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    with open(log, "w") as output:
        serving = subprocess.Popen(
            [sys.executable, str(FLOW), str(project.folder / "RETRAIN.toml"), "--every", "15"],
            env=environment(tmp_path, PREFECT_API_URL=server), stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        wait_until(lambda: serving.poll() is not None or project.production is not None, 150)
        assert serving.poll() is None, log.read_text()
        first = project.production
        project.deliver("n2", seed=2)
        wait_until(lambda: project.production not in (None, first), 100)
        wait_until(lambda: len(completed(server)) >= 2, 60)
    finally:
        _end(serving)
    assert len(project.model.versions()) == 2
    (artifact, *_) = ask(server, "artifacts/filter", {})
    assert "promoted" in artifact["data"] or "nothing new" in artifact["data"]
