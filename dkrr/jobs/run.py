"""Run a job from its file to a model and its score: prepare, plan, gram, factorise, solve, save, evaluate.

A run is a directory (:mod:`dkrr.jobs.runs`). Everything in it and in the store is written so that the same command
continues after any interruption.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dkrr.engine.cluster import blas_of, connect_executor, executor_facts, require_memory, start_local
from dkrr.engine.machine import peak_rss_bytes
from dkrr.engine.tasks import Executor, Progress
from dkrr.engine.workers import WorkerMemory, describe_executor
from dkrr.fit.inputs import nothing_new
from dkrr.jobs.claim import check_claim, resolve_once, run_id
from dkrr.jobs.documents import plain
from dkrr.jobs.figures import SAMPLE_ROWS, Figures, data_facts, held_out_facts
from dkrr.jobs.leave_one_out import wants_leave_one_out
from dkrr.jobs.plan import make_plan
from dkrr.jobs.prepare import prepare
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.monitor import Monitor, driving
from dkrr.jobs.solve import solve_and_save
from dkrr.jobs.spec import JobSpec
from dkrr.jobs.summary import FitSummary, peaks
from dkrr.linalg.factor.schedule import Split
from dkrr.linalg.workspace import Workspace
from dkrr.models.model import load_model
from dkrr.models.prediction import score_dataset
from dkrr.store.files import note_user

__all__ = ["FitSummary", "drive_job", "fit_job", "job_executor"]


@contextmanager
def job_executor(job: JobSpec, store: str | None = None) -> Iterator[Executor]:
    """Who runs the tasks of a job, as ``[cluster]`` says; every worker must be able to use ``store``."""
    cluster = job.cluster
    if cluster.scheduler != "local":
        with connect_executor(
            cluster.scheduler, workers=cluster.workers, insecure=cluster.insecure, store=store
        ) as executor:
            yield executor
        return
    limit = cluster.memory_limit
    with start_local(cluster.workers, cluster.threads_per_worker, limit, store=store) as executor:
        yield executor


def fit_job(job: JobSpec | str | Path, *, progress: Progress | None = None, source: bytes | None = None) -> FitSummary:
    """Fit a job; continues what an interrupted run of the same job left.

    Parameters
    ----------
    job
        A job, or the path of its file.
    progress
        Called for every finished task.
    source
        The file of ``job`` byte for byte, for the run's directory; by default that of the path.

    Raises
    ------
    PlanRefusedError
        It cannot fit; nothing was started.
    StoreMismatchError
        The run's directory holds another job; the differing keys are listed.
    LockedError
        Somebody else drives the run, or has taken it over since.
    CancelledError
        Somebody asked for it (`dkrr cancel`).
    """
    if not isinstance(job, JobSpec):
        path = Path(job)
        job = JobSpec.load(path)
        source = path.read_bytes() if source is None else source
    directory = RunDirectory(job.output.run_directory(run_id(job)))
    return drive_job(job, directory, source=job.to_toml().encode() if source is None else source, progress=progress)


def drive_job(
    job: JobSpec,
    directory: RunDirectory,
    *,
    kind: str = "fit",
    progress: Progress | None = None,
    source: bytes | None = None,
) -> FitSummary:
    """Be the driver of the run in ``directory`` until it ends; see :func:`fit_job`.

    ``kind`` is "fit", or "here" for the detached driver of a submitted run, whose job file is there already.
    """
    check_claim(job, directory.location)  # before anything is written there
    with driving(directory, kind=kind, progress=progress, detached=kind != "fit") as monitor:
        summary = _run(job, directory, monitor, source)
        monitor.note(model=summary.model_path, reused=plain(summary.reused))
        return summary


def _run(job: JobSpec, directory: RunDirectory, monitor: Monitor, source: bytes | None) -> FitSummary:
    started = time.perf_counter()
    store = job.output.store_directory(run_id(job))
    monitor.note(insecure=job.cluster.insecure)
    monitor.phase("prepare")
    document = check_claim(job, directory.location)
    with nothing_new(store):
        prepared = prepare(job, store)
    monitor.phase("plan")
    plan = make_plan(job, prepared, store, directory.read("plan.json"))
    plan.check()
    # only now: a job whose data or size is refused must not hold the directory for itself
    note_user(store, directory.location)
    directory.write("job.json", document)
    if source is not None:
        directory.write_bytes("job.toml", source)
    resolve_once(plan, directory.location)
    monitor.note(reused=plain(plan.reused))
    figures = Figures(directory)
    figures.note(lambda: {"data": data_facts(prepared), "present_bytes": plan.disk_present_bytes})
    seconds = {"prepare": time.perf_counter() - started}
    monitor.phase("start")
    begin = time.perf_counter()
    with job_executor(job, store) as executor:
        seconds["start"] = time.perf_counter() - begin
        executor.cancelled = monitor.is_cancelled
        monitor.working(lambda: executor_facts(executor), WorkerMemory(executor).poll)
        figures.note(lambda: {"environment": describe_executor(executor)})
        # workers that could not hold a task would be killed again and again
        require_memory(executor, plan.task_bytes // max(1, plan.threads_per_worker))
        split = None if plan.split is None else Split(**plan.split)
        workspace = Workspace(
            store, executor, monitor, blas=blas_of(executor), durable=True, split=split, maker=directory.location
        )
        monitor.note(given_up=workspace.given_up)  # filled while the run goes on
        try:
            summary = solve_and_save(job, prepared, plan, workspace, directory.location)
        finally:
            figures.work(workspace)
        seconds |= {phase: run.seconds for phase, run in workspace.phases.items()}
        begin = time.perf_counter()
        has_left_out = summary.leave_one_out is not None
        if not has_left_out and wants_leave_one_out(job):
            summary.message += "; no leave-one-out, and no intervals that rest on it"
        if prepared.test is not None:
            monitor.phase("evaluate")
            intervals = None if job.evaluate is None or not has_left_out else job.evaluate.intervals
            model = load_model(summary.model_path)
            summary.score, run = score_dataset(
                model, prepared.test, executor, monitor, intervals=intervals, sample_rows=SAMPLE_ROWS
            )
            workspace.record("evaluate", run)
            figures.note(lambda: {"held_out": held_out_facts(prepared.train, run)})
            seconds["evaluate"] = time.perf_counter() - begin
    summary.seconds = seconds | {"total": time.perf_counter() - started}
    summary.estimated_seconds = plan.estimated_seconds | {"total": plan.total_seconds}
    summary.data, summary.training_rows = prepared.data, str(prepared.train.path)
    summary.peak_rss_bytes = peaks(workspace)
    summary.client_peak_rss_bytes = peak_rss_bytes()
    if summary.score is not None:
        asked = job.evaluate.metric if job.evaluate is not None else None
        summary.metric = asked or summary.score.metric
    directory.write("result.json", plain(summary.to_dict()))
    return summary
