"""A registry: a folder or address with one folder for each named model, its versions and its aliases.

    models/protein/    versions/0001-5f2c9a1e77ab/, versions/0002-.../, aliases.json, retrain/

    model = ModelRegistry("models").open("protein")
    version = model.resolve("production")      # once; the version stays what it is
    load_model(version.model_path).predict(X)

"production" is what is served, "previous" what was before it, "candidate" what a retrain job has fitted last.

A version is written once and never changed: model.zarr, and version.json, which is created last; without it there is no
version. Its name is a number, counted up, and the beginning of a key that says what it was made from; publishing again
what has this key finds the version that is there. A number belongs to the model whose ``numbers/0007.json`` was created
first, so that of two publishers each has its own.

``aliases.json`` says which version is behind each alias, and is replaced whole, by compare and swap: a change is made
on what was read and lands only while that is still there; otherwise it is made again on what is there now. So two
promotions cannot mix, and a reader sees the state before a change or after it. A reader resolves an alias once and
reads its version for as long as it likes, so a version stays for a while (the grace) after it lost its last alias. What
is to be deleted is first named under ``removing``: either a promotion comes first, and the version stays, or it comes
too late and is refused.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dkrr.errors import LockedError, ParameterError, StoreError
from dkrr.jobs.run_directory import utc_now
from dkrr.store.documents import (
    MANIFEST,
    check_manifest,
    create_json,
    plain,
    read_versioned,
    swap_json,
)
from dkrr.store.files import (
    children,
    delete_key,
    is_url,
    join,
    key_size,
    list_keys,
    name_of,
    note_user,
    parent_of,
    read_json,
    read_key,
    remove_drafts,
    remove_parts,
    sync_folder,
    sync_path,
    write_key,
)
from dkrr.store.interruption import check_fence
from dkrr.store.lease import hold_lock, process_record
from dkrr.store.objects import parse_address

ALIASES, VERSIONS, RECORD, MODEL = "aliases.json", "versions", "version.json", "model.zarr"
NAMES = ("production", "candidate", "previous")
MODELS_VARIABLE = "DKRR_MODELS"
GRACE_SECONDS = 86_400.0
MAX_HISTORY = ATTEMPTS = 200
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_REFERENCE = re.compile(rf"({_NAME.pattern})@({_NAME.pattern})")
_ID = re.compile(r"\d{4,}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Reference:
    """A model by name, and which of its versions: an alias, an id, or the number an id begins with."""

    name: str
    selector: str


def check_name(name: str) -> str:
    """The name of a model, if it is one.

    Raises
    ------
    ParameterError
        It holds other characters, or is too long.
    """
    if not _is_name(name):
        raise ParameterError(
            f"{name!r} is not the name of a model", hint="use a-z, 0-9, '.', '_' and '-', at most 64 of them"
        )
    return name


def _is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and not name.endswith((".partial", ".lock"))


def parse_reference(text: str) -> Reference | None:
    """The reference that a text is; None for a path that exists, an address, and everything else."""
    match = _REFERENCE.fullmatch(text)
    return None if match is None or is_url(text) or os.path.exists(text) else Reference(match[1], match[2])


def models_folder(given: str | None = None) -> str:
    """Root of the registry: what is given, else ``DKRR_MODELS``, a path or an address, else ./models."""
    text = given or os.environ.get(MODELS_VARIABLE) or "models"
    return str(parse_address(text)) if is_url(text) else os.path.abspath(os.path.expanduser(text))


class _Document(BaseModel):
    """A JSON document of a registry."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)
    format_version: Literal[1] = 1

    @classmethod
    def checked(cls, document: Any, location: str) -> Self:
        """The document that was read at a location.

        Raises
        ------
        StoreError
            It is of another format, or unreadable.
        """
        try:
            return cls.model_validate(document)
        except ValidationError as exc:
            what = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in exc.errors()[:3])
            raise StoreError(
                f"{location} was not written by dkrr, or is damaged ({what})",
                hint="check the path of the registry, restore the file, or install a newer dkrr",
            ) from exc

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return self.model_dump(by_alias=True, mode="json")


