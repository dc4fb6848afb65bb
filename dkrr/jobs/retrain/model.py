"""From rows to a model in production: search, fit, evaluate, gate, promote.

A stage that is done is a document whose name is a hash of its inputs (:func:`step`), so a job that is started again
after any interruption does what is missing and nothing else. A fit is an ordinary job on the rows that are not held
out; its run is named by the same hash, so one that was interrupted is found and continued. All fits of a model share
one store, where each looks for the factor of the one before.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset
from dkrr.engine.tasks import Progress
from dkrr.errors import DkrrError, InterruptedRunError, JobFileError, LockedError, StoreError
from dkrr.jobs.monitor import Monitor
from dkrr.jobs.predict import executor_of_size
from dkrr.jobs.prepare import prepare
from dkrr.jobs.registry import NamedModel
from dkrr.jobs.retrain.drift import compare_means
from dkrr.jobs.retrain.gate import enough_rows, judge, score_of
from dkrr.jobs.retrain.history import LAST, History, digests, hash_of, held_out_bytes
from dkrr.jobs.retrain.report import RetrainSummary
from dkrr.jobs.retrain.spec import RetrainSpec
from dkrr.jobs.run import drive_job, job_executor
from dkrr.jobs.run_directory import RunDirectory, utc_now
from dkrr.jobs.spec import JobSpec
from dkrr.jobs.tune import tune_job
from dkrr.models.model import load_model
from dkrr.models.prediction import score_dataset
from dkrr.store.documents import plain
from dkrr.store.files import children, join, name_of, note_user
from dkrr.store.interruption import fence_holder

PROMOTIONS = 3  # how often a model is judged anew because another one came into production meanwhile


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
    # the parameters that were found last are kept until others are asked for, or the next search
    given = spec.job.to_dict()["model"]
    is_same = last.get("given") == given
    model, since = (last["model"], last["fits_since_search"] + 1) if is_same else (given, 1)
    summary.searched = is_same and spec.retrain.search_every is not None and since >= spec.retrain.search_every
    mask = history.held_out(dataset)
    held_out, mask_path, mask_digest = int(np.count_nonzero(mask)), None, ""
    if spec.holdout.path is None and held_out < spec.gate.min_rows:
        check = enough_rows(spec.gate, held_out)
        _note_checks(summary, [check._replace(sentence=f"{check.sentence}; nothing was fitted")._asdict()])
    else:
        if held_out:  # also those of an earlier [holdout], where rows of their own judge now
            mask_path, mask_digest = _save_mask(directory, mask, dataset.kept)
        if seen := history.held_out_again(dataset, history.known_rows()):
            raise JobFileError(
                f"{seen} are in {spec.retrain.data}: they were added to it, and fits train on them",
                hint="judge by rows that no fit has seen",
            )
        if summary.searched:
            monitor.phase("search")
            search = _job(spec, given, mask_path, "search", spec.job.tune)
            model = step(directory, "search", {"tick": tick}, lambda: _search(search, monitor))["model"]
        inputs = {
            "rows": digests(dataset),
            "held_out": [mask_digest, held_out_bytes(spec)],
            "standardize": spec.job.data.standardize,
            "model": model,
            "solver": spec.job.to_dict()["solver"],
        }
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
        for number in range(PROMOTIONS):
            try:
                checks = _judge(history, dataset, job, key, fit, named, lease_epoch, monitor)
                break
            except LockedError:
                monitor.check()
                if number + 1 == PROMOTIONS:
                    raise
        summary.outcome = "promoted"
        _note_checks(summary, checks)
    return {"given": given, "model": model, "fits_since_search": 0 if summary.searched else since, "tick": tick}


def _note_checks(summary: RetrainSummary, checks: list[dict[str, Any]]) -> None:
    summary.checks = checks
    summary.reasons.extend(check["sentence"] for check in checks if not check["passed"])


def _save_mask(directory: RunDirectory, held_out: NDArray[np.bool_], kept: NDArray[np.bool_]) -> tuple[str, str]:
    """Write a mask of the rows that were ``kept`` as the file that a job names; its path or address, and its digest."""
    mask = np.zeros(len(kept), dtype=bool)
    mask[kept] = held_out
    np.save(buffer := io.BytesIO(), mask)
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    name = f"masks/{digest[:32]}.npy"
    if not directory.has(name):
        directory.write_bytes(name, buffer.getvalue())
    return directory.path(name), digest


def _job(spec: RetrainSpec, model: dict[str, Any], mask_path: str | None, run: str, tune: Any) -> JobSpec:
    """The job that fits the data set as it is now."""
    document = spec.job.to_dict()
    document.pop("tune", None)
    evaluate = {
        name: value
        for name, value in document.get("evaluate", {}).items()
        if name not in ("path", "mask", "mask_column", "fraction")
    }
    given = {"mask": mask_path, "path": spec.holdout.path, "metric": spec.gate.metric}
    document["evaluate"] = evaluate | {name: value for name, value in given.items() if value is not None}
    # of [data] standardize is about the rows of a data set, the rest about files: so are held-out rows of their own
    data = {name: value for name, value in document["data"].items() if name == "standardize" or spec.holdout.path}
    document["data"] = {**data, "path": spec.retrain.data}
    document["model"] = model
    runs = RunDirectory(spec.directory).path(f"runs/{run}")
    document["output"] = {"directory": runs, "store": spec.store, "keep": spec.job.output.keep}
    job = JobSpec.from_dict(document)
    return job if tune is None else job.model_copy(update={"tune": tune})


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
    directory = RunDirectory(job.output.directory)
    result = directory.read("result.json")
    if result is None:
        drive_job(job, directory, progress=progress, source=job.to_toml().encode())
        result = directory.read("result.json") or {}
    if result["data"]["digests"] != digests(dataset)[1:]:
        directory.remove_all()
        raise InterruptedRunError(f"{dataset.path} was changed before the fit had opened it", hint="start again")
    note_user(spec.store, spec.retrain.registry)
    same = ("solver", "precision", "converged", "relative_residual", "backward_error", "message")
    found = {name: result[name] for name in same}
    found |= {name: result["plan"][name] for name in ("num_rows", "alpha")}
    found |= {name: result.get(name) for name in ("reused", "score", "metric")}
    found |= {
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
        named.promote(version, expected=production, lease_epoch=lease_epoch, why="retrain")
    return list(checks)


def forget_runs(directory: RunDirectory, run: str) -> None:
    """Remove all runs but that of the last fit: the models of earlier ones are versions by now.

    Their factors are garbage when no alias needs them.
    """
    folder = join(directory.location, "runs")
    with contextlib.suppress(OSError, DkrrError):  # what stays is small, and goes next time
        for name in children(folder) if run else []:
            if name != name_of(run):
                RunDirectory(join(folder, name)).remove_all()
