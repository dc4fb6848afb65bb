"""One trial of a search: frozen parameters, a task that runs it on any worker, and a JSON document with what it found.

    search   widths and alpha that minimise the negative log marginal likelihood, from a start
    slice    widths times a factor: the leave-one-out error for a grid of alphas, from one eigendecomposition
    check    the leave-one-out error on more rows, alpha refined by its slope; the squared errors of the rows for every
             alpha, in an array beside the document
    folds    what a fit with another loss than the square loses on held-out rows, for every alpha, of each row as above

A trial is named by the digest of its parameters and of the rows, and its document is its checkpoint: a task that finds
it returns what it says. So an interrupted search continues, and one that is repeated is read.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import RowArray
from dkrr.errors import DamagedChunkError, MemoryBudgetError, StoreError
from dkrr.selection.choice import FoldLoss
from dkrr.selection.families import FAMILIES, family_kernel
from dkrr.selection.folds import fold_losses
from dkrr.selection.likelihood import Explained
from dkrr.selection.search import Found, alpha_path, largest_eigenvalue, minimise, refine_alpha
from dkrr.selection.subset import Subset, standard_deviations
from dkrr.store.failpoints import failpoint
from dkrr.store.files import read_json, write_json
from dkrr.threads import single_blas_thread

__all__ = ["Trial", "TrialBatch", "read_squares", "run_trial", "trial_bytes", "trial_flops"]

FloatArray = NDArray[np.float64]

FORMAT = 2  # of the documents, and of what is computed
# a gradient evaluation makes a factor and an inverse (n^3 flops); entries and strips count as much again for few rows
EIGEN_FLOPS = 9.0
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
        One of :data:`~dkrr.selection.families.FAMILIES`.
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


def run_trial(batch: TrialBatch, number: int) -> tuple[bool, dict[str, Any]]:
    """Run one trial of a batch, or read what it found before. A task of :mod:`dkrr.engine.tasks`.

    Raises
    ------
    MemoryBudgetError
        A matrix of so many rows does not fit.
    """
    trial = batch.trials[number]
    document = f"{trial.key(batch.digest)}.json"
    known = read_json(batch.folder, document)
    if known is not None and _has_squares(batch, number, known):
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
        array = _squares_array(batch, trial, squares.shape[1])
        array.save_shape()
        array.write_chunk(0, squares)
    found["seconds"] = round(time.perf_counter() - started, 3)
    failpoint("tune.before_write")
    write_json(batch.folder, document, found)
    return True, found


def _squares_array(batch: TrialBatch, trial: Trial, num_columns: int) -> RowArray:
    return RowArray.unsaved(
        batch.folder,
        f"{trial.key(batch.digest)}.zarr",
        num_rows=trial.num_rows,
        num_columns=num_columns,
        rows_per_chunk=trial.num_rows,
    )


def read_squares(batch: TrialBatch, number: int, num_columns: int) -> FloatArray:
    """What the rows of a check add to its squared errors (n, evaluations)."""
    trial = batch.trials[number]
    found: FloatArray = _squares_array(batch, trial, num_columns).read(0, trial.num_rows)
    return found


def _has_squares(batch: TrialBatch, number: int, known: dict[str, Any]) -> bool:
    try:
        has_none = batch.trials[number].kind not in ("check", "folds")
        return has_none or bool(read_squares(batch, number, len(known["evaluations"])).size)
    except (StoreError, DamagedChunkError):
        return False


def _search(rows: Explained, trial: Trial) -> dict[str, Any]:
    scale = standard_deviations(rows)
    found = minimise(rows, trial.family, np.array(trial.widths), trial.alphas[0], scale, trial.num_evaluations)
    return _document(found)


def _check(rows: Explained, trial: Trial) -> dict[str, Any]:
    widths = np.array(trial.widths)
    found = refine_alpha(rows, trial.family, widths, trial.alphas[0], trial.num_evaluations)
    norm = largest_eigenvalue(rows.matrix(trial.family, widths))
    return _document(found) | {"squares": found.squares, "norm": norm}


def _slice(rows: Explained, trial: Trial) -> dict[str, Any]:
    errors = alpha_path(rows, trial.family, np.array(trial.widths), np.array(trial.alphas))
    best = int(np.argmin(errors))
    return {
        "widths": list(trial.widths),
        "alpha": trial.alphas[best],
        "loo_rmse": float(errors[best]),
        "num_evaluations": 1,
        "errors": errors.tolist(),
    }


def _folds(rows: Explained, trial: Trial) -> dict[str, Any]:
    assert trial.fold_loss is not None  # noqa: S101  (narrows the type)
    widths = np.array(trial.widths)
    kernel = family_kernel(trial.family, widths).resolve(rows.x.shape[1])
    squares = fold_losses(trial.fold_loss, kernel, rows.x, rows.y, rows.weight, fit_intercept=rows.intercept)[:, ::-1]
    errors = trial.fold_loss.error(squares)
    best = int(np.argmin(errors))
    return {
        "widths": list(trial.widths),
        "alpha": trial.alphas[best],
        "error": float(errors[best]),
        "num_evaluations": 1,
        "errors": errors.tolist(),
        "evaluations": [[alpha, None, float(error)] for alpha, error in zip(trial.alphas, errors, strict=True)],
        "norm": largest_eigenvalue(rows.matrix(trial.family, widths)),
        "squares": np.ascontiguousarray(squares),
    }


def _document(found: Found) -> dict[str, Any]:
    return {
        "widths": found.widths.tolist(),
        "alpha": found.alpha,
        "loss": found.loss,
        "loo_rmse": found.loo_rmse,
        "degrees_of_freedom": found.degrees_of_freedom,
        "num_evaluations": len(found.evaluations),
        "evaluations": [list(point) for point in found.evaluations],
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