class Aliases(_Document):
    """What ``aliases.json`` says.

    Parameters
    ----------
    epoch
        Number of changes so far.
    fence
        Highest epoch of a lease (:mod:`dkrr.store.lease`) under which a change was made: a retrain job that lost
        its lease while it slept cannot promote any more.
    targets
        Version of each alias.
    released
        Seconds since 1970 at which a version lost its last alias.
    removing
        Versions that are being deleted, which no alias may take any more.
    history
        The latest changes, oldest first: epoch, time, alias -> [before, after], why, host and pid.
    """

    format: Literal["dkrr-aliases"] = "dkrr-aliases"
    epoch: int
    fence: int
    targets: dict[str, str] = Field(alias="aliases")
    released: dict[str, float]
    removing: tuple[str, ...]
    history: tuple[dict[str, Any], ...]

    def moved(self, **targets: str | None) -> Aliases:
        """With other versions behind some aliases; None removes an alias."""
        merged: dict[str, str | None] = {**self.targets, **targets}
        after = {name: version for name, version in merged.items() if version is not None}
        released = {version: at for version, at in self.released.items() if version not in after.values()}
        released |= dict.fromkeys(set(self.targets.values()) - set(after.values()), time.time())
        return self.model_copy(update={"targets": after, "released": released})

    def noted(self, before: Aliases, why: str) -> Aliases:
        """As the next change after ``before``, with an entry in the history where an alias moved."""
        names = sorted(before.targets.keys() | self.targets.keys())
        changed = {name: [before.targets.get(name), self.targets.get(name)] for name in names}
        changed = {name: pair for name, pair in changed.items() if pair[0] != pair[1]}
        owner, epoch = process_record(), before.epoch + 1
        entry = {"epoch": epoch, "at": time.time(), "changed": changed, "why": why}
        entry |= {"host": owner["host"], "pid": owner["pid"]}
        history = (*before.history, entry)[-MAX_HISTORY:] if changed else before.history
        return self.model_copy(update={"epoch": epoch, "history": history})


_NOTHING = Aliases(epoch=0, fence=0, targets={}, released={}, removing=(), history=())


class Version(_Document):
    """One version of a model.

    Parameters
    ----------
    id
        Its name, for example ``0007-3fa9c1d25b0e``.
    number
        The number that the id begins with.
    key
        Hash of what it was made from.
    location
        Path or address of its folder.
    model_digest
        Digest of the model's manifest, and so of every byte of it.
    created_at
        UTC, ISO 8601.
    num_rows
        Training rows.
    facts
        What else was said about it when it was published: scores, batches, the report of the gate.
    """

    format: Literal["dkrr-model-version"] = "dkrr-model-version"
    id: str
    number: int
    key: str
    location: str = Field(exclude=True)
    model_digest: str
    created_at: str
    num_rows: int
    facts: dict[str, Any]

    @property
    def model_path(self) -> str:
        """Path or address of the model."""
        return join(self.location, MODEL)


def check_version(version: Version) -> None:
    """Read the whole model of a version and compare it with what was published.

    Raises
    ------
    StoreError
        A key is missing, extra or changed.
    """
    found = check_manifest(version.model_path)
    if found != version.model_digest:
        raise StoreError(
            f"{version.model_path} is another model than was published ({found[:12]}, {version.model_digest[:12]} "
            "expected)",
            hint="restore it; versions are never changed",
        )


class ModelRegistry:
    """The models below one root.

    Parameters
    ----------
    root
        Path or address; None: ``DKRR_MODELS``, else ./models.
    """

    def __init__(self, root: str | None = None) -> None:
        self.root = models_folder(root)

    def names(self) -> list[str]:
        """Names of the models that have aliases or versions, sorted."""
        places = {name: join(self.root, name) for name in children(self.root) if _is_name(name)}
        return [
            name
            for name, place in places.items()
            if key_size(place, ALIASES) is not None or children(join(place, VERSIONS))
        ]

    def open(self, name: str) -> NamedModel:
        """The model of this name, which need not have versions yet.

        Raises
        ------
        ParameterError
            Not a name.
        """
        return NamedModel(join(self.root, check_name(name)))


