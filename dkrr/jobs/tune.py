"""From a job to the same job with kernel, widths and alpha chosen: `dkrr tune`.

Beside the new job file BEST.toml the search leaves BEST.trials.jsonl (one line a trial: what it began with, rows, what
it found, seconds), BEST.search.json (candidates, slices and trials: all that a report needs) and BEST.search.png. The
subset and a document for each trial are in the store, under ``tune``: interrupted and started again, the search
continues with the trials that are finished.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dkrr.engine.tasks import DaskExecutor, Progress
from dkrr.errors import DkrrError, JobFileError, StoreError
from dkrr.fit.inputs import nothing_new
from dkrr.jobs import toml
from dkrr.jobs.claim import run_id
from dkrr.jobs.loss_fit import check_loss_targets
from dkrr.jobs.loss_spec import fold_loss_of, parameters_of
from dkrr.jobs.plan import make_plan
from dkrr.jobs.prepare import Prepared, prepare
from dkrr.jobs.run import job_executor
from dkrr.jobs.spec import JobSpec
from dkrr.jobs.tune_spec import TuneSpec
from dkrr.selection.choice import Candidate, TuneResult, TuneSettings
from dkrr.selection.tuning import tune
from dkrr.store.documents import create_bytes
from dkrr.store.files import is_url, join, name_of, parent_of, read_json, write_file
from dkrr.store.lease import hold_lock

__all__ = ["TuneSummary", "tune_job"]

WIDTHS = {"shared": "shared", "per_feature": "per feature"}
# no trial is still running when it took so long and more time than the whole search has
LEAST_STALL_SECONDS = 600.0


@dataclass(kw_only=True)
class TuneSummary:
    """What a search chose, and where that stands."""

    path: str
    trials_path: str
    search_path: str
    picture_path: str | None
    num_rows: int
    settings: TuneSettings
    result: TuneResult
    run_directory: str
    job_directory: str
    foreseen_seconds: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "path": self.path,
            "trials": self.trials_path,
            "search": self.search_path,
            "picture": self.picture_path,
            "num_rows": self.num_rows,
            "run_directory": self.run_directory,
            "foreseen_seconds": self.foreseen_seconds,
            "best": self.result.best.to_dict(),
            "least_error": self.result.least_error.to_dict(),
            "candidates": [candidate.to_dict() for candidate in self.result.candidates],
            "notes": self.result.notes,
            "num_trials": len(self.result.records),
            "seconds": self.result.seconds,
        }

    @property
    def where(self) -> str:
        """A line that says where a fit of the job file will be."""
        said = f"dkrr fit {self.path}: the run will be {self.run_directory}"
        changed = self.run_directory != self.job_directory
        return said + (f" ([output] directory of the job that was tuned is {self.job_directory})" if changed else "")

    def table(self) -> Any:
        """The candidates and what was chosen, as a rich table."""
        from dkrr.jobs.tables import tune_table

        return tune_table(self)


def tune_job(
    job: JobSpec | str | Path,
    output: str | os.PathLike[str],
    *,
    rows: int | None = None,
    budget_seconds: float | None = None,
    seed: int | None = None,
    picture: bool = True,
    progress: Progress | None = None,
) -> TuneSummary:
    """Choose kernel, widths and alpha for the training rows of a job, and write the job that uses them.

    Parameters
    ----------
    output
        The job file to write; it must not exist.
    rows, budget_seconds, seed
        Instead of those of ``[tune]``.
    picture
        Whether to draw the search.

    Raises
    ------
    JobFileError
        ``output`` exists, or appeared while the search ran, or beside it what a search would write and no search wrote;
        or the job is of a kind that has no such choice.
    LockedError
        Another search writes the same file.
    """
    if not isinstance(job, JobSpec):
        job = JobSpec.load(job)
    path = Path(output).absolute()
    settings = _settings(job, rows=rows, budget_seconds=budget_seconds, seed=seed)
    _refuse(job, path)
    with hold_lock(str(path)):
        store = job.output.store_directory(run_id(job))
        with nothing_new(store):
            prepared = prepare(job, store)
        if settings.fold_loss is not None:
            check_loss_targets(job, prepared.train)
        with job_executor(job) as executor:
            if isinstance(executor, DaskExecutor):
                executor.stall_seconds = max(LEAST_STALL_SECONDS, settings.budget_seconds)
            result = tune(
                prepared.train,
                settings=settings,
                store=store,
                executor=executor,
                fit_intercept=job.model.fit_intercept,
                progress=progress,
            )
        _refuse(job, path)  # the first time was a while ago
        names = list(prepared.train.feature_names)
        num_rows = prepared.train.num_rows
        lines = [json.dumps(record, sort_keys=True) for record in result.records]
        trials_path, search_path = path.with_suffix(".trials.jsonl"), path.with_suffix(".search.json")
        foreseen = _foreseen_seconds(job, path, result, prepared, store)
        document = {
            "format": 1,
            "num_rows": num_rows,
            "feature_names": names,
            "foreseen_seconds": foreseen,
            **result.to_dict(),
        }
        write_file(search_path, json.dumps(document, indent=1, sort_keys=True).encode())
        write_file(trials_path, "".join(f"{line}\n" for line in lines).encode())
        picture_path = None
        if picture:
            from dkrr.jobs.picture import draw_search

            picture_path = str(path.with_suffix(".search.png"))
            draw_search(document, picture_path)
        text = _job_text(job, path, result, num_rows, settings, prepared.train.names)
        # last: when the job file is there, so is all that it came from
        if create_bytes(path.parent, path.name, text.encode()) is None:
            raise _exists(path)
    return TuneSummary(
        path=str(path),
        trials_path=str(trials_path),
        search_path=str(search_path),
        picture_path=picture_path,
        num_rows=num_rows,
        settings=settings,
        result=result,
        run_directory=JobSpec.load(path).output.directory,
        job_directory=job.output.directory,
        foreseen_seconds=foreseen,
    )


def _foreseen_seconds(job: JobSpec, path: Path, result: TuneResult, prepared: Prepared, store: str) -> dict[str, float]:
    """What a plan foresees for the fit of the choice ("best"), and for that of the smallest error where it is another.

    Nothing decides by it: the samples of a plan take a second or two, and what they say of seconds is rough.
    """
    found = {}
    for name in ("best", "least_error"):
        candidate = getattr(result, name)
        if name != "best" and candidate is result.best:
            continue
        tuned = JobSpec.from_dict(_document(job, path, candidate.keys()), base=path.parent, name=path.stem)
        with contextlib.suppress(DkrrError):  # what a fit says of it is said when it is fitted
            found[name] = round(make_plan(tuned, prepared, store).total_seconds, 3)
    return found


def _settings(job: JobSpec, **given: Any) -> TuneSettings:
    """Those of ``[tune]``, or others where they are given; smaller ``rows`` make the search smaller too."""
    found = replace((job.tune or TuneSpec()).settings(), fold_loss=fold_loss_of(job))
    changed = {name: value for name, value in given.items() if value is not None}
    if "rows" in changed:
        changed["search_rows"] = tuple(sorted({min(size, changed["rows"]) for size in found.search_rows}))
    return replace(found, **changed)


def _refuse(job: JobSpec, path: Path) -> None:
    """Find before the search what would be wrong after it."""
    beside = [path.with_suffix(ending) for ending in (".search.json", ".trials.jsonl", ".search.png")]
    # what an earlier search left is known by the document that it wrote first
    earlier = _search_at(beside[0])
    for found in [path, *([] if earlier else beside)]:
        if os.path.lexists(found):
            raise _exists(found)
    if job.model.kernel == "precomputed":
        raise JobFileError("[model] kernel = 'precomputed' has no width", hint="give the rows")
    _document(job, path, {"kernel": "rbf", "gamma": 1.0, "alpha": 1.0})  # raises what the solver does not allow
    path.parent.mkdir(parents=True, exist_ok=True)


def _exists(path: Path) -> JobFileError:
    return JobFileError(f"{path} exists", hint="choose another name or remove it")


def _search_at(path: Path) -> bool:
    """Whether a search of ours left its document here."""
    try:
        found = read_json(path.parent, path.name)
    except StoreError:
        return False
    return isinstance(found, dict) and found.keys() >= {"format", "num_rows", "feature_names"} and not path.is_symlink()


def _document(
    job: JobSpec, path: Path, keys: dict[str, Any], features: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """The job with another model, for a file at ``path``; checked.

    ``features`` has the names that its widths belong to, in their order.
    """
    job = job.as_written()
    document: dict[str, dict[str, Any]] = job.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    document.pop("tune", None)
    if job.model.loss == "square":
        intercept = {"fit_intercept": True} if job.model.fit_intercept else {}
    else:
        keys = {name: value for name, value in keys.items() if name != "alpha"} | {"C": _C_of(keys["alpha"])}
        intercept = {} if job.model.fit_intercept else {"fit_intercept": False}
        keys |= {"loss": job.model.loss, **parameters_of(job.model)}
    document["model"] = {**keys, **intercept}
    if features:
        document["data"]["features"] = list(features)
    directory = job.output.directory
    if "{id}" not in directory:  # the run of the job itself, if there is one, stays
        own = path.stem if path.stem != name_of(directory) else f"{name_of(directory)}-tuned"
        directory = join(parent_of(directory), own)
    # rows that were ingested and split for the search are found again by the fit
    store = job.output.store or job.output.store_directory(run_id(job))
    document["output"] = {**document.get("output", {}), "directory": directory, "store": store}
    for table, names in (("data", ["path"]), ("evaluate", ["path", "mask"]), ("output", ["directory", "store"])):
        for name in names:
            if isinstance(document.get(table, {}).get(name), str):
                document[table][name] = _relative(document[table][name], path.parent)
    order = ["data", "evaluate", "model", "solver", "cluster", "storage", "output"]
    document = {table: document[table] for table in order if document.get(table)}
    JobSpec.from_dict(document, base=path.parent, name=path.stem)
    return document


def _C_of(alpha: float) -> float:
    """1 / (2 alpha), without the rounding of alpha."""
    return float(f"{0.5 / alpha:.12g}")


def _relative(location: str, base: Path) -> str:
    """A path below ``base`` as seen from there; others as they are."""
    if is_url(location) or not os.path.isabs(location) or not Path(location).is_relative_to(base):
        return location
    return os.path.relpath(location, base)


def _job_text(
    job: JobSpec, path: Path, result: TuneResult, num_rows: int, settings: TuneSettings, names: Sequence[str]
) -> str:
    """The job file, with the candidates as a comment above its model."""
    best, loss = result.best, settings.fold_loss
    what, penalty = "the smallest leave-one-out error", "alpha"
    if loss is not None:
        penalty, what = "C", f"the smallest {loss.words} of {loss.num_folds} folds"
    comment = [
        f"Chosen by dkrr tune (seed {settings.seed}) for {num_rows:,} training rows: of {len(result.records)} trials",
        f"the best conditioned of those as good as {what} on {best.num_rows:,} rows{', in' if loss is None else ','}",
        ("standard deviations of the target, " if loss is None else "")
        + "by the standard error (s.e.) of the difference:",
        "",
        f"{'kernel':<10} {'widths':<12} {penalty:>10} {'error':>8} {'s.e.':>8} {'condition':>10}",
        *(_candidate_line(candidate, result.mark(candidate)) for candidate in result.candidates),
        *(f"note: {note}" for note in result.notes),
    ]
    text = toml.dumps(_document(job, path, best.keys(), names if best.widths.size > 1 else ()))
    commented = "".join(f"# {line}".rstrip() + "\n" for line in comment)
    head = "# A job of dkrr: `dkrr plan` says what it needs, `dkrr fit` runs it.\n\n"
    return head + text.replace("[model]\n", f"{commented}[model]\n", 1)


def _candidate_line(candidate: Candidate, mark: str) -> str:
    penalty = _C_of(candidate.alpha) if candidate.metric else candidate.alpha
    cells = f"{candidate.family:<10} {WIDTHS[candidate.kind]:<12} {penalty:>10.3g} {candidate.loo_rmse:>8.4f}"
    error = "" if candidate.excess_error is None else f"{candidate.excess_error:.4f}"
    condition = "" if candidate.condition is None else f"{candidate.condition:.1e}"
    return f"{cells} {error:>8} {condition:>10}  {mark}".rstrip()
