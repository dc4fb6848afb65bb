"""What a way costs: seconds on a machine of known rates, memory of a task, disk; and why it cannot be taken."""

from __future__ import annotations

from dataclasses import replace

from dkrr.errors import MemoryBudgetError, ParameterError
from dkrr.kernels.features import count_features
from dkrr.linalg.factor.schedule import Split
from dkrr.linalg.inference.inverse_diagonal import inverse_room, panel_bytes, panel_width
from dkrr.linalg.lowrank.preconditioner import keep_bytes
from dkrr.linalg.nystrom.solver import nystrom_baseline, nystrom_bytes
from dkrr.linalg.primal.solver import primal_bytes
from dkrr.linalg.sizes import BARE_BYTES, BASELINE_BYTES, choose_tile_size, task_bytes
from dkrr.planning.candidates import Candidate, Limits, Problem
from dkrr.planning.choices import SolverChoice
from dkrr.planning.costs import (
    Machine,
    cg_client,
    cg_disk,
    cg_memory,
    cg_seconds,
    cholesky_disk,
    cholesky_memory,
    cholesky_seconds,
    direct_client,
    factorise_seconds,
    nystrom_seconds,
    pass_seconds,
    primal_seconds,
    tiles_bytes,
)
from dkrr.planning.iterations import Iterations
from dkrr.planning.simulate import Simulation, TileSeconds, simulate
from dkrr.planning.tiling import at_most, choose_split, choose_tiles
from dkrr.planning.trial import Trial
from dkrr.planning.ways import Way, ranks_of
from dkrr.tiles import TileGrid

__all__ = ["DISK_RESERVE_BYTES", "priced_way", "with_leave_one_out"]

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
    return BASELINE_BYTES + panel_bytes(grid, width)


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
