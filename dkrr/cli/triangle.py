"""The tiles of a triangular matrix as text: done, running, to do, in as many rows and columns as a terminal has.

A tile is two characters wide and one row high, about a square. Where there are more tiles than rows, a cell stands for
a block of them, and is shaded by how many are done. What runs differs by its sign and not only by its colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["ASCII", "BLOCKS", "Signs", "coarser", "triangle_lines"]

FULL = 9


@dataclass(frozen=True)
class Signs:
    """Two characters each: nothing done, three shades of some, all done, something running."""

    todo: str
    some: tuple[str, str, str]
    done: str
    running: str

    def of(self, share: int, is_running: bool) -> str:
        """The sign of a cell whose share of done tiles is 0 .. 9."""
        if is_running:
            return self.running
        if share >= FULL:
            return self.done
        return self.some[min(2, (share - 1) // 3)] if share > 0 else self.todo


BLOCKS = Signs("··", ("░░", "▒▒", "▓▓"), "██", "[]")
ASCII = Signs(". ", (": ", "+ ", "x "), "# ", "[]")


def coarser(tiles: Mapping[str, Any], rows: int) -> tuple[list[list[int]], set[tuple[int, int]]]:
    """Shares 0 .. 9 of the cells, row by row, on at most ``rows`` rows, and which cells have a running tile.

    Parameters
    ----------
    tiles
        The map of a status (:mod:`dkrr.jobs.runs.tilemap`).
    """
    cells, done = int(tiles["cells"]), str(tiles["done"])
    running = {int(number) for number in tiles["running"]}
    edge = -(-cells // max(1, rows))
    side = -(-cells // edge)
    sums = [[0] * (i + 1) for i in range(side)]
    counts = [[0] * (i + 1) for i in range(side)]
    lit = set()
    number = 0
    for i in range(cells):
        for j in range(i + 1):
            row, column = i // edge, j // edge
            sums[row][column] += int(done[number])
            counts[row][column] += 1
            if number in running:
                lit.add((row, column))
            number += 1
    return [[_share(sums[i][j], counts[i][j]) for j in range(i + 1)] for i in range(side)], lit


def _share(total: int, count: int) -> int:
    """Full only when all of them are, and not empty when one of them has begun."""
    if total == FULL * count:
        return FULL
    return min(FULL - 1, max(1 if total else 0, total // count))


def triangle_lines(tiles: Mapping[str, Any], rows: int, signs: Signs = BLOCKS) -> list[Sequence[tuple[str, str]]]:
    """Lines of ``(sign, kind)``, kind being "done", "some", "running" or "todo"."""
    shares, lit = coarser(tiles, rows)
    lines: list[Sequence[tuple[str, str]]] = []
    for i, row in enumerate(shares):
        line = []
        for j, share in enumerate(row):
            runs = (i, j) in lit
            kind = "running" if runs else "done" if share >= FULL else "some" if share else "todo"
            line.append((signs.of(share, runs), kind))
        lines.append(line)
    return lines
