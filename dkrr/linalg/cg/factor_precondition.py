"""A tile Cholesky factor as a preconditioner: z = L^-T L^-1 r by two sweeps on the workers.

The factor need not belong to the system. A float32 factor of the same matrix leaves a few iterations; one of another
alpha still saves most of them. So does one of the first m < n rows while few rows were appended: rows that the factor
does not know are divided by their diagonal entry of A, and the preconditioner is block diagonal. On 250 normal rows
with rbf, matern and laplacian kernels 4 % of new rows left a tenth to nine tenths of the iterations, 20 % about as
many as without a preconditioner, more made it worse than none: extend the factor then.

A residual is divided by its norm and rounded to the factor's precision, so that nothing overflows or vanishes; the
result comes back in float64. The preconditioner decides how many iterations there are, and never what they converge to.
Checksums of tiles are therefore compared in the first application only, which verifies the whole factor once.

Cost
----
An application reads the factor twice, n^2 elements: bound by memory bandwidth for a few columns. 4 n c elements pass
through the store.

The factor of another alpha, or of the first rows, as a preconditioner: for fits that differ little from others.

    P = K + alpha' I,     eigenvalues of P^-1 (K + alpha I) between alpha / alpha' and 1 (or 1 and alpha / alpha')

so conjugate gradients take about sqrt(alpha / alpha') / 2 ln(2 / tol) iterations, whatever the kernel: some 15 for
twice the alpha, where a new factor takes n^3 / 3 flops. You need it when alpha is changed on rows whose factor is in
the store.

Cost
----
The search is that of :mod:`dkrr.linalg.catalogue`; an application is one pair of sweeps.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from math import log
from typing import Any

import numpy as np

from dkrr.errors import NumericalError, StoreError
from dkrr.linalg.blocks import MAX_BLOCK_COLUMNS, BlockColumns, FloatMatrix, FloatVector, norms
from dkrr.linalg.catalogue import Ancestor, ancestors
from dkrr.linalg.factor.direct import factor_owner
from dkrr.linalg.factor.triangular import substitute
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.workspace import Workspace, keep_for_others
from dkrr.store.chunks import ChunkArray
from dkrr.store.files import name_of, place, remove_array
from dkrr.tiles import TileMatrix


class FactorPreconditioner:
    """P^-1 r = L^-T L^-1 r.

    Parameters
    ----------
    factor
        A finished factor of m rows, of any alpha and precision.
    workspace
        Who runs the tasks.
    scratch
        Folder, URL or store below which vectors pass.
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
        scratch: Any,
        *,
        system: RidgeOperator | None = None,
        operator: RidgeOperator | None = None,
        description: str = "",
    ) -> None:
        self.factor, self.workspace, self.scratch, self.operator = factor, workspace, scratch, operator
        self.description = description or f"{factor.array.dtype} Cholesky factor of {factor.grid.n:,} rows"
        m = factor.grid.n
        beyond = system is not None and system.grid.n > m
        self.diagonal = system.diagonal_from(m) if system is not None and beyond else np.empty(0)
        self.num_applications = 0
        self.inexact = factor.dtype == np.float32

    def apply(self, r: FloatMatrix, alpha: FloatVector) -> FloatMatrix:
        """Z (n, c) = P^-1 R; ``alpha`` (c,) counts only in rows beyond the factor's.

        Raises
        ------
        DamagedChunkError
            A tile of the factor is damaged and nothing is known to compute it from.
        NumericalError
            R is not finite.
        """
        m = self.factor.grid.n
        if len(r) != m + len(self.diagonal):
            raise ValueError(f"R has {len(r)} rows, {m + len(self.diagonal)} expected")
        z = np.empty(r.shape)
        z[m:] = r[m:] / (self.diagonal[:, None] + alpha)
        scale = norms(r[:m])
        if not np.isfinite(scale).all():
            raise NumericalError("a residual is not finite", hint="scale the targets")
        scale[scale == 0] = 1.0
        self.num_applications += 1
        # an earlier application that was given up may have workers that still write for it
        folder, grid, dtype = f"precondition-{uuid.uuid4().hex}", self.factor.grid, self.factor.array.dtype
        shape, chunks = (grid.n, r.shape[1]), (grid.tile_size, min(r.shape[1], MAX_BLOCK_COLUMNS))
        source, between, result = (
            # nobody but the tasks of this application reads it, and they know its shape: no metadata on disk
            BlockColumns(ChunkArray(self.scratch, f"{folder}/{name}", shape, chunks, dtype), grid)
            for name in ("r", "z", "u")
        )
        try:
            source.fill((r[:m] / scale).astype(self.factor.dtype))
            owners = {} if self.operator is None else factor_owner(self.operator, self.factor, self.workspace)
            summary = substitute(
                "precondition", self.factor, (source, between, result), self.workspace.executor,
                verify=self.num_applications == 1, owners=owners,
            )  # fmt: skip
            self.workspace.record("precondition", summary)
            z[:m] = result.whole() * scale
        finally:
            remove_array(place(self.scratch, folder))
        return z


