"""What a fit costs: flops, kernel entries and bytes, and the seconds they take on a machine whose rates are known.

You need it to compare solvers before any of them runs. Every formula stands in the docstring of its function, in the
letters n rows, d features, t targets, b tile edge, N tiles a side, r rank, k iterations. Rates are those of all workers
together, so no formula divides by the number of workers.

Cost: none worth naming; it is arithmetic.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from dkrr.kernels import Kernel
from dkrr.linalg.lowrank.panels import low_rank_task_bytes, panel_bytes
from dkrr.linalg.lowrank.preconditioner import HELD_BYTES
from dkrr.linalg.matmul import product_task_bytes
from dkrr.linalg.products import BLOCK_ROWS, entry_nanoseconds, is_compiled, super_blocks
from dkrr.linalg.sizes import BARE_BYTES, BASELINE_BYTES, task_bytes
from dkrr.tiles import TileGrid

__all__ = [
    "CLIENT_BYTES",
    "Machine",
    "apply_seconds",
    "cg_client",
    "cg_disk",
    "cg_memory",
    "cg_seconds",
    "cholesky_disk",
    "cholesky_seconds",
    "direct_client",
    "factorise_seconds",
    "gram_seconds",
    "nystrom_seconds",
    "pass_seconds",
    "preconditioner_seconds",
    "primal_seconds",
    "sweep_seconds",
]

# a left-looking factorisation against gemm alone: short sums, triangles, and the end, when tiles are few
CHOLESKY_EFFICIENCY = 0.8
# tall products with F (n, r) against square ones
TALL_EFFICIENCY = 0.5
TRUE_RESIDUAL_EVERY = 50
# arrays (n, t) that conjugate gradients hold in the driver
DRIVER_VECTORS = 10
# this process with what a command imports, Numba, and a sample of the rows on which solvers were tried, measured (peak)
CLIENT_BYTES = 380 * 2**20
# bytes of explicit features that one core makes in a second
FEATURE_RATE = 4e9
# vector arithmetic of conjugate gradients in the driver
DRIVER_BYTES_PER_SECOND = 2e9
# until a disk has confirmed one file
SYNC_SECONDS = 0.03


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of all workers together, for one kernel and number of features.

    Parameters
    ----------
    threads
        Tasks that run at once.
    gemm_float64, gemm_float32
        Flops a second while all workers are busy.
    block_entry
        Seconds for one entry of a Gram tile.
    product_float64, product_float32
        Seconds for one entry that a product evaluates and uses, with one column.
    column_float64, column_float32
        Seconds for each further column of such an entry.
    exact_factor
        What a product with sums of absolute entries, for the norm of the matrix, costs against one without.
    disk_write, disk_read
        Bytes a second.
    mapped_read
        Bytes a second of files that are in the page cache.
    task_seconds
        What one task costs beside its work, divided by the tasks that run at once.
    round_seconds
        What a graph of tasks costs beside them: until the first begins and after the last has ended.
    start_seconds
        Until the workers are there and have imported what their first task needs.
    first_product_seconds
        Until they have loaded the compiled code of their first product.
    end_seconds
        Until the model is written and the workers are gone.
    cache_bytes
        Memory in which files stay after they were written.
    syrk_share, trsm_share, potrf_share
        Rates of the other routines on tiles against that of gemm.
    write_memory
        Bytes a second that one worker writes to files in the page cache, checksum included.
    """

    threads: int
    gemm_float64: float
    gemm_float32: float
    block_entry: float
    product_float64: float
    product_float32: float
    column_float64: float
    column_float32: float
    exact_factor: float
    disk_write: float
    disk_read: float
    mapped_read: float
    task_seconds: float
    round_seconds: float
    start_seconds: float
    first_product_seconds: float
    end_seconds: float
    cache_bytes: float
    syrk_share: float = 0.9
    trsm_share: float = 0.85
    potrf_share: float = 0.6
    write_memory: float = 2e9

    def gemm(self, precision: str) -> float:
        """Flops a second in a precision."""
        return self.gemm_float64 if precision == "float64" else self.gemm_float32

    def entry(self, precision: str, num_columns: float = 1) -> float:
        """Seconds for one evaluated entry of a product with ``num_columns`` columns, used in both triangles."""
        if precision == "float64":
            return self.product_float64 + self.column_float64 * (num_columns - 1)
        return self.product_float32 + self.column_float32 * (num_columns - 1)

    def read(self, num_bytes: float, working_set: float) -> float:
        """Seconds to read bytes of files that need ``working_set`` bytes of cache to stay in memory."""
        missing = 0.0 if working_set <= self.cache_bytes else 1 - self.cache_bytes / working_set
        return num_bytes * (1 / self.mapped_read + missing / self.disk_read)

    def write(self, num_bytes: float, while_busy: float = 0.0) -> float:
        """Seconds to wait for bytes to reach the disk, when it could begin ``while_busy`` seconds earlier."""
        return max(0.0, num_bytes / self.disk_write - while_busy)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def itemsize(precision: str) -> int:
    """Bytes of a factor's number: mixed precision has a float32 factor."""
    return 8 if precision == "float64" else 4


