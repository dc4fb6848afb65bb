"""From a job's ``[data]`` and ``[evaluate]`` to training rows and held-out rows on disk.

Both are data sets below the store, named by a key of where they come from, so they are written once and found again.

Scaling is frozen with its lineage: statistics of all rows would change with every append, and with them every row that
the kernel sees; nothing of an earlier fit could be continued. So a job whose rows begin with the training rows of an
earlier fit in the same store, as digests prove, takes the statistics of that one, unless the new rows have drifted too
far from them (:mod:`dkrr.dataset.scaling`): then everything is fitted anew, with statistics of all rows, and that is
said.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset, Scaling, ingest, open_dataset, prepare_rows, read_mask, row_hash_fraction
from dkrr.dataset.dataset import attributes_of, fields_of
from dkrr.dataset.rows import RowSummary
from dkrr.dataset.scaling import DRIFT_LIMIT, Drift, mask_digest, measure_drift
from dkrr.dataset.sources import Table, open_table
from dkrr.dataset.table import (
    check_in_order,
    check_places,
    column_number,
    is_place,
    is_visible,
    match_features,
    match_targets,
    ordered_like,
    placed,
    refuse_shuffled_numbers,
    resolve,
    target_columns,
    visible_files,
    was_changed,
)
from dkrr.dataset.writer import remove_dataset
from dkrr.errors import DataError, DkrrError, JobFileError, StoreError
from dkrr.jobs.spec import OF_LABELS, DataSpec, JobSpec
from dkrr.jobs.toml import BUILT_IN, is_data_file
from dkrr.linalg.catalogue import key_of
from dkrr.linalg.loss import Loss
from dkrr.store.documents import plain
from dkrr.store.files import (
    arrays_below,
    file_state,
    is_below,
    is_url,
    join,
    list_entries,
    name_of,
    parent_of,
    place,
    relative_to,
)
from dkrr.store.lease import hold_lock
from dkrr.store.objects import find_object

# raised with what a file means: rows that an earlier release read otherwise are not used
READING = 2
Mask = NDArray[np.bool_]
logger = logging.getLogger("dkrr.jobs")


@dataclass(frozen=True, kw_only=True)
class EarlierScaling:
    """The scaling of an earlier fit.

    Parameters
    ----------
    scaling
        What its rows were whitened with; None where the new rows have drifted too far.
    num_rows
        Rows of the data set, held-out ones included, whose statistics these are.
    location
        The training rows of exactly this data set, where they are prepared already.
    drift
        Of all rows that came after those; :data:`~dkrr.dataset.scaling.DRIFT_LIMIT` is the most that is allowed.
    """

    scaling: Scaling | None
    num_rows: int
    location: str | None
    drift: Drift

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for the record of a run."""
        state = "anew" if self.scaling is None else "frozen"
        return {"scaling": state, "rows": self.num_rows, "drift": self.drift.to_dict(), "limit": DRIFT_LIMIT}

    def sentence(self) -> str:
        """What happened, in words; "" where there were no newer rows."""
        if self.scaling is None:
            return f"fitted anew with statistics of all rows: {self.drift.words()}"
        frozen = f"whitened with the statistics of the first {self.num_rows:,} rows, frozen; {self.drift.words()}"
        return frozen if self.drift.num_rows else ""


@dataclass(frozen=True)
class Prepared:
    """Training rows as the kernel sees them, held-out rows as they came, and the scaling between the two.

    ``earlier`` says where the scaling comes from, when an earlier fit had the first of these rows; ``data`` which rows
    the job's data had, held-out ones included, and in which state its files were.
    """

    train: Dataset
    test: Dataset | None
    scaling: Scaling | None
    earlier: EarlierScaling | None = None
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def center_drift_limit(self) -> float | None:
        """How far newer rows may lie from a frozen centre; None where they are whitened: then their scaling decides."""
        return DRIFT_LIMIT if self.scaling is None else None


def _files(path: str) -> list[Any]:
    """What tells changed files from unchanged ones, without reading them or saying in which folder they lie.

    None of what is made of itself. A file that is another by this is read again; where its rows are the same, so is all
    that was made of them.
    """
    if path.startswith(BUILT_IN):
        return []
    if is_url(path):  # the ETags of what is there: a file, or the files below it
        found = find_object(parent_of(path), name_of(path))
        objects = [found] if found is not None else [item for item in list_entries(path) if is_visible(item.key)]
        return [(item.key, item.num_bytes, item.version) for item in objects]
    try:
        files = sorted(visible_files(Path(path))) if os.path.isdir(path) else [path]
        return [(os.path.relpath(file, path), *file_state(file)) for file in files]
    except OSError as exc:
        raise DataError(f"{path} cannot be read ({exc.strerror})", hint="check [data] path") from None


