"""What leave-one-out costs beside a fit: seconds and bytes, for a plan.

A fit by a factor of the right precision has all that is needed but the inverse diagonal, as many flops again; after
"mixed" and cg a float64 factor comes first.
"""

from __future__ import annotations

from dataclasses import replace

from dkrr.errors import MemoryBudgetError
from dkrr.linalg.inference.inverse_diagonal import inverse_room, panel_bytes, panel_width
from dkrr.linalg.sizes import BASELINE_BYTES
from dkrr.planning.candidates import Candidate, Limits, Problem
from dkrr.planning.costs import Machine, factorise_seconds, tiles_bytes
from dkrr.tiles import TileGrid

__all__ = ["with_leave_one_out"]


def with_leave_one_out(
    candidate: Candidate, problem: Problem, method: str | None, limits: Limits, machine: Machine | None
) -> Candidate:
    """The same way to solve with what leave-one-out takes besides; as it is for estimates, whose passes are not known.

    Parameters
    ----------
    method
        "exact", "stochastic", or None.
    machine
        None leaves the seconds alone.
    """
    if method != "exact" or candidate.solver == "primal":
        return candidate
    n, b = problem.num_rows, candidate.tile_size
    if candidate.solver != "nystrom":
        candidate = replace(candidate, memory_bytes=max(candidate.memory_bytes, _memory(TileGrid(n, b), limits)))
    disk = candidate.disk_bytes
    if _makes_factor(candidate):
        disk = disk | {"float64 factor": problem.num_alphas * tiles_bytes(n, b, "float64")}
    if machine is None:
        return replace(candidate, disk_bytes=disk)
    seconds = _seconds(candidate, problem, machine)
    return replace(
        candidate,
        disk_bytes=disk,
        seconds=candidate.seconds | {"leave_one_out": seconds},
        seconds_low=candidate.seconds_low + seconds,
    )


def _memory(grid: TileGrid, limits: Limits) -> int:
    """Peak bytes of a worker that has solved and computes the diagonal of the inverse in float64."""
    try:
        width = panel_width(grid, 8, limits.threads, inverse_room(limits.memory_bytes))
    except MemoryBudgetError:
        width = 1  # less than a task takes, which is more than there is
    return BASELINE_BYTES + panel_bytes(grid, width)


def _makes_factor(candidate: Candidate) -> bool:
    """Whether the fit has no factor that is good enough."""
    return candidate.solver == "cg" or (candidate.solver == "cholesky" and candidate.precision == "mixed")


def _seconds(candidate: Candidate, problem: Problem, machine: Machine) -> float:
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
