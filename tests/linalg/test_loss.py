"""Laws of every loss: the conjugate by its definition, Fenchel and Young."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from dkrr.errors import ParameterError
from dkrr.linalg.loss import LOSSES, Loss, make_loss

CASES = [make_loss(name) for name in LOSSES] + [
    make_loss("pinball", quantile=0.05),
    make_loss("epsilon_insensitive", epsilon=0.0),
    make_loss("squared_epsilon_insensitive", epsilon=0.7),
    make_loss("huber", epsilon=0.2),
]
PREDICTIONS = np.r_[np.linspace(-4, 4, 41), 0.3, 1.0, -1.0, 60.0, -60.0]


def targets(loss: Loss) -> list[float]:
    return [1.0, -1.0] if loss.is_for_labels else [-1.3, 0.0, 0.4]


EVERY = [pytest.param(loss, y, id=f"{loss.name}-{k}-{y:g}") for k, loss in enumerate(CASES) for y in targets(loss)]


def textbook(name: str, y: float, u: np.ndarray) -> np.ndarray:
    """The formulas of the defaults, written down once more."""
    r = u - y
    return {
        "square": r**2,
        "hinge": np.maximum(0, 1 - y * u),
        "squared_hinge": np.maximum(0, 1 - y * u) ** 2,
        "logistic": np.log1p(np.exp(-np.abs(y * u))) + np.maximum(0, -y * u),
        "epsilon_insensitive": np.maximum(0, np.abs(r) - 0.1),
        "squared_epsilon_insensitive": np.maximum(0, np.abs(r) - 0.1) ** 2,
        "pinball": np.maximum(0.5 * -r, 0.5 * r),
        "huber": np.where(np.abs(r) <= 1.35, r**2, 2 * 1.35 * np.abs(r) - 1.35**2),
    }[name]


@pytest.mark.parametrize("name", list(LOSSES))
def test_the_value_is_that_of_the_formula(name: str) -> None:
    loss = make_loss(name)
    for y in targets(loss):
        np.testing.assert_allclose(loss.value(y, PREDICTIONS), textbook(name, y, PREDICTIONS), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("loss", "y"), EVERY)
def test_the_derivative_is_a_subgradient_and_the_second_derivative_its_slope(loss: Loss, y: float) -> None:
    u = PREDICTIONS
    s = loss.derivative(y, u)
    for v in (-3.3, 0.05, 2.7):
        assert np.all(loss.value(y, np.full_like(u, v)) >= loss.value(y, u) + s * (v - u) - 1e-12)
    h = 1e-5
    inside = np.abs(loss.second(y, u + h) - loss.second(y, u - h)) < 1e-3  # not across a kink
    slope = (loss.derivative(y, u + h) - loss.derivative(y, u - h)) / (2 * h)
    if loss.is_smooth:
        np.testing.assert_allclose(loss.second(y, u)[inside], slope[inside], atol=1e-4)
    else:
        assert not loss.second(y, u).any()


@pytest.mark.parametrize(("loss", "y"), EVERY)
def test_the_conjugate_is_the_supremum(loss: Loss, y: float) -> None:
    low, high = (float(end) for end in loss.domain(y))
    for s in np.linspace(max(low, -3.0), min(high, 3.0), 9):
        found = minimize_scalar(lambda u, s=s: loss.value(y, u) - s * u, bounds=(-60, 60), options={"xatol": 1e-12})
        assert float(loss.conjugate(y, s)) == pytest.approx(-found.fun, abs=1e-7)
    for outside in (low - 0.1, high + 0.1):
        assert not np.isfinite(outside) or loss.conjugate(y, outside) == np.inf


@pytest.mark.parametrize("y", [1.0, -1.0])
def test_the_logistic_conjugate_of_a_tiny_slope(y: float) -> None:
    p = 1e-10
    assert float(make_loss("logistic").conjugate(y, -y * p)) - p * np.log(p) == pytest.approx(-p, rel=1e-9, abs=0)


@pytest.mark.parametrize(("loss", "y"), EVERY)
def test_fenchel_and_young(loss: Loss, y: float) -> None:
    low, high = (float(end) for end in loss.domain(y))
    u = PREDICTIONS
    for s in np.linspace(max(low, -3.0), min(high, 3.0), 9):
        assert np.all(loss.value(y, u) + loss.conjugate(y, s) >= s * u - 1e-12 * (1 + np.abs(u)))
    slopes = loss.derivative(y, u)  # equality there
    np.testing.assert_allclose(loss.value(y, u) + loss.conjugate(y, slopes), slopes * u, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("loss", "y"), EVERY)
def test_the_predictions_of_a_slope_are_where_it_is_a_subgradient(loss: Loss, y: float) -> None:
    for s in loss.derivative(y, PREDICTIONS[:-2]).tolist():  # beyond, the logistic derivative is 1 to all digits
        ends = [float(end) for end in loss.predictions(y, s)]
        assert ends[0] <= ends[1]
        for end in filter(np.isfinite, ends):
            assert loss.value(y, end) + loss.conjugate(y, s) == pytest.approx(s * end, abs=1e-12)
    u = np.array([-2.2, 0.1, 0.95, 3.0])
    low, high = loss.predictions(y, loss.derivative(y, u))
    assert np.all(low - 1e-12 <= u)
    assert np.all(u <= high + 1e-12)


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("hing", {}, "unknown"),
        ("hinge", {"epsilon": 0.1}, "has no epsilon"),
        ("pinball", {"quantile": 1.0}, "between 0 and 1"),
        ("pinball", {"quantile": float("nan")}, "between 0 and 1"),
        ("huber", {"epsilon": 0.0}, "above 0"),
        ("epsilon_insensitive", {"epsilon": -0.1}, "at least 0"),
    ],
)
def test_what_a_loss_does_not_take(name: str, parameters: dict[str, float], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        make_loss(name, **parameters)
