"""A registry: a folder or address with one folder for each model, its versions and its aliases.

    models/protein/    versions/0001-5f2c9a1e77ab/, versions/0002-.../, aliases.json, retrain/

    model = ModelRegistry("models").open("protein")
    version = model.resolve("production")      # once; the version stays what it is
    load_model(version.model_path).predict(X)

"production" is what is served, "previous" what was before it, "candidate" what a retrain job has fitted last.
"""

from __future__ import annotations

from typing import Any

from dkrr.errors import LockedError, StoreError
from dkrr.jobs.registry.aliases import ALIASES, Aliases, change_aliases, read_aliases
from dkrr.jobs.registry.names import NAMES, check_name, models_folder
from dkrr.jobs.registry.versions import VERSIONS, Version, check_version, list_versions, open_version, publish_version
from dkrr.store.documents import manifest_digest
from dkrr.store.files import children, join, key_size, note_user, read_json

__all__ = ["ModelRegistry", "NamedModel"]


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
        found = []
        for name in children(self.root):
            location = join(self.root, name)
            if key_size(location, ALIASES) is not None or children(join(location, VERSIONS)):
                found.append(name)
        return found

    def open(self, name: str) -> NamedModel:
        """The model of this name, which need not have versions yet.

        Raises
        ------
        ParameterError
            Not a name.
        """
        return NamedModel(self.root, check_name(name))


class NamedModel:
    """One model of a registry; made by :meth:`ModelRegistry.open`."""

    def __init__(self, root: str, name: str) -> None:
        self.name = name
        self.root = root
        self.location = join(root, name)

    def versions(self) -> list[Version]:
        """All versions, oldest first."""
        return list_versions(self.location)

    def has(self, version: str) -> bool:
        """Whether the version of this id is there, whole."""
        return open_version(self.location, version) is not None

    def aliases(self) -> Aliases:
        """The aliases as they are now."""
        return read_aliases(self.location)

    def resolve(self, selector: str = "production") -> Version:
        """The version behind an alias, an id, or the number that an id begins with.

        What is returned does not change: who holds it stays on this version, whatever the alias names later.

        Raises
        ------
        StoreError
            There is no such alias or version.
        """
        return self._resolve(selector, self.aliases())

    def _resolve(self, selector: str, aliases: Aliases) -> Version:
        if selector in aliases.targets:
            wanted = aliases.targets[selector]
            named = open_version(self.location, wanted)
            if named is not None:
                return named
            raise StoreError(
                f"{self.name}@{selector} is version {wanted}, which is not in {self.location}",
                hint="restore it, or promote another version",
            )
        versions = self.versions()
        numbered = int(selector) if selector.isdecimal() else None
        found = [version for version in versions if version.id == selector or version.number == numbered]
        if len(found) == 1:
            return found[0]
        if not versions:
            raise StoreError(f"{self.location} has no versions", hint="check the name and the root of the registry")
        if len(found) > 1:
            raise StoreError(f"{self.name} has {len(found)} versions {selector}", hint="give the whole id")
        known = ", ".join([*aliases.targets, *(version.id for version in versions[-5:])])
        what = "no alias" if selector in NAMES else "neither alias nor version"
        raise StoreError(
            f"{self.name} has {what} {selector!r} (there are {known})", hint="`dkrr models list` shows all"
        )

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
        document = read_json(model_path, "zarr.json") or {}
        attributes = document.get("attributes") if isinstance(document, dict) else None
        if not isinstance(attributes, dict) or attributes.get("format") != "dkrr-model":
            raise StoreError(f"{model_path} is not a model of dkrr", hint="give a model.zarr")
        version = publish_version(
            self.location,
            model_path,
            key=key or manifest_digest(model_path),
            facts=facts or {},
            num_rows=_num_rows(model_path),
        )
        note_user((attributes.get("provenance") or {}).get("store"), self.root)
        if candidate:
            change_aliases(
                self.location,
                lambda aliases: self._named(aliases, candidate=version.id),
                why="published",
                lease_epoch=lease_epoch,
            )
        return version

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
            Of the retrain job that does it, see :func:`~dkrr.jobs.registry.aliases.change_aliases`.

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
            if expected != "" and now != expected:
                raise LockedError(
                    f"{self.name}@production is {now}, and was {expected} when {version.id} was judged",
                    hint="start again: it has to be compared with what is in production now",
                )
            moved = self._named(aliases, production=version.id)
            if now is not None:
                moved = moved.moved(previous=now)
            if moved.targets.get("candidate") == version.id:
                moved = moved.moved(candidate=None)
            # what is production now must not be "previous" too: a rollback would change nothing
            return moved.moved(previous=None) if moved.targets.get("previous") == version.id else moved

        return change_aliases(self.location, change, why=why, lease_epoch=lease_epoch)

    def rollback(self, *, why: str = "rolled back") -> Aliases:
        """Put the previous version into production again; a second time undoes the first.

        Raises
        ------
        StoreError
            There is no previous version, or it is damaged.
        """
        before = self.aliases()
        if "previous" not in before.targets:
            raise StoreError(f"{self.name} has no previous version", hint=f"`dkrr models promote {self.name} VERSION`")
        check_version(self._resolve("previous", before))

        def change(aliases: Aliases) -> Aliases:
            now, then = aliases.targets.get("production"), aliases.targets.get("previous")
            if then != before.targets["previous"]:
                raise LockedError(f"{self.name} was changed by another process meanwhile", hint="look, and try again")
            return self._named(aliases, production=then, previous=now)

        return change_aliases(self.location, change, why=why)

    def fence(self, lease_epoch: int) -> Aliases:
        """Refuse from now on changes under an earlier lease; see :func:`~dkrr.jobs.registry.aliases.change_aliases`."""
        return change_aliases(self.location, lambda aliases: aliases, why="fence", lease_epoch=lease_epoch)

    def _named(self, aliases: Aliases, **targets: str | None) -> Aliases:
        for name, version in targets.items():
            if version in aliases.removing:
                raise StoreError(f"{version} of {self.name} is being removed", hint=f"let {name} name another version")
        return aliases.moved(**targets)


def _num_rows(model_path: str) -> int:
    """Training rows of a saved model, from its metadata."""
    for name in ("X_fit", "dual_coef"):
        document = read_json(join(model_path, name), "zarr.json")
        if isinstance(document, dict):
            return int(document["shape"][0])
    return 0