# more new rows than this make a block diagonal preconditioner worse than it is worth
MAX_NEW_ROWS = 0.04


@dataclass(frozen=True, kw_only=True)
class EarlierFactor:
    """A whole factor of the first rows of a system, of some alpha.

    Parameters
    ----------
    factor
        Of m <= n rows.
    alpha
        Under which it was made.
    operator
        The system.
    is_same
        Whether it has all rows, in the same tiles, so that a damaged one can be computed again.
    """

    factor: TileMatrix
    alpha: float
    operator: RidgeOperator
    is_same: bool

    @property
    def key(self) -> str:
        """Its name in the store."""
        return name_of(self.factor.location)

    @property
    def inexact(self) -> bool:
        """As of the preconditioner that it becomes."""
        return self.factor.dtype == np.float32

    @property
    def description(self) -> str:
        """A few words for messages and records."""
        rows, dtype = f"{self.factor.grid.n:,}", self.factor.array.dtype
        return f"{dtype} Cholesky factor of {rows} rows and alpha {self.alpha:g} of an earlier fit"

    def open(self, workspace: Workspace, scratch: Any) -> FactorPreconditioner:
        """Ready to be applied."""
        return FactorPreconditioner(
            self.factor,
            workspace,
            scratch,
            system=self.operator,
            operator=self.operator.with_alpha(self.alpha) if self.is_same else None,
            description=self.description,
        )


def find_earlier_factor(operator: RidgeOperator, workspace: Workspace) -> EarlierFactor:
    """The factor in the workspace's store that comes nearest to a system: most rows first, then the nearest alpha.

    Raises
    ------
    StoreError
        There is none.
    """
    n = operator.grid.n
    found: EarlierFactor | None = None
    if operator.kernel is not None and operator.rows is not None:
        candidates = ancestors(workspace.store, operator.rows.open(), operator.kernel.to_dict(), kinds=["factors"])
        usable = [item for item in candidates if _is_usable(item, operator)]
        for item in sorted(usable, key=lambda item: (-item.num_rows, _distance(item, operator.alpha))):
            try:
                keep_for_others(item.location, workspace.maker)
                factor = TileMatrix.open(item.location)
            except StoreError:
                continue
            if not factor.missing():
                is_same = _is_same(item, operator)
                same = operator if not is_same else replace(operator, gram=None)
                found = EarlierFactor(factor=factor, alpha=float(item.fields["alpha"]), operator=same, is_same=is_same)
                break
    if found is None:
        raise StoreError(
            f"{workspace.store} has no whole factor of at least the first {n - int(MAX_NEW_ROWS * n):,} of {n:,} rows",
            hint="fit once with solver cholesky, or leave preconditioner = 'factor' out",
        )
    return found


def _is_usable(item: Ancestor, operator: RidgeOperator) -> bool:
    """Whether all rows of a factor are rows of the system, and nearly all of the system's rows are there."""
    fields = item.fields
    return (
        item.num_rows == fields["n"]
        and item.num_rows >= (1 - MAX_NEW_ROWS) * operator.grid.n
        and (fields["weight_digest"] is not None) == operator.weighted
    )


def _is_same(item: Ancestor, operator: RidgeOperator) -> bool:
    fields, rows = item.fields, operator.rows
    center = None if rows is None or rows.center is None else list(rows.center)
    wanted = (operator.grid.n, operator.grid.tile_size, center, "on_the_fly")
    return (fields["n"], fields["tile_size"], fields["center"], fields["gram"]) == wanted


def _distance(item: Ancestor, alpha: float) -> float:
    other = float(item.fields["alpha"])
    return abs(log(other / alpha)) if other > 0 and alpha > 0 else float("inf")
