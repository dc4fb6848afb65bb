"""The ledger of a retrain job: every batch that was ever delivered, and how far it came.

One document, replaced whole after every stage of a batch: staged (its bytes are known), validated (accepted or
refused, and why), appended (as which generation). A batch that is appended is not looked at again while the data set
is the one that it was appended to (:func:`~dkrr.jobs.retrain.batches.restore`); one that was refused is judged again
only when what it is judged by has changed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from dkrr.dataset import Dataset
from dkrr.jobs.documents import plain
from dkrr.jobs.retrain.holdout import decisions
from dkrr.jobs.retrain.incoming import Delivery, content_hash
from dkrr.jobs.runs.directory import RunDirectory, utc_now
from dkrr.store.failpoints import failpoint

__all__ = ["Batch", "Ledger"]

NAME = "batches.json"
PREFIX = 12  # characters of a key that are in a label


@dataclass
class Batch:
    """One batch.

    Parameters
    ----------
    key
        Hash of its bytes; of a batch that is known by its label alone the beginning of that.
    name
        Of the file that brought it first.
    verdict
        What the validation found: ``judged_by`` (hash), ``accepted``, ``reasons``, ``num_rows``; None before.
    appended
        ``generation``, ``num_rows``, ``at``; None while it is not in the data set.
    reported
        Whether a refusal has been told.
    """

    key: str
    name: str
    staged_at: str
    verdict: dict[str, Any] | None = None
    appended: dict[str, Any] | None = None
    reported: bool = False

    @property
    def label(self) -> str:
        """What its generation is called."""
        return f"{self.name} {self.key[:PREFIX]}"

    @classmethod
    def decided(cls, document: dict[str, Any]) -> Batch | None:
        """The batch that a generation was made of, by its record (:mod:`~dkrr.jobs.retrain.holdout`); None for none."""
        name, _, key = str(document["label"]).rpartition(" ")
        if not name or not re.fullmatch(f"[0-9a-f]{{{PREFIX}}}", key):
            return None
        facts = {"num_rows": int(document["num_rows"]), "at": None}
        verdict: dict[str, Any] = {"judged_by": None, "accepted": True, "reasons": [], "num_rows": facts["num_rows"]}
        appended = {"generation": int(document["generation"]), **facts}
        return cls(key, name, staged_at="", verdict=verdict, appended=appended, reported=True)

    @property
    def is_refused(self) -> bool:
        """Whether it was judged and not accepted."""
        return self.verdict is not None and not self.verdict["accepted"]

    def is_due(self, judged_by: str) -> bool:
        """Whether something is left to do with it."""
        if self.appended is not None:
            return False
        return self.verdict is None or bool(self.verdict["accepted"]) or self.verdict["judged_by"] != judged_by

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "staged_at": self.staged_at,
            "verdict": self.verdict,
            "appended": self.appended,
            "reported": self.reported,
        }


@dataclass
class Ledger:
    """The batches by key, which bytes each file had when it was last looked at, and numbers of dropped generations.

    ``initial`` has the hashes of the files that the first rows came from; None where that is not known yet. Where its
    document was lost, the generations that were decided about tell what was appended, and
    ``is_recovered``; what was refused is judged again.
    """

    directory: RunDirectory
    batches: dict[str, Batch] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    initial: list[str] | None = None
    is_recovered: bool = False

    @classmethod
    def read(cls, directory: RunDirectory) -> Ledger:
        """As it is on disk; empty before the first batch."""
        document = directory.read(NAME)
        if document is None:
            found = {batch.key: batch for item in decisions(directory) if (batch := Batch.decided(item)) is not None}
            return cls(directory, found, is_recovered=bool(found))
        batches = {key: Batch(key=key, **values) for key, values in document["batches"].items()}
        return cls(
            directory, batches, dict(document["files"]), list(document.get("dropped", [])), document.get("initial")
        )

    def write(self) -> None:
        """Replace the document."""
        batches = {key: batch.to_dict() for key, batch in self.batches.items()}
        document = {"batches": batches, "files": self.files, "dropped": self.dropped}
        self.directory.write(NAME, plain(document if self.initial is None else document | {"initial": self.initial}))

    def note_dropped(self, dataset: Dataset) -> None:
        """Remember which generations the data set had and has no longer: made again, they would be dropped again."""
        dropped = sorted(set(range(1, dataset.counters.generation)) - {found.number for found in dataset.generations})
        if dropped != self.dropped:
            self.dropped = dropped
            self.write()

    def known(self, delivery: Delivery) -> Batch | None:
        """The batch in a file that has not changed since it was looked at."""
        found = self.files.get(delivery.name)
        return self.batches.get(found["key"]) if found is not None and found["state"] == delivery.state else None

    def stage(self, found: list[Delivery]) -> list[tuple[Batch, Delivery]]:
        """The batch in each file, by name; new files are read once, and the ledger knows them then."""
        staged = []
        for delivery in found:
            batch = self.known(delivery)
            if batch is None:
                failpoint("retrain.stage.before")
                key = content_hash(delivery)
                batch = self.batches.get(key) or self.batches.get(key[:PREFIX])
                if batch is None:
                    batch = self.batches[key] = Batch(key=key, name=delivery.name, staged_at=utc_now())
                    if key in (self.initial or ()):  # the first rows, delivered as well
                        batch.verdict = {"judged_by": None, "accepted": True, "reasons": []}
                        batch.appended = {"generation": 1, "num_rows": None, "at": utc_now()}
                self.files[delivery.name] = {"key": batch.key, "state": delivery.state}
                failpoint("retrain.stage.before_record")
                self.write()
                failpoint("retrain.stage.after_record")
            staged.append((batch, delivery))
        return staged

    def replaced(self, batch: Batch) -> Batch | None:
        """Another batch that came under the same name and is in the data set."""
        for other in self.batches.values():
            if other.name == batch.name and other.key != batch.key and other.appended is not None:
                return other
        return None
