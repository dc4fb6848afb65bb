"""Fit one loss for each column of targets: the solver that the loss allows, and the error of an answer that is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import ConvergenceError
from dkrr.kernels import Kernel
from dkrr.linalg.losses.decomposition import decompose
from dkrr.linalg.losses.loss import Loss
from dkrr.linalg.losses.newton import newton
from dkrr.linalg.losses.problem import Certificate, GramColumns, LossProblem, Minimiser

__all__ = ["LossFit", "fit_losses"]

Matrix = NDArray[np.float64]
# iteration, the largest gap, and what makes the coefficients (n, t) that there are so far
LossProgress = Callable[[int, float, Callable[[], Matrix]], None]


@dataclass(frozen=True)
class LossFit:
    """Coefficients (n, t), intercepts (t,), and how each column was reached."""

    dual_coef: Matrix
    intercept: NDArray[np.float64]
    answers: list[Minimiser]
    converged: bool
    seconds: float

    @property
    def certificates(self) -> list[Certificate]:
        """One for each column."""
        return [answer.certificate for answer in self.answers]

    @property
    def num_iterations(self) -> int:
        """Of the column that took most."""
        return max(answer.num_iterations for answer in self.answers)

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
    C: Matrix,
    *,
    fit_intercept: bool = True,
    tol: float = 1e-6,
    max_iter: int | None = None,
    allow_unconverged: bool = False,
    start: Matrix | None = None,
    num_threads: int = 1,
    progress: LossProgress | None = None,
) -> LossFit:
    """Minimise sum_i C_i loss(y_i, f_i + b) + a^T K a / 2 for each column of targets.

    Parameters
    ----------
    kernel, rows
        Resolved, and rows (n, d) centred where it is stationary; None and K itself.
    targets : (n, t)
        Labels are -1 and +1.
    losses : of length t
    C : (n, t)
        w_i / (2 alpha), at least 0; a row of weight 0 gets the coefficient 0.
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
    ConvergenceError
        The gap of a column is above ``tol``, and ``allow_unconverged`` is not set; with its history.

    Cost
    ----
    See :func:`~dkrr.linalg.losses.decomposition.decompose` and :func:`~dkrr.linalg.losses.newton.newton`.
    """
    began = time.perf_counter()
    n, t = targets.shape
    found: dict[int, tuple[NDArray[np.intp], Minimiser]] = {}
    reached = np.zeros((n, t)) if start is None else start.copy()
    quadratic = [j for j in range(t) if not losses[j].is_smooth]
    # smooth ones alone: their rows of weight 0 may differ, and their systems share nothing
    for chosen in [*([quadratic] if quadratic else []), *([j] for j in range(t) if losses[j].is_smooth)]:
        kept = np.flatnonzero((C[:, chosen] > 0).any(axis=1))
        mine = rows if len(kept) == n else rows[kept] if kernel is not None else rows[np.ix_(kept, kept)]
        columns = GramColumns(kernel, np.ascontiguousarray(mine), num_threads)
        problems = [
            LossProblem(columns, targets[kept, j].copy(), C[kept, j].copy(), losses[j], fit_intercept) for j in chosen
        ]
        # zeros are no place that is worth to begin at: a solver may know a better one
        begin = None if start is None or not start[:, chosen].any() else start[kept][:, chosen]
        place = np.ix_(kept, np.array(chosen))
        told = None if progress is None else partial(_tell, progress, reached, place)
        if chosen is quadratic:
            answers = decompose(problems, tol=tol, max_iter=max_iter, start=begin, progress=told)
        else:
            first = None if begin is None else begin[:, 0]
            answers = [newton(problems[0], tol=tol, max_iter=max_iter, start=first, progress=told)]
        reached[place] = np.column_stack([answer.a for answer in answers])
        found |= {j: (kept, answer) for j, answer in zip(chosen, answers, strict=True)}
    dual_coef, intercept = np.zeros((n, t)), np.zeros(t)
    for j, (kept, answer) in found.items():
        dual_coef[kept, j], intercept[j] = answer.a, answer.b
    answers = [found[j][1] for j in range(t)]
    late = [j for j in range(t) if not answers[j].certificate.gap <= tol]
    if late and not allow_unconverged:
        worst = max(late, key=lambda j: answers[j].certificate.gap)
        raise ConvergenceError(
            f"{losses[worst].name}{f' of target {worst}' if t > 1 else ''} ended after "
            f"{answers[worst].num_iterations:,} iterations with a duality gap of {answers[worst].certificate.gap:.1e}; "
            f"{tol:.1e} asked for",
            hint="raise max_iter or tol, or set allow_unconverged",
            history=answers[worst].history,
            num_iterations=answers[worst].num_iterations,
        )
    return LossFit(dual_coef, intercept, answers, not late, time.perf_counter() - began)


def _tell(
    progress: LossProgress, reached: Matrix, place: Any, number: int, gap: float, coefficients: Callable[[], Matrix]
) -> None:
    """Say how far the columns at ``place`` are, the others as they were ``reached``."""

    def whole() -> Matrix:
        found = reached.copy()
        found[place] = coefficients().reshape(found[place].shape)
        return found

    progress(number, gap, whole)
