"""Generations: which append brought which rows, and the proof of every prefix.

Each append is a *generation*, a record that stays with its rows. Generations are numbered from 1 on and a number is
never used twice, also not after a generation was dropped; the same holds for the numbers of rows, so that what was
decided about a row by its number (whether it is held out) stays decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Counters", "Generation", "read_generations"]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The rows of one append.

    Parameters
    ----------
    number
        1 for the first; never used twice in a data set.
    n
        Rows of the data set up to and including this generation.
    num_rows
        Rows of this generation.
    digest
        Digest of the first ``n`` rows of X.
    first_row
        Number of its first row, counted over all rows that the data set ever had.
    label
        What the append was called, if anything.
    """

    number: int
    n: int
    num_rows: int
    digest: str
    first_row: int
    label: str | None = None

    @property
    def start(self) -> int:
        """Position of its first row in the data set."""
        return self.n - self.num_rows

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Counters:
    """The numbers that the next generation and its first row get."""

    generation: int
    row: int

    @classmethod
    def after(cls, generations: Sequence[Generation]) -> Counters:
        """Behind the last of them, where nothing was ever dropped from the end."""
        last = generations[-1] if generations else None
        return cls(generation=1 if last is None else last.number + 1, row=0 if last is None else _end(last))


def _end(generation: Generation) -> int:
    return generation.first_row + generation.num_rows


def read_generations(values: Iterable[Any]) -> tuple[Generation, ...]:
    """From JSON; a pair (n, digest) is what data sets held before generations had numbers."""
    found: list[Generation] = []
    for value in values:
        if isinstance(value, dict):
            found.append(Generation(**value))
            continue
        n, before = int(value[0]), found[-1].n if found else 0
        found.append(
            Generation(number=len(found) + 1, n=n, num_rows=n - before, digest=str(value[1]), first_row=before)
        )
    return tuple(found)
