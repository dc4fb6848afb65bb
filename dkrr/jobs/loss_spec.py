"""``[model] loss`` of a job: what it means for the other keys, and which of them it cannot have.

Defaults are filled in before a job is checked, so that the job of a run, read again, is the same job. Costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dkrr.errors import JobFileError, ParameterError
from dkrr.jobs.toml import misplaced
from dkrr.linalg.losses.loss import make_loss

if TYPE_CHECKING:
    from dkrr.jobs.spec import JobSpec, ModelSpec

__all__ = ["check_job", "check_metric", "check_model", "with_defaults"]

TOL = 1e-6
# whose estimators take alpha, and not C
_OF_ALPHA = ("pinball", "huber")
# the parameter of a loss, and its default
_PARAMETERS = {
    "pinball": ("quantile", 0.5),
    "huber": ("epsilon", 1.35),
    "epsilon_insensitive": ("epsilon", 0.1),
    "squared_epsilon_insensitive": ("epsilon", 0.1),
}
# keys that only systems of equations have, with all that another loss allows of them
_OF_SYSTEMS = dict.fromkeys(("tile_size", "gram", "preconditioner", "rank", "num_centers", "centers"), ("auto",))
_SOLVER = {"name": ("auto",), "precision": ("auto", "float64"), **_OF_SYSTEMS}
_OF_LABELS = ("accuracy", "balanced_accuracy")
_TABLES = (".csv", ".csv.gz", ".parquet", ".npy")  # which have no classes of their own


def with_defaults(document: dict[str, Any]) -> dict[str, Any]:
    """A job of another loss than the square with what it leaves out; ``alpha`` is there where C is.

    Raises
    ------
    JobFileError
        Both are.
    """
    model, solver = document.get("model"), document.get("solver", {})
    loss = model.get("loss", "square") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(solver, dict) or not isinstance(loss, str) or loss == "square":
        return document
    if "alpha" in model and "C" in model:
        raise misplaced(("model", "C"), "and alpha are both given", "give one of them: C = 1 / (2 alpha)")
    model = {"fit_intercept": True, **dict([_PARAMETERS[loss]] if loss in _PARAMETERS else []), **model}
    if "alpha" not in model and "C" not in model and loss not in _OF_ALPHA:
        model["C"] = 1.0
    C = model.get("C")
    values: list[Any] = C if isinstance(C, list) else [C]
    # what is none of these is refused where C is checked
    if values and all(isinstance(item, int | float) and 0 < item < float("inf") for item in values):
        alpha = [0.5 / item for item in values]
        model["alpha"] = alpha if isinstance(C, list) else alpha[0]
    return {**document, "model": model, "solver": {"tol": TOL, **solver}}


def check_model(model: ModelSpec) -> None:
    """Refuse what a loss, or its absence, does not allow of ``[model]``, whose values are right one by one."""
    loss = model.loss
    for name in model.loss_parameters:
        if _PARAMETERS.get(loss, ("",))[0] != name:
            of = " and ".join(key for key, (parameter, _) in _PARAMETERS.items() if parameter == name)
            raise misplaced(("model", name), f"is for loss = {of}; the loss is {loss!r}", "leave it out")
    if loss == "square":
        if model.C is not None:
            raise _of_others("model", "C", "give alpha, which is 1 / (2 C)")
        return
    alpha = model.alpha if isinstance(model.alpha, list) else [model.alpha]
    if min(alpha) == 0 or len(set(alpha)) < len(alpha):
        expected = f"a number above 0, or a list of different ones, expected with loss = {loss!r}"
        raise misplaced(("model", "alpha"), f"= {model.alpha!r}; {expected}")
    try:
        model.losses()
    except ParameterError as exc:
        raise JobFileError(f"[model] {exc.message}", hint=exc.hint, key=["model", _PARAMETERS[loss][0]]) from None


def check_job(job: JobSpec) -> None:
    """Refuse what a loss does not allow of the other tables of a job, whose values are right one by one."""
    model, solver, evaluate, tune, loss = job.model, job.solver, job.evaluate, job.tune, job.model.loss
    with_loss = f"with loss = {loss!r}"
    if loss == "square":
        for name in ("C", "folds"):
            if tune is not None and getattr(tune, name) is not None:
                raise _of_others("tune", name, "leave it out")
    else:
        if isinstance(model.alpha, list) and not job.holds_out:
            raise misplaced(
                ("model", "alpha" if model.C is None else "C"),
                "is a list, and no rows are held out to choose one by",
                "set [evaluate] fraction, or give one number; `dkrr tune` chooses one of [tune] C by folds",
            )
        if model.build_kernel().name == "precomputed":
            raise misplaced(
                ("model", "kernel"),
                f"= 'precomputed' {with_loss}: jobs with a loss have rows",
                "give rows and a kernel, or fit the matrix in Python: dkrr.KernelSVC(kernel='precomputed')",
            )
        for name, allowed in _SOLVER.items():
            if (value := getattr(solver, name)) not in allowed:
                raise misplaced(("solver", name), f"= {value!r} {with_loss}, which decides it", "leave it out")
        if evaluate is not None and (evaluate.leave_one_out or evaluate.intervals):
            name = "leave_one_out" if evaluate.leave_one_out else "intervals"
            band = "; loss = 'pinball' with outer quantiles gives a band" if loss != "pinball" else ""
            raise misplaced(("evaluate", name), f"{with_loss}: it is known of the square alone", f"leave it out{band}")
        is_for_labels = make_loss(loss).is_for_labels
        if job.data.one_hot and not is_for_labels:
            raise misplaced(("data", "one_hot"), f"= true {with_loss}, which is for numbers", "leave it out")
        if is_for_labels and not job.data.one_hot and job.data.path.lower().endswith(_TABLES):
            hint = "set [data] one_hot = true"
            raise misplaced(("data", "one_hot"), f"is not true {with_loss}, which is for classes", hint)
    if evaluate is not None and evaluate.metric is not None:
        check_metric(("evaluate", "metric"), loss, evaluate.metric)


def _of_others(table: str, key: str, hint: str) -> Exception:
    return misplaced((table, key), "is for other losses than the square", hint)


def check_metric(path: tuple[str, str], loss: str, metric: str) -> None:
    """Refuse a metric, the key at ``path``, that has no meaning for predictions of a loss.

    Of the square that depends on its targets.
    """

    def has_meaning(name: str) -> bool:
        if name in ("log_loss", "pinball"):
            return loss == ("logistic" if name == "log_loss" else name)
        return loss == "square" or (name in _OF_LABELS) == make_loss(loss).is_for_labels

    if not has_meaning(metric):
        known = ("rmse", "r2", *_OF_LABELS, "log_loss", "pinball")
        hint = f"one of {', '.join(name for name in known if has_meaning(name))}"
        raise misplaced(path, f"= {metric!r} with loss = {loss!r}", hint)
