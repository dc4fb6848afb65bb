"""Progress: rates count from the start of a phase, lines come ten seconds apart, a terminal gets a bar."""

from __future__ import annotations

import io

import pytest

from dkrr.cli.progress import ProgressDisplay


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_one_line_in_ten_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    with ProgressDisplay(stream, clock) as progress:
        for second in range(35):
            clock.now = 100.0 + second
            progress("factorise", second, 100, second * 1e9, 100e9)
    assert stream.getvalue().splitlines() == [
        "factorise: 10 of 100 tasks, 1.0 GF/s, 1:30 left",
        "factorise: 20 of 100 tasks, 1.0 GF/s, 1:20 left",
        "factorise: 30 of 100 tasks, 1.0 GF/s, 1:10 left",
    ]


def test_a_resumed_phase_counts_only_what_it_does_itself() -> None:
    clock, stream = Clock(), io.StringIO()
    with ProgressDisplay(stream, clock) as progress:
        progress("factorise", 90, 100, 90e9, 100e9)
        clock.now += 10
        progress("factorise", 95, 100, 95e9, 100e9)
    assert stream.getvalue() == "factorise: 95 of 100 tasks, 0.5 GF/s, 0:10 left\n"


def test_a_phase_without_flops_counts_tasks() -> None:
    clock, stream = Clock(), io.StringIO()
    with ProgressDisplay(stream, clock) as progress:
        progress("predict", 0, 8, 0.0, 0.0)
        clock.now += 20
        progress("predict", 2, 8, 0.0, 0.0)
    assert stream.getvalue() == "predict: 2 of 8 tasks, 1:00 left\n"


@pytest.mark.parametrize("second", ["factorise", "gram"])
def test_a_phase_that_begins_is_measured_from_there(second: str) -> None:
    clock, stream = Clock(), io.StringIO()
    with ProgressDisplay(stream, clock) as progress:
        progress("gram", 0, 10, 0.0, 10e9)
        clock.now += 10
        progress("gram", 10, 10, 10e9, 10e9)
        clock.now += 10
        progress(second, 0, 4, 0.0, 4e9)
        clock.now += 10
        progress(second, 2, 4, 2e9, 4e9)
    unit = "tiles" if second == "gram" else "tasks"
    assert stream.getvalue().splitlines() == [
        "gram: 10 of 10 tiles, 1.0 GF/s, 0:00 left",
        f"{second}: 0 of 4 {unit}",
        f"{second}: 2 of 4 {unit}, 0.2 GF/s, 0:10 left",
    ]


def test_hours_are_written_as_hours() -> None:
    clock, stream = Clock(), io.StringIO()
    with ProgressDisplay(stream, clock) as progress:
        progress("gram", 0, 1000, 0.0, 1e12)
        clock.now += 10
        progress("gram", 1, 1000, 1e9, 1e12)
    assert stream.getvalue().endswith("2:46:30 left\n")


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    clock, stream = Clock(), Terminal()
    with ProgressDisplay(stream, clock) as progress:
        progress("factorise", 0, 10, 0.0, 10e9)
        clock.now += 1
        progress("factorise", 5, 10, 5e9, 10e9)
    text = stream.getvalue()
    assert "factorise: 5 of 10 tasks, 5.0 GF/s, 0:01 left" in text
    assert "━" in text


def test_a_terminal_that_cannot_draw_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    clock, stream = Clock(), Terminal()
    with ProgressDisplay(stream, clock) as progress:
        progress("factorise", 0, 10, 0.0, 10e9)
        clock.now += 10
        progress("factorise", 5, 10, 5e9, 10e9)
    assert stream.getvalue() == "factorise: 5 of 10 tasks, 0.5 GF/s, 0:10 left\n"


def test_iterations_are_counted_as_such() -> None:
    clock, stream = Clock(), io.StringIO()
    with ProgressDisplay(stream, clock) as progress:
        progress("cg", 0, 1000, 0.0, 1000e9)
        clock.now += 10
        progress("cg", 5, 45, 5e9, 45e9)
        clock.now += 10
        progress("cg, worst residual 3.1e-04", 10, 40, 10e9, 40e9)
    assert stream.getvalue().splitlines() == [
        "cg: iteration 5 of about 45, 1:20 left",
        "cg: iteration 10 of about 40, worst residual 3.1e-04, 1:00 left",
    ]
