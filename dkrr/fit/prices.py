"""What a way costs before it runs: seconds on a machine of known rates, memory and disk; and why it cannot be taken.

Every formula stands in the docstring of its function, in the letters n rows, d features, t targets, b tile edge,
N tiles a side, r rank, k iterations. Rates are those of all workers together (:class:`dkrr.fit.rates.Machine`), so no
formula divides by the number of workers. Another loss than the square has one way, in the driver's process alone.

Cost: none worth naming; it is arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

from dkrr.errors import MemoryBudgetError, ParameterError
from dkrr.fit.choices import Candidate, Iterations, Limits, Problem, SolverChoice, Way, ranks_of
from dkrr.fit.rates import Machine, TileSeconds, at_most, choose_split, choose_tiles, itemsize, simulate
from dkrr.fit.trial import SUPPORTED, Trial
from dkrr.linalg.decomposition import MAX_FREE
from dkrr.linalg.matmul import product_task_bytes
from dkrr.linalg.newton import MAX_BYTES, MAX_DENSE
from dkrr.linalg.nystrom import nystrom_baseline, nystrom_bytes
from dkrr.linalg.preconditioner import HELD_BYTES, low_rank_task_bytes, panel_bytes
from dkrr.linalg.primal import primal_bytes
from dkrr.linalg.products import BLOCK_ROWS, entry_nanoseconds, is_compiled, super_blocks
from dkrr.linalg.triangular import inverse_room, panel_width
from dkrr.linalg.triangular import panel_bytes as inverse_panel_bytes
from dkrr.linalg.workspace import BARE_BYTES, BASELINE_BYTES, choose_tile_size, task_bytes
from dkrr.markup import size
from dkrr.tiles import TileGrid

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
NYSTROM_ITERATIONS = Iterations(12, 30)
UNKNOWN_ITERATIONS, UNKNOWN_MIXED_ITERATIONS = Iterations(20, 100), Iterations(3, 12)
# with the factor of an alpha that is up to ten times as large or small
FACTOR_ITERATIONS = Iterations(5, 40)
# left free on the store's disk: the run's own documents and logs, and what others write while a fit goes on
DISK_RESERVE_BYTES = 256 * 2**20
# entries of K over n^2 that decomposition evaluates for all columns together, certificates included, measured
DECOMPOSITION_PASSES = 2.0
# products with K of Newton's method for each column
NEWTON_PRODUCTS = 12.0


# --- parts of a solver --------------------------------------------------------------------------------------------


def tiles_bytes(n: int, b: int, precision: str) -> int:
    """N (N + 1) / 2 tiles of b^2 numbers and a checksum."""
    return TileGrid(n, b).num_lower * (b * b * itemsize(precision) + 4)


def gram_seconds(machine: Machine, n: int, b: int) -> float:
    """n^2 / 2 entries evaluated, 4 n (n + b) bytes written."""
    busy = n * n / 2 * machine.block_entry + TileGrid(n, b).num_lower * machine.task_seconds
    return busy + machine.write(tiles_bytes(n, b, "float64"), busy)


def factorise_seconds(machine: Machine, n: int, b: int, precision: str, gram: str) -> float:
    """n^3 / 3 flops at 0.8 of the gemm rate, n^3 / (3 b) numbers read, n^2 / 2 entries made or read, tiles written."""
    size = tiles_bytes(n, b, precision)
    flops = n**3 / 3 / (machine.gemm(precision) * CHOLESKY_EFFICIENCY)
    reads = machine.read(n**3 / (3 * b) * itemsize(precision), size)
    entries = machine.read(4 * n * n, size + 4 * n * n) if gram == "stored" else n * n / 2 * machine.block_entry
    busy = flops + reads + entries + TileGrid(n, b).num_lower * machine.task_seconds
    return busy + machine.write(size, busy)


def sweep_seconds(machine: Machine, n: int, b: int, t: int, precision: str) -> float:
    """L z = c and L^T u = z: the factor's bytes twice, 2 n^2 t flops, N^2 tasks."""
    size, side = tiles_bytes(n, b, precision), TileGrid(n, b).num_tiles
    flops = 2.0 * n * n * t / machine.gemm(precision)
    return machine.read(2 * size, size) + flops + 2 * side * machine.task_seconds + 2 * machine.round_seconds


def pass_seconds(machine: Machine, n: int, t: int, precision: str) -> float:
    """One product K V: n^2 / 2 entries, each used twice for t columns, and some 60 tasks a worker at most."""
    busy = n * n / 2 * machine.entry(precision, t)
    tasks = min(60.0 * machine.threads, max(4.0 * machine.threads, busy * machine.threads / 0.1))
    return busy + tasks * machine.task_seconds + machine.round_seconds