def tiles_bytes(n: int, b: int, precision: str) -> int:
    """N (N + 1) / 2 tiles of b^2 numbers and a checksum."""
    return TileGrid(n, b).num_lower * (b * b * itemsize(precision) + 4)


def gram_seconds(machine: Machine, n: int, b: int) -> float:
    """n^2 / 2 entries evaluated, 4 n (n + b) bytes written."""
    busy = n * n / 2 * machine.block_entry + TileGrid(n, b).num_lower * machine.task_seconds
    return busy + machine.write(tiles_bytes(n, b, "float64"), busy)


def factorise_seconds(machine: Machine, n: int, b: int, precision: str, gram: str) -> float:
    """n^3 / 3 flops at 0.8 of the gemm rate, n^3 / (3 b) numbers read, n^2 / 2 entries made or read, tiles written."""
    work = precision if precision == "float64" else "float32"
    size = tiles_bytes(n, b, precision)
    flops = n**3 / 3 / (machine.gemm(work) * CHOLESKY_EFFICIENCY)
    reads = machine.read(n**3 / (3 * b) * itemsize(precision), size)
    entries = machine.read(4 * n * n, size + 4 * n * n) if gram == "stored" else n * n / 2 * machine.block_entry
    busy = flops + reads + entries + TileGrid(n, b).num_lower * machine.task_seconds
    return busy + machine.write(size, busy)


def sweep_seconds(machine: Machine, n: int, b: int, t: int, precision: str) -> float:
    """L z = c and L^T u = z: the factor's bytes twice, 2 n^2 t flops, N^2 tasks."""
    size = tiles_bytes(n, b, precision)
    work = precision if precision == "float64" else "float32"
    side = TileGrid(n, b).num_tiles
    flops = 2.0 * n * n * t / machine.gemm(work)
    return machine.read(2 * size, size) + flops + 2 * side * machine.task_seconds + 2 * machine.round_seconds


def pass_seconds(machine: Machine, n: int, t: int, precision: str) -> float:
    """One product K V: n^2 / 2 entries, each used twice for t columns, and some 60 tasks a worker at most."""
    busy = n * n / 2 * machine.entry(precision, t)
    tasks = min(60.0 * machine.threads, max(4.0 * machine.threads, busy * machine.threads / 0.1))
    return busy + tasks * machine.task_seconds + machine.round_seconds


def cholesky_seconds(
    machine: Machine,
    n: int,
    b: int,
    t: int,
    *,
    precision: str,
    gram: str,
    num_alphas: int = 1,
    iterations: float = 0.0,
) -> dict[str, float]:
    """One factor, one solve and one residual for each distinct alpha; mixed: ``iterations`` around each factor.

    An iteration of the mixed solver is one float64 product and one pair of sweeps with the float32 factor.
    """
    each = max(1.0, t / num_alphas)
    seconds = {"start": machine.start_seconds}
    if gram == "stored":
        seconds["gram"] = gram_seconds(machine, n, b)
    seconds["factorise"] = num_alphas * factorise_seconds(machine, n, b, precision, gram)
    sweep = sweep_seconds(machine, n, b, ceil(each), precision)
    product = pass_seconds(machine, n, ceil(each), "float64")
    exact = machine.exact_factor * product
    seconds["end"] = machine.end_seconds
    if precision == "mixed":
        seconds["precondition"] = num_alphas * iterations * sweep
        seconds["multiply"] = num_alphas * (iterations * product + exact) + machine.first_product_seconds
    else:
        seconds["solve"] = num_alphas * sweep
        seconds["residual"] = num_alphas * exact + machine.first_product_seconds
    return seconds


