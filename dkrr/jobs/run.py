"""Run a job from its file to a model and its score: prepare, plan, gram, factorise, solve, save, evaluate.

A run is a directory (:mod:`dkrr.jobs.runs`). Everything in it and in the store is written so that the same command
continues after any interruption.

``figures.json`` has figures that only the report needs: data, machine, work, iterations, held-out rows. They are
written while the run goes on, so that a run that fails has those it came to. All of them are bounded, whatever the
number of rows, targets, workers and iterations; 150 kB at most. Nothing that runs depends on them: where they cannot be
written, the log says so and the run goes on. Cost: the targets are read twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dkrr.dataset import Dataset, Scaling
from dkrr.engine.cluster import blas_of, connect_executor, executor_facts, require_memory, start_local
from dkrr.engine.machine import peak_rss_bytes
from dkrr.engine.tasks import Executor, Progress, RunSummary
from dkrr.engine.workers import WorkerMemory, describe_executor
from dkrr.errors import LockedError
from dkrr.fit.inputs import nothing_new
from dkrr.jobs.monitor import Monitor, driving
from dkrr.jobs.plan import make_plan
from dkrr.jobs.prepare import Prepared, prepare
from dkrr.jobs.run_directory import RunDirectory
from dkrr.jobs.solve import FitSummary, solve_and_save
from dkrr.jobs.spec import JobSpec
from dkrr.linalg.cholesky import Split
from dkrr.linalg.workspace import Workspace
from dkrr.models.model import load_model
from dkrr.models.prediction import score_dataset
from dkrr.store.documents import plain
from dkrr.store.files import note_user

__all__ = ["FitSummary", "drive_job", "fit_job", "job_executor"]

FIGURES = "figures.json"
SAMPLE_ROWS = 2000
MOST_NAMES = 60
MOST_HISTOGRAMS = 4
MOST_GENERATIONS = 8
NUM_BINS = 30
logger = logging.getLogger("dkrr.jobs.run")


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
    directory = RunDirectory(job.directory)
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
    job.check_claim(directory.location)  # before anything is written there
    with driving(directory, kind=kind, progress=progress, detached=kind != "fit") as monitor:
        summary = _run(job, directory, monitor, source)
        monitor.note(model=summary.model_path, reused=plain(summary.reused))
        return summary


def _run(job: JobSpec, directory: RunDirectory, monitor: Monitor, source: bytes | None) -> FitSummary:
    started, store, evaluate = time.perf_counter(), job.store, job.evaluate
    monitor.note(insecure=job.cluster.insecure)
    monitor.phase("prepare")
    job.check_claim(directory.location)
    with nothing_new(store):
        prepared = prepare(job, store)
    monitor.phase("plan")
    recorded = directory.read("plan.json")
    plan = make_plan(job, prepared, store, recorded)
    plan.check()
    # only now: a job whose data or size is refused must not hold the directory for itself
    note_user(store, directory.location)
    directory.write("job.json", job.to_dict())
    if source is not None:
        directory.write_bytes("job.toml", source)
    planned = plain(plan.to_dict())
    # what "auto" became is fixed by the first attempt, unless rows came or went since
    if recorded is None or recorded["digests"] != planned["digests"]:
        directory.write("plan.json", planned)
    monitor.note(reused=plain(plan.reused))
    figures: dict[str, Any] = {}
    note = partial(_note, directory, figures)
    note(lambda: {"data": _data_facts(prepared), "present_bytes": plan.disk_present_bytes})
    seconds = {"prepare": time.perf_counter() - started}
    monitor.phase("start")
    begin, score, said = time.perf_counter(), None, ""
    with job_executor(job, store) as executor:
        seconds["start"] = time.perf_counter() - begin
        executor.cancelled = monitor.is_cancelled
        monitor.working(lambda: executor_facts(executor), WorkerMemory(executor).poll)
        note(lambda: {"environment": describe_executor(executor)})
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
            note(lambda: _work_facts(workspace))
        seconds |= {phase: run.seconds for phase, run in workspace.phases.items()}
        begin = time.perf_counter()
        if job.leaves_out and summary.leave_one_out is None:
            said = "; no leave-one-out, and no intervals that rest on it"
        if prepared.test is not None:
            monitor.phase("evaluate")
            intervals = None if evaluate is None or summary.leave_one_out is None else evaluate.intervals
            model = load_model(summary.model_path)
            score, run = score_dataset(
                model, prepared.test, executor, monitor, store=store, intervals=intervals, sample_rows=SAMPLE_ROWS
            )
            workspace.record("evaluate", run)
            note(lambda: {"held_out": _held_out_facts(prepared.train, run)})
            seconds["evaluate"] = time.perf_counter() - begin
    peaks: dict[str, int] = {}
    for phase in workspace.phases.values():
        peaks |= {worker: max(peak, peaks.get(worker, 0)) for worker, peak in phase.peak_rss_bytes.items()}
    summary = replace(
        summary,
        message=summary.message + said,
        seconds=seconds | {"total": time.perf_counter() - started},
        estimated_seconds=plan.estimated_seconds | {"total": plan.total_seconds},
        data=prepared.data,
        training_rows=str(prepared.train.path),
        peak_rss_bytes=peaks,
        client_peak_rss_bytes=peak_rss_bytes(),
        score=score,
        metric="" if score is None else (evaluate and evaluate.metric) or score.metric,
    )
    directory.write("result.json", plain(summary.to_dict()))
    return summary


def _note(directory: RunDirectory, figures: dict[str, Any], make: Callable[[], dict[str, Any]]) -> None:
    """Add the parts that ``make()`` returns to the figures, and write them; only a lost lease ends the run here."""
    try:
        figures |= plain(make())
        directory.write(FIGURES, figures)
    except LockedError:
        raise
    except Exception as exc:
        logger.warning("figures for the report of %s are missing (%s)", directory.name, exc)


def _work_facts(workspace: Workspace) -> dict[str, Any]:
    """What every phase did, and how the residuals fell."""
    phases = {
        name: {
            "seconds": run.seconds,
            "num_tasks": run.num_tasks,
            "num_computed": run.num_computed,
            "flops": run.flops_computed,
            "busy_seconds": run.busy_seconds,
            "peak_rss_bytes": max(run.peak_rss_bytes.values(), default=0),
        }
        for name, run in workspace.phases.items()
    }
    return {"phases": phases, "convergence": [trace.to_dict() for trace in workspace.traces if trace.iterations]}


def _data_facts(prepared: Prepared) -> dict[str, Any]:
    """Rows, names, statistics, and a histogram of the first four targets, all in the units of the data."""
    train, test, scaling = prepared.train, prepared.test, prepared.scaling
    mean = train.x_mean if scaling is None else scaling.x_mean
    std = train.x_std if scaling is None else scaling.x_std
    names = [str(name) for name in train.feature_names[:MOST_NAMES]]
    return {
        "num_rows": train.num_rows,
        "num_test_rows": 0 if test is None else test.num_rows,
        "num_features": train.num_features,
        "num_targets": train.num_targets,
        "standardized": scaling is not None,
        "weight": train.weight_name,
        "generations": [
            f"{item.n:,}" + (f" ({str(item.label)[:40]})" if item.label else "")
            for item in train.generations[-MOST_GENERATIONS:]
        ],
        "digest": train.digest,
        "features": [{"name": name, "mean": mean[k], "std": std[k]} for k, name in enumerate(names) if k < len(mean)],
        "target_names": [str(name) for name in train.target_names[:MOST_NAMES]],
        "classes": None if train.classes is None else [str(label) for label in train.classes[:MOST_NAMES]],
        **_target_facts(train, scaling),
    }


def _target_facts(train: Dataset, scaling: Scaling | None) -> dict[str, Any]:
    """Counts of classes, or histograms with 30 equal bins between the smallest and the largest target."""
    assert train.y is not None  # noqa: S101  (narrows the type)
    read = train.y.read if scaling is None else lambda *span: scaling.invert_y(train.y.read(*span))
    blocks = (read(start, stop) for start, stop in train.y.blocks())
    if train.classes is not None:
        counts = sum(np.bincount(np.argmax(block, axis=1), minlength=train.num_targets) for block in blocks)
        return {"targets": [], "class_counts": np.asarray(counts)[:MOST_NAMES].tolist()}
    targets = []
    columns = np.concatenate([block[:, :MOST_HISTOGRAMS] for block in blocks]).T
    for name, column in zip(train.target_names, columns, strict=False):
        heights, edges = np.histogram(column, NUM_BINS)
        bounds = {"min": column.min(), "max": column.max(), "mean": column.mean(), "std": column.std()}
        targets.append({"name": str(name), **bounds, "edges": edges.tolist(), "counts": heights.tolist()})
    return {"targets": targets, "class_counts": None}


def _held_out_facts(train: Dataset, run: RunSummary) -> dict[str, Any]:
    """Truth and prediction of evenly spaced held-out rows, and counts of classes taken for others."""
    parts = [values for _, values in sorted(run.values.items()) if "sample" in values]
    if not parts:
        return {}
    pairs = np.concatenate([part["sample"] for part in parts])
    confusion = None
    if train.classes is not None and all("confusion" in part for part in parts):
        confusion = np.sum([part["confusion"] for part in parts], axis=0).tolist()
    # six digits: what a page can show
    rounded = [[[float(f"{value:.6g}") for value in pair] for pair in pairs[:, k]] for k in range(pairs.shape[1])]
    return {"pairs": rounded, "confusion": confusion}
