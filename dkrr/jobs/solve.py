"""From a plan to a saved model: the solver that was chosen runs, what the job does not keep is removed.

A run with ``[evaluate] leave_one_out`` gets ``leave_one_out.zarr`` beside its model: the error of every training row by
a fit that had not seen it, ``residuals`` (n, t) in the units of y and ``inverse_diagonal``, in the order of the
training rows, with the figures per target as attributes. With ``[evaluate] intervals`` the saved model gets the
quantiles that its prediction intervals rest on. Nothing is factorised that the fit factorised.

A model is remembered in the store by the rows and targets that it was fitted to, and found again by what they have in
common with others: there an iteration begins, with zeros for rows that came later. A direct solve has no use for it. A
model of another loss than the square has lost its rows with coefficients of 0; the others stand in it in the order of
the data set. Cost: one reading of the coefficients.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from math import log
from typing import Any

import numpy as np

from dkrr.dataset import Dataset, Floats, write_rows
from dkrr.engine.tasks import RunSummary
from dkrr.errors import ConvergenceError, DkrrError
from dkrr.fit.fitting import FitResult
from dkrr.fit.inputs import given_tiles, rows_on_disk
from dkrr.jobs.loss_fit import fit_loss, loss_of
from dkrr.jobs.plan import Plan, decision_of
from dkrr.jobs.prepare import Prepared
from dkrr.jobs.spec import JobSpec
from dkrr.jobs.tables import Shown, fit_facts
from dkrr.kernels import Kernel
from dkrr.linalg.catalogue import Ancestor, ancestors, record_rows
from dkrr.linalg.loss import make_loss
from dkrr.linalg.products import ArrayRows
from dkrr.linalg.solution import NystromSettings, Solution
from dkrr.linalg.workspace import Workspace
from dkrr.models.model import Model, load_model
from dkrr.models.prediction import LOWER_IS_BETTER, Score, score_dataset
from dkrr.models.tiled import Solved, factor_settings, leave_one_out_rows, solve_rows
from dkrr.models.uncertainty import loo_quantiles
from dkrr.models.validation import check_target_sizes
from dkrr.store.files import delete_key, list_entries, place, remove_array, write_json

__all__ = ["FitSummary", "solve_and_save"]

logger = logging.getLogger("dkrr.jobs")


@dataclass(frozen=True, kw_only=True, repr=False)
class FitSummary(Shown, Solution):
    """What a fit did: its solution, sizes, seconds per phase, rates, memory, score. Sizes in bytes, times in seconds.

    ``reused`` is what earlier fits saved (:class:`~dkrr.linalg.solution.Solution`, and "scaling"), ``data`` names the
    rows of the job's data set, ``training_rows`` where they are as the kernel saw them: a later fit takes the scaling
    from there, so `dkrr gc` leaves them. ``given_up`` are the ways that led to no answer before this one.

    With another ``loss`` than the square there are ``certificates`` instead of residuals, and ``num_support`` rows are
    in the model; ``history`` has [iteration, gap, violation] of some iterations of each of ``target_names``. Of several
    C ``path`` has a dict for each, in increasing order, with its model and its score on the held-out rows, by which one
    was chosen; the rest is that of the chosen one.
    """

    run_directory: str
    model_path: str
    plan: Plan
    tiles_computed: int
    tiles_total: int
    flops_per_second: float
    peak_rss_bytes: dict[str, int] = field(default_factory=dict)
    client_peak_rss_bytes: int = 0
    intercept: list[float] | None = None
    leave_one_out: dict[str, Any] | None = None
    score: Score | None = None
    metric: str = ""
    kept: dict[str, int] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    training_rows: str = ""
    estimated_seconds: dict[str, float] = field(default_factory=dict)
    loss: dict[str, Any] | None = None
    num_support: int | None = None
    target_names: list[str] = field(default_factory=list)
    path: list[dict[str, Any]] = field(default_factory=list)
    history: list[Any] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return super().to_dict() | {"plan": self.plan.to_dict()}

    def facts(self) -> list[tuple[str, str]]:
        """What the fit did, in the order in which it did it."""
        return fit_facts(self)


def solve_and_save(job: JobSpec, prepared: Prepared, plan: Plan, workspace: Workspace, directory: str) -> FitSummary:
    """Solve as ``plan`` says and save ``model.zarr`` in the run's ``directory``; seconds and score are still missing.

    Raises
    ------
    NumericalError, DataError, StoreError, LockedError
        See :func:`dkrr.fit.fitting.fit_rows`.
    """
    train, path, left_out = prepared.train, place(directory, "model.zarr"), None
    with _solved(job, prepared, plan, workspace, directory) as (fits, rows):
        models = [fit.model(train, scaling=prepared.scaling) for fit in fits]
        points = _score_path(job, models, prepared.test, workspace, directory) if len(fits) > 1 else []
        best = next((number for number, point in enumerate(points) if point["chosen"]), 0)
        model, tiles = models[best], fits[best].tiles
        # the figures of the model whose place it takes go first: they are not its own
        delete_key(directory, "result.json")
        model.write(path, overwrite=True)
        if job.leaves_out:
            left_out = _leave_out(job, fits[best], rows, workspace, path, directory)
    if model.kernel is not None and (tiles is not None or plan.loss is not None):
        remember(workspace.store, train, model.kernel, model.provenance["alpha"], path, loss_of(plan))
    factor, solution = workspace.phases.get("factorise", RunSummary()), model.solution
    loss: dict[str, Any] = {}
    if plan.loss is not None:
        loss = {"loss": {**plan.loss, "C": model.provenance["C"]}, "num_support": model.num_rows, "path": points}
        loss |= {"target_names": model.target_names, "history": fits[best].history}
    return FitSummary(
        **vars(solution) | {"reused": _reused(plan, solution)},
        run_directory=directory,
        model_path=path,
        plan=plan,
        tiles_computed=factor.num_computed,
        tiles_total=0 if tiles is None else tiles.operator.grid.num_lower * len(tiles.factors),
        flops_per_second=factor.flops_computed / factor.seconds if factor.num_computed else 0.0,
        intercept=None if model.intercept is None else model.intercept.tolist(),
        leave_one_out=left_out,
        kept={} if tiles is None else _clean(job, workspace, tiles),
        **loss,
    )


@contextmanager
def _solved(
    job: JobSpec, prepared: Prepared, plan: Plan, workspace: Workspace, directory: str
) -> Iterator[tuple[list[Solved], Dataset]]:
    """By the way of the plan, for each C of another loss than the square; and the rows that were solved for.

    Those of a precomputed matrix are their numbers.
    """
    rows = prepared.train
    with ExitStack() as stack:
        if plan.loss is not None:
            yield stack.enter_context(fit_loss(job, prepared, plan, workspace, directory, begin_from)), rows
            return
        check_target_sizes(rows)
        decision, given, digest, start = decision_of(job, prepared, plan), None, "", None
        settings = decision.settings()
        if settings.kernel is None:
            parts = {name: part.read(0, rows.num_rows) for name, part in rows.parts().items() if name != "X"}
            numbers = np.arange(rows.num_rows, dtype=np.float64)[:, None]
            rows = stack.enter_context(rows_on_disk(numbers, parts["y"], parts.get("weight"), workspace.store))
            matrix = given_tiles(prepared.train.X, workspace.store, plan.tile_size)
            given, digest = stack.enter_context(matrix)
        elif plan.nystrom is None and plan.solver != "primal" and settings.iterates:
            start = begin_from(rows, settings.kernel, settings.alpha, None, workspace)
        fit = solve_rows(
            rows,
            settings,
            workspace,
            solver="nystrom" if plan.nystrom is not None else plan.solver,
            nystrom=None if plan.nystrom is None else NystromSettings(**plan.nystrom),
            given=given,
            source_digest=digest,
            start=start,
            ways=None if given is not None else decision,
        )
        found = stack.enter_context(fit)
        if job.output.keep == "model":
            for name in ("store", "factors"):
                found.details.pop(name, None)
        yield [found], rows


def _reused(plan: Plan, solution: Solution) -> dict[str, Any]:
    """What was there from earlier fits and what that saved: seconds as measured, else as the plan expected."""
    found: dict[str, Any] = {name: dict(values) for name, values in solution.reused.items()}
    if "scaling" in plan.reused:
        found["scaling"] = plan.reused["scaling"]
    factor = found.get("factor")
    if factor is not None and factor["seconds"] is None:
        factor["seconds"] = plan.reused.get("factor", {}).get("seconds")
    return found


def _score_path(
    job: JobSpec, models: list[Model], test: Dataset | None, workspace: Workspace, directory: str
) -> list[dict[str, Any]]:
    """What the models of several C, in increasing order, are worth on the held-out rows; the best of them is "chosen",
    of equals that of the smallest C. Each is saved as ``path-NUMBER.zarr``."""
    assert test is not None  # noqa: S101  (narrows the type: a job with several C has held-out rows)
    points: list[dict[str, Any]] = []
    for number, model in enumerate(models):
        location = place(directory, f"path-{number:03}.zarr")
        model.write(location, overwrite=True)
        saved, (work, progress) = load_model(location), (workspace.executor, workspace.progress)
        score, run = score_dataset(saved, test, work, progress, store=workspace.store)
        workspace.record("path", run)
        metric = (None if job.evaluate is None else job.evaluate.metric) or score.metric
        points.append(
            {
                **{name: model.provenance[name] for name in ("C", "alpha")},
                "metric": metric,
                "score": score.value(metric),
                "num_support": model.num_rows,
                "gap": max(certificate.gap for certificate in model.solution.certificates),
                "converged": model.solution.converged,
                "model_path": location,
                "chosen": False,
            }
        )
    sign = 1.0 if points[0]["metric"] in LOWER_IS_BETTER else -1.0
    min(points, key=lambda point: sign * point["score"])["chosen"] = True
    return points


def _clean(job: JobSpec, workspace: Workspace, result: FitResult) -> dict[str, int]:
    """Remove what ``keep`` does not name and this run has made for itself alone; sizes of what stays."""
    keep, matrices = job.output.keep, [*result.factors, *([result.gram] if result.gram else [])]
    for location in matrices:
        if keep == "model" or (keep == "factor" and location == result.gram):
            workspace.discard(location)
    sizes = {location: sum(entry.num_bytes for entry in list_entries(location)) for location in matrices}
    return {location: num_bytes for location, num_bytes in sizes.items() if num_bytes}


def _leave_out(
    job: JobSpec, fitted: Solved, rows: Dataset, workspace: Workspace, model_path: str, directory: str
) -> dict[str, Any] | None:
    """Leave-one-out of a run whose model is saved: the figures per target, in the units of y.

    None, with a warning, where the job allows a fit that did not converge, and this one is too far from a solution for
    leave-one-out: then the model has no quantiles. Its seconds are those of one phase.

    Cost
    ----
    That of :func:`dkrr.models.tiled.leave_one_out_rows`: n^3 / 3 flops from a float64 factor.
    """
    assert job.evaluate is not None  # noqa: S101  (narrows the type)
    assert fitted.settings is not None  # noqa: S101  (narrows the type)
    model, location = load_model(model_path, verify=False), place(directory, "leave_one_out.zarr")
    remove_array(location)  # an earlier attempt may have left the figures of another one
    work = replace(workspace, phases={})
    settings = factor_settings(fitted.settings, rows, work, model, job.solver.edge)
    given, digest = None, ""
    if fitted.tiles is not None and model.kernel is None:
        given, digest = fitted.tiles.operator.gram, model.provenance["rows_digest"]
    try:
        found = leave_one_out_rows(rows, settings, work, model, given=given, source_digest=digest)
    except ConvergenceError as exc:
        if model.solution.converged:
            raise
        logger.warning("no leave-one-out of a fit that did not converge: %s", exc.message)
        return None
    if model.scaling is not None:
        found = found.in_units(model.scaling.y_std)
    total = RunSummary()
    for summary in work.phases.values():
        total.merge(replace(summary, values={}))
    workspace.record("leave_one_out", total)
    if job.evaluate.intervals is not None:
        model.with_quantiles(loo_quantiles(model, found)).write(model_path, overwrite=True)
    figures = found.summary()
    if job.evaluate.leave_one_out:
        for name, values in (("residuals", found.residuals), ("inverse_diagonal", found.inverse_diagonal)):
            write_rows(location, name, ArrayRows(values))
        write_json(location, "zarr.json", {"zarr_format": 3, "node_type": "group", "attributes": figures})
    return figures


def remember(
    store: Any,
    dataset: Dataset,
    kernel: Kernel,
    alpha: Sequence[float],
    model_path: str,
    loss: dict[str, Any] | None,
) -> None:
    """Note which rows the model at ``model_path`` was fitted to, with which ``loss`` where it was not the square."""
    fields = {
        "kernel": kernel.to_dict(),
        "alpha": list(alpha),
        "num_targets": dataset.num_targets,
        "n": dataset.num_rows,
        "rows_digest": dataset.digest,
        **({} if loss is None else {"loss": loss}),
    }
    record_rows(store, "models", fields, dataset, model_path)


def begin_from(
    dataset: Dataset, kernel: Kernel, alpha: Sequence[float], loss: dict[str, Any] | None, workspace: Workspace
) -> Floats | None:
    """Coefficients (m, t) of the first m rows, None where there are none.

    What was found is noted in ``workspace.reused["start"]``.
    """
    found = ancestors(workspace.store, dataset, kernel.to_dict(), kinds=["models"])

    def distance(item: Ancestor) -> float:
        mine, theirs = min(alpha), min(item.fields["alpha"])
        return abs(log(mine / theirs)) if mine > 0 and theirs > 0 else float(mine != theirs)

    for item in sorted(found, key=lambda item: (-item.num_rows, distance(item))):
        if item.fields["num_targets"] != dataset.num_targets or item.fields.get("loss") != loss:
            continue
        try:
            model = load_model(item.location, verify=False)
            if model.provenance.get("rows_digest") != item.fields["rows_digest"]:
                continue  # another model is there by now
            if loss is None:
                coefficients = model.dual_coef.read(0, item.num_rows)
            else:
                coefficients = _of_rows(model, dataset, item.num_rows)
                if not make_loss(loss["loss"]).is_smooth:  # those at a bound are at the new one
                    coefficients *= item.fields["alpha"][0] / alpha[0]
        except (DkrrError, OSError) as exc:
            logger.info("not begun from %s (%s)", item.location, exc)
            continue
        if not np.isfinite(coefficients).all():
            continue
        workspace.reused["start"] = {"rows": item.num_rows, "of_rows": dataset.num_rows, "source": item.location}
        return np.asarray(coefficients, dtype=np.float64)
    return None


def _of_rows(model: Model, dataset: Dataset, num_rows: int) -> Floats:
    """Coefficients of the first rows of a data set: those of a model whose rows are some of them, in their order."""
    coefficients = model.dual_coef.read(0, model.num_rows)
    found = np.zeros((num_rows, model.num_targets))
    if model.x_fit is None:
        return found
    own, place = [row.tobytes() for row in model.x_fit.read(0, model.num_rows)], 0
    for number, row in enumerate(dataset.X.read(0, num_rows)):
        if place < len(own) and row.tobytes() == own[place]:
            found[number], place = coefficients[place], place + 1
    return found
