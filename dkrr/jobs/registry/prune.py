"""Delete versions that nobody needs: no alias names them, no reader may hold them, and newer ones are there.

A reader resolves an alias once and reads its version for as long as it likes, so a version stays for a while (the
grace) after it lost its last alias. What is to be deleted is first named in ``aliases.json`` under ``removing``, by the
same compare and swap that moves aliases: either a promotion comes first, and the version stays, or it comes too late
and is refused.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime

from dkrr.errors import ParameterError
from dkrr.jobs.registry.aliases import Aliases, change_aliases, read_aliases
from dkrr.jobs.registry.versions import VERSIONS, Version, list_versions, remove_version
from dkrr.store.failpoints import failpoint
from dkrr.store.files import join

__all__ = ["GRACE_SECONDS", "prunable_versions", "prune_versions", "versions_kept"]

GRACE_SECONDS = 86_400.0


def versions_kept(aliases: Aliases, versions: list[Version], *, keep: int = 0, grace_seconds: float) -> set[str]:
    """Ids that may be needed.

    Parameters
    ----------
    keep
        How many of the newest versions stay besides those that aliases name.
    grace_seconds
        How long a version stays after it was published, and after it lost its last alias.
    """
    named = set(aliases.targets.values())
    newest = [version.id for version in versions if version.id not in named]
    since = time.time() - grace_seconds
    young = {version.id for version in versions if _created(version) > since}
    left = {version for version, at in aliases.released.items() if at > since}
    return named | set(newest[len(newest) - keep :] if keep else []) | young | left


def prunable_versions(folder: str, *, keep: int, grace_seconds: float = GRACE_SECONDS) -> list[Version]:
    """What :func:`prune_versions` would delete."""
    versions = list_versions(folder)
    kept = versions_kept(read_aliases(folder), versions, keep=keep, grace_seconds=grace_seconds)
    return [version for version in versions if version.id not in kept]


def prune_versions(folder: str, *, keep: int, grace_seconds: float = GRACE_SECONDS) -> list[Version]:
    """Delete what is not kept, and what an earlier deletion left; the versions that are gone now.

    Raises
    ------
    ParameterError
        A negative number.
    """
    if keep < 0 or grace_seconds < 0:
        raise ParameterError(f"keep is {keep}, the grace {grace_seconds:g} s", hint="neither can be negative")
    versions = list_versions(folder)

    def change(aliases: Aliases) -> Aliases:
        kept = versions_kept(aliases, versions, keep=keep, grace_seconds=grace_seconds)
        doomed = [version.id for version in versions if version.id not in kept]
        return replace(aliases, removing=tuple(sorted({*aliases.removing, *doomed})))

    removing = change_aliases(folder, change, why="prune").removing
    for name in removing:
        failpoint("registry.prune.before_delete")
        remove_version(join(folder, VERSIONS, name))
    if removing:
        change_aliases(folder, lambda aliases: _forget(aliases, set(removing)), why="prune")
    return [version for version in versions if version.id in removing]


def _forget(aliases: Aliases, gone: set[str]) -> Aliases:
    return replace(
        aliases,
        removing=tuple(name for name in aliases.removing if name not in gone),
        released={name: at for name, at in aliases.released.items() if name not in gone},
    )


def _created(version: Version) -> float:
    return datetime.fromisoformat(version.created_at).timestamp()
