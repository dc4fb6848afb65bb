"""What a path holds, and whether it is whole: data sets, models, Gram matrices, factors, runs and registered models.

You need it for ``dkrr info``. Describing reads metadata only; verifying reads every byte once, with memory for one
chunk.

And what a store holds that no run and no model refers to, for ``dkrr gc``.

A Gram matrix, a factor or a copy of rows is needed when a JSON document of a run or a model names its key, or when a
run that has a plan and no result may go on writing it; so are preconditioners and the state of an iteration ("solves").
While a run is being planned, all of it is: nobody knows yet what the run will find.
Runs and models are looked for in the folder that holds the store and below it, and wherever the store was told of some
(:func:`~dkrr.store.files.note_user`: each run, saved model and registry that uses a store elsewhere does so), or
remembers a model of.
You need this when a store has grown: factors are kept so that a fit can be extended, and nothing else removes them.
Scratch, that of a factor too unless such a run may go on with it, and what interrupted writes left are garbage. What
changed lately is left alone: it may belong to a fit that is running.

A store may be a folder with other things in it, and so may the one that holds it. Only names that dkrr gives are looked
at: in the store those made of keys, elsewhere those of drafts (``NAME.<32 hexadecimal digits>.partial``) of a run, a
model or a data set, or in one.

Of the versions of a registered model only those count that an alias names, that lost their alias within the last day,
or that are as young; a version that is kept for other reasons predicts without a factor.

What is deleted is locked and looked at once more before: between a list and a person's answer a fit may have begun.

Cost: one walk over the folders, or one listing; documents are read, chunks are not. Again for each 64 deletions.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dkrr.dataset import open_dataset
from dkrr.dataset.rows import RowArray
from dkrr.dataset.writer import remove_dataset
from dkrr.errors import DkrrError, LockedError, StoreError
from dkrr.jobs.facts import of_whitened, result_facts
from dkrr.jobs.history import History
from dkrr.jobs.registry import ALIASES, GRACE_SECONDS, MODEL, RECORD, VERSIONS, NamedModel, check_version
from dkrr.jobs.retrain_spec import RetrainSpec
from dkrr.jobs.run_directory import LEFT_OUT, RunDirectory, look_once, run_kind
from dkrr.kernels import kernel_from_dict
from dkrr.linalg.catalogue import recorded_models
from dkrr.linalg.direct import factor_of_scratch
from dkrr.linalg.gram import verify_tiles
from dkrr.linalg.operators import RidgeOperator, Rows
from dkrr.markup import listed
from dkrr.models.model import BLOCK_ROWS, load_model
from dkrr.selection.tuning import UNFINISHED
from dkrr.store.documents import manifest_digest
from dkrr.store.files import (
    USERS,
    arrays_below,
    children,
    delete_key,
    is_below,
    is_url,
    join,
    list_entries,
    list_keys,
    name_of,
    parent_of,
    parse_json,
    read_json,
    read_key,
    relative_to,
    sibling,
    users_of,
)
from dkrr.store.lease import hold_lock, is_gone, is_here, owner_of, stale_seconds
from dkrr.store.objects import Entry
from dkrr.tiles import TileGrid, TileMatrix


def describe(path: str) -> tuple[str, dict[str, Any]]:
    """The kind of thing at ``path`` and the facts about it, in the order in which people want them.

    Raises
    ------
    StoreError
        Nothing of dkrr is there.
    """
    kind = kind_of(path)
    return kind, _KINDS[kind][0](path)


def verify(path: str) -> list[str]:
    """Read everything at ``path`` and return one sentence for each problem; none means that it is whole.

    Raises
    ------
    StoreError
        Nothing of dkrr is there.
    """
    kind, problems = kind_of(path), list[str]()
    try:
        problems.extend(_KINDS[kind][1](path) or ())
    except DkrrError as exc:
        problems.append(exc.message)
    return problems


def kind_of(path: str) -> str:
    """What is at ``path``, in one or two words.

    Raises
    ------
    StoreError
        Nothing of dkrr is there.
    """
    document = read_json(path, "zarr.json")
    if document is None:
        if read_json(path, ALIASES) is not None:
            return "registered model"
        if run_kind(path) not in (None, "other"):
            return "run"
        if not is_url(path) and not os.path.lexists(path):
            raise StoreError(f"{path} does not exist", hint="check the path; `dkrr list` shows the runs that there are")
        raise StoreError(
            f"{path} is not a data set, model, Gram matrix, factor or run (no zarr.json)",
            hint="name one of those; `dkrr ingest TABLE DEST` makes a data set",
        )
    attributes = document.get("attributes") if isinstance(document, dict) else None
    if isinstance(attributes, dict):
        if attributes.get("dkrr_format") == "dataset":
            return "data set"
        if attributes.get("format") == "dkrr-model":
            return "model"
        if "tile_size" in attributes and "rows_digest" in attributes:
            return "factor" if "alpha" in attributes else "Gram matrix"
    raise StoreError(f"{path} was not written by dkrr", hint="`dkrr ingest` turns arrays into a data set")


def _describe_dataset(path: str) -> dict[str, Any]:
    dataset = open_dataset(path)
    generations = []
    for found in dataset.generations:
        name = "" if found.label is None else f" {found.label}"
        dropped = f", {found.num_dropped:,} dropped for missing values" if found.num_dropped else ""
        generations.append(f"{found.number}{name}: {found.num_rows:,} rows{dropped}")
    return {
        "rows": dataset.num_rows,
        "features": f"{dataset.num_features} ({listed(dataset.feature_names)})",
        "targets": f"{dataset.num_targets} ({listed(dataset.target_names)})" if dataset.num_targets else "0",
        "weights": dataset.weight_name or "none",
        "classes": "none" if dataset.classes is None else ", ".join(map(str, dataset.classes)),
        "chunks": f"{dataset.X.num_chunks} of {dataset.X.rows_per_chunk} rows",
        "generations": ", ".join(generations),
        "digest": dataset.digest,
    }


def _describe_model(path: str) -> dict[str, Any]:
    model = load_model(path, verify=False)
    solution, scaling, intercept = model.solution, model.scaling, model.intercept
    whitens_y, (worst, exact) = model.whitens_targets, solution.worst
    fitted = model.provenance.get("num_training_rows")
    facts = {
        **({} if fitted is None else {"rows": fitted}),
        **({} if fitted == model.num_rows else {"coefficients": model.num_rows}),
        "features": model.num_features,
        "targets": model.num_targets,
        "kernel": "precomputed" if model.kernel is None else model.kernel.to_dict(),
        "scaling": "none" if scaling is None else "X and y whitened" if whitens_y else "X whitened",
        "intercept": "none" if intercept is None else listed(intercept.tolist(), ".6g") + of_whitened(whitens_y),
        "solver": f"{solution.solver}, {solution.precision}" + ("" if solution.converged else ", NOT CONVERGED"),
        "iterations": solution.num_iterations,
        worst: f"{exact:.1e}",
    }
    if solution.backward_error:
        facts["backward error"] = f"{max(solution.backward_error):.1e}"
    if not solution.converged or model.provenance.get("is_approximation"):
        facts["note"] = solution.message
    details = {str(name).replace("_", " "): value for name, value in model.provenance.items()}
    return facts | {name: value for name, value in details.items() if name not in facts}


def _verify_model(path: str) -> None:
    model = load_model(path)  # compares every key with the manifest
    for rows in (part for part in (model.x_fit, model.dual_coef) if part is not None):
        for start in range(0, rows.num_rows, BLOCK_ROWS):
            rows.read(start, min(start + BLOCK_ROWS, rows.num_rows))


def _describe_tiles(path: str) -> dict[str, Any]:
    matrix = TileMatrix.open(path)
    total = matrix.grid.num_lower
    return {
        "rows": matrix.grid.n,
        "tiles": f"{total - len(matrix.missing())} of {total}, {matrix.grid.tile_size} rows each",
        "bytes": matrix.num_bytes,
        **{name.replace("_", " "): value for name, value in matrix.array.attributes.items() if name != "tile_size"},
    }


def _verify_tiles(path: str) -> Iterable[str]:
    """Every lower tile: there, its checksum right, finite, sampled entries as they must be; and no file besides."""
    matrix = TileMatrix.open(path)
    attributes = matrix.array.attributes
    return verify_tiles(matrix, _operator_of(path, attributes), is_factor="alpha" in attributes)


def _operator_of(path: str, attributes: dict[str, Any]) -> Any:
    """The operator that tiles were made from, when its kernel is known and its rows lie in the same store, or None."""
    center, weight_digest = attributes["center"], attributes.get("weight_digest")
    is_given = attributes["kernel"] == {"kernel": "precomputed"}
    for candidate in () if is_given else arrays_below(parent_of(parent_of(path)), "data", "rows"):
        with contextlib.suppress(DkrrError):
            dataset, kernel = open_dataset(candidate), kernel_from_dict(attributes["kernel"])
            if dataset.digest == attributes["rows_digest"] and weight_digest in (None, dataset.digest_weight):
                return RidgeOperator(
                    grid=TileGrid(attributes["n"], attributes["tile_size"]),
                    alpha=attributes.get("alpha", 0.0),
                    kernel=kernel,
                    rows=Rows.of(dataset, None if center is None else tuple(center)),
                    weighted=weight_digest is not None,
                )
    return None


def _describe_run(path: str) -> dict[str, Any]:
    run = RunDirectory(path)
    job, plan, result = run.read("job.json") or {}, run.read("plan.json") or {}, run.read("result.json")
    facts = {
        "data": job.get("data", {}).get("path"),
        "kernel": plan.get("kernel") or job.get("model", {}).get("kernel"),
        "state": (state := look_once(run, beat_seconds=0.0).state),
    }
    if result is None:
        return facts
    if state != "finished":  # its figures are those of an attempt that came before
        return facts | {
            "earlier attempt": f"{result['plan']['num_rows']:,} rows, finished; {result['model_path']} is its model"
        }
    kept = ", ".join(result["kept"]) or "only the model"
    return facts | {"model": result["model_path"], **dict(result_facts(plan, result)), "kept": kept}


def _verify_run(path: str) -> Iterator[str]:
    """The model, what the run keeps in the store, its documents; and nothing left by an interrupted write."""
    if run_kind(path) == "retrain":
        yield from _verify_retraining(path)
        return
    job, result = dict[str, Any](), dict[str, Any]()
    for name in ("job.json", "plan.json", "result.json"):
        try:
            document = RunDirectory(path).read(name)
        except DkrrError as exc:
            yield exc.message
            continue
        if document is None:
            yield f"{name} is missing"
        job, result = document if name == "job.json" and document else job, document or {}
    yield from _verify_documents(path, without=("job.json", "plan.json", "result.json"))
    yield from (problems := list(verify(model := join(path, "model.zarr"))))
    if not problems and (fitted := result.get("model_digest")) and manifest_digest(model) != fitted:
        yield f"model.zarr is another model than the one that this run fitted ({fitted[:12]})"
    others = [point["model_path"] for point in result.get("path", ())]
    for location in [*result.get("kept", ()), *(other for other in others if other != result["model_path"])]:
        try:
            yield from (f"{location}: {problem}" for problem in verify(location))
        except StoreError as exc:  # there is nothing any more
            yield exc.message
    if result.get("leave_one_out") and (job.get("evaluate") or {}).get("leave_one_out"):
        yield from _verify_left_out(join(path, "leave_one_out.zarr"), result["leave_one_out"])
    yield from _partial(path)


def _verify_left_out(path: str, figures: dict[str, Any]) -> Iterator[str]:
    try:
        for rows in (RowArray.open(path, name) for name in LEFT_OUT):
            for start, stop in rows.blocks():
                rows.read(start, stop)
        if (read_json(path, "zarr.json") or {}).get("attributes") != figures:
            yield f"the figures of {path} are not those of result.json"
    except DkrrError as exc:
        yield exc.message


def _verify_retraining(path: str) -> Iterator[str]:
    """What was decided about every row, and about every batch."""
    try:
        job = RunDirectory(path).read("job.json")
        History(RetrainSpec.from_dict(job or {})).known_rows()
    except DkrrError as exc:
        yield exc.message
    yield from _verify_documents(path)
    for name in children(join(path, "masks")):  # which say of their bytes what they are
        octets = read_key(path, f"masks/{name}") or b""
        if name.endswith(".npy") and hashlib.sha256(octets).hexdigest()[:32] != name.removesuffix(".npy"):
            yield f"masks/{name} of {path} is damaged"
    yield from _partial(path)


_DOCUMENT = re.compile(r"(?:[a-z]+|(?:drivers|holdout)/\d{6}|records/[a-z]+/[0-9a-f]{32})\.json|events/\d{6}\.jsonl")


def _verify_documents(path: str, without: Sequence[str] = ()) -> Iterator[str]:
    """Documents of a run that are not what was written, events among them."""
    for key in (key for key in list_keys(path) if _DOCUMENT.fullmatch(key) and key not in without):
        octets = read_key(path, key) or b"{}"
        try:
            for document in octets.splitlines() if key.endswith("l") else [octets]:
                parse_json(document, path, key)
        except StoreError as exc:
            yield exc.message


def _partial(path: str, below: str = "") -> Iterator[str]:
    yield from (f"{below}{key} is left by an interrupted write" for key in list_keys(path) if ".partial" in key)


def _describe_registered(path: str) -> dict[str, Any]:
    model = NamedModel(path)
    aliases = model.aliases()
    return {
        "aliases": ", ".join(f"{name} {version}" for name, version in sorted(aliases.targets.items())) or "none",
        "versions": ", ".join(version.id for version in model.versions()) or "none",
        "changes": aliases.epoch,
    }


def _verify_registered(path: str) -> Iterator[str]:
    versions, aliases = {version.id: version for version in NamedModel(path).versions()}, NamedModel(path).aliases()
    for name in children(join(path, VERSIONS)):
        is_left = name in aliases.removing or not children(join(path, VERSIONS, name, MODEL))
        if name not in versions and not is_left:
            yield f"{VERSIONS}/{name} has no {RECORD}: it is being added, that was killed, or the document is lost"
    for name, target in sorted(aliases.targets.items()):
        if target not in versions:
            yield f"{name} is version {target}, which is missing or not complete"
    for version in versions.values():
        try:
            check_version(version)
        except DkrrError as exc:
            yield exc.message
    yield from _partial(join(path, VERSIONS), f"{VERSIONS}/")


_KINDS: dict[str, tuple[Callable[[str], dict[str, Any]], Callable[[str], Iterable[str] | None]]] = {
    "data set": (_describe_dataset, lambda path: open_dataset(path).verify()),
    "model": (_describe_model, _verify_model),
    "Gram matrix": (_describe_tiles, _verify_tiles),
    "factor": (_describe_tiles, _verify_tiles),
    "run": (_describe_run, _verify_run),
    "registered model": (_describe_registered, _verify_registered),
}


KEPT_SECONDS = 3600.0
# A driver says every few seconds that it is there; states of one, and phases until it has a plan.
SILENT_SECONDS = 120.0
AT_WORK, PLANNING = ("starting", "running"), ("", "prepare", "plan")
_KEY = re.compile(rb"[0-9a-f]{32,64}")
_HASH, _DRAWN = "[0-9a-f]{40}", "[0-9a-f]{32}"
# what a store holds, by folder: besides arrays, vectors of a pass that was killed, notes about float32 factors that
# broke down, records of the rows that arrays were made of, and the subsets and trials of searches
_NAMES = {
    "grams": rf"(?:{_HASH}|given-{_DRAWN})\.zarr",
    "factors": rf"{_HASH}(?:-sums)?\.zarr",
    "rows": rf"(?:{_DRAWN}|{_HASH}-(?:train|test)|{_HASH}(?:-{_HASH}){{0,2}}(?:-1d)?)\.zarr",
    "data": rf"{_HASH}\.zarr",
    "preconditioners": rf"{_HASH}\.zarr",
    "solves": rf"{_HASH}\.zarr",
    "scratch": rf"{_DRAWN}\.zarr",
    "lineage": rf"[0-9a-f]{{16}}-(?:{_HASH}|[0-9a-f]{{64}})\.json",
    "tune": rf"{_HASH}\.zarr",
}
_ITEM = re.compile("|".join(f"{kind}/{name}" for kind, name in _NAMES.items()))
_IN_ITEM = re.compile(rf"(?:{_ITEM.pattern}|fit-{_DRAWN}|{USERS}/[0-9a-f]{{16}}\.json)(?:\.lock)?(?:/.*)?")
_LEFT = re.compile(rf"(?:\.dkrr-probe-|(?P<whole>.+)\.){_DRAWN}\.(?P<what>partial|replaced)")
_AT_WORK = re.compile(rf"fit-{_DRAWN}\.lock")  # see rows_on_disk
_TOGETHER = 64


@dataclass(frozen=True)
class Garbage:
    """Something that can be deleted: an array or a file at a path or address, its size, and why nobody needs it."""

    location: str
    num_bytes: int
    reason: str


def find_garbage(
    store: str | os.PathLike[str], runs: Iterable[str | os.PathLike[str]] = (), kept_seconds: float = KEPT_SECONDS
) -> list[Garbage]:
    """List what nothing refers to.

    Parameters
    ----------
    store
        Folder or address with ``grams``, ``factors`` and prepared ``rows``.
    runs
        Folders or addresses below which runs and models are looked for, besides the one that holds the store and those
        that the store was told of.
    kept_seconds
        What changed within this time is not listed.

    Raises
    ------
    StoreError
        ``store`` is not a store, or somebody that it was told of cannot be looked at.
    """
    root, newest = _absolute(store), time.time() - kept_seconds
    if not {"grams", "factors"} & set(children(root)) and not any(
        re.fullmatch(ours, name) for kind, ours in _NAMES.items() for name in children(join(root, kind))
    ):
        raise StoreError(f"{root} is not a store (no folder grams or factors)", hint="name the folder of the store")
    known = users_of(root)
    users = {note: _present(note, places) for note, places in known.items()}
    given_runs = [_absolute(folder) for folder in runs]
    for folder in given_runs:
        if not is_url(folder) and not os.path.isdir(folder):
            raise StoreError(f"{folder} is not a folder", hint="check the path of the runs")
    given = os.fspath(store) if is_url(root) else os.path.abspath(store)  # a link has runs beside it, too
    folders = [
        parent_of(root),
        _absolute(parent_of(given)),
        *given_runs,
        *(place for note, places in users.items() for place in places or _beside(known[note])),
        # of a store that was moved away from its runs
        *(parent_of(model) for model in recorded_models(root) if not is_url(model) and os.path.isdir(model)),
    ]
    trees: dict[str, list[Entry]] = {}
    for folder in folders:  # which grow: a run may lie behind a link, on another disk
        if folder not in trees:
            trees[folder], links = _everything_below(folder)
            behind = [place for link in links for place in _present(link, [os.path.realpath(link)])]
            folders += [place for place in behind if not any(is_below(place, other) for other in folders)]
    named = set().union(*(_named_keys(*tree, root) for tree in trees.items()))
    unfinished = [plan for tree in trees.items() for plan in _unfinished_plans(*tree)]
    is_planning = any(_is_planning(*tree, min(newest, time.time() - SILENT_SECONDS)) for tree in trees.items())
    found: list[Garbage] = []

    def add(location: str, entries: list[Entry], reason: str) -> None:
        if max(entry.modified for entry in entries) < newest:
            found.append(Garbage(location, sum(entry.num_bytes for entry in entries), reason))

    items: dict[str, list[Entry]] = {}
    for entry in trees[parent_of(root)]:
        inside = relative_to(join(parent_of(root), entry.key), root)
        items.setdefault("/".join(inside.split("/")[:2]), []).append(entry)
    silent = time.time() - max(stale_seconds(), min(kept_seconds, KEPT_SECONDS))
    locks = {item: entries[0].modified for item, entries in items.items() if _AT_WORK.fullmatch(item)}
    is_used = any(_is_held(root, item, modified > silent) for item, modified in locks.items())
    for item, entries in sorted(items.items()):
        location, (kind, _, name) = join(root, item), item.partition("/")
        if _ITEM.fullmatch(item):
            factor = factor_of_scratch(name) if kind == "factors" else None
            keys = set() if factor else {key.decode() for key in _KEY.findall(name.encode())}
            may_find = (
                is_used
                or (is_planning and kind != "scratch")
                or _may_resume(join(root, kind, factor or name), unfinished)
            )
            if not keys & named and not may_find:
                # who names a factor has no use for its scratch, only who goes on with it
                reason = "scratch of a factor that no run goes on with" if factor else "no run or model refers to it"
                add(location, entries, reason)
        elif _ITEM.fullmatch(item.removesuffix(".lock")):
            # an object cannot be removed under a condition, so that the holders of locks leave them
            if b'"released": true' in (read_key(join(root, kind), name) or b""):
                add(location, entries, "a lock that was released")
        elif _AT_WORK.fullmatch(item) and not is_used:
            add(location, entries, "a lock of a fit that ended")
        elif users.get(location) == []:
            add(location, entries, "a note of a run or model that was removed")
    whole, is_ours = {item.location for item in found}, functools.cache(_is_ours)
    for tree in trees.items():
        for location, entries in _partials(*tree, root, is_ours):
            if not any(is_below(location, other) for other in whole):
                add(location, entries, "left by an interrupted write")
                whole.add(location)
    return found


def _is_held(root: str, key: str, has_changed: bool) -> bool:
    """Whether a lock is that of a process that is seen from here and lives, or one that has changed a moment ago."""
    try:
        record = read_json(root, key)
    except StoreError:
        return has_changed
    if not isinstance(record, dict) or record.get("released"):
        return False
    owner = owner_of(record)
    return not is_gone(owner) if is_here(owner) else has_changed


def delete_garbage(items: Sequence[Garbage], look: Callable[[], list[Garbage]]) -> tuple[int, list[Garbage]]:
    """Delete items that are still garbage; each is locked first, and then looked at again.

    Parameters
    ----------
    look
        Lists the garbage that there is now: the same :func:`find_garbage` that listed the items.

    Returns
    -------
    num_bytes : int
        That became free.
    kept : list of Garbage
        What somebody holds or needs by now, or has changed, and why.
    """
    num_bytes, kept = 0, []
    for start in range(0, len(items), _TOGETHER):
        with contextlib.ExitStack() as locks:
            ours, held = [], set()
            for item in items[start : start + _TOGETHER]:
                name = name_of(item.location)
                array = join(parent_of(item.location), factor_of_scratch(name) or name)
                try:
                    if name.endswith(".zarr") and array not in held:
                        locks.enter_context(hold_lock(array))
                        held.add(array)
                    ours.append(item)
                except LockedError as exc:
                    kept.append(replace(item, reason=exc.message))
            now = set(look())
            for item in ours:
                if item in now:
                    num_bytes += _freed(item)
                    remove_dataset(item.location)
                    delete_key(parent_of(item.location), name_of(item.location))  # of a file or an object
                elif item.location not in {sibling(array, ".lock") for array in held}:  # which we hold ourselves
                    kept.append(replace(item, reason="it has changed since it was listed, or is needed by now"))
    return num_bytes, kept


def _freed(item: Garbage) -> int:
    """Bytes that are nowhere else: a tile may have a second name in a factor that continues this one."""
    if is_url(item.location):
        return item.num_bytes
    paths = [os.path.join(item.location, entry.key) for entry in list_entries(item.location)] or [item.location]
    found = [os.lstat(path) for path in paths if os.path.lexists(path)]
    return sum(state.st_size for state in found if state.st_nlink == 1)


def _present(note: str, places: Sequence[str]) -> list[str]:
    """Where a user of a store is; nowhere, when it was removed.

    Raises
    ------
    StoreError
        A folder that it may have been in is not there either: on a disk that is not mounted, or moved.
    """
    elsewhere = next((place for place in places if place.startswith("//")), None)
    here = [place for place in places if place != elsewhere]
    try:
        found = [place for place in here if is_url(place) or _is_folder(place)]
        if found or (elsewhere is None and all(_is_folder(parent_of(place)) for place in here)):
            return found
    except OSError as exc:
        _refuse(exc)
    if elsewhere is not None:
        raise StoreError(
            f"{elsewhere}, which uses the store, is on another machine",
            hint=f"run it there; if it is gone for good, remove {note}",
        )
    raise StoreError(
        f"{places[0]}, which uses the store, cannot be looked at: the folder it was in is not there",
        hint=f"mount its disk; if it was moved, name its folder with --runs and remove {note}; if it is gone for good, "
        "remove that file",
    )


def _beside(places: Sequence[str]) -> list[str]:
    """Runs and models beside where one was: it may have another name by now."""
    beside = [join(parent, name) for parent in {parent_of(place) for place in places} for name in children(parent)]
    return [place for place in beside if _is_ours(place)]


def _is_folder(path: str) -> bool:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # not where nobody may look
        return stat.S_ISDIR(os.stat(path).st_mode)
    return False


def _absolute(location: str | os.PathLike[str]) -> str:
    text = os.fspath(location)
    return text if is_url(text) else os.path.realpath(text)


# --- what is there ----------------------------------------------------------------------------------------------------


def _everything_below(location: str) -> tuple[list[Entry], list[str]]:
    """Files or objects; of a file system also the folders, whose keys end in a slash, and the links out of arrays.

    Raises
    ------
    StoreError
        A folder in it cannot be read, where a run may lie.
    """
    if is_url(location):
        return list_entries(location), []
    found, links = [], []
    for parent, folders, names in os.walk(location, onerror=_refuse):
        for name in [*folders, *names]:
            path = os.path.join(parent, name)
            with contextlib.suppress(FileNotFoundError):
                facts = os.lstat(path)
                is_folder = stat.S_ISDIR(facts.st_mode)
                key = os.path.relpath(path, location) + "/" * is_folder
                found.append(Entry(key, 0 if is_folder else facts.st_size, facts.st_mtime))
                if stat.S_ISLNK(facts.st_mode) and "zarr.json" not in names:
                    links.append(path)
    return found, links


def _refuse(error: OSError) -> None:
    """A run may lie in a folder that cannot be read; not in one that is gone, or is the file system's own."""
    folder = str(error.filename)
    if not isinstance(error, FileNotFoundError) and name_of(folder) != "lost+found":
        raise StoreError(
            f"{folder} cannot be looked at ({error.strerror}), and a run in it may use the store",
            hint="start it as somebody who can read that folder, or move that elsewhere",
        )


