"""What a fit with another loss than the square costs: one way for each loss, in the driver's process alone.

Cost: none worth naming; it is arithmetic.

What a fit costs: flops, kernel entries and bytes, and the seconds they take on a machine whose rates are known.

You need it to compare solvers before any of them runs. Every formula stands in the docstring of its function, in the
letters n rows, d features, t targets, b tile edge, N tiles a side, r rank, k iterations. Rates are those of all workers
together, so no formula divides by the number of workers.

Cost: none worth naming; it is arithmetic.

What a way costs: seconds on a machine of known rates, memory of a task, disk; and why it cannot be taken.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from dkrr.errors import MemoryBudgetError, ParameterError
from dkrr.fit.choices import Candidate, Iterations, Limits, Problem, SolverChoice, Way, ranks_of
from dkrr.fit.rates import Machine, itemsize
from dkrr.fit.schedule import Simulation, TileSeconds, at_most, choose_split, choose_tiles, simulate
from dkrr.fit.trial import Trial
from dkrr.kernels import Kernel
from dkrr.kernels.features import count_features
from dkrr.linalg.factor.schedule import Split
from dkrr.linalg.inference.inverse_diagonal import inverse_room, panel_width
from dkrr.linalg.inference.inverse_diagonal import panel_bytes as inverse_panel_bytes
from dkrr.linalg.losses.decomposition import MAX_FREE
from dkrr.linalg.losses.newton import MAX_BYTES, MAX_DENSE
from dkrr.linalg.lowrank.panels import low_rank_task_bytes, panel_bytes
from dkrr.linalg.lowrank.preconditioner import HELD_BYTES, keep_bytes
from dkrr.linalg.matmul import product_task_bytes
from dkrr.linalg.nystrom.solver import nystrom_baseline, nystrom_bytes
from dkrr.linalg.primal.solver import primal_bytes
from dkrr.linalg.products import BLOCK_ROWS, entry_nanoseconds, is_compiled, super_blocks
from dkrr.linalg.sizes import BARE_BYTES, BASELINE_BYTES, choose_tile_size, task_bytes
from dkrr.tiles import TileGrid

__all__ = [
    "CLIENT_BYTES",
    "DECOMPOSITION_PASSES",
    "DISK_RESERVE_BYTES",
    "NEWTON_PRODUCTS",
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
    "loss_candidate",
    "nystrom_seconds",
    "pass_seconds",
    "preconditioner_seconds",
    "priced_way",
    "primal_seconds",
    "sweep_seconds",
    "with_leave_one_out",
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


# solvers that have no tiles
TILELESS = ("nystrom", "primal")

NYSTROM_ITERATIONS = Iterations(12, 30)

UNKNOWN_ITERATIONS = Iterations(20, 100)

# with the factor of an alpha that is up to ten times as large or small
FACTOR_ITERATIONS = Iterations(5, 40)

# left free on the store's disk: the run's own documents and logs, and what others write while a fit goes on
DISK_RESERVE_BYTES = 256 * 2**20


def priced_way(
    problem: Problem,
    way: Way,
    choice: SolverChoice,
    limits: Limits,
    tile_size: int | None,
    machine: Machine | None,
    trial: Trial | None,
) -> Candidate:
    """A way with its memory and disk, whether it fits, and, where the rates of the machine are given, its seconds."""
    solver, precision, gram, rank = way
    n, d, t = problem.num_rows, problem.num_features, problem.num_targets
    infeasible = ""
    itemsize = 8 if precision == "float64" or solver != "cholesky" else 4
    if tile_size is not None:
        b = tile_size
        has_tiles = solver not in TILELESS
        if has_tiles and limits.memory_bytes is not None and task_bytes(b, d, itemsize) > limits.memory_bytes:
            infeasible = f"tiles of {b} do not fit a worker"
    else:
        try:
            b = choose_tile_size(n, d, limits.memory_bytes, itemsize, limits.threads)
            if solver == "cholesky":
                b = choose_tiles(n, d, limits.memory_bytes, limits.threads, precision, gram, b)
        except ParameterError as exc:
            b, infeasible = 128, "" if solver in TILELESS else exc.message
    iterations: Iterations | None = None
    single = solver == "cg" and precision == "mixed" and gram != "stored"  # products in float32
    if solver == "nystrom":
        m = choice.nystrom(n).num_centers
        task, client = nystrom_bytes(n, m, d, t)
        memory = nystrom_baseline(problem.kernel, m, t) + task
        disk = {"centres": 16 * m * m, "vectors": 80 * m * t, "model": 8 * m * (d + t)}
        iterations = NYSTROM_ITERATIONS
    elif solver == "primal":
        size = count_features(problem.kernel, d) or 0
        task, client, sums = primal_bytes(problem.kernel, d, n, t)
        memory, disk = BARE_BYTES + task, {"sums": sums, "model": 8 * size * t}
    elif solver == "cg":
        kept = keep_bytes(8 * n * rank, limits.memory_bytes) if limits.fetches else 0
        memory = cg_memory(n, b, d, t, rank, kernel=problem.kernel, gram=gram, kept=kept)
        client = cg_client(n, t, rank)
        disk = cg_disk(n, b, d, t, gram=gram, rank=rank)
        iterations = UNKNOWN_ITERATIONS
        if choice.preconditioner == "factor":
            iterations = FACTOR_ITERATIONS
        elif trial is not None:
            ranks = tuple(ranks_of(problem, choice))
            iterations = trial.cg(problem.alpha, ranks, choice.tol, "mixed" if single else "float64")[rank]
            if single and choice.precision == "auto" and not trial.supports_single(problem.alpha):
                infeasible = (
                    f"float32 products are off by up to {trial.rounding():.1e} |v|, which is not far below "
                    f"alpha {min(problem.alpha):.1e}"
                )
    else:
        memory, client = cholesky_memory(b, d, precision, gram), direct_client(n, t, precision)
        disk = cholesky_disk(n, b, d, t, precision=precision, gram=gram, num_alphas=problem.num_alphas)
        if precision == "mixed":
            iterations = Iterations(3, 12) if trial is None else trial.mixed(problem.alpha, choice.tol)
    if not infeasible:
        infeasible = _misfit(memory, client, sum(disk.values()), limits, iterations, choice)
    candidate = Candidate(
        solver=solver,
        precision=precision,
        gram=gram,
        tile_size=b,
        rank=rank,
        num_centers=choice.nystrom(n).num_centers if solver == "nystrom" else 0,
        iterations=iterations,
        memory_bytes=memory,
        client_bytes=client,
        disk_bytes=disk,
        infeasible=infeasible,
        split=choose_split(n, b, limits.threads, precision, gram) if solver == "cholesky" else None,
    )
    if machine is None:
        return candidate
    if candidate.split is not None:
        candidate = replace(candidate, efficiency=_simulated(problem, candidate, machine).efficiency)
    again = trial.refinements(min(problem.alpha), choice.tol) if single and trial is not None else 1
    low, high = (
        _seconds(problem, candidate, machine, 0.0 if iterations is None else count, again)
        for count in ((0, 0) if iterations is None else (iterations.low, iterations.high))
    )
    return replace(candidate, seconds=high, seconds_low=sum(low.values()))


def _simulated(problem: Problem, way: Candidate, machine: Machine) -> Simulation:
    """The factorisation on the machine's workers, with the split of the candidate; of its first 192 tiles a side."""
    grid = at_most(TileGrid(problem.num_rows, way.tile_size))
    seconds = TileSeconds.of(machine, way.tile_size, way.precision, way.gram)
    return simulate(grid, way.split or Split(), machine.threads, seconds)