def preconditioner_seconds(machine: Machine, n: int, r: int) -> float:
    """n r entries; 2 n r^2 flops for panels and F^T F, r^3 / 3; 8 n r bytes written, waited for, read r / 256 times.

    The panels are short, so that about 4 r / 256 graphs of tasks are run one after the other, each with its sync.
    """
    rounds, size = ceil(r / 256), 8.0 * n * r
    flops = 2.0 * n * r * r / (machine.gemm_float64 * TALL_EFFICIENCY)
    flops += r**3 / 3 * machine.threads / machine.gemm_float64
    moved = machine.read(size * rounds / 2, size) + machine.write(size)
    return n * r * machine.block_entry + flops + moved + 4 * rounds * (machine.round_seconds + SYNC_SECONDS)


def apply_seconds(machine: Machine, n: int, t: int, r: int) -> float:
    """The preconditioner once: F read twice, 16 n r bytes, 4 n r t flops at half the gemm rate; two rounds of tasks.

    A driver with as many cores as the workers does it without tasks, and holds an F of at most 256 MiB, which it
    applies wherever they are. A dozen passes over vectors in the driver's memory are counted here too.
    """
    vectors = 12 * 8.0 * n * t / DRIVER_BYTES_PER_SECOND
    if not r:
        return vectors
    work = machine.read(16.0 * n * r, 8.0 * n * r)
    work += 4.0 * n * r * t / (machine.gemm_float64 * TALL_EFFICIENCY)
    if machine.driver_threads >= machine.threads:
        return vectors + work
    if 8 * n * r <= HELD_BYTES:
        return vectors + work * machine.threads / machine.driver_threads
    return vectors + work + 2 * machine.round_seconds


# --- ways -----------------------------------------------------------------------------------------------------------


Seconds = Callable[[Machine, float], dict[str, float]]  # of the phases without start and end, for some iterations


def border_seconds(machine: Machine, problem: Problem, rounds: int) -> float:
    """After an iteration, the intercept and the residual of the whole system from one more product."""
    product = machine.exact_factor * pass_seconds(machine, problem.num_rows, problem.num_targets, "float64")
    return rounds * product if problem.fit_intercept else 0.0


def _cholesky(problem: Problem, way: Candidate, choice: SolverChoice, trial: Trial | None) -> tuple[Candidate, Seconds]:
    """One factor, one solve and one residual for each distinct alpha; mixed: k iterations around each factor, of one
    float64 product and one pair of sweeps with the float32 factor.

    Memory: see :func:`dkrr.linalg.workspace.task_bytes`; while a mixed factor iterates a tile of it is mapped, and of a
    stored Gram matrix one in float64 beside the buffers that wrote it. The driver has vectors of cg around a mixed
    factor, else three (n, 256).
    """
    precision, gram, n, b, t = way.precision, way.gram, problem.num_rows, way.tile_size, problem.num_targets
    is_mixed, size, alphas = precision == "mixed", itemsize(precision), problem.num_alphas
    each = ceil(max(1.0, t / alphas))
    iterations = UNKNOWN_MIXED_ITERATIONS if is_mixed else None
    if is_mixed and trial is not None:
        iterations = trial.mixed(problem.alpha, choice.tol)

    def seconds(machine: Machine, count: float) -> dict[str, float]:
        factor = {"factorise": alphas * factorise_seconds(machine, n, b, precision, gram)}
        sweep, product = sweep_seconds(machine, n, b, each, precision), pass_seconds(machine, n, each, "float64")
        exact, first = machine.exact_factor * product, machine.first_product_seconds
        if is_mixed:
            border = border_seconds(machine, problem, alphas)
            after = {
                "precondition": alphas * count * sweep,
                "multiply": alphas * (count * product + exact) + first,
            } | ({"residual": border} if border else {})
        else:
            after = {"solve": alphas * sweep, "residual": alphas * exact + first}
        return factor | after

    iterating = b * b * (size + (3 * 8 if gram == "stored" else 0)) if is_mixed else 0
    way = replace(
        way,
        memory_bytes=task_bytes(b, problem.num_features, size) + iterating,
        client_bytes=8 * n * (DRIVER_VECTORS * t if is_mixed else 3 * min(t, 256)),
        disk_bytes=way.disk_bytes
        | {
            "factor": tiles_bytes(n, b, precision) * alphas,
            "right-hand sides": 4 * 8 * TileGrid(n, b).num_tiles * b * t,
        },
        iterations=iterations,
    )
    return way, seconds


