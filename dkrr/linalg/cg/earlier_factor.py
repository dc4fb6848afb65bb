"""The factor of another alpha, or of the first rows, as a preconditioner: for fits that differ little from others.

    P = K + alpha' I,     eigenvalues of P^-1 (K + alpha I) between alpha / alpha' and 1 (or 1 and alpha / alpha')

so conjugate gradients take about sqrt(alpha / alpha') / 2 ln(2 / tol) iterations, whatever the kernel: some 15 for
twice the alpha, where a new factor takes n^3 / 3 flops. You need it when alpha is changed on rows whose factor is in
the store.

Cost
----
The search is that of :mod:`dkrr.linalg.catalogue`; an application is one pair of sweeps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log
from typing import Any

import numpy as np

from dkrr.errors import StoreError
from dkrr.linalg.catalogue import Ancestor, ancestors
from dkrr.linalg.cg.factor_precondition import FactorPreconditioner
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.workspace import Workspace, keep_for_others
from dkrr.store.files import name_of
from dkrr.tiles import TileMatrix

__all__ = ["EarlierFactor", "find_earlier_factor"]

# more new rows than this make a block diagonal preconditioner worse than it is worth, see factor_precondition
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
        """Ready to be applied; a context manager."""
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
