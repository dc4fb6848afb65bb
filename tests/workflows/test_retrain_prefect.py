"""The Prefect flow, without a server: refusals end it, what another attempt may mend is tried again."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.retrain.project import Project

pytestmark = [pytest.mark.system, pytest.mark.timeout(2400)]

FLOW = Path(__file__).parent.parent.parent / "workflows" / "retrain" / "prefect_flow.py"


@pytest.fixture(scope="module")
def python() -> str:
    """An interpreter that has Prefect: this one, or the one that DKRR_PREFECT_PYTHON names."""
    if importlib.util.find_spec("prefect") is None and "DKRR_PREFECT_PYTHON" not in os.environ:
        pytest.skip("Prefect is not installed, nor named by DKRR_PREFECT_PYTHON")
    return os.environ.get("DKRR_PREFECT_PYTHON", sys.executable)


def run(command: list[str], folder: Path) -> tuple[int, str]:
    """A command's exit code and all that it said, with nothing of this machine's Prefect."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_") and k != "PYTHONPATH"}
    own = {"PREFECT_HOME": str(folder / "home"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    environment = {**kept, **own, "DKRR_RETRY_SECONDS": "1,1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    return done.returncode, done.stdout + done.stderr


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
    code, said = run([python, str(flow), job, "--dkrr", str(interrupted)], tmp_path)
    assert code == 0, said
    assert calls(interrupted) == 2
    first = project.production
    assert first is not None
    assert f"demo: promoted, production {first}" in said
    project.deliver("n2", seed=2, change=lambda rows: rows * 100)
    code, said = run([python, str(flow), job, "--dkrr", str(program)], tmp_path)
    assert code == 7, said
    assert "dkrr retrain ended with 7: error: demo:" in said
    assert project.production == first