def _named_keys(location: str, entries: list[Entry], store: str) -> set[str]:
    """Every key that a document names; the store's own documents, and those of versions nobody needs, do not count."""
    models = [entry.key.removesuffix(ALIASES) for entry in entries if name_of(entry.key) == ALIASES]
    retired = tuple(
        f"{folder}{VERSIONS}/{version.id}/"
        for folder in models
        for version in NamedModel(join(location, folder)).unneeded(grace_seconds=GRACE_SECONDS)
    )
    named: set[str] = set()
    for entry in entries:
        is_document = entry.key.endswith((".json", ".toml")) and not entry.key.startswith(retired)
        if is_document and not _IN_ITEM.fullmatch(relative_to(join(location, entry.key), store)):
            named.update(key.decode() for key in _KEY.findall(read_key(location, entry.key) or b""))
    return named


def _is_planning(location: str, entries: list[Entry], since: float) -> bool:
    """Whether a run that said since then that it is there had no plan when it was listed: it may find anything."""
    modified = {entry.key: entry.modified for entry in entries}
    folders = {
        key.removesuffix(name) for key in modified for name in [name_of(key)] if name in ("status.json", "job.json")
    }
    for folder in folders:
        # a list may miss a file that is being replaced
        if modified.get(f"{folder}status.json", math.inf) >= since:
            status = _if_any(location, f"{folder}status.json")
            is_planned = status.get("phase") not in PLANNING and f"{folder}plan.json" in modified
            if status.get("state") in AT_WORK and not is_planned:
                return True
    return False