def open_data(
    data: DataSpec, store: Any, *, path: str | None = None, fitted: Dataset | None = None, has_numbers: bool = True
) -> Dataset:
    """The data set behind ``[data]`` (or behind another ``path`` read the same way), ingested when it is not one.

    With ``fitted`` columns are those of that data set, by name where both have names, and classes are its classes.
    ``has_numbers`` says whether numbers of columns are those of a data set, where there is one.
    """
    path = path or data.path
    if os.path.isdir(path) or (is_url(path) and not path.startswith(BUILT_IN)):
        try:
            dataset = open_dataset(path)
        except StoreError:
            if attributes_of(path) is not None:
                raise
        else:
            if fitted is None:
                check_columns(data, dataset, has_numbers=has_numbers)
            return dataset
    options = {**data.options(), "one_hot": data.one_hot}
    known = [] if fitted is None else [[fitted.names, fitted.named_targets, fitted.classes, fitted.places]]
    name = path.partition("?")[0] if "://" in path else path  # how an address is reached does not matter
    source: Any = path
    files = _files(path)
    destination = place(store, "data", key_of({"source": [READING, name, files, options, *known]}) + ".zarr")
    with contextlib.suppress(StoreError):
        return open_dataset(destination)
    if fitted is not None:
        source = table = open_table(path, **data.text_options(), named=[fitted.names])
        if by_name := ordered_like(fitted, table):
            options |= {"weight": None, **by_name}  # scores are not weighted
        else:
            options |= _as_they_stood(fitted, table, data)
        options |= {"one_hot": fitted.classes is not None and table.classes is None, "classes": fitted.classes}
    dataset = ingest(source, destination, wait=True, **options)
    if _files(path) != files:  # at an address these may be what is there again
        remove_dataset(destination)
        raise was_changed(path)
    return dataset


def remove_damaged_copy(store: Any, path: str) -> bool:
    """Remove the copy of rows below a store that an array at ``path`` is a part of; False where it is no such copy.

    One that is whole stays: another run has made it again meanwhile.
    """
    for folder in (place(store, name) for name in ("data", "rows")):
        if is_below(path, folder):
            name = relative_to(path, folder).split("/")[0]
            if re.fullmatch(r"[0-9a-f]{40}(-train|-test)?\.zarr", name) is None:
                return False  # somebody else's
            with hold_lock(copy := join(folder, name), wait=True):
                try:
                    open_dataset(copy).verify()
                except StoreError:
                    remove_dataset(copy)
            return True
    return False


def _as_they_stood(fitted: Dataset, table: Table, data: DataSpec) -> dict[str, Any]:
    """Columns without names in common: those that stand where they stood in the fit, unless numbers say otherwise."""
    if table.is_named and not fitted.names:
        refuse_shuffled_numbers(table.names, (), table.label)
    own, columns = [*fitted.names, *fitted.named_targets], placed(fitted.places, table.names, 2)
    told = {role: getattr(data, role) for role in ("features", "target", "weight")}
    given = {role: [value] if isinstance(value, str | int) else value or [] for role, value in told.items()}
    # a name is one of the fit's, a number may be one of this file's
    names = [column for part in given.values() for column in part if not is_place(column, own)]
    numbers = [[j for j in given[role] if is_place(j, own)] for role in ("features", "target")]
    if (
        table.target is None
        and columns
        and not any(
            part and [table.names[column_number(table, j, "data")] for j in part] != there
            for part, there in zip(numbers, columns, strict=True)
        )
    ):
        return {"weight": None, "features": columns[0], "target": columns[1]}
    if not numbers[0]:
        for places in fitted.places[:1]:
            check_in_order(places, table.label)
    if names and not table.is_named:
        raise DataError(
            f"{table.label} has no names of columns; {names[0]!r} is one of {data.path}", hint="give numbers, or names"
        )
    return {}


