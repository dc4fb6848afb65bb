"""What happens to a tile that a reader cannot use: it is named, computed again, and counted.

A task that meets such a tile raises :class:`~dkrr.errors.DamagedChunkError`; the driver removes the tile and runs the
graph again. Costs nothing while nothing is damaged.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from dkrr.errors import DamagedChunkError, StoreError
from dkrr.tiles import TileMatrix
from dkrr.tiles.blas import is_finite

__all__ = ["Repairs", "check_finite", "wrong_tile"]

logger = logging.getLogger("dkrr.linalg")

MAX_REPAIRS = 100
MAX_REPAIRS_OF_A_TILE = 3


class Repairs:
    """Counts the tiles that readers found damaged: a device that loses data must not keep a fit busy for ever."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[Any, ...]] = Counter()

    def add(self, damage: DamagedChunkError) -> None:
        """One more, which will be computed again.

        Raises
        ------
        StoreError
            The same tile for the fourth time, or the hundredth of all.
        """
        self.counts[(damage.path, *damage.index)] += 1
        again = self.counts[(damage.path, *damage.index)] > MAX_REPAIRS_OF_A_TILE
        if again or self.counts.total() > MAX_REPAIRS:
            number = f"tile {damage.index} of" if again else f"{MAX_REPAIRS} tiles of"
            raise StoreError(
                f"{number} {damage.path} {'is' if again else 'are'} damaged again and again ({damage.reason})",
                hint="the device loses data; use another store",
            ) from damage
        logger.warning("%s; computing it again", damage.message)


def wrong_tile(matrix: TileMatrix, i: int, j: int, reason: str) -> DamagedChunkError:
    """The error for a tile that passes its checksum and is nevertheless wrong; whoever can computes it again."""
    return DamagedChunkError(
        f"tile ({i}, {j}) of {matrix.location} is damaged ({reason})",
        hint="delete it and start the job again",
        path=matrix.location,
        index=(i, j),
        reason=reason,
    )


def check_finite(matrix: TileMatrix, keys: Iterable[tuple[int, int]]) -> None:
    """Look for the tile that made a result NaN: a tile is finite when it is written, and memory may fail after that.

    Raises
    ------
    DamagedChunkError
        One of the tiles is not finite.
    """
    for i, j in keys:
        if not is_finite(matrix.read(i, j)):
            raise wrong_tile(matrix, i, j, "holds a value that is not finite")
