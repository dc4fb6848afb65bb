"""Scratch beside a factor, there until its rows are whole: partial sums of columns, and strips of new rows.

It is named after the factor, so that an attempt finds what an earlier one left; what that one used and this one has no
use for (strips where there is one thread now, say) is removed all the same when the factor is whole.
"""

from __future__ import annotations

from typing import Literal

from dkrr.store.files import join, name_of, parent_of, remove_array
from dkrr.tiles import TileMatrix

__all__ = ["factor_of_scratch", "remove_scratch", "scratch_location"]

Kind = Literal["sums", "strips"]
_KINDS: tuple[Kind, ...] = ("sums", "strips")


def scratch_location(factor: TileMatrix, kind: Kind) -> str:
    """Where it is."""
    location = factor.array.store
    return join(parent_of(location), f"{name_of(location).removesuffix('.zarr')}-{kind}.zarr")


def remove_scratch(factor: TileMatrix) -> None:
    """Remove all that is beside a factor whose rows are whole."""
    for kind in _KINDS:
        remove_array(scratch_location(factor, kind))


def factor_of_scratch(name: str) -> str | None:
    """Name of the factor that something in the folder of factors is scratch of; None for what is not scratch."""
    for kind in _KINDS:
        if name.endswith(f"-{kind}.zarr"):
            return f"{name.removesuffix(f'-{kind}.zarr')}.zarr"
    return None
