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

import contextlib
import io
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from dkrr.dataset import Dataset, Floats, Scaling
from dkrr.engine.machine import cpu_count, single_blas_thread
from dkrr.engine.tasks import RunSummary
from dkrr.errors import CancelledError, ConvergenceError, DataError
from dkrr.jobs.plan import Plan
from dkrr.jobs.prepare import Prepared, check_loss_targets
from dkrr.jobs.run_directory import RunDirectory
from dkrr.jobs.spec import JobSpec
from dkrr.kernels import kernel_from_dict
from dkrr.linalg.catalogue import key_of
from dkrr.linalg.fit_losses import fit_losses, label_targets, loss_details, loss_parts
from dkrr.linalg.workspace import Workspace
from dkrr.models.model import quantile_names
from dkrr.models.tiled import Solved
from dkrr.store.files import children

logger = logging.getLogger("dkrr.jobs")

CHECKPOINT_SECONDS = 10.0
MOST_POINTS = 200


@contextmanager
def fit_loss(
    job: JobSpec, prepared: Prepared, plan: Plan, workspace: Workspace, directory: str, begin: Callable[..., Any]
) -> Iterator[list[Solved]]:
    """Fit the training rows of a job as ``plan`` says; goes on from the checkpoint in the run's ``directory``.

    What was found for each C in increasing order. The checkpoint is removed at the end of the block, when
    they are saved. Without one it begins with the coefficients of an earlier fit, which ``begin`` finds.

    Raises
    ------
    JobFileError, DataError
        The loss is not for these targets; a class has no row with a weight.
    ConvergenceError
        The gap did not reach ``tol``, and ``allow_unconverged`` is not set; a fit with a larger ``max_iter`` goes on.
    CancelledError, LockedError
        Between two iterations, by the progress of the ``workspace``.
    """
    train, model, solver = prepared.train, job.model, job.solver
    losses, path = check_loss_targets(job, train), model.path
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
        "loss": [model.loss, model.loss_parameters, C if len(C) > 1 else C[0], model.fit_intercept],
    }
    num_columns = len(C) * max(len(losses), targets.shape[1])
    goes_on = _Progress(workspace, plan, solver.tol, RunDirectory(directory), fields)
    start = goes_on.load((len(X), num_columns))
    if start is not None:
        workspace.reused["start"] = {"rows": len(X), "source": goes_on.name}
    elif len(path) == 1:
        earlier = begin(train, kernel, [path[0][1]], plan.loss_parameters, workspace)
        if earlier is not None:
            start = np.zeros((len(X), num_columns))
            start[: len(earlier)] = earlier[:, -num_columns:]  # of two classes the second one
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
                tol=solver.tol,
                max_iter=solver.max_iter,
                allow_unconverged=solver.allow_unconverged,
                start=start,
                num_threads=min(plan.workers * plan.threads_per_worker, cpu_count()),
                progress=goes_on,
            )
    except (CancelledError, ConvergenceError):
        goes_on.save()
        raise
    finally:
        workspace.record(plan.solver, RunSummary(seconds=time.perf_counter() - goes_on.began))
    goes_on.trace.is_over = True
    details = {"precision": plan.precision, "fit_intercept": model.fit_intercept, "tol": solver.tol}
    details |= {"allow_unconverged": True} if solver.allow_unconverged else {}
    columns = _columns(prepared, model.quantile if isinstance(model.quantile, list) else [])
    fits = []
    for values, each in zip(path, found.split(len(path)), strict=True):
        part = each.mirrored() if train.classes is not None and len(train.classes) == 2 else each
        parts = loss_parts(part, losses[0], kernel, X, fit_intercept=model.fit_intercept)
        # at most some 200 iterations, the last one among them
        points = [
            [*answer.history[: -1 : -(-len(answer.history) // MOST_POINTS)], answer.history[-1]]
            for answer in part.answers
        ]
        history = [[list(point) for point in each] for each in points]
        parts |= columns | {"solution": replace(parts["solution"], reused=dict(workspace.reused))}
        own = loss_details(losses[0], *values, **model.loss_parameters) | details
        fits.append(Solved(parts=parts, details=own, history=history))
    goes_on.save()  # until the run has its result
    yield fits
    if workspace.at_end is None:
        goes_on.remove()
    else:
        workspace.at_end.append(goes_on.remove)


def _targets(train: Dataset, weight: Floats, scaling: Scaling | None) -> Floats:
    """Targets (n, t), whitened where the rows are; -1 and +1 for classes, (n, 1) for two of them."""
    y = train.targets.read(0, train.num_rows)
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
    """What happens between two iterations: the run says how far it is, stops where it shall, and keeps coefficients.

    Parameters
    ----------
    directory
        The run, where the coefficients are.
    fields
        What they belong to, as JSON.
    """

    def __init__(
        self, workspace: Workspace, plan: Plan, tol: float, directory: RunDirectory, fields: dict[str, Any]
    ) -> None:
        self.workspace, self.solver, self.directory = workspace, plan.solver, directory
        self.name = f"loss-{key_of(fields)[:16]}.npy"
        self.trace = workspace.trace(plan.solver, tol, plan.alpha)  # of one target, class and C after another
        self.began, self._saved = time.perf_counter(), time.monotonic()
        self._coefficients: Callable[[], Floats] | None = None
        self(0, np.inf, None)

    def load(self, shape: tuple[int, int]) -> Floats | None:
        """What an interrupted fit left; None where there is nothing of use."""
        data = self.directory.read_bytes(self.name)
        if data is None:
            return None
        with contextlib.suppress(ValueError, EOFError, OSError):
            values = np.load(io.BytesIO(data), allow_pickle=False)
            if values.shape == shape and values.dtype == np.float64 and np.isfinite(values).all():
                return np.asarray(values)
        logger.warning("%s of %s holds no coefficients: from the beginning", self.name, self.directory.shown)
        return None

    def __call__(self, number: int, gap: float, coefficients: Callable[[], Floats] | None) -> None:
        self._coefficients = coefficients
        if self.workspace.progress is not None:
            shown = f", gap {gap:.1e}" if np.isfinite(gap) else ""
            self.workspace.progress(f"{self.solver}, iteration {number:,}{shown}", number, 0, 0.0, 0.0)
        if coefficients is None:
            return
        self.trace.add(len(self.trace.points) + 1, np.array([gap]))
        if time.monotonic() - self._saved >= CHECKPOINT_SECONDS:
            self.save()

    def save(self) -> None:
        """Save the coefficients as they are now."""
        if self._coefficients is not None:
            file = io.BytesIO()
            np.save(file, self._coefficients())
            self.directory.write_bytes(self.name, file.getvalue())
            self._saved = time.monotonic()

    def remove(self) -> None:
        """Remove what was saved, and what fits of other rows left in this run."""
        for name in children(self.directory.location):
            if re.fullmatch(r"loss-[0-9a-f]{16}\.npy", name):
                self.directory.remove(name)
