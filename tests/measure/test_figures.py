"""The table of figures: a bar that does not hold fails its test and is shown."""

from __future__ import annotations

import pytest

from tests.measure import figures
from tests.measure.figures import Figure, Judge, scaled, write_table


class Reporter:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def write_line(self, line: str) -> None:
        self.lines.append(line)


def test_a_bar_that_does_not_hold_fails_and_is_recorded() -> None:
    judge = Judge()
    judge("speed", "0.40", "at most 0.45", True)
    with pytest.raises(AssertionError, match=r"memory: 2 GiB; bar: 1 GiB"):
        judge("memory", "2 GiB", "1 GiB", False)
    assert [figure.verdict for figure in judge.figures] == ["pass", "FAIL"]


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "FAIL"), (0.1, "not judged at scale 0.1")])
def test_promises_about_the_full_size_are_judged_there(
    monkeypatch: pytest.MonkeyPatch, scale: float, verdict: str
) -> None:
    monkeypatch.setattr(figures, "SCALE", scale)
    judge = Judge()
    try:
        judge("speed", "0.60", "at most 0.45", False, at_full_size=True)
    except AssertionError:
        assert scale == 1
    assert [figure.verdict for figure in judge.figures] == [verdict]
    assert scaled(20_480) == (20_480 if scale == 1 else 2048)


def test_the_table_shows_every_figure() -> None:
    reporter = Reporter()
    write_table(reporter, [Figure("speed", "0.40", "at most 0.45", "pass"), Figure("memory", "2 GiB", "1 GiB", "FAIL")])
    assert reporter.lines[1:] == ["pass  speed   0.40    at most 0.45", "FAIL  memory  2 GiB   1 GiB"]
