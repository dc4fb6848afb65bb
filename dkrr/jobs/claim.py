"""A run's directory belongs to one job: what it claims, and what "auto" became for good.

``job.json`` names the job, ``plan.json`` fixes tile size, precision, solver and the split of every sum at the first
attempt. Where the work is done ([cluster], [storage]) may change from one attempt to the next, and so may how far an
iteration goes ([solver] max_iter, allow_unconverged), which then goes on from where it stopped. A directory whose job
never came as far as a plan (its data was refused, say) may be taken by another one.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from dkrr.dataset.destination import check_outside
from dkrr.errors import StoreError, StoreMismatchError
from dkrr.jobs.documents import plain
from dkrr.jobs.runs.directory import RunDirectory, may_hold
from dkrr.jobs.spec import JobSpec
from dkrr.store.files import name_of, read_json, write_json

if TYPE_CHECKING:
    from dkrr.jobs.planned import Plan

__all__ = ["check_claim", "resolve_once", "run_id"]

NOT_CLAIMED = ("cluster", "storage", "tune")
LIMITS = ("max_iter", "allow_unconverged")


def run_id(job: JobSpec) -> str:
    """What ``{id}`` in the output directory becomes: 12 hexadecimal digits that belong to this job and no other."""
    if "{id}" not in job.output.directory:
        return name_of(job.output.directory)
    text = json.dumps(_claimed(job.to_dict()), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def check_claim(job: JobSpec, directory: str) -> dict[str, Any]:
    """What job.json shall hold: the whole resolved job.

    Raises
    ------
    StoreMismatchError
        The directory belongs to another job; the differing keys are listed.
    StoreError
        It holds something else, or lies in a model, a version or a data set.
    """
    check_outside(directory)
    if not may_hold(directory, "fit"):
        raise StoreError(f"{directory} exists and is not a run of dkrr", hint="give another [output] directory")
    document = job.to_dict()
    found = RunDirectory(directory).read("job.json")
    if found is not None and read_json(directory, "plan.json") is not None:
        there, wanted = (_without_limits(_claimed(job)) for job in (found, document))
        differing = sorted(
            f"[{table}] {key}: {there.get(table, {}).get(key)!r} there, {wanted.get(table, {}).get(key)!r} wanted"
            for table in there.keys() | wanted.keys()
            for key in there.get(table, {}).keys() | wanted.get(table, {}).keys()
            if there.get(table, {}).get(key) != wanted.get(table, {}).get(key)
        )
        if there != wanted:
            raise StoreMismatchError(
                f"{directory} holds another job ({'; '.join(differing)})",
                hint="give another [output] directory, or remove it",
                fields=differing,
            )
    return document


def _claimed(document: dict[str, Any]) -> dict[str, Any]:
    return {table: values for table, values in document.items() if table not in NOT_CLAIMED}


def _without_limits(document: dict[str, Any]) -> dict[str, Any]:
    solver = {name: value for name, value in document.get("solver", {}).items() if name not in LIMITS}
    return {**document, "solver": solver}


def resolve_once(plan: Plan, directory: str) -> None:
    """What "auto" became is fixed by the first attempt; a later one must use the same tiles and the same solver.

    So must a later fit of the same job on rows that have grown since: only tiles of the same size are continued. Of
    rows with other features nothing is continued, and the plan is theirs. So are the centres of a Nystrom regression,
    which are chosen of all rows.
    """
    found = read_json(directory, "plan.json")
    if found is None or found.get("num_features", plan.num_features) != plan.num_features:
        write_json(directory, "plan.json", plain(plan.to_dict()))
        return
    has_grown = found.get("num_rows", plan.num_rows) != plan.num_rows
    for name in ("kernel", "alpha", "solver", "precision", "gram", "tile_size", "split", "rank"):
        if name in found and found[name] != getattr(plan, name):
            if name == "split" and has_grown:
                continue  # no byte depends on it, and other rows are cut in another way
            object.__setattr__(plan, name, found[name])
    if has_grown or found.get("nystrom") != plan.nystrom:
        write_json(directory, "plan.json", plain(plan.to_dict()))