class NamedModel:
    """One model of a registry, by the path or address of its folder."""

    def __init__(self, location: str) -> None:
        self.location, self.root, self.name = location, parent_of(location), name_of(location)

    # --- what is there ------------------------------------------------------------------------------------------------

    def version(self, name: str) -> Version | None:
        """The version of this id; None when it is not there, or not complete."""
        location = join(self.location, VERSIONS, name)
        document = read_json(location, RECORD) if _ID.fullmatch(name) else None
        if document is None:
            return None
        there = {"id": name, "location": location}
        return Version.checked(document | there if isinstance(document, dict) else None, join(location, RECORD))

    def versions(self) -> list[Version]:
        """All versions that are complete, oldest first."""
        found = [self.version(name) for name in children(join(self.location, VERSIONS))]
        return sorted((item for item in found if item is not None), key=lambda item: (item.number, item.id))

    def aliases(self) -> Aliases:
        """The aliases as they are now; none where there is no document.

        Raises
        ------
        StoreError
            The document is of another format, or unreadable.
        """
        return self._aliases()[0]

    def _aliases(self) -> tuple[Aliases, str | None]:
        found = read_versioned(self.location, ALIASES)
        if found is None:
            return _NOTHING, None
        return Aliases.checked(found.value, join(self.location, ALIASES)), found.version

    def resolve(self, selector: str = "production") -> Version:
        """The version behind an alias, an id, or the number that an id begins with.

        What is returned does not change: who holds it stays on this version, whatever the alias names later.

        Raises
        ------
        StoreError
            There is no such alias or version.
        """
        targets = self.aliases().targets
        if selector in targets:
            named = self.version(targets[selector])
            if named is not None:
                return named
            raise StoreError(
                f"{self.name}@{selector} is version {targets[selector]}, which is not in {self.location}",
                hint="restore it, or promote another version",
            )
        versions = self.versions()
        numbered = int(selector) if selector.isdecimal() else None
        found = [version for version in versions if version.id == selector or version.number == numbered]
        if found:
            return found[0]
        if not versions:
            raise StoreError(f"{self.location} has no versions", hint="check the name and the root of the registry")
        known = ", ".join([*targets, *(version.id for version in versions[-5:])])
        what = "no alias" if selector in NAMES else "neither alias nor version"
        raise StoreError(
            f"{self.name} has {what} {selector!r} (there are {known})", hint="`dkrr models list` shows all"
        )

    # --- publishing ---------------------------------------------------------------------------------------------------

    def add(
        self,
        model_path: str,
        *,
        key: str | None = None,
        facts: dict[str, Any] | None = None,
        candidate: bool = True,
        lease_epoch: int | None = None,
    ) -> Version:
        """Publish a saved model as a version, and let "candidate" name it.

        Parameters
        ----------
        key
            Hash of what the model was made from; by default the digest of the model itself. A version with this key
            that is there already is found and not written again.
        facts
            Plain data that the version keeps.

        Raises
        ------
        StoreError
            The model is not whole.
        """
        document = read_json(model_path, "zarr.json")
        attributes = document.get("attributes") if isinstance(document, dict) else None
        if not isinstance(attributes, dict) or attributes.get("format") != "dkrr-model":
            raise StoreError(f"{model_path} is not a model of dkrr", hint="give a model.zarr")
        digest, provenance = check_manifest(model_path), attributes.get("provenance") or {}
        key = key or digest
        versions, removing = self.versions(), self.aliases().removing
        version = next((found for found in versions if found.key == key and found.id not in removing), None)
        if version is None:
            number = self._number(1 + max((found.number for found in versions), default=0), key, digest)
            version = self._publish(model_path, number, key, digest, provenance, facts or {})
        note_user(provenance.get("store"), self.root)
        if candidate:
            moved = {"candidate": version.id}
            self.change(lambda aliases: aliases.moved(**moved), why="published", lease_epoch=lease_epoch)
        return version

    def _number(self, number: int, key: str, digest: str) -> int:
        """The first number from ``number`` on that no other model has, and that no other will have."""
        claim = {"key": key, "model_digest": digest}  # the same bytes may be published twice: nothing is overwritten
        removing = self.aliases().removing  # by a deletion that goes on, or was interrupted
        while create_json(self.location, name := f"numbers/{number:04d}.json", claim, durable=True) is None:
            if read_json(self.location, name) == claim and _id(number, key) not in removing:
                break
            number += 1
        return number

    def _publish(
        self, model_path: str, number: int, key: str, digest: str, provenance: dict[str, Any], facts: dict[str, Any]
    ) -> Version:
        """Copy a model, its record last; one that somebody else has copied meanwhile is taken as it is."""
        name = _id(number, key)
        with hold_lock(join(self.location, f"numbers/{number:04d}.json"), wait=True):
            return self.version(name) or self._copied(name, model_path, number, key, digest, provenance, facts)

    def _copied(
        self,
        name: str,
        model_path: str,
        number: int,
        key: str,
        digest: str,
        provenance: dict[str, Any],
        facts: dict[str, Any],
    ) -> Version:
        arrays = [read_json(join(model_path, array), "zarr.json") for array in ("X_fit", "dual_coef")]
        kept = next((array["shape"][0] for array in arrays if isinstance(array, dict)), 0)
        version = Version(
            id=name,
            number=number,
            key=key,
            location=join(self.location, VERSIONS, name),
            model_digest=digest,
            created_at=utc_now(),
            num_rows=int(provenance.get("num_training_rows") or kept),
            facts=plain(facts),
        )
        remove_drafts(version.model_path)
        _copy(model_path, version.model_path)
        if check_manifest(version.model_path) != digest:
            raise StoreError(f"{model_path} was replaced during the copy", hint="start again")
        if not is_url(version.location):
            sync_folder(Path(version.location))
            for folder in Path(version.location).parents[:3]:  # each of which may be new
                sync_path(folder)
        check_fence()
        create_json(version.location, RECORD, version.to_dict() | {"token": uuid.uuid4().hex}, durable=True)
        found = self.version(name)
        if found is None:
            raise StoreError(f"{version.location} was removed while it was published", hint="start again")
        return found

    # --- aliases ------------------------------------------------------------------------------------------------------

    def change(self, change: Callable[[Aliases], Aliases], *, why: str, lease_epoch: int | None = None) -> Aliases:
        """Replace the aliases by ``change`` of them, and return what is there then.

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
        StoreError
            A version that an alias is to name is not there, or being removed.
        LockedError
            A later holder of the lease has been here, or others were faster again and again.
        """
        for attempt in range(ATTEMPTS):
            before, version = self._aliases()
            if lease_epoch is not None and before.fence > lease_epoch:
                raise LockedError(
                    f"aliases of {self.location} belong to epoch {before.fence} of its lease; ours was {lease_epoch}",
                    hint="nothing to do here: another retrain job has taken over",
                )
            fence = before.fence if lease_epoch is None else lease_epoch
            after = change(before).model_copy(update={"fence": fence})
            if after == before:
                return before
            # a deletion that begins after the aliases were read keeps them from being replaced; one that has ended is
            # seen here
            for name in set(after.targets.values()) - set(before.targets.values()):
                if name in before.removing or self.version(name) is None:
                    raise StoreError(f"{name} was removed from {self.location}", hint="`dkrr models list` shows all")
            after = after.noted(before, why)
            # the token is what no other writer writes: it tells whose document it is when an answer was lost
            document = after.to_dict() | {"token": uuid.uuid4().hex}
            # durable: what was said to be in production is that after a power failure, too
            write = create_json if version is None else partial(swap_json, version=version)
            if write(self.location, ALIASES, document, durable=True) is not None:
                return after
            time.sleep(random.uniform(0.0, 0.01 * min(attempt + 1, 20)))  # noqa: S311  (spreads rivals, guards nothing)
        raise LockedError(
            f"{join(self.location, ALIASES)} was changed by others {ATTEMPTS} times in a row", hint="try again later"
        )

    def fence(self, lease_epoch: int) -> Aliases:
        """Refuse from now on changes under an earlier lease, see :meth:`change`."""
        return self.change(lambda aliases: aliases, why="fence", lease_epoch=lease_epoch)

    def promote(
        self,
        selector: str = "candidate",
        *,
        expected: str | None = "",
        lease_epoch: int | None = None,
        why: str = "promoted",
    ) -> Aliases:
        """Put a version into production, after reading all of it; what was there becomes "previous".

        Parameters
        ----------
        expected
            The version (or None) that must be in production for this to happen; "" does not ask.
        lease_epoch
            Of the retrain job that does it, see :meth:`change`.

        Raises
        ------
        StoreError
            There is no such version, or it is damaged, or being removed.
        LockedError
            Something else than ``expected`` is in production, or the lease is another's.
        """
        version = self.resolve(selector)
        check_version(version)

        def change(aliases: Aliases) -> Aliases:
            now = aliases.targets.get("production")
            if now == version.id:
                return aliases
            if expected not in ("", now):
                raise LockedError(
                    f"{self.name}@production is {now}, and was {expected} when {version.id} was judged",
                    hint="start again: it has to be compared with what is in production now",
                )
            # what is production now must not be "previous" too: a rollback would change nothing
            left = {name: None for name in ("candidate", "previous") if aliases.targets.get(name) == version.id}
            return aliases.moved(**left | ({} if now is None else {"previous": now}) | {"production": version.id})

        return self.change(change, why=why, lease_epoch=lease_epoch)

    def rollback(self, *, why: str = "rolled back") -> Aliases:
        """Put the previous version into production again; a second time undoes the first.

        Raises
        ------
        StoreError
            There is no previous version, or it is damaged.
        """
        targets = self.aliases().targets
        if "previous" not in targets:
            raise StoreError(f"{self.name} has no previous version", hint=f"`dkrr models promote {self.name} VERSION`")
        return self.promote(targets["previous"], expected=targets.get("production"), why=why)

    # --- deleting -----------------------------------------------------------------------------------------------------

    def unneeded(self, *, keep: int = 0, grace_seconds: float = GRACE_SECONDS) -> list[Version]:
        """Versions that no alias names, no reader may hold, and that are not among the newest.

        Parameters
        ----------
        keep
            How many of the newest versions stay besides those that aliases name.
        grace_seconds
            How long a version stays after it was published, and after it lost its last alias.
        """
        return _unneeded(self.versions(), self.aliases(), keep, grace_seconds)

    def prune(self, *, keep: int, grace_seconds: float = GRACE_SECONDS) -> list[Version]:
        """Delete what is :meth:`unneeded`, and what an earlier deletion left; the versions that are gone now.

        Raises
        ------
        ParameterError
            A negative number.
        """
        from dkrr.models.model import ARRAYS  # half a second, which listing does without

        if keep < 0 or grace_seconds < 0:
            raise ParameterError(f"keep is {keep}, the grace {grace_seconds:g} s", hint="neither can be negative")
        versions = self.versions()

        def mark(aliases: Aliases) -> Aliases:
            doomed = [version.id for version in _unneeded(versions, aliases, keep, grace_seconds)]
            return aliases.model_copy(update={"removing": tuple(sorted({*aliases.removing, *doomed}))})

        def forget(aliases: Aliases) -> Aliases:
            removing = tuple(name for name in aliases.removing if name not in gone)
            released = {name: at for name, at in aliases.released.items() if name not in gone}
            return aliases.model_copy(update={"removing": removing, "released": released})

        gone = self.change(mark, why="prune").removing
        for name in gone:
            location = join(self.location, VERSIONS, name)
            delete_key(location, RECORD)  # first, so that a deletion which is interrupted leaves no version
            remove_parts(join(location, MODEL), [MANIFEST], ARRAYS)
            if not is_url(location):
                with contextlib.suppress(OSError):  # somebody keeps something there
                    os.rmdir(location)
        # what could not be removed is left to the next time
        gone = tuple(name for name in gone if not {*ARRAYS} & {*children(join(self.location, VERSIONS, name, MODEL))})
        self.change(forget, why="prune")
        return [version for version in versions if version.id in gone]


def _id(number: int, key: str) -> str:
    return f"{number:04d}-{key[:12]}"


def _unneeded(versions: list[Version], aliases: Aliases, keep: int, grace_seconds: float) -> list[Version]:
    named, since = set(aliases.targets.values()), time.time() - grace_seconds
    others = [version for version in versions if version.id not in named]
    return [
        version
        for version in (others[:-keep] if keep else others)
        if datetime.fromisoformat(version.created_at).timestamp() <= since
        and aliases.released.get(version.id, 0.0) <= since
    ]


def _copy(source: str, target: str) -> None:
    """Every key of a saved model, its manifest last."""
    for key in sorted(list_keys(source), key=lambda key: (key == MANIFEST, key)):
        data = read_key(source, key)
        if data is None:
            raise StoreError(f"{key} of {source} is gone", hint="it was replaced during the copy; start again")
        write_key(target, key, data)
