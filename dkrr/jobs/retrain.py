"""A retrain job: stage -> validate -> append -> fit -> evaluate -> gate -> promote, each done once for its inputs.

Run it as often as you like (a scheduler does): it does what is missing, and with nothing new it reads a few small
documents and ends. One process at a time has the lease of a model; a promotion is fenced by its epoch, so a job that
was overtaken while it slept promotes nothing. What is refused leaves the model in production where it is.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dkrr.dataset import Dataset, drop_generations, keep_last
from dkrr.dataset.writer import check_outside
from dkrr.errors import RefusedError, StoreError
from dkrr.jobs.facts import Shown, reused_rows
from dkrr.jobs.history import INITIAL, LAST, History, digests, hash_of, open_rows
from dkrr.jobs.registry import ModelRegistry, NamedModel
from dkrr.jobs.retrain_spec import RetrainSpec
from dkrr.jobs.run_directory import RunDirectory, may_hold
from dkrr.markup import Facts
from dkrr.store.documents import plain
from dkrr.store.files import json_bytes

if TYPE_CHECKING:
    from dkrr.engine.tasks import Progress


logger = logging.getLogger("dkrr.retrain")

DRY_RUN = "dry run"


@dataclass(kw_only=True, repr=False)
class RetrainSummary(Shown):
    """One tick of a retrain job.

    Parameters
    ----------
    outcome
        "promoted"; "refused" (a batch, the model, or both); "kept" (a batch was added, and the data set is what it was
        judged as before, or the version is in production already, by a person, say); "nothing new"; "dry run" (nothing
        was done, and what is said of batches would be).
    production
        The version that is served now.
    version
        The one that was fitted, if one was.
    batches
        Name, outcome ("appended", "refused" or, in a dry run, "missing"), rows and reasons of each batch that was new.
    checks
        What the gate found.
    reasons
        Why something was refused.
    """

    name: str
    outcome: str = "nothing new"
    production: str | None = None
    version: str | None = None
    num_rows: int | None = None
    batches: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    fit: dict[str, Any] = field(default_factory=dict)
    searched: bool = False
    seconds: float = 0.0
    report: str = ""

    def add_batch(
        self, name: str, outcome: str, stage: str | None, num_rows: int | None, reasons: list[str] | None = None
    ) -> None:
        """What became of a batch."""
        found = {"name": name, "outcome": outcome, "stage": stage, "num_rows": num_rows, "reasons": reasons or []}
        self.batches.append(found)
        if outcome == "refused":
            self.reasons.extend(f"{name}: {reason}" for reason in reasons or [])

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dict(vars(self))

    def facts(self) -> Facts:
        """Names and values for people."""
        found = [("model", self.name), ("outcome", self.outcome), ("production", self.production or "none")]
        for batch in self.batches:
            rows = "" if batch["num_rows"] is None else f", {batch['num_rows']:,} rows"
            at = f" at {batch['stage']}" if batch["outcome"] == "refused" else ""
            would = "would be " if self.outcome == DRY_RUN and batch["outcome"] != "missing" else ""
            found.append(("batch", f"{batch['name']}: {would}{batch['outcome']}{at}{rows}"))
        if self.version is not None:
            rows = "" if self.num_rows is None else f", {self.num_rows:,} training rows"
            found.append(("version", f"{self.version}{rows}{', hyperparameters searched' if self.searched else ''}"))
        found.extend(reused_rows(self.fit.get("reused") or {}))
        for check in self.checks:
            found.append((check["name"], f"{'passed' if check['passed'] else 'REFUSED'}: {check['sentence']}"))
        found.extend(("reason", reason) for reason in self.reasons)
        return [*found, ("seconds", f"{self.seconds:.1f}")]


def retrain(
    spec: RetrainSpec | str | Path, *, progress: Progress | None = None, dry_run: bool = False
) -> RetrainSummary:
    """Do what is missing between the rows that were delivered and a model in production.

    Parameters
    ----------
    spec
        A retrain job, or the path of its file.
    progress
        Called for every finished task.
    dry_run
        Only say which batches would be appended, which refused and why, as far as that is known without a fit, and
        which rows the data set has lost that no file holds. Batches are judged in their order. Nothing is changed, and
        nothing raised about a batch.

    Raises
    ------
    RefusedError
        A batch or the model was refused (exit code 7); the model in production stays. What was refused is told once;
        again where the job was killed before its report stood.
    LockedError
        Another process retrains this model.
    JobFileError, DataError, StoreError, NumericalError, ClusterError
        As in a fit; the next run goes on from there.

    Cost
    ----
    With nothing new a few small reads. Else the fit of the new rows, and the prediction of the held-out rows.
    """
    if not isinstance(spec, RetrainSpec):
        spec = RetrainSpec.load(spec)
    began, summary = time.perf_counter(), RetrainSummary(name=spec.retrain.name)
    named = ModelRegistry(spec.retrain.registry).open(spec.retrain.name)
    if dry_run:
        summary.outcome = DRY_RUN
        with tempfile.TemporaryDirectory(prefix="dkrr-dry-run-") as folder:
            add_rows(History(spec, folder), summary, lambda _: None)
    elif _is_due(spec):
        return _drive(spec, named, summary, began, progress)
    summary.production = named.aliases().targets.get("production")
    summary.seconds = time.perf_counter() - began
    return summary


def _is_due(spec: RetrainSpec) -> bool:
    """Whether anything is left to do. Reads small documents only."""
    dataset, history = open_rows(spec), History(spec)
    rules = history.rules(dataset)
    return bool(
        not all(refused["told"] for refused in history.refused.values())
        or any(history.is_due(found, rules) for found in spec.deliveries())
        or history.lost(dataset)
        or (dataset is None and spec.initial is not None)
        or (dataset is not None and (history.directory.read(LAST) or {}).get("tick") != tick_key(spec, dataset))
    )


def tick_key(spec: RetrainSpec, dataset: Dataset) -> str:
    """Hash of the rows and of everything that says what shall become of them."""
    job = spec.to_dict()
    # a file of held-out rows counts by what is in it
    holdout = spec.holdout.model_dump(exclude={"path", *(["mask"] if spec.holdout.mask_is_file else [])})
    rules = [holdout, *(None if part is None else part.model_dump() for part in (spec.gate, spec.drift, spec.window))]
    fitted = [job["model"], job["solver"], spec.data.standardize]
    fitted += [kept] if (kept := spec.kept()) else []
    return hash_of("tick", digests(dataset), spec.held_out_bytes(), fitted, rules)


def _drive(
    spec: RetrainSpec, named: NamedModel, summary: RetrainSummary, began: float, progress: Progress | None
) -> RetrainSummary:
    # most ticks find nothing new: what a fit needs is imported here, which takes longer than looking
    from dkrr.jobs import mlflow_log
    from dkrr.jobs.driver import driving
    from dkrr.jobs.gate import forget_runs, improve

    if spec.mlflow is not None:
        mlflow_log.load_mlflow()  # what is missing is found before anything is done
    directory = RunDirectory(spec.directory)
    check_outside(directory.location)
    if not may_hold(directory.location, "retrain"):
        raise StoreError(
            f"{directory.location} exists and is not the records of a retrain job",
            hint="give the model another name, or another [retrain] registry",
        )
    # the records may be gone, or older ones: aliases know the epoch of the last driver
    with driving(directory, kind="retrain", progress=progress, above=named.aliases().fence) as monitor:
        directory.write_bytes("job.json", json_bytes(plain(spec.to_dict())))
        history = History(spec)
        dataset = add_rows(history, summary, monitor.phase)
        last = None
        if dataset is not None:
            last = improve(history, dataset, tick_key(spec, dataset), named, summary, monitor)
        elif not summary.reasons:
            raise StoreError(
                f"there are no rows in {spec.retrain.incoming}, and no data set {spec.retrain.data}",
                hint="deliver a batch, or name the first rows: [data] path",
            )
        if summary.reasons:
            summary.outcome = "refused"
        summary.production = named.aliases().targets.get("production")
        summary.seconds = time.perf_counter() - began
        summary.report = directory.path("report.txt")
        directory.write("report.json", plain(summary.to_dict()))
        directory.write_bytes("report.txt", f"{summary}\n".encode())
        # not earlier: whoever is killed before that tells everything the next time
        if last is not None:
            directory.write(LAST, last)
        for refused in history.refused.values():
            refused["told"] = True
        history.write()
        history.forget_all()
        forget_runs(directory, str(summary.fit.get("run", "")))
        if spec.mlflow is not None:
            mlflow_log.log_tick(spec.mlflow, summary, named)
        if summary.outcome == "refused":  # as which the run ends
            raise RefusedError(
                f"{named.name}: {len(summary.reasons)} reason{'s' if len(summary.reasons) != 1 else ''} to refuse: "
                f"{'; '.join(summary.reasons)}",
                hint=f"{named.name}@production is {summary.production or 'nothing yet'}; {summary.report} says more",
                reasons=summary.reasons,
                report=summary.report,
                summary=summary,
            )
    return summary


def add_rows(history: History, summary: RetrainSummary, phase: Callable[[str], Any]) -> Dataset | None:
    """The data set with all that it ever had and shall have, and every batch that is accepted; None without any.

    A data set that was lost, or set back to an earlier state, lacks generations that were decided about. Their files
    are appended again in the order in which they came, so that every row gets its number back, and what had been
    dropped since is dropped again.

    Raises
    ------
    StoreError
        A file is gone, or has other bytes than it had; nothing was changed.
    """
    spec = history.spec
    phase("restore")
    dataset = open_rows(spec)
    found, missing = history.replacements(dataset)
    if missing and history.is_dry:
        for text in missing:
            summary.add_batch(text, "missing", None, None, ["no file has those bytes"])
        return None
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise StoreError(
            f"{spec.retrain.data} lacks rows that were in it: {', '.join(missing[:5])}{more}; no file has those bytes",
            hint="restore the data set, or put the files back; to begin a new one, give the model another name",
        )
    if found and history.gone is None:
        logger.warning(
            "%s was lost, and the record of its batches, too: which generations had been dropped is not known, all of "
            "them are appended again",
            spec.retrain.data,
        )
    if dataset is None and not found and spec.initial is not None:
        found = [(INITIAL, INITIAL, spec.initial)]
    for name, key, location in found:
        rows = history.read(location, key, dataset)
        dataset = history.append(name, key, rows, dataset)
        if history.is_dry or name != INITIAL:
            summary.add_batch(location if name == INITIAL else name, "appended", "append", rows.num_rows)
    if dataset is not None and not history.is_dry:
        again = {item.number for item in dataset.generations} & set(history.gone or ())
        dataset = drop_generations(spec.retrain.data, sorted(again)) if again else dataset
        history.held_out(dataset, decides=not history.has_mask_file)
    if dataset is not None:
        history.freeze_reference(dataset)
    phase("stage")
    there, rules = set(), history.rules(dataset)
    for delivery in spec.deliveries():
        there.add(key := history.stage(delivery))
        if not history.is_due(delivery, rules):
            continue
        phase("validate")
        staged = history.validate(delivery, key, dataset, rules)
        if staged is not None:
            phase("append")
            summary.add_batch(delivery.name, "appended", "append", staged.num_rows)
            dataset = history.append(delivery.name, key, staged, dataset)
            history.freeze_reference(dataset)
            rules = history.rules(dataset)
    for key, refused in history.refused.items():
        if not refused["told"] or (history.is_dry and key in there and refused["reasons"]):
            summary.add_batch(refused["name"], "refused", refused["stage"], refused["num_rows"], refused["reasons"])
    summary.batches.sort(key=lambda batch: str(batch["name"]))
    if dataset is None or history.is_dry:
        return dataset
    history.held_out(dataset)
    if spec.window is not None:
        dataset = keep_last(spec.retrain.data, generations=spec.window.generations, rows=spec.window.rows)
    history.note_gone(dataset)
    return dataset
