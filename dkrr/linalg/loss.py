"""Losses: value, derivatives and convex conjugate of each, in one place.

All but the logistic loss are one family. With the residual r = u - y of a prediction u,

    loss(y, u) = max over low <= s <= high of   s r - epsilon |s| - curvature s^2 / 2

so its conjugate, as a function of s, is   y s + epsilon |s| + curvature s^2 / 2   on [low, high], and everything else
follows from the maximiser s(r) = clip(soft(r, epsilon) / curvature, low, high):

    loss                         of labels y = +-1 or targets        low       high    epsilon   curvature
    square                       (u - y)^2                           -inf      inf     0         1/2
    hinge                        max(0, 1 - y u)                     y s in [-1, 0]    0         0
    squared hinge                max(0, 1 - y u)^2                   y s <= 0          0         1/2
    epsilon insensitive          max(0, |u - y| - epsilon)           -1        1       epsilon   0
    squared epsilon insensitive  max(0, |u - y| - epsilon)^2         -inf      inf     epsilon   1/2
    pinball (quantile q)         max(q (y - u), (1 - q) (u - y))     -q        1 - q   0         0
    huber                        r^2, or 2 delta |r| - delta^2       -2 delta  2 delta 0         1/2
                                 where |r| > delta

(For labels y^2 = 1, so 1 - y u = -y (u - y).) The logistic loss log(1 + exp(-y u)) has the conjugate
p log p + (1 - p) log(1 - p) with p = -y s in [0, 1].

A loss of this family is one line in ``LOSSES``; another one is a class beside :class:`Logistic`, and has to be smooth:
those with kinks are minimised over boxes of coefficients (decomposition.py), which the family has. Job files and
estimators list the names they take (dkrr.jobs.spec, dkrr.models.machines).

References
----------
Rockafellar, Convex Analysis, 1970 (conjugates); Boyd and Vandenberghe, Convex Optimization, 2004, chapters 3 and 6;
Chapelle, Training a support vector machine in the primal, Neural Computation 19, 2007.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logit, logsumexp, xlog1py, xlogy

from dkrr.errors import ParameterError

__all__ = ["LOSSES", "Logistic", "Loss", "PiecewiseQuadratic", "log_probabilities", "make_loss"]

Vector = NDArray[np.float64]


class Loss(ABC):
    """A convex loss(y, u) of targets y and predictions u; all methods take arrays of one shape, or broadcast."""

    name: str
    is_for_labels: bool = False

    @abstractmethod
    def value(self, y: ArrayLike, u: ArrayLike) -> Vector:
        """loss(y, u)."""

    @abstractmethod
    def derivative(self, y: ArrayLike, u: ArrayLike) -> Vector:
        """d loss / du; at a kink the subgradient of least magnitude."""

    @abstractmethod
    def second(self, y: ArrayLike, u: ArrayLike) -> Vector:
        """The generalised second derivative in u: that of the piece on which u lies, 0 on linear pieces."""

    @abstractmethod
    def conjugate(self, y: ArrayLike, s: ArrayLike) -> Vector:
        """sup over u of s u - loss(y, u); inf outside :meth:`domain`."""

    @abstractmethod
    def domain(self, y: ArrayLike) -> tuple[Vector, Vector]:
        """The ends (low, high) of the s for which the conjugate is finite: the range of the derivative."""

    @abstractmethod
    def predictions(self, y: ArrayLike, s: ArrayLike) -> tuple[Vector, Vector]:
        """The ends (low, high) of the u at which s is a subgradient: the subdifferential of the conjugate."""

    @property
    @abstractmethod
    def is_smooth(self) -> bool:
        """Whether the derivative is continuous, so that Newton's method applies."""


