"""A low-rank preconditioner: P_alpha = F F^T + alpha I with F (n, r) on disk, for S K S + alpha I and every alpha.

    F[:, p] = (S K S[:, S_p] - sum_{q<p} F[:, q] F[S_p, q]^T) L_p^-T,   L_p L_p^T = (S K S - F F^T)[S_p, S_p]
    Z = P_alpha^-1 R = (R - F Y) / alpha,   (F^T F + alpha I) Y = F^T R

The pivots S_p come from randomly pivoted Cholesky, or are drawn uniformly (Nystrom: F F^T = K[:,S] K[S,S]^-1 K[S,:]),
see :func:`grow`. F^T F is computed once and serves every alpha. Use it when conjugate gradients
without one need hundreds of iterations. Below one location, all of them raw checksummed chunks:

    panel-0007-<digest of S_p>/f     F[:, p] in row chunks
    gram                             F^T F

A panel is a :class:`~dkrr.linalg.workspace.Pass` whose parts stay: a task makes one row chunk of it from the kernel and
the pivots (or from the tiles of a given matrix) and from the same rows of the panels before. It never reads rows of
another chunk, and what it writes depends on nothing but its indices. Row chunks are cut by n and r alone.

The driver draws the pivots. It holds the residual diagonal d (n,), from which it takes what each chunk explains, the
features of all pivots and their r x r rows of F; the residual of a block of proposals needs nothing else, as
F[S', :] = (S K S)[S', S] L^-T. Proposals are a function of the seed and of d: a build that is interrupted, or opened
again, draws the same pivots, and a valid chunk is never computed again. One that is found damaged is. One that passed
its checksum and is wrong makes the iterations more, never the answer wrong: the true residual decides.

In an application each chunk gives F_c^T R_c; these small matrices are added in the order of the chunks, on threads here
or through tasks, so that where an application runs does not change its result.

F^T F is formed, so that the error of Y is that of a matrix of condition |F|^2 / alpha. What it does to Z is weighed by
(F^T F + alpha I)^-1 on both sides: P^-1 stays positive definite as long as alpha is above r eps |F|^2. Where alpha is
below, the Cholesky factor of F^T F + alpha I does not exist in float64: P then has that larger shift in place of alpha,
which is logged. The shift is in P alone; the system that is solved has its own alpha.

F is stored in float64. In float32 it would be half as large and P just as positive definite (F^T F is that of the
rounded F); on 3,000 rows of protein the iterations were the same. But an application took as long (the cast costs what
the shorter read saves), and matern 3/2 on 3,000 normal rows, rank 300, needed 16 % (alpha = 1e-6 |K|) to 30 % more
iterations (1e-8 |K|).

Cost
----
Build: n r kernel entries, 2 n r^2 flops (half of them for F^T F), 8 n r bytes on disk; one round of tasks a panel. The
driver holds a few n-vectors and up to four r x r matrices; of a task see :func:`low_rank_task_bytes`. An application:
4 n r c flops and two passes over F, on the cores of this process: messages and files of tasks take longer than the work
(n = 20,000, r = 2,000, ten columns, two workers: half as long). A factor of at most 256 MiB is held in memory, a larger
one mapped where the store is a local folder and this process has as many cores as the workers. Elsewhere tasks read it,
with one checksum an application.

Randomly pivoted Cholesky, accelerated by block rejection: the arithmetic on small matrices, in memory.

    K ~ F F^T,   pivot s drawn with probability d_s / sum(d),   d = diag(K - F F^T)

Pivots are proposed in blocks, independently from one d; the residual matrix H = (K - F F^T)[S', S'] of a block S' is
factored in the order of proposal, and proposal i is accepted with probability h_ii(now) / h_ii(at the start). Accepted
pivots are distributed as if they had been drawn one after the other, whatever the size of the blocks, so that almost
all of the n r^2 flops are matrix products.

A proposal whose residual is below its floor (rounding) is never accepted; that is why no shift is needed for H.

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

References
----------
Chen, Epperly, Tropp, Webber (2022), Randomly pivoted Cholesky, arXiv 2207.06503.
Diaz, Epperly, Frangella, Tropp, Webber (2023), Robust, randomized preconditioning for kernel ridge regression, arXiv
2304.12465. Epperly, Tropp, Webber (2024), Embrace rejection, arXiv 2410.03969.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.engine.machine import cpu_count, single_blas_thread
from dkrr.errors import DamagedChunkError, DataError, NumericalError
from dkrr.kernels import Kernel
from dkrr.kernels.base import mirror
from dkrr.linalg.catalogue import gram_fields
from dkrr.linalg.cg import Preconditioner
from dkrr.linalg.operators import Floats, Indices, RidgeOperator, weighted
from dkrr.linalg.solution import IterativeSettings
from dkrr.linalg.workspace import Operands, Owners, Pass, Workspace, repaired
from dkrr.store.chunks import ChunkArray
from dkrr.store.files import is_url, place, remove_array
from dkrr.store.lease import hold_lock
from dkrr.tiles import TileGrid, TileMatrix
from dkrr.tiles.blas import gemm_nt, potrf, syrk_tn, trsm_left, trsm_right

logger = logging.getLogger("dkrr.linalg")

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


PHASE = "precondition"
CHUNK_BYTES = 128 << 20
MIN_CHUNK_ROWS, MAX_CHUNK_ROWS = 256, 16_384
NUM_CHUNKS = 8
# tasks of F^T F
MAX_GROUPS = 16
STRIP_ROWS = 1024
# more distinct alphas than this are solved through one spectral decomposition, which costs as much as some 20 factors
MAX_FACTORS = 3
HELD_BYTES = 256 << 20


def row_chunks(n: int, rank: int) -> TileGrid:
    """Row chunks of F: n / 8 rows in 256 .. 16,384, and at most 128 MiB of all its columns."""
    rows = max(MIN_CHUNK_ROWS, min(MAX_CHUNK_ROWS, -(-n // NUM_CHUNKS), CHUNK_BYTES // (8 * rank)))
    return TileGrid(n, min(-(-rows // MIN_CHUNK_ROWS) * MIN_CHUNK_ROWS, MAX_CHUNK_ROWS))


def panel_bytes(n: int, rank: int) -> int:
    """A row chunk of a panel of F."""
    rank = min(rank, n)
    return 8 * min(n, row_chunks(n, rank).tile_size) * min(rank, block_size(rank))


def low_rank_task_bytes(n: int, rank: int, num_features: int) -> int:
    """Memory of a task besides the baseline, for R rows a chunk and panels of k columns: the larger of

    8 (4 R k + k (r + 2 d) + 2 R d)      a panel: its chunk, a copy while it is solved and padded, one chunk before
    8 (R r + r^2 + 1,024 r)              F^T F: a chunk of F mapped, the sum, a strip
    """
    rank = min(rank, n)
    m, k = min(n, row_chunks(n, rank).tile_size), min(rank, block_size(rank))
    panel = 4 * m * k + k * (rank + 2 * num_features) + 2 * m * num_features
    return 8 * max(panel, m * rank + rank**2 + STRIP_ROWS * rank)


def low_rank_fields(
    operator: RidgeOperator,
    settings: IterativeSettings,
    rank: int,
    blas: str,
    *,
    weight_digest: str | None = None,
    source_digest: str = "",
) -> dict[str, Any]:
    """What decides the bytes of F: no alpha, and no tile size (except that of a given matrix)."""
    fields = gram_fields(operator, "float64", source_digest)
    if operator.kernel is not None:
        del fields["tile_size"]
    rank = min(rank, operator.grid.n)
    fields["weight_digest"] = weight_digest if operator.weighted else None
    fields |= {"method": settings.preconditioner, "seed": settings.seed, "rank": rank, "blas": blas}
    fields["rows_per_chunk"] = row_chunks(operator.grid.n, rank).tile_size
    return fields


@dataclass(frozen=True)
class Panels:
    """The matrix, and the panels of F that are there; ``num_features`` is that of a pivot, 0 for a given matrix.

    F does not change under its location, which is the key of everything that decides its bytes. ``held`` are the chunks
    that a process keeps once read, None where it keeps none.
    """

    operator: RidgeOperator
    location: str
    grid: TileGrid
    num_features: int
    arrays: tuple[ChunkArray, ...] = ()
    held: dict[tuple[int, int], Any] | None = None

    @property
    def rank(self) -> int:
        """Columns of all panels."""
        return sum(array.shape[1] for array in self.arrays)

    @property
    def columns(self) -> list[slice]:
        """Those of each panel."""
        ends = np.cumsum([array.shape[1] for array in self.arrays], dtype=np.int64).tolist()
        return [slice(end - array.shape[1], end) for end, array in zip(ends, self.arrays, strict=True)]

    def read(self, p: int, c: int, *, verify: bool = True) -> Any:
        """Row chunk c of panel p (rows, k), read-only and mapped in a local folder: drop it soon."""
        if self.held is not None and (p, c) in self.held:
            return self.held[p, c]
        block = self.arrays[p].read((c, 0), verify=verify)[: self.grid.rows(c)]
        return block if self.held is None else self.held.setdefault((p, c), np.array(block))

    def not_finite(self, c: int) -> DataError:
        """The error for row chunk c of the panel after these."""
        where = f"rows {self.grid.span(c)}, kernel {self.operator.kernel}"
        what = f"panel {len(self.arrays)} of the preconditioner"
        return DataError(f"{what} is not finite in {where}", hint="scale the features")

    def next_panel(self, operands: Operands, c: int, out: Floats) -> None:
        """Row chunk c of the panel after these; m k kernel entries and m k (2 first + k) flops for m rows.

        The operand are its k pivots, one row of 2 + d + first + k numbers each: row number, root of the weight,
        features (centred; none for a given matrix), and rows of F, the last k columns of which are L_p.
        """
        pivots, end, span = np.array(operands["pivots"].read()), 2 + self.num_features, self.grid.span(c)
        block, lower = out[: self.grid.rows(c)], np.ascontiguousarray(pivots[:, end:])
        operator, index = self.operator, pivots[:, 0].astype(np.int64)
        if operator.kernel is None and operator.gram is not None:
            given_block(operator.gram, np.arange(span.start, span.stop), index, block)
        else:
            (kernel, rows), x = operator.known(), np.ascontiguousarray(pivots[:, 2:end])
            kernel.block(rows.read(span.start, span.stop), x, block)
            inside = np.flatnonzero((index >= span.start) & (index < span.stop))
            if len(inside):  # of a pivot with itself exactly
                block[index[inside] - span.start, inside] = kernel.diag(x[inside])
        weighted(block, operator.root_of(span.start, span.stop), pivots[:, 1])
        for q, columns in enumerate(self.columns):
            left = self.read(q, c)
            gemm_nt(block, left, lower[:, columns])
            del left
        trsm_right(block, lower[:, self.rank :])

    def gram_group(self, num_groups: int, _: Operands, g: int, total: Floats) -> None:
        """F^T F over the row chunks of group g. r^2 flops a row."""
        chunks = self.grid.num_tiles
        for c in range(g * chunks // num_groups, (g + 1) * chunks // num_groups):
            mapped = [self.read(p, c) for p in range(len(self.arrays))]
            for start in range(0, self.grid.rows(c), STRIP_ROWS):
                syrk_tn(total, np.hstack([panel[start : start + STRIP_ROWS] for panel in mapped]))
            del mapped
        np.negative(total, out=total)
        mirror(total)

    def project(self, operands: Operands, c: int, out: Floats) -> None:
        """(F_c^T R_c)^T (columns, r), panel by panel."""
        transposed = np.ascontiguousarray(self._vectors(operands, c).T)  # twice as fast for a few columns
        for p, columns in enumerate(self.columns):
            out[:, columns] = transposed @ self.read(p, c)

    def correct(self, shifts: Floats, operands: Operands, c: int, out: Floats) -> None:
        """(R_c - F_c Y) / shifts (rows, columns), panel by panel, whose checksums the same application compared."""
        y, z = np.array(operands["y"].read()), self._vectors(operands, c)
        for p, columns in enumerate(self.columns):
            z -= self.read(p, c, verify=False) @ y[columns]
        np.divide(z, shifts, out=out[: len(z)])

    def _vectors(self, operands: Operands, c: int) -> Floats:
        """Row chunk c of R, a copy."""
        return np.array(operands["r"].read(c)[: self.grid.rows(c)])


def given_block(gram: TileMatrix, rows: Indices, columns: Indices, out: Any) -> None:
    """K[rows, columns] of a matrix in lower tiles, into ``out``; every tile that is met is read once, and verified."""
    b = gram.grid.tile_size
    row_tiles, column_tiles = rows // b, columns // b
    for i in np.unique(row_tiles):
        for j in np.unique(column_tiles):
            p, q = np.flatnonzero(row_tiles == i), np.flatnonzero(column_tiles == j)
            if i >= j:
                part = gram.read(int(i), int(j))[np.ix_(rows[p] - i * b, columns[q] - j * b)]
            else:
                part = gram.read(int(j), int(i))[np.ix_(columns[q] - j * b, rows[p] - i * b)].T
            out[np.ix_(p, q)] = part


class ShiftedGram:
    """Solves (F^T F + shift I) Y = B for many shifts.

    Parameters
    ----------
    gram : (r, r)
        F^T F.
    """

    def __init__(self, gram: Floats) -> None:
        self.gram = gram
        norm = float(np.abs(gram).sum(axis=1).max(initial=0.0))
        self.floor = len(gram) * float(np.finfo(np.float64).eps) * norm
        self._factors: dict[float, Floats] = {}
        self._spectral: tuple[Floats, Floats] | None = None

    def solve(self, b: Floats, shifts: Floats) -> Floats:
        """Column k of the result is (F^T F + shifts[k] I)^-1 B[:, k], B (r, c).

        Raises
        ------
        NumericalError
            A shift is so far below rounding that there is no Cholesky factor.

        Cost
        ----
        r^3 / 3 flops for each of up to three distinct shifts, about 9 r^3 once for more; then 2 r^2 a column.
        """
        b = np.ascontiguousarray(b)  # the order in memory decides which BLAS routine, and so the last bits
        distinct = sorted(set(shifts.tolist()))
        if self._spectral is None and len(set(self._factors) | set(distinct)) > MAX_FACTORS:
            values, vectors = np.linalg.eigh(self.gram)
            # F^T F is positive semi-definite: what is negative is rounding
            self._spectral = np.maximum(values, 0.0), vectors
            self._factors.clear()
        if self._spectral is not None:
            values, vectors = self._spectral
            return np.ascontiguousarray(vectors @ ((vectors.T @ b) / (values[:, None] + shifts)))
        y = np.empty_like(b)
        for shift in distinct:
            columns = np.flatnonzero(shifts == shift)
            lower = self.factor(shift)
            forward = trsm_left(lower, np.ascontiguousarray(b[:, columns]), transposed=False)
            y[:, columns] = trsm_left(lower, forward, transposed=True)
        return y

    def factor(self, shift: float) -> Floats:
        """L in the lower triangle of (r, r), L L^T = F^T F + shift I. The same errors; r^3 / 3 flops the first time."""
        if shift not in self._factors:
            lower = self.gram.copy()
            lower[np.diag_indices(len(lower))] += shift
            if potrf(lower):
                raise NumericalError(
                    f"F^T F + {shift:.3g} I of a preconditioner of rank {len(lower):,} is not positive definite",
                    hint="raise alpha, or lower the rank of the preconditioner",
                )
            self._factors[shift] = lower
        return self._factors[shift]


class LowRank(Preconditioner):
    """P_alpha = F F^T + alpha I, a preconditioner of conjugate gradients: builds F, or goes on with what is there.

    Parameters
    ----------
    operator
        S K S; its alpha does not matter. Columns of a kernel are evaluated, also where Gram tiles are stored; those of
        a given matrix are read.
    location
        Where F is, and nothing else ever; named by the key of :func:`low_rank_fields`.
    settings
        ``preconditioner`` ("rpcholesky" or "nystrom") and ``seed``.
    rank
        Columns wanted; at most n. Fewer are made when the residual becomes zero before.

    Attributes
    ----------
    index : (r,)
        The pivots, in order.
    trace
        trace(S K S - F F^T) / trace(S K S) before the first and after each panel.

    Raises
    ------
    DataError
        The kernel is not finite.
    LockedError
        Another process builds it.
    """

    inexact = False

    def __init__(
        self, operator: RidgeOperator, workspace: Workspace, location: str, settings: IterativeSettings, rank: int
    ) -> None:
        rank = min(rank, operator.grid.n)
        d = 0 if operator.kernel is None or operator.rows is None else operator.rows.open().num_features
        self.panels, self.workspace = Panels(operator, location, row_chunks(operator.grid.n, rank), d), workspace
        # a pivot is row number, root of the weight, features (centred; none for a given matrix), and its row of F
        self._pivots, self._root, self._is_said = np.zeros((rank, 2 + d + rank)), operator.normal(), False
        self._left: Floats = operator.diagonal_from(0).astype(np.float64, copy=False)
        self._total = float(self._left.sum())
        self.trace = [1.0 if self._total else 0.0]
        with hold_lock(location), single_blas_thread():
            is_uniform = settings.preconditioner == "nystrom"
            self.index = grow(self._left, rank, settings.seed, self._residual_block, self._add, is_uniform=is_uniform)
            # no fsync: what a power failure takes is found by its checksum and computed again
            self._small = ShiftedGram(self._gram())
        name = "Nystrom, uniform columns," if is_uniform else "randomly pivoted Cholesky"
        self.description = f"{name} of rank {self.panels.rank:,} ({self.trace[-1]:.1e} of the trace left)"
        # messages and files of tasks take longer than their work: where this process can do it as well, it does
        is_small = 8 * operator.grid.n * self.panels.rank <= HELD_BYTES
        self._threads = min(cpu_count(), workspace.executor.num_threads)
        is_here = is_small or (not is_url(location) and self._threads == workspace.executor.num_threads)
        self._applies = None if is_here else workspace
        self.panels = replace(self.panels, held={} if is_small else None)

    # --- how F is made ------------------------------------------------------------------------------------------------

    def _residual_block(self, proposals: Indices) -> tuple[Floats, Floats]:
        """(S K S - F F^T)[S', S'] of the proposals S'; their numbers, roots of weights, features and F[S', :]."""
        operator, first, b, end = self.panels.operator, self.panels.rank, len(proposals), 2 + self.panels.num_features
        before, root = self._pivots[:first], self._root[proposals]
        x, h, known = np.empty((b, 0)), np.empty((b, b)), np.empty((b, first))
        if operator.kernel is None and operator.gram is not None:
            block = np.empty((b, b + first))
            given_block(operator.gram, proposals, np.concatenate([proposals, before[:, 0].astype(np.int64)]), block)
            h[...], known[...] = block[:, :b], block[:, b:]
        else:
            kernel, rows = operator.known()
            x = rows.take(proposals)
            kernel.block(x, x, h, same=True)
            kernel.block(x, before[:, 2:end], known)
        weighted(h, root)
        weighted(known, root, before[:, 1])
        if first:
            trsm_right(known, before[:, end : end + first])
            gemm_nt(h, known, known)
        return h, np.hstack([proposals[:, None].astype(np.float64), root[:, None], x, known])

    def _add(self, _: Indices, known: Floats, lower: Floats) -> None:
        """Make the panel of these pivots, and take what it explains from the diagonal."""
        grid, first, p = self.panels.grid, self.panels.rank, len(self.panels.arrays)
        pivots = np.hstack([known, lower])
        self._pivots[first : first + len(pivots), : pivots.shape[1]] = pivots
        panel = self._panel(p, slice(first, first + len(pivots)), self.workspace)

        def explain(c: int, part: Floats) -> None:
            block, span = part[: grid.rows(c)], grid.span(c)
            self._left[span] = np.maximum(self._left[span] - np.einsum("ij,ij->i", block, block), 0.0)

        panel.consume(explain)
        self.panels = replace(self.panels, arrays=(*self.panels.arrays, panel.array))
        left = self._left.copy()
        left[self._pivots[: self.panels.rank, 0].astype(np.int64)] = 0.0
        self.trace.append(float(left.sum()) / self._total if self._total else 0.0)

    def _panel(self, p: int, columns: slice, workspace: Workspace | None) -> Pass:
        """The tasks of panel p, here without a workspace."""
        before, k = replace(self.panels, arrays=self.panels.arrays[:p]), columns.stop - columns.start
        grid, d = before.grid, before.num_features
        pivots = np.ascontiguousarray(self._pivots[columns, : 2 + d + columns.stop])

        return Pass(
            PHASE,
            before.next_panel,
            before.not_finite,
            [float(grid.rows(c) * k * (2 * before.rank + k + 2 * d)) for c in range(grid.num_tiles)],
            (grid.tile_size, k),
            operands={"pivots": [pivots]},
            workspace=workspace,
            store=before.location,
            folder=f"panel-{p:04d}-{hashlib.sha256(pivots[:, 0].tobytes()).hexdigest()[:8]}",
            parts="f",
            site="precondition.panel",
            owners=self._owners,
        )

    def _gram(self) -> Floats:
        """F^T F (r, r), read or computed by tasks over groups of row chunks and summed in their order."""
        panels, r = self.panels, self.panels.rank
        if not r:  # a matrix of zeros
            return np.zeros((0, 0))
        array = ChunkArray(panels.location, "gram", (r, r), (r, r), "float64")
        with contextlib.suppress(DamagedChunkError):
            return np.array(array.read((0, 0)))
        num_groups = min(MAX_GROUPS, panels.grid.num_tiles)
        total: Floats = Pass(
            PHASE,
            partial(panels.gram_group, num_groups),
            lambda g: NumericalError(f"F^T F of the preconditioner is not finite in group {g}", hint="raise alpha"),
            [float(panels.grid.n) * r**2 / num_groups] * num_groups,
            (r, r),
            operands={},
            workspace=self.workspace,
            store=panels.location,
            folder="gram-parts",
            owners=self._owners,
        ).sum()
        array.write((0, 0), total)
        remove_array(place(panels.location, "gram-parts"))
        return total

    @property
    def _owners(self) -> Owners:
        """How a damaged chunk of F is made again, in this process."""
        panels = zip(self.panels.arrays, self.panels.columns, strict=True)
        return {array.location: partial(self._again, p, columns) for p, (array, columns) in enumerate(panels)}

    def _again(self, p: int, columns: slice, index: tuple[int, ...]) -> None:
        panel = self._panel(p, columns, None)
        with single_blas_thread():
            panel.array.write(index, repaired(partial(panel.part, index[0]), self._owners))

    # --- how it is applied --------------------------------------------------------------------------------------------

    def apply(self, r: Floats, alpha: Floats) -> Floats:
        """Z (n, c) with column k = P_{alpha[k]}^-1 r[:, k], for R (n, c) and alpha (c,); R is not changed.

        Raises
        ------
        StoreError
            A chunk of F is damaged again and again.
        """
        r = np.ascontiguousarray(r, dtype=np.float64)
        floor = self._small.floor or 1.0
        shifts = np.where((alpha >= self._small.floor) & (alpha > 0), alpha, floor)
        if not self._is_said and (shifts != alpha).any():
            self._is_said = True
            text = "alpha %.3g is below rounding in F^T F; the preconditioner (and only it) has %.3g"
            logger.info(text, float(alpha.min()), floor)
        panels, grid, work, t = self.panels, self.panels.grid, self._applies, r.shape[1]
        if not panels.rank or not t:
            return np.asarray(r / shifts)
        vectors = {"r": [r[grid.span(c)] for c in range(grid.num_tiles)]}
        step = partial(
            Pass,
            "apply",
            explain=lambda _: NumericalError("a preconditioned residual is not finite", hint="scale the targets"),
            flops=[2.0 * grid.rows(c) * panels.rank * t for c in range(grid.num_tiles)],
            workspace=work,
            owners=self._owners,
            quiet=True,
            threads=self._threads,
        )
        z = np.empty_like(r)

        def add(c: int, part: Floats) -> None:
            z[grid.span(c)] = part[: grid.rows(c)]

        folder = contextlib.nullcontext("") if work is None else work.scratch()
        with folder as store, single_blas_thread():
            total = step(compute=panels.project, shape=(t, panels.rank), operands=vectors, store=store).sum()
            both = vectors | {"y": [self._small.solve(total.T, shifts)]}
            compute = partial(panels.correct, shifts)
            step(compute=compute, shape=(grid.tile_size, t), operands=both, store=store).consume(add)
        return z
