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
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import ParameterError
from dkrr.kernels import Kernel
from dkrr.tiles.blas import gemm_nt, trsm_right

__all__ = ["FLOOR", "accept", "block_size", "draw_uniform", "draw_weighted", "pivot_rows"]

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

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


def draw_uniform(diagonal: Floats, size: int, generator: np.random.Generator) -> Indices:
    """At most ``size`` different rows, each row with a positive d equally likely."""
    eligible = np.flatnonzero(diagonal > 0)
    result: Indices = generator.choice(eligible, min(size, len(eligible)), replace=False).astype(np.int64)
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
        The (s, m) factor is held in memory: a uniform part of the rows is looked at when 8 s m is more than this.

    Raises
    ------
    ParameterError
        Fewer than ``m`` rows, or ``max_bytes`` does not hold an (m, m) factor.

    Cost
    ----
    s m kernel entries, s m^2 flops, 8 s m bytes.
    """
    if not 1 <= m <= len(rows):
        raise ParameterError(f"{m} pivots of {len(rows)} rows", hint="ask for at least 1 and at most all rows")
    most = max_bytes // (8 * m)
    if most < m:
        raise ParameterError(
            f"{m} pivots need a factor of {8 * m * m:,} bytes, max_bytes is {max_bytes:,}", hint="lower the number"
        )
    sample = np.arange(len(rows))
    if len(rows) > most:
        sample = np.sort(np.random.default_rng([seed, 1 << 20]).choice(len(rows), most, replace=False))
    x = np.ascontiguousarray(rows[sample], dtype=np.float64)
    diagonal = kernel.diag(x)
    floors = FLOOR * diagonal
    residual = diagonal.copy()
    factor = np.empty((len(x), m))
    pivots: list[int] = []
    panel = 0
    while len(pivots) < m and residual.any():
        first = len(pivots)
        generator = np.random.default_rng([seed, panel])
        proposals = draw_weighted(residual, block_size(m), generator)
        candidates = np.ascontiguousarray(x[proposals])
        h = kernel.block(candidates, candidates, same=True)
        known = factor[proposals, :first]
        gemm_nt(h, known, known)
        taken, lower = accept(h, proposals, floors[proposals], generator.random(len(proposals)), m - first)
        panel += 1
        if not len(taken):
            residual[proposals] = 0.0  # evaluated anew, all of them are rounding
            continue
        chosen = proposals[taken]
        columns = kernel.block(x, np.ascontiguousarray(x[chosen]))
        columns[chosen, np.arange(len(chosen))] = diagonal[chosen]
        if first:
            gemm_nt(columns, factor[:, :first], np.ascontiguousarray(known[taken]))
        trsm_right(columns, lower)
        factor[:, first : first + len(chosen)] = columns
        pivots.extend(chosen.tolist())
        residual -= np.einsum("ij,ij->i", columns, columns)
        residual[residual <= floors] = 0.0
        residual[pivots] = 0.0
    return np.asarray(sample[pivots], dtype=np.int64)
