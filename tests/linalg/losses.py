"""What tests of the solvers for losses share: the gap of an answer, and how much of K was evaluated."""

from __future__ import annotations

import numpy as np
import pytest

from dkrr.linalg import loss_problem
from dkrr.linalg.loss_problem import LossProblem, Minimiser


def gap(given: LossProblem, found: Minimiser) -> float:
    """(P - D) / P with both objectives written down once more; inf where a is not allowed."""
    low, high = given.bounds
    if given.fit_intercept and abs(found.a.sum()) > 1e-12 * np.abs(found.a).sum():
        return np.inf
    if (found.a < low).any() or (found.a > high).any() or (found.b and not given.fit_intercept):
        return np.inf
    f = given.columns.block(np.arange(len(given.y))) @ found.a  # one f for both: its rounding is of second order
    half = 0.5 * found.a @ f
    primal = half + given.C @ given.loss.value(given.y, f + found.b)
    slopes = np.clip(-found.a / given.C, *given.loss.domain(given.y))  # C q / C may not be q
    dual = -half - given.C @ given.loss.conjugate(given.y, slopes)
    return float((primal - dual) / primal)


def counted_entries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The entries of K in each product from now on."""
    entries, product = list[int](), loss_problem.kernel_product

    def counting(kernel, a, b, *others, **named):  # type: ignore[no-untyped-def]
        entries.append(len(a) * len(b))
        product(kernel, a, b, *others, **named)

    monkeypatch.setattr(loss_problem, "kernel_product", counting)
    return entries
