"""The one document that says which version is in production: read whole, replaced whole, by compare and swap.

``aliases.json`` holds the version behind each alias, and an epoch that every change raises by one. A change is made on
what was read and lands only while that is still there; otherwise it is made again on what is there now. So two
promotions cannot mix, and a reader sees the state before a change or after it.

``fence`` is the highest epoch of a lease (:mod:`dkrr.jobs.runs.lease`) under which the document was changed: a retrain
job that lost its lease while it slept cannot promote any more.

``released`` remembers when a version lost its last alias, for readers may hold it for a while; ``removing`` names
versions that are being deleted, which no alias may take any more.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from dkrr.errors import LockedError, StoreError
from dkrr.store.documents import create_json, read_versioned, swap_json
from dkrr.store.failpoints import failpoint
from dkrr.store.files import join
from dkrr.store.lease import process_record

__all__ = ["ALIASES", "Aliases", "change_aliases", "read_aliases"]

ALIASES = "aliases.json"
FORMAT, FORMAT_VERSION = "dkrr-aliases", 1
MAX_HISTORY = 200
ATTEMPTS = 200


@dataclass(frozen=True, kw_only=True)
class Aliases:
    """What ``aliases.json`` says.

    Parameters
    ----------
    epoch
        Number of changes so far.
    fence
        Highest epoch of a lease under which a change was made.
    targets
        Version of each alias.
    released
        Seconds since 1970 at which a version lost its last alias.
    removing
        Versions that are being deleted.
    history
        The latest changes, oldest first: epoch, time, alias -> [before, after], why, host and pid.
    """

    epoch: int = 0
    fence: int = 0
    targets: dict[str, str] = field(default_factory=dict)
    released: dict[str, float] = field(default_factory=dict)
    removing: tuple[str, ...] = ()
    history: tuple[dict[str, Any], ...] = ()

    def moved(self, **targets: str | None) -> Aliases:
        """With other versions behind some aliases; None removes an alias."""
        merged: dict[str, str | None] = {**self.targets, **targets}
        after = {name: version for name, version in merged.items() if version is not None}
        lost = set(self.targets.values()) - set(after.values())
        now = time.time()
        released = {version: at for version, at in self.released.items() if version not in after.values()}
        return replace(self, targets=after, released=released | dict.fromkeys(lost, now))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "epoch": self.epoch,
            "fence": self.fence,
            "aliases": self.targets,
            "released": self.released,
            "removing": list(self.removing),
            "history": list(self.history),
        }


def read_aliases(folder: str) -> Aliases:
    """The aliases of the model in ``folder``; none where there is no document.

    Raises
    ------
    StoreError
        The document is of another format, or unreadable.
    """
    return _read(folder)[0]


def _read(folder: str) -> tuple[Aliases, str | None]:
    found = read_versioned(folder, ALIASES)
    if found is None:
        return Aliases(), None
    document = found.value
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StoreError(f"{join(folder, ALIASES)} was not written by dkrr", hint="check the path of the registry")
    if document.get("format_version") != FORMAT_VERSION:
        raise StoreError(
            f"{join(folder, ALIASES)} has format version {document.get('format_version')}; {FORMAT_VERSION} expected",
            hint="install a newer dkrr",
        )
    try:
        aliases = Aliases(
            epoch=int(document["epoch"]),
            fence=int(document["fence"]),
            targets={str(name): str(version) for name, version in document["aliases"].items()},
            released={str(version): float(at) for version, at in document["released"].items()},
            removing=tuple(map(str, document["removing"])),
            history=tuple(document["history"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise StoreError(f"{join(folder, ALIASES)} is unreadable ({exc!r})", hint="restore it") from exc
    return aliases, found.version


def change_aliases(
    folder: str, change: Callable[[Aliases], Aliases], *, why: str, lease_epoch: int | None = None
) -> Aliases:
    """Replace the document by ``change`` of it, and return what is there then.

    Parameters
    ----------
    change
        Called again whenever somebody else was faster; may raise. When it changes nothing, nothing is written.
    why
        For the history.
    lease_epoch
        Epoch of the lease under which this is done; a higher one in the document refuses it for good.

    Raises
    ------
    LockedError
        A later holder of the lease has been here, or others were faster again and again.
    """
    for attempt in range(ATTEMPTS):
        before, version = _read(folder)
        if lease_epoch is not None and before.fence > lease_epoch:
            raise LockedError(
                f"the aliases of {folder} belong to epoch {before.fence} of its lease; ours was {lease_epoch}",
                hint="nothing to do here: another retrain job has taken over",
            )
        after = change(before)
        if lease_epoch is not None:
            after = replace(after, fence=lease_epoch)
        if after == before:
            return before
        after = replace(after, epoch=before.epoch + 1, history=_history(before, after, why))
        failpoint("registry.before_pointer")
        # the token is what no other writer writes: it tells whose document it is when an answer was lost
        document = after.to_dict() | {"token": uuid.uuid4().hex}
        # durable: what was said to be in production is that after a power failure, too
        if version is None:
            done = create_json(folder, ALIASES, document, durable=True)
        else:
            done = swap_json(folder, ALIASES, document, version, durable=True)
        if done is not None:
            failpoint("registry.after_pointer")
            return after
        time.sleep(random.uniform(0.0, 0.01 * min(attempt + 1, 20)))  # noqa: S311  (spreads rivals, guards nothing)
    raise LockedError(
        f"{join(folder, ALIASES)} was changed by others {ATTEMPTS} times in a row", hint="try again later"
    )


def _history(before: Aliases, after: Aliases, why: str) -> tuple[dict[str, Any], ...]:
    names = sorted(before.targets.keys() | after.targets.keys())
    changed = {
        name: [before.targets.get(name), after.targets.get(name)]
        for name in names
        if before.targets.get(name) != after.targets.get(name)
    }
    if not changed:
        return before.history
    owner = process_record()
    entry = {
        "epoch": before.epoch + 1,
        "at": time.time(),
        "changed": changed,
        "why": why,
        "host": owner["host"],
        "pid": owner["pid"],
    }
    return (*before.history, entry)[-MAX_HISTORY:]
