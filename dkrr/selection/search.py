"""One trial of a search: frozen parameters, a task that runs it on any worker, and a JSON document with what it found.

    search   widths and alpha that minimise the negative log marginal likelihood, from a start
    slice    widths times a factor: the leave-one-out error for a grid of alphas, from one eigendecomposition
    check    the leave-one-out error on more rows, alpha refined by its slope; the squared errors of the rows for every
             alpha, in an array beside the document
    folds    what a fit with another loss than the square loses on held-out rows, for every alpha, of each row as above

A trial is named by the digest of its parameters and of the rows, and its document is its checkpoint: a task that finds
it returns what it says. So an interrupted search continues, and one that is repeated is read.

A random subset of the rows of a data set, in random order, as one small array on disk.

The first m of its rows are a random subset themselves, so that a search on few rows and a check on more of them use
nested samples. Workers read it by its path. Rows of weight 0 are left out: they take no part in a fit.

Cost: one pass over the chunks that hold a chosen row; 8 m (d + t + 1) bytes.

Minimising the loss of a family of kernels over its widths and alpha, and the path of alphas of one kernel.

L-BFGS-B in log l_1, ..., log l_p, log alpha (p = 1 or d) with the exact gradient of :mod:`dkrr.selection.likelihood`;
the best point that was evaluated is the answer. It is a local minimum, so start it from more than one place.

Cost: of one evaluation, times the number of evaluations, which is bounded.

References
----------
Byrd, Lu, Nocedal, Zhu (1995), A limited memory algorithm for bound constrained optimization.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse.linalg import eigsh
from scipy.spatial.distance import pdist

from dkrr.dataset import Dataset, RowArray
from dkrr.errors import DamagedChunkError, DataError, MemoryBudgetError, NotPositiveDefiniteError, StoreError
from dkrr.kernels import Kernel
from dkrr.linalg.inference.eigen import EigenRidge
from dkrr.linalg.losses.fit import fit_losses
from dkrr.linalg.losses.loss import log_probabilities
from dkrr.linalg.nystrom.solver import read_rows
from dkrr.models.tiled import label_targets
from dkrr.selection.choice import FoldLoss, is_as_good
from dkrr.selection.likelihood import FAMILIES, Evaluation, Explained, family_kernel
from dkrr.store.failpoints import failpoint
from dkrr.store.files import read_json, remove_array, write_json
from dkrr.store.lease import hold_lock
from dkrr.threads import single_blas_thread

__all__ = [
    "ALPHA_BOUNDS",
    "Found",
    "Subset",
    "Trial",
    "TrialBatch",
    "alpha_path",
    "draw_subset",
    "largest_eigenvalue",
    "minimise",
    "refine_alpha",
    "run_trial",
    "start_width",
    "trial_bytes",
    "trial_flops",
]

FloatArray = NDArray[np.float64]

ROWS_PER_CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class Subset:
    """Where a subset is, and what its columns are: d features, t targets, and the weights if there are any."""

    location: str
    num_rows: int
    num_features: int
    num_targets: int
    weighted: bool

    def read(self, num_rows: int, *, intercept: bool) -> Explained:
        """The first ``num_rows`` rows."""
        d, t = self.num_features, self.num_targets
        rows = RowArray.open(self.location).read(0, num_rows)
        weight = rows[:, d + t].copy() if self.weighted else None
        return Explained(x=rows[:, :d], y=rows[:, d : d + t].copy(), weight=weight, intercept=intercept)

    def is_whole(self) -> bool:
        """Whether all of it is there and undamaged."""
        try:
            array = RowArray.open(self.location)
            columns = self.num_features + self.num_targets + self.weighted
            return array.read(0, array.num_rows).shape == (self.num_rows, columns)
        except (StoreError, DamagedChunkError, FileNotFoundError):
            return False


def draw_subset(dataset: Dataset, num_rows: int, seed: int, location: str) -> Subset:
    """Draw ``num_rows`` rows (all, if there are not so many) and write them to ``location``.

    What an earlier call with the same arguments wrote there is used as it is; one that writes it is waited for.

    Raises
    ------
    DataError
        The data has no targets, or fewer than two rows of positive weight.
    """
    if dataset.y is None:
        raise DataError(f"{dataset.path} has no target", hint="name one: [data] target = [-1]")
    weight, n = dataset.weight, dataset.num_rows
    usable = np.arange(n) if weight is None else np.flatnonzero(weight.read(0, n)[:, 0] > 0)
    if len(usable) < 2:
        raise DataError(f"{dataset.path} has {len(usable)} rows of positive weight", hint="two at least are needed")
    chosen = usable[np.random.default_rng(seed).permutation(len(usable))[:num_rows]]
    subset = Subset(
        location=location,
        num_rows=len(chosen),
        num_features=dataset.num_features,
        num_targets=dataset.num_targets,
        weighted=weight is not None,
    )
    with hold_lock(location, wait=True):
        if subset.is_whole():
            return subset
        order, parts = np.argsort(chosen), [part for part in (dataset.X, dataset.y, weight) if part is not None]
        rows = np.empty((len(chosen), sum(part.num_columns for part in parts)))
        rows[order] = np.hstack([read_rows(part, chosen[order]) for part in parts])
        remove_array(location)
        array = RowArray.create(
            location, "", num_rows=len(rows), num_columns=rows.shape[1], rows_per_chunk=ROWS_PER_CHUNK
        )
        for number, (start, stop) in enumerate(array.blocks()):
            array.write_chunk(number, rows[start:stop])
    return subset


def standard_deviations(rows: Explained) -> FloatArray:
    """Of the features (d,); 1 for one that is constant."""
    deviations = rows.x.std(axis=0)
    return np.where(deviations > 1e-12, deviations, 1.0)


ALPHA_BOUNDS = (1e-6, 1e3)

# widths, in standard deviations of their feature: a feature that is wider than the upper bound has no influence
WIDTH_BOUNDS = (1e-2, 1e4)

MEDIAN_ROWS = 1_000

# relative change of the loss, and largest component of its gradient, at which a search ends
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """The best point of a search: widths (1,) or (d,), alpha, loss, leave-one-out error, and (alpha, loss, error) of
    every evaluation in order; where alpha was refined, also the squared errors of the rows (n, evaluations)."""

    widths: FloatArray
    alpha: float
    loss: float
    loo_rmse: float
    degrees_of_freedom: float
    evaluations: list[tuple[float, float, float]]
    squares: FloatArray | None = None

    @classmethod
    def of(cls, widths: FloatArray, alpha: float, best: Evaluation, **more: Any) -> Found:
        """The point of an evaluation."""
        same = {name: getattr(best, name) for name in ("loss", "loo_rmse", "degrees_of_freedom")}
        return cls(widths=widths, alpha=alpha, **same, **more)

    def to_dict(self) -> dict[str, Any]:
        """Plain data but for the squares."""
        values = {name: value for name, value in vars(self).items() if name != "squares"}
        evaluations = [list(point) for point in self.evaluations]
        return values | {
            "widths": self.widths.tolist(),
            "num_evaluations": len(evaluations),
            "evaluations": evaluations,
        }


def start_width(x: FloatArray) -> float:
    """The median distance of rows (of at most 1,000 of them): half of all pairs are closer than one width."""
    rows = x[:MEDIAN_ROWS]
    median = float(np.median(pdist(rows))) if len(rows) > 1 else 0.0
    return median if median > 0 else float(np.sqrt(x.shape[1]))


def minimise(
    rows: Explained, family: str, widths: FloatArray, alpha: float, scale: FloatArray, max_evaluations: int
) -> Found:
    """The best widths and alpha that at most ``max_evaluations`` evaluations find.

    Parameters
    ----------
    widths : (1,) or (d,)
        Where to begin; the result has as many.
    scale : (d,)
        Standard deviations of the features; bounds on the widths are multiples of them.
    """
    scales = scale if len(widths) > 1 else np.array([float(np.sqrt(np.mean(scale**2)))])
    bounds = [(float(np.log(WIDTH_BOUNDS[0] * s)), float(np.log(WIDTH_BOUNDS[1] * s))) for s in scales]
    bounds.append((float(np.log(ALPHA_BOUNDS[0])), float(np.log(ALPHA_BOUNDS[1]))))
    start = np.clip(np.log(np.append(widths, alpha)), *np.array(bounds).T)
    evaluations: list[tuple[float, float, float]] = []
    best: Found | None = None

    def loss(parameters: FloatArray) -> tuple[float, FloatArray]:
        nonlocal best
        if len(evaluations) >= max_evaluations:  # a line search may ask for more than maxfun
            raise _EnoughError
        at = np.exp(parameters[:-1]), float(np.exp(parameters[-1]))
        found = rows.evaluate(family, *at, gradient=True)
        evaluations.append((at[1], found.loss, found.loo_rmse))
        if best is None or found.loss < best.loss:
            best = Found.of(*at, found, evaluations=evaluations)
        assert found.gradient is not None  # noqa: S101  (narrows the type)
        return found.loss, found.gradient

    try:
        minimize(
            loss,
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"ftol": LOSS_TOLERANCE, "gtol": GRADIENT_TOLERANCE, "maxfun": max_evaluations},
        )
    except _EnoughError:
        pass
    except NotPositiveDefiniteError:
        # rounding put an end to the way towards small alphas; what was found before it stands
        if best is None:
            raise
    assert best is not None  # noqa: S101  (narrows the type: the first evaluation is always made)
    return best


class _EnoughError(Exception):
    """Raised inside a search to end it."""


def refine_alpha(rows: Explained, family: str, widths: FloatArray, alpha: float, num_evaluations: int) -> Found:
    """The alpha of the smallest leave-one-out error among a few, by the secant method on its slope in log alpha.

    Every alpha that is considered is evaluated, and has four digits; steps are at most a factor of 8. Where errors are
    as good as the same (:func:`~dkrr.selection.choice.is_as_good`), the largest alpha is taken: the fit is better
    conditioned, and an iterative one quicker. What is left of the evaluations after the secant method ended goes into
    larger alphas. So does the last one, where the minimum is not a factor of 2 from what was evaluated: with slope
    c x at log alpha = minimum + x, of standard error s, the error there is one standard error above the least at
    x = 2 s / c.
    """
    low, high = (float(np.log(bound)) for bound in ALPHA_BOUNDS)
    at = float(np.clip(np.log(alpha), low, high))
    points: list[tuple[float, float, float]] = []
    found: list[tuple[float, Evaluation]] = []
    raising = False
    for number in range(1, max(1, num_evaluations) + 1):
        value = float(f"{np.exp(at):.4g}")
        try:
            evaluation = rows.evaluate(family, widths, value, slope=number < num_evaluations and not raising)
        except NotPositiveDefiniteError:
            if number == num_evaluations and not found:
                raise
            # too small for rounding on so many rows: half-way back to the last that was not, or ten times as much
            at = 0.5 * (at + points[-1][0]) if points else min(at + np.log(10.0), high)
            continue
        found.append((value, evaluation))
        if number == num_evaluations:
            break
        if raising:
            if as_good(found)[0] < value:
                break
            following = at
        else:
            points.append((at, evaluation.loo_slope or 0.0, evaluation.loo_slope_error or 0.0))
            step = _secant_step(points, last=number == num_evaluations - 1)
            following = float(np.clip(at + step, low, high))
        if abs(following - at) < 0.02:
            raising = True
            following = max(np.log(other) for other, _ in found) + np.log(8.0)
            if following > high:
                break
        at = float(following)
    value, best = as_good(found)
    return Found.of(
        widths,
        value,
        best,
        evaluations=[(other, evaluation.loss, evaluation.loo_rmse) for other, evaluation in found],
        squares=np.column_stack([evaluation.loo_squares for _, evaluation in found]),
    )


def as_good(found: list[tuple[float, Evaluation]]) -> tuple[float, Evaluation]:
    """The largest alpha whose error is as good as the smallest."""
    least = min((evaluation for _, evaluation in found), key=lambda evaluation: evaluation.loo_rmse)
    good = [item for item in found if is_as_good(item[1].loo_squares, least.loo_squares)]
    return max(good, key=lambda item: item[0])


def _secant_step(points: list[tuple[float, float, float]], *, last: bool) -> float:
    """A step in log alpha to where the slope would be 0; downhill by a factor of 2 where that has no meaning.

    The ``last`` step goes further up, by one standard error, where the error at its minimum is as good as known.
    """
    at, slope, error = points[-1]
    downhill = float(-np.sign(slope) * np.log(2.0))
    if len(points) < 2:
        return downhill
    before, slope_before, _ = points[-2]
    curvature = (slope - slope_before) / (at - before)
    step = -slope / curvature if curvature > 0 else 3.0 * downhill
    if last and curvature > 0 and min(abs(step), abs(at + step - before)) <= np.log(2.0):
        step += 2.0 * error / curvature
    return float(np.clip(step, -np.log(8.0), np.log(8.0)))


def alpha_path(rows: Explained, family: str, widths: FloatArray, alphas: FloatArray) -> FloatArray:
    """The leave-one-out error for every alpha (number of alphas,), from one eigendecomposition of S K S.

    Notes
    -----
    Cost: about 9 n^3 flops, then 2 n^2 (t + 1) for each alpha; 24 n^2 bytes.
    """
    matrix, options = rows.matrix(family, widths), {"fit_intercept": rows.intercept, "positive_semidefinite": True}
    ridge = EigenRidge(matrix, rows.y / rows.deviation, rows.root, **options)
    errors: FloatArray = np.sqrt(np.einsum("it,itk->k", rows.share, ridge.leave_one_out(alphas) ** 2))
    return errors


def largest_eigenvalue(matrix: FloatArray) -> float:
    """Of a symmetric matrix (n, n), to 1 %, by a few products."""
    if len(matrix) < 3:
        return float(np.linalg.norm(matrix, 2))
    start = np.ones(len(matrix))
    (found,) = eigsh(matrix, k=1, v0=start, tol=1e-2, return_eigenvectors=False)
    return float(found)


FORMAT = 2  # of the documents, and of what is computed

# a gradient evaluation makes a factor and an inverse (n^3 flops); entries and strips count as much again for few rows
EIGEN_FLOPS = 9.0

# on the gaps of the fits of folds, which only have to tell one C from another
FOLD_TOL = 1e-3

# of a fold and an alpha, for each entry of K
FOLD_FLOPS = 2000.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is tried.

    Parameters
    ----------
    stage
        Name of the part of the search that it belongs to.
    kind
        "search", "slice", "check" or "folds".
    family
        One of :data:`~dkrr.selection.likelihood.FAMILIES`.
    widths
        One, or one for each feature: where a search begins, or what is evaluated.
    alphas
        One to begin with, or the grid of a slice or of folds.
    num_rows
        Rows of the subset that are used.
    num_evaluations
        At most; of a slice, one.
    factor
        By which the widths of a slice were multiplied.
    fold_loss
        Of folds.
    """

    stage: str
    kind: Literal["search", "slice", "check", "folds"]
    family: str
    widths: tuple[float, ...]
    alphas: tuple[float, ...]
    num_rows: int
    num_evaluations: int = 1
    factor: float = 1.0
    fold_loss: FoldLoss | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES or not self.widths or not self.alphas:
            raise ValueError(f"trial of {self.family!r} with {len(self.widths)} widths and {len(self.alphas)} alphas")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the same that JSON gives back."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {name: value for name, value in found.items() if name != "fold_loss" or value is not None}

    def key(self, digest: str) -> str:
        """The name of its document, for rows of this digest."""
        # the name of the stage is for people: the same work in another stage is the same trial
        fields = {name: value for name, value in self.to_dict().items() if name != "stage"}
        text = json.dumps([FORMAT, digest, fields], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:40]


