"""Make a plan: what a job needs and how long it may take, computed before anything is started; refuse what cannot fit.

What was left to "auto" is decided here, by :mod:`dkrr.fit.plan`, unless an earlier attempt of the same run
decided it. Memory, disk and seconds are those of :mod:`dkrr.fit.prices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dkrr.dataset import Dataset
from dkrr.engine.machine import cpu_count, free_memory_bytes, peak_rss_bytes, total_memory_bytes
from dkrr.errors import ParameterError, PlanRefusedError
from dkrr.fit.choices import Candidate, Limits, Problem, SolverChoice
from dkrr.fit.fitting import center_of_lineage
from dkrr.fit.inputs import free_bytes, present_bytes
from dkrr.fit.plan import Decision, decide
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
from dkrr.jobs.facts import Shown, between, candidate_rows
from dkrr.jobs.prepare import Prepared, check_loss_targets, prepare
from dkrr.jobs.spec import JobSpec
from dkrr.kernels import Kernel, kernel_from_dict
from dkrr.linalg.fit_losses import loss_solver
from dkrr.linalg.leave_one_out import most_coverage
from dkrr.linalg.workspace import task_bytes
from dkrr.markup import Facts, kernel_words, known, loss_words, reasons_of, size
from dkrr.models.tiled import usable_rows
from dkrr.tiles import TileGrid


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Shown, Candidate):
    """Everything that "auto" became, what it needs, and what is there.

    It is the :class:`~dkrr.fit.choices.Candidate` that was chosen, and the rest. Sizes are in bytes: ``client_bytes``
    is the peak of this process, interpreter included. ``choice`` is what was asked for, ``candidates`` what else was
    possible, ``reasons`` a sentence for each of "solver", "precision", "rank" (of cg) and "tile_size" (of a factor).
    ``reused`` is what earlier fits in the store save: "factor" (rows, tiles, flops, seconds),
    "scaling" and "center", and empty where all is computed. ``loss`` is another one than the square: "loss", "C", and
    "quantile" or "epsilon" where the job has it. ``digests`` are those of the rows, targets and weights.
    """

    num_rows: int
    num_test_rows: int
    num_features: int
    num_targets: int
    kernel: dict[str, Any]
    alpha: list[float]
    num_tiles_per_side: int
    num_tasks: int
    flops: float
    workers: int
    threads_per_worker: int
    memory_limit_bytes: int | None
    disk_present_bytes: int
    disk_free_bytes: int | None
    calibration: dict[str, float]
    choice: dict[str, Any] = field(default_factory=dict)
    nystrom: dict[str, Any] | None = None
    loss: dict[str, Any] | None = None
    candidates: list[dict[str, Any]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    refusal: str = ""
    hint: str = ""
    notes: list[str] = field(default_factory=list)
    reused: dict[str, Any] = field(default_factory=dict)
    digests: list[str | None] = field(default_factory=list)

    @property
    def disk_needed_bytes(self) -> int:
        """Bytes still to be written."""
        return max(0, sum(self.disk_bytes.values()) - self.disk_present_bytes)

    @property
    def loss_parameters(self) -> dict[str, Any] | None:
        """The loss and its parameter, as a model is remembered by; None of the square."""
        return None if self.loss is None else {name: value for name, value in self.loss.items() if name != "C"}

    @property
    def threads(self) -> int:
        """Tasks at once."""
        return self.workers * self.threads_per_worker

    @property
    def task_bytes(self) -> int:
        """Peak of a worker."""
        return self.memory_bytes * self.threads_per_worker

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        more = {"disk_needed_bytes": self.disk_needed_bytes, "task_bytes": self.task_bytes}
        return super().to_dict() | more | {"estimated_seconds": self.seconds}

    def check(self) -> None:
        """Raise :class:`~dkrr.errors.PlanRefusedError` when the job cannot fit."""
        if self.refusal:
            raise PlanRefusedError(self.refusal, hint=self.hint)

    def facts(self) -> Facts:
        """What the job needs and what there is."""
        document, side, has_factor = self.to_dict(), self.num_tiles_per_side, self.solver == "cholesky"
        tasks = f"{self.num_tasks:,} tasks, " if has_factor else ""
        parts = ", ".join(f"{name} {size(value)}" for name, value in self.disk_bytes.items() if value)
        phases = ", ".join(f"{name} {value:.1f}" for name, value in self.seconds.items())
        ways = candidate_rows(document)
        return known(
            *self.what(f"; {self.num_test_rows:,} held out" if self.num_test_rows else ""),
            *((f"  {name}", text) for name, text in reasons_of(document)),
            ("tiles", has_factor and f"{self.tile_size} rows; {side} a side, {side * (side + 1) // 2:,} in all"),
            ("work", f"{tasks}{self.flops:.3g} flops"),
            ("schedule", has_factor and self.efficiency and self._schedule()),
            ("workers", f"{self.workers}, memory limit {size(self.memory_limit_bytes)} each"),
            ("memory", f"projected peak {size(self.task_bytes)} a worker, {size(self.client_bytes)} this process"),
            ("disk", f"{size(self.disk_needed_bytes)} to write ({parts}); {size(self.disk_free_bytes)} free"),
            ("iterations", between(**document["iterations"] or {})),
            ("estimated", f"{between(self.seconds_low, self.total_seconds)} s ({phases})"),
            ("candidates", ways and f"{len(self.candidates)} in all: time, iterations, memory of a worker, on disk"),
            *((f"  {name}", ", ".join(rest)) for name, *rest in ways),
            *(("note", note) for note in self.notes),
            ("refused", self.refusal + (f": {self.hint}" if self.hint else "")),
        )

    def what(self, held_out: str = "") -> Facts:
        """Rows, model and solver of a self."""
        targets = f"{self.num_targets} target{'s' * (self.num_targets != 1)}"
        loss = f"{loss_words(self.loss)}, " if self.loss else ""
        how = f", Gram matrix {self.gram.replace('_', ' ')}"
        if self.solver == "primal":
            how = ": explicit features, no Gram matrix"
        elif self.loss is not None:
            how = ": rows in this process, columns of the Gram matrix made when needed"
        elif self.nystrom is not None:
            how = f", {self.nystrom['num_centers']:,} centres: an approximation"
        elif self.solver == "cg":
            how = f", {f'preconditioner of rank {self.rank:,}' if self.rank else 'no preconditioner'}{how}"
        return [
            ("training rows", f"{self.num_rows:,} x {self.num_features:,}, {targets}{held_out}"),
            ("model", f"{kernel_words(self.kernel)}, {loss}alpha {', '.join(f'{value:g}' for value in self.alpha)}"),
            ("solver", f"{self.solver}, {self.precision}{how}"),
        ]

    def _schedule(self) -> str:
        """How busy the workers will be, and which sums are split for it."""
        count, split = self.threads, self.split
        text = f"{count:,} worker{'s' * (count > 1)} busy {self.efficiency:.0%} of the factorisation, simulated"
        if split is None or not split.num_columns:
            return text + "; no sum is split"
        last, terms = min(split.num_columns, self.num_tiles_per_side), split.num_last
        where = "all columns" if last == self.num_tiles_per_side else f"the last {last} columns"
        return f"{text}; sums of {where} are split before the last {terms} term{'s' * (terms > 1)}"


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
    return make_plan(job, prepare(job, job.store), job.store)


def make_plan(job: JobSpec, prepared: Prepared, store: Any, recorded: dict[str, Any] | None = None) -> Plan:
    """Plan a job whose rows are prepared. Measures the machine; starts nothing.

    Parameters
    ----------
    recorded
        The plan of an earlier attempt of the same run, which a later one goes by; of more or fewer rows what "auto"
        became stays, of other features nothing does.
    """
    train, cluster, free = prepared.train, job.cluster, free_bytes(store)
    workers, frozen = cluster.workers or cpu_count(), prepared.earlier
    own = total_memory_bytes() // workers if cluster.scheduler == "local" else None
    limit = own if cluster.memory_limit == "auto" else int(cluster.memory_limit)
    digests = [train.digest, train.digest_y, train.digest_weight]
    here: dict[str, Any] = {
        "workers": workers,
        "threads_per_worker": cluster.threads_per_worker,
        "memory_limit_bytes": limit,
        "disk_free_bytes": free,
        "choice": job.solver.settings().to_dict(),  # how far an iteration goes may change
        "digests": digests,
        "num_test_rows": 0 if prepared.test is None else prepared.test.num_rows,
    }
    earlier = recorded if recorded is not None and recorded["num_features"] == train.num_features else None
    if earlier is not None and earlier["digests"] == digests:
        plan = replace(Plan.from_dict(earlier), **here)
        if plan.loss is None:
            known = _tiles_of(train, kernel_of(plan.kernel), plan.alpha) | {"tile_size": [plan.tile_size]}
            plan = replace(plan, disk_present_bytes=present_bytes(store, known))
    else:
        kernel = job.model.build_kernel()
        resolved = None if kernel.name == "precomputed" else kernel.resolve(train.num_features)
        limits = Limits(
            threads=workers * cluster.threads_per_worker,
            memory_bytes=None if limit is None else limit // cluster.threads_per_worker,
            driver_bytes=free_memory_bytes(),
            disk_bytes=free,
        )
        way = _decide if job.model.loss == "square" else _decide_loss
        chosen, facts = way(job, prepared, store, resolved, earlier, limits)
        said = [] if frozen is None or not frozen.sentence() else [frozen.sentence()]
        if cluster.insecure:
            facts["notes"].append("insecure = true: the scheduler is reached without encryption or authentication")
        scaling = {} if frozen is None else {"scaling": frozen.to_dict()}
        facts |= {"notes": said + facts["notes"], "reused": scaling | facts.get("reused", {})}
        # a trial of large ranks may have taken more than the fit will
        facts["client_bytes"] = max(peak_rss_bytes(), CLIENT_BYTES + chosen.client_bytes)
        plan = Plan(
            num_rows=train.num_rows,
            num_features=train.num_features,
            num_targets=train.num_targets,
            kernel={"kernel": "precomputed"} if resolved is None else resolved.to_dict(),
            **vars(chosen) | facts | here,
        )
    refusal, hint = _refusal(plan, store)
    return replace(plan, refusal=refusal, hint=hint)


def kernel_of(kernel: dict[str, Any]) -> Kernel | None:
    """The kernel of a plan; None for a precomputed matrix."""
    return None if kernel == {"kernel": "precomputed"} else kernel_from_dict(kernel)


def _tiles_of(train: Dataset, kernel: Kernel | None, alpha: Sequence[float]) -> dict[str, list[Any]]:
    """By which tiles of these rows are known."""
    described = None if kernel is None else kernel.to_dict()
    return {"kernel": [described], "rows_digest": [train.digest], "n": [train.num_rows], "alpha": [*alpha, None]}


def _decide(
    job: JobSpec, prepared: Prepared, store: Any, kernel: Kernel | None, earlier: dict[str, Any] | None, limits: Limits
) -> tuple[Candidate, dict[str, Any]]:
    """The fastest exact way to the answer of the square loss, or that of an ``earlier`` fit of fewer or more rows.

    With what a plan says of it besides its price.
    """
    train, choice, alpha = prepared.train, job.solver.settings(), tuple(np.atleast_1d(job.model.alpha).tolist())
    n, t = train.num_rows, train.num_targets
    if len(alpha) not in (1, t):
        raise ParameterError(
            f"[model] alpha has {len(alpha)} values for {t} target{'s' * (t > 1)}; one, or one for each, expected"
        )
    problem = Problem(
        num_rows=n,
        num_features=train.num_features,
        num_targets=t,
        kernel=kernel,
        alpha=alpha,
        fit_intercept=job.model.fit_intercept,
        primal=job.solver.edge is None,
        drift_limit=prepared.center_drift_limit,
    )
    edge = job.solver.edge
    if earlier is not None:
        is_cg, rank = earlier["solver"] == "cg", earlier["rank"]
        choice = replace(
            choice,
            **{name: earlier[name] for name in ("solver", "precision", "gram")},
            rank=rank if is_cg and rank else "auto",
            preconditioner="none" if is_cg and not rank and choice.preconditioner == "auto" else choice.preconditioner,
        )
        edge = int(earlier["tile_size"])
    known = _tiles_of(train, kernel, alpha)
    if limits.disk_bytes is not None:
        limits = replace(limits, disk_bytes=limits.disk_bytes + present_bytes(store, known))
    machine = cache(partial(_machine, job, kernel, train.num_features, store, limits.threads, earlier))

    def trial(seconds: float) -> Trial | None:
        return sample_trial(train, kernel, seconds, seed=choice.seed) if kernel and earlier is None else None

    decision = decide(
        problem,
        choice,
        limits,
        tile_size=edge,
        machine=machine,
        trial=trial,
        always_measure=True,
        rows=(store, train),
    )
    chosen, reused, notes, reasons = decision.chosen, {}, [], decision.reasons
    if job.leaves_out:
        wanted, known_rows = job.evaluate and job.evaluate.intervals, usable_rows(train)
        if wanted and wanted > (most := most_coverage(known_rows)):
            said = f"[evaluate] intervals = {wanted:g} of {known_rows:,} training rows"
            raise ParameterError(said, hint=f"at most {most:g} for so few rows")
        chosen = with_leave_one_out(chosen, problem, limits, machine())
    center = center_of_lineage(decision.settings(), train, store)
    if center is not None and center.sentence():
        reused["center"] = center.to_dict()
        notes.append(center.sentence())
    present = present_bytes(store, known | {"tile_size": [chosen.tile_size]})
    if decision.continued is not None:
        reused["factor"] = decision.continued.to_dict()
        notes.append(decision.continued.sentence())
        present = max(present, decision.continued.num_bytes)
    if earlier is not None:
        reasons = dict.fromkeys(reasons, "as the first attempt of this run decided") | earlier["reasons"]
    grid, iterations = TileGrid(n, chosen.tile_size), 0.0 if chosen.iterations is None else chosen.iterations.high
    # one pass of cg counts as one task
    num_tasks, flops = round(iterations), 2.0 * n * n * t * iterations + 2.0 * n * chosen.rank**2
    if chosen.solver == "cholesky":  # tiles of factors and of a stored Gram matrix, sweeps and residuals
        m, flops = problem.num_alphas, n**3 / 3 * problem.num_alphas
        num_tasks = grid.num_lower * (m + (chosen.gram == "stored")) + (2 * m + 1) * grid.num_tiles
    elif chosen.solver == "primal":
        flops = problem.primal_flops + 4.0 * n * problem.num_explicit * t
    facts: dict[str, Any] = {
        "alpha": list(alpha),
        "num_tiles_per_side": grid.num_tiles,
        "num_tasks": num_tasks,
        "flops": flops,
        "disk_present_bytes": present,
        "candidates": [item.to_dict() for item in decision.candidates],
        "calibration": asdict(machine()),
        "reasons": reasons,
        "reused": reused,
        "notes": notes,
    }
    if choice.solver == "nystrom":
        nystrom = choice.nystrom(usable_rows(train))
        facts["nystrom"] = nystrom.to_dict()
        notes.append(f"an approximation: {nystrom.num_centers:,} centres stand for {n:,} rows")
    return chosen, facts


def decision_of(job: JobSpec, prepared: Prepared, plan: Plan) -> Decision:
    """What a plan decided, as it is written down, and what else may be done, by its prices."""
    limit, free = plan.memory_limit_bytes, plan.disk_free_bytes
    return Decision(
        problem=Problem(
            **{name: getattr(plan, name) for name in ("num_rows", "num_features", "num_targets")},
            kernel=kernel_of(plan.kernel),
            alpha=tuple(plan.alpha),
            fit_intercept=job.model.fit_intercept,
            drift_limit=prepared.center_drift_limit,
        ),
        choice=SolverChoice(**plan.choice),
        limits=Limits(
            threads=plan.threads,
            memory_bytes=None if limit is None else limit // plan.threads_per_worker,
            disk_bytes=None if free is None else free + plan.disk_present_bytes,
        ),
        tile_size=job.solver.edge,
        machine=lambda: Machine(**plan.calibration),  # type: ignore[arg-type]
        chosen=plan,
        candidates=tuple(Candidate.from_dict(item) for item in plan.candidates),
    )


def _decide_loss(
    job: JobSpec, prepared: Prepared, store: Any, kernel: Kernel | None, earlier: dict[str, Any] | None, limits: Limits
) -> tuple[Candidate, dict[str, Any]]:
    """The way to the answer of another loss than the square, which has one."""
    train, model = prepared.train, job.model
    n, d = train.num_rows, train.num_features
    losses = check_loss_targets(job, train)
    solver = loss_solver(losses[0])
    C, alpha = (list(values) for values in zip(*model.path, strict=True))
    problem = Problem(
        num_rows=n,
        num_features=d,
        # one problem for two classes, else one for each class, target or quantile
        num_targets=len(C) * (1 if train.classes and len(train.classes) == 2 else max(len(losses), train.num_targets)),
        kernel=kernel,
        alpha=tuple(alpha),
        fit_intercept=model.fit_intercept,
    )
    threads = min(limits.threads, cpu_count())
    machine = _machine(job, kernel, d, store, threads, earlier)
    chosen, memory = loss_candidate(problem, solver, machine), limits.driver_bytes
    if memory is not None and chosen.client_bytes > memory:
        needed = f"{solver} needs {size(chosen.client_bytes)} in this process, {size(memory)} are free"
        chosen = replace(chosen, infeasible=needed)
    passes = NEWTON_PRODUCTS if solver == "newton" else DECOMPOSITION_PASSES
    return chosen, {
        "alpha": alpha,
        "num_tiles_per_side": 0,
        "num_tasks": 0,
        "flops": 2.0 * n * n * (d + problem.num_targets) * passes,
        "disk_present_bytes": 0,
        "calibration": asdict(machine),
        "reasons": {"solver": f"the {model.loss} loss {'is smooth' if solver == 'newton' else 'has corners'}"},
        "loss": {"loss": model.loss, "C": C if len(C) > 1 else C[0], **model.loss_parameters},
        "notes": [
            f"{solver} runs in the driver's process, with {threads} thread{'s' * (threads > 1)}; workers predict",
            f"{chosen.seconds[solver]:.1f} s for it is a rough estimate: it depends on how many rows are support "
            "vectors",
        ],
    }


def _machine(
    job: JobSpec, kernel: Kernel | None, num_features: int, store: Any, threads: int, earlier: dict[str, Any] | None
) -> Machine:
    """Rates as the ``earlier`` attempt measured them, which are as good and cost no second, or as they are now."""
    known = (earlier or {}).get("calibration") or {}
    if known.get("threads") == threads:
        return Machine(**known)
    where: Literal["new cluster", "client"] = "new cluster" if job.cluster.scheduler == "local" else "client"
    return measure_machine(kernel, num_features, store, threads=threads, where=where)


def _refusal(plan: Plan, store: Any) -> tuple[str, str]:
    """Why the job cannot run, and what would help; two empty texts when it can."""
    limit, free = plan.memory_limit_bytes, plan.disk_free_bytes
    is_direct, name = plan.solver == "cholesky", plan.solver
    if "cannot hold a task" in plan.infeasible:
        return plan.infeasible, "raise memory_limit"
    if plan.loss is not None and plan.infeasible:
        return plan.infeasible, "give fewer rows, or a machine with more memory"
    if limit is not None and plan.task_bytes > limit:
        itemsize, lower = 8 if plan.precision == "float64" else 4, {"nystrom": "num_centers", "cg": "rank"}
        edges = range(128, plan.tile_size, 128)
        fitting = [edge for edge in edges if task_bytes(edge, plan.num_features, itemsize) <= 0.8 * limit]
        hint = f"set tile_size to at most {fitting[-1]}" if fitting else "raise memory_limit"
        hint = f"lower {lower[name]}, or raise memory_limit" if name in lower else hint
        what = f"a task with tiles of {plan.tile_size}" if is_direct else f"a task of {name} {plan.precision}"
        return f"{what} needs {size(plan.task_bytes)}, a worker may use {size(limit)}", hint
    needed, reserve = plan.disk_needed_bytes, DISK_RESERVE_BYTES
    if free is not None and needed + reserve > free:
        smaller_way = ", or name = 'cg' (no factor)" if is_direct else ""
        if "float64 factor" in plan.disk_bytes:
            smaller_way = ", or ask for no leave-one-out and no intervals, which need a factor"
        return (
            f"the job writes {size(needed)} to {store}, and {size(reserve)} are kept free there so that the "
            f"disk is not full before the fit is done; {size(free)} are free",
            f"free {size(needed + reserve - free)} more there, give an [output] store on another disk{smaller_way}",
        )
    return "", ""
