"""What a fit with another loss than the square costs: one way for each loss, in the driver's process alone.

Cost: none worth naming; it is arithmetic.
"""

from __future__ import annotations

from dkrr.linalg.losses.decomposition import MAX_FREE
from dkrr.linalg.losses.newton import MAX_BYTES, MAX_DENSE
from dkrr.linalg.matmul import product_task_bytes
from dkrr.linalg.products import BLOCK_ROWS, is_compiled
from dkrr.linalg.sizes import BARE_BYTES, BASELINE_BYTES
from dkrr.planning.candidates import Candidate, Problem
from dkrr.planning.costs import Machine

__all__ = ["DECOMPOSITION_PASSES", "NEWTON_PRODUCTS", "loss_candidate"]

# entries of K over n^2 that decomposition evaluates for all columns together, certificates included, measured
DECOMPOSITION_PASSES = 2.0
# products with K of Newton's method for each column
NEWTON_PRODUCTS = 12.0


def loss_candidate(problem: Problem, solver: str, machine: Machine) -> Candidate:
    """The way of ``solver``, "decomposition" or "newton", and a rough price.

    ``problem`` has an alpha for each of k values of C, and all of their columns as targets. Decomposition: 2 n^2
    entries of K for all t columns; Newton: 12 n^2 t. In the driver: the rows k + 1 times, 6 t + 20
    vectors, and blocks of at most 6,000 rows: three of a working set, two of Newton's systems, which have 256 MiB for a
    preconditioner where there are more rows. A worker holds what predictions need.
    """
    n, d, t, k = problem.num_rows, problem.num_features, problem.num_targets, len(problem.alpha)
    is_newton = solver == "newton"
    entries = n * n * (NEWTON_PRODUCTS * t if is_newton else DECOMPOSITION_PASSES)
    seconds = entries * machine.entry("float64", 1 if is_newton else t)
    blocks = (
        2 * 8 * min(n, MAX_DENSE) ** 2 + MAX_BYTES * (n > MAX_DENSE) if is_newton else 3 * 8 * min(n, MAX_FREE) ** 2
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
