"""Run a job from its file to a model and its score: prepare, plan, gram, factorise, solve, save, evaluate.

A run is a directory (:mod:`dkrr.jobs.run_directory`). Everything in it and in the store is written so that the same
command continues after any interruption.

A run with ``[evaluate] leave_one_out`` gets ``leave_one_out.zarr`` beside its model: the error of every training row by
a fit that had not seen it, ``residuals`` (n, t) in the units of y and ``inverse_diagonal``, in the order of the
training rows, with the figures per target as attributes. With ``[evaluate] intervals`` the saved model gets the
quantiles that its prediction intervals rest on. Nothing is factorised that the fit factorised.

A model is remembered in the store by the rows and targets that it was fitted to, and found again by what they have in
common with others: there an iteration begins, with zeros for rows that came later. A direct solve has no use for it. A
model of another loss than the square has lost its rows with coefficients of 0; the others stand in it in the order of
the data set. Cost: one reading of the coefficients.

``figures.json`` has figures that only the report needs: data, machine, work, iterations, held-out rows. They are
written while the run goes on, so that a run that fails has those it came to. All of them are bounded, whatever the
number of rows, targets, workers and iterations; 150 kB at most. Nothing that runs depends on them: where they cannot be
written, the log says so and the run goes on. Cost: the targets are read twice.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from dkrr.dataset import Dataset, Floats, Scaling, write_rows
from dkrr.dataset.rows import decode_floats
from dkrr.engine.cluster import blas_of, connect_executor, executor_facts, require_memory, start_local
from dkrr.engine.machine import peak_rss_bytes
from dkrr.engine.tasks import Executor, Progress, RunSummary
from dkrr.engine.workers import describe_executor, worker_memory
from dkrr.errors import ConvergenceError, DamagedChunkError, DkrrError, LockedError, StoreError, told
from dkrr.fit.fitting import FitResult
from dkrr.fit.inputs import given_tiles, nothing_new, rows_on_disk
from dkrr.jobs.driver import Monitor, driving, job_of
from dkrr.jobs.facts import (
    Shown,
    exactness_facts,
    leave_one_out_facts,
    of_whitened,
    path_rows,
    reuse_facts,
    score_facts,
    size_rows,
    time_rows,
)
from dkrr.jobs.loss_fit import fit_loss
from dkrr.jobs.plan import Plan, decision_of, make_plan
from dkrr.jobs.prepare import Prepared, prepare, remove_damaged_copy
from dkrr.jobs.run_directory import LEFT_OUT, RunDirectory, utc_now
from dkrr.jobs.spec import JobSpec
from dkrr.kernels import Kernel
from dkrr.linalg.catalogue import Ancestor, ancestors, record_rows
from dkrr.linalg.loss import make_loss
from dkrr.linalg.products import ArrayRows
from dkrr.linalg.solution import Solution
from dkrr.linalg.workspace import Workspace
from dkrr.markup import DASH, Facts, known, listed
from dkrr.models.model import Model, check_replaceable, load_model
from dkrr.models.prediction import LOWER_IS_BETTER, Score, score_dataset
from dkrr.models.tiled import Solved, factor_settings, leave_one_out_rows, solve_rows
from dkrr.models.validation import check_target_sizes
from dkrr.store.documents import manifest_digest, plain
from dkrr.store.files import delete_key, join, list_entries, note_user, place, remove_parts, write_json
from dkrr.store.interruption import resumable

FIGURES = "figures.json"
SAMPLE_ROWS = 2000
MOST_NAMES = 60
MOST_HISTOGRAMS = 4
MOST_GENERATIONS = 8
NUM_BINS = 30
logger = logging.getLogger("dkrr.jobs")


@dataclass(frozen=True, kw_only=True, repr=False)
class FitSummary(Shown, Solution):
    """What a fit did: its solution, sizes, seconds per phase, rates, memory, score. Sizes in bytes, times in seconds.

    ``reused`` is what earlier fits saved (:class:`~dkrr.linalg.solution.Solution`, and "scaling"), ``data`` names the
    rows of the job's data set, ``model_digest`` is the SHA-256 of the manifest of its model. ``training_rows`` says
    where they are as the kernel saw them: a later fit takes the scaling from there, so `dkrr gc` leaves them.
    ``given_up`` are the ways that led to no answer before this one.

    With another ``loss`` than the square there are ``certificates`` instead of residuals, and ``num_support`` rows are
    in the model; ``history`` has [iteration, gap, violation] of some iterations of each of ``target_names``. Of several
    C ``path`` has a dict for each, in increasing order, with its model and its score on the held-out rows, by which one
    was chosen; the rest is that of the chosen one.
    """

    run_directory: str
    model_path: str
    model_digest: str = ""
    plan: Plan
    tiles_computed: int
    tiles_total: int
    flops_per_second: float
    peak_rss_bytes: dict[str, int] = field(default_factory=dict)
    client_peak_rss_bytes: int = 0
    intercept: list[float] | None = None
    targets_whitened: bool = False
    leave_one_out: dict[str, Any] | None = None
    score: Score | None = None
    metric: str = ""
    kept: dict[str, int] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    training_rows: str = ""
    loss: dict[str, Any] | None = None
    num_support: int | None = None
    target_names: list[str] = field(default_factory=list)
    path: list[dict[str, Any]] = field(default_factory=list)
    history: list[Any] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return super().to_dict() | {"plan": self.plan.to_dict()}

    def facts(self) -> Facts:
        """What the fit did, in the order in which it did it."""
        result, plan = self.to_dict(), self.plan.to_dict()
        compared = [(name, *rest) for name, *rest, _ in time_rows(plan, self.seconds)] + size_rows(plan, result)
        return known(
            *self.plan.what(),
            *(("went on", item["sentence"]) for item in self.given_up),
            *reuse_facts(result, self.reused),
            *(
                (name, actual + (f" ({expected} expected)" if expected != DASH else ""))
                for name, expected, actual in compared
                if actual != DASH
            ),
            *exactness_facts(plan, result),
            ("not converged", not self.converged and self.message),
            ("intercept", self.intercept and listed(self.intercept) + of_whitened(self.targets_whitened)),
            *leave_one_out_facts(result),
            *((f"  {name}", ", ".join(filter(None, rest))) for name, *rest in path_rows(result)),
            *((f"held-out {name}", text) for name, text in score_facts(result)),
            ("model in", self.model_path),
            ("report in", join(self.run_directory, "report.html")),
        )


def job_executor(job: JobSpec, store: str | None = None) -> AbstractContextManager[Executor]:
    """Who runs the tasks of a job, as ``[cluster]`` says; every worker must be able to use ``store``."""
    cluster = job.cluster
    if cluster.scheduler == "local":
        return start_local(cluster.workers, cluster.threads_per_worker, cluster.memory_limit, store=store)
    return connect_executor(cluster.scheduler, workers=cluster.workers, insecure=cluster.insecure, store=store)


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
        job, text = JobSpec.load(path), path.read_bytes()
        source = text if source is None else source
    source = job.to_toml().encode() if source is None else source
    return drive_job(job, RunDirectory(job.directory), source=source, progress=progress)


def drive_job(
    job: JobSpec, directory: RunDirectory, *, progress: Progress | None = None, source: bytes | None = None
) -> FitSummary:
    """Be the driver of the run in ``directory`` until it ends; see :func:`fit_job`."""
    job.check_claim(directory.location)  # before anything is written there
    with driving(directory, progress=progress) as monitor:
        removed: set[str] = set()
        while True:
            try:
                return _run(job, directory, monitor, source)
            except DamagedChunkError as exc:
                if exc.path in removed or not remove_damaged_copy(job.store, exc.path):
                    raise
                removed.add(exc.path)
                logger.warning("%s: that copy of the rows is made again", exc.message)


def _run(job: JobSpec, directory: RunDirectory, monitor: Monitor, source: bytes | None) -> FitSummary:
    started, store, evaluate = time.perf_counter(), job.store, job.evaluate
    monitor.note(insecure=job.cluster.insecure)
    monitor.phase("prepare")
    job.check_claim(directory.location)
    directory.remove(FIGURES)  # of the last attempt
    with nothing_new(store):
        prepared = prepare(job, store)
    monitor.phase("plan")
    recorded = directory.read("plan.json")
    if recorded is not None and "digests" not in recorded:
        recorded = None  # the first releases knew other rates and candidates: the plan is made again
    plan = make_plan(job, prepared, store, recorded)
    plan.check()
    # only now: a job whose data or size is refused must not hold the directory for itself
    note_user(store, directory.location)
    directory.write("job.json", job.to_dict())
    if source is not None:
        directory.write_bytes("job.toml", source)
    # what "auto" became is fixed by the first attempt, unless rows came or went since
    directory.write("plan.json", plain(plan.to_dict()))
    monitor.note(reused=plain(plan.reused))
    figures: dict[str, Any] = {}

    def note(make: Callable[[], dict[str, Any]]) -> None:
        """Add the parts that ``make()`` returns to the figures, and write them; only a lost lease ends the run here."""
        try:
            figures.update(plain(make()))
            directory.write(FIGURES, figures)
        except LockedError:
            raise
        except Exception as exc:
            logger.warning("figures for the report of %s are missing (%s)", directory.name, exc)

    note(lambda: {"data": _data_facts(prepared), "present_bytes": plan.disk_present_bytes})
    seconds = {"prepare": time.perf_counter() - started}
    monitor.phase("start")
    begin, score, said = time.perf_counter(), None, ""
    with job_executor(job, store) as executor:
        seconds["start"] = time.perf_counter() - begin
        executor.cancelled = monitor.is_cancelled
        monitor.working(lambda: executor_facts(executor), lambda: worker_memory(executor))
        note(lambda: {"environment": describe_executor(executor)})
        # workers that could not hold a task would be killed again and again
        require_memory(executor, plan.task_bytes // max(1, plan.threads_per_worker))
        workspace = Workspace(
            store,
            executor,
            monitor,
            blas=blas_of(executor),
            durable=True,
            split=plan.split,
            maker=directory.location,
            at_end=[],
        )
        monitor.note(given_up=workspace.given_up)  # filled while the run goes on
        try:
            summary, tiles = solve_and_save(job, prepared, plan, workspace, directory.location)
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
        data=prepared.data,
        training_rows=str(prepared.train.path),
        peak_rss_bytes=peaks,
        client_peak_rss_bytes=peak_rss_bytes(),
        score=score,
        metric="" if score is None else (evaluate and evaluate.metric) or score.metric,
        model_digest=manifest_digest(summary.model_path),
    )
    if tiles is not None:  # not earlier: whoever is killed before that goes on with them
        summary = replace(summary, kept=_clean(job, workspace, tiles))
    directory.write("result.json", plain(summary.to_dict()))
    for remove in workspace.at_end or ():
        with contextlib.suppress(OSError, StoreError):  # what stays of it is garbage
            remove()
    monitor.note(model=summary.model_path, reused=plain(summary.reused))
    return summary


# --- from a plan to a model -------------------------------------------------------------------------------------------


def solve_and_save(
    job: JobSpec, prepared: Prepared, plan: Plan, workspace: Workspace, directory: str
) -> tuple[FitSummary, FitResult | None]:
    """Solve as ``plan`` says and save ``model.zarr`` in the run's ``directory``; seconds and score are still missing.

    The second result is what is in the store of a fit that had tiles.

    Raises
    ------
    NumericalError, DataError, StoreError, LockedError
        See :func:`dkrr.fit.fitting.fit_rows`.
    """
    train, path, left_out = prepared.train, place(directory, "model.zarr"), None
    check_replaceable(path)  # before the work
    with _solved(job, prepared, plan, workspace, directory) as (fits, rows):
        models = [fit.model(train, scaling=prepared.scaling) for fit in fits]
        points = _score_path(job, models, prepared.test, workspace, directory) if len(fits) > 1 else []
        best = next((number for number, point in enumerate(points) if point["chosen"]), 0)
        model, tiles = models[best], fits[best].tiles
        # the figures of the models whose place these take go first: they are not their own
        model.write(path, overwrite=True, before=lambda: delete_key(directory, "result.json"))
        for point, other in zip(points, models, strict=False):
            other.write(point["model_path"], overwrite=True)
        if job.leaves_out:
            left_out = _leave_out(job, fits[best], rows, workspace, model, path, directory)
    if model.kernel is not None and (tiles is not None or plan.loss is not None):
        same = {"kernel": model.kernel.to_dict(), "alpha": list(model.provenance["alpha"]), "n": train.num_rows}
        same |= {"num_targets": train.num_targets, "rows_digest": train.digest}
        same |= {} if plan.loss is None else {"loss": plan.loss_parameters}
        record_rows(workspace.store, "models", same, train, path)
    factor, solution = workspace.phases.get("factorise", RunSummary()), model.solution
    loss: dict[str, Any] = {}
    if plan.loss is not None:
        loss = {"loss": {**plan.loss, "C": model.provenance["C"]}, "num_support": model.num_rows, "path": points}
        loss |= {"target_names": model.target_names, "history": fits[best].history}
    summary = FitSummary(
        **vars(solution) | {"reused": _reused(plan, solution)},
        run_directory=directory,
        model_path=path,
        plan=plan,
        tiles_computed=0
        if tiles is None
        else sum(len(workspace.matrices.get(str(item), ())) for item in tiles.factors),
        tiles_total=0 if tiles is None else tiles.operator.grid.num_lower * len(tiles.factors),
        flops_per_second=factor.flops_computed / factor.seconds if factor.num_computed else 0.0,
        intercept=None if model.intercept is None else model.intercept.tolist(),
        targets_whitened=model.whitens_targets,
        leave_one_out=left_out,
        **loss,
    )
    return summary, tiles


@contextmanager
def _solved(
    job: JobSpec, prepared: Prepared, plan: Plan, workspace: Workspace, directory: str
) -> Iterator[tuple[list[Solved], Dataset]]:
    """By the way of the plan, for each C of another loss than the square; and the rows that were solved for.

    Those of a precomputed matrix are their numbers.
    """
    rows, scaling = prepared.train, prepared.scaling
    check_target_sizes(rows)
    if scaling is not None:  # the figures are in the units of the targets
        check_target_sizes(np.hypot(scaling.y_mean, scaling.y_std)[None])
    with ExitStack() as stack:
        if plan.loss is not None:
            yield stack.enter_context(fit_loss(job, prepared, plan, workspace, directory, begin_from)), rows
            return
        decision, given, digest, start = decision_of(job, prepared, plan), None, "", None
        settings = decision.settings()
        if settings.kernel is None:
            parts = {name: part.read(0, rows.num_rows) for name, part in rows.parts().items() if name != "X"}
            numbers = np.arange(rows.num_rows, dtype=np.float64)[:, None]
            rows = stack.enter_context(rows_on_disk(numbers, parts["y"], parts.get("weight"), workspace.store))
            matrix = given_tiles(prepared.train.X, workspace.store, plan.tile_size)
            given, digest = stack.enter_context(matrix)
        elif plan.solver not in ("nystrom", "primal") and settings.iterates:
            start = begin_from(rows, settings.kernel, settings.alpha, None, workspace)
        fit = solve_rows(rows, decision, workspace, given=given, source_digest=digest, start=start)
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
    of equals that of the smallest C. Each is to be ``path-NUMBER.zarr``."""
    assert test is not None  # noqa: S101  (narrows the type: a job with several C has held-out rows)
    points: list[dict[str, Any]] = []
    for number, model in enumerate(models):
        with workspace.scratch() as draft:
            model.write(draft)
            saved, (work, progress) = load_model(draft), (workspace.executor, workspace.progress)
            score, run = score_dataset(saved, test, work, progress, store=workspace.store)
        workspace.record("path", run)
        metric = (None if job.evaluate is None else job.evaluate.metric) or score.metric
        if not np.isfinite(score.value(metric)):
            logger.warning("%s of the held-out rows is no number: C is chosen by %s", metric, score.metric)
            metric = score.metric
        points.append(
            {
                **{name: model.provenance[name] for name in ("C", "alpha")},
                "metric": metric,
                "score": score.value(metric),
                "num_support": model.num_rows,
                "gap": max(certificate.gap for certificate in model.solution.certificates),
                "converged": model.solution.converged,
                "model_path": place(directory, f"path-{number:03}.zarr"),
                "chosen": False,
            }
        )
    sign = 1.0 if points[0]["metric"] in LOWER_IS_BETTER else -1.0
    min(points, key=lambda point: sign * point["score"])["chosen"] = True
    return points