def _unfinished_plans(location: str, entries: list[Entry]) -> Iterable[dict[str, Any]]:
    """Plans of runs that were started and have no result yet, or were started again since, with other rows."""
    changed = {entry.key: entry.modified for entry in entries}
    for key in (key for key in changed if name_of(key) == "plan.json"):
        run = key.removesuffix("plan.json")
        plan, status = (_if_any(location, run + name) for name in ("plan.json", "status.json"))
        # times tell it of the first releases alone: a copy of the run has others
        begun, ended = (changed.get(run + name, 0.0) for name in ("job.json", "result.json"))
        is_over = status["state"] == "finished" if "state" in status else max(changed[key], begun) <= ended
        if not is_over and plan.keys() >= {"num_rows", "tile_size"}:
            yield plan


def _if_any(location: str, key: str) -> dict[str, Any]:
    """A document; {} where there is none, or one of somebody else."""
    with contextlib.suppress(ValueError):
        found = json.loads(read_key(location, key) or b"null")
        if isinstance(found, dict):
            return found
    return {}


def _may_resume(array: str, unfinished: list[dict[str, Any]]) -> bool:
    """Whether one of the unfinished runs would find the array when it is started again."""
    kind = name_of(parent_of(array))
    if kind == "tune" and any(found.startswith(UNFINISHED) for found in children(array)):  # a search, started again
        return True
    if kind not in ("grams", "factors"):
        return bool(unfinished) and kind != "scratch"  # whose name is drawn anew by every attempt
    try:
        num_rows = json.loads(read_key(array, "zarr.json") or b"")["shape"][0]
    except (OSError, ValueError, LookupError, TypeError):
        return False  # nothing can be resumed from an array without metadata
    # whatever its tiles: leave-one-out after conjugate gradients, say, has others than the plan
    return any(plan.get("num_rows") == num_rows for plan in unfinished)


