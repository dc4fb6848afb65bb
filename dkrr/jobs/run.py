"""Run a job from its file to a model and its score: prepare, plan, gram, factorise, solve, save, evaluate.

A run is a directory. Everything in it and in the store is written so that the same command continues after any
interruption.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dkrr.engine.memory import peak_rss_bytes
from dkrr.engine.session import blas_of, connect_executor, memory_limit_of, start_local
from dkrr.engine.tasks import Executor, Progress
from dkrr.errors import ClusterError
from dkrr.jobs.claim import check_claim, resolve_once
from dkrr.jobs.plan import Plan, make_plan, run_id
from dkrr.jobs.prepare import prepare
from dkrr.jobs.solve import solve_and_save
from dkrr.jobs.spec import JobSpec
from dkrr.jobs.summary import FitSummary, peaks, plain
from dkrr.linalg.workspace import Workspace
from dkrr.model import load_model
from dkrr.prediction import score_dataset
from dkrr.resources import nothing_new
from dkrr.stores import local_root, read_json, write_json

__all__ = ["FitSummary", "fit_job", "job_executor"]


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
    document = check_claim(job, directory)
    with nothing_new(store):
        prepared = prepare(job, store)
    plan = make_plan(job, prepared, store, read_json(directory, "plan.json"))
    plan.check()
    # only now: a job whose data or size is refused must not hold the directory for itself
    write_json(directory, "job.json", document)
    root = local_root(directory)
    if root is not None:
        (root / "job.toml").write_text(job.to_toml())
    resolve_once(plan, directory)
    seconds = {"prepare": time.perf_counter() - started}
    begin = time.perf_counter()
    with job_executor(job) as executor:
        seconds["start"] = time.perf_counter() - begin
        _check_limit(executor, plan)
        workspace = Workspace(store=store, executor=executor, progress=progress, blas=blas_of(executor), durable=True)
        summary = solve_and_save(job, prepared, plan, workspace, directory)
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
    summary.peak_rss_bytes = peaks(workspace)
    summary.client_peak_rss_bytes = peak_rss_bytes()
    if summary.score is not None:
        asked = job.evaluate.metric if job.evaluate is not None else None
        summary.metric = asked or ("rmse" if summary.score.accuracy is None else "accuracy")
    write_json(directory, "result.json", plain(summary.to_dict()))
    return summary


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