def _clean(job: JobSpec, workspace: Workspace, result: FitResult) -> dict[str, int]:
    """Remove what ``keep`` does not name and this run has made for itself alone; sizes of what stays."""
    # besides those of the solve, a factor that leave-one-out rests on
    keep, grams = job.output.keep, [result.gram] if result.gram else []
    matrices = dict.fromkeys([*result.factors, *grams, *workspace.matrices])
    for location in matrices:
        if keep == "model" or (keep == "factor" and location == result.gram):
            workspace.discard(location)
    sizes = {location: sum(entry.num_bytes for entry in list_entries(location)) for location in matrices}
    return {location: num_bytes for location, num_bytes in sizes.items() if num_bytes}


def _leave_out(
    job: JobSpec, fitted: Solved, rows: Dataset, workspace: Workspace, model: Model, model_path: str, directory: str
) -> dict[str, Any] | None:
    """Leave-one-out of a run whose ``model`` is saved: the figures per target, in the units of y.

    None, with a warning, where the job allows a fit that did not converge, and this one is too far from a solution for
    leave-one-out: then the model has no quantiles. Its seconds are those of one phase.

    Cost
    ----
    That of :func:`dkrr.models.tiled.leave_one_out_rows`: n^3 / 3 flops from a float64 factor.
    """
    assert job.evaluate is not None  # noqa: S101  (narrows the type)
    assert fitted.settings is not None  # noqa: S101  (narrows the type)
    location = place(directory, "leave_one_out.zarr")
    if job.evaluate.leave_one_out:  # an earlier attempt may have left the figures of another one
        remove_parts(location, [], LEFT_OUT)
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
        model.with_quantiles(found).write(model_path, overwrite=True)
    figures = found.summary()
    if job.evaluate.leave_one_out:
        for name in LEFT_OUT:
            write_rows(location, name, ArrayRows(getattr(found, name)))
        write_json(location, "zarr.json", {"zarr_format": 3, "node_type": "group", "attributes": figures})
    return figures


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


