"""The fit of a retrain job, and the search of its hyperparameters: an ordinary job on the rows that are not held out.

The run is named by a hash of its inputs, so a fit that was interrupted is found and continued. All fits of a model
share one store, where each looks for the factor of the one before.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from dkrr.dataset import Dataset
from dkrr.engine.tasks import Progress
from dkrr.errors import InterruptedRunError
from dkrr.jobs.claim import check_claim
from dkrr.jobs.registry import NamedModel
from dkrr.jobs.retrain.judge import score_of
from dkrr.jobs.retrain.records import Records, hash_of
from dkrr.jobs.retrain.spec import RetrainSpec
from dkrr.jobs.retrain.tick_key import WHITENING, digests, held_out_rows
from dkrr.jobs.run import drive_job
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.spec import JobSpec
from dkrr.jobs.tune import tune_job
from dkrr.store.files import children, join, note_user, read_json

__all__ = ["fit_job_of", "fit_key", "fit_version", "forget_runs", "given_model", "search_model"]


def given_model(spec: RetrainSpec) -> dict[str, Any]:
    """Kernel, widths and alpha that RETRAIN.toml asks for."""
    return dict(spec.job.to_dict()["model"])


def fit_job_of(spec: RetrainSpec, model: dict[str, Any], mask_path: str | None, key: str) -> JobSpec:
    """The job that fits the data set as it is now."""
    document = spec.job.to_dict()
    document.pop("tune", None)
    evaluate = dict(document.get("evaluate", {}))
    for name in ("path", "mask", "mask_column", "fraction"):
        evaluate.pop(name, None)
    if mask_path is not None:
        evaluate["mask"] = mask_path
    if spec.holdout.path is not None:
        evaluate["path"] = spec.holdout.path
    if spec.gate.metric is not None:
        evaluate["metric"] = spec.gate.metric
    # rows of their own are read as the incoming files are
    data = {name: value for name, value in document["data"].items() if name in WHITENING or spec.holdout.path}
    document["data"] = {**data, "path": spec.retrain.data}
    document["evaluate"] = evaluate
    document["model"] = model
    runs = RunDirectory(spec.directory).path(f"runs/{key[:16]}")
    document["output"] = {"directory": runs, "store": spec.store, "keep": spec.job.output.keep}
    return JobSpec.from_dict(document)


def fit_key(spec: RetrainSpec, dataset: Dataset, model: dict[str, Any], mask_digest: str) -> str:
    """Hash of everything that a fit depends on."""
    document = spec.job.to_dict()
    whitening = {name: document["data"].get(name) for name in WHITENING}
    return hash_of("fit", digests(dataset), mask_digest, held_out_rows(spec), whitening, model, document["solver"])


def search_model(spec: RetrainSpec, mask_path: str | None, progress: Progress | None) -> dict[str, Any]:
    """Kernel, widths and alpha that ``dkrr tune`` chooses on the rows that are not held out."""
    job = fit_job_of(spec, given_model(spec), mask_path, "search")
    if spec.job.tune is not None:
        job = job.model_copy(update={"tune": spec.job.tune})
    with tempfile.TemporaryDirectory(prefix="dkrr-search-") as folder:
        path = Path(folder, "best.toml")
        tune_job(job, path, picture=False, progress=progress)
        return dict(JobSpec.load(path).to_dict()["model"])


def fit_version(
    spec: RetrainSpec,
    job: JobSpec,
    dataset: Dataset,
    named: NamedModel,
    key: str,
    *,
    facts: dict[str, Any],
    lease_epoch: int,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Fit ``dataset``, and publish the model as a version named "candidate"; plain facts about both.

    Raises
    ------
    InterruptedRunError
        The rows were changed before the fit had opened them: which of them are held out is not known.

    Cost
    ----
    That of the fit, less what it finds of earlier ones.
    """
    directory = RunDirectory(job.output.directory)
    result = _finished(job, directory)
    if result is None:
        drive_job(job, directory, progress=progress, source=job.to_toml().encode())
        result = directory.read("result.json") or {}
    if result["data"]["digests"] != digests(dataset)[1:]:
        directory.remove_all()
        raise InterruptedRunError(f"{dataset.path} was changed before the fit had opened it", hint="start again")
    note_user(spec.store, spec.retrain.registry)
    score = result.get("score")
    found = {
        "run": directory.location,
        "num_rows": result["plan"]["num_rows"],
        "alpha": result["plan"]["alpha"],
        "solver": result["solver"],
        "precision": result["precision"],
        "converged": result["converged"],
        "relative_residual": result["relative_residual"],
        "backward_error": result["backward_error"],
        "gap": [certificate["gap"] for certificate in result.get("certificates") or []],
        "message": result["message"],
        "reused": result.get("reused"),
        "seconds": result["seconds"].get("total"),
        "score": score,
        "metric": result.get("metric"),
    }
    said = {**facts, **{name: found[name] for name in ("relative_residual", "gap", "reused") if found[name] != []}}
    # the rows that the next fit continues, and the scaling that is frozen with them: named here, they are no garbage
    said["training_rows"] = result["training_rows"]
    if score is not None:
        said["score"] = {found["metric"]: score_of(score).value(found["metric"])}
    version = named.add(result["model_path"], key=key, facts=said, lease_epoch=lease_epoch)
    return {**found, "version": version.id}


def _finished(job: JobSpec, directory: RunDirectory) -> dict[str, Any] | None:
    """The result of a run of this very job that came to its end."""
    check_claim(job, directory.location)
    result = directory.read("result.json")
    if result is None or read_json(str(result["model_path"]), "manifest.json") is None:
        return None
    return result


def forget_runs(records: Records, keep: str) -> None:
    """Remove all runs but one: those of earlier fits, whose models are versions by now. Their factors are garbage when
    no alias needs them."""
    folder = join(records.directory.location, "runs")
    for name in children(folder):
        if name != keep:
            RunDirectory(join(folder, name)).remove_all()