@dataclass(frozen=True, kw_only=True)
class TrialBatch:
    """Trials that run beside each other: the payload of their tasks. ``digest`` names the rows and the intercept."""

    folder: str
    subset: Subset
    digest: str
    intercept: bool
    trials: tuple[Trial, ...]

    def squares(self, number: int, num_columns: int) -> RowArray:
        """What the rows of a check add to its squared errors (n, evaluations)."""
        trial = self.trials[number]
        name, n = f"{trial.key(self.digest)}.zarr", trial.num_rows
        return RowArray.unsaved(self.folder, name, num_rows=n, num_columns=num_columns, rows_per_chunk=n)

    def known(self, number: int) -> dict[str, Any] | None:
        """What a trial found before, if all of it is there."""
        trial = self.trials[number]
        found = read_json(self.folder, f"{trial.key(self.digest)}.json")
        if found is not None and trial.kind in ("check", "folds"):
            try:
                self.squares(number, len(found["evaluations"])).read(0, trial.num_rows)
            except (StoreError, DamagedChunkError):
                return None
        return found


def run_trial(batch: TrialBatch, number: int) -> tuple[bool, dict[str, Any]]:
    """Run one trial of a batch, or read what it found before. A task of :mod:`dkrr.engine.tasks`.

    Raises
    ------
    MemoryBudgetError
        A matrix of so many rows does not fit.
    """
    trial, known = batch.trials[number], batch.known(number)
    if known is not None:
        return False, known
    started = time.perf_counter()
    try:
        rows = batch.subset.read(trial.num_rows, intercept=batch.intercept)
        with single_blas_thread():
            found = _RUN[trial.kind](rows, trial)
    except MemoryError as exc:
        raise MemoryBudgetError(
            f"a trial on {trial.num_rows:,} rows ran out of memory ({trial_bytes(trial):,} bytes and more)",
            hint="set [tune] rows lower, or raise memory_limit",
        ) from exc
    squares = found.pop("squares", None)
    if squares is not None:
        array = batch.squares(number, squares.shape[1])
        array.save_shape()
        array.write_chunk(0, squares)
    found["seconds"] = round(time.perf_counter() - started, 3)
    failpoint("tune.before_write")
    write_json(batch.folder, f"{trial.key(batch.digest)}.json", found)
    return True, found


