"""A run's directory belongs to one job: what it claims, and what "auto" became for good.

``job.json`` names the job, ``plan.json`` fixes tile size, precision, solver and the split of every sum at the first
attempt. Where the work is done ([cluster], [storage]) may change from one attempt to the next.
"""

from __future__ import annotations

from typing import Any

from dkrr.errors import StoreError, StoreMismatchError
from dkrr.jobs.plan import Plan
from dkrr.jobs.spec import JobSpec
from dkrr.jobs.summary import plain
from dkrr.stores import local_root, read_json, write_json

__all__ = ["check_claim", "resolve_once"]


def check_claim(job: JobSpec, directory: str) -> dict[str, Any]:
    """What job.json shall hold; a directory that belongs to another job is refused."""
    wanted = {key: value for key, value in job.to_dict().items() if key not in ("cluster", "storage", "tune")}
    found = read_json(directory, "job.json")
    if found is not None and found != wanted:
        differing = sorted(
            f"[{table}] {key}: {found.get(table, {}).get(key)!r} there, {wanted.get(table, {}).get(key)!r} wanted"
            for table in found.keys() | wanted.keys()
            for key in found.get(table, {}).keys() | wanted.get(table, {}).keys()
            if found.get(table, {}).get(key) != wanted.get(table, {}).get(key)
        )
        raise StoreMismatchError(
            f"{directory} holds another job ({'; '.join(differing)})",
            hint="give another [output] directory, or remove it",
            fields=differing,
        )
    root = local_root(directory)
    if found is None and root is not None and root.exists() and any(root.iterdir()):
        raise StoreError(f"{directory} exists and is not a run of dkrr", hint="give another [output] directory")
    return wanted


def resolve_once(plan: Plan, directory: str) -> None:
    """What "auto" became is fixed by the first attempt; a later one must use the same tiles and the same solver."""
    found = read_json(directory, "plan.json")
    if found is None:
        write_json(directory, "plan.json", plain(plan.to_dict()))
        return
    for name in ("kernel", "alpha", "solver", "precision", "gram", "tile_size", "rank", "nystrom"):
        if name in found and found[name] != getattr(plan, name):
            object.__setattr__(plan, name, found[name])
