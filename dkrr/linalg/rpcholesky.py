"""Randomly pivoted Cholesky, accelerated by block rejection: the arithmetic on small matrices, in memory.

    K ~ F F^T,   pivot s drawn with probability d_s / sum(d),   d = diag(K - F F^T)

Pivots are proposed in blocks, independently from one d; the residual matrix H = (K - F F^T)[S', S'] of a block S' is
factored in the order of proposal, and proposal i is accepted with probability h_ii(now) / h_ii(at the start). Accepted
pivots are distributed as if they had been drawn one after the other, whatever the size of the blocks, so that almost
all of the n r^2 flops are matrix products.

A proposal whose residual is below its floor (rounding) is never accepted; that is why no shift is needed for H.

References
----------
Chen, Epperly, Tropp, Webber (2022), Randomly pivoted Cholesky, arXiv 2207.06503. Epperly, Tropp, Webber (2024), Embrace
rejection: kernel matrix approximation by accelerated randomly pivoted Cholesky, arXiv 2410.03969.

How large a low-rank preconditioner should be, and how many iterations it leaves.

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
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dkrr.kernels import Kernel
from dkrr.linalg.operators import Floats, Indices
from dkrr.tiles.blas import gemm_nt, trsm_right

# A residual diagonal below this fraction of the diagonal is rounding: some thirty panels subtract eps of it each.
FLOOR = 100 * float(np.finfo(np.float64).eps)

MIN_BLOCK, MAX_BLOCK = 64, 512


def block_size(rank: int) -> int:
    """Proposals in a block: rank / 10, in 64 .. 512, so that about 20 panels make up the factor."""
    return max(MIN_BLOCK, min(MAX_BLOCK, -(-rank // 10)))


def draw_weighted(diagonal: Floats, size: int, generator: np.random.Generator) -> Indices:
    """``size`` independent draws from d / sum(d), d (n,) >= 0 with a positive sum; what is 0 is never drawn."""
    bounds = np.cumsum(diagonal)
    drawn = np.searchsorted(bounds, generator.random(size) * bounds[-1], side="right")
    # a product may be rounded up to the last bound
    last = int(np.flatnonzero(diagonal)[-1])
    result: Indices = np.minimum(drawn, last).astype(np.int64)
    return result


def accept(
    h: Floats, proposals: Indices, floors: Floats, draws: Floats | None, limit: int
) -> tuple[NDArray[np.intp], Floats]:
    """Go through a block of proposals in order; factor the accepted part of their residual matrix.

    Parameters
    ----------
    h : (b, b)
        Residual matrix of the proposals.
    proposals : (b,)
        Row numbers; a row that was accepted is not accepted again.
    floors : (b,)
        A pivot at or below its floor is rejected.
    draws : (b,), optional
        Uniform numbers for the rejection; None accepts every proposal above its floor.
    limit
        Accept at most so many.

    Returns
    -------
    accepted : (k,)
        Positions within the block.
    lower : (k, k)
        L with H[accepted, accepted] = L L^T.

    Cost: 2 b^2 k flops.
    """
    b = len(h)
    start = h.diagonal().copy()
    now = start.copy()
    lower = np.zeros((b, min(b, limit)))
    accepted: list[int] = []
    for i in range(b):
        k = len(accepted)
        if k == limit:
            break
        if draws is not None and draws[i] * start[i] >= now[i]:
            continue
        column = h[:, i] - lower[:, :k] @ lower[i, :k]
        if column[i] <= floors[i]:
            continue
        column /= np.sqrt(column[i])
        lower[:, k] = column
        now -= np.square(column)
        now[proposals == proposals[i]] = 0.0
        accepted.append(i)
    taken = np.array(accepted, dtype=np.intp)
    return taken, np.tril(lower[taken, : len(taken)])


def grow(
    left: Floats,
    rank: int,
    seed: int,
    block: Callable[[Indices], tuple[Floats, Floats]],
    add: Callable[[Indices, Floats, Floats], None],
    *,
    is_uniform: bool = False,
) -> Indices:
    """Pivots (k,), k <= rank, drawn in panels: of each one the proposals of generators, until some are accepted.

    Parameters
    ----------
    left : (n,)
        The diagonal of the matrix, from which ``add`` takes what each panel explains.
    block
        Gives for proposals (b,) their residual matrix (b, b), and what shall be known of each (b, m).
    add
        Called with the pivots (k,) of a panel, what is known of them, and L (k, k) of their residual matrix.
    is_uniform
        Draw different rows, each equally likely, without rejection, instead of by the residual.
    """
    floors, pivots, attempt = FLOOR * left, np.empty(0, np.int64), -1
    residual = np.where(left > floors, left, 0.0)
    while len(pivots) < rank and residual.any():
        attempt += 1
        generator, limit, draws = np.random.default_rng([seed, attempt]), rank - len(pivots), None
        if is_uniform:
            eligible = np.flatnonzero(residual)
            proposals = generator.choice(eligible, min(block_size(rank), limit, len(eligible)), replace=False)
        else:
            proposals = draw_weighted(residual, block_size(rank), generator)
            draws = generator.random(len(proposals))
        h, known = block(proposals)
        taken, lower = accept(h, proposals, floors[proposals], draws, limit)
        if not len(taken):
            residual[proposals] = 0.0  # evaluated anew, all of them are rounding
            continue
        add(proposals[taken], known[taken], lower)
        pivots = np.concatenate([pivots, proposals[taken]])
        residual = np.where(left > floors, left, 0.0)
        residual[pivots] = 0.0
    return pivots


def pivot_rows(kernel: Kernel, rows: Floats, m: int, seed: int, *, max_bytes: int = 1 << 30) -> Indices:
    """Row numbers (k,), k <= m, that randomly pivoted Cholesky of k(rows, rows) picks, in order: Nystrom centres.

    Parameters
    ----------
    kernel
        Resolved.
    rows : (s, d)
        A sample of the rows, centred if the kernel is stationary.
    m
        Pivots wanted. Fewer come back when their residual is zero already, as with duplicated rows.
    seed
        The same rows and seed give the same pivots.
    max_bytes
        The (s, m) factor is held in memory: a uniform part of the rows, at least m, is looked at when 8 s m is more.

    Cost
    ----
    s m kernel entries, s m^2 flops, 8 s m bytes.
    """
    most, sample = max(m, max_bytes // (8 * m)), np.arange(len(rows))
    if len(rows) > most:
        sample = np.sort(np.random.default_rng([seed, 1 << 20]).choice(len(rows), most, replace=False))
    x = np.ascontiguousarray(rows[sample], dtype=np.float64)
    diagonal, factor, first = kernel.diag(x), np.empty((len(x), m)), 0
    left = diagonal.copy()

    def block(proposals: Indices) -> tuple[Floats, Floats]:
        candidates, known = np.ascontiguousarray(x[proposals]), factor[proposals, :first]
        h = kernel.block(candidates, candidates, same=True)
        gemm_nt(h, known, known)
        return h, known

    def add(chosen: Indices, known: Floats, lower: Floats) -> None:
        nonlocal first
        columns = kernel.block(x, np.ascontiguousarray(x[chosen]))
        columns[chosen, np.arange(len(chosen))] = diagonal[chosen]
        gemm_nt(columns, factor[:, :first], known)
        trsm_right(columns, lower)
        factor[:, first : first + len(chosen)] = columns
        first += len(chosen)
        np.subtract(left, np.einsum("ij,ij->i", columns, columns), out=left)

    return np.asarray(sample[grow(left, m, seed, block, add)], dtype=np.int64)


MAX_RANK = 5000
# tau(r), assumed before F is built
TAIL = 0.25
# Of one core: seconds of a kernel entry in a product, of a flop in gemm, of an entry of F read once; and what a round
# of tasks costs beyond its work.
ENTRY_SECONDS, FLOP_SECONDS, READ_SECONDS, BARRIER_SECONDS = 1e-9, 2e-11, 2e-9, 0.02


def choose_rank(
    n: int, num_features: int, alpha: float, *, tol: float = 1e-8, num_columns: int = 1, num_workers: int = 2
) -> int:
    """The rank with the least estimated time of build and iterations.

        rank = argmin over r <= n / 10, 5,000 of [n r entries + 2 n r^2 flops + iterations(r) (n^2 / 2 entries
               + 2 n r reads + 4 n r c flops)]

    Parameters
    ----------
    n, num_features
        Rows and features; a kernel entry is taken to cost 1 + d / 32 times as much as one that costs nothing to make.
    alpha
        The smallest ridge that is solved for.
    tol, num_columns
        Of the conjugate gradients.
    num_workers
        Tasks at once.

    Returns
    -------
    int
        At least 1; a multiple of 50 above 50.
    """
    most = min(MAX_RANK, n // 10)
    if most <= 50:
        return max(1, most)
    entry = ENTRY_SECONDS * (1.0 + num_features / 32.0)

    def seconds(rank: int) -> float:
        iterations = float(n)
        if alpha > 0:
            bound = 0.5 * math.sqrt(1.0 + TAIL * n / (rank * alpha)) * math.log(2.0 / tol)
            iterations = max(1.0, min(iterations, bound))
        build = n * rank * entry + 2.0 * n * rank**2 * FLOP_SECONDS
        apply = 2.0 * n * rank * (READ_SECONDS + 2.0 * num_columns * FLOP_SECONDS)
        work = build + iterations * (0.5 * n**2 * entry + apply)
        return work / num_workers + 3.0 * iterations * BARRIER_SECONDS

    return min(range(50, most + 1, 50), key=seconds)