def preconditioner_seconds(machine: Machine, n: int, r: int) -> float:
    """n r entries; 2 n r^2 flops for panels and F^T F, r^3 / 3; 8 n r bytes written, waited for, read r / 256 times.

    The panels are short, so that about 4 r / 256 graphs of tasks are run one after the other, each with its sync.
    """
    if not r:
        return 0.0
    rounds = ceil(r / 256)
    flops = 2.0 * n * r * r / (machine.gemm_float64 * TALL_EFFICIENCY)
    flops += r**3 / 3 * machine.threads / machine.gemm_float64
    size = 8.0 * n * r
    moved = machine.read(size * rounds / 2, size) + machine.write(size)
    return n * r * machine.block_entry + flops + moved + 4 * rounds * (machine.round_seconds + SYNC_SECONDS)


def apply_seconds(machine: Machine, n: int, t: int, r: int) -> float:
    """The preconditioner once: F read twice, 16 n r bytes, 4 n r t flops at half the gemm rate; two rounds of tasks.

    An F of at most 256 MiB is held by the driver instead, which works alone and without rounds. A dozen passes over
    vectors in the driver's memory are counted here too.
    """
    vectors = 12 * 8.0 * n * t / DRIVER_BYTES_PER_SECOND
    if not r:
        return vectors
    flops = 4.0 * n * r * t / (machine.gemm_float64 * TALL_EFFICIENCY)
    reads = machine.read(16.0 * n * r, 8.0 * n * r)
    if 8 * n * r <= HELD_BYTES:
        return machine.threads * (reads + flops) + vectors
    return reads + flops + 2 * machine.round_seconds + vectors


def cg_seconds(
    machine: Machine,
    n: int,
    b: int,
    t: int,
    *,
    precision: str,
    gram: str,
    rank: int,
    iterations: float,
    refinements: int = 1,
) -> dict[str, float]:
    """Preconditioner, ``iterations`` for all targets and alphas together, true residuals every 50 and at the end.

    With a stored Gram matrix a pass reads 4 n (n + b) bytes instead of evaluating entries. Products ("multiply") that
    are not the float64 ones of the kernel need those besides ("residual"), float32 ones at least ``refinements``.
    """
    seconds = {"start": machine.start_seconds}
    if gram == "stored":
        seconds["gram"] = gram_seconds(machine, n, b)
    if rank:
        seconds["precondition"] = preconditioner_seconds(machine, n, rank)
    exact = pass_seconds(machine, n, t, "float64")
    checks = 1 + iterations // TRUE_RESIDUAL_EVERY
    if gram == "stored":
        size = tiles_bytes(n, b, "float64")
        flops = 2.0 * n * n * t / (machine.gemm_float64 * TALL_EFFICIENCY)
        seconds["multiply"] = iterations * (machine.read(size, size) + flops + machine.round_seconds)
    elif precision == "mixed":
        seconds["multiply"] = iterations * pass_seconds(machine, n, t, "float32")
        checks = max(checks, min(refinements, iterations))
    else:
        seconds["multiply"] = (iterations + checks) * exact
    seconds["apply"] = iterations * apply_seconds(machine, n, t, rank)
    if gram == "stored" or precision == "mixed":
        seconds["residual"] = checks * exact
    seconds["multiply"] += machine.first_product_seconds
    seconds["end"] = machine.end_seconds
    return seconds


def nystrom_seconds(machine: Machine, n: int, m: int, t: int, *, precision: str, iterations: float) -> dict[str, float]:
    """n m entries a pass, each used twice; ``iterations`` passes and three more; 5 m^3 flops for factors of m x m."""
    inner = "float32" if precision == "mixed" else "float64"
    one = machine.threads / machine.gemm_float64
    passes = n * m * (iterations * machine.entry(inner, t) + 3 * machine.entry("float64", t))
    return {
        "start": machine.start_seconds + machine.end_seconds,
        "prepare": 5.0 * m**3 * one + 2 * m * m * machine.block_entry * machine.threads,
        "nystrom": passes + iterations * (4.0 * m * m * t * one + machine.round_seconds),
    }


