"""Tile edges, where Gram tiles come from, and the memory of a task: what n, d and a worker's memory decide."""

from __future__ import annotations

from typing import Literal

from dkrr.errors import ParameterError
from dkrr.kernels import Kernel

# A worker's interpreter with NumPy, SciPy and distributed, measured (peak, before any task): 92 to 105 MiB; and with
# Numba, which it loads for compiled products: 194 to 206, and up to 262 where its libraries were just installed, for
# more of their pages are mapped there.
BARE_BYTES = 110 * 2**20
BASELINE_BYTES = 260 * 2**20
TILES_IN_MEMORY = 5
# accumulator and padded tile, which wait for the next tile
TILES_KEPT = 2
# of a product of compiled code, for the residual: two blocks of rows, packed, and their sums
RESIDUAL_BYTES = 8 * 2**20


def tile_bytes(tile_size: int, num_features: int, itemsize: int = 8) -> int:
    """Memory of a factorisation task besides the interpreter's: 5 b^2 itemsize + 3 b d 8.

    One accumulator, two mapped operands, one scratch tile, one padded tile; two row blocks and their copy.
    """
    return TILES_IN_MEMORY * tile_size**2 * itemsize + 3 * tile_size * num_features * 8


def task_bytes(tile_size: int, num_features: int, itemsize: int = 8) -> int:
    """Peak memory of a worker that factorises and evaluates the residual, with 3 b d 8 bytes more than the larger of

    110 MiB + 5 b^2 itemsize              the factor, see :func:`tile_bytes`
    260 MiB + 2 b^2 itemsize + 8 MiB      the residual by compiled code, beside what is kept between tiles
    """
    residual = BASELINE_BYTES + RESIDUAL_BYTES + TILES_KEPT * tile_size**2 * itemsize
    tiles = tile_bytes(tile_size, num_features, itemsize)
    return max(BARE_BYTES + tiles, residual + 3 * tile_size * num_features * 8)


def choose_tile_size(
    n: int, num_features: int, memory_limit_bytes: int | None, itemsize: int = 8, num_threads: int = 2
) -> int:
    """b = n / max(10, 2 threads + 6) rounded up to 128, in 256 .. 2,048, at most what 80 % of a worker's memory holds.

    Beyond 81,920 rows the edge grows with n / 40, up to 4,096, so that operands are not read more often.

    Ten tiles a side keep two workers busy to the end when the last sums are split (97 % measured), and large tiles cost
    less: at n = 20,480 on two workers edges of 1,024, 1,280 and 2,048 took 52, 48 and 44 CPU seconds.

    Raises
    ------
    ParameterError
        Not even tiles of 128 rows fit.
    """
    sides = max(10, 2 * num_threads + 6)
    b = max(256, min(_rounded(n / sides), 2048), min(_rounded(n / 40) if num_threads <= 16 else 0, 4096))
    limit = None if memory_limit_bytes is None else 0.8 * memory_limit_bytes
    while limit is not None and b > 128 and task_bytes(b, num_features, itemsize) > limit:
        b -= 128
    if limit is not None and task_bytes(b, num_features, itemsize) > limit:
        needed = task_bytes(b, num_features, itemsize)
        raise ParameterError(
            f"a worker of {(memory_limit_bytes or 0) >> 20:,} MiB cannot hold a task with tiles of {b} rows and "
            f"{num_features:,} features, which takes {needed >> 20:,} MiB, {BASELINE_BYTES >> 20} MiB of it Python and "
            f"its libraries; {-int(-1.25 * needed // 2**20):,} MiB would do, of which a fifth is kept free",
            hint="raise memory_limit",
        )
    return b


def _rounded(edge: float) -> int:
    """Up to a multiple of 128."""
    return -int(-edge // 128) * 128


def choose_gram(kernel: Kernel | None, num_alphas: int) -> Literal["stored", "on_the_fly"]:
    """Where "auto" takes Gram tiles from: stored for callables, precomputed matrices, and several alphas."""
    if kernel is None or num_alphas > 1 or kernel.name in ("function", "sklearn"):
        return "stored"
    return "on_the_fly"
