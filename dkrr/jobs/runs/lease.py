"""The lease of a run: one driver at a time, and one that was replaced finds out before it writes.

Every attempt has an epoch, 1, 2, 3, ... A driver owns epoch e when it created ``drivers/<e>.json``, which is possible
once: a document is created, and never replaced, by one process among all (a hard link on a file system, If-None-Match
on an object store). Whoever takes over creates the next one; so "am I still the owner?" is the question whether the
document of the next epoch exists, and no answer can be overwritten by a driver that wakes up.

``driver.json`` says the same for readers, with a counter that the owner raises every few seconds. An owner is stale
when its process is known to be gone (:mod:`dkrr.store.lease`), or when an observer saw the counter unchanged for 60 s
of its own clock; clocks of different machines are never compared.

Cost: one small write a heartbeat; a check reads one small file, 50 us (one request on an object store).
"""

from __future__ import annotations

import json
import logging
import uuid
from typing import Any

from dkrr.errors import LockedError
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.store.lease import is_gone, process_record, stale_seconds, watch

DRIVER = "driver.json"
logger = logging.getLogger("dkrr.runs")


def epoch_name(epoch: int) -> str:
    """Name of the document that makes its creator the owner of an epoch."""
    return f"drivers/{epoch:06d}.json"


def current_driver(directory: RunDirectory) -> dict[str, Any] | None:
    """The record of the owner of the latest epoch, with ``counter`` and ``released``; None before the first."""
    found = directory.read(DRIVER)
    epoch = 0 if found is None else int(found["epoch"])
    # driver.json may be behind: its writer was interrupted, or woke up once more
    while (newer := directory.read(epoch_name(epoch + 1))) is not None:
        found, epoch = newer, epoch + 1
    return found


def described(record: dict[str, Any]) -> str:
    """``process 123 on host``."""
    return f"process {record.get('pid')} on {record.get('host')}"


class DriverLease:
    """The right to drive a run; made by :meth:`acquire`. ``epoch`` is the number of this attempt."""

    def __init__(self, directory: RunDirectory, record: dict[str, Any]) -> None:
        self.directory = directory
        self.record = record
        self.epoch = int(record["epoch"])
        # run and epoch, for the locks of what the run writes
        self.holder = {"run": directory.location, "epoch": self.epoch}

    @classmethod
    def acquire(cls, directory: RunDirectory, kind: str) -> DriverLease:
        """Become the driver of a run, by taking over from a stale one where need be.

        Parameters
        ----------
        kind
            What this driver is: "fit", in the foreground, or "here", a detached process.

        Raises
        ------
        LockedError
            Another driver is alive; names host and process.
        """
        while True:
            found = current_driver(directory)
            if found is not None and not found.get("released") and not is_gone(found):
                _refuse_if_alive(directory, found)
            epoch = 1 if found is None else int(found["epoch"]) + 1
            record = {**process_record(), "epoch": epoch, "token": uuid.uuid4().hex, "kind": kind, "counter": 0}
            if directory.create(epoch_name(epoch), json.dumps(record).encode()):
                directory.write(DRIVER, record)
                return cls(directory, record)

    def check(self) -> None:
        """Return when this driver is still the owner.

        Raises
        ------
        LockedError
            Another one has taken over, or the run was removed.
        """
        is_local = self.directory.folder is not None
        # a network file system may remember for a while that a name did not exist, but not what a file held
        found = self.directory.read(DRIVER) if is_local else None
        if self.directory.has(epoch_name(self.epoch + 1)) or (found and int(found["epoch"]) > self.epoch):
            owner = current_driver(self.directory) or {}
            raise LockedError(
                f"{self.directory.location} was taken over by {described(owner)} (epoch {owner.get('epoch')}, "
                f"ours was {self.epoch})",
                hint="nothing to do here: the other driver goes on with the run",
                owner=owner,
            )
        if is_local and not self.directory.has(epoch_name(self.epoch)):
            raise LockedError(f"{self.directory.location} was removed while its driver was running")

    def beat(self, **values: Any) -> None:
        """Raise the counter, and set ``values`` of the record.

        Raises
        ------
        LockedError
            See :meth:`check`.
        """
        self.check()
        self.record = {**self.record, "counter": int(self.record["counter"]) + 1, **values}
        self.directory.write(DRIVER, self.record)

    def release(self) -> None:
        """Say that this driver has ended.

        Raises
        ------
        LockedError
            It is not the owner any more; nothing was written.
        """
        self.beat(released=True)


def _refuse_if_alive(directory: RunDirectory, seen: dict[str, Any]) -> None:
    """Watch the counter of another driver until it moves (an error) or has stood still for long enough."""
    patience = stale_seconds()
    logger.info("%s is driven by %s; watching its heartbeat for %g s", directory.location, described(seen), patience)
    now = watch(lambda: current_driver(directory), seen, patience)
    if now is None or now == seen or now.get("released") or is_gone(now):  # it may have removed the run
        return
    raise LockedError(
        f"{directory.location} is driven by {described(now)}",
        hint="wait for it (`dkrr wait`), or stop it (`dkrr cancel`)",
        owner=now,
    )
