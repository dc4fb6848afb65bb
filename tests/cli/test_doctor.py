"""``dkrr doctor``: what it measures it shows, ``--env`` prints lines that a shell can read."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dkrr.cli import main
from dkrr.engine import machine
from dkrr.engine.machine import worker_environment


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return machine.machine_report(tmp_path_factory.mktemp("disk"))


def test_env_is_what_workers_get(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["doctor", "--env"])
    assert result.exit_code == 0
    script = result.stdout + "env\n"
    shown = subprocess.run(
        ["bash", "-c", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60, check=True
    )
    exported = dict(line.split("=", 1) for line in shown.stdout.splitlines() if "=" in line)
    assert worker_environment().items() <= exported.items()


def test_a_blas_that_computes_wrong_numbers_ends_with_5(
    report: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = report | {"self_test_failures": ["gemm is off by 3"]}
    monkeypatch.setattr(machine, "machine_report", lambda folder: broken)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 5
    assert "FAILED" in result.stdout
    assert "gemm is off by 3" in result.stderr