def prepare(job: JobSpec, store: Any, dataset: Dataset | None = None) -> Prepared:
    """Split and whiten: training rows with the training rows' statistics, or frozen ones; held-out rows untouched.

    ``dataset`` is what ``[data] path`` held when somebody opened it; None for what is there now.
    """
    evaluate, sources = job.evaluate, _sources(job)  # before anything is read
    # where other rows are evaluated, numbers are those of columns of their file
    has_numbers = evaluate is None or evaluate.path is None
    if dataset is None:
        dataset = open_data(_without_mask(job), store, has_numbers=has_numbers)
    if dataset.y is None:
        raise DataError(f"{job.data.path} has no target", hint="name one: [data] target = [-1]")
    if evaluate is not None and evaluate.metric in OF_LABELS and dataset.classes is None:
        raise DataError(
            f'[evaluate] metric = "{evaluate.metric}" is for classes; the targets of {job.data.path} are numbers',
            hint='set [data] one_hot = true, or metric = "rmse"',
        )
    facts = {**_facts(dataset), "sources": sources}
    mask, test = None, None
    if evaluate is not None and evaluate.path is not None:
        test = open_data(job.data, store, path=evaluate.path, fitted=dataset)
        check_places(dataset, test.places, evaluate.path, is_named=bool(test.names))
        match_features(dataset, test)  # what does not fit is said before anything is computed
        match_targets(dataset, test)
    if evaluate is not None and (evaluate.mask is not None or evaluate.fraction is not None):
        mask = _mask(job, dataset)
    held_out = None if mask is None else mask_digest(mask)
    split = key_of({"rows": facts["digests"], "held_out": held_out, "standardize": job.data.standardize})
    # the rows, the mask and other held-out rows are of one state of each file
    for key, state in _sources(job).items():
        if isinstance(state, list) and state != sources.get(key):
            raise was_changed(_paths(job)[key])
    if mask is not None and test is None:
        location = place(store, "rows", f"{split}-test.zarr")
        test = replace(prepare_rows(dataset, location, test_mask=~mask, standardize=False)[0], **fields_of(dataset))
    if mask is None and not job.data.standardize:
        return Prepared(dataset, test, None, None, facts)
    frozen = find_scaling(store, dataset, mask) if job.data.standardize else None
    if frozen is not None and frozen.location is not None:
        train = replace(open_dataset(frozen.location), **fields_of(dataset))
        return Prepared(train, test, frozen.scaling, frozen, facts)
    scaling = None if frozen is None else frozen.scaling
    if scaling is not None:
        split = key_of({"split": split, "scaling": scaling.to_dict()})
    location = place(store, "rows", f"{split}-train.zarr")
    train, scaling = prepare_rows(
        dataset,
        location,
        test_mask=mask,
        standardize=job.data.standardize,
        scaling=scaling,
        scaling_rows=None if frozen is None or scaling is None else frozen.num_rows,
    )
    train = replace(train, **fields_of(dataset))  # the same rows may have been prepared under other names
    return Prepared(train, test, scaling, frozen, facts)


def _without_mask(job: JobSpec) -> DataSpec:
    """``[data]`` with the features named, without the column that is the mask, where they were not and there is one.

    Raises
    ------
    JobFileError
        The column is a feature of a data set.
    """
    data, mask = job.data, None if job.evaluate is None else job.evaluate.mask
    if mask is None or is_data_file(mask) or data.features is not None:
        return data
    table = open_table(data.path, **data.text_options(), named=[data.target, data.weight, mask])
    column = column_number(table, mask, "[evaluate] mask")
    if table.target is None:
        features = resolve(table, target=data.target, features=None, weight=data.weight).features
        return data.model_copy(update={"features": [table.names[j] for j in features if j != column]})
    if column not in (*table.target, table.weight):
        raise JobFileError(
            f"[evaluate] mask is {table.names[column]!r}, which is a feature of {data.path}",
            hint="ingest that without the column, with --features, and give the mask as a file",
        )
    return data


def check_columns(data: DataSpec, dataset: Dataset, *, has_numbers: bool) -> None:
    """Refuse a ``[data]`` that asks for other columns than its data set has.

    Numbers of columns are those of the data set, or those of the table with one column of labels that its classes were
    made of; not ``has_numbers``: those of some file, which are not compared.

    Raises
    ------
    JobFileError
        Other columns, or classes of targets that are none.
    """
    stored = open_table(dataset).names
    labels = target_columns(dataset.target_names, dataset.classes)
    weights = stored[dataset.num_features + dataset.num_targets :]
    views = [stored, (*dataset.feature_names, *labels, *weights)]
    columns: dict[str, list[Sequence[str]]] = {
        "features": [dataset.feature_names],
        "target": [dataset.target_names, labels],
        "weight": [weights],
    }
    for key, there in columns.items():
        given = getattr(data, key)
        wanted = given if isinstance(given, list) else [] if given is None else [given]
        numbers = [column for column in wanted if is_place(column, views[0])]
        if not wanted or (numbers and not has_numbers):
            continue
        found = [
            tuple(names[int(j)] if j in numbers and -len(names) <= int(j) < len(names) else j for j in wanted)
            for names in views
        ]
        if not set(found) & set(map(tuple, there)):
            raise JobFileError(
                f"[data] {key}: {', '.join(map(str, wanted))} given, {dataset.path} is a data set with "
                f"{', '.join(there[0]) or 'none'}",
                hint=f"leave {key} out; `dkrr ingest` makes a data set of other columns",
            )
    if data.one_hot and dataset.classes is None:
        raise JobFileError(
            f"[data] one_hot is true, and the targets of the data set {dataset.path} are no classes",
            hint="leave it out; `dkrr ingest --one-hot` makes a data set of classes",
        )


