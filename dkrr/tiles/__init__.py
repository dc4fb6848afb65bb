"""Tiles: integer arithmetic, storage and typed BLAS. Knows no kernel, no solver and no scheduler."""

from dkrr.tiles.store import MAX_TILE_SIZE, TileGrid, TileMatrix

__all__ = ["MAX_TILE_SIZE", "TileGrid", "TileMatrix"]