def _partials(
    location: str, entries: list[Entry], store: str, is_ours: Callable[[str], bool]
) -> list[tuple[str, list[Entry]]]:
    """What interrupted writes left, files and folders, and what is in them."""
    found: dict[str, list[Entry]] = {}
    keys = {entry.key.rstrip("/") for entry in entries}
    for entry in entries:
        parts = entry.key.rstrip("/").split("/")
        depth, left = next(((k, match) for k, part in enumerate(parts) if (match := _LEFT.fullmatch(part))), (0, None))
        if left is None:
            continue
        key, whole = "/".join(parts[: depth + 1]), "/".join([*parts[:depth], left["whole"] or parts[depth]])
        # what was replaced is all that there is, until the other one is in its place
        if left["what"] == "replaced" and whole not in keys:
            continue
        above = ["/".join(parts[:k]) for k in range(depth + 1)]  # every folder that it lies in
        if (
            left["whole"] is None
            or _IN_ITEM.fullmatch(relative_to(join(location, whole), store))
            or any(is_ours(join(location, name)) for name in [key, whole.removesuffix(".lock"), *above])
        ):
            found.setdefault(key, []).append(entry)
    return [(join(location, key), of_it) for key, of_it in sorted(found.items())]


def _is_ours(location: str) -> bool:
    """Whether a folder is a run, a registered model, or an array or a group of dkrr."""
    try:
        return bool(kind_of(location))
    except StoreError:
        return False
