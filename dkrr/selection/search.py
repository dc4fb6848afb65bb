"""One trial of a search: frozen parameters, a task that runs it on any worker, and a JSON document with what it found.

    search   widths and alpha that minimise the negative log marginal likelihood, from a start, by L-BFGS-B in
             log l_1, ..., log l_p, log alpha (p = 1 or d) with the exact gradient; a local minimum
    slice    widths times a factor: the leave-one-out error for a grid of alphas, from one eigendecomposition
    check    the same for a few alphas on more rows; the squared errors of the rows are in an array beside the document
    folds    what a fit with another loss than the square loses on held-out rows, for every alpha, of each row as above

A trial is named by the digest of its parameters and of the rows, and its document is its checkpoint: a task that finds
it returns what it says. So an interrupted search continues, and one that is repeated is read.

The rows are a random subset of those of a data set, in random order, as a data set of its own: the first m of them are
a random subset themselves, so that a search on few rows and a check on more of them use nested samples. Rows of weight
0 are left out: they take no part in a fit.

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

from dkrr.dataset import Dataset, Floats, RowArray, ingest
from dkrr.engine.machine import single_blas_thread
from dkrr.errors import DamagedChunkError, DataError, MemoryBudgetError, NotPositiveDefiniteError, StoreError
from dkrr.kernels import Kernel
from dkrr.linalg.fit_losses import fit_losses
from dkrr.linalg.loss import log_probabilities
from dkrr.linalg.nystrom import read_rows
from dkrr.linalg.operators import Rows
from dkrr.models.tiled import label_targets
from dkrr.selection.choice import FoldLoss
from dkrr.selection.likelihood import ALPHA_BOUNDS, Explained, family_kernel
from dkrr.store.files import read_json, write_json

# widths, in standard deviations of their feature: a feature that is wider than the upper bound has no influence
WIDTH_BOUNDS = (1e-2, 1e4)

MEDIAN_ROWS = 1_000

# relative change of the loss, and largest component of its gradient, at which a search ends
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4

FORMAT = 3  # of the documents, and of what is computed

# of an evaluation, for each n^3: a factor and an inverse with the gradient, of few rows as much again for entries and
# strips; a factor and the diagonal of its inverse; an eigendecomposition
FLOPS = {"search": 1.0, "check": 2 / 3, "slice": 9.0}

# on the gaps of the fits of folds, which only have to tell one C from another
FOLD_TOL = 1e-3

# of a fold and an alpha, for each entry of K
FOLD_FLOPS = 2000.0


def draw_subset(dataset: Dataset, num_rows: int, seed: int, location: str) -> Dataset:
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
    order = np.argsort(chosen)
    place = np.argsort(order)
    x, y, own = (
        None if part is None else read_rows(part, chosen[order])[place] for part in (dataset.X, dataset.y, weight)
    )
    return ingest(x, location, y=y, sample_weight=None if own is None else own[:, 0], wait=True)


def explained(rows: Dataset, num_rows: int, *, intercept: bool) -> Explained:
    """The first ``num_rows`` rows of a subset."""
    assert rows.y is not None  # noqa: S101  (narrows the type)
    weight = None if rows.weight is None else rows.weight.read(0, num_rows)[:, 0]
    return Explained(x=rows.X.read(0, num_rows), y=rows.y.read(0, num_rows), weight=weight, intercept=intercept)


def standard_deviations(rows: Explained) -> Floats:
    """Of the features (d,); 1 for one that is constant."""
    deviations = rows.x.std(axis=0)
    return np.where(deviations > 1e-12, deviations, 1.0)


def start_width(x: Floats) -> float:
    """The median distance of rows (of at most 1,000 of them): half of all pairs are closer than one width."""
    rows = x[:MEDIAN_ROWS]
    median = float(np.median(pdist(rows))) if len(rows) > 1 else 0.0
    return median if median > 0 else float(np.sqrt(x.shape[1]))


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
        One of :data:`~dkrr.selection.choice.FAMILIES`.
    widths
        One, or one for each feature: where a search begins, or what is evaluated.
    alphas
        One to begin with, or all that are evaluated.
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
    rows: Rows
    digest: str
    intercept: bool
    trials: tuple[Trial, ...]

    def squares(self, number: int, num_columns: int) -> RowArray:
        """What the rows of a check add to its squared errors (n, alphas)."""
        trial = self.trials[number]
        name, n = f"{trial.key(self.digest)}.zarr", trial.num_rows
        return RowArray.unsaved(self.folder, name, num_rows=n, num_columns=num_columns, rows_per_chunk=n)

    def known(self, number: int) -> dict[str, Any] | None:
        """What a trial found before, if all of it is there."""
        found = read_json(self.folder, f"{self.trials[number].key(self.digest)}.json")
        if found is not None and "evaluations" in found:
            try:
                self.squares(number, len(found["evaluations"])).read(0, self.trials[number].num_rows)
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
        rows = explained(batch.rows.open(), trial.num_rows, intercept=batch.intercept)
        with single_blas_thread():
            found = minimise(rows, trial) if trial.kind == "search" else _held_out(rows, trial)
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
    write_json(batch.folder, f"{trial.key(batch.digest)}.json", found)
    return True, found


def minimise(rows: Explained, trial: Trial) -> dict[str, Any]:
    """The best widths and alpha among the evaluations that a search may make, from where it begins."""
    scale, widths = standard_deviations(rows), np.array(trial.widths)
    scales = scale if len(widths) > 1 else np.array([float(np.sqrt(np.mean(scale**2)))])
    bounds = np.log([*(np.array(WIDTH_BOUNDS) * s for s in scales), ALPHA_BOUNDS])
    found: list[dict[str, Any]] = []

    def loss(parameters: Floats) -> tuple[float, Floats]:
        if len(found) >= trial.num_evaluations:  # a line search may ask for more than maxfun
            raise StopIteration
        at = np.exp(parameters)
        made = rows.evaluate(trial.family, at[:-1], float(at[-1]), gradient=True)
        found.append({"widths": at[:-1].tolist(), "alpha": float(at[-1]), "loss": made.loss, "loo_rmse": made.loo_rmse})
        assert made.gradient is not None  # noqa: S101  (narrows the type)
        return made.loss, made.gradient

    try:
        minimize(
            loss,
            np.clip(np.log([*widths, trial.alphas[0]]), *bounds.T),
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"ftol": LOSS_TOLERANCE, "gtol": GRADIENT_TOLERANCE, "maxfun": trial.num_evaluations},
        )
    except StopIteration:
        pass
    except NotPositiveDefiniteError:
        # rounding put an end to the way towards small alphas; what was found before it stands
        if not found:
            raise
    return min(found, key=lambda point: point["loss"]) | {"num_evaluations": len(found)}


def _held_out(rows: Explained, trial: Trial) -> dict[str, Any]:
    """The errors of all alphas (k,) and the best one; but for a slice what they come from, and the largest eigenvalue
    of S K S, to 1 %."""
    widths, alphas = np.array(trial.widths), list(trial.alphas)
    if trial.fold_loss is not None:
        squares = fold_losses(trial.fold_loss, family_kernel(trial.family, widths), rows)[:, ::-1]
    elif trial.kind == "slice":
        squares = rows.path(trial.family, widths, np.array(alphas))
    else:
        refined = rows.refine(trial.family, widths, alphas[0], trial.num_evaluations)
        alphas, squares = list(refined), np.column_stack(list(refined.values()))
    errors = np.sqrt(squares.mean(axis=0)) if trial.fold_loss is None else trial.fold_loss.error(squares)
    name = "loo_rmse" if trial.fold_loss is None else "error"
    best = int(np.argmin(errors))
    found = {"widths": list(trial.widths), "alpha": alphas[best], name: float(errors[best]), "errors": errors.tolist()}
    found |= {"num_evaluations": trial.num_evaluations}
    if trial.kind == "slice":
        return found
    matrix = rows.matrix(trial.family, widths)
    n = len(matrix)
    norm = eigsh(matrix, k=1, v0=np.ones(n), tol=1e-2, return_eigenvectors=False)[0] if n > 2 else np.abs(matrix).sum()
    evaluations = [[alpha, float(error)] for alpha, error in zip(alphas, errors, strict=True)]
    return found | {"evaluations": evaluations, "norm": float(norm), "squares": np.ascontiguousarray(squares)}


def fold_losses(asked: FoldLoss, kernel: Kernel, rows: Explained) -> Floats:
    """What each row loses when the other folds are fitted, for each C of ``asked`` (n, k), by its metric.

    Row i is of fold i mod ``num_folds``, counted within each class.

    Targets of a loss for labels are a column for each class, largest where a row has it. Weights count in the fits, and
    the losses are multiplied by them over their mean.

    Raises
    ------
    DataError
        A class has one row alone.

    Cost
    ----
    ``num_folds`` fits with k values of C, and a product of each.
    """
    x, y, weight, kernel = rows.x, rows.y, np.square(rows.root), kernel.resolve(rows.x.shape[1])
    n, k = len(x), len(asked.C)
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
            kernel, x[train], y[train], asked.losses, asked.C, weight=weight[train], fit_intercept=rows.intercept,
            tol=FOLD_TOL, allow_unconverged=True,
        )  # fmt: skip
        values = kernel.block(x[test], x[train]) @ fit.dual_coef + fit.intercept
        found[test] = _lost(asked, values.reshape(len(values), k, -1), y[test], codes[test])
    return np.asarray(found * share[:, None])


def _lost(asked: FoldLoss, values: Floats, y: Floats, codes: NDArray[np.intp]) -> Floats:
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


def trial_flops(trial: Trial) -> float:
    """About what a trial costs, at its most evaluations."""
    if trial.fold_loss is not None:
        return FOLD_FLOPS * trial.fold_loss.num_folds * len(trial.alphas) * float(trial.num_rows) ** 2
    return FLOPS[trial.kind] * float(trial.num_rows) ** 3 * trial.num_evaluations


def trial_bytes(trial: Trial) -> int:
    """Its matrices: K and a factor with its inverse, three for an eigendecomposition or the fit of a fold."""
    return (24 if trial.kind in ("slice", "folds") else 16) * trial.num_rows**2