def _cg(problem: Problem, way: Candidate, choice: SolverChoice, trial: Trial | None) -> tuple[Candidate, Seconds]:
    """Preconditioner, k iterations for all targets and alphas together, true residuals every 50 and at the end.

    With a stored Gram matrix a pass reads 4 n (n + b) bytes instead of evaluating entries. Products ("multiply") that
    are not the float64 ones of the kernel need those besides ("residual"), float32 ones at least as many as there are
    refinements. A worker needs the larger of

    110 MiB + low_rank_task_bytes                         panels of F, then F^T F
    210 MiB + product_task_bytes + a chunk of a panel     products, an application of F, chunks of it that are kept

    A given matrix needs no compiled code; its tiles, and those of a stored Gram matrix, are mapped one at a time. The
    driver has some 10 vectors (n, t), 3 r^2 of F^T F, and an F of 256 MiB.
    """
    precision, gram, rank, b = way.precision, way.gram, way.rank, way.tile_size
    n, d, t = problem.num_rows, problem.num_features, problem.num_targets
    factor_bytes = 8 * n * rank
    iterations, infeasible, refinements = UNKNOWN_ITERATIONS, "", 1
    is_single = precision == "mixed" and gram != "stored"  # products in float32
    if is_single and trial is not None:
        refinements = trial.refinements(min(problem.alpha), choice.tol)
    if choice.preconditioner == "factor":
        iterations = FACTOR_ITERATIONS
    elif trial is not None:
        ranks = tuple(ranks_of(problem, choice))
        iterations = trial.cg(problem.alpha, ranks, choice.tol, "mixed" if is_single else "float64")[rank]
        if is_single and choice.precision == "auto" and trial.rounding() > SUPPORTED * min(problem.alpha):
            infeasible = (
                f"float32 products are off by up to {trial.rounding():.1e} |v|, which is not far below "
                f"alpha {min(problem.alpha):.1e}"
            )

    def seconds(machine: Machine, count: float) -> dict[str, float]:
        found = {"precondition": preconditioner_seconds(machine, n, rank)} if rank else {}
        exact, checks = pass_seconds(machine, n, t, "float64"), 1 + count // TRUE_RESIDUAL_EVERY
        if gram == "stored":
            size = tiles_bytes(n, b, "float64")
            flops = 2.0 * n * n * t / (machine.gemm_float64 * TALL_EFFICIENCY)
            found["multiply"] = count * (machine.read(size, size) + flops + machine.round_seconds)
        elif precision == "mixed":
            found["multiply"] = count * pass_seconds(machine, n, t, "float32")
            checks = max(checks, min(refinements, count))
        else:
            found["multiply"] = (count + checks) * exact
        found["multiply"] += machine.first_product_seconds
        found["apply"] = count * apply_seconds(machine, n, t, rank)
        residual = checks * exact if gram == "stored" or precision == "mixed" else 0.0
        residual += border_seconds(machine, problem, 1)
        return found | ({"residual": residual} if residual else {})

    tiles = 3 * 8 * b * b if gram == "stored" else 0
    width = super_blocks(n, entry_nanoseconds(problem.kernel, d)).tile_size
    compiled = is_compiled(problem.kernel, min(width, BLOCK_ROWS), d)
    product = product_task_bytes(width, t + 1, d, compiled=compiled)
    panel, panels = (panel_bytes(n, rank), low_rank_task_bytes(n, rank, d)) if rank else (0, 0)
    passes = (BASELINE_BYTES if compiled else BARE_BYTES) + max(product, tiles, panel) + panel
    way = replace(
        way,
        memory_bytes=max(BARE_BYTES + max(tiles, panels), passes),
        client_bytes=DRIVER_VECTORS * 8 * n * t + 3 * 8 * rank**2 + (factor_bytes if factor_bytes <= HELD_BYTES else 0),
        disk_bytes=way.disk_bytes | {"preconditioner": factor_bytes, "vectors": 10 * 8 * n * t},
        iterations=iterations,
        infeasible=infeasible,
    )
    return way, seconds


