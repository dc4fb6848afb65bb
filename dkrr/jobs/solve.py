"""From a plan to a saved model: the solver that was chosen runs, what the job does not keep is removed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dkrr._version import __version__
from dkrr.dataset import Dataset
from dkrr.fit.choices import Candidate, Iterations, Limits, Problem, SolverChoice
from dkrr.fit.fitting import FitResult, fit_rows, with_lineage
from dkrr.fit.inputs import store_given_matrix
from dkrr.fit.plan import Ways, settings_of
from dkrr.fit.rates import Machine
from dkrr.jobs.leave_one_out import leave_out
from dkrr.jobs.loss_fit import FittedLoss, fit_loss, loss_of
from dkrr.jobs.planned import Plan
from dkrr.jobs.prepare import Prepared
from dkrr.jobs.spec import JobSpec
from dkrr.jobs.start import begin_from, remember
from dkrr.jobs.summary import FitSummary, summary_of
from dkrr.kernels import kernel_from_dict
from dkrr.linalg.nystrom.solver import fit_nystrom
from dkrr.linalg.primal.solver import fit_primal
from dkrr.linalg.settings import NystromSettings
from dkrr.linalg.solution import Solution
from dkrr.linalg.workspace import Workspace
from dkrr.models.model import Model, load_model
from dkrr.models.prediction import LOWER_IS_BETTER, score_dataset
from dkrr.models.tiled import nystrom_parts, primal_details, primal_parts, solver_details, uncertainty_parts
from dkrr.models.uncertainty import recorded_factors
from dkrr.models.validation import check_target_sizes
from dkrr.store.files import delete_key, list_entries, place, remove_array

__all__ = ["solve_and_save"]


def solve_and_save(job: JobSpec, prepared: Prepared, plan: Plan, workspace: Workspace, directory: str) -> FitSummary:
    """Solve as ``plan`` says and save ``model.zarr`` in the run's ``directory``; seconds and score are still missing.

    Raises
    ------
    NumericalError, DataError, StoreError, LockedError
        See :func:`dkrr.fit.fitting.fit_rows`.
    """
    if job.model.loss != "square":
        fits, checkpoint = fit_loss(job, prepared, plan, workspace, directory)
        models = [_loss_model(prepared, fit, plan, workspace) for fit in fits]
        path = _score_path(job, models, prepared.test, workspace, directory) if len(fits) > 1 else []
        best = next((number for number, point in enumerate(path) if point["chosen"]), 0)
        fitted, model = fits[best], models[best]
        _save(model, directory)
        checkpoint.remove()
        location, alpha = place(directory, "model.zarr"), model.provenance["alpha"]
        remember(workspace.store, prepared.train, model.kernel, alpha, location, loss_of(plan))
        summary = summary_of(plan, workspace, directory, location, model.solution, model.intercept)
        summary.num_support, summary.history, summary.path = model.num_rows, fitted.history, path
        summary.target_names, summary.loss = model.target_names, {**(plan.loss or {}), "C": fitted.details["C"]}
        return summary
    train, given, digest = prepared.train, None, ""
    check_target_sizes(train)
    kernel = None if plan.kernel == {"kernel": "precomputed"} else kernel_from_dict(plan.kernel)
    if kernel is None:
        assert train.y is not None  # noqa: S101  (narrows the type)
        targets = train.y.read(0, train.num_rows)
        weight = None if train.weight is None else train.weight.read(0, train.num_rows)[:, 0]
        rows = _LazyMatrix(train)
        train, given, digest = store_given_matrix(rows, targets, weight, workspace.store, plan.tile_size)
    choice = SolverChoice.from_dict(plan.choice)
    problem = Problem(
        num_rows=plan.num_rows,
        num_features=plan.num_features,
        num_targets=plan.num_targets,
        kernel=kernel,
        alpha=tuple(plan.alpha),
        fit_intercept=job.model.fit_intercept,
    )
    chosen = Candidate(
        solver=plan.solver,
        precision=plan.precision,
        gram=plan.gram,
        tile_size=plan.tile_size,
        rank=plan.rank,
        iterations=None if plan.iterations is None else Iterations(*plan.iterations),
        seconds=plan.estimated_seconds,
    )
    settings = replace(settings_of(chosen, problem, choice), drift_limit=prepared.center_drift_limit)
    iterative = settings.iterative
    model_path = place(directory, "model.zarr")
    details = solver_details(settings, plan.nystrom)
    if plan.nystrom is not None:
        found = fit_nystrom(
            train,
            kernel,
            settings.alpha,
            NystromSettings(**plan.nystrom),
            iterative,
            workspace,
            precision=settings.precision,
            fit_intercept=settings.fit_intercept,
        )
        _save(_model(prepared, found.solution, nystrom_parts(found, kernel), plan, details), directory)
        left_out = leave_out(job, train, settings, workspace, model_path, directory)
        summary = summary_of(plan, workspace, directory, model_path, found.solution, found.intercept)
        summary.leave_one_out = left_out
        return summary
    if plan.solver == "primal":
        primal = fit_primal(train, kernel, settings.alpha, workspace, fit_intercept=settings.fit_intercept)
        details = primal_details(primal)
        _save(_model(prepared, primal.solution, primal_parts(primal), plan, details), directory)
        left_out = leave_out(job, train, settings, workspace, model_path, directory)
        summary = summary_of(plan, workspace, directory, model_path, primal.solution, primal.intercept)
        summary.leave_one_out = left_out
        return summary
    settings = with_lineage(settings, train, workspace.store, workspace.reused)
    start = None if given is not None else begin_from(train, settings, workspace)
    try:
        ways = None if given is not None else _other_ways(job, plan, problem, choice)
        fit = fit_rows(train, settings, workspace, given=given, source_digest=digest, start=start, ways=ways)
        with fit as result:
            settings = result.settings
            center = result.operator.rows.center if result.operator.rows is not None else None
            parts = {
                "kernel": result.operator.kernel,
                "x_fit": None if result.operator.kernel is None else train.X,
                "dual_coef": result.dual_coef,
                "center": None if center is None else np.asarray(center),
                "intercept": result.intercept,
                **uncertainty_parts(
                    train,
                    result.dual_coef,
                    intercept=settings.fit_intercept,
                    converged=result.solution.converged,
                ),
            }
            details = solver_details(settings) | {"weight_digest": train.digest_weight}
            if job.output.keep != "model":
                details |= recorded_factors(workspace.store, result.factors)
            details |= {name: getattr(settings, name) for name in ("tile_size", "precision", "gram")}
            _save(_model(prepared, result.solution, parts, plan, details), directory)
            left_out = leave_out(
                job, train, settings, workspace, model_path, directory, given=given, source_digest=digest
            )
    finally:
        if given is not None:  # a copy of what the job's data holds
            remove_array(given.location)
            remove_array(train.path)
    if given is None:
        remember(workspace.store, train, settings.kernel, settings.alpha, model_path)
    summary = summary_of(plan, workspace, directory, model_path, result.solution, result.intercept)
    summary.leave_one_out = left_out
    summary.tiles_total = result.operator.grid.num_lower * len(result.factors)
    summary.kept = _clean(job, workspace, result)
    return summary


def _other_ways(job: JobSpec, plan: Plan, problem: Problem, choice: SolverChoice) -> Ways:
    """What may be done where the way of the plan leads to no answer, by the prices of the plan."""
    limit, free = plan.memory_limit_bytes, plan.disk_free_bytes
    limits = Limits(
        threads=plan.workers * plan.threads_per_worker,
        memory_bytes=None if limit is None else limit // plan.threads_per_worker,
        disk_bytes=None if free is None else free + plan.disk_present_bytes,
    )
    return Ways(
        problem=problem,
        choice=choice,
        limits=limits,
        tile_size=None if job.solver.tile_size == "auto" else int(job.solver.tile_size),
        machine=lambda: Machine(**plan.calibration),  # type: ignore[arg-type]
        candidates=tuple(Candidate.from_dict(item) for item in plan.candidates),
    )


@dataclass(frozen=True)
class _LazyMatrix:
    """A precomputed matrix that was ingested as rows: sliced like an array, read a block of rows at a time."""

    dataset: Dataset

    @property
    def shape(self) -> tuple[int, int]:
        return self.dataset.num_rows, self.dataset.num_features

    def __getitem__(self, key: tuple[slice, slice]) -> Any:
        rows, columns = key
        return self.dataset.X.read(rows.start, rows.stop)[:, columns]


def _model(prepared: Prepared, solution: Solution, parts: dict[str, Any], plan: Plan, details: dict[str, Any]) -> Model:
    columns = {
        "scaling": prepared.scaling,
        "y_is_1d": prepared.train.y_is_1d,
        "target_names": list(prepared.train.target_names or []),
    }
    return Model(
        **(columns | parts),
        solution=solution,
        feature_names=list(prepared.train.feature_names or []),
        made_up=prepared.train.made_up,
        classes=None if prepared.train.classes is None else list(prepared.train.classes),
        provenance={
            "dkrr": __version__,
            "rows_digest": prepared.train.digest,
            "targets_digest": prepared.train.digest_y,
            "alpha": plan.alpha,
            **({} if plan.loss else {"tile_size": plan.tile_size, "gram": plan.gram}),
            "precision": plan.precision,
            **details,
        },
    )


def _loss_model(prepared: Prepared, fitted: FittedLoss, plan: Plan, workspace: Workspace) -> Model:
    parts = dict(fitted.parts)
    solution = replace(parts.pop("solution"), reused=dict(workspace.reused))
    return _model(prepared, solution, parts | fitted.columns, plan, fitted.details)


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
        score, run = score_dataset(load_model(location), test, workspace.executor, workspace.progress)
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


def _save(model: Model, directory: str) -> None:
    """Write the model of a run. The figures of the one whose place it takes go first: they are not its own."""
    delete_key(directory, "result.json")
    model.write(place(directory, "model.zarr"), overwrite=True)


def _clean(job: JobSpec, workspace: Workspace, result: FitResult) -> dict[str, int]:
    """Remove what ``keep`` does not name and this run has made for itself alone; sizes of what stays."""
    keep = job.output.keep
    if keep != "all" and result.gram is not None:
        workspace.discard(result.gram)
    if keep == "model":
        for location in result.factors:
            workspace.discard(location)
    kept = {}
    for location in [*result.factors, *([result.gram] if result.gram else [])]:
        num_bytes = sum(entry.num_bytes for entry in list_entries(location))
        if num_bytes:
            kept[location] = num_bytes
    return kept
