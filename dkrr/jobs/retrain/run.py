"""A retrain job: stage -> validate -> append -> fit -> evaluate -> gate -> promote, each done once for its inputs.

Run it as often as you like (a scheduler does): it does what is missing, and with nothing new it reads a few small
documents and ends. One process at a time has the lease of a model; a promotion is fenced by its epoch, so a job that
was overtaken while it slept promotes nothing. What is refused leaves the model in production where it is.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dkrr.dataset.destination import check_outside
from dkrr.errors import DkrrError, RefusedError, StoreError
from dkrr.jobs.documents import plain
from dkrr.jobs.registry import ModelRegistry
from dkrr.jobs.retrain.batches import current_dataset, judged_by, read_reference
from dkrr.jobs.retrain.holdout import lost_generations
from dkrr.jobs.retrain.incoming import deliveries
from dkrr.jobs.retrain.ledger import Ledger
from dkrr.jobs.retrain.records import Records
from dkrr.jobs.retrain.spec import RetrainSpec
from dkrr.jobs.retrain.summary import DRY_RUN, RetrainSummary
from dkrr.jobs.retrain.tick_key import tick_key
from dkrr.jobs.runs.directory import RunDirectory, may_hold
from dkrr.store.failpoints import failpoint
from dkrr.store.files import json_bytes, name_of

if TYPE_CHECKING:
    from dkrr.engine.tasks import Progress

__all__ = ["retrain"]


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
        which rows the data set has lost that no file holds. Nothing is changed, and nothing raised about a batch.

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
    began = time.perf_counter()
    directory = RunDirectory(spec.directory)
    named = ModelRegistry(spec.retrain.registry).open(spec.retrain.name)
    if dry_run:
        from dkrr.jobs.retrain.batches import preview

        found = RetrainSummary(name=named.name, outcome=DRY_RUN, production=named.aliases().targets.get("production"))
        preview(spec, found)
        found.seconds = time.perf_counter() - began
        return found
    if not _is_due(spec, directory):
        production = named.aliases().targets.get("production")
        return RetrainSummary(name=named.name, production=production, seconds=time.perf_counter() - began)
    # most ticks find nothing new: what a fit needs is imported here, which takes longer than all of the above
    from dkrr.jobs.retrain import mlflow_log
    from dkrr.jobs.retrain.tick import Tick
    from dkrr.jobs.runs.monitor import driving

    if spec.mlflow is not None:
        mlflow_log.load_mlflow()  # what is missing is found before anything is done
    check_outside(directory.location)
    if not may_hold(directory.location, "retrain"):
        raise StoreError(
            f"{directory.location} exists and is not the records of a retrain job",
            hint="give the model another name, or another [retrain] registry",
        )
    with driving(directory, kind="retrain", progress=progress, keep=True) as monitor:
        directory.write_bytes("job.json", json_bytes(plain(spec.to_dict())))
        tick = Tick(spec, directory, named, monitor)
        summary = tick.run()
        summary.seconds = time.perf_counter() - began
        failpoint("retrain.report.before")
        _report(directory, summary)
        failpoint("retrain.report.after")
        tick.note_told()
    if spec.mlflow is not None:
        mlflow_log.log_tick(spec.mlflow, summary, named)
    if summary.outcome == "refused":
        raise RefusedError(
            f"{named.name}: {len(summary.reasons)} reason{'s' if len(summary.reasons) != 1 else ''} to refuse: "
            f"{'; '.join(summary.reasons)}",
            hint=f"{named.name}@production is {summary.production or 'nothing yet'}; {summary.report} says more",
            reasons=summary.reasons,
            report=summary.report,
            summary=summary,
        )
    return summary


def _is_due(spec: RetrainSpec, directory: RunDirectory) -> bool:
    """Whether anything is left to do. Reads small documents only."""
    dataset = current_dataset(spec)
    ledger, reference = Ledger.read(directory), read_reference(directory)
    rules = judged_by(spec, reference)
    if any(batch.is_refused and not batch.reported for batch in ledger.batches.values()):
        return True
    for delivery in deliveries(spec.retrain.incoming, spec.own_files):
        batch = ledger.known(delivery)
        if batch is None or batch.is_due(rules):
            return True
    if lost_generations(directory, dataset):
        return True
    if dataset is None:
        return spec.initial is not None
    return bool(Records(directory).last().get("tick") != tick_key(spec, dataset))


def _report(directory: RunDirectory, summary: RetrainSummary) -> None:
    """Keep what was done, and remove what only this tick needed."""
    summary.report = directory.path("report.txt")
    directory.write("report.json", plain(summary.to_dict()))
    directory.write_bytes("report.txt", summary.text().encode())
    from dkrr.jobs.retrain.fit import forget_runs

    run = str(summary.fit.get("run", ""))
    if run:
        with contextlib.suppress(OSError, DkrrError):  # what stays is small, and goes next time
            forget_runs(Records(directory), name_of(run))