def changed_since(job: JobSpec, result: dict[str, Any]) -> str:
    """What the job reads now and a result was not made of, and what to do; "" where that is nothing.

    Nothing, too, where it cannot be read.
    """
    fitted, paths = result.get("data") or {}, _paths(job)
    for key, state in _sources(job).items():
        path, earlier = paths[key], fitted.get("sources", {}).get(key)
        if key == "data path" and isinstance(state, dict) and fitted:
            earlier = {name: fitted.get(name) for name in state}
        are_data_sets = isinstance(state, dict) and isinstance(earlier, dict)
        if state is None or earlier in (None, state):
            continue
        if are_data_sets and state["digests"] == earlier["digests"]:
            if all(earlier.get(name) in (None, state[name]) for name in ("names", "numbers")):  # earlier ones had none
                continue
            other = "other names of columns or classes, or numbers of rows"
            return f"complete for {path} with {other}: start `dkrr fit JOB` to use those"
        if key != "data path" or not are_data_sets:
            return f"complete for {path} as it was, which was written since: start `dkrr fit JOB` to use it as it is"
        before, now = earlier["generation"], state["generation"]
        if now <= before:  # rows were dropped
            return (
                f"complete for {earlier['rows']:,} rows of {path}, which holds {state['rows']:,} rows now, others: "
                "start `dkrr fit JOB` to fit those"
            )
        return (
            f"complete for generation {before} of {path} ({earlier['rows']:,} rows), which is at generation {now} now "
            f"({state['rows']:,} rows): start `dkrr fit JOB` to extend the fit to generation {now}"
        )
    return ""


def _paths(job: JobSpec) -> dict[str, str]:
    """What the job reads."""
    found: dict[str, Any] = {"data path": job.data.path}
    if job.evaluate is not None:
        mask = job.evaluate.mask if job.evaluate.mask_is_file else None
        found |= {"evaluate path": job.evaluate.path, "evaluate mask": mask}
    return {key: path for key, path in found.items() if path is not None}


def _sources(job: JobSpec) -> dict[str, Any]:
    """What tells that something which the job reads was written since, as JSON; without what cannot be read."""
    found: dict[str, Any] = {}
    for key, path in _paths(job).items():
        with contextlib.suppress(DkrrError, OSError):
            found[key] = plain(_files(path)) or None
        with contextlib.suppress(StoreError):
            found |= {} if path.startswith(BUILT_IN) else {key: _facts(open_dataset(path))}
    return found


def _facts(dataset: Dataset) -> dict[str, Any]:
    """By which the rows of a data set are known, and their numbers, by which some are held out."""
    digests = [dataset.digest, dataset.digest_y, dataset.digest_weight]
    return {
        "rows": dataset.num_rows,
        "digests": digests,
        "names": plain([dataset.feature_names, dataset.target_names, dataset.classes]),
        "numbers": [[found.first_row, mask_digest(found.kept)] for found in dataset.generations],
        "generation": dataset.generations[-1].number,
    }


def _mask(job: JobSpec, dataset: Dataset) -> Any:
    evaluate = job.evaluate
    assert evaluate is not None  # noqa: S101  (narrows the type)
    # every row of the source has a number and a value in a mask, also those dropped for missing values
    kept = dataset.kept
    if evaluate.fraction is not None:
        spans = [(found.first_row, found.first_row + len(found.kept)) for found in dataset.generations]
        mask = np.concatenate([row_hash_fraction(start, stop, evaluate.fraction) for start, stop in spans])
    elif evaluate.mask_is_file:
        mask = read_mask(str(evaluate.mask), len(kept), column=evaluate.mask_column)
    else:
        mask = read_mask(job.data.path, len(kept), column=evaluate.mask, **job.data.text_options())
    mask = mask[kept]
    n, held_out = len(mask), int(np.sum(mask))
    if held_out in (0, n):
        raise DataError(
            f"[evaluate] holds out {held_out:,} of {n:,} rows", hint="hold out some rows, and keep some to train on"
        )
    return mask