def primal_seconds(machine: Machine, n: int, d: int, size: int, t: int, num_alphas: int = 1) -> dict[str, float]:
    """Rows read twice, n D^2 flops at half the gemm rate, 4 n D t more; D^3 / 3 twice an alpha in the driver alone."""
    reads = machine.read(16.0 * n * (d + t), 8.0 * n * (d + t)) + 16.0 * n * size / (machine.threads * FEATURE_RATE)
    flops = n * (float(size) ** 2 + 4.0 * size * t) / (machine.gemm_float64 * TALL_EFFICIENCY)
    own = (size**3 / 3 * num_alphas + 20.0 * size**2) * machine.threads / machine.gemm_float64
    return {
        "start": machine.start_seconds,
        "primal": reads + flops + own + 2 * machine.round_seconds,
        "end": machine.end_seconds,
    }


def cholesky_disk(n: int, b: int, d: int, t: int, *, precision: str, gram: str, num_alphas: int = 1) -> dict[str, int]:
    """Bytes written: tiles of each factor, of the Gram matrix where it is stored, right-hand sides, the model."""
    rounded = TileGrid(n, b).num_tiles * b
    return {
        "factor": tiles_bytes(n, b, precision) * num_alphas,
        "gram": tiles_bytes(n, b, "float64") if gram == "stored" else 0,
        "right-hand sides": 4 * 8 * rounded * t,
        "model": 8 * n * (d + t),
    }


def cg_disk(n: int, b: int, d: int, t: int, *, gram: str, rank: int) -> dict[str, int]:
    """Bytes written: F (n, r), the Gram matrix where it is stored, two states of x, r and p, the model."""
    return {
        "preconditioner": 8 * n * rank,
        "gram": tiles_bytes(n, b, "float64") if gram == "stored" else 0,
        "vectors": 10 * 8 * n * t,
        "model": 8 * n * (d + t),
    }


def cholesky_memory(b: int, d: int, precision: str, gram: str) -> int:
    """Peak bytes of a worker, see :func:`dkrr.linalg.sizes.task_bytes`; mixed: more while iterations go on.

    A tile of the factor is mapped, and of a stored Gram matrix one in float64 beside the buffers that wrote it.
    """
    size = itemsize(precision)
    iterating = b * b * (size + (3 * 8 if gram == "stored" else 0)) if precision == "mixed" else 0
    return task_bytes(b, d, size) + iterating


def cg_memory(n: int, b: int, d: int, t: int, rank: int, *, kernel: Kernel | None, gram: str, kept: int = 0) -> int:
    """Peak bytes of a worker, the larger of

    110 MiB + low_rank_task_bytes                         panels of F, then F^T F
    210 MiB + product_task_bytes + a chunk of a panel     products, an application of F, ``kept`` chunks of it

    A given matrix needs no compiled code; its tiles, and those of a stored Gram matrix, are mapped one at a time.
    """
    tiles = 3 * 8 * b * b if gram == "stored" else 0
    width = super_blocks(n, entry_nanoseconds(kernel, d)).tile_size
    compiled = is_compiled(kernel, min(width, BLOCK_ROWS), d)
    product = product_task_bytes(width, t + 1, d, compiled=compiled)
    panel = panel_bytes(n, rank) if rank else 0
    passes = (BASELINE_BYTES if compiled else BARE_BYTES) + max(product, tiles, panel) + panel + min(kept, 8 * n * rank)
    return max(BARE_BYTES + max(tiles, low_rank_task_bytes(n, rank, d) if rank else 0), passes)


def cg_client(n: int, t: int, rank: int) -> int:
    """Bytes of this process besides the interpreter's: some 10 vectors (n, t), 3 r^2 of F^T F, an F of 256 MiB."""
    held = 8 * n * rank
    return DRIVER_VECTORS * 8 * n * t + 3 * 8 * rank**2 + (held if held <= HELD_BYTES else 0)


def direct_client(n: int, t: int, precision: str) -> int:
    """Bytes of this process besides the interpreter's: vectors of cg around a mixed factor, else three (n, 256)."""
    return 8 * n * (DRIVER_VECTORS * t if precision == "mixed" else 3 * min(t, 256))
