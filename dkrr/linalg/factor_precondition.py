"""A tile Cholesky factor as a preconditioner: z = L^-T L^-1 r by two sweeps on the workers.

The factor need not belong to the system. A residual is divided by its norm and rounded to the factor's precision, so
that nothing overflows or vanishes; the result comes back in float64. The preconditioner decides how many iterations
there are, and never what they converge to. Checksums of tiles are therefore compared in the first application only,
which verifies the whole factor once. There are two ways to one:

**The factor of another alpha, or of the first rows,** that an earlier fit left in the store, where a new factor takes
n^3 / 3 flops:

    P = K + alpha' I,     eigenvalues of P^-1 (K + alpha I) between alpha / alpha' and 1 (or 1 and alpha / alpha')

so conjugate gradients take about sqrt(alpha / alpha') / 2 ln(2 / tol) iterations, whatever the kernel: some 15 for
twice the alpha. Rows that the factor does not know are divided by their diagonal entry of A, and the preconditioner is
block diagonal. On 250 normal rows with rbf, matern and laplacian kernels 4 % of new rows left a tenth to nine tenths of
the iterations, 20 % about as many as without a preconditioner, more made it worse than none: extend the factor then.

**Mixed precision:** a factor of the same matrix in float32, which leaves a few iterations.

    P = L L^T = A + shift I    in float32, shift 0 unless that breaks down
    A u = S Y                  by conjugate gradients with P^-1, products and residuals in float64

Half the disk and about half the time of a float64 factor, for the float64 answer: what the true residual says does not
depend on the factor. Where A + alpha I is too ill-conditioned for a float32 factor, a shift is added *to the
preconditioner only*, which costs iterations; that is logged, and stands in the solution's message. A fit that is
continued finds the factor of the shift that it had come to.

Cost
----
An application reads the factor twice, n^2 elements: bound by memory bandwidth for a few columns. 4 n c elements pass
through the store. A float32 factor takes n^3 / 3 flops.

References
----------
Higham and Mary, Mixed precision algorithms in numerical linear algebra, Acta Numerica 31 (2022), section 7; Higham and
Pranesh, Exploiting lower precision arithmetic in solving symmetric positive definite linear systems and least squares
problems, SIAM J. Sci. Comput. 43 (2021), for the shift.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from dataclasses import replace
from math import inf, log
from typing import Any

import numpy as np

from dkrr.errors import LockedError, NotPositiveDefiniteError, NumericalError, StoreError
from dkrr.linalg.blocks import MAX_BLOCK_COLUMNS, BlockColumns, FloatMatrix, FloatVector, norms
from dkrr.linalg.catalogue import Ancestor, ancestors, factor_fields
from dkrr.linalg.cg import conjugate_gradients
from dkrr.linalg.direct import CholeskyFactor, factor_location
from dkrr.linalg.matmul import OperatorProduct
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.solution import IterativeSettings
from dkrr.linalg.triangular import substitute
from dkrr.linalg.workspace import Workspace, keep_for_others
from dkrr.store.chunks import ChunkArray
from dkrr.store.files import place, read_json, remove_array
from dkrr.store.lease import hold_lock
from dkrr.tiles import TileMatrix

logger = logging.getLogger("dkrr.linalg")

# more new rows than this make a block diagonal preconditioner worse than it is worth
MAX_NEW_ROWS = 0.04
# In parts of eps32 times the trace, which bounds how far rounding moves an eigenvalue. On matern kernels of condition
# 1e9 a tenth was enough for 1,500 and 4,000 rows, and iterations grow with the root of the shift.
FIRST_SHIFT = 0.1
SHIFT_GROWTH = 10.0
MAX_SHIFTS = 4
# Iterations that look for a direction without curvature: duplicated rows and matrices of low rank showed one within 10.
NUM_CURVATURES = 16
# A pivot further below zero than this is no rounding of the matrix, and a shift that mends it is no small one.
NOT_ROUNDING = 10.0
EPS32 = float(np.finfo(np.float32).eps)


class FactorPreconditioner:
    """P^-1 r = L^-T L^-1 r.

    Parameters
    ----------
    factor
        A finished factor of m rows, of any alpha and precision.
    workspace
        Who runs the tasks; vectors pass below its store.
    system
        The n x n matrix to precondition, when it has more rows than the factor: its diagonal is used for them.
    operator
        The matrix that was factorised. With it a damaged tile is computed again; without it the damage is an error.
    description
        A few words for messages.
    """

    def __init__(
        self,
        factor: TileMatrix,
        workspace: Workspace,
        *,
        system: RidgeOperator | None = None,
        operator: RidgeOperator | None = None,
        description: str = "",
    ) -> None:
        self.factor, self.workspace, self.operator = factor, workspace, operator
        self.description = description or f"{factor.array.dtype} Cholesky factor of {factor.grid.n:,} rows"
        m = factor.grid.n
        self.diagonal = np.empty(0) if system is None or system.grid.n == m else system.diagonal_from(m)
        self.inexact, self.is_verified = factor.dtype == np.float32, False

    def apply(self, r: FloatMatrix, alpha: FloatVector) -> FloatMatrix:
        """Z (n, c) = P^-1 R; ``alpha`` (c,) counts only in rows beyond the factor's.

        Raises
        ------
        DamagedChunkError
            A tile of the factor is damaged and nothing is known to compute it from.
        NumericalError
            R is not finite.
        """
        work, factor, grid = self.workspace, self.factor, self.factor.grid
        m, z, scale = grid.n, np.empty(r.shape), norms(r[: grid.n])
        if not np.isfinite(scale).all():
            raise NumericalError("a residual is not finite", hint="scale the targets")
        scale[scale == 0] = 1.0
        z[m:] = r[m:] / (self.diagonal[:, None] + alpha)
        # an earlier application that was given up may have workers that still write for it
        scratch = place(work.store, "scratch", f"{uuid.uuid4().hex}.zarr")
        shape, chunks = (m, r.shape[1]), (grid.tile_size, min(r.shape[1], MAX_BLOCK_COLUMNS))
        source, between, result = (
            # nobody but the tasks of this application reads it, and they know its shape: no metadata on disk
            BlockColumns(ChunkArray(scratch, name, shape, chunks, factor.array.dtype), grid)
            for name in ("r", "z", "u")
        )
        try:
            source.fill((r[:m] / scale).astype(factor.dtype))
            system = self.operator
            made_by = None if system is None else CholeskyFactor(operator=system, factor=factor, workspace=work)
            summary = substitute(
                "precondition",
                factor,
                (source, between, result),
                work.executor,
                verify=not self.is_verified,
                owners=None if made_by is None else made_by.owner,
            )
            work.record("precondition", summary)
            z[:m] = result.whole() * scale
        finally:
            remove_array(scratch)
        self.is_verified = True
        return z


# --- an earlier factor ----------------------------------------------------------------------------------------------


def earlier_factor(operator: RidgeOperator, workspace: Workspace) -> tuple[FactorPreconditioner, float]:
    """The factor in the workspace's store that comes nearest to a system, and its alpha.

    Most rows first, then the nearest alpha.

    Raises
    ------
    StoreError
        There is none.
    """
    n, rows = operator.grid.n, operator.rows
    found: list[Ancestor] = []
    if operator.kernel is not None and rows is not None:
        found = [
            # all of its rows are rows of the system, and nearly all of the system's rows are there
            item
            for item in ancestors(workspace.store, rows.open(), operator.kernel.to_dict(), kinds=["factors"])
            if item.num_rows == item.fields["n"] >= (1 - MAX_NEW_ROWS) * n
            and (item.fields["weight_digest"] is not None) == operator.weighted
        ]

    def distance(item: Ancestor) -> tuple[int, float]:
        other = float(item.fields["alpha"])
        return -item.num_rows, abs(log(other / operator.alpha)) if other > 0 and operator.alpha > 0 else inf

    for item in sorted(found, key=distance):
        try:
            keep_for_others(item.location, workspace.maker)
            factor = TileMatrix.open(item.location)
        except StoreError:
            continue
        if factor.missing():
            continue
        fields, alpha = item.fields, float(item.fields["alpha"])
        center = None if rows is None or rows.center is None else list(rows.center)
        wanted = (n, operator.grid.tile_size, center, "on_the_fly")
        # in the same tiles a damaged one can be computed again
        is_same = (fields["n"], fields["tile_size"], fields["center"], fields["gram"]) == wanted
        text = f"{factor.array.dtype} Cholesky factor of {factor.grid.n:,} rows and alpha {alpha:g} of an earlier fit"
        same = replace(operator, gram=None, alpha=alpha) if is_same else None
        return FactorPreconditioner(factor, workspace, system=operator, operator=same, description=text), alpha
    raise StoreError(
        f"{workspace.store} has no whole factor of at least the first {n - int(MAX_NEW_ROWS * n):,} of {n:,} rows",
        hint="fit once with solver cholesky, or leave preconditioner = 'factor' out",
    )


# --- a float32 factor -----------------------------------------------------------------------------------------------


def float32_factor(
    operator: RidgeOperator, workspace: Workspace, settings: IterativeSettings, **digests: Any
) -> FactorPreconditioner:
    """A float32 factor of A, continuing one with the same key where it was left.

    Where it breaks down, A + shift I is factorised, the shift ten times as large each time, and sixteen iterations look
    for a direction along which float64 would break down, too. ``digests`` are those of
    :func:`~dkrr.linalg.catalogue.factor_fields`.

    Raises
    ------
    NotPositiveDefiniteError
        Four shifts were not enough, or a pivot is further below zero than rounding explains; or A is not positive
        definite beyond the rounding of float64.
    """
    n, places = operator.grid.n, _places(operator, workspace, **digests)
    # an interrupted fit goes on with the shift that it had come to
    begun = [number for number, (_, place) in enumerate(places) if read_json(place, "zarr.json") is not None]
    text, why, row = f"float32 Cholesky factor of {n:,} rows in {operator.grid.num_lower:,} tiles", "", None
    for shift, location in places[max(begun, default=0) :]:
        shifted = operator.with_alpha(operator.alpha + shift)
        try:
            factored = CholeskyFactor.prepare(shifted, workspace, precision="float32", **digests)
            factored.make_durable()
            break
        except NotPositiveDefiniteError as exc:
            trace = _trace(operator)
            if trace <= 0:
                raise  # in every precision
            # A may be definite all the same: errors of the factor of a nearly singular one grow from column to column
            if location == places[-1][1] or -float(exc.pivot) > NOT_ROUNDING * EPS32 * trace:
                matrix, too = (f"A + {shift:.2g} I", ", too") if shift else ("A", "")
                raise NotPositiveDefiniteError(
                    f"a float32 factor of {matrix} breaks down{too} ({exc.message})",
                    hint=exc.hint,
                    **exc.details | {"precision": "float32"},
                ) from exc
            why, row = why or f" at row {exc.row:,} (pivot {exc.pivot:.2g})", int(exc.row) if row is None else row
            where = f"row {exc.row:,} (pivot {exc.pivot:.2g}, alpha {shifted.alpha:.3g})"
            logger.warning(
                "the float32 factor of %s rows breaks down at %s: preconditioning with a factor of A + shift I",
                f"{n:,}",
                where,
            )
            with contextlib.suppress(LockedError), hold_lock(location):  # who is at it finds the same
                remove_array(location)
    text += f", of A + {shift:.2g} I because float32 broke down{why}" if shift else ""
    made = FactorPreconditioner(factored.factor, workspace, operator=shifted, description=text)
    if shift:
        _check_curvature(operator, made, settings, row)
    return made


def float32_location(operator: RidgeOperator, workspace: Workspace, **digests: Any) -> str | None:
    """Where the whole factor of :func:`float32_factor` is; None where there is none."""
    for _, location in _places(operator, workspace, **digests):
        if read_json(location, "zarr.json") is not None and not TileMatrix.open(location).missing():
            return location
    return None


def _trace(operator: RidgeOperator) -> float:
    return float(operator.diagonal_from(0).sum()) + operator.grid.n * operator.alpha


def _places(operator: RidgeOperator, workspace: Workspace, **digests: Any) -> list[tuple[float, str]]:
    """Every shift that may be tried, and where its factor is."""
    fields = factor_fields(operator, "float32", blas=workspace.blas, **{"weight_digest": None, **digests})
    unit = EPS32 * _trace(operator)
    shifts = [0.0, *(FIRST_SHIFT * SHIFT_GROWTH**number * unit for number in range(MAX_SHIFTS))]
    return [(shift, factor_location(workspace.store, fields | {"alpha": operator.alpha + shift})) for shift in shifts]


def _check_curvature(
    operator: RidgeOperator, made: FactorPreconditioner, settings: IterativeSettings, row: int | None
) -> None:
    """Whether a float64 factor would exist where float32 breaks down: a few iterations for random signs.

    P^-1 with P = A + shift I makes the directions along which A has no curvature the largest ones.

    Raises
    ------
    NotPositiveDefiniteError
        A has none beyond the rounding of float64.
    """
    workspace, n = made.workspace, operator.grid.n
    product = OperatorProduct(operator, workspace, place(workspace.store, "scratch"), phase="precondition", quiet=True)
    # independent random signs; sign i does not depend on n
    words = np.random.Philox(key=np.array([0, 0], dtype=np.uint64)).random_raw(-(-n // 64))
    bits = np.unpackbits(np.asarray(words, dtype="<u8").view(np.uint8), bitorder="little")
    signs: FloatMatrix = 2.0 * bits[:n, None].astype(np.float64) - 1.0
    few = replace(settings, max_iter=NUM_CURVATURES, allow_unconverged=True)
    try:
        conjugate_gradients(product.exact, signs, np.array([operator.alpha]), made, few, norm=product.norm)
    except NotPositiveDefiniteError as exc:
        raise NotPositiveDefiniteError(
            "the float32 factor breaks down, and beyond rounding A is singular in float64, too (random signs in the "
            f"place of a target: {exc.message})",
            hint=exc.hint,
            **exc.details | {"row": row},
        ) from exc
