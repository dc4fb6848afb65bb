"""Fit a loss for every target, quantile and value of C at once: the solver that the loss allows, and the error of an
answer that is none; targets of classes before it, and what a model has of it behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import ConvergenceError, DataError
from dkrr.kernels import Kernel
from dkrr.linalg.decomposition import MAX_ROUNDS, decompose
from dkrr.linalg.loss import Loss
from dkrr.linalg.loss_problem import Certificate, GramColumns, LossProblem, Minimiser
from dkrr.linalg.newton import MAX_ITER, newton
from dkrr.linalg.products import ArrayRows
from dkrr.linalg.solution import Solution

Matrix = NDArray[np.float64]
# iteration, the largest gap, and what makes the coefficients (n, t) that there are so far
LossProgress = Callable[[int, float, Callable[[], Matrix]], None]


@dataclass(frozen=True)
class LossFit:
    """Coefficients (n, t), intercepts (t,), and how each column was reached, to a gap of ``tol`` if it was.

    ``center`` (d,) is what was subtracted from the rows; None where nothing was.
    """

    dual_coef: Matrix
    intercept: NDArray[np.float64]
    answers: list[Minimiser]
    tol: float
    seconds: float
    center: NDArray[np.float64] | None = None

    @property
    def converged(self) -> bool:
        """Whether every gap is at most ``tol``."""
        return all(certificate.gap <= self.tol for certificate in self.certificates)

    @property
    def certificates(self) -> list[Certificate]:
        """One for each column."""
        return [answer.certificate for answer in self.answers]

    @property
    def num_iterations(self) -> int:
        """Of the column that took most."""
        return max(answer.num_iterations for answer in self.answers)

    def split(self, number: int) -> list[LossFit]:
        """The columns of each of ``number`` values of C."""
        m = len(self.answers) // number
        parts = [slice(m * k, m * (k + 1)) for k in range(number)]
        return [
            replace(self, dual_coef=self.dual_coef[:, p], intercept=self.intercept[p], answers=self.answers[p])
            for p in parts
        ]

    def mirrored(self) -> LossFit:
        """Of the only column, the second of two classes, both: the first one is its negative."""
        (second,) = self.answers
        first = replace(second, a=-second.a, b=-second.b, f=-second.f)
        coefficients, intercepts = np.hstack((-self.dual_coef, self.dual_coef)), np.r_[-self.intercept, self.intercept]
        return replace(self, dual_coef=coefficients, intercept=intercepts, answers=[first, second])


def fit_losses(
    kernel: Kernel | None,
    rows: Matrix,
    targets: Matrix,
    losses: Sequence[Loss],
    C: float | Sequence[float],
    *,
    weight: NDArray[np.float64] | None = None,
    fit_intercept: bool = True,
    tol: float = 1e-6,
    max_iter: int | None = None,
    allow_unconverged: bool = False,
    start: Matrix | None = None,
    num_threads: int = 1,
    progress: LossProgress | None = None,
) -> LossFit:
    """Minimise sum_i C w_i loss(y_i, f_i + b) + a^T K a / 2 for each column.

    There are t = k max(s, q) columns: those of s targets or of q losses, one after another, for each of k values of C.
    In increasing order each C begins with the answer of the one before.

    Parameters
    ----------
    kernel, rows
        Resolved, and rows (n, d), from which the centre of a stationary one is subtracted; None and K itself.
    targets : (n, s)
        Labels are -1 and +1.
    losses
        One for all targets, one for each of them, or q for the only one.
    C : float or (k,)
        1 / (2 alpha), above 0.
    weight : (n,), optional
        At least 0; a row of weight 0 gets the coefficient 0.
    tol
        On the gap of each column, (P - D) / P.
    max_iter
        None: what no problem should need.
    start : (n, t), optional
        Coefficients to begin with; what a loss does not allow of them is moved to where it does.
    progress
        What it raises ends the fit.

    Raises
    ------
    DataError
        C w_i of a row is beyond float64.
    ConvergenceError
        The gap of a column is above ``tol``, and ``allow_unconverged`` is not set; with its history.

    Cost
    ----
    See :func:`~dkrr.linalg.decomposition.decompose` and :func:`~dkrr.linalg.newton.newton`.
    """
    began = time.perf_counter()
    n, m, penalties = len(targets), max(targets.shape[1], len(losses)), np.atleast_1d(np.asarray(C, dtype=np.float64))
    t = m * len(penalties)
    targets, losses = np.tile(np.broadcast_to(targets, (n, m)), len(penalties)), [*losses] * (t // len(losses))
    bounds = np.repeat(_weighted(penalties, np.ones(n) if weight is None else weight), m, axis=1)
    center = None
    if kernel is not None:
        with np.errstate(over="ignore", invalid="ignore"):  # the kernel names what it is too large for
            center = kernel.center(rows.mean(axis=0), rows.std(axis=0))
    rows = rows if center is None else rows - center
    found: dict[int, tuple[NDArray[np.intp], Minimiser]] = {}
    reached = np.zeros((n, t)) if start is None else start.copy()
    quadratic = [j for j in range(t) if not losses[j].is_smooth]
    # smooth ones alone: their rows of weight 0 may differ, and their systems share nothing
    for chosen in [*([quadratic] if quadratic else []), *([j] for j in range(t) if losses[j].is_smooth)]:
        kept = np.flatnonzero((bounds[:, chosen] > 0).any(axis=1))
        mine = rows if len(kept) == n else rows[kept] if kernel is not None else rows[np.ix_(kept, kept)]
        columns = GramColumns(kernel, np.ascontiguousarray(mine), num_threads)
        # a number added to all targets changes b alone, but would take the digits of what is minimised
        levels = [
            _level(targets[kept, j]) if fit_intercept and not losses[j].is_for_labels and len(kept) else 0.0
            for j in chosen
        ]
        problems = [
            LossProblem(columns, targets[kept, j] - level, bounds[kept, j].copy(), losses[j], fit_intercept)
            for j, level in zip(chosen, levels, strict=True)
        ]
        # zeros are no place that is worth to begin at: a solver may know a better one
        begin = None if start is None or not start[:, chosen].any() else start[kept][:, chosen]
        place = np.ix_(kept, np.array(chosen))
        told = None if progress is None else partial(_tell, progress, reached, place)
        if chosen is quadratic:
            answers = decompose(problems, tol=tol, max_iter=max_iter, start=begin, progress=told)
        else:
            (j,) = chosen
            below = reached[kept, j - m] if j >= m else None  # the answer for the C before
            first = below if begin is None else begin[:, 0]
            answers = [newton(problems[0], tol=tol, max_iter=max_iter, start=first, progress=told)]
        answers = [replace(answer, b=answer.b + level) for answer, level in zip(answers, levels, strict=True)]
        reached[place] = np.column_stack([answer.a for answer in answers])
        found |= {j: (kept, answer) for j, answer in zip(chosen, answers, strict=True)}
    dual_coef, intercept = np.zeros((n, t)), np.zeros(t)
    for j, (kept, answer) in found.items():
        dual_coef[kept, j], intercept[j] = answer.a, answer.b
    answers = [found[j][1] for j in range(t)]
    late = [j for j in range(t) if not answers[j].certificate.gap <= tol]
    if late and not allow_unconverged:
        worst = max(late, key=lambda j: answers[j].certificate.gap)
        of = (f" of target {worst % m}" if m > 1 else "") + (f" with C = {penalties[worst // m]:g}" if t > m else "")
        most = max_iter if max_iter is not None else MAX_ITER if losses[worst].is_smooth else MAX_ROUNDS
        is_stopped = answers[worst].num_iterations >= most
        what = (
            "raise max_iter or tol" if is_stopped else "rounding allows no better: center the rows, lower C, raise tol"
        )
        raise ConvergenceError(
            f"{losses[worst].name}{of} ended after "
            f"{answers[worst].num_iterations:,} iterations with a duality gap of {answers[worst].certificate.gap:.1e}; "
            f"{tol:.1e} asked for",
            hint=f"{what}, or set allow_unconverged",
            history=answers[worst].history,
            stagnated=not is_stopped,
            num_iterations=answers[worst].num_iterations,
        )
    return LossFit(dual_coef, intercept, answers, tol, time.perf_counter() - began, center)


def _level(y: NDArray[np.float64]) -> float:
    """The lower median, which is one of the targets and never beyond float64."""
    return float(np.quantile(y, 0.5, method="lower"))


def _weighted(C: NDArray[np.float64], weight: NDArray[np.float64]) -> Matrix:
    """C w_i of each row and value of C (n, k)."""
    with np.errstate(over="ignore"):
        products = C * weight[:, None]
    if not np.isfinite(products).all():
        raise DataError(f"C is {C.max():g} and the largest weight {weight.max():g}: a product beyond float64")
    return np.asarray(products)


def _tell(
    progress: LossProgress, reached: Matrix, place: Any, number: int, gap: float, coefficients: Callable[[], Matrix]
) -> None:
    """Say how far the columns at ``place`` are, the others as they were ``reached``."""

    def whole() -> Matrix:
        found = reached.copy()
        found[place] = coefficients().reshape(found[place].shape)
        return found

    progress(number, gap, whole)


def label_targets(codes: NDArray[np.intp], weight: Matrix, classes: Sequence[Any]) -> Matrix:
    """Targets -1 and +1 of losses for labels: (n, 1), +1 for the second of two classes; (n, k), one against the rest.

    Parameters
    ----------
    codes : (n,)
        The place of the label of each row among the ``classes``.
    weight : (n,)

    Raises
    ------
    DataError
        A class has no row, or none with a weight above 0.
    """
    count = np.bincount(codes, minlength=len(classes))
    total = np.bincount(codes, weights=weight, minlength=len(classes))
    if not total.all():
        place = int(np.argmin(total))
        if not count[place]:
            raise DataError(f"class {classes[place]!r} has no training row", hint="leave out the rows that have it")
        raise DataError(
            f"the weights of class {classes[place]!r} are all zero",
            hint="give at least one of its rows a positive weight",
        )
    of_class = np.arange(len(classes)) if len(classes) > 2 else np.array([1])
    return np.where(codes[:, None] == of_class, 1.0, -1.0)


def loss_solver(loss: Loss) -> str:
    """Which solver a loss has: "newton" where it is smooth, "decomposition" where it has corners."""
    return "newton" if loss.is_smooth else "decomposition"


def loss_parts(
    found: LossFit,
    loss: Loss,
    kernel: Kernel | None,
    X: Matrix,
    *,
    fit_intercept: bool,
    support: NDArray[np.intp] | None = None,
) -> dict[str, Any]:
    """Kernel, support vectors, their coefficients and the solution, for :class:`dkrr.models.model.Model`.

    Parameters
    ----------
    loss
        Of the first column; all have the same one but for its parameter.
    X : (n, d)
        Rows as they were given, not centred; not used without a kernel, where all coefficients are kept.
    support
        Rows with a coefficient other than 0, in the order in which the model shall have them; as in ``X`` by default.
    """
    coefficients = found.dual_coef
    support = np.flatnonzero(coefficients.any(axis=1)) if support is None else support
    solution = Solution(
        solver=loss_solver(loss),
        precision="float64",
        converged=found.converged,
        num_iterations=found.num_iterations,
        relative_residual=[],
        backward_error=[],
        certificates=found.certificates,
        seconds={"solve": found.seconds},
        message=f"{loss.name} loss: {len(support):,} of {len(coefficients):,} rows are support vectors",
    )
    return {
        "kernel": kernel,
        "x_fit": None if kernel is None else ArrayRows(X[support]),
        "dual_coef": ArrayRows(coefficients if kernel is None else coefficients[support]),
        "center": found.center,
        "intercept": found.intercept if fit_intercept else None,
        "solution": solution,
    }


def loss_details(loss: Loss, C: float, alpha: float, **parameters: Any) -> dict[str, Any]:
    """Loss, its ``parameters`` (epsilon, quantile), C = 1 / (2 alpha) and alpha, for ``Model.provenance``."""
    given = {name: np.asarray(value, dtype=np.float64).tolist() for name, value in parameters.items()}
    return {"alpha": [alpha], "C": C, "loss": loss.name, "solver": loss_solver(loss), **given}