# --- figures for the report -------------------------------------------------------------------------------------------


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
    return {"phases": phases, "convergence": [trace.to_dict() for trace in workspace.traces if trace.points]}


def _data_facts(prepared: Prepared) -> dict[str, Any]:
    """Rows, names, statistics, and a histogram of the first four targets, all in the units of the data."""
    train, test, scaling = prepared.train, prepared.test, prepared.scaling
    mean, std = train.x_mean, decode_floats(train.records["X"]["std"])  # 0 of a constant one
    if scaling is not None:  # which may be that of earlier rows
        mean, std = scaling.x_mean + scaling.x_std * mean, scaling.x_std * std
    is_frozen = prepared.earlier is not None and prepared.earlier.scaling is not None
    names = [str(name) for name in train.feature_names[:MOST_NAMES]]
    return {
        "num_rows": train.num_rows,
        "num_test_rows": 0 if test is None else test.num_rows,
        "num_features": train.num_features,
        "num_targets": train.num_targets,
        "standardized": scaling is not None,
        "scaling_rows": prepared.earlier.num_rows if prepared.earlier and is_frozen else None,
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
    read = train.targets.read if scaling is None else lambda *span: scaling.invert_y(train.targets.read(*span))
    blocks = (read(start, stop) for start, stop in train.targets.blocks())
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


def drive(run: str, log: str | None = None) -> int:
    """Run or resume the run at ``run``; the exit code. Errors are printed on stderr and stand in the status.

    ``log`` is the local file with this process' output, for a run that is not on a file system.
    """
    directory, code = RunDirectory(run), 0
    try:
        with resumable():
            _say(f"driver of {directory.location}")
            with driving(directory, kind="here") as monitor:
                _run(job_of(directory), directory, monitor, None)
        _say("finished")
    except Exception as exc:
        error, code = told(exc), told(exc).exit_code
        if error is not exc:
            traceback.print_exc()
        _say(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
    if log is not None:
        with contextlib.suppress(OSError, StoreError):
            directory.write_bytes("driver.log", Path(log).read_bytes())
            Path(log).unlink()
    return code


def _say(text: str) -> None:
    print(f"{utc_now()} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(drive(*sys.argv[1:]))
