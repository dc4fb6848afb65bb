"""Make a plan: what a job needs and how long it may take, computed before anything is started; refuse what cannot fit.

What was left to "auto" is decided here, by :mod:`dkrr.fit.plan`, unless an earlier attempt of the same run
decided it. Memory, disk and seconds are those of :mod:`dkrr.fit.prices`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dkrr.engine.machine import cpu_count, free_memory_bytes, peak_rss_bytes, total_memory_bytes
from dkrr.errors import ParameterError
from dkrr.fit.choices import Candidate, Limits, Problem
from dkrr.fit.fitting import center_of_lineage
from dkrr.fit.inputs import free_bytes, measured_place
from dkrr.fit.plan import ASKED, Decision, decide, find_continued, find_other_alpha, other_alpha_sentence
from dkrr.fit.prices import (
    CLIENT_BYTES,
    DECOMPOSITION_PASSES,
    DISK_RESERVE_BYTES,
    NEWTON_PRODUCTS,
    loss_candidate,
    with_leave_one_out,
)
from dkrr.fit.rates import Machine, measure_machine
from dkrr.fit.trial import Trial, sample_trial
from dkrr.jobs.claim import run_id
from dkrr.jobs.leave_one_out import wants_leave_one_out
from dkrr.jobs.loss_fit import check_loss_targets, num_loss_columns
from dkrr.jobs.loss_spec import parameters_of, path_of
from dkrr.jobs.planned import Plan
from dkrr.jobs.prepare import Prepared, prepare
from dkrr.jobs.spec import JobSpec
from dkrr.kernels import Kernel
from dkrr.kernels.features import count_features
from dkrr.linalg.sizes import task_bytes
from dkrr.markup import size
from dkrr.models.tiled import loss_solver, usable_rows
from dkrr.store.files import arrays_below, is_url, read_json
from dkrr.tiles import TileGrid, TileMatrix

__all__ = ["make_plan", "plan"]


def plan(job: JobSpec | str | Path | dict[str, Any]) -> Plan:
    """Plan a job: a :class:`~dkrr.jobs.spec.JobSpec`, the path of a job file, or nested dicts.

    The data is ingested (bad rows are found here) and the machine measured for about a second.

    Raises
    ------
    JobFileError, DataError
        The job or its data cannot be used.
    """
    if isinstance(job, dict):
        job = JobSpec.from_dict(job)
    elif not isinstance(job, JobSpec):
        job = JobSpec.load(job)
    store = job.output.store_directory(run_id(job))
    return make_plan(job, prepare(job, store), store)


def make_plan(job: JobSpec, prepared: Prepared, store: Any, recorded: dict[str, Any] | None = None) -> Plan:
    """Plan a job whose rows are prepared. Measures the machine; starts nothing.

    Parameters
    ----------
    recorded
        The plan of an earlier attempt of the same run: what "auto" became stays.
    """
    if job.model.loss != "square":
        return _loss_plan(job, prepared, store, recorded)
    train = prepared.train
    n, d, t = train.num_rows, train.num_features, train.num_targets
    kernel = job.model.build_kernel()
    resolved: Kernel | None = None if kernel.name == "precomputed" else kernel.resolve(d)
    alpha = [float(a) for a in np.atleast_1d(job.model.alpha)]
    if len(alpha) not in (1, t):
        raise ParameterError(
            f"[model] alpha has {len(alpha)} values for {t} target{'s' * (t > 1)}; one, or one for each, expected"
        )
    workers = job.cluster.workers or cpu_count()
    threads = workers * job.cluster.threads_per_worker
    limit = _memory_limit(job, workers)
    free = free_bytes(store)
    problem = Problem(
        num_rows=n,
        num_features=d,
        num_targets=t,
        kernel=resolved,
        alpha=tuple(alpha),
        fit_intercept=job.model.fit_intercept,
        primal=job.solver.tile_size == "auto",
    )
    choice = job.solver.choice()
    given_tiles = None if job.solver.tile_size == "auto" else int(job.solver.tile_size)
    is_of_these = recorded is not None and "solver" in recorded and recorded.get("num_features", d) == d
    earlier = recorded if is_of_these else None
    if earlier is not None:
        choice = replace(
            choice,
            **{name: earlier[name] for name in ("solver", "precision", "gram")},
            rank=(earlier.get("rank") or "auto") if earlier["solver"] == "cg" else "auto",
            preconditioner=_preconditioner(choice.preconditioner, earlier),
        )
        given_tiles = int(earlier["tile_size"])
    has_grown = earlier is not None and earlier.get("num_rows") != n
    continued = find_continued(
        store,
        train,
        resolved,
        tuple(alpha),
        choice,
        tile_size=given_tiles,
        memory_bytes=_task_limit(job, limit),
        drift_limit=prepared.center_drift_limit,
    )
    asked = choice.to_dict() | {"tile_size": given_tiles or "auto"}
    if continued is not None:
        choice, given_tiles = continued.resolve(choice, given_tiles)

    machine = partial(_machine, job, resolved, d, store, threads, earlier)

    def trial(seconds: float) -> Trial | None:
        if resolved is None or earlier is not None:
            return None
        return sample_trial(train, resolved, seconds, seed=choice.seed)

    wanted = {
        "kernel": None if resolved is None else json.loads(json.dumps(resolved.to_dict())),
        "rows_digest": train.digest,
        "n": n,
    }
    limits = Limits(
        threads=threads,
        memory_bytes=_task_limit(job, limit),
        driver_bytes=free_memory_bytes(),
        disk_bytes=None if free is None else free + _present_bytes(store, wanted, alpha),
        fetches=is_url(str(store)),
    )
    decision = decide(
        problem,
        choice,
        limits,
        tile_size=given_tiles,
        machine=machine,
        trial=trial,
        always_measure=earlier is None or has_grown,
    )
    chosen = decision.chosen
    if wants_leave_one_out(job):
        chosen = with_leave_one_out(chosen, problem, limits, machine() if earlier is None or has_grown else None)
    reused: dict[str, Any] = {} if prepared.frozen is None else {"scaling": prepared.frozen.to_dict()}
    newer = prepared.frozen is not None and (prepared.frozen.scaling is None or prepared.frozen.drift.num_rows > 0)
    notes = [prepared.frozen.sentence()] if newer and prepared.frozen is not None else []
    settings = replace(decision.settings(problem, choice), drift_limit=prepared.center_drift_limit)
    center = center_of_lineage(settings, train, store)
    if center is not None and center.sentence():
        reused["center"] = center.to_dict()
        notes.append(center.sentence())
    if continued is not None and continued.is_for(chosen):
        less = continued.saved(chosen, threads)
        saved = chosen.total_seconds - less.total_seconds if chosen.seconds else None
        chosen, reused["factor"] = less, continued.to_dict(saved)
        notes.append(continued.sentence(saved))
    elif chosen.solver == "cholesky":
        other = find_other_alpha(store, train, resolved, tuple(alpha))
        if other is not None and other not in alpha:
            notes.append(other_alpha_sentence(other, alpha[0], choice.tol))
    b, grid = chosen.tile_size, TileGrid(n, chosen.tile_size)
    present = _present_bytes(store, wanted | {"tile_size": b}, alpha)
    if "factor" in reused and continued is not None:
        present = max(present, continued.num_bytes)
    per_task = chosen.memory_bytes * job.cluster.threads_per_worker
    needed = max(0, sum(chosen.disk_bytes.values()) - present)
    refusal, hint = _refusal(chosen, d, store, limit, per_task, needed, free)
    if job.cluster.insecure:
        notes.append("insecure = true: the scheduler is reached without encryption or authentication")
    nystrom = choice.nystrom(usable_rows(train)) if choice.solver == "nystrom" else None
    if nystrom is not None:
        notes.append(f"an approximation: {nystrom.num_centers:,} centres stand for {n:,} rows")
    if earlier is None or has_grown:
        known = _measured(chosen, decision, machine)
        split = None if chosen.split is None else chosen.split.to_dict()
    else:
        known = {name: earlier[name] for name in _MEASURED if name in earlier}
        split = earlier.get("split")
    reasons = dict(decision.reasons)
    if continued is not None:  # what was left open and is not any more
        left = [name for name in reasons if asked.get(name) == "auto" and reasons[name] == ASKED]
        reasons |= dict.fromkeys(left, "as in the factor that is continued")
    if earlier is not None:
        reasons = dict.fromkeys(reasons, "as the first attempt of this run decided") | earlier.get("reasons", {})
    return Plan(
        num_rows=n,
        num_test_rows=0 if prepared.test is None else prepared.test.num_rows,
        num_features=d,
        num_targets=t,
        kernel={"kernel": "precomputed"} if resolved is None else resolved.to_dict(),
        alpha=alpha,
        solver=chosen.solver,
        precision=chosen.precision,
        gram=chosen.gram,
        tile_size=b,
        num_tiles_per_side=grid.num_tiles,
        num_tasks=_num_tasks(chosen, grid, problem.num_alphas),
        flops=_flops(chosen, problem),
        workers=workers,
        threads_per_worker=job.cluster.threads_per_worker,
        memory_limit_bytes=limit,
        task_bytes=per_task,
        # a trial of large ranks may have taken more than the fit will
        client_bytes=max(peak_rss_bytes(), CLIENT_BYTES + chosen.client_bytes),
        disk_bytes=chosen.disk_bytes,
        disk_present_bytes=present,
        disk_free_bytes=free,
        split=split,
        rank=chosen.rank,
        choice=job.solver.choice().to_dict(),
        nystrom=None if nystrom is None else nystrom.to_dict(),
        reasons=reasons,
        refusal=refusal,
        hint=hint,
        notes=notes,
        reused=reused,
        **known,
    )


def _loss_plan(job: JobSpec, prepared: Prepared, store: Any, recorded: dict[str, Any] | None) -> Plan:
    """:func:`make_plan` of another loss than the square, which has one solver."""
    train, model = prepared.train, job.model
    n, d = train.num_rows, train.num_features
    losses = check_loss_targets(job, train)
    kernel = model.build_kernel().resolve(d)
    solver = loss_solver(losses[0])
    C, alpha = (list(values) for values in zip(*path_of(model), strict=True))
    num_columns = len(C) * num_loss_columns(losses, train)
    problem = Problem(
        num_rows=n,
        num_features=d,
        num_targets=num_columns,
        kernel=kernel,
        alpha=tuple(alpha),
        fit_intercept=model.fit_intercept,
    )
    workers = job.cluster.workers or cpu_count()
    threads = min(workers * job.cluster.threads_per_worker, cpu_count())
    machine = _machine(job, kernel, d, store, threads, recorded)
    chosen = loss_candidate(problem, solver, machine)
    limit, free, memory = _memory_limit(job, workers), free_bytes(store), free_memory_bytes()
    per_task = chosen.memory_bytes * job.cluster.threads_per_worker
    refusal, hint = _refusal(chosen, d, store, limit, per_task, sum(chosen.disk_bytes.values()), free)
    if chosen.client_bytes > memory:
        refusal = f"{solver} needs {size(chosen.client_bytes)} in this process, {size(memory)} are free"
        hint = "give fewer rows, or a machine with more memory"
    notes = [
        f"{solver} runs in the driver's process, with {threads} thread{'s' * (threads > 1)}; workers predict",
        f"{chosen.seconds[solver]:.1f} s for it is a rough estimate: it depends on how many rows are support vectors",
    ]
    reused: dict[str, Any] = {} if prepared.frozen is None else {"scaling": prepared.frozen.to_dict()}
    return Plan(
        num_rows=n,
        num_test_rows=0 if prepared.test is None else prepared.test.num_rows,
        num_features=d,
        num_targets=train.num_targets,
        kernel=kernel.to_dict(),
        alpha=alpha,
        solver=solver,
        precision=chosen.precision,
        gram=chosen.gram,
        tile_size=chosen.tile_size,
        num_tiles_per_side=0,
        num_tasks=0,
        flops=2.0 * n * n * (d + num_columns) * (NEWTON_PRODUCTS if solver == "newton" else DECOMPOSITION_PASSES),
        workers=workers,
        threads_per_worker=job.cluster.threads_per_worker,
        memory_limit_bytes=limit,
        task_bytes=per_task,
        client_bytes=max(peak_rss_bytes(), CLIENT_BYTES + chosen.client_bytes),
        disk_bytes=chosen.disk_bytes,
        disk_present_bytes=0,
        disk_free_bytes=free,
        estimated_seconds=chosen.seconds,
        estimated_low_seconds=chosen.total_seconds,
        calibration=machine.to_dict(),
        choice=job.solver.choice().to_dict(),
        reasons={"solver": f"the {model.loss} loss {'is smooth' if solver == 'newton' else 'has corners'}"},
        refusal=refusal,
        hint=hint,
        notes=notes,
        reused=reused,
        loss={"loss": model.loss, "C": C if len(C) > 1 else C[0], **parameters_of(model)},
    )


def _machine(
    job: JobSpec, kernel: Kernel | None, num_features: int, store: Any, threads: int, earlier: dict[str, Any] | None
) -> Machine:
    """Rates as the ``earlier`` attempt measured them, which are as good and cost no second, or as they are now."""
    known = (earlier or {}).get("calibration") or {}
    if known.get("threads") == threads:
        with contextlib.suppress(TypeError):  # written by a dkrr that knew other rates
            return Machine(**known)
    where: Literal["new cluster", "client"] = "new cluster" if job.cluster.scheduler == "local" else "client"
    return measure_machine(kernel, num_features, measured_place(store), threads=threads, where=where)


_MEASURED = (
    "estimated_seconds",
    "estimated_low_seconds",
    "expected_efficiency",
    "iterations",
    "candidates",
    "calibration",
)


def _measured(chosen: Candidate, decision: Decision, machine: Callable[[], Machine]) -> dict[str, Any]:
    """What a plan says about time; a later attempt of the same run goes by what the first one said."""
    return {
        "estimated_seconds": chosen.seconds,
        "estimated_low_seconds": chosen.seconds_low,
        "expected_efficiency": chosen.efficiency,
        "iterations": None if chosen.iterations is None else [chosen.iterations.low, chosen.iterations.high],
        "candidates": [item.to_dict() for item in decision.candidates],
        "calibration": machine().to_dict(),
    }


def _preconditioner(asked: str, earlier: dict[str, Any]) -> str:
    if earlier["solver"] != "cg" or asked != "auto":
        return asked
    return "auto" if earlier.get("rank") else "none"


def _refusal(
    chosen: Candidate,
    num_features: int,
    store: Any,
    limit: int | None,
    per_task: int,
    needed: int,
    free: int | None,
) -> tuple[str, str]:
    """Why the job cannot run, and what would help; two empty texts when it can."""
    itemsize = 8 if chosen.precision == "float64" else 4
    if "cannot hold a task" in chosen.infeasible:
        return chosen.infeasible, "raise memory_limit"
    if limit is not None and per_task > limit:
        if chosen.solver == "nystrom":
            hint = "lower num_centers, or raise memory_limit"
        elif chosen.solver == "cg":
            hint = "lower rank, or raise memory_limit"
        else:
            edges = range(128, chosen.tile_size, 128)
            fitting = [edge for edge in edges if task_bytes(edge, num_features, itemsize) <= 0.8 * limit]
            hint = f"set tile_size to at most {fitting[-1]}" if fitting else "raise memory_limit"
        what = f"a task with tiles of {chosen.tile_size}" if chosen.solver == "cholesky" else f"a task of {chosen.name}"
        return f"{what} needs {size(per_task)}, a worker may use {size(limit)}", hint
    if free is not None and needed + DISK_RESERVE_BYTES > free:
        smaller_way = ", or name = 'cg' (no factor)" if chosen.solver == "cholesky" else ""
        if "float64 factor" in chosen.disk_bytes:
            smaller_way = ", or ask for no leave-one-out and no intervals, which need a factor"
        missing = needed + DISK_RESERVE_BYTES - free
        return (
            f"the job writes {size(needed)} to {store}, and {size(DISK_RESERVE_BYTES)} are kept free there so that the "
            f"disk is not full before the fit is done; {size(free)} are free",
            f"free {size(missing)} more there, give an [output] store on another disk{smaller_way}",
        )
    return "", ""


def _num_tasks(chosen: Candidate, grid: TileGrid, num_alphas: int) -> int:
    """Tiles of factors and of a stored Gram matrix, sweeps and residuals; one pass of cg counts as one task."""
    if chosen.solver != "cholesky":
        return 0 if chosen.iterations is None else round(chosen.iterations.high)
    return grid.num_lower * (num_alphas + (chosen.gram == "stored")) + (2 * num_alphas + 1) * grid.num_tiles


def _flops(chosen: Candidate, problem: Problem) -> float:
    n, t = problem.num_rows, problem.num_targets
    if chosen.solver == "cholesky":
        return n**3 / 3 * problem.num_alphas
    if chosen.solver == "primal":
        size = count_features(problem.kernel, problem.num_features) or 0
        return n * (size**2 + 4.0 * size * t) + size**3 / 3 * problem.num_alphas
    iterations = 0.0 if chosen.iterations is None else chosen.iterations.high
    return 2.0 * n * n * t * iterations + 2.0 * n * chosen.rank**2


def _task_limit(job: JobSpec, limit: int | None) -> int | None:
    """Memory of one task."""
    return None if limit is None else limit // job.cluster.threads_per_worker


def _memory_limit(job: JobSpec, workers: int) -> int | None:
    limit = job.cluster.memory_limit
    if limit == "auto":
        return total_memory_bytes() // workers if job.cluster.scheduler == "local" else None
    return int(limit)


def _present_bytes(store: Any, wanted: dict[str, Any], alpha: list[float]) -> int:
    """Bytes of valid tiles that this job goes on writing: arrays whose key has the same fields, and one of its alphas.

    The BLAS kernel is not compared: which one the workers have is known only when they run.
    """
    total = 0
    for folder in ("factors", "grams"):
        for location in arrays_below(store, folder):
            fields = (read_json(location, "zarr.json") or {}).get("attributes", {})
            same = all(fields.get(name) == value for name, value in wanted.items())
            if same and (folder == "grams" or fields.get("alpha") in alpha):
                tiles = TileMatrix.open(location)
                total += (tiles.grid.num_lower - len(tiles.missing())) * (tiles.array.chunk_bytes + 4)
    return total
