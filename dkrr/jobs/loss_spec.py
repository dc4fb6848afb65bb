"""``[model] loss`` of a job: what it means for the other keys, and which of them it cannot have.

Defaults are filled in before a job is checked, so that the job of a run, read again, is the same job. Costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dkrr.errors import ParameterError
from dkrr.linalg.losses.loss import Loss, make_loss
from dkrr.selection.choice import FoldLoss

if TYPE_CHECKING:
    from dkrr.jobs.spec import JobSpec, ModelSpec

__all__ = [
    "Mistake",
    "fold_loss_of",
    "has_metric",
    "losses_of",
    "metrics_of",
    "mistakes_of",
    "parameters_of",
    "path_of",
    "with_defaults",
    "with_tol",
]

TOL = 1e-6
# whose estimators take alpha, and not C
_OF_ALPHA = ("pinball", "huber")
_PARAMETERS = {
    "pinball": "quantile",
    "huber": "epsilon",
    "epsilon_insensitive": "epsilon",
    "squared_epsilon_insensitive": "epsilon",
}
_DEFAULTS = {"pinball": 0.5, "huber": 1.35, "epsilon_insensitive": 0.1, "squared_epsilon_insensitive": 0.1}
# keys of [solver] that only systems of equations have
_OF_SYSTEMS = ("tile_size", "gram", "preconditioner", "rank", "num_centers", "centers")
_OF_LABELS = ("accuracy", "balanced_accuracy")
_TABLES = (".csv", ".csv.gz", ".parquet", ".npy")  # which have no classes of their own


class Mistake(NamedTuple):
    """What is wrong, the key where it stands, and what helps."""

    path: tuple[str, ...]
    message: str
    hint: str


def with_defaults(model: dict[str, Any]) -> dict[str, Any]:
    """``[model]`` of another loss than the square with what it leaves out; ``alpha`` is there where C is."""
    loss = model.get("loss", "square")
    if loss == "square" or not isinstance(loss, str):
        return model
    parameter = {_PARAMETERS[loss]: _DEFAULTS[loss]} if loss in _DEFAULTS else {}
    model = {"fit_intercept": True, **parameter, **model}
    if "alpha" not in model:
        C = model.setdefault("C", 1.0 if loss not in _OF_ALPHA else None)
        if C is None:
            del model["C"]
        else:
            values = C if isinstance(C, list) else [C]
            # what is none of these is refused where C is checked
            if values and all(isinstance(item, int | float) and 0 < item < float("inf") for item in values):
                model["alpha"] = [0.5 / item for item in values] if isinstance(C, list) else 0.5 / C
    return model


def with_tol(document: dict[str, Any]) -> dict[str, Any]:
    """A job of another loss than the square with the ``tol`` that gaps have by default."""
    model, solver = document.get("model", {}), document.get("solver", {})
    if not isinstance(model, dict) or not isinstance(solver, dict) or model.get("loss", "square") == "square":
        return document
    return {**document, "solver": {"tol": TOL, **solver}}


def parameters_of(model: ModelSpec) -> dict[str, Any]:
    """``epsilon`` or ``quantile`` of a loss, where the file has it."""
    given = {"epsilon": model.epsilon, "quantile": model.quantile}
    return {name: value for name, value in given.items() if value is not None}


def path_of(model: ModelSpec) -> list[tuple[float, float]]:
    """C and alpha = 1 / (2 C), in increasing order of C, each as it was given where it was."""
    given = model.alpha if model.C is None else model.C
    values = given if isinstance(given, list) else [given]
    pairs = [(0.5 / value, value) if model.C is None else (value, 0.5 / value) for value in values]
    return sorted(pairs)


def losses_of(model: ModelSpec) -> list[Loss]:
    """The loss of a model, one for each quantile of a list.

    Raises
    ------
    ParameterError
        It has no such parameter, or does not take this value.
    """
    if isinstance(model.quantile, list):
        return [make_loss(model.loss, quantile=quantile) for quantile in model.quantile]
    return [make_loss(model.loss, **parameters_of(model))]


def fold_loss_of(job: JobSpec) -> FoldLoss | None:
    """What a search for C is asked, by the metric of ``[evaluate]`` or the one of the loss; None of the square.

    Of the loss are the share of wrong classes (hinges), the log loss (logistic), and the loss itself (the others).
    """
    model, tune, evaluate = job.model, job.tune, job.evaluate
    if model.loss == "square":
        return None
    own = {"hinge": "accuracy", "squared_hinge": "accuracy", "logistic": "log_loss"}.get(model.loss, model.loss)
    metric = own if evaluate is None or evaluate.metric is None else evaluate.metric
    given: dict[str, Any] = {}
    if tune is not None and tune.C is not None:
        given["C"] = tuple(np.atleast_1d(tune.C).tolist())
    elif isinstance(model.alpha, list):
        given["C"] = tuple(C for C, _ in path_of(model))
    if tune is not None and tune.folds is not None:
        given["num_folds"] = tune.folds
    return FoldLoss(
        loss=model.loss,
        metric="rmse" if metric == "r2" else metric,  # the best one is the same
        epsilon=model.epsilon,
        quantile=None if model.quantile is None else tuple(np.atleast_1d(model.quantile).tolist()),
        **given,
    )


def mistakes_of(job: JobSpec, document: dict[str, Any]) -> Iterator[Mistake]:
    """What a loss, or its absence, does not allow of a job, whose values are right one by one.

    Parameters
    ----------
    document
        The job as it was given: what it says and what it leaves out.
    """
    model, loss = job.model, job.model.loss
    for name in parameters_of(model):
        if _PARAMETERS.get(loss) != name:
            losses = " and ".join(key for key, has in _PARAMETERS.items() if has == name)
            yield _mistake("model", name, f"is for loss = {losses}; the loss is {loss!r}", "leave it out")
    if loss == "square":
        if model.C is not None:
            yield _mistake("model", "C", "is for other losses than the square", "give alpha, which is 1 / (2 C)")
        for name in ("C", "folds"):
            if job.tune is not None and getattr(job.tune, name) is not None:
                yield _mistake("tune", name, "is for other losses than the square", "leave it out")
    else:
        if "alpha" in document["model"] and "C" in document["model"]:
            yield _mistake("model", "C", "and alpha are both given", "give one of them: C = 1 / (2 alpha)")
        alpha = model.alpha if isinstance(model.alpha, list) else [model.alpha]
        if min(alpha) == 0 or len(set(alpha)) < len(alpha):
            expected = f"a number above 0, or a list of different ones, expected with loss = {loss!r}"
            yield _mistake("model", "alpha", f"= {model.alpha!r}; {expected}", "")
        if isinstance(model.alpha, list) and not _holds_out(job):
            yield _mistake(
                "model", "alpha" if model.C is None else "C", "is a list, and no rows are held out to choose one by",
                "set [evaluate] fraction, or give one number; `dkrr tune` chooses one of [tune] C by folds",
            )  # fmt: skip
        yield from _mistakes_beside(job)
        try:
            losses_of(model)
        except ParameterError as exc:
            yield Mistake(("model", _PARAMETERS[loss]), f"[model] {exc.message}", exc.hint)
    metric = None if job.evaluate is None else job.evaluate.metric
    if metric is not None and not has_metric(loss, metric):
        yield _mistake("evaluate", "metric", f"= {metric!r} with loss = {loss!r}", metrics_of(loss))


def _mistakes_beside(job: JobSpec) -> Iterator[Mistake]:
    """What other keys of the job have no meaning with another loss than the square."""
    loss, solver, evaluate = job.model.loss, job.solver, job.evaluate
    with_loss = f"with loss = {loss!r}"
    if job.model.build_kernel().name == "precomputed":
        yield _mistake(
            "model", "kernel", f"= 'precomputed' {with_loss}: jobs with a loss have rows",
            "give rows and a kernel, or fit the matrix in Python: dkrr.KernelSVC(kernel='precomputed')",
        )  # fmt: skip
    if solver.name != "auto":
        yield _mistake("solver", "name", f"= {solver.name!r} {with_loss}, which decides it", "leave it out")
    if solver.precision not in ("auto", "float64"):
        yield _mistake("solver", "precision", f"= {solver.precision!r} {with_loss}; float64 expected", "leave it out")
    for name in _OF_SYSTEMS:
        if getattr(solver, name) != "auto":
            yield _mistake("solver", name, f"= {getattr(solver, name)!r} {with_loss}, which has none", "leave it out")
    for name in ("leave_one_out", "intervals"):
        if evaluate is not None and getattr(evaluate, name):
            yield _mistake("evaluate", name, f"{with_loss}: it is known of the square alone", _instead(loss))
    is_for_labels = make_loss(loss).is_for_labels
    if job.data.one_hot and not is_for_labels:
        yield _mistake("data", "one_hot", f"= true {with_loss}, which is for numbers", "leave it out")
    if is_for_labels and not job.data.one_hot and job.data.path.lower().endswith(_TABLES):
        yield _mistake("data", "one_hot", f"is not true {with_loss}, which is for classes", "set [data] one_hot = true")


def _holds_out(job: JobSpec) -> bool:
    evaluate = job.evaluate
    return evaluate is not None and any((evaluate.path, evaluate.mask is not None, evaluate.fraction))


def _mistake(table: str, key: str, message: str, hint: str) -> Mistake:
    return Mistake((table, key), f"[{table}] {key} {message}", hint)


def _instead(loss: str) -> str:
    return "leave it out" if loss == "pinball" else "leave it out; loss = 'pinball' with outer quantiles gives a band"


def has_metric(loss: str, metric: str) -> bool:
    """Whether a metric has a meaning for predictions of a loss; of the square that depends on its targets."""
    if metric in ("log_loss", "pinball"):
        return loss == ("logistic" if metric == "log_loss" else metric)
    return loss == "square" or (metric in _OF_LABELS) == make_loss(loss).is_for_labels


def metrics_of(loss: str) -> str:
    """Names of the metrics that a loss has, in words."""
    known = ("rmse", "r2", *_OF_LABELS, "log_loss", "pinball")
    return f"one of {', '.join(metric for metric in known if has_metric(loss, metric))}"
