"""The board of a run: on every width, with and without signs beyond ASCII."""

from __future__ import annotations

import io
from typing import Any

import pytest

from dkrr.cli.progress import LiveBoard, PhaseLines, ProgressDisplay, board
from dkrr.jobs.runs.facts import live_facts, phase_words
from dkrr.jobs.runs.status import Status, View


def running(**values: Any) -> Status:
    known: dict[str, Any] = {
        "state": "running", "phase": "factorise", "tasks_done": 55, "tasks_total": 210,
        "flops_per_second": 163.2e9, "phase_seconds": 65.0, "phase_seconds_left": 41.0, "num_workers": 2,
        "num_threads": 2, "elapsed_seconds": 70.0, "memory_bytes": 812 * 2**20, "started_at": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    return Status(**(known | values))


def shown(status: Status, width: int, height: int, encoding: str = "utf-8") -> list[str]:
    from rich.console import Console

    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width, height=height, force_terminal=False, legacy_windows=False)
    console.print(board(status, list(live_facts(View(status, "running"))), width, height))
    stream.seek(0)
    return stream.read().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (60, 24), (40, 20), (20, 10), (200, 8)])
def test_it_fits_the_terminal(width: int, height: int) -> None:
    lines = shown(running(), width, height)
    assert len(lines) <= height
    assert max(len(line) for line in lines) <= width
    text = "\n".join(lines)
    assert "factorise" in text
    if width >= 80 and height >= 20:
        assert "━" in lines[-1]
        for fact in ("55 of 210 tasks", "163.2 GF/s", "0:41 left", "2, 2 threads", "812 MiB", "1:10 of work"):
            assert fact in text


def test_a_terminal_without_such_signs() -> None:
    lines = shown(running(), 80, 24, encoding="ascii")
    assert "\n".join(lines).isascii()
    assert lines[-1].startswith("-" * 15)


def test_a_phase_of_iterations() -> None:
    lines = shown(running(phase="cg, residual 3e-4", tasks_done=12, tasks_total=40), 80, 24)
    text = "\n".join(lines)
    assert "cg: iteration 12 of about 40, residual 3e-4, 0:41 left" in text
    assert "GF/s" not in text
    assert "━" in text
    assert len(shown(Status(phase="prepare"), 80, 24)) == 2


def test_lines_of_phases() -> None:
    assert phase_words("prepare", {"seconds": 0.84, "tasks": 0, "flops_per_second": 0}) == "prepare: 0.8 s"
    factor = {"seconds": 12.3, "tasks": 210, "flops_per_second": 163.2e9}
    assert phase_words("factorise", factor) == "factorise: 210 tasks in 12.3 s, 163.2 GF/s"
    assert phase_words("cg", {"seconds": 200, "tasks": 40, "flops_per_second": 1e9}) == "cg: 40 iterations in 3:20"
    lines = PhaseLines()
    phases = {"start": {"number": 1, "seconds": 2, "times": 1}, "plan": {"number": 0, "seconds": 1, "times": 1}}
    assert list(lines.new(Status(phases=phases))) == ["plan: 1.0 s", "start: 2.0 s"]
    assert list(lines.new(Status(phases=phases))) == []
    again = phases | {"start": {"number": 1, "seconds": 3, "times": 2}}
    assert list(lines.new(Status(phases=again))) == ["start: 3.0 s"]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_run_that_is_driven_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    stream = Terminal()
    status = running()
    with ProgressDisplay(stream) as progress:
        progress.attach(lambda: status)
        progress("factorise", 0, 210, 0.0, 210e9)
        assert isinstance(progress._live, LiveBoard)
        progress._live._live.refresh()
        status.phases = {"factorise": {"number": 0, "seconds": 12.3, "tasks": 210, "times": 1}}
        progress("solve", 0, 10, 0.0, 1e9)
    text = stream.getvalue()
    assert "━" in text
    assert "55 of 210" in text
    assert "factorise: 210 tasks in 12.3 s" in text


def test_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    status = running()
    with ProgressDisplay(stream) as progress:
        progress.attach(lambda: status)
        progress("factorise", 0, 210, 0.0, 210e9)
        status.phases = {"factorise": {"number": 0, "seconds": 12.3, "tasks": 210, "times": 1}}
    assert stream.getvalue() == "factorise: 210 tasks in 12.3 s\n"


def test_a_way_that_was_given_up_and_the_one_after_it() -> None:
    said = "cg mixed, rank 500 stood still (at 1e-5); went on with cg float64, rank 500"
    text = "\n".join(shown(running(phase="cg", given_up=[{"sentence": said}]), 100, 24))
    assert said in text