def _nystrom(problem: Problem, way: Candidate, choice: SolverChoice, trial: Trial | None) -> tuple[Candidate, Seconds]:
    """n m entries a pass, each used twice; k passes and three more; 5 m^3 flops for factors of m x m."""
    n, d, t = problem.num_rows, problem.num_features, problem.num_targets
    m = choice.nystrom(n).num_centers
    task, client = nystrom_bytes(n, m, d, t)

    def seconds(machine: Machine, count: float) -> dict[str, float]:
        inner = "float32" if way.precision == "mixed" else "float64"
        one = machine.threads / machine.gemm_float64
        passes = n * m * (count * machine.entry(inner, t) + 3 * machine.entry("float64", t))
        return {
            "prepare": 5.0 * m**3 * one + 2 * m * m * machine.block_entry * machine.threads,
            "nystrom": passes + count * (4.0 * m * m * t * one + machine.round_seconds),
        }

    way = replace(
        way,
        memory_bytes=nystrom_baseline(problem.kernel, m, t) + task,
        client_bytes=client,
        disk_bytes={"centres": 16 * m * m, "vectors": 80 * m * t, "model": 8 * m * (d + t)},
        iterations=NYSTROM_ITERATIONS,
        num_centers=m,
    )
    return way, seconds


def _primal(problem: Problem, way: Candidate, choice: SolverChoice, trial: Trial | None) -> tuple[Candidate, Seconds]:
    """Rows read twice, n D^2 flops at half the gemm rate, 4 n D t more; D^3 / 3 twice an alpha in the driver alone."""
    n, d, t, size = problem.num_rows, problem.num_features, problem.num_targets, problem.num_explicit
    task, client, sums = primal_bytes(problem.kernel, d, n, t)

    def seconds(machine: Machine, _: float) -> dict[str, float]:
        reads = machine.read(16.0 * n * (d + t), 8.0 * n * (d + t))
        reads += 16.0 * n * size / (machine.threads * FEATURE_RATE)
        flops = n * (float(size) ** 2 + 4.0 * size * t) / (machine.gemm_float64 * TALL_EFFICIENCY)
        own = (size**3 / 3 * problem.num_alphas + 20.0 * size**2) * machine.threads / machine.gemm_float64
        return {"primal": reads + flops + own + 2 * machine.round_seconds}

    disk = {"sums": sums, "model": 8 * size * t}
    return replace(way, memory_bytes=BARE_BYTES + task, client_bytes=client, disk_bytes=disk), seconds


_COSTS = {"cholesky": _cholesky, "cg": _cg, "nystrom": _nystrom, "primal": _primal}


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
    n, (b, infeasible) = problem.num_rows, _tile_edge(problem, way, limits, tile_size)
    disk = {
        "gram": tiles_bytes(n, b, "float64") if gram == "stored" else 0,
        "model": 8 * n * (problem.num_features + problem.num_targets),
    }
    candidate = Candidate(solver=solver, precision=precision, gram=gram, tile_size=b, rank=rank, disk_bytes=disk)
    candidate, seconds = _COSTS[solver](problem, candidate, choice, trial)
    infeasible = infeasible or candidate.infeasible or _misfit(candidate, limits, choice)
    split = choose_split(n, b, limits.threads, precision, gram) if solver == "cholesky" else None
    candidate = replace(candidate, infeasible=infeasible, split=split)
    if machine is None:
        return candidate
    if split is not None:
        tiles = TileSeconds.of(machine, b, precision, gram)
        found = simulate(at_most(TileGrid(n, b)), split, machine.threads, tiles)
        candidate = replace(candidate, efficiency=found.efficiency)
    around = {"start": machine.start_seconds, "end": machine.end_seconds}
    if gram == "stored":
        around["gram"] = gram_seconds(machine, n, b)
    count = candidate.iterations or Iterations(0, 0)
    low, high = (around | seconds(machine, number) for number in (count.low, count.high))
    return replace(candidate, seconds=high, seconds_low=sum(low.values()))


def _tile_edge(problem: Problem, way: Way, limits: Limits, edge: int | None) -> tuple[int, str]:
    """The edge of the tiles, and why no worker can hold them."""
    solver, precision, gram, _ = way
    n, d, memory = problem.num_rows, problem.num_features, limits.memory_bytes
    has_tiles, size = solver in ("cholesky", "cg"), 8 if solver != "cholesky" else itemsize(precision)
    if edge is not None:
        is_too_large = has_tiles and memory is not None and task_bytes(edge, d, size) > memory
        return edge, f"tiles of {edge} do not fit a worker" if is_too_large else ""
    try:
        b = choose_tile_size(n, d, memory, size, limits.threads)
    except ParameterError as exc:
        return 128, exc.message if has_tiles else ""
    return (choose_tiles(n, d, memory, limits.threads, precision, gram, b) if solver == "cholesky" else b), ""