def _seconds(
    problem: Problem, way: Candidate, machine: Machine, iterations: float, refinements: int
) -> dict[str, float]:
    n, t = problem.num_rows, problem.num_targets
    if way.solver == "primal":
        size = count_features(problem.kernel, problem.num_features) or 0
        return primal_seconds(machine, n, problem.num_features, size, t, problem.num_alphas)
    if way.solver == "nystrom":
        m = way.num_centers
        return nystrom_seconds(machine, n, m, t, precision=way.precision, iterations=iterations)
    seconds = _exact_seconds(problem, way, machine, iterations, refinements)
    if problem.fit_intercept and way.iterations is not None:
        # after an iteration, the intercept and the residual of the whole system from one more product
        rounds = 1 if way.solver == "cg" else problem.num_alphas
        product = machine.exact_factor * pass_seconds(machine, n, t, "float64")
        seconds["residual"] = seconds.get("residual", 0.0) + rounds * product
    return seconds


def _exact_seconds(
    problem: Problem, way: Candidate, machine: Machine, iterations: float, refinements: int
) -> dict[str, float]:
    n, b, t = problem.num_rows, way.tile_size, problem.num_targets
    if way.solver == "cg":
        return cg_seconds(
            machine,
            n,
            b,
            t,
            precision=way.precision,
            gram=way.gram,
            rank=way.rank,
            iterations=iterations,
            refinements=refinements,
        )
    return cholesky_seconds(
        machine,
        n,
        b,
        t,
        precision=way.precision,
        gram=way.gram,
        num_alphas=problem.num_alphas,
        iterations=iterations,
    )


def _misfit(
    memory: int, client: int, disk: int, limits: Limits, iterations: Iterations | None, choice: SolverChoice
) -> str:
    """Why a candidate cannot be taken, in a few words."""
    if limits.memory_bytes is not None and memory > limits.memory_bytes:
        return f"a task needs {memory / 2**20:,.0f} MiB, a worker has {limits.memory_bytes / 2**20:,.0f}"
    if limits.driver_bytes is not None and client > limits.driver_bytes:
        return f"this process needs {client / 2**30:,.1f} GiB, {limits.driver_bytes / 2**30:,.1f} are free"
    if limits.disk_bytes is not None and disk + DISK_RESERVE_BYTES > limits.disk_bytes:
        reserve = f"{DISK_RESERVE_BYTES / 1e9:.2g} GB are kept free"
        return f"writes {disk / 1e9:.3g} GB, {limits.disk_bytes / 1e9:.3g} GB are free, of which {reserve}"
    most = choice.iterative().iterations
    if iterations is not None and iterations.high > most and choice.solver == "auto":
        return f"may need {iterations.high:,.0f} iterations, {most:,} are allowed"
    return ""


