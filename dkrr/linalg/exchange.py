"""What a product passes between driver and tasks: blocks of V one way, partial results the other.

Through the store when tasks run elsewhere, as whole checksummed chunks in a folder of the product's own: a worker that
was given up and comes back can only write into the folder of a product that is over. In memory when tasks run here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import DamagedChunkError
from dkrr.store.chunks import ChunkArray
from dkrr.store.files import place, remove_array
from dkrr.tiles import TileGrid

__all__ = ["Exchange", "Layout", "MemoryExchange", "StoreExchange"]

FloatMatrix = NDArray[np.float64]
Key = tuple[int, int, int]


@dataclass(frozen=True)
class Layout:
    """Super-blocks of rows and panels of columns. The key (i, j, p) is the pair i >= j with panel p."""

    blocks: TileGrid
    panels: tuple[slice, ...]

    def width(self, panel: int) -> int:
        """Columns of a panel."""
        columns = self.panels[panel]
        return int(columns.stop - columns.start)

    def room(self, key: Key) -> FloatMatrix:
        """Zeros for both results of a pair: those of i, then (from row B on) those of j."""
        i, j, panel = key
        return np.zeros(((1 + (i != j)) * self.blocks.tile_size, self.width(panel)))

    def halves(self, key: Key, part: FloatMatrix) -> tuple[FloatMatrix, FloatMatrix]:
        """The rows of i and the rows of j; the same ones when i = j."""
        i, j, _ = key
        start = (i != j) * self.blocks.tile_size
        return part[: self.blocks.rows(i)], part[start : start + self.blocks.rows(j)]


class Exchange(Protocol):
    """The two ways."""

    @property
    def layout(self) -> Layout: ...

    def vector(self, i: int, panel: int) -> FloatMatrix:
        """Block i of a panel of V, C-contiguous."""
        ...

    def has(self, key: Key) -> bool:
        """Whether the results of a pair are there."""
        ...

    def put(self, key: Key, part: FloatMatrix) -> None:
        """Hand over the results of a pair."""
        ...

    def get(self, key: Key) -> FloatMatrix:
        """The results of a pair; ``DamagedChunkError`` when they are not there as they were written."""
        ...

    def discard(self, key: Key) -> None:
        """The results of a pair have been used."""
        ...


@dataclass(frozen=True)
class MemoryExchange:
    """For tasks of this process."""

    layout: Layout
    v: FloatMatrix
    parts: dict[Key, FloatMatrix] = field(default_factory=dict)

    def vector(self, i: int, panel: int) -> FloatMatrix:
        return np.ascontiguousarray(self.v[self.layout.blocks.span(i), self.layout.panels[panel]])

    def has(self, key: Key) -> bool:
        return key in self.parts

    def put(self, key: Key, part: FloatMatrix) -> None:
        self.parts[key] = part

    def get(self, key: Key) -> FloatMatrix:
        return self.parts[key]

    def discard(self, key: Key) -> None:
        self.parts.pop(key, None)


@dataclass(frozen=True)
class StoreExchange:
    """For tasks anywhere: one chunk a block of V, one chunk a pair.

    Parameters
    ----------
    store
        Folder or URL.
    path
        Below it, this product's own.
    """

    layout: Layout
    store: Any
    path: str

    def write_vector(self, i: int, panel: int, v: FloatMatrix) -> None:
        """Write block i of a panel of V (n, t)."""
        block = self.layout.room((i, i, panel))
        block[: self.layout.blocks.rows(i)] = v[self.layout.blocks.span(i), self.layout.panels[panel]]
        self._vectors(panel).write((i,), block.reshape(-1))

    def vector(self, i: int, panel: int) -> FloatMatrix:
        block = self._vectors(panel).read((i,)).reshape(-1, self.layout.width(panel))
        # a copy: nothing stays mapped, and compiled kernels meet writable arrays only
        return np.array(block[: self.layout.blocks.rows(i)], dtype=np.float64)

    def has(self, key: Key) -> bool:
        array, index = self._parts(key)
        return array.is_valid(index)

    def put(self, key: Key, part: FloatMatrix) -> None:
        array, index = self._parts(key)
        array.write(index, part.reshape(-1))

    def get(self, key: Key) -> FloatMatrix:
        array, index = self._parts(key)
        part: Any = array.read(index).reshape(-1, self.layout.width(key[2]))
        return part  # type: ignore[no-any-return]

    def discard(self, key: Key) -> None:
        array, index = self._parts(key)
        array.delete(index)

    def repair(self, damage: DamagedChunkError, v: FloatMatrix) -> bool:
        """Write a block of V again, or remove the results of a pair; whether the chunk is one of these."""
        for panel in range(len(self.layout.panels)):
            if damage.path == self._vectors(panel).location:
                self.write_vector(damage.index[0], panel, v)
                return True
            for key in ((0, 0, panel), (1, 0, panel)):
                array, _ = self._parts(key)
                if damage.path == array.location:
                    array.delete(damage.index)
                    return True
        return False

    def remove(self) -> None:
        """Remove everything of this product."""
        remove_array(place(self.store, self.path))

    def _vectors(self, panel: int) -> ChunkArray:
        blocks = self.layout.blocks
        return self._array(f"v{panel}", blocks.num_tiles, blocks.tile_size * self.layout.width(panel))

    def _parts(self, key: Key) -> tuple[ChunkArray, tuple[int]]:
        i, j, panel = key
        blocks = self.layout.blocks
        entries = blocks.tile_size * self.layout.width(panel)
        if i == j:
            return self._array(f"d{panel}", blocks.num_tiles, entries), (i,)
        pairs = blocks.num_lower - blocks.num_tiles
        return self._array(f"p{panel}", pairs, 2 * entries), (i * (i - 1) // 2 + j,)

    def _array(self, name: str, num_chunks: int, entries: int) -> ChunkArray:
        # nobody but the tasks of this product reads it, and they know its shape: no metadata on disk
        return ChunkArray(self.store, f"{self.path}/{name}", (num_chunks * entries,), (entries,), "float64")