def _search(rows: Explained, trial: Trial) -> dict[str, Any]:
    scale, widths = standard_deviations(rows), np.array(trial.widths)
    return minimise(rows, trial.family, widths, trial.alphas[0], scale, trial.num_evaluations).to_dict()


def _check(rows: Explained, trial: Trial) -> dict[str, Any]:
    widths = np.array(trial.widths)
    found = refine_alpha(rows, trial.family, widths, trial.alphas[0], trial.num_evaluations)
    norm = largest_eigenvalue(rows.matrix(trial.family, widths))
    return found.to_dict() | {"squares": found.squares, "norm": norm}


def _slice(rows: Explained, trial: Trial) -> dict[str, Any]:
    errors = alpha_path(rows, trial.family, np.array(trial.widths), np.array(trial.alphas))
    return _path(trial, errors, "loo_rmse")


def _folds(rows: Explained, trial: Trial) -> dict[str, Any]:
    assert trial.fold_loss is not None  # noqa: S101  (narrows the type)
    widths = np.array(trial.widths)
    kernel = family_kernel(trial.family, widths).resolve(rows.x.shape[1])
    squares = fold_losses(trial.fold_loss, kernel, rows.x, rows.y, rows.weight, fit_intercept=rows.intercept)[:, ::-1]
    errors = trial.fold_loss.error(squares)
    return _path(trial, errors, "error") | {
        "evaluations": [[alpha, None, float(error)] for alpha, error in zip(trial.alphas, errors, strict=True)],
        "norm": largest_eigenvalue(rows.matrix(trial.family, widths)),
        "squares": np.ascontiguousarray(squares),
    }


