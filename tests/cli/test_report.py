"""``dkrr report``: the page of a run, into the run or elsewhere; watching a run where there is no terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dkrr.cli import main
from dkrr.jobs.run_directory import RunDirectory
from dkrr.jobs.status import Status, write_status
from tests.pages import SECTIONS, parse_page


def dkrr(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DKRR_RUNS", raising=False)
    directory = RunDirectory(tmp_path / "runs/job")
    phases = {
        "prepare": {"number": 0, "seconds": 0.84, "tasks": 0, "times": 1},
        "factorise": {"number": 1, "seconds": 12.3, "tasks": 210, "flops_per_second": 163.2e9, "times": 1},
    }
    error = {"type": "NumericalError", "message": "not positive definite", "hint": "raise alpha"}
    seconds = {"prepare": 0.84, "factorise": 12.3}
    write_status(directory, Status(state="failed", exit_code=5, epoch=1, phases=phases, error=error, seconds=seconds))
    return directory


def test_a_report_by_name(run: RunDirectory) -> None:
    result = dkrr("report", "job")
    assert (result.exit_code, result.stdout) == (0, f"{run.path('report.html')}\n")
    page = parse_page((run.read_bytes("report.html") or b"").decode())
    assert tuple(page.sections) == SECTIONS
    assert "The run failed: not positive definite." in page.text
    assert "Hint: raise alpha" in page.text
    assert "12.3 s" in page.sections["time"]


def test_watching_without_a_terminal_prints_lines(run: RunDirectory) -> None:
    result = dkrr("status", "job", "--watch")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[:3] == [
        "prepare: 0.8 s",
        "factorise: 210 tasks in 12.3 s, 163.2 GF/s",
        "failed: not positive definite",
    ]
    assert "\x1b" not in result.stdout
