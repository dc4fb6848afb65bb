"""The Prefect flow: once without a server, and twice by Prefect's own scheduler on data that grows."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults import descendants, wait_until
from tests.jobs.retrain.project import Project
from tests.workflows.prefect_server import (
    PrefectServer,
    environment,
    prefect_interpreter,
    run,
    running,
    server_of_our_own,
)

# installing Prefect may take longer than a test
pytestmark = [pytest.mark.system, pytest.mark.timeout(2400)]

FLOW = Path(__file__).parent.parent.parent / "workflows" / "retrain" / "prefect_flow.py"
SECONDS = 600.0  # a flow run takes ten seconds on an idle machine


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prefect_interpreter(tmp_path_factory.mktemp("prefect") / "venv")


@pytest.fixture(scope="module")
def server(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    with server_of_our_own(python, tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture
def flow(tmp_path: Path) -> Path:
    """Where a reader would have copied it: its folder has no dkrr."""
    return Path(shutil.copy(FLOW, tmp_path))


def stand_in(path: Path, *lines: str) -> Path:
    """A program in place of ``dkrr``, which notes each call."""
    path.write_text("\n".join(["#!/bin/sh", f'echo "$@" >> {path}.calls', *lines, ""]))
    path.chmod(0o755)
    return path


def calls(path: Path) -> int:
    log = path.with_name(f"{path.name}.calls")
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_once_without_a_server(python: str, flow: Path, project: Project, program: Path, tmp_path: Path) -> None:
    """Interrupted at first, tried again, promoted; then a batch is refused, and the exit code is the command's."""
    interrupted = stand_in(tmp_path / "dkrr", f'[ $(wc -l < {tmp_path}/dkrr.calls) -gt 1 ] && exec {program} "$@"',
                           "echo 'error: interrupted' >&2", "exit 75")  # fmt: skip

    job = str(project.folder / "RETRAIN.toml")
    code, said = run([python, str(flow), job, "--dkrr", str(interrupted)], tmp_path, SECONDS)
    assert code == 0, said
    assert calls(interrupted) == 2
    first = project.production
    assert first is not None
    assert f"demo: promoted, production {first}" in said
    project.deliver("n2", seed=2, change=lambda rows: rows * 100)
    code, said = run([python, str(flow), job, "--dkrr", str(program)], tmp_path, SECONDS)
    assert code == 7, said
    assert "dkrr retrain ended with 7: error: demo:" in said
    assert project.production == first


CODES = """
import prefect_flow
for code in (1, 2, 5, 6, 7, 8, 75):
    try:
        prefect_flow.retrain_flow({job!r}, {folder!r} + f"/ends-{{code}}")
    except prefect_flow.CommandEnded as exc:
        print("ended", code, exc.code, flush=True)
"""


def test_only_what_another_attempt_may_mend_is_tried_again(
    python: str, flow: Path, server: PrefectServer, tmp_path: Path
) -> None:
    codes = (1, 2, 5, 6, 7, 8, 75)
    programs = {code: stand_in(tmp_path / f"ends-{code}", f"exit {code}") for code in codes}
    script = CODES.format(job=str(tmp_path / "RETRAIN.toml"), folder=str(tmp_path))
    code, said = run([python, "-c", script], tmp_path, SECONDS, PREFECT_API_URL=server.api)
    assert code == 0, said
    assert re.findall(r"ended (\d+) (\d+)", said) == [(str(code), str(code)) for code in codes]
    assert {code: calls(path) for code, path in programs.items()} == {1: 1, 2: 1, 5: 1, 6: 3, 7: 1, 8: 1, 75: 3}


def test_a_flow_that_is_ended_ends_its_command(python: str, flow: Path, server: PrefectServer, tmp_path: Path) -> None:
    sleeper = stand_in(
        tmp_path / "dkrr",
        f"trap 'echo in order > {tmp_path}/ended; exit 75' TERM",
        f"touch {tmp_path}/ready",
        "while :; do sleep 0.2; done",
    )
    command = [python, str(flow), str(tmp_path / "RETRAIN.toml"), "--dkrr", str(sleeper)]
    variables = environment(tmp_path / "home", PREFECT_API_URL=server.api)
    with running(command, tmp_path / "flow.log", tmp_path, variables) as process:
        wait_until(lambda: process.poll() is not None or (tmp_path / "ready").exists(), SECONDS)
        children = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(SECONDS)
    assert process.returncode == 143, (tmp_path / "flow.log").read_text()
    assert (tmp_path / "ended").read_text() == "in order\n"
    assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []


def test_its_own_scheduler_retrains_twice(
    python: str, flow: Path, project: Project, program: Path, server: PrefectServer, tmp_path: Path
) -> None:
    """Nothing but delivered rows and Prefect's clock: two completed scheduled runs, each with a version of its own."""
    command = [python, str(flow), str(project.folder / "RETRAIN.toml"), "--every", "15", "--dkrr", str(program)]
    log = tmp_path / "serve.log"

    def promoted() -> list[tuple[dict[str, Any], str]]:
        """Completed scheduled runs that promoted something, and what their artifacts say."""
        time.sleep(1)  # the server has other things to do
        runs = server.scheduled_runs("COMPLETED")
        texts = [(run, text) for run in runs for text in server.artifacts(run)]
        return [(run, text) for run, text in texts if text.startswith("# demo: promoted")]

    variables = environment(tmp_path / "home", PREFECT_API_URL=server.api)
    with running(command, log, tmp_path, variables) as serving:
        wait_until(lambda: serving.poll() is not None or len(promoted()) == 1, SECONDS)
        assert serving.poll() is None, log.read_text()
        project.deliver("n2", seed=2)
        wait_until(lambda: serving.poll() is not None or len(promoted()) == 2, SECONDS)
        assert serving.poll() is None, log.read_text()
        theirs = descendants(serving.pid)
    assert [child for child in theirs if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
    assert server.scheduled_runs("FAILED") + server.scheduled_runs("CRASHED") == []

    _, texts = zip(*promoted(), strict=True)
    versions = [found[1] for text in texts if (found := re.search(r"production: `(.+)`", text))]
    assert len(set(versions)) == 2
    assert {version.id for version in project.model.versions()} == set(versions)
    assert (project.model.aliases().targets["previous"], project.production) == tuple(versions)
