"""From rows to a model in production: search, fit, evaluate, gate, promote.

A stage that is done is a document whose name is a hash of its inputs (:func:`step`), so a job that is started again
after any interruption does what is missing and nothing else. A fit is an ordinary job on the rows that are not held
out; its run is named by the same hash, so one that was interrupted is found and continued. All fits of a model share
one store, where each looks for the factor of the one before.

The gate: both models, the new one and that in production, predict the same held-out rows, each with its own scaling,
and are compared in the target's units. Neither has seen those rows, in any fit. A gate does not trust: every check says
what was seen and what was allowed, and all of them must pass.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset
from dkrr.engine.tasks import Progress
from dkrr.errors import DataError, DkrrError, InterruptedRunError, JobFileError, LockedError, StoreError
from dkrr.jobs.driver import Monitor
from dkrr.jobs.history import LAST, Finding, History, compare_means, digests, hash_of, open_rows
from dkrr.jobs.predict import executor_of_size
from dkrr.jobs.prepare import prepare
from dkrr.jobs.registry import NamedModel
from dkrr.jobs.retrain_spec import GateSpec, RetrainSpec
from dkrr.jobs.run import drive_job, job_executor
from dkrr.jobs.run_directory import RunDirectory, utc_now
from dkrr.jobs.spec import JobSpec
from dkrr.jobs.tune import tune_job
from dkrr.models.model import load_model
from dkrr.models.prediction import LOWER_IS_BETTER, Score, score_dataset
from dkrr.store.documents import plain
from dkrr.store.files import children, join, name_of, note_user
from dkrr.store.interruption import fence_holder

if TYPE_CHECKING:
    from dkrr.jobs.retrain import RetrainSummary

PROMOTIONS = 3  # how often a model is judged anew because another one came into production meanwhile
PROMOTED = "retrain"  # why, in the history of the aliases


def step(
    directory: RunDirectory,
    name: str,
    inputs: dict[str, Any],
    work: Callable[[], dict[str, Any]] | None,
    *,
    is_there: Callable[[dict[str, Any]], bool] = bool,
) -> dict[str, Any]:
    """What a stage finds for its inputs: one document, made by ``work`` unless it is there; plain data.

    Parameters
    ----------
    work
        None: nothing is made, and nothing ({}) is found where it has not been done.
    is_there
        Of a stage that makes more than its result: whether that is there still. It is made again where not.
    """
    document = f"records/{name}/{hash_of(name, inputs)[:32]}.json"
    found = (directory.read(document) or {}).get("result", {})
    if work is None or (found and is_there(found)):
        return dict(found)
    began = time.perf_counter()
    result = plain(work())
    seconds = round(time.perf_counter() - began, 3)
    directory.write(
        document, {"stage": name, "inputs": plain(inputs), "result": result, "seconds": seconds, "at": utc_now()}
    )
    return dict(result)


def improve(
    history: History, dataset: Dataset, tick: str, named: NamedModel, summary: RetrainSummary, monitor: Monitor
) -> dict[str, Any] | None:
    """Fit the rows that are there, unless that has been done under the same rules, and promote what passes the gate.

    Returns
    -------
    last : dict
        For ``last.json``, to be written when it was told what happened; None where nothing did.
    """
    spec, directory = history.spec, history.directory
    last = directory.read(LAST) or {}
    if last.get("tick") == tick:
        summary.outcome = "kept"
        return None
    # the parameters that passed last are kept until others are asked for, or the next search
    given = spec.to_dict()["model"]
    is_same = last.get("given") == given
    model, since = (last["model"], last["fits_since_search"]) if is_same else (given, 0)
    found_before = model
    mask = history.held_out(dataset)
    fitted = last.get("fitted")
    held_out, mask_path, mask_digest = int(np.count_nonzero(mask)), None, ""
    if spec.holdout.path is None and held_out < spec.gate.min_rows:
        check = enough_rows(spec.gate, held_out)
        summary.checks = [check._replace(sentence=f"{check.sentence}; nothing was fitted")._asdict()]
    else:
        if held_out:  # also those of an earlier [holdout], where rows of their own judge now
            mask_path, mask_digest = _save_mask(directory, mask, dataset.kept)
        if seen := history.held_out_again(dataset, history.known_rows()):
            raise JobFileError(
                f"{seen} are in {spec.retrain.data}: they were added to it, and fits train on them",
                hint="judge by rows that no fit has seen",
            )
        inputs = {
            "rows": digests(dataset),
            "held_out": [mask_digest, spec.held_out_bytes()],
            "standardize": spec.data.standardize,
            "solver": spec.to_dict()["solver"],
            **spec.kept(),
        }
        before, fitted = fitted, hash_of(inputs, given)
        since += fitted != before  # where only the gate is another one, nothing is fitted
        summary.searched = is_same and spec.retrain.search_every is not None and since >= spec.retrain.search_every
        if summary.searched:
            monitor.phase("search")
            search = _job(spec, given, mask_path, "search", spec.tune)
            asked = {"tick": tick, "tune": spec.tune and spec.tune.model_dump(mode="json")}
            model = step(directory, "search", asked, lambda: _search(search, monitor))["model"]
        inputs["model"] = model
        key = hash_of("fit", inputs)
        job = _job(spec, model, mask_path, key[:16], None)
        lease_epoch = int(fence_holder()["epoch"])
        facts = {"rows_digest": dataset.digest, "data_rows": dataset.num_rows, "held_out": held_out, "model": model}
        monitor.phase("fit")
        fit = step(
            directory,
            "fit",
            inputs,
            lambda: _fit(spec, job, dataset, named, key, facts, lease_epoch, monitor),
            is_there=lambda found: named.version(str(found["version"])) is not None,
        )
        summary.version, summary.num_rows, summary.fit = str(fit["version"]), fit["num_rows"], fit
        # from here on nobody with an earlier lease moves an alias
        named.fence(lease_epoch)
        for left in reversed(range(PROMOTIONS)):
            try:
                summary.checks = _judge(history, dataset, job, key, fit, named, lease_epoch, monitor)
                break
            except LockedError:
                monitor.check()
                if not left:
                    raise
        summary.outcome = "promoted" if summary.checks else "kept"  # it is there already, by a person, say
    summary.reasons.extend(check["sentence"] for check in summary.checks if not check["passed"])
    if summary.searched:  # what the gate refuses is not gone on with
        since, model = 0, model if all(check["passed"] for check in summary.checks) else found_before
    return {"given": given, "model": model, "fits_since_search": since, "fitted": fitted, "tick": tick}


def _save_mask(directory: RunDirectory, held_out: NDArray[np.bool_], kept: NDArray[np.bool_]) -> tuple[str, str]:
    """Write a mask of the rows that were ``kept`` as the file that a job names; its path or address, and its digest."""
    mask = np.zeros(len(kept), dtype=bool)
    mask[kept] = held_out
    np.save(buffer := io.BytesIO(), mask)
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    name = f"masks/{digest[:32]}.npy"
    if directory.read_bytes(name) != buffer.getvalue():
        directory.write_bytes(name, buffer.getvalue())
    return directory.path(name), digest


def _job(spec: RetrainSpec, model: dict[str, Any], mask_path: str | None, run: str, tune: Any) -> JobSpec:
    """The job that fits the data set as it is now."""
    document = spec.job_tables()
    held_out = {"path": spec.holdout.path, "mask": mask_path, "mask_column": None, "fraction": None}
    metric = {} if spec.gate.metric is None else {"metric": spec.gate.metric}
    evaluate = document.get("evaluate", {}) | held_out | metric
    # of [data] standardize is about the rows of a data set, the rest about files: so are held-out rows of their own
    data = {name: value for name, value in document["data"].items() if name == "standardize" or spec.holdout.path}
    runs = RunDirectory(spec.directory).path(f"runs/{run}-{{id}}")  # what an interrupted one was asked for may change
    document |= {
        "evaluate": {name: value for name, value in evaluate.items() if value is not None},
        "data": {**data, "path": spec.retrain.data},
        "model": model,
        "output": {"directory": runs, "store": spec.store, "keep": spec.output.keep},
    }
    document.pop("tune", None)
    return JobSpec.from_dict(document).model_copy(update={"tune": tune})


def _search(job: JobSpec, progress: Progress | None) -> dict[str, Any]:
    """Kernel, widths and alpha that ``dkrr tune`` chooses on the rows that are not held out."""
    with tempfile.TemporaryDirectory(prefix="dkrr-search-") as folder:
        path = Path(folder, "best.toml")
        tune_job(job, path, picture=False, progress=progress)
        return {"model": JobSpec.load(path).to_dict()["model"]}


def _fit(
    spec: RetrainSpec,
    job: JobSpec,
    dataset: Dataset,
    named: NamedModel,
    key: str,
    facts: dict[str, Any],
    lease_epoch: int,
    progress: Progress | None,
) -> dict[str, Any]:
    """Fit ``dataset``, and publish the model as a version named "candidate"; plain facts about both.

    Raises
    ------
    InterruptedRunError
        The rows were changed before the fit had opened them: which of them are held out is not known.
    """
    directory = RunDirectory(job.directory)
    result = directory.read("result.json")
    others = InterruptedRunError(f"{dataset.path} was changed before the fit had opened it", hint="start again")
    if result is None:
        try:
            drive_job(job, directory, progress=progress, source=job.to_toml().encode())
        except DataError as exc:  # the mask is one of fewer rows, say
            if (now := open_rows(spec)) is None or digests(now) != digests(dataset):
                raise others from exc
            raise
        result = directory.read("result.json") or {}
    if result["data"]["digests"] != digests(dataset)[1:4]:
        directory.remove_all()
        raise others
    note_user(spec.store, spec.retrain.registry)
    same = ("solver", "precision", "converged", "relative_residual", "backward_error", "message")
    found = {
        **{name: result[name] for name in same},
        **{name: result["plan"][name] for name in ("num_rows", "alpha")},
        **{name: result.get(name) for name in ("reused", "score", "metric")},
        "run": directory.location,
        "gap": [certificate["gap"] for certificate in result.get("certificates") or []],
        "seconds": result["seconds"].get("total"),
    }
    facts |= {name: found[name] for name in ("relative_residual", "gap", "reused") if found[name] != []}
    # the rows that the next fit continues, and the scaling that is frozen with them: named here, they are no garbage
    facts["training_rows"] = result["training_rows"]
    if found["score"] is not None:
        facts["score"] = {found["metric"]: score_of(found["score"]).value(found["metric"])}
    version = named.add(result["model_path"], key=key, facts=facts, lease_epoch=lease_epoch)
    return {**found, "version": version.id}


def _judge(
    history: History,
    dataset: Dataset,
    job: JobSpec,
    key: str,
    fit: dict[str, Any],
    named: NamedModel,
    lease_epoch: int,
    monitor: Monitor,
) -> list[dict[str, Any]]:
    """Compare a version with what is in production, and promote it if it passes; the checks.

    Raises
    ------
    LockedError
        Something else came into production meanwhile, or another process has the lease.
    """
    spec, version, aliases = history.spec, str(fit["version"]), named.aliases().targets
    production, drift = aliases.get("production"), history.freeze_reference(dataset)

    def gate_inputs(other: str | None) -> dict[str, Any]:
        rules = {"gate": spec.gate.model_dump(mode="json"), "drift": spec.drift.model_dump(mode="json")}
        return {"fit": key, "production": other, **rules}

    if production == version:  # promoted by a job that was interrupted afterwards, or by a person
        found = step(history.directory, "gate", gate_inputs(aliases.get("previous")), None).get("checks", [])
        return found if all(check["passed"] for check in found) else []

    left = [entry for entry in named.aliases().history if entry["changed"].get("production", [None])[0] == version]
    if left and left[-1]["why"] != PROMOTED:
        said = f"{version} was in production, and {production or 'nothing'} was put there instead"
        return [Check("rollback", False, f"{said}: `dkrr models promote` undoes that")._asdict()]

    def evaluate() -> dict[str, Any]:
        test = prepare(job, spec.store, dataset).test
        if test is None:
            raise StoreError("the fit has no held-out rows", hint="say which in [holdout]")

        def score(other: str) -> dict[str, Any]:
            model = load_model(named.resolve(other).model_path)
            with executor_of_size(model, test.num_rows, lambda: job_executor(job, spec.store)) as executor:
                return asdict(score_dataset(model, test, executor, monitor, store=spec.store)[0])

        # a file of held-out rows may have been replaced since the fit: both models see what it holds now
        candidate = score(version) if spec.holdout.path else fit["score"]
        there = None if production is None else score(production)
        return {"num_rows": test.num_rows, "candidate": candidate, "production": there}

    monitor.phase("evaluate")
    scores = step(history.directory, "evaluate", {"fit": key, "production": production}, evaluate)
    monitor.phase("gate")

    def judged() -> dict[str, Any]:
        checks = judge(spec.gate, fit, scores, production, compare_means(drift, dataset, spec.drift))
        return {"checks": [check._asdict() for check in checks]}

    checks = step(history.directory, "gate", gate_inputs(production), judged)["checks"]
    if all(check["passed"] for check in checks):
        monitor.phase("promote")
        named.promote(version, expected=production, lease_epoch=lease_epoch, why=PROMOTED)
    return list(checks)


def forget_runs(directory: RunDirectory, run: str) -> None:
    """Remove all runs of retraining but that of the last fit: the models of earlier ones are versions by now.

    Their factors are garbage when no alias needs them.
    """
    folder = join(directory.location, "runs")
    with contextlib.suppress(OSError, DkrrError):  # what stays is small, and goes next time
        for name in children(folder) if run else []:
            if name != name_of(run) and re.fullmatch(r"[0-9a-f]{16}(?:-[0-9a-f]{12})?", name):
                RunDirectory(join(folder, name)).remove_all()


# --- the gate ---------------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    """One thing that must hold: whether it does, and a sentence with what was seen and allowed."""

    name: str
    passed: bool
    sentence: str


def judge(
    gate: GateSpec, fit: dict[str, Any], scores: dict[str, Any], production: str | None, drift: list[Finding]
) -> list[Check]:
    """The checks of a gate.

    Parameters
    ----------
    fit
        ``relative_residual``, or ``gap`` of another loss than the square, per target, and ``converged``.
    scores
        ``num_rows`` of the held-out rows, and scores of the ``candidate`` and of what is in ``production``, or None.
    production
        The version that is compared with.
    drift
        What is beyond its limit in the statistics of the whole data set.
    """
    num_rows, candidate = int(scores["num_rows"]), score_of(scores["candidate"])
    figure, values = ("duality gap", fit["gap"]) if fit.get("gap") else ("relative residual", fit["relative_residual"])
    worst = max((_number(value, math.inf) for value in values), default=math.inf)
    metric = gate.metric or ("log_loss" if candidate.log_loss is not None else candidate.metric)
    columns = ", ".join(sorted({finding.column for finding in drift}))
    checks = [
        enough_rows(gate, num_rows),
        Check(
            "residual",
            bool(fit["converged"]) and worst <= gate.max_residual,
            f"{figure} {worst:.2g}, at most {gate.max_residual:.2g} allowed"
            + ("" if fit["converged"] else "; the solver did not converge"),
        ),
        _against_constant(gate, metric, candidate),
    ]
    there = None if scores["production"] is None else score_of(scores["production"])
    if there is not None and metric == "log_loss" and there.log_loss is None:
        metric = "accuracy"  # of a loss without probabilities
    # a pinball loss is that of its quantile, which scores of earlier releases do not say
    says = candidate.levels is not None or candidate.pinball is None
    if there is not None and says and there.levels != candidate.levels:
        others = f"{candidate.levels} are others than {there.levels} of {production} in production"
        checks.append(Check("score", True, f"the quantiles {others}: not compared"))
    elif there is not None:
        new, old = candidate.value(metric), there.value(metric)
        is_lower = metric in LOWER_IS_BETTER
        bar = old * (1 + gate.tolerance) if is_lower else old - gate.tolerance
        sentence = (
            f"{metric} {new:.6g} on {candidate.num_rows:,} held-out rows, {old:.6g} of {production} in production, "
            f"at {'most' if is_lower else 'least'} {bar:.6g} allowed"
        )
        checks.append(Check("score", new <= bar if is_lower else new >= bar, sentence))
    sentence = f"the data set has drifted in {columns}: " + "; ".join(finding.sentence for finding in drift[:3])
    checks.append(Check("drift", not drift, sentence if drift else "the data set is like the frozen one"))
    return checks


def enough_rows(gate: GateSpec, num_rows: int) -> Check:
    """Whether there are enough held-out rows to judge by."""
    sentence = f"{num_rows:,} held-out rows, at least {gate.min_rows:,} needed to judge"
    return Check("held-out rows", num_rows >= gate.min_rows, sentence)


def _against_constant(gate: GateSpec, metric: str, candidate: Score) -> Check:
    """Whether something was learnt: r2, or the same of another metric, by which the best constant has 0."""
    constant = (candidate.of_constant or {}).get(metric)
    if constant is not None:
        best = 0.0 if metric in LOWER_IS_BETTER else 1.0
        gained = 1.0 - (best - candidate.value(metric)) / (best - constant) if constant != best else -math.inf
        return Check(
            "better than a constant",
            gained > gate.min_r2,
            f"{metric} {candidate.value(metric):.4g} on held-out rows, {constant:.4g} of the best constant: "
            f"{gained:.4g} of what is between it and {best:g} is gained, more than {gate.min_r2:g} needed",
        )
    # a class that no held-out row has tells nothing
    values = [value for value in candidate.r2 if candidate.accuracy is None or not math.isnan(value)]
    r2 = min((_number(value, -math.inf) for value in values), default=-math.inf)
    return Check(
        "better than the mean",
        r2 > gate.min_r2,
        f"r2 {r2:.4g} on held-out rows, more than {gate.min_r2:g} needed"
        + ("" if r2 > 0 else "; the mean of the targets predicts them as well: nothing was learnt that holds"),
    )


def score_of(record: dict[str, Any]) -> Score:
    """A score as a record has it: what was not finite became None."""
    lists = {name: value for name, value in record.items() if isinstance(value, list)}
    return Score(**record | {name: [_number(item, math.nan) for item in value] for name, value in lists.items()})


def _number(value: Any, otherwise: float) -> float:
    """A figure of a record, where what is not finite became None."""
    return otherwise if value is None or not math.isfinite(value) else float(value)
