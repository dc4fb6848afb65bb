"""Progress: the board of a run on every width, lines that come ten seconds apart, rates from the start of a phase."""

from __future__ import annotations

import io
from typing import Any

import pytest

from dkrr.cli.runs import ProgressDisplay, board
from dkrr.jobs.facts import live_facts
from dkrr.jobs.run_directory import Status


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
    console.print(board(status, live_facts(status), width, height))
    stream.seek(0)
    return stream.read().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (40, 20), (20, 10), (200, 8), (200, 6)])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_it_fits_the_terminal(width: int, height: int, encoding: str) -> None:
    lines = shown(running(given_up=[{"sentence": "went on with cg float64"}]), width, height, encoding)
    assert len(lines) <= height
    assert max(len(line) for line in lines) <= width
    text = "\n".join(lines)
    assert text.isascii() == (encoding == "ascii" or (width, height) == (200, 6))
    assert "factorise" in text
    if width >= 80 and height >= 20:
        assert lines[-1].startswith("━" * 15 if encoding == "utf-8" else "-" * 15)
        facts = ("55 of 210 tasks", "163.2 GF/s", "0:41 left", "2, 2 threads", "812 MiB", "1:10 of work", "went on")
        assert [fact for fact in facts if fact not in text] == []


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
        progress._live.refresh()
        status.phases = {"factorise": {"number": 0, "seconds": 12.3, "tasks": 210, "times": 1}}
        progress("solve", 0, 10, 0.0, 1e9)
    assert [
        fact for fact in ("━", "55 of 210", "factorise: 210 tasks in 12.3 s") if fact not in stream.getvalue()
    ] == []


# --- figures of what has no run: predictions, searches ---------------------------------------------------------------


def test_one_line_in_ten_seconds() -> None:
    now, stream = [100.0], io.StringIO()
    with ProgressDisplay(stream, lambda: now[0]) as progress:
        for second in range(35):
            now[0] = 100.0 + second
            progress("factorise", second, 100, second * 1e9, 100e9)
    assert stream.getvalue().splitlines() == [
        "factorise: 10 of 100 tasks, 1.0 GF/s, 1:30 left",
        "factorise: 20 of 100 tasks, 1.0 GF/s, 1:20 left",
        "factorise: 30 of 100 tasks, 1.0 GF/s, 1:10 left",
    ]