def check_loss_targets(job: JobSpec, train: Dataset) -> list[Loss]:
    """The losses of a job, one for all targets or one for each quantile of the only target.

    Raises
    ------
    JobFileError
        They are for classes and the targets are none, or the other way round; several quantiles of several targets.
    """
    losses, loss = job.model.losses(), job.model.loss
    if losses[0].is_for_labels != (train.classes is not None):
        wanted, there = ("classes", "numbers") if losses[0].is_for_labels else ("numbers", "classes")
        raise JobFileError(
            f"[model] loss = {loss!r} is for {wanted}; the targets of {job.data.path} are {there}",
            hint="set [data] one_hot = true" if losses[0].is_for_labels else "take a loss for classes: hinge, logistic",
        )
    if len(losses) > 1 and train.num_targets > 1:
        raise JobFileError(
            f"[model] quantile is a list, and there are {train.num_targets} targets; one target expected",
            hint="write a job for each target, or give one quantile",
        )
    if train.classes is not None and len(train.classes) < 2:
        raise DataError(
            f"all {train.num_rows:,} training rows of {job.data.path} are of class {train.classes[0]!r}; at least two "
            "classes expected",
            hint="check [data] target and the rows that [evaluate] takes",
        )
    return losses


# --- scaling of earlier fits ------------------------------------------------------------------------------------------


def find_scaling(store: Any, dataset: Dataset, mask: Mask | None) -> EarlierScaling | None:
    """The scaling of the earlier fit that shares the most rows with a data set; None where there is none.

    Parameters
    ----------
    mask : (n,) bool, optional
        Rows that are held out.
    """
    known: list[tuple[int, bool, int, Dataset]] = []
    for location in arrays_below(store, "rows"):
        with contextlib.suppress(StoreError):
            earlier = open_dataset(location)  # held-out rows have no scaling
            origin = earlier.origin or {}
            shared = _shared_rows(origin, dataset, mask)
            has_targets = bool(shared) and _has_prefix(dataset, origin, shared, "y")
            known.append((shared, has_targets, int(origin.get("scaling_rows", 0)), earlier))
    # of two with the same rows that of these targets, and that with the newer statistics, which replaced the others
    shared, _, _, best = max(known, key=lambda item: item[:3], default=(0, False, 0, dataset))
    return _judged(best, shared, dataset, mask) if shared else None


def _shared_rows(origin: dict[str, Any], dataset: Dataset, mask: Mask | None) -> int:
    """Rows of the data set that training rows were made of, when they are its first ones and were whitened; else 0."""
    m, resolved = int(origin.get("num_rows", 0)), origin.get("resolved")
    if not 0 < m <= dataset.num_rows or resolved is None or len(resolved["x_mean"]) != dataset.num_features:
        return 0
    trained = np.ones(m, dtype=bool) if mask is None else ~mask[:m]
    is_same = mask_digest(trained) == origin["rows"] and dataset.prefix_digest(m) == origin["digest"]["X"]
    return m if is_same else 0


def _judged(earlier: Dataset, shared: int, dataset: Dataset, mask: Mask | None) -> EarlierScaling:
    origin = earlier.origin or {}
    scaling, first = Scaling.from_dict(origin["resolved"]), int(origin.get("scaling_rows", shared))
    same_targets = _has_prefix(dataset, origin, shared, "y")
    if not same_targets:  # new targets of the same rows: the features go on, the targets get statistics of their own
        own = RowSummary.of(dataset.parts()["y"], without=mask).moments()
        scaling = replace(scaling, y_mean=own.mean, y_std=np.where(own.std == 0, 1.0, own.std))
    is_same = shared == dataset.num_rows and same_targets and _has_prefix(dataset, origin, shared, "weight")
    has_targets = same_targets and dataset.y is not None
    targets = RowSummary.of(dataset.parts()["y"], first, without=mask).moments() if has_targets else None
    names = (*dataset.feature_names, *dataset.target_names)
    drift = measure_drift(scaling, RowSummary.of(dataset.X, first, without=mask).moments(), targets, names)
    if drift.value > DRIFT_LIMIT:
        found = EarlierScaling(scaling=None, num_rows=first, location=None, drift=drift)
        logger.warning("%s", found.sentence())
        return found
    return EarlierScaling(scaling=scaling, num_rows=first, location=str(earlier.path) if is_same else None, drift=drift)


def _has_prefix(dataset: Dataset, origin: dict[str, Any], shared: int, part: Any) -> bool:
    """Whether targets or weights are those of the earlier rows, as far as these go."""
    there = dataset.prefix_digest(shared, part) if part in dataset.parts() else None
    return bool(there == origin["digest"].get(part))
