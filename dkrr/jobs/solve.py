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
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import log
from typing import Any

import numpy as np

from dkrr._version import __version__
from dkrr.dataset import Dataset, Floats, RowArray
from dkrr.engine.tasks import RunSummary
from dkrr.errors import ConvergenceError, DkrrError
from dkrr.fit.choices import Candidate, FitSettings, Iterations, Limits, Problem, SolverChoice, settings_of
from dkrr.fit.fitting import FitResult, fit_rows, with_lineage
from dkrr.fit.inputs import store_given_matrix
from dkrr.fit.plan import Ways
from dkrr.fit.rates import Machine
from dkrr.jobs.loss_fit import fit_loss, loss_of
from dkrr.jobs.plan import Plan
from dkrr.jobs.prepare import Prepared
from dkrr.jobs.spec import JobSpec
from dkrr.jobs.tables import Shown, fit_facts
from dkrr.kernels import Kernel, kernel_from_dict
from dkrr.linalg.catalogue import Ancestor, ancestors, record_rows
from dkrr.linalg.losses.loss import make_loss
from dkrr.linalg.nystrom.solver import fit_nystrom
from dkrr.linalg.primal.solver import fit_primal
from dkrr.linalg.solution import NystromSettings, Solution
from dkrr.linalg.workspace import Workspace
from dkrr.models.leave_one_out import factor_settings, leave_one_out_rows
from dkrr.models.model import BLOCK_ROWS, Model, load_model
from dkrr.models.prediction import LOWER_IS_BETTER, Score, score_dataset
from dkrr.models.tiled import nystrom_parts, primal_details, primal_parts, solver_details, uncertainty_parts
from dkrr.models.uncertainty import loo_quantiles, recorded_factors
from dkrr.models.validation import check_target_sizes
from dkrr.store.files import delete_key, list_entries, place, remove_array, write_json
from dkrr.tiles import TileMatrix

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


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What a solver found.

    Parameters
    ----------
    solution
        How good it is.
    parts
        What a :class:`~dkrr.model.Model` is made of besides.
    details
        Of its provenance.
    train
        The rows that were solved for; those of a precomputed matrix are their numbers.
    settings
        Of the fit; None of another loss than the square.
    given, source_digest
        A precomputed matrix in tiles, and its digest.
    tiles
        Factors and Gram matrix, where there are any.
    history
        Of a loss: [iteration, gap, violation] of some iterations of each target.
    """

    solution: Solution
    parts: dict[str, Any]
    details: dict[str, Any]
    train: Dataset
    settings: FitSettings | None = None
    given: TileMatrix | None = None
    source_digest: str = ""
    tiles: FitResult | None = None
    history: list[Any] = field(default_factory=list)


def solve_and_save(job: JobSpec, prepared: Prepared, plan: Plan, workspace: Workspace, directory: str) -> FitSummary:
    """Solve as ``plan`` says and save ``model.zarr`` in the run's ``directory``; seconds and score are still missing.

    Raises
    ------
    NumericalError, DataError, StoreError, LockedError
        See :func:`dkrr.fit.fitting.fit_rows`.
    """
    solve = _tiles if plan.loss is None else _losses
    if plan.nystrom is not None or plan.solver == "primal":
        solve = _features
    path = place(directory, "model.zarr")
    with solve(job, prepared, plan, workspace, directory) as fits:
        models = [_model(prepared, fitted, plan, workspace) for fitted in fits]
        points = _score_path(job, models, prepared.test, workspace, directory) if len(fits) > 1 else []
        best = next((number for number, point in enumerate(points) if point["chosen"]), 0)
        model, fitted = models[best], fits[best]
        # the figures of the model whose place it takes go first: they are not its own
        delete_key(directory, "result.json")
        model.write(path, overwrite=True)
        left_out = _leave_out(job, fitted, workspace, path, directory) if job.leaves_out else None
    if model.kernel is not None and (fitted.tiles is not None or plan.loss is not None):
        remember(workspace.store, prepared.train, model.kernel, model.provenance["alpha"], path, loss_of(plan))
    factor, tiles, solution = workspace.phases.get("factorise", RunSummary()), fitted.tiles, model.solution
    loss: dict[str, Any] = {}
    if plan.loss is not None:
        loss = {"loss": {**plan.loss, "C": model.provenance["C"]}, "num_support": model.num_rows, "path": points}
        loss |= {"target_names": model.target_names, "history": fitted.history}
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
def _losses(
    job: JobSpec, prepared: Prepared, plan: Plan, workspace: Workspace, directory: str
) -> Iterator[list[Fitted]]:
    """By the solver of another loss than the square; one for each C."""
    with fit_loss(job, prepared, plan, workspace, directory, begin_from) as found:
        yield [
            Fitted(solution=parts.pop("solution"), parts=parts, details=details, train=prepared.train, history=history)
            for parts, details, history in found
        ]


@contextmanager
def _features(
    job: JobSpec, prepared: Prepared, plan: Plan, workspace: Workspace, directory: str
) -> Iterator[list[Fitted]]:
    """By centres that stand for the rows, or by explicit features."""
    train, (_, _, settings) = prepared.train, _asked(job, prepared, plan)
    check_target_sizes(train)
    with_intercept = settings.fit_intercept
    if plan.nystrom is not None:
        nystrom = NystromSettings(**plan.nystrom)
        found = fit_nystrom(
            train,
            settings.kernel,
            settings.alpha,
            nystrom,
            settings.iterative,
            workspace,
            precision=settings.precision,
            fit_intercept=with_intercept,
        )
        solution, parts = found.solution, nystrom_parts(found, settings.kernel)
        details = solver_details(settings, plan.nystrom)
    else:
        primal = fit_primal(train, settings.kernel, settings.alpha, workspace, fit_intercept=with_intercept)
        solution, parts, details = primal.solution, primal_parts(primal), primal_details(primal)
    yield [Fitted(solution=solution, parts=parts, details=details, train=train, settings=settings)]


@contextmanager
def _tiles(
    job: JobSpec, prepared: Prepared, plan: Plan, workspace: Workspace, directory: str
) -> Iterator[list[Fitted]]:
    """By a factor in tiles, or conjugate gradients."""
    train, given, digest = prepared.train, None, ""
    check_target_sizes(train)
    problem, choice, settings = _asked(job, prepared, plan)
    start, ways = None, None
    if settings.kernel is None:
        assert train.y is not None  # noqa: S101  (narrows the type)
        targets = train.y.read(0, train.num_rows)
        weight = None if train.weight is None else train.weight.read(0, train.num_rows)[:, 0]
        rows = _LazyMatrix(train)
        train, given, digest = store_given_matrix(rows, targets, weight, workspace.store, plan.tile_size)
    else:
        ways = _other_ways(job, plan, problem, choice)
    settings = with_lineage(settings, train, workspace.store, workspace.reused)
    if settings.kernel is not None and (settings.solver == "cg" or settings.precision == "mixed"):
        start = begin_from(train, settings.kernel, settings.alpha, None, workspace)
    try:
        fit = fit_rows(train, settings, workspace, given=given, source_digest=digest, start=start, ways=ways)
        with fit as result:
            settings, operator, solution = result.settings, result.operator, result.solution
            center = operator.rows.center if operator.rows is not None else None
            intercept = settings.fit_intercept
            parts = {
                "kernel": operator.kernel,
                "x_fit": None if operator.kernel is None else train.X,
                "dual_coef": result.dual_coef,
                "center": None if center is None else np.asarray(center),
                "intercept": result.intercept,
                **uncertainty_parts(train, result.dual_coef, intercept=intercept, converged=solution.converged),
            }
            details = solver_details(settings) | {"weight_digest": train.digest_weight}
            if job.output.keep != "model":
                details |= recorded_factors(workspace.store, result.factors)
            details |= {name: getattr(settings, name) for name in ("tile_size", "precision", "gram")}
            yield [
                Fitted(
                    solution=solution,
                    parts=parts,
                    details=details,
                    train=train,
                    settings=settings,
                    given=given,
                    source_digest=digest,
                    tiles=result,
                )
            ]
    finally:
        if given is not None:  # a copy of what the job's data holds
            remove_array(given.location)
            remove_array(train.path)


def _asked(job: JobSpec, prepared: Prepared, plan: Plan) -> tuple[Problem, SolverChoice, Any]:
    """The problem, the words it was asked with, and the fit with nothing left to choose."""
    choice = SolverChoice.from_dict(plan.choice)
    problem = Problem(
        num_rows=plan.num_rows,
        num_features=plan.num_features,
        num_targets=plan.num_targets,
        kernel=None if plan.kernel == {"kernel": "precomputed"} else kernel_from_dict(plan.kernel),
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
    return problem, choice, settings


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


def _model(prepared: Prepared, fitted: Fitted, plan: Plan, workspace: Workspace) -> Model:
    train = prepared.train
    columns = {
        "scaling": prepared.scaling,
        "y_is_1d": train.y_is_1d,
        "target_names": list(train.target_names or []),
    }
    solution = fitted.solution
    return Model(
        **(columns | fitted.parts),
        solution=solution if plan.loss is None else replace(solution, reused=dict(workspace.reused)),
        feature_names=list(train.feature_names or []),
        made_up=train.made_up,
        classes=None if train.classes is None else list(train.classes),
        provenance={
            "dkrr": __version__,
            "rows_digest": train.digest,
            "targets_digest": train.digest_y,
            "alpha": plan.alpha,
            **({} if plan.loss else {"tile_size": plan.tile_size, "gram": plan.gram}),
            "precision": plan.precision,
            **fitted.details,
        },
    )


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


def _leave_out(
    job: JobSpec, fitted: Fitted, workspace: Workspace, model_path: str, directory: str
) -> dict[str, Any] | None:
    """Leave-one-out of a run whose model is saved: the figures per target, in the units of y.

    None, with a warning, where the job allows a fit that did not converge, and this one is too far from a solution for
    leave-one-out: then the model has no quantiles. Its seconds are those of one phase.

    Cost
    ----
    That of :func:`dkrr.leave_one_out.leave_one_out_rows`: n^3 / 3 flops from a float64 factor.
    """
    assert job.evaluate is not None  # noqa: S101  (narrows the type)
    assert fitted.settings is not None  # noqa: S101  (narrows the type)
    model, location = load_model(model_path, verify=False), place(directory, "leave_one_out.zarr")
    remove_array(location)  # an earlier attempt may have left the figures of another one
    work, train = replace(workspace, phases={}), fitted.train
    tile_size = None if job.solver.tile_size == "auto" else int(job.solver.tile_size)
    settings = factor_settings(fitted.settings, train, work, model, tile_size)
    try:
        found = leave_one_out_rows(train, settings, work, model, given=fitted.given, source_digest=fitted.source_digest)
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
            _write_rows(location, name, values)
        write_json(location, "zarr.json", {"zarr_format": 3, "node_type": "group", "attributes": figures})
    return figures


def _write_rows(location: str, name: str, values: Floats) -> None:
    n, columns = values.shape
    rows = RowArray.create(location, name, num_rows=n, num_columns=columns, rows_per_chunk=min(BLOCK_ROWS, n))
    for number, (start, stop) in enumerate(rows.blocks()):
        rows.write_chunk(number, np.ascontiguousarray(values[start:stop]))


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
    for item in sorted(found, key=lambda item: (-item.num_rows, _distance(item, alpha))):
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


def _distance(item: Ancestor, alpha: Sequence[float]) -> float:
    """How far the alphas are apart."""
    mine, theirs = min(alpha), min(item.fields["alpha"])
    return abs(log(mine / theirs)) if mine > 0 and theirs > 0 else float(mine != theirs)
