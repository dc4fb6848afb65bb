"""Targets, losses and values of C as columns of one fit."""

from __future__ import annotations

import numpy as np
import pytest

from dkrr.errors import ConvergenceError
from dkrr.kernels import make_kernel
from dkrr.linalg.fit_losses import fit_losses
from dkrr.linalg.loss import make_loss

RNG = np.random.default_rng(3)
X = RNG.standard_normal((200, 3))
Y = np.sin(2 * X[:, 0]) + X[:, 1] + 0.3 * RNG.standard_normal(200)
WEIGHT = RNG.integers(0, 3, 200).astype(float)
KERNEL = make_kernel("rbf", gamma=0.3).resolve(3)
SEVERAL = [0.1, 1.0, 10.0, 100.0, 1000.0]


@pytest.mark.parametrize("name", ["pinball", "huber"])
def test_the_columns_of_one_C_stand_together(name: str) -> None:
    targets = np.column_stack([Y, -2 * Y]) if name == "huber" else Y[:, None]
    losses = [make_loss(name)] if name == "huber" else [make_loss(name, quantile=q) for q in (0.2, 0.7)]
    found = fit_losses(KERNEL, X, targets, losses, SEVERAL[:3], weight=WEIGHT, tol=1e-10)
    assert found.dual_coef.shape == (200, 6)
    for k, part in enumerate(found.split(3)):
        for j in range(2):
            target, loss = targets[:, [min(j, targets.shape[1] - 1)]], losses[min(j, len(losses) - 1)]
            alone = fit_losses(KERNEL, X, target, [loss], SEVERAL[k], weight=WEIGHT, tol=1e-10)
            values = KERNEL.block(X, X) @ alone.dual_coef[:, 0]
            mine = KERNEL.block(X, X) @ part.dual_coef[:, j]
            np.testing.assert_allclose(mine, values, atol=1e-4 * np.abs(values).max())
            assert part.intercept[j] == pytest.approx(alone.intercept[0], abs=1e-4)
    assert not found.dual_coef[WEIGHT == 0].any()


@pytest.mark.parametrize("name", ["logistic", "huber", "squared_hinge"])
def test_of_several_C_each_begins_with_the_answer_below(name: str) -> None:
    y = (Y if name == "huber" else np.sign(Y))[:, None]
    together = fit_losses(KERNEL, X, y, [make_loss(name)], SEVERAL, weight=WEIGHT, tol=1e-9)
    alone = [fit_losses(KERNEL, X, y, [make_loss(name)], C, weight=WEIGHT, tol=1e-9) for C in SEVERAL]
    steps = sum(answer.num_iterations for answer in together.answers)
    assert steps < 0.75 * sum(fit.num_iterations for fit in alone)
    for part, fit in zip(together.split(len(SEVERAL)), alone, strict=True):
        values = fit.answers[0].f
        np.testing.assert_allclose(part.answers[0].f, values, atol=1e-3 * np.abs(values).max())


def test_rows_are_centred_where_the_kernel_is_stationary() -> None:
    far = fit_losses(KERNEL, X + 1e6, Y[:, None], [make_loss("huber")], 1.0)
    assert far.center is not None
    np.testing.assert_allclose(far.center, X.mean(axis=0) + 1e6)
    assert fit_losses(make_kernel("linear"), X, Y[:, None], [make_loss("huber")], 1.0).center is None


def test_an_error_names_target_and_C() -> None:
    targets = np.column_stack([np.zeros(200), Y])
    with pytest.raises(ConvergenceError, match="huber of target 1 with C = 100 ended after 1 iterations"):
        fit_losses(KERNEL, X, targets, [make_loss("huber")], [1e-9, 100.0], max_iter=1)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("epsilon_insensitive", {"epsilon": 0.1}),
        ("squared_epsilon_insensitive", {"epsilon": 0.1}),
        ("huber", {"epsilon": 10.0}),
        ("pinball", {"quantile": 0.3}),
        ("square", {}),
    ],
)
def test_a_number_added_to_the_targets_is_added_to_the_intercept(name: str, parameters: dict[str, float]) -> None:
    loss = make_loss(name, **parameters)
    near = fit_losses(KERNEL, X, Y[:, None], [loss], 10.0, weight=WEIGHT)
    far = fit_losses(KERNEL, X, Y[:, None] + 1e8, [loss], 10.0, weight=WEIGHT)
    assert far.answers[0].certificate.primal == pytest.approx(near.answers[0].certificate.primal, rel=1e-5)
    predicted = far.answers[0].f + (far.intercept[0] - 1e8)
    assert far.intercept[0] == far.answers[0].b
    np.testing.assert_allclose(predicted, near.answers[0].f + near.intercept[0], atol=1e-2)
