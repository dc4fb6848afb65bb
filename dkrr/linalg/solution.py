"""What a solve was asked for, and what it found and how well: settings of iterations, and the Solution of any solver.

Frozen, keyword-only, checked on construction; they travel into the keys and the records of a run as plain dicts. The
residual is taken by ``residual_norms`` of matmul.py, in memory by ``judge_dense`` of dense.py; those of other equations
stand beside them (primal.py, nystrom.py).
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import NotPositiveDefiniteError, ParameterError, ResidualError
from dkrr.markup import facts_html, lines_text, named

if TYPE_CHECKING:
    from dkrr.linalg.loss_problem import Certificate

DEFAULT_MAX_ITER = 1000
# LAPACK's test suite calls a solve good when its ratio, which divides by n eps, is below 30.
BACKWARD_ERROR_FACTOR = 30.0
LIMIT_RESIDUAL = 0.05
_EPS = {"float64": 2.220446049250313e-16, "float32": 1.1920928955078125e-07}


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
    def is_low_rank(self) -> bool:
        """Whether the preconditioner has a rank."""
        return self.preconditioner not in ("none", "factor")

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


def is_limit(n: int, relative: NDArray[np.float64], backward: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which answers of an iteration that gets no further are as good as those of a float64 factor, (t,).

    Their backward error is at most 30 n eps, and 100 eps, 100 times what rounding A moves it by. Huge coefficients make
    any backward error small, so an answer also has to explain the targets: all but a twentieth of them.
    """
    bar = min(100 * _EPS["float64"], backward_error_bar(n, "float64"))
    return (backward <= bar) & (relative <= LIMIT_RESIDUAL)


def backward_error_bar(n: int, precision: str) -> float:
    """30 n eps of the answer's precision."""
    return BACKWARD_ERROR_FACTOR * n * _EPS[precision]


def no_factor(
    where: str, first: int, lost: tuple[int, float], alpha: float, dtype: Any, n: int, diagonal: NDArray[Any]
) -> NotPositiveDefiniteError:
    """The error for a matrix of n rows that has no Cholesky factor, with an alpha that would do.

    ``lost`` is that of :func:`~dkrr.tiles.blas.lost_pivot`, counted from row ``first``. Rounding is that of the largest
    entry of the ``diagonal``, not of what is left at the pivot.
    """
    eps, row, pivot = _EPS[np.dtype(dtype).name], first + lost[0] - 1, lost[1]
    suggested = alpha + (10 * max(abs(pivot), n * eps * float(np.abs(diagonal).max())) or eps)
    return NotPositiveDefiniteError(
        f"{where} is not positive definite at row {row:,} (pivot {pivot:.2g}, alpha {alpha:.3g}, {np.dtype(dtype)})",
        hint=f"raise alpha to at least {suggested:.1g}, or remove duplicated rows; an indefinite kernel has no "
        "Cholesky factor at small alpha",
        row=row,
        pivot=pivot,
        alpha=alpha,
        suggested_alpha=suggested,
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class Solution:
    """Facts about a solve of A u = S Y.

    Parameters
    ----------
    solver, precision
        What computed the answer.
    relative_residual
        |R| / |Y| per target, R = S Y - A u in float64 from the kernel and the rows, 2-norms; 0 for a zero target.
    backward_error
        |R| / (|A| |u| + |S Y|) per target in the infinity norm.
    num_iterations
        0 for a direct solve.
    seconds
        Wall time of each phase.
    message
        One sentence.
    reused
        What was there from earlier fits, see :meth:`dkrr.linalg.catalogue.TakenOver.record`: "factor", "gram",
        "preconditioner" where that is an earlier factor, "start" where an iteration began with earlier coefficients,
        and "center" where newer rows met a frozen one. Empty where all was computed.
    given_up
        Ways that were tried before this one and did not lead to an answer: "way", "next", "because", "iterations" and
        a "sentence" each.
    certificates
        Of another loss than the square, per target, which has no residual: see
        :class:`dkrr.linalg.loss_problem.Certificate`.
    """

    solver: str
    precision: str
    converged: bool
    num_iterations: int
    relative_residual: list[float]
    backward_error: list[float]
    seconds: dict[str, float] = field(default_factory=dict)
    message: str = ""
    reused: dict[str, Any] = field(default_factory=dict)
    given_up: list[dict[str, Any]] = field(default_factory=list)
    certificates: list[Certificate] = field(default_factory=list)

    @classmethod
    def direct(
        cls, n: int, relative: list[float], backward: list[float], *, hint: str, message: str, **facts: Any
    ) -> Solution:
        """What was solved for n rows without iterations, in words and other ``facts``; with a ``hint`` where it failed.

        Raises
        ------
        ResidualError
            The backward error of a target exceeds 30 n eps.
        """
        bar, target = backward_error_bar(n, facts["precision"]), int(np.argmax(backward))  # the first that is no number
        if not backward[target] <= bar:
            raise ResidualError(
                f"backward error {backward[target]:.2g} of target {target} exceeds {bar:.2g} (30 n eps, "
                f"{facts['precision']}): {message}",
                hint=hint,
                backward_error=backward,
            )
        message = f"{message}, largest relative residual {max(relative):.1e}"
        return cls(
            converged=True, num_iterations=0, relative_residual=relative, backward_error=backward, message=message,
            **facts,
        )  # fmt: skip

    @property
    def worst(self) -> tuple[str, float]:
        """What tells how exact the answer is, and its value for the least exact target."""
        name, values = self._measured()
        return name, max(values, default=0.0)

    def _measured(self) -> tuple[str, list[float]]:
        if self.certificates:
            return "duality gap", [certificate.gap for certificate in self.certificates]
        return "relative residual", self.relative_residual

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def __repr__(self) -> str:
        facts = dict(self._facts())
        state = "converged" if self.converged else "NOT converged"
        del facts["precision"], facts["converged"], facts["targets"]
        return lines_text(
            f"Solution: {self.solver}, {self.precision}, {state}",
            "; ".join([named(len(self._measured()[1]), "target"), *(f"{name} {facts[name]}" for name in facts)]),
            self.message,
        )

    def _repr_html_(self) -> str:
        """For notebooks."""
        return facts_html(f"{self.solver} solution", self._facts(), self.message)

    def _facts(self) -> Iterator[tuple[str, str]]:
        name, values = self._measured()
        yield "precision", self.precision
        yield "converged", "yes" if self.converged else "NO"
        if self.num_iterations:
            yield "iterations", f"{self.num_iterations:,}"
        yield "targets", f"{len(values):,}"
        if values:
            where = f" (target {values.index(max(values))})" if len(values) > 1 else ""
            yield f"largest {name}", f"{max(values):.2e}{where}"
        if self.certificates:
            yield "largest KKT violation", f"{max(certificate.kkt for certificate in self.certificates):.2e}"
        elif values:
            yield "largest backward error", f"{max(self.backward_error, default=0.0):.2e}"
        if self.seconds:
            yield "seconds", ", ".join(f"{name} {value:.2f}" for name, value in self.seconds.items())

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Solution:
        """Inverse of :meth:`to_dict`."""
        from dkrr.linalg.loss_problem import Certificate

        return cls(**values | {"certificates": [Certificate(**item) for item in values.get("certificates", [])]})