@dataclass(frozen=True)
class PiecewiseQuadratic(Loss):
    """The family of the table above; ``low`` and ``high`` are those of a label +1 where the loss is one for labels."""

    name: str
    low: float = -np.inf
    high: float = np.inf
    epsilon: float = 0.0
    curvature: float = 0.5
    is_for_labels: bool = False

    @property
    def is_smooth(self) -> bool:
        return self.curvature > 0

    def domain(self, y: ArrayLike) -> tuple[Vector, Vector]:
        y = np.asarray(y, dtype=np.float64)
        low, high = np.full(y.shape, self.low), np.full(y.shape, self.high)
        if not self.is_for_labels:
            return low, high
        return np.where(y > 0, low, -high), np.where(y > 0, high, -low)

    def slope(self, y: ArrayLike, r: ArrayLike, more: ArrayLike = 0.0) -> Vector:
        """The maximiser s of s r - epsilon |s| - (curvature + more) s^2 / 2 within the domain."""
        r = np.asarray(r, dtype=np.float64)
        low, high = self.domain(np.broadcast_to(np.asarray(y, dtype=np.float64), np.broadcast(y, r).shape))
        soft = np.sign(r) * np.maximum(np.abs(r) - self.epsilon, 0.0)
        total = self.curvature + np.asarray(more, dtype=np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            s = np.where(total > 0, soft / total, np.where(soft == 0, 0.0, np.copysign(np.inf, soft)))
        return np.clip(s, low, high)

    def value(self, y: ArrayLike, u: ArrayLike) -> Vector:
        r = np.subtract(u, y, dtype=np.float64)
        s = self.slope(y, r)
        return np.asarray(s * r - self.epsilon * np.abs(s) - 0.5 * self.curvature * s * s)

    def derivative(self, y: ArrayLike, u: ArrayLike) -> Vector:
        return self.slope(y, np.subtract(u, y, dtype=np.float64))

    def second(self, y: ArrayLike, u: ArrayLike) -> Vector:
        r = np.subtract(u, y, dtype=np.float64)
        if self.curvature == 0:
            return np.zeros(np.broadcast(y, r).shape)
        s = self.slope(y, r)
        low, high = self.domain(np.broadcast_to(np.asarray(y, dtype=np.float64), s.shape))
        is_inside = (s > low) & (s < high) & (np.abs(r) > self.epsilon if self.epsilon else True)
        return np.where(is_inside, 1.0 / self.curvature, 0.0)

    def conjugate(self, y: ArrayLike, s: ArrayLike) -> Vector:
        s = np.asarray(s, dtype=np.float64)
        low, high = self.domain(np.broadcast_to(np.asarray(y, dtype=np.float64), np.broadcast(y, s).shape))
        value = np.asarray(y) * s + self.epsilon * np.abs(s) + 0.5 * self.curvature * s * s
        return np.where((s >= low) & (s <= high), value, np.inf)

    def predictions(self, y: ArrayLike, s: ArrayLike) -> tuple[Vector, Vector]:
        y, s = np.broadcast_arrays(np.asarray(y, dtype=np.float64), np.asarray(s, dtype=np.float64))
        low, high = self.domain(y)
        middle = y + self.curvature * s
        return (
            np.where(s <= low, -np.inf, middle + np.where(s > 0, self.epsilon, -self.epsilon)),
            np.where(s >= high, np.inf, middle + np.where(s < 0, -self.epsilon, self.epsilon)),
        )


@dataclass(frozen=True)
class Logistic(Loss):
    """log(1 + exp(-y u)) for labels y = +-1: minus the log-likelihood of P(y | u) = 1 / (1 + exp(-y u))."""

    name: str = "logistic"
    is_for_labels: bool = True

    @property
    def is_smooth(self) -> bool:
        return True

    def domain(self, y: ArrayLike) -> tuple[Vector, Vector]:
        y = np.asarray(y, dtype=np.float64)
        return np.where(y > 0, -1.0, 0.0), np.where(y > 0, 0.0, 1.0)

    def value(self, y: ArrayLike, u: ArrayLike) -> Vector:
        return np.asarray(np.logaddexp(0.0, -np.multiply(y, u, dtype=np.float64)))

    def derivative(self, y: ArrayLike, u: ArrayLike) -> Vector:
        return np.asarray(-np.asarray(y) * expit(-np.multiply(y, u, dtype=np.float64)))

    def second(self, y: ArrayLike, u: ArrayLike) -> Vector:
        u = np.asarray(u, dtype=np.float64)
        return np.broadcast_to(expit(u) * expit(-u), np.broadcast(y, u).shape).copy()

    def conjugate(self, y: ArrayLike, s: ArrayLike) -> Vector:
        p = -np.multiply(y, s, dtype=np.float64)
        inside = np.clip(p, 0.0, 1.0)
        value = xlogy(inside, inside) + xlog1py(1.0 - inside, -inside)
        return np.where((p >= 0) & (p <= 1), value, np.inf)

    def predictions(self, y: ArrayLike, s: ArrayLike) -> tuple[Vector, Vector]:
        y = np.asarray(y, dtype=np.float64)
        with np.errstate(divide="ignore"):
            u = -y * logit(np.clip(-np.multiply(y, s, dtype=np.float64), 0.0, 1.0))
        return u, u.copy()


def log_probabilities(values: ArrayLike) -> Vector:
    """Logarithms of p_j / sum_j p_j, p(u) = 1 / (1 + exp(-u)), for decision values u (m, k) of each class.

    Of two classes the values are -u and u, and the sum is 1.
    """
    logarithms = -np.logaddexp(0.0, -np.asarray(values, dtype=np.float64))
    return np.asarray(logarithms - logsumexp(logarithms, axis=1, keepdims=True))


def _number(name: str, value: float, low: float, high: float, *, is_open: bool, expected: str) -> float:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not (low < value < high or (not is_open and value == low)):
        raise ParameterError(f"{name} = {value!r}; {expected} expected")
    return float(value)


def _epsilon(value: float) -> float:
    return _number("epsilon", value, 0.0, np.inf, is_open=False, expected="a number of at least 0")


def _pinball(quantile: float) -> Loss:
    q = _number("quantile", quantile, 0.0, 1.0, is_open=True, expected="a number between 0 and 1")
    return PiecewiseQuadratic("pinball", low=-q, high=1.0 - q, curvature=0.0)


def _huber(epsilon: float) -> Loss:
    delta = _number("epsilon", epsilon, 0.0, np.inf, is_open=True, expected="a number above 0")
    return PiecewiseQuadratic("huber", low=-2.0 * delta, high=2.0 * delta)


# name: how it is made of its parameter, which has the name that the function gives it
LOSSES: dict[str, Callable[..., Loss]] = {
    "square": lambda: PiecewiseQuadratic("square"),
    "hinge": lambda: PiecewiseQuadratic("hinge", low=-1.0, high=0.0, curvature=0.0, is_for_labels=True),
    "squared_hinge": lambda: PiecewiseQuadratic("squared_hinge", high=0.0, is_for_labels=True),
    "logistic": Logistic,
    "epsilon_insensitive": lambda epsilon=0.1: PiecewiseQuadratic(
        "epsilon_insensitive", low=-1.0, high=1.0, epsilon=_epsilon(epsilon), curvature=0.0
    ),
    "squared_epsilon_insensitive": lambda epsilon=0.1: PiecewiseQuadratic(
        "squared_epsilon_insensitive", epsilon=_epsilon(epsilon)
    ),
    "pinball": lambda quantile=0.5: _pinball(quantile),
    "huber": lambda epsilon=1.35: _huber(epsilon),
}


def make_loss(name: str, **parameters: float) -> Loss:
    """The loss of a name, with ``epsilon`` or ``quantile`` where it has one.

    Raises
    ------
    ParameterError
        An unknown name, a parameter that the loss does not have, or a value that it does not take.
    """
    if name not in LOSSES:
        raise ParameterError(f"loss = {name!r} is unknown", hint=f"one of {', '.join(LOSSES)}")
    try:
        return LOSSES[name](**parameters)
    except TypeError:
        raise ParameterError(f"loss {name!r} has no {' or '.join(parameters)}") from None
