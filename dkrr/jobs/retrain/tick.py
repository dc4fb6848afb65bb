"""One tick of a retrain job, by the holder of its lease: rows first, then the model.

Every stage goes through :class:`~dkrr.jobs.retrain.records.Records` or the ledger, keyed by its inputs, so a tick that
was interrupted is the same tick again and does what is missing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dkrr.dataset import Dataset
from dkrr.errors import JobFileError, LockedError, StoreError
from dkrr.jobs.registry import NamedModel
from dkrr.jobs.retrain.batches import (
    append_batch,
    check_held_out,
    current_dataset,
    decide,
    freeze_reference,
    held_out_again,
    initial_keys,
    judged_by,
    know_initial,
    make_initial,
    read_reference,
    restore,
    slide,
    validate,
)
from dkrr.jobs.retrain.drift import Reference, compare_means
from dkrr.jobs.retrain.fit import fit_job_of, fit_key, fit_version, given_model, search_model
from dkrr.jobs.retrain.holdout import save_mask
from dkrr.jobs.retrain.incoming import Delivery, deliveries
from dkrr.jobs.retrain.judge import evaluate, judge
from dkrr.jobs.retrain.ledger import Batch, Ledger
from dkrr.jobs.retrain.records import LAST, Records, hash_of
from dkrr.jobs.retrain.spec import RetrainSpec
from dkrr.jobs.retrain.summary import RetrainSummary
from dkrr.jobs.retrain.tick_key import digests, tick_key
from dkrr.jobs.run import job_executor
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.monitor import Monitor
from dkrr.jobs.spec import JobSpec
from dkrr.store.interruption import fence_holder

__all__ = ["Tick"]

PROMOTIONS = 3  # how often a model is judged anew because another one came into production meanwhile


class Tick:
    """The stages in their order; made by the holder of the lease, and run once."""

    def __init__(self, spec: RetrainSpec, directory: RunDirectory, named: NamedModel, monitor: Monitor) -> None:
        self.spec, self.directory, self.named, self.monitor = spec, directory, named, monitor
        self.records = Records(directory)
        self.lease_epoch = int(fence_holder()["epoch"])
        self.summary = RetrainSummary(name=named.name)
        self.ledger = Ledger.read(directory)
        self.untold: list[Batch] = []
        self.last: dict[str, Any] | None = None

    def run(self) -> RetrainSummary:
        """All stages; the caller keeps the report, and then calls :meth:`note_told`."""
        dataset, ledger, reference = self._rows()
        summary = self.summary
        self.untold = [batch for batch in ledger.batches.values() if batch.is_refused and not batch.reported]
        for batch in self.untold:
            if batch.name not in {found["name"] for found in summary.batches}:
                summary.add_batch(batch)
        if dataset is None:
            if not self.untold:
                raise StoreError(
                    f"there are no rows in {self.spec.retrain.incoming}, and no data set {self.spec.retrain.data}",
                    hint="deliver a batch, or name the first rows: [data] path",
                )
            summary.outcome = "refused"
        else:
            self._model(dataset, ledger, reference or freeze_reference(self.directory, dataset))
        summary.production = self.named.aliases().targets.get("production")
        return summary

    def note_told(self) -> None:
        """Note that the report stands. Not earlier: whoever is killed before that tells everything the next time."""
        if self.last is not None:
            self.directory.write(LAST, self.last)
        for batch in self.untold:
            batch.reported = True
        if self.untold:
            self.ledger.write()

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _rows(self) -> tuple[Dataset | None, Ledger, Reference | None]:
        """The data set with every batch that is accepted."""
        spec = self.spec
        ledger = self.ledger
        self.monitor.phase("restore")
        dataset, again = restore(spec, ledger, current_dataset(spec))
        for batch in again:
            self.summary.add_batch(batch)
        if dataset is None and spec.initial is not None:
            self.monitor.phase("initial rows")
            keys = initial_keys(spec)
            dataset = make_initial(spec)
            know_initial(spec, ledger, dataset, keys)
        know_initial(spec, ledger, dataset)
        check_held_out(spec, ledger)
        reference = read_reference(self.directory)
        if dataset is not None:
            decide(spec, ledger, dataset)
            reference = reference or freeze_reference(self.directory, dataset)
        self.monitor.phase("stage")
        staged = ledger.stage(deliveries(spec.retrain.incoming, spec.own_files))
        rules = judged_by(spec, reference)
        for batch, delivery in staged:
            if not batch.is_due(rules):
                continue
            dataset, reference = self._batch(ledger, batch, delivery, dataset, reference)
        if dataset is not None:
            dataset = slide(spec, dataset)
            ledger.note_dropped(dataset)
        return dataset, ledger, reference

    def _batch(
        self, ledger: Ledger, batch: Batch, delivery: Delivery, dataset: Dataset | None, reference: Reference | None
    ) -> tuple[Dataset | None, Reference | None]:
        self.monitor.phase("validate")
        if validate(self.spec, ledger, batch, delivery, dataset, reference):
            self.monitor.phase("append")
            dataset = append_batch(self.spec, ledger, batch)
            reference = reference or freeze_reference(self.directory, dataset)
        self.summary.add_batch(batch)
        return dataset, reference

    # --- model --------------------------------------------------------------------------------------------------------

    def _model(self, dataset: Dataset, ledger: Ledger, reference: Reference) -> None:
        """From the rows to a promotion or a refusal."""
        key = tick_key(self.spec, dataset)
        last, summary = self.records.last(), self.summary
        if last.get("tick") == key:
            summary.outcome = "refused" if summary.reasons else "kept"
            return
        # after another tick the same rows and rules are judged again: something else may be in production by now
        attempt = hash_of(key, last.get("attempt"))
        tick = self.records.find("tick", attempt)
        if tick is None:
            plan = self.records.do("plan", attempt, {}, lambda: self._plan(last))
            found = self._judged(attempt, dataset, ledger, reference, plan)
            tick = self.records.do("tick", attempt, {"after": last.get("attempt")}, lambda: found | plan)
        summary.version, summary.num_rows = tick.get("version"), tick.get("num_rows")
        summary.checks, summary.fit = tick["checks"], tick.get("fit") or {}
        summary.searched = bool(tick["search"])
        summary.reasons.extend(check["sentence"] for check in tick["checks"] if not check["passed"])
        summary.outcome = "refused" if summary.reasons else str(tick["outcome"])
        known = {name: tick[name] for name in ("given", "model", "fits_since_search")}
        self.last = {**known, "tick": key, "attempt": attempt}

    def _plan(self, last: dict[str, Any]) -> dict[str, Any]:
        """Which hyperparameters are used, and whether they are searched; fixed when a tick begins."""
        given = given_model(self.spec)
        same = last.get("given") == given
        since = int(last.get("fits_since_search", 0)) if same else 0
        every = self.spec.retrain.search_every
        search = bool(last) and same and every is not None and since + 1 >= every
        return {
            "given": given,
            "model": last.get("model", given) if same else given,
            "search": search,
            "fits_since_search": 0 if search else since + 1,
        }

    def _judged(
        self, attempt: str, dataset: Dataset, ledger: Ledger, reference: Reference, plan: dict[str, Any]
    ) -> dict[str, Any]:
        spec, records = self.spec, self.records
        mask = decide(spec, ledger, dataset)
        held_out, mask_path, mask_digest = int(np.count_nonzero(mask)), None, ""
        if spec.holdout.path is None and held_out < spec.gate.min_rows:
            return {"outcome": "refused", "checks": [_too_few(held_out, spec.gate.min_rows)]}
        if held_out:  # also those of an earlier [holdout], where rows of their own judge now
            mask_path, mask_digest = save_mask(self.directory, mask, dataset.kept)
        if seen := held_out_again(spec, ledger, dataset, mask):
            raise JobFileError(
                f"{seen} are in {spec.retrain.data}, where fits train on them",
                hint="judge by rows that no fit has seen, or drop the generation that has them: "
                "dkrr ingest --drop-generation",
            )
        model = plan["model"]
        if plan["search"]:
            self.monitor.phase("search")
            found = records.do(
                "search", attempt, {}, lambda: {"model": search_model(spec, mask_path, self.monitor.progress)}
            )
            model = plan["model"] = found["model"]
        self.monitor.phase("fit")
        key = fit_key(spec, dataset, model, mask_digest)
        job = fit_job_of(spec, model, mask_path, key)
        inputs = {"rows": digests(dataset), "held_out": mask_digest, "model": model}
        facts = {"rows_digest": dataset.digest, "data_rows": dataset.num_rows, "held_out": held_out, "model": model}
        fit = records.do(
            "fit",
            key,
            inputs,
            lambda: fit_version(
                spec,
                job,
                dataset,
                self.named,
                key,
                facts=facts,
                lease_epoch=self.lease_epoch,
                progress=self.monitor.progress,
            ),
            is_there=lambda found: self.named.has(str(found["version"])),
        )
        # from here on nobody with an earlier lease moves an alias
        self.named.fence(self.lease_epoch)
        for number in range(PROMOTIONS):
            try:
                return self._decided(attempt, dataset, reference, job, key, fit)
            except LockedError:
                self.monitor.check()
                if number + 1 == PROMOTIONS:
                    raise
        raise AssertionError("unreachable")

    def _production(self) -> str | None:
        return self.named.aliases().targets.get("production")

    def _decided(
        self, attempt: str, dataset: Dataset, reference: Reference, job: JobSpec, key: str, fit: dict[str, Any]
    ) -> dict[str, Any]:
        spec, records = self.spec, self.records
        version, production = str(fit["version"]), self._production()
        found = {"version": version, "num_rows": fit["num_rows"], "fit": fit}
        if production == version:  # promoted by an attempt that was interrupted afterwards, or by a person
            rules = self._rules(hash_of(key, self.named.aliases().targets.get("previous")))
            checks = (records.find("gate", rules) or {"checks": []})["checks"]
            if checks and all(check["passed"] for check in checks):
                self._promote(attempt, rules, version, version)
            return {**found, "outcome": "promoted", "checks": checks}
        self.monitor.phase("evaluate")
        judged = hash_of(key, production)
        scores = records.do(
            "evaluate",
            judged,
            {"fit": key, "production": production},
            lambda: evaluate(
                job,
                spec.store,
                dataset,
                self.named,
                version,
                production,
                # a file of held-out rows may have been replaced since the fit: both models see what it holds now
                score=None if spec.holdout.path else fit["score"],
                start=lambda: job_executor(job, spec.store),
                progress=self.monitor.progress,
            ),
        )
        self.monitor.phase("gate")
        rules = self._rules(judged)
        drift = compare_means(reference, dataset, spec.drift)
        gate = records.do(
            "gate",
            rules,
            {"evaluate": judged},
            lambda: {"checks": [c.to_dict() for c in judge(spec.gate, fit, scores, production, drift)]},
        )
        if not all(check["passed"] for check in gate["checks"]):
            return {**found, "outcome": "refused", "checks": gate["checks"]}
        self.monitor.phase("promote")
        self._promote(attempt, rules, version, production)
        return {**found, "outcome": "promoted", "checks": gate["checks"]}

    def _rules(self, judged: str) -> str:
        return hash_of(judged, self.spec.gate.model_dump(), self.spec.drift.model_dump())

    def _promote(self, attempt: str, rules: str, version: str, production: str | None) -> None:
        def work() -> dict[str, Any]:
            done = self.named.promote(version, expected=production, lease_epoch=self.lease_epoch, why="retrain")
            return {"version": version, "epoch": done.epoch}

        self.records.do("promote", hash_of(attempt, rules), {"version": version, "judged": rules}, work)


def _too_few(held_out: int, needed: int) -> dict[str, Any]:
    sentence = f"{held_out:,} held-out rows, at least {needed:,} needed to judge; nothing was fitted"
    return {"name": "held-out rows", "passed": False, "sentence": sentence}