def _misfit(way: Candidate, limits: Limits, choice: SolverChoice) -> str:
    """Why a way cannot be taken, in a few words."""
    disk, most = sum(way.disk_bytes.values()) + DISK_RESERVE_BYTES, choice.iterative().iterations
    for needed, there, said in (
        (way.memory_bytes, limits.memory_bytes, "a task needs {}, a worker has {}"),
        (way.client_bytes, limits.driver_bytes, "this process needs {}, {} are free"),
        (disk, limits.disk_bytes, "the disk needs {}, with what is kept free, and {} are free"),
    ):
        if there is not None and needed > there:
            return said.format(size(needed), size(there))
    if way.iterations is not None and way.iterations.high > most and choice.solver == "auto":
        return f"may need {way.iterations.high:,.0f} iterations, {most:,} are allowed"
    return ""


def with_leave_one_out(way: Candidate, problem: Problem, limits: Limits, machine: Machine | None) -> Candidate:
    """The same way to solve with what leave-one-out takes besides; ``machine`` None leaves the seconds alone.

    A fit by a factor of the right precision has all that is needed but the inverse diagonal, as many flops again at 0.8
    of the gemm rate; after "mixed" and cg a float64 factor comes first. Nystrom: 2 n m^2 flops and as many for each
    alpha, and n m entries twice. Primal: nothing.
    """
    if way.solver == "primal":
        return way
    n, b, m, alphas = problem.num_rows, way.tile_size, way.num_centers, problem.num_alphas
    needs_factor = way.solver == "cg" or (way.precision == "mixed" and way.solver == "cholesky")
    if needs_factor:
        way = replace(way, disk_bytes=way.disk_bytes | {"float64 factor": alphas * tiles_bytes(n, b, "float64")})
    if way.solver != "nystrom":
        grid = TileGrid(n, b)
        try:
            width = panel_width(grid, 8, limits.threads, inverse_room(limits.memory_bytes))
        except MemoryBudgetError:
            width = 1  # less than a task takes, which is more than there is
        way = replace(way, memory_bytes=max(way.memory_bytes, BASELINE_BYTES + inverse_panel_bytes(grid, width)))
    if machine is None:
        return way
    if way.solver == "nystrom":
        seconds = 2.0 * n * m * m * (1 + alphas) / (0.8 * machine.gemm("float64"))
        seconds += 2 * n * m * machine.entry("float64")
    else:
        one = n**3 / 3 / (0.8 * machine.gemm("float32" if way.precision == "float32" else "float64"))
        seconds = alphas * (one + (factorise_seconds(machine, n, b, "float64", way.gram) if needs_factor else 0.0))
    return replace(way, seconds=way.seconds | {"leave_one_out": seconds}, seconds_low=way.seconds_low + seconds)


def loss_candidate(problem: Problem, solver: str, machine: Machine) -> Candidate:
    """The way of ``solver``, "decomposition" or "newton", and a rough price.

    ``problem`` has an alpha for each of k values of C, and all of their columns as targets. Decomposition: 2 n^2
    entries of K for all t columns; Newton: 12 n^2 t. In the driver: the rows k + 1 times, 6 t + 20
    vectors, and blocks of at most 6,000 rows: a working set and a factor for each column that a thread is at, two of
    Newton's systems, which have 256 MiB for a preconditioner where there are more rows. A worker
    holds what predictions need.
    """
    n, d, t, k = problem.num_rows, problem.num_features, problem.num_targets, len(problem.alpha)
    if solver == "newton":
        seconds = n * n * NEWTON_PRODUCTS * t * machine.entry("float64", 1)
        blocks = 2 * 8 * min(n, MAX_DENSE) ** 2 + MAX_BYTES * (n > MAX_DENSE)
    else:
        seconds = n * n * DECOMPOSITION_PASSES * machine.entry("float64", t)
        blocks = 2 * 8 * min(t, machine.threads) * min(n, MAX_FREE) ** 2
    first = machine.first_product_seconds
    phases = {"start": machine.start_seconds, solver: seconds + first, "end": machine.end_seconds}
    compiled = is_compiled(problem.kernel, BLOCK_ROWS, d)
    predicted = product_task_bytes(BLOCK_ROWS, t, d, compiled=compiled)
    return Candidate(
        solver=solver,
        precision="float64",
        gram="on_the_fly",
        tile_size=0,
        seconds=phases,
        seconds_low=sum(phases.values()),
        memory_bytes=(BASELINE_BYTES if compiled else BARE_BYTES) + predicted,
        client_bytes=8 * ((k + 1) * n * d + (6 * t + 20) * n) + blocks,
        disk_bytes={"model": 8 * n * (k * d + t), "checkpoint": 8 * n * t},
    )
