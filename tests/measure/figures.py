"""Figures that tests measure, and the table at the end of the session.

DKRR_MEASURE_SCALE (1 unless set) multiplies the number of rows of every measure, to try the tests themselves. At
another scale than 1 a bar that is promised at full size is shown and not judged.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest

__all__ = ["FIGURES", "SCALE", "Figure", "Judge", "scaled", "write_table"]

SCALE = float(os.environ.get("DKRR_MEASURE_SCALE", "1"))


def scaled(n: int, least: int = 256) -> int:
    """A number of rows at this session's scale."""
    return n if SCALE == 1 else max(least, round(n * SCALE))


@dataclass(frozen=True)
class Figure:
    """One measured figure against its bar."""

    line: str
    figure: str
    bar: str
    verdict: str


FIGURES: pytest.StashKey[list[Figure]] = pytest.StashKey()


@dataclass
class Judge:
    """Records a figure, then asserts its bar."""

    figures: list[Figure] = field(default_factory=list)

    def __call__(self, line: str, figure: str, bar: str, holds: bool, *, at_full_size: bool = False) -> None:
        """Record ``figure`` under ``line``; ``holds`` must be true.

        ``at_full_size``: the bar is a promise about the full size and is judged there only.
        """
        judged = SCALE == 1 or not at_full_size
        verdict = ("pass" if holds else "FAIL") if judged else f"not judged at scale {SCALE:g}"
        self.figures.append(Figure(line, figure, bar, verdict))
        print(f"{line}: {figure} (bar: {bar}): {verdict}")
        assert holds or not judged, f"{line}: {figure}; bar: {bar}"


def write_table(reporter: Any, figures: list[Figure]) -> None:
    """Write the figures as a table to pytest's terminal."""
    rows = [("", "line", "figure", "bar"), *((f.verdict, f.line, f.figure, f.bar) for f in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        reporter.write_line("  ".join([*cells, row[3]]).rstrip())