def fold_losses(
    asked: FoldLoss, kernel: Kernel, x: FloatArray, y: FloatArray, weight: FloatArray | None, *, fit_intercept: bool
) -> FloatArray:
    """What each row loses when the other folds are fitted, for each C of ``asked`` (n, k), by its metric.

    Row i is of fold i mod ``num_folds``, counted within each class.

    Parameters
    ----------
    kernel
        Resolved.
    x : (n, d), y : (n, t)
        Of a loss for labels a column for each class, largest where a row has it.
    weight : (n,), optional
        Above 0; they count in the fits, and the losses are multiplied by them over their mean.

    Raises
    ------
    DataError
        A class has one row alone.

    Cost
    ----
    ``num_folds`` fits with k values of C, and a product of each.
    """
    n, k, weight = len(x), len(asked.C), np.ones(len(x)) if weight is None else weight
    share = weight / weight.mean()
    codes = np.zeros(n, dtype=np.intp)
    if asked.losses[0].is_for_labels:
        varying = y[:, np.ptp(y, axis=0) > 0]  # a class that no row has cannot be told from the others
        codes = np.argmax(varying > 0.5 * (varying.min(axis=0) + varying.max(axis=0)), axis=1)
        count = np.bincount(codes)
        if count.min() < 2:
            raise DataError(
                f"a class has one of the {n:,} rows of a fold search; at least two expected",
                hint="give the search more rows ([tune] rows, search_rows), or leave that class out",
            )
        if asked.metric == "balanced_accuracy":
            share = weight * n / (len(count) * np.bincount(codes, weights=weight)[codes])
        y = label_targets(codes, weight, range(len(count)))
    fold = np.empty(n, dtype=np.intp)
    for code in range(codes.max() + 1):
        own = np.flatnonzero(codes == code)
        fold[own] = (np.arange(len(own)) + code) % asked.num_folds
    found = np.empty((n, k))
    for number in np.unique(fold):
        test = fold == number
        train = ~test
        fit = fit_losses(
            kernel, x[train], y[train], asked.losses, asked.C, weight=weight[train], fit_intercept=fit_intercept,
            tol=FOLD_TOL, allow_unconverged=True,
        )  # fmt: skip
        values = kernel.block(x[test], x[train]) @ fit.dual_coef + fit.intercept
        found[test] = _lost(asked, values.reshape(len(values), k, -1), y[test], codes[test])
    return np.asarray(found * share[:, None])


