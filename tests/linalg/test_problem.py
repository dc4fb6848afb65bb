"""The certificate: bounds of the minimum from both sides, whatever the coefficients and the intercept are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dkrr.kernels import make_kernel
from dkrr.linalg.decomposition import decompose
from dkrr.linalg.loss import LOSSES, Loss, make_loss
from dkrr.linalg.loss_problem import GramColumns, LossProblem, Minimiser, certify
from dkrr.linalg.newton import newton

N = 80
RNG = np.random.default_rng(3)
X = RNG.standard_normal((N, 3))
Y = np.sin(2 * X[:, 0]) + X[:, 1] + 1.5 + 0.3 * RNG.standard_normal(N)  # b is far from 0
LABELS = np.where(Y > 0.7, 1.0, -1.0)
C = RNG.uniform(0.2, 5.0, N)


def problem(loss: Loss, *, given: bool = False) -> LossProblem:
    columns = GramColumns(make_kernel("rbf", gamma=0.4), X)
    if given:
        columns = GramColumns(None, columns.block(np.arange(N)))
    return LossProblem(columns, LABELS if loss.is_for_labels else Y, C, loss)


def minimiser(task: LossProblem) -> Minimiser:
    return newton(task, tol=1e-12) if task.loss.is_smooth else decompose([task], tol=1e-12)[0]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_bounds_of_the_minimum_whatever_the_coefficients(name: str, given: bool) -> None:
    task = problem(make_loss(name), given=given)
    best = minimiser(task)
    minimum, rng = best.certificate.primal, np.random.default_rng(4)
    without = minimiser(replace(task, fit_intercept=False))
    low, high = (np.clip(end, -9.0, 9.0) for end in task.bounds)
    some = [best.a * (np.arange(N) != np.argmax(np.abs(best.a))), rng.uniform(low, high), best.a + 1e-9, without.a]
    for a in (np.clip(values, low, high) for values in some):
        for b in (best.b, 0.0):
            found = certify(task, a, b)
            assert found.dual <= minimum * (1 + 1e-11)
            assert found.primal >= minimum * (1 - 1e-11)
            assert found.gap >= (found.primal - minimum) / found.primal - 1e-11
            assert found.kkt > 0


@pytest.mark.parametrize("name", LOSSES)
def test_the_fit_without_an_intercept_is_not_the_one_with(name: str) -> None:
    """Each of its coefficients is right where it is: their sum alone says that b = 0 is not the best constant."""
    task = problem(make_loss(name))
    alone = replace(task, fit_intercept=False)
    a = minimiser(alone).a
    assert certify(alone, a, 0.0).gap <= 1e-11
    found, minimum = certify(task, a, 0.0), minimiser(task).certificate.primal
    assert found.primal > 1.005 * minimum
    assert found.gap >= (found.primal - minimum) / found.primal


@pytest.mark.parametrize("name", LOSSES)
def test_a_sum_that_is_nearly_zero_costs_nearly_nothing(name: str) -> None:
    task = problem(make_loss(name))
    best = minimiser(task)
    inside = int(np.argmax(np.minimum(np.abs(best.a), np.minimum(*(np.abs(best.a - end) for end in task.bounds)))))
    for step in (1e-14, 1e-10, 1e-6):
        moved = best.a + step * np.abs(best.a).sum() * (np.arange(N) == inside)
        found, minimum = certify(task, moved, best.b), best.certificate.primal
        assert minimum * (1 - 1e-11 - 1e4 * step**2) <= found.dual <= minimum * (1 + 1e-11)


def test_no_entry_of_the_matrix_is_evaluated_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    task = problem(make_loss("hinge"))
    a = RNG.uniform(*task.bounds)
    f = task.columns.product(a)
    monkeypatch.setattr(GramColumns, "product", None)
    monkeypatch.setattr(GramColumns, "block", None)
    certify(task, a, 0.0, f)
