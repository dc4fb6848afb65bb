"""Parameters of iterative solvers, with nothing left to choose but a rank.

Frozen, keyword-only, checked on construction; they travel into the keys and the records of a run as plain dicts.
"""

from __future__ import annotations

import numbers
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dkrr.errors import ParameterError

DEFAULT_MAX_ITER = 1000


@dataclass(frozen=True, kw_only=True)
class IterativeSettings:
    """Parameters of the conjugate gradients.

    Parameters
    ----------
    tol
        A column is converged when its true relative residual |S Y - A u| / |S Y| is at most this.
    max_iter
        Passes over the kernel; None means 1,000.
    preconditioner
        "rpcholesky" (randomly pivoted Cholesky), "nystrom" (uniform columns), "factor" (one of these rows that an
        earlier fit left in the store, of another alpha), or "none".
    rank
        Columns of the preconditioner; "auto" takes what a memory and time budget allows.
    seed
        Of every random choice.
    allow_unconverged
        Return, and record in the model, an answer that did not converge, instead of raising.
    """

    tol: float = 1e-8
    max_iter: int | None = None
    preconditioner: Literal["rpcholesky", "nystrom", "factor", "none"] = "rpcholesky"
    rank: int | Literal["auto"] = "auto"
    seed: int = 0
    allow_unconverged: bool = False

    def __post_init__(self) -> None:
        tol: Any = self.tol
        limit: Any = self.max_iter
        if not isinstance(tol, numbers.Real) or not 0 < float(tol) < 1:
            raise ParameterError(f"tol = {tol!r}", hint="give a number between 0 and 1")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, numbers.Integral) or limit < 1):
            raise ParameterError(f"max_iter = {limit!r}", hint="give a whole number of at least 1, or None")

    @property
    def iterations(self) -> int:
        """The limit on iterations."""
        return DEFAULT_MAX_ITER if self.max_iter is None else self.max_iter

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class NystromSettings:
    """Parameters of Nystrom regression, an approximation: f = sum over m centres instead of n rows.

    Parameters
    ----------
    num_centers
        m.
    centers
        "rpcholesky" chooses them by randomly pivoted Cholesky on a sample of the rows, "uniform" draws them.
    """

    num_centers: int = 5000
    centers: Literal["rpcholesky", "uniform"] = "uniform"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """What a plan foresees of a way: iterations from ``low`` to ``high``, ``seconds`` of its phases at the upper end.

    0, or nothing, where it has none or nothing was measured.
    """

    low: float = 0.0
    high: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)


def way_name(solver: str, precision: str, gram: str, rank: int) -> str:
    """``cg mixed, rank 500``."""
    preconditioned = "" if solver != "cg" else f", rank {rank:,}" if rank else ", no preconditioner"
    return f"{solver} {precision}{preconditioned}{', stored Gram' if gram == 'stored' else ''}"
