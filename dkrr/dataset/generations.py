"""Generations: which append brought which rows, and the proof of every prefix.

Each append is a *generation*, a record that stays with its rows. Generations are numbered from 1 on and a number is
never used twice, also not after a generation was dropped; the same holds for the numbers of rows, so that what was
decided about a row by its number (whether it is held out) stays decided.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Counters", "Generation", "pack", "read_generations", "unpack"]

Mask = NDArray[np.bool_]


def pack(mask: Mask) -> str:
    """A mask as text."""
    return base64.b64encode(np.packbits(mask).tobytes()).decode()


def unpack(text: str, num_rows: int | None = None) -> Mask:
    """The inverse of :func:`pack`; without ``num_rows`` with up to seven False more."""
    bits = np.frombuffer(base64.b64decode(text), dtype=np.uint8)
    return np.unpackbits(bits, count=num_rows).astype(bool)


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
    dropped
        Which rows of the source were left out for missing values (:func:`pack`), if any were. They have numbers, too,
        so that a row is held out or not whatever is missing in others.
    """

    number: int
    n: int
    num_rows: int
    digest: str
    first_row: int
    label: str | None = None
    dropped: str | None = None

    @cached_property
    def kept(self) -> Mask:
        """Of all rows that have numbers from ``first_row`` on, which are there."""
        if self.dropped is None:
            return np.ones(self.num_rows, dtype=bool)
        dropped = unpack(self.dropped)
        return ~dropped[: self.num_rows + np.count_nonzero(dropped)]

    @property
    def num_dropped(self) -> int:
        """Rows of the source that were left out for missing values."""
        return 0 if self.dropped is None else len(self.kept) - self.num_rows

    @property
    def start(self) -> int:
        """Position of its first row in the data set."""
        return self.n - self.num_rows

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {name: value for name, value in asdict(self).items() if name != "dropped" or value is not None}


@dataclass(frozen=True, kw_only=True)
class Counters:
    """The numbers that the next generation and its first row get."""

    generation: int
    row: int


def read_generations(values: Iterable[dict[str, Any]]) -> tuple[Generation, ...]:
    """From JSON."""
    return tuple(Generation(**value) for value in values)
