"""Run a job from its file to a model and its score: prepare, plan, gram, factorise, solve, save, evaluate.

A run is a directory. Everything in it and in the store is written so that the same command continues after any
interruption.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dkrr._version import __version__
from dkrr.dataset import Dataset
from dkrr.engine.memory import peak_rss_bytes
from dkrr.engine.session import blas_of, connect_executor, memory_limit_of, start_local
from dkrr.engine.tasks import Executor, Progress, RunSummary
from dkrr.errors import ClusterError, StoreError, StoreMismatchError
from dkrr.fitting import FitResult, FitSettings, fit_rows
from dkrr.given import store_given_matrix
from dkrr.jobs.leave_one_out import leave_out
from dkrr.jobs.plan import Plan, make_plan, run_id
from dkrr.jobs.prepare import Prepared, prepare
from dkrr.jobs.spec import JobSpec
from dkrr.kernels import kernel_from_dict
from dkrr.linalg.factor.schedule import Split
from dkrr.linalg.nystrom.solver import fit_nystrom
from dkrr.linalg.primal.solver import fit_primal
from dkrr.linalg.settings import NystromSettings
from dkrr.linalg.solution import Solution
from dkrr.linalg.workspace import Workspace
from dkrr.model import Model, load_model
from dkrr.planning.choices import SolverChoice
from dkrr.prediction import Score, score_dataset
from dkrr.records import nystrom_parts, primal_details, primal_parts, solver_details, uncertainty_parts
from dkrr.resources import nothing_new
from dkrr.spread import recorded_factors
from dkrr.stores import local_root, place, read_json, remove_array, write_json

__all__ = ["FitSummary", "fit_job", "job_executor"]


@dataclass
class FitSummary:
    """What a fit did: sizes, seconds per phase, rates, memory, residual, score. Sizes in bytes, times in seconds."""

    run_directory: str
    model_path: str
    plan: Plan
    seconds: dict[str, float]
    tiles_computed: int
    tiles_total: int
    flops_per_second: float
    solver: str
    precision: str
    converged: bool
    num_iterations: int
    peak_rss_bytes: dict[str, int]
    client_peak_rss_bytes: int
    relative_residual: list[float]
    backward_error: list[float]
    message: str
    intercept: list[float] | None = None
    leave_one_out: dict[str, Any] | None = None
    score: Score | None = None
    metric: str = ""
    kept: dict[str, int] = field(default_factory=dict)
    estimated_seconds: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        from dataclasses import asdict

        return asdict(self) | {"plan": self.plan.to_dict()}

    def table(self) -> Any:
        """The summary as a rich table."""
        from dkrr.jobs.tables import fit_table

        return fit_table(self)


@contextmanager
def job_executor(job: JobSpec) -> Iterator[Executor]:
    """Who runs the tasks of a job, as ``[cluster]`` says."""
    cluster = job.cluster
    if cluster.scheduler != "local":
        with connect_executor(cluster.scheduler, workers=cluster.workers, insecure=cluster.insecure) as executor:
            yield executor
        return
    limit = cluster.memory_limit
    with start_local(cluster.workers, cluster.threads_per_worker, limit) as executor:
        yield executor


def fit_job(job: JobSpec | str | Path, *, progress: Progress | None = None) -> FitSummary:
    """Fit a job; continues what an interrupted run of the same job left.

    Raises
    ------
    PlanRefusedError
        It cannot fit; nothing was started.
    StoreMismatchError
        The run's directory holds another job; the differing keys are listed.
    """
    if not isinstance(job, JobSpec):
        job = JobSpec.load(job)
    started = time.perf_counter()
    name = run_id(job)
    directory, store = job.output.run_directory(name), job.output.store_directory(name)
    document = _check_claim(job, directory)
    with nothing_new(store):
        prepared = prepare(job, store)
    plan = make_plan(job, prepared, store, read_json(directory, "plan.json"))
    plan.check()
    # only now: a job whose data or size is refused must not hold the directory for itself
    write_json(directory, "job.json", document)
    root = local_root(directory)
    if root is not None:
        (root / "job.toml").write_text(job.to_toml())
    _resolve_once(plan, directory)
    seconds = {"prepare": time.perf_counter() - started}
    begin = time.perf_counter()
    with job_executor(job) as executor:
        seconds["start"] = time.perf_counter() - begin
        _check_limit(executor, plan)
        split = None if plan.split is None else Split(**plan.split)
        workspace = Workspace(store, executor, progress, blas=blas_of(executor), durable=True, split=split)
        summary = _fit(job, prepared, plan, workspace, directory)
        seconds |= {phase: run.seconds for phase, run in workspace.phases.items()}
        begin = time.perf_counter()
        if prepared.test is not None:
            intervals = None if job.evaluate is None else job.evaluate.intervals
            model = load_model(summary.model_path)
            summary.score, run = score_dataset(model, prepared.test, executor, progress, intervals=intervals)
            workspace.record("evaluate", run)
            seconds["evaluate"] = time.perf_counter() - begin
    summary.seconds = seconds | {"total": time.perf_counter() - started}
    summary.estimated_seconds = plan.estimated_seconds | {"total": plan.total_seconds}
    summary.peak_rss_bytes = _peaks(workspace)
    summary.client_peak_rss_bytes = peak_rss_bytes()
    if summary.score is not None:
        asked = job.evaluate.metric if job.evaluate is not None else None
        summary.metric = asked or ("rmse" if summary.score.accuracy is None else "accuracy")
    write_json(directory, "result.json", _plain(summary.to_dict()))
    return summary


def _fit(job: JobSpec, prepared: Prepared, plan: Plan, workspace: Workspace, directory: str) -> FitSummary:
    train, given, digest = prepared.train, None, ""
    kernel = None if plan.kernel == {"kernel": "precomputed"} else kernel_from_dict(plan.kernel)
    if kernel is None:
        assert train.y is not None  # noqa: S101  (narrows the type)
        targets = train.y.read(0, train.num_rows)
        weight = None if train.weight is None else train.weight.read(0, train.num_rows)[:, 0]
        rows = _LazyMatrix(train)
        train, given, digest = store_given_matrix(rows, targets, weight, workspace.store, plan.tile_size)
    choice = SolverChoice.from_dict(plan.choice)
    iterative = choice.iterative(rank=plan.rank or None)
    if plan.solver == "cg" and not plan.rank:
        iterative = replace(iterative, preconditioner="none")
    settings = FitSettings(
        kernel=kernel,
        alpha=tuple(plan.alpha),
        tile_size=plan.tile_size,
        precision=plan.precision,  # type: ignore[arg-type]
        gram=plan.gram,  # type: ignore[arg-type]
        solver="cg" if plan.solver in ("nystrom", "primal") else plan.solver,  # type: ignore[arg-type]
        iterative=iterative,
        fit_intercept=job.model.fit_intercept,
    )
    model_path = place(directory, "model.zarr")
    details = solver_details(settings, plan.nystrom)
    if plan.nystrom is not None:
        found = fit_nystrom(train, settings, NystromSettings(**plan.nystrom), iterative, workspace)
        _model(prepared, found.solution, nystrom_parts(found, kernel), plan, details).save(model_path, overwrite=True)
        left_out = leave_out(job, train, settings, workspace, model_path, directory)
        summary = _summary(plan, workspace, directory, model_path, found.solution, found.intercept)
        summary.leave_one_out = left_out
        return summary
    if plan.solver == "primal":
        primal = fit_primal(train, kernel, settings.alpha, workspace, fit_intercept=settings.fit_intercept)
        details = primal_details(primal)
        _model(prepared, primal.solution, primal_parts(primal), plan, details).save(model_path, overwrite=True)
        left_out = leave_out(job, train, settings, workspace, model_path, directory)
        summary = _summary(plan, workspace, directory, model_path, primal.solution, primal.intercept)
        summary.leave_one_out = left_out
        return summary
    try:
        with fit_rows(train, settings, workspace, given=given, source_digest=digest) as result:
            center = result.operator.rows.center if result.operator.rows is not None else None
            parts = {
                "kernel": result.operator.kernel,
                "x_fit": None if result.operator.kernel is None else train.X,
                "dual_coef": result.dual_coef,
                "center": None if center is None else np.asarray(center),
                "intercept": result.intercept,
                **uncertainty_parts(train, result.dual_coef, intercept=settings.fit_intercept),
            }
            details["weight_digest"] = train.digest_weight
            if job.output.keep != "model":
                details |= recorded_factors(workspace.store, result.factors)
            _model(prepared, result.solution, parts, plan, details).save(model_path, overwrite=True)
            left_out = leave_out(
                job, train, settings, workspace, model_path, directory, given=given, source_digest=digest
            )
    finally:
        if given is not None:  # a copy of what the job's data holds
            remove_array(given.location)
            remove_array(train.path)
    summary = _summary(plan, workspace, directory, model_path, result.solution, result.intercept)
    summary.leave_one_out = left_out
    summary.tiles_total = result.operator.grid.num_lower * len(result.factors)
    summary.kept = _clean(job, workspace.store, result, prepared)
    return summary


def _summary(
    plan: Plan, workspace: Workspace, directory: str, model_path: str, solution: Solution, intercept: Any
) -> FitSummary:
    factor = workspace.phases.get("factorise", RunSummary())
    return FitSummary(
        run_directory=directory,
        model_path=model_path,
        plan=plan,
        seconds={},
        tiles_computed=factor.num_computed,
        tiles_total=0,
        flops_per_second=factor.flops_computed / factor.seconds if factor.num_computed else 0.0,
        solver=solution.solver,
        precision=solution.precision,
        converged=solution.converged,
        num_iterations=solution.num_iterations,
        peak_rss_bytes={},
        client_peak_rss_bytes=0,
        relative_residual=solution.relative_residual,
        backward_error=solution.backward_error,
        message=solution.message,
        intercept=None if intercept is None else intercept.tolist(),
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
    return Model(
        **parts,
        solution=solution,
        scaling=prepared.scaling,
        y_is_1d=prepared.train.y_is_1d,
        feature_names=list(prepared.train.feature_names or []),
        target_names=list(prepared.train.target_names or []),
        classes=None if prepared.train.classes is None else list(prepared.train.classes),
        provenance={
            "dkrr": __version__,
            "rows_digest": prepared.train.digest,
            "targets_digest": prepared.train.digest_y,
            "alpha": plan.alpha,
            "tile_size": plan.tile_size,
            "precision": plan.precision,
            "gram": plan.gram,
            **details,
        },
    )


def _check_limit(executor: Executor, plan: Plan) -> None:
    """Refuse workers that could not hold a task: they would be killed again and again."""
    limit = memory_limit_of(executor)
    threads = max(1, plan.threads_per_worker)
    needed = plan.task_bytes // threads
    if limit is not None and limit < needed:
        raise ClusterError(
            f"a worker may use {limit:,} bytes a thread, a task needs {needed:,} (tiles of {plan.tile_size})",
            hint="start workers with more memory, or set [cluster] memory_limit or [solver] tile_size",
        )


def _check_claim(job: JobSpec, directory: str) -> dict[str, Any]:
    """What job.json shall hold; a directory that belongs to another job is refused."""
    wanted = {key: value for key, value in job.to_dict().items() if key not in ("cluster", "storage", "tune")}
    found = read_json(directory, "job.json")
    if found is not None and found != wanted:
        differing = sorted(
            f"[{table}] {key}: {found.get(table, {}).get(key)!r} there, {wanted.get(table, {}).get(key)!r} wanted"
            for table in found.keys() | wanted.keys()
            for key in found.get(table, {}).keys() | wanted.get(table, {}).keys()
            if found.get(table, {}).get(key) != wanted.get(table, {}).get(key)
        )
        raise StoreMismatchError(
            f"{directory} holds another job ({'; '.join(differing)})",
            hint="give another [output] directory, or remove it",
            fields=differing,
        )
    root = local_root(directory)
    if found is None and root is not None and root.exists() and any(root.iterdir()):
        raise StoreError(f"{directory} exists and is not a run of dkrr", hint="give another [output] directory")
    return wanted


def _resolve_once(plan: Plan, directory: str) -> None:
    """What "auto" became is fixed by the first attempt; a later one must use the same tiles and the same solver."""
    found = read_json(directory, "plan.json")
    if found is None:
        write_json(directory, "plan.json", _plain(plan.to_dict()))
        return
    for name in ("kernel", "alpha", "solver", "precision", "gram", "tile_size", "split", "rank", "nystrom"):
        if name in found and found[name] != getattr(plan, name):
            object.__setattr__(plan, name, found[name])


def _clean(job: JobSpec, store: Any, result: FitResult, prepared: Prepared) -> dict[str, int]:
    """Remove what ``keep`` does not name; sizes of what stays."""
    keep = job.output.keep
    if keep != "all" and result.gram is not None:
        remove_array(result.gram)
    if keep == "model":
        for location in result.factors:
            remove_array(location)
    kept = {}
    for location in [*result.factors, *([result.gram] if result.gram else [])]:
        root = local_root(location)
        if root is not None and root.exists():
            kept[location] = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    return kept


def _peaks(workspace: Workspace) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for summary in workspace.phases.values():
        for worker, peak in summary.peak_rss_bytes.items():
            peaks[worker] = max(peaks.get(worker, 0), peak)
    return peaks


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
