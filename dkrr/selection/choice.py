"""What a search for hyperparameters is asked, and what it answers: settings, candidates, the result.

Plain frozen data; the search itself is :mod:`dkrr.selection.tuning`.

Of candidates whose error is as good as the best, the one is chosen whose system of all rows is the best conditioned:
|K| / alpha decides how many iterations a fit takes, and whether float32 will do, while what it costs besides is nearly
the same for all kernels. As good is what lies within one standard error of the *difference* between the two errors, row
by row, or within 0.2 %. The standard error of the best error itself, as in Breiman et al. (1984, section 3.4.3), is
three to ten times as large, for the same rows are hard for both. Of a grid of alphas on 3,000 rows of pol, elevators,
protein and bike it let in ones whose error on the test rows was 3.1, 1.2, 0.4 and 0 % above that of the best; the
difference let in ones that were 0.05, 0, 0 and 0 % above it.

References
----------
Breiman, Friedman, Olshen and Stone, Classification and Regression Trees, 1984, section 3.4.3, for the rule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from dkrr.dataset import Floats
from dkrr.errors import ParameterError
from dkrr.linalg.loss import Loss, make_loss

WidthKind = Literal["shared", "per_feature"]

FAMILIES = ("rbf", "matern12", "matern32", "matern52", "laplacian")
NU = {"matern12": 0.5, "matern32": 1.5, "matern52": 2.5}

# leave-one-out errors that differ by less are as good as the same
AS_GOOD = 1.002
LEAST_ROWS, MOST_ROWS = 20, 20_000


def kernel_keys(family: str, widths: Floats) -> dict[str, Any]:
    """The keys of ``[model]`` and arguments of :func:`~dkrr.kernels.make_kernel` for widths (1,) or (d,).

    Raises
    ------
    ParameterError
        An unknown family.
    """
    if family not in FAMILIES:
        raise ParameterError(f"kernel family {family!r}", hint=f"one of {', '.join(FAMILIES)} is expected")
    values = [float(width) for width in widths]
    if family in NU:
        length_scale = values[0] if len(values) == 1 else values
        return {"kernel": "matern", "kernel_params": {"nu": NU[family], "length_scale": length_scale}}
    if len(values) == 1:
        gamma = 0.5 / values[0] ** 2 if family == "rbf" else 1.0 / values[0]
        return {"kernel": family, "gamma": gamma}
    gamma = 0.5 if family == "rbf" else 1.0
    return {"kernel": family, "gamma": gamma, "kernel_params": {"length_scale": values}}


def standard_error(values: Floats) -> float:
    """Of the mean of values (n,): their standard deviation over the square root of n."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class FoldLoss:
    """Another loss than the square: what is fitted to all folds but one, and what the rows of that one are judged by.

    Parameters
    ----------
    loss, epsilon, quantile
        A loss, with the parameter that it has; several quantiles of one target.
    metric
        Of each row, and of all their mean, so that less is better whatever it is: 1 where the class is wrong for
        "accuracy", and for "balanced_accuracy", where each class counts as much; -log of the probability of the true
        class for "log_loss"; the squared error for "rmse", of whose mean the root is taken; else the loss itself.
    C
        The values to choose from, ascending.
    num_folds
        At least 2.

    Raises
    ------
    ParameterError
        A value that is not allowed.
    """

    loss: str
    metric: str
    epsilon: float | None = None
    quantile: tuple[float, ...] | None = None
    C: tuple[float, ...] = tuple(float(f"{value:.3g}") for value in np.geomspace(0.01, 1000.0, 11))
    num_folds: int = 5

    def __post_init__(self) -> None:
        if not self.C or not all(low < high for low, high in zip((0.0, *self.C), self.C, strict=False)):
            raise ParameterError(f"C = {list(self.C)}", hint="numbers above 0 in increasing order are expected")
        if self.num_folds < 2:
            raise ParameterError(f"folds = {self.num_folds}", hint="at least 2 are expected")

    @property
    def losses(self) -> list[Loss]:
        """One, or one for each quantile."""
        if self.quantile is not None:
            return [make_loss(self.loss, quantile=quantile) for quantile in self.quantile]
        return [make_loss(self.loss, **({} if self.epsilon is None else {"epsilon": self.epsilon}))]

    @property
    def alphas(self) -> tuple[float, ...]:
        """1 / (2 C), ascending."""
        return tuple(0.5 / value for value in reversed(self.C))

    @property
    def words(self) -> str:
        """What the error is, of which less is better."""
        words = {"accuracy": "share of wrong classes", "balanced_accuracy": "mean share of wrong rows of a class"}
        own = self.metric.replace("_", " ") + (" loss" if self.metric == self.loss else "")
        return words.get(self.metric, own)

    def error(self, lost: Floats) -> Floats:
        """One number for each column (k,) of what the rows lose (n, k)."""
        means = lost.mean(axis=0)
        return np.asarray(np.sqrt(means) if self.metric == "rmse" else means)


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """What is searched, and how much.

    Parameters
    ----------
    kernels
        Families, of :data:`FAMILIES`.
    widths
        "shared": one width for all features; "per_feature": one for each; "both": whichever predicts better.
    search_rows
        Sizes of the subsets on which widths are searched, ascending.
    rows
        Most rows of the subset on which the finalists are compared.
    seed
        Of the subset.
    budget_seconds
        The time that the trials may take in all; what would take longer is left out, and noted.
    fold_loss
        Another loss than the square, which then has the last word on widths and alpha.

    Raises
    ------
    ParameterError
        A value that is not allowed.
    """

    kernels: tuple[str, ...] = FAMILIES
    widths: Literal["shared", "per_feature", "both"] = "both"
    search_rows: tuple[int, ...] = (1_000, 2_000)
    rows: int = 8_000
    seed: int = 0
    budget_seconds: float = 480.0
    fold_loss: FoldLoss | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.kernels if name not in FAMILIES]
        if unknown or not self.kernels or len(set(self.kernels)) < len(self.kernels):
            raise ParameterError(
                f"kernels = {list(self.kernels)}", hint=f"some of {', '.join(FAMILIES)} are expected, each once"
            )
        if self.widths not in ("shared", "per_feature", "both"):
            raise ParameterError(f"widths = {self.widths!r}", hint="'shared', 'per_feature' or 'both' is expected")
        sizes = [*self.search_rows, self.rows]
        if not self.search_rows or sizes[0] < LEAST_ROWS or sizes[-1] > MOST_ROWS or sizes != sorted(sizes):
            raise ParameterError(
                f"search_rows = {list(self.search_rows)}, rows = {self.rows}",
                hint=f"ascending numbers from {LEAST_ROWS} to {MOST_ROWS:,} are expected",
            )
        if not self.budget_seconds > 0:
            raise ParameterError(f"budget_seconds = {self.budget_seconds!r}", hint="a number above 0 is expected")


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A kernel, its widths, an alpha, and how well they did on a number of rows.

    ``excess_error`` is the standard error of the difference between its error and the best one, None where the rows'
    errors are not known; ``condition`` that of K + alpha I of all rows, from the largest eigenvalue of K on these.
    ``metric`` is that of a :class:`FoldLoss` by which the error was found, "" of leave-one-out.
    """

    family: str
    widths: Floats
    alpha: float
    loo_rmse: float
    num_rows: int
    loss: float | None = None
    factor: float = 1.0
    origin: str = "likelihood"
    excess_error: float | None = None
    condition: float | None = None
    metric: str = ""

    @property
    def kind(self) -> WidthKind:
        """Whether there is one width for all features."""
        return "shared" if len(self.widths) == 1 else "per_feature"

    def keys(self) -> dict[str, Any]:
        """Kernel and alpha as ``[model]`` of a job, and :class:`~dkrr.KernelRidge`, take them."""
        return {**kernel_keys(self.family, self.widths), "alpha": self.alpha}

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "kernel": self.family,
            "widths_kind": self.kind,
            "widths": self.widths.tolist(),
            "alpha": self.alpha,
            **({"metric": self.metric, "error": self.loo_rmse} if self.metric else {"loo_rmse": self.loo_rmse}),
            "loss": self.loss,
            "num_rows": self.num_rows,
            "factor": self.factor,
            "origin": self.origin,
            "excess_error": self.excess_error,
            "condition": self.condition,
        }


@dataclass(kw_only=True, eq=False)
class TuneResult:
    """The choice, and everything that led to it.

    ``best`` is what was chosen: of the ``candidates`` as good as the one of the smallest error, ``least_error``, the
    best conditioned. ``candidates`` are the finalists on the same ``num_rows`` rows, smallest error first; ``records``
    one dictionary a trial in order; ``slices`` the errors over (factor, alpha) that were computed; ``notes`` what the
    budget left out.
    ``seconds`` is the time of the trials, divided among the threads that ran them.
    """

    best: Candidate
    candidates: list[Candidate]
    records: list[dict[str, Any]]
    slices: list[dict[str, Any]]
    notes: list[str]
    seconds: float

    @property
    def least_error(self) -> Candidate:
        """The candidate of the smallest error."""
        return self.candidates[0]

    def mark(self, candidate: Candidate) -> str:
        """What a candidate is in a table."""
        names = {"smallest error": self.least_error, "chosen": self.best}
        return ", ".join(name for name, item in names.items() if item is candidate)

    def parameters(self) -> dict[str, Any]:
        """Arguments of :class:`~dkrr.KernelRidge`: kernel, its parameters and alpha."""
        return self.best.keys()

    def to_dict(self) -> dict[str, Any]:
        """Plain data: all that a picture or a report needs."""
        return {
            "best": self.best.to_dict(),
            "least_error": self.least_error.to_dict(),
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "slices": self.slices,
            "trials": self.records,
            "notes": self.notes,
            "seconds": self.seconds,
        }


def is_as_good(squares: Floats, least: Floats) -> bool:
    """Whether errors are as good as the smallest ones, from the squared errors (n,) that both make in the same rows."""
    if squares.mean() <= AS_GOOD**2 * least.mean():
        return True
    difference = squares - least
    return bool(difference.mean() <= standard_error(difference))


def choose_candidates(points: list[Candidate], squares: list[Floats]) -> tuple[Candidate, list[Candidate]]:
    """What to fit, and what it was chosen from, smallest error first.

    Parameters
    ----------
    points
        Everything that was evaluated on the same rows: of those with the same widths, the one of the largest alpha that
        is as good as the best of them is a candidate, and the best of all is.
    squares
        Of each point, what its rows add to the squared error (n,).
    """
    order = sorted(range(len(points)), key=lambda k: (points[k].loo_rmse, -points[k].alpha))
    first = order[0]
    groups: dict[tuple[str, bytes], list[int]] = {}
    for k in order:
        groups.setdefault((points[k].family, points[k].widths.tobytes()), []).append(k)
    kept = {first}
    for group in groups.values():
        as_good = [[k for k in group if is_as_good(squares[k], squares[least])] for least in (group[0], first)]
        # the best of all may allow less than the best of these widths
        kept |= {max(good, key=lambda k: points[k].alpha) for good in as_good if good}
    # the derivative of the mean of what is compared in the error: of a root mean square twice that
    two = 2.0 * points[first].loo_rmse if points[first].metric in ("", "rmse") else 1.0
    shown = {
        k: replace(points[k], excess_error=standard_error(squares[k] - squares[first]) / two if two else 0.0)
        for k in order
        if k in kept
    }
    good = [k for k in shown if is_as_good(squares[k], squares[first])]
    chosen = min(good, key=lambda k: (points[k].condition or np.inf, points[k].loo_rmse))
    return shown[chosen], list(shown.values())