def _lost(asked: FoldLoss, values: FloatArray, y: FloatArray, codes: NDArray[np.intp]) -> FloatArray:
    """Of rows with decision values or predictions (f, k, m): (f, k)."""
    if asked.losses[0].is_for_labels:
        whole = np.concatenate((-values, values), axis=2) if values.shape[2] == 1 else values
        if asked.metric == "log_loss":
            logarithms = log_probabilities(whole.reshape(-1, whole.shape[2])).reshape(whole.shape)
            return np.asarray(-logarithms[np.arange(len(y)), :, codes])
        return np.asarray(whole.argmax(axis=2) != codes[:, None], dtype=np.float64)
    truth = np.broadcast_to(y[:, None, :], values.shape)
    if asked.metric == "rmse":
        return np.asarray(np.square(truth - values).mean(axis=2))
    losses = asked.losses * (values.shape[2] // len(asked.losses))
    lost = [loss.value(truth[..., j], values[..., j]) for j, loss in enumerate(losses)]
    return np.asarray(np.mean(lost, axis=0))


def _path(trial: Trial, errors: FloatArray, name: str) -> dict[str, Any]:
    """The errors of all alphas (k,), and the best one."""
    best = int(np.argmin(errors))
    return {
        "widths": list(trial.widths),
        "alpha": trial.alphas[best],
        name: float(errors[best]),
        "num_evaluations": 1,
        "errors": errors.tolist(),
    }


_RUN = {"search": _search, "slice": _slice, "check": _check, "folds": _folds}


def trial_flops(trial: Trial) -> float:
    """About what a trial costs, at its most evaluations."""
    if trial.fold_loss is not None:
        return FOLD_FLOPS * trial.fold_loss.num_folds * len(trial.alphas) * float(trial.num_rows) ** 2
    each = EIGEN_FLOPS if trial.kind == "slice" else 1.0
    return each * float(trial.num_rows) ** 3 * trial.num_evaluations


def trial_bytes(trial: Trial) -> int:
    """Its matrices: one for a factor and its inverse, three for an eigendecomposition or the fit of a fold."""
    return (24 if trial.kind in ("slice", "folds") else 8) * trial.num_rows**2
