"""A job with another loss than the square, from its training rows to the parts of a model, in the driver's process.

Classes are -1 and +1 against each other: of two classes one problem is solved, and the columns of the model are its
answer and the negative of it; of several classes each is a problem against the rest. So the largest column is the
class, as with the square loss. Quantiles of a target are a column each. Several values of C are fitted at once, each is
a model of its own, and the one that the held-out rows choose is that of the run.

Every ten seconds of work, and when it is cancelled, the coefficients go to ``loss-KEY.npy`` in the run's directory,
where KEY stands for rows, targets, weights, kernel and loss. The same fit, started again, begins with them; any
coefficients are a right place to begin, so that one which is damaged costs time alone. Without them it begins with
those of the earlier model in the store that shares the most rows, and with 0 for rows that came later.

Cost: the rows in memory twice, and what :mod:`dkrr.fit.prices` says.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset, Scaling
from dkrr.engine.machine import cpu_count
from dkrr.engine.tasks import RunSummary
from dkrr.errors import CancelledError, ConvergenceError, DataError, JobFileError
from dkrr.jobs.loss_spec import losses_of, parameters_of, path_of
from dkrr.jobs.planned import Plan
from dkrr.jobs.prepare import Prepared
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.spec import JobSpec
from dkrr.jobs.start import begin_loss_from
from dkrr.kernels import kernel_from_dict
from dkrr.linalg.losses.fit import LossFit, fit_losses
from dkrr.linalg.losses.loss import Loss
from dkrr.linalg.workspace import Workspace
from dkrr.models.model import quantile_names
from dkrr.models.tiled import label_targets, loss_details, loss_parts
from dkrr.store.failpoints import failpoint
from dkrr.store.files import children
from dkrr.threads import single_blas_thread

__all__ = ["FittedLoss", "LossCheckpoint", "check_loss_targets", "fit_loss", "loss_of", "num_loss_columns"]

logger = logging.getLogger("dkrr.jobs")

Floats = NDArray[np.float64]
CHECKPOINT_SECONDS = 10.0
MOST_POINTS = 200


def check_loss_targets(job: JobSpec, train: Dataset) -> list[Loss]:
    """The losses of a job, one for all targets or one for each quantile of the only target.

    Raises
    ------
    JobFileError
        They are for classes and the targets are none, or the other way round; several quantiles of several targets.
    """
    losses, loss = losses_of(job.model), job.model.loss
    if losses[0].is_for_labels != (train.classes is not None):
        wanted, there = ("classes", "numbers") if losses[0].is_for_labels else ("numbers", "classes")
        raise JobFileError(
            f"[model] loss = {loss!r} is for {wanted}; the targets of {job.data.path} are {there}",
            hint="set [data] one_hot = true" if losses[0].is_for_labels else "take a loss for classes: hinge, logistic",
        )
    if len(losses) > 1 and train.num_targets > 1:
        raise JobFileError(
            f"[model] quantile is a list, and there are {train.num_targets} targets; one target expected",
            hint="write a job for each target, or give one quantile",
        )
    if train.classes is not None and len(train.classes) < 2:
        raise DataError(
            f"all {train.num_rows:,} training rows of {job.data.path} are of class {train.classes[0]!r}; at least two "
            "classes expected",
            hint="check [data] target and the rows that [evaluate] takes",
        )
    return losses


def loss_of(plan: Plan) -> dict[str, Any]:
    """The loss and its parameter, as a model is remembered by."""
    return {name: value for name, value in (plan.loss or {}).items() if name != "C"}


def num_loss_columns(losses: Sequence[Loss], train: Dataset) -> int:
    """How many problems there are for one C: one for two classes, else one for each class, target or quantile."""
    return 1 if train.classes is not None and len(train.classes) == 2 else max(len(losses), train.num_targets)


class LossCheckpoint:
    """The coefficients of a fit that goes on, in the directory of its run.

    Parameters
    ----------
    directory
        The run.
    fields
        What the coefficients belong to, as JSON.
    shape
        (n, t).
    """

    def __init__(self, directory: RunDirectory, fields: dict[str, Any], shape: tuple[int, int]) -> None:
        key = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
        self.directory, self.shape, self.name = directory, shape, f"loss-{key}.npy"
        self._last = time.monotonic()

    def load(self) -> Floats | None:
        """What an interrupted fit left; None where there is nothing of use."""
        data = self.directory.read_bytes(self.name)
        if data is None:
            return None
        try:
            values = np.load(io.BytesIO(data), allow_pickle=False)
        except (ValueError, EOFError, OSError) as exc:
            logger.warning("%s of %s cannot be read (%s): from the beginning", self.name, self.directory.shown, exc)
            return None
        if values.shape != self.shape or values.dtype != np.float64 or not np.isfinite(values).all():
            logger.warning("%s of %s holds no coefficients: from the beginning", self.name, self.directory.shown)
            return None
        return np.asarray(values)

    def is_due(self) -> bool:
        """Whether coefficients shall be saved now."""
        return time.monotonic() - self._last >= CHECKPOINT_SECONDS

    def save(self, coefficients: Floats) -> None:
        """Replace what is there."""
        file = io.BytesIO()
        np.save(file, coefficients)
        self.directory.write_bytes(self.name, file.getvalue())
        self._last = time.monotonic()
        failpoint("loss.checkpoint.after_write")

    def remove(self) -> None:
        """Remove it, and what fits of other rows left in this run."""
        for name in children(self.directory.location):
            if name.startswith("loss-") and name.endswith(".npy"):
                self.directory.remove(name)


@dataclass(frozen=True, kw_only=True)
class FittedLoss:
    """What a model of one C is made of, and what its summary says besides.

    ``parts`` and ``details`` are those of :func:`~dkrr.models.tiled.loss_parts` and
    :func:`~dkrr.models.tiled.loss_details`,
    ``columns`` the scaling, names and form of its targets.
    """

    parts: dict[str, Any]
    details: dict[str, Any]
    columns: dict[str, Any]
    history: list[list[list[float]]]


def fit_loss(
    job: JobSpec, prepared: Prepared, plan: Plan, workspace: Workspace, directory: str
) -> tuple[list[FittedLoss], LossCheckpoint]:
    """Fit the training rows of a job as ``plan`` says; goes on from the checkpoint in the run's ``directory``.

    Returns
    -------
    list of FittedLoss, LossCheckpoint
        One for each C, in increasing order; what is to be removed when they are saved.

    Raises
    ------
    JobFileError, DataError
        The loss is not for these targets; a class has no row with a weight.
    ConvergenceError
        The gap did not reach ``tol``, and ``allow_unconverged`` is not set; a fit with a larger ``max_iter`` goes on.
    CancelledError, LockedError
        Between two iterations, by the progress of the ``workspace``.
    """
    train, model = prepared.train, job.model
    losses, path = check_loss_targets(job, train), path_of(model)
    train.verify()  # chunks of rows that changed places pass their checksums
    kernel = kernel_from_dict(plan.kernel)
    X = train.X.read(0, train.num_rows)
    weight = np.ones(len(X)) if train.weight is None else train.weight.read(0, len(X))[:, 0]
    try:
        targets = _targets(train, weight, prepared.scaling)
    except DataError as exc:
        hint = f"{exc.hint}; see [data] weight and [evaluate]"
        raise DataError(f"training rows of {job.data.path}: {exc.message}", hint=hint) from None
    C = [value for value, _ in path]
    fields = {
        "rows": [train.digest, train.digest_y, train.digest_weight],
        "kernel": kernel.to_dict(),
        "loss": [model.loss, parameters_of(model), C if len(C) > 1 else C[0], model.fit_intercept],
    }
    num_columns = len(C) * max(len(losses), targets.shape[1])
    checkpoint = LossCheckpoint(RunDirectory(directory), fields, (len(X), num_columns))
    start = checkpoint.load()
    if start is not None:
        workspace.reused["start"] = {"rows": len(X), "source": checkpoint.name}
    elif len(path) == 1:
        earlier = begin_loss_from(train, kernel, path[0][1], loss_of(plan), workspace)
        if earlier is not None:
            start = np.zeros((len(X), num_columns))
            start[: len(earlier)] = earlier[:, -num_columns:]  # of two classes the second one
    goes_on = _Progress(workspace, plan.solver, job.solver.tol, plan.alpha, checkpoint)
    try:
        with single_blas_thread():
            found = fit_losses(
                kernel,
                X,
                targets,
                losses,
                C,
                weight=weight,
                fit_intercept=model.fit_intercept,
                tol=job.solver.tol,
                max_iter=job.solver.max_iter,
                allow_unconverged=job.solver.allow_unconverged,
                start=start,
                num_threads=min(plan.workers * plan.threads_per_worker, cpu_count()),
                progress=goes_on,
            )
    except (CancelledError, ConvergenceError):
        goes_on.save()
        raise
    finally:
        workspace.record(plan.solver, RunSummary(seconds=goes_on.seconds))
    goes_on.end(found)
    is_mirrored = train.classes is not None and len(train.classes) == 2
    details = {"fit_intercept": model.fit_intercept, "tol": job.solver.tol}
    details |= {"allow_unconverged": True} if job.solver.allow_unconverged else {}
    columns = _columns(prepared, model.quantile if isinstance(model.quantile, list) else [])
    fitted = [
        FittedLoss(
            parts=loss_parts(part, losses[0], kernel, X, fit_intercept=model.fit_intercept),
            details=loss_details(losses[0], *values, **parameters_of(model)) | details,
            columns=columns,
            history=[_thinned(answer.history) for answer in part.answers],
        )
        for values, each in zip(path, found.split(len(path)), strict=True)
        for part in [each.mirrored() if is_mirrored else each]
    ]
    return fitted, checkpoint


def _targets(train: Dataset, weight: Floats, scaling: Scaling | None) -> Floats:
    """Targets (n, t), whitened where the rows are; -1 and +1 for classes, (n, 1) for two of them."""
    assert train.y is not None  # noqa: S101  (narrows the type)
    y = train.y.read(0, train.num_rows)
    if train.classes is None:
        return y
    # whitened by an earlier fit, whose rows were all of one class, columns do not tell classes apart
    one_hot = y if scaling is None else scaling.invert_y(y)
    return label_targets(np.argmax(one_hot, axis=1), weight, train.classes)


def _columns(prepared: Prepared, quantiles: Sequence[float]) -> dict[str, Any]:
    """Scaling, names and form of the columns that a model predicts."""
    train, scaling = prepared.train, prepared.scaling
    names, y_is_1d = list(train.target_names), train.y_is_1d
    if scaling is not None and train.classes is not None:  # -1 and +1 are what they are
        t = train.num_targets
        scaling = replace(scaling, y_mean=np.zeros(t), y_std=np.ones(t))
    if quantiles:
        names, y_is_1d = quantile_names(names[0], quantiles), False
        if scaling is not None:
            mean, std = (np.repeat(values, len(quantiles)) for values in (scaling.y_mean, scaling.y_std))
            scaling = replace(scaling, y_mean=mean, y_std=std)
    return {"scaling": scaling, "target_names": names, "y_is_1d": y_is_1d}


class _Progress:
    """What happens between two iterations: the run says how far it is, stops where it shall, and saves coefficients."""

    def __init__(
        self, workspace: Workspace, solver: str, tol: float, alpha: Sequence[float], checkpoint: LossCheckpoint
    ) -> None:
        self.workspace, self.solver, self.checkpoint = workspace, solver, checkpoint
        self.tol, self.alpha = tol, alpha
        self._began = time.perf_counter()
        self._first_trace = len(workspace.traces)
        self._last = -1
        self._coefficients: Callable[[], Floats] | None = None
        self(0, np.inf, None)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def __call__(self, number: int, gap: float, coefficients: Callable[[], Floats] | None) -> None:
        self._coefficients = coefficients
        if self.workspace.progress is not None:
            shown = f", gap {gap:.1e}" if np.isfinite(gap) else ""
            self.workspace.progress(f"{self.solver}, iteration {number:,}{shown}", number, 0, 0.0, 0.0)
        if coefficients is None:
            return
        if number <= self._last or self._last < 0:
            self._trace = self.workspace.trace(self.solver, self.tol, self.alpha)
        self._last = number
        self._trace.add(number, np.array([gap]))
        if self.checkpoint.is_due():
            self.save()

    def save(self) -> None:
        """Save the coefficients as they are now."""
        if self._coefficients is not None:
            self.checkpoint.save(self._coefficients())

    def end(self, found: LossFit) -> None:
        """The gaps of each target, instead of the largest ones, which are known before the end."""
        del self.workspace.traces[self._first_trace :]
        trace = self.workspace.trace(self.solver, self.tol, self.alpha)
        histories = [dict((number, gap) for number, gap, _ in answer.history) for answer in found.answers]
        last = [next(iter(history.values())) for history in histories]
        for number in sorted(set().union(*histories)):
            last = [history.get(number, before) for history, before in zip(histories, last, strict=True)]
            trace.add(number, np.array(last))
        trace.is_over = True


def _thinned(history: list[tuple[int, float, float]]) -> list[list[float]]:
    """Iteration, gap and violation of at most some 200 iterations, the last one among them."""
    step = -(-len(history) // MOST_POINTS)
    return [list(point) for point in [*history[:-1:step], history[-1]]]
