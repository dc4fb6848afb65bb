"""How large a low-rank preconditioner should be, and how many iterations it leaves.

    iterations(r) = 1/2 sqrt(1 + tau(r) trace(K) / (r alpha)) ln(2 / tol)

tau(r) is the part of the trace that F F^T leaves. The condition number of the preconditioned matrix is about
1 + lambda_{r+1} / alpha, and a tail of trace tau(r) trace(K) has a largest eigenvalue of about that over r.

Before F is built tau is assumed to be 1/4. That number was fitted: 16,000 rows of protein at alpha 0.1 and tolerance
1e-6 took 67, 45, 34 iterations with ranks 500, 1,000, 2,000, the formula gives 65, 46, 33. It is no bound elsewhere.

With the tau of a factor that is built, on protein, rbf, matern 3/2 and 5/2, 1,200 to 3,000 rows, rank 300 or 400:
within a factor of 3 at alpha of 1e-6 |K| and more; at 1e-9 |K| eight times too many and more, as conjugate gradients
converge faster than their bound; at 1e-13 |K| half of what was needed, as rounding decides there. It never says less
than ln(2 / tol) / 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dkrr.errors import ParameterError

__all__ = ["RankRates", "choose_rank", "estimate_iterations", "rank_seconds"]

MAX_RANK = 5000
ASSUMED_TAIL = 0.25


@dataclass(frozen=True, kw_only=True)
class RankRates:
    """Rates of one core, in seconds: of a kernel entry in a product, of a flop in gemm, of an entry of F read once.

    ``barrier_seconds`` is what a round of tasks costs beyond its work.
    """

    entry_seconds: float = 1e-9
    flop_seconds: float = 2e-11
    read_seconds: float = 2e-9
    barrier_seconds: float = 0.02


def estimate_iterations(n: int, alpha: float, rank: int, tol: float, *, tail: float = ASSUMED_TAIL) -> float:
    """The formula above, for a kernel with k(x, x) about 1; at most n and at least 1."""
    if alpha <= 0:
        return float(n)
    ratio = tail * n / (max(1, rank) * alpha)
    return max(1.0, min(float(n), 0.5 * math.sqrt(1.0 + ratio) * math.log(2.0 / tol)))


def rank_seconds(
    n: int, alpha: float, rank: int, tol: float, num_columns: int, num_workers: int, rates: RankRates
) -> float:
    """Seconds of building a preconditioner of this rank and of the iterations it leaves.

    n r entries + 2 n r^2 flops + iterations(r) (n^2 / 2 entries + 2 n r reads + 4 n r c flops)
    """
    build = n * rank * rates.entry_seconds + 2.0 * n * rank**2 * rates.flop_seconds
    product = 0.5 * n**2 * rates.entry_seconds
    apply = 2.0 * n * rank * (rates.read_seconds + 2.0 * num_columns * rates.flop_seconds)
    iterations = estimate_iterations(n, alpha, rank, tol)
    return (build + iterations * (product + apply)) / num_workers + 3.0 * iterations * rates.barrier_seconds


def choose_rank(
    n: int,
    num_features: int,
    alpha: float,
    memory_bytes: int | None = None,
    *,
    disk_bytes: int | None = None,
    seconds: float | None = None,
    tol: float = 1e-8,
    num_columns: int = 1,
    num_workers: int = 2,
    rates: RankRates | None = None,
) -> int:
    """The rank with the least estimated time of build and iterations, among those that fit.

        rank = argmin over r of [n r entries + 2 n r^2 flops + iterations(r) (n^2 / 2 entries + 2 n r reads)],
        r <= n / 10,  r <= 5,000,  8 n r <= memory_bytes / 2,  8 n r <= disk_bytes / 2,  build(r) <= seconds

    Parameters
    ----------
    n, num_features
        Rows and features; a kernel entry is taken to cost 1 + d / 32 times ``rates.entry_seconds``.
    alpha
        The smallest ridge that is solved for.
    memory_bytes
        Of all workers together; half of it may hold F in the page cache. None: no limit.
    disk_bytes
        Free where the store is. None: no limit.
    seconds
        What building may take at most. None: no limit.
    tol, num_columns
        Of the conjugate gradients.
    num_workers
        Tasks at once.

    Returns
    -------
    int
        At least 1; a multiple of 50 above 50.
    """
    if n < 1 or num_features < 1:
        raise ParameterError(f"{n} rows of {num_features} features", hint="both are at least 1")
    rates = rates or RankRates()
    rates = RankRates(
        entry_seconds=rates.entry_seconds * (1.0 + num_features / 32.0),
        flop_seconds=rates.flop_seconds,
        read_seconds=rates.read_seconds,
        barrier_seconds=rates.barrier_seconds,
    )
    most = min(MAX_RANK, n // 10)
    for limit in (memory_bytes, disk_bytes):
        if limit is not None:
            most = min(most, int(limit // (2 * 8 * n)))
    if most <= 50:
        return max(1, most)

    def fits(rank: int) -> bool:
        build = n * rank * rates.entry_seconds + 2.0 * n * rank**2 * rates.flop_seconds
        return seconds is None or build / num_workers <= seconds

    candidates = [rank for rank in range(50, most + 1, 50) if fits(rank)] or [50]
    return min(candidates, key=lambda rank: rank_seconds(n, alpha, rank, tol, num_columns, num_workers, rates))
