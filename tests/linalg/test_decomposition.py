"""The decomposition against libsvm's answers, the conditions of the minimum, and programmes that are hard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.svm import SVC, SVR

from dkrr import KernelQuantileRegressor
from dkrr.kernels import make_kernel
from dkrr.linalg import decomposition
from dkrr.linalg.loss import Loss, make_loss
from dkrr.linalg.loss_problem import GramColumns, LossProblem, Minimiser, certify
from tests.linalg.losses import counted_entries, gap

N, D = 160, 4
RANDOM = np.random.default_rng(5)
X = RANDOM.standard_normal((N, D))
SMOOTH = np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.3 * RANDOM.standard_normal(N)
LABELS = np.where(SMOOTH > 0.2, 1.0, -1.0)
WEIGHTS = RANDOM.uniform(0.2, 3.0, N)
KERNELS = {
    "rbf": ({"gamma": 0.3}, {"gamma": 0.3}),
    "poly": ({"gamma": 0.25, "degree": 3, "coef0": 1.0}, {"gamma": 0.25, "degree": 3, "coef0": 1.0}),
    "linear": ({}, {}),
}
PLAIN = {name: make_loss(name) for name in ("hinge", "epsilon_insensitive", "pinball")}


def problem(
    loss: Loss, C: Any = 1.0, kernel: str = "rbf", rows: np.ndarray = X, intercept: bool = True, **parameters: Any
) -> LossProblem:
    made = make_kernel(kernel, **(parameters or KERNELS[kernel][0])).resolve(D)
    y = LABELS if loss.is_for_labels else SMOOTH
    return LossProblem(
        GramColumns(made, rows), y, np.broadcast_to(np.asarray(C, float), y.shape).copy(), loss, intercept
    )


def decompose(given: LossProblem, *, start: Any = None, **options: Any) -> Minimiser:
    (found,) = decomposition.decompose([given], start=None if start is None else start[:, None], **options)
    return found


@pytest.mark.parametrize("kernel", list(KERNELS))
@pytest.mark.parametrize("C", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("name", ["hinge", "epsilon_insensitive"])
def test_the_answer_is_that_of_libsvm(name: str, weights: Any, C: float, kernel: str) -> None:
    given = problem(PLAIN[name], C if weights is None else C * weights, kernel)
    found = decompose(given, tol=1e-12)
    assert gap(given, found) <= 1e-11
    assert found.certificate.gap == pytest.approx(gap(given, found), abs=1e-12)
    other = SVC if name == "hinge" else SVR
    machine = other(C=C, kernel=kernel, tol=1e-10, **KERNELS[kernel][1]).fit(X, given.y, weights)
    decision = machine.decision_function(X) if name == "hinge" else machine.predict(X)
    a = np.zeros(N)
    a[machine.support_] = machine.dual_coef_[0]
    theirs = certify(given, a, float(machine.intercept_[0]))
    # libsvm keeps entries of K in float32, so its primal objective is off by more
    assert found.certificate.primal <= theirs.primal * (1 + 1e-11)
    assert found.certificate.dual == pytest.approx(theirs.dual, rel=1e-8)
    assert np.abs(found.f + found.b - decision).max() <= 1e-4 * np.abs(decision).max()
    differ = np.setxor1d(np.flatnonzero(found.a), machine.support_)
    assert kernel == "linear" or np.all(np.minimum(abs(a), abs(found.a))[differ] == 0)
    assert kernel == "linear" or np.all(np.maximum(abs(a), abs(found.a))[differ] <= 1e-4 * given.C[differ])


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("loss", [*PLAIN.values(), make_loss("pinball", quantile=0.05)])
def test_every_quadratic_programme_ends_at_its_minimum(loss: Loss, intercept: bool) -> None:
    for C in (0.01, 1.0, 1000.0):
        given = problem(loss, C, intercept=intercept)
        assert gap(given, decompose(given, tol=1e-11)) <= 1e-10


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("loss", list(PLAIN.values()))
def test_small_working_sets_come_to_the_same(loss: Loss, intercept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(loss, 10.0, intercept=intercept)
    whole = decompose(given, tol=1e-11)
    monkeypatch.setattr(decomposition, "WORKING_SET", 24)
    parts = decompose(given, tol=1e-11)
    assert parts.num_iterations > 1
    assert gap(given, parts) <= 1e-10
    np.testing.assert_allclose(parts.f + parts.b, whole.f + whole.b, atol=2e-5)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("loss", [*PLAIN.values(), make_loss("pinball", quantile=0.05)])
def test_a_sample_says_where_to_begin(loss: Loss, intercept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [problem(loss, C, intercept=intercept) for C in (0.02, 2.0 * WEIGHTS)]
    alone = [decompose(each, tol=1e-11) for each in given]
    from_zero = decompose(given[0], max_iter=0).certificate.gap
    monkeypatch.setattr(decomposition, "MIN_SAMPLE", 10)
    assert decompose(given[0], max_iter=0).certificate.gap < 0.5 * from_zero
    for each, other in zip(given, alone, strict=True):
        found = decompose(each, tol=1e-11)
        assert gap(each, found) <= 1e-10
        np.testing.assert_allclose(found.f + found.b, other.f + other.b, atol=2e-5)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("loss", list(PLAIN.values()))
def test_more_free_coefficients_than_places(loss: Loss, intercept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(loss, 10.0, intercept=intercept, gamma=2.0)
    monkeypatch.setattr(decomposition, "WORKING_SET", 24)
    monkeypatch.setattr(decomposition, "MAX_FREE", 48)
    found = decompose(given, tol=1e-5)
    low, high = given.bounds
    assert np.count_nonzero((found.a > low) & (found.a < high) & (found.a != 0)) > 60
    assert gap(given, found) <= 1e-5


@pytest.mark.parametrize("loss", list(PLAIN.values()))
def test_rows_that_are_the_same_and_a_kernel_that_is_nearly_constant(loss: Loss) -> None:
    twice = np.repeat(X[:40], 4, axis=0)
    for given in (problem(loss, 5.0, rows=twice), problem(loss, 5.0, gamma=1e-9), problem(loss, 5.0, rows=0 * X)):
        assert gap(given, decompose(given, tol=1e-9)) <= 1e-9


@pytest.mark.parametrize("C", [50.0, 500.0])
def test_targets_without_noise_and_a_smooth_kernel(C: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """K has fewer eigenvalues above rounding than there are free coefficients on the way, which trade places."""
    rows = np.random.default_rng(0).uniform(size=(200, 1))
    columns, y = GramColumns(make_kernel("rbf", gamma=10.0).resolve(1), rows), np.sin(6 * rows[:, 0])
    given, turns, descend = LossProblem(columns, y, np.full(200, C), make_loss("pinball")), [], decomposition._descend
    monkeypatch.setattr(decomposition, "_descend", lambda *of: turns.append(1) or descend(*of))
    assert gap(given, decompose(given, tol=1e-6)) <= 1e-6
    assert len(turns) < 2_000


@pytest.mark.parametrize("loss", list(PLAIN.values()))
def test_a_start_that_is_the_answer_takes_no_round(loss: Loss) -> None:
    given = problem(loss, 3.0)
    first = decompose(given, tol=1e-8)
    again = decompose(given, tol=1e-7, start=first.a)
    assert (first.num_iterations > 0, again.num_iterations) == (True, 0)
    # one that is not allowed is moved: another C, and an equation that does not hold
    moved = decompose(problem(loss, 1.0), tol=1e-9, start=5 * first.a + 0.1)
    assert gap(problem(loss, 1.0), moved) <= 1e-9


def test_what_ended_early_says_how_far_it_is() -> None:
    given = problem(PLAIN["hinge"], 100.0, gamma=3.0)
    found = decompose(given, tol=1e-12, max_iter=0)
    assert found.num_iterations == 0
    assert found.certificate.gap == pytest.approx(gap(given, found))
    assert found.certificate.gap > 0.1


def test_a_given_matrix_and_several_threads() -> None:
    given = problem(PLAIN["hinge"], 1.0)
    K = given.columns.block(np.arange(N))
    for columns in (GramColumns(None, K), GramColumns(given.columns.kernel, X, 3)):
        other = LossProblem(columns, given.y, given.C, given.loss)
        assert decompose(other, tol=1e-12).certificate.primal == pytest.approx(
            decompose(given, tol=1e-12).certificate.primal, rel=1e-11
        )


def test_columns_that_go_together_have_the_answers_that_they_have_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = problem(PLAIN["hinge"]).columns
    zero = np.where(np.arange(N) % 5 == 0, 0.0, 1.0)
    given = [
        LossProblem(columns, LABELS, np.full(N, 2.0), PLAIN["hinge"]),
        LossProblem(columns, SMOOTH, np.full(N, 50.0), make_loss("pinball", quantile=0.9)),
        LossProblem(columns, SMOOTH, zero, PLAIN["epsilon_insensitive"], fit_intercept=False),
    ]
    entries = counted_entries(monkeypatch)
    together = decomposition.decompose(given, tol=1e-10)
    taken = sum(entries)
    entries.clear()
    for each, found in zip(given, together, strict=True):
        alone = decompose(each, tol=1e-10)
        np.testing.assert_allclose(found.f + found.b, alone.f + alone.b, atol=1e-5)
        assert found.certificate.gap <= 1e-10
    assert not together[2].a[zero == 0].any()
    assert taken < sum(entries)


@pytest.mark.parametrize("loss", [PLAIN["hinge"], make_loss("pinball", quantile=0.2)])
@pytest.mark.parametrize("max_iter", [None, 2])
def test_values_of_C_go_one_after_the_other(loss: Loss, max_iter: int | None) -> None:
    values = [3.0, 0.1, 30.0, 1.0]
    given = [problem(loss, C * WEIGHTS) for C in values]
    found = decomposition.decompose(given, tol=1e-9, max_iter=max_iter)
    for each, answer in zip(given, found, strict=True):
        assert answer.certificate.gap == pytest.approx(gap(each, answer), abs=1e-12)
        assert max_iter is not None or answer.certificate.gap <= 1e-9


@pytest.mark.parametrize("removed", [0, 2])
@pytest.mark.parametrize("added", [0, 4])
def test_a_factor_solves_blocks_with_other_rows(added: int, removed: int) -> None:
    A = np.random.default_rng(1).standard_normal((60, 90))
    Q, ids = A @ A.T / 90 + np.eye(60), np.arange(100, 160)
    factor, first = decomposition._Factor(), np.arange(5, 45)
    right = np.random.default_rng(2).standard_normal((60, 2))
    assert factor.solve(Q, ids, 0.0, first, right[first]) is not None
    L = factor.L.copy()
    block = np.sort(np.r_[first[removed:], np.arange(added)])
    found = factor.solve(Q, ids, 0.0, block, right[block])
    np.testing.assert_allclose(found, np.linalg.solve(Q[np.ix_(block, block)], right[block]), rtol=1e-9, atol=1e-11)
    np.testing.assert_array_equal(factor.L, L)


@pytest.mark.parametrize("loss", [PLAIN["hinge"], PLAIN["epsilon_insensitive"], make_loss("pinball", quantile=0.2)])
def test_values_of_C_in_two_threads_come_to_the_same(loss: Loss) -> None:
    columns = GramColumns(make_kernel("rbf", gamma=0.3).resolve(D), X, 2)
    one = problem(loss)
    given = [replace(one, columns=columns, C=C * WEIGHTS) for C in (3.0, 0.1, 10.0, 1.0, 0.3)]
    told = []
    found = decomposition.decompose(given, tol=1e-10, progress=lambda *what: told.append((what[0], what[2]().shape)))
    assert {shape for _, shape in told} == {(N, 5)}
    for each, answer in zip(given, found, strict=True):
        assert gap(each, answer) <= 1e-9
        alone = decompose(replace(each, columns=GramColumns(columns.kernel, X)), tol=1e-10)
        np.testing.assert_allclose(answer.f + answer.b, alone.f + alone.b, atol=2e-5)


def test_what_the_progress_of_two_threads_raises_ends_both() -> None:
    columns = GramColumns(make_kernel("rbf", gamma=0.3).resolve(D), X, 2)
    given = [replace(problem(PLAIN["hinge"]), columns=columns, C=np.full(N, C)) for C in (0.1, 0.3, 1.0, 3.0)]
    calls = []

    def stop(*what: Any) -> None:
        calls.append(what)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decomposition.decompose(given, tol=1e-10, progress=stop)
    assert len(calls) == 1


def test_a_sample_that_is_solved_to_rounding_is_a_start_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its free rows are at the kink, so that nearly all coefficients begin at a bound, and violations on one side."""
    monkeypatch.setattr(decomposition, "SAMPLE_TOL", 1e-12)
    rng = np.random.default_rng(1)
    n, d = int(rng.integers(4000, 6000)), int(rng.integers(2, 9))
    X = rng.standard_normal((n, d))
    y = np.sin(2 * X[:, 0]) + rng.uniform(0.1, 1) * rng.standard_normal(n)
    quantile, gamma = float(rng.choice([0.05, 0.95, 0.5, 0.99])), 10 ** rng.uniform(-2, 0.5)
    arguments: Any = {"quantile": quantile, "alpha": 10 ** rng.uniform(-2, 1), "kernel": "rbf", "gamma": gamma}
    machine = KernelQuantileRegressor(tol=1e-4, **arguments)
    assert machine.fit(X, y).solution_.certificates[0].gap <= 1e-4