def with_leave_one_out(candidate: Candidate, problem: Problem, limits: Limits, machine: Machine | None) -> Candidate:
    """The same way to solve with what leave-one-out takes besides.

    A fit by a factor of the right precision has all that is needed but the inverse diagonal, as many flops again; after
    "mixed" and cg a float64 factor comes first.

    Parameters
    ----------
    machine
        None leaves the seconds alone.
    """
    if candidate.solver == "primal":
        return candidate
    n, b = problem.num_rows, candidate.tile_size
    if candidate.solver != "nystrom":
        candidate = replace(
            candidate, memory_bytes=max(candidate.memory_bytes, _diagonal_memory(TileGrid(n, b), limits))
        )
    disk = candidate.disk_bytes
    if _makes_factor(candidate):
        disk = disk | {"float64 factor": problem.num_alphas * tiles_bytes(n, b, "float64")}
    if machine is None:
        return replace(candidate, disk_bytes=disk)
    seconds = _diagonal_seconds(candidate, problem, machine)
    return replace(
        candidate,
        disk_bytes=disk,
        seconds=candidate.seconds | {"leave_one_out": seconds},
        seconds_low=candidate.seconds_low + seconds,
    )


def _diagonal_memory(grid: TileGrid, limits: Limits) -> int:
    """Peak bytes of a worker that has solved and computes the diagonal of the inverse in float64."""
    try:
        width = panel_width(grid, 8, limits.threads, inverse_room(limits.memory_bytes))
    except MemoryBudgetError:
        width = 1  # less than a task takes, which is more than there is
    return BASELINE_BYTES + inverse_panel_bytes(grid, width)


def _makes_factor(candidate: Candidate) -> bool:
    """Whether the fit has no factor that is good enough."""
    return candidate.solver == "cg" or (candidate.solver == "cholesky" and candidate.precision == "mixed")


def _diagonal_seconds(candidate: Candidate, problem: Problem, machine: Machine) -> float:
    """n^3 / 3 flops at 0.8 of the gemm rate for each alpha, and a float64 factor where there is none.

    Nystrom: 2 n m^2 flops and as many for each alpha, and n m entries twice.
    """
    n, num_alphas = problem.num_rows, problem.num_alphas
    if candidate.solver == "nystrom":
        m = candidate.num_centers
        flops = 2.0 * n * m * m * (1 + num_alphas)
        return flops / (0.8 * machine.gemm("float64")) + 2 * n * m * machine.entry("float64")
    seconds = n**3 / 3 / (0.8 * machine.gemm("float32" if candidate.precision == "float32" else "float64"))
    if _makes_factor(candidate):
        seconds += factorise_seconds(machine, n, candidate.tile_size, "float64", candidate.gram)
    return num_alphas * seconds


# entries of K over n^2 that decomposition evaluates for all columns together, certificates included, measured
DECOMPOSITION_PASSES = 2.0

# products with K of Newton's method for each column
NEWTON_PRODUCTS = 12.0


def loss_candidate(problem: Problem, solver: str, machine: Machine) -> Candidate:
    """The way of ``solver``, "decomposition" or "newton", and a rough price.

    ``problem`` has an alpha for each of k values of C, and all of their columns as targets. Decomposition: 2 n^2
    entries of K for all t columns; Newton: 12 n^2 t. In the driver: the rows k + 1 times, 6 t + 20
    vectors, and blocks of at most 6,000 rows: a working set and a factor for each column that a thread is at, two of
    Newton's systems, which have 256 MiB for a preconditioner where there are more rows. A worker
    holds what predictions need.
    """
    n, d, t, k = problem.num_rows, problem.num_features, problem.num_targets, len(problem.alpha)
    is_newton = solver == "newton"
    entries = n * n * (NEWTON_PRODUCTS * t if is_newton else DECOMPOSITION_PASSES)
    seconds = entries * machine.entry("float64", 1 if is_newton else t)
    sets = min(t, machine.threads)
    blocks = (
        2 * 8 * min(n, MAX_DENSE) ** 2 + MAX_BYTES * (n > MAX_DENSE)
        if is_newton
        else 2 * 8 * sets * min(n, MAX_FREE) ** 2
    )
    compiled = is_compiled(problem.kernel, BLOCK_ROWS, d)
    predicted = product_task_bytes(BLOCK_ROWS, t, d, compiled=compiled)
    return Candidate(
        solver=solver,
        precision="float64",
        gram="on_the_fly",
        tile_size=0,
        seconds={
            "start": machine.start_seconds,
            solver: seconds + machine.first_product_seconds,
            "end": machine.end_seconds,
        },
        memory_bytes=(BASELINE_BYTES if compiled else BARE_BYTES) + predicted,
        client_bytes=8 * ((k + 1) * n * d + (6 * t + 20) * n) + blocks,
        disk_bytes={"model": 8 * n * (k * d + t), "checkpoint": 8 * n * t},
    )
