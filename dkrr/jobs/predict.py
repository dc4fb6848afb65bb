"""Use a saved model from the command line: predict or score the rows of a file on the workers.

A model is a path, or a version that an alias of a registry names, so that the same command can run every night. The
alias is resolved once, at the start, and the version is written beside the output before anything is predicted: a
prediction that was interrupted among its rows goes on with the version it began with, although the alias may name
another one by then.

Predictions from blocks of rows to a file: .zarr, .npy, .parquet or .csv, in the memory of one block.

Beside each output stands ``OUTPUT.json``, its stamp: which model made it, of which rows, and the SHA-256 of the file,
or of all that is in the folder. An output is replaced when this is still what stands there; anything else belongs to
somebody, and stays.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dkrr import __version__
from dkrr.dataset import Dataset, Floats, RowArray, ingest, open_dataset
from dkrr.dataset.sources import Table, open_table
from dkrr.dataset.table import (
    check_places,
    feature_columns,
    kept_columns,
    match_features,
    ordered_like,
    placed,
    refuse_shuffled_numbers,
    target_columns,
)
from dkrr.dataset.writer import check_outside, remove_dataset
from dkrr.engine.cluster import executor_for
from dkrr.engine.machine import single_blas_thread
from dkrr.engine.tasks import Executor, InProcessExecutor, Progress
from dkrr.errors import DamagedChunkError, DataError, DkrrError, ParameterError, StoreError, StoreMismatchError
from dkrr.fit.inputs import TemporaryStore, nothing_new
from dkrr.jobs.registry import RECORD, ModelRegistry, NamedModel, Reference, Version
from dkrr.jobs.run_directory import utc_now
from dkrr.linalg.leave_one_out import IntervalMethod
from dkrr.linalg.loss import log_probabilities
from dkrr.models.model import BLOCK_ROWS, Model, load_model
from dkrr.models.prediction import needs_workers, predict_dataset, score_dataset
from dkrr.store.documents import content_digest
from dkrr.store.files import (
    children,
    delete_key,
    is_below,
    is_url,
    join,
    list_keys,
    name_of,
    overlaps,
    parent_of,
    place,
    put_back,
    put_in_place,
    read_json,
    remove_array,
    sibling,
    storage_errors,
    write_json,
)
from dkrr.store.interruption import check_fence
from dkrr.store.lease import hold_lock
from dkrr.store.objects import put_file

ENDINGS = (".zarr", ".npy", ".parquet", ".csv")
_WORK = re.compile(
    r"(?:data\.zarr|result\.zarr|version\.json)(?:\.lock)?(?:\.[0-9a-f]{32}\.partial)?"
    r"|\.dkrr-probe-[0-9a-f]{32}(?:\.partial)?|export-[a-z0-9_]{8}"
)


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """A table that is made a block of rows at a time.

    Parameters
    ----------
    num_rows
        m.
    names
        Of the k columns of numbers.
    read
        Numbers (stop - start, k) of rows start to stop.
    y_is_1d
        Whether a single column of numbers has no second axis in .npy.
    source, keep
        Columns of the rows that were predicted, copied as they stand into .csv and .parquet, in front of the numbers.
    label, classes
        Of scores, the first columns: the class of the largest one is a last column of this name in .csv and .parquet.
        The stamp has the classes in the order of the scores.
    """

    num_rows: int
    names: list[str]
    read: Callable[[int, int], Floats]
    y_is_1d: bool = False
    source: Table | None = None
    keep: tuple[int, ...] = ()
    label: str = ""
    classes: tuple[Any, ...] = ()

    def blocks(self) -> Iterator[Floats]:
        """The numbers, block by block."""
        for start in range(0, self.num_rows, BLOCK_ROWS):
            yield np.ascontiguousarray(self.read(start, min(start + BLOCK_ROWS, self.num_rows)))


def work_of(output: str) -> str:
    """Where predictions are kept until they are complete: a folder beside the output."""
    return sibling(output, ".work")


def _clear(work: str) -> None:
    """Remove such a folder, for whoever is killed in between results first: without them nothing is gone on with.

    What says whose it is goes last.
    """
    remove_array(join(work, RESULT))
    remove_dataset(join(work, ROWS))
    remove_array(work)


def _is_empty(names: Iterable[str]) -> bool:
    """Whether neither rows nor results are among what such a folder holds."""
    return {ROWS, RESULT}.isdisjoint(names)


def check_output(output: str, inputs: Iterable[str] = (), *, overwrite: bool = False) -> str | None:
    """Refuse an output that would take the place of something else; what is replaced is known by its digest.

    Parameters
    ----------
    inputs
        What the predictions are made from, which they never replace.
    overwrite
        Whether anything else may be replaced.

    Returns
    -------
    digest
        Of dkrr's predictions there, see :func:`~dkrr.store.documents.content_digest`; None where there are none.

    Raises
    ------
    ParameterError
        An ending that is none of .zarr, .npy, .parquet, .csv.
    StoreError
        The output is an input, something that dkrr did not write as predictions, or inside of something that it wrote.
    """
    ending = Path(name_of(output)).suffix
    if ending not in ENDINGS:
        raise ParameterError(f"{output} ends in {ending!r}; one of {', '.join(ENDINGS)} expected", hint="rename it")
    check_outside(output)
    stamp, work = sibling(output, ".json"), work_of(output)
    for target, source in itertools.product((output, stamp, work), inputs):
        if overlaps(target, source):
            raise StoreError(
                f"{output} would be written over {source}, which the predictions are made from",
                hint="give the predictions a name and a folder of their own",
            )
    is_foreign = not is_url(work) and os.path.lexists(work) and not os.path.isdir(work)
    there = children(work)
    # rows and results come after what says whose they are
    owner = read_json(work, VERSION) if there else None
    is_foreign |= not _is_empty(there) if owner is None else {"model", "registry"}.isdisjoint(owner)
    if is_foreign or any(not _WORK.fullmatch(name) for name in there):
        raise StoreError(
            f"{work}, where predictions are kept until they are complete, holds something else",
            hint="move it away, or choose another output",
        )
    if not is_url(output):
        put_back(Path(output))
    stamped: Any = "unreadable"
    with contextlib.suppress(StoreError, OSError):
        stamped = read_json(parent_of(stamp), name_of(stamp))
    is_ours = isinstance(stamped, dict) and {"dkrr", "sha256", "replaced"} <= stamped.keys()
    digest = content_digest(output)
    # objects take the place of others one by one: chunks without metadata are no array of anybody
    keys = list_keys(output) if is_url(output) else []
    is_begun = bool(keys) and all(re.fullmatch(r"c/\d+/\d+", key) for key in keys)
    is_known = is_ours and (digest in (stamped["sha256"], stamped["replaced"]) or is_begun)
    if (stamped is None or is_ours) and (digest is None or is_known):
        return digest
    if not overwrite:
        raise StoreError(
            f"{output if stamped is None or is_ours else stamp} is there, and not as dkrr wrote it as predictions",
            hint="choose another output, or replace it with --overwrite",
        )
    return None  # what is replaced once by --overwrite does not become predictions by that


def export_predictions(
    predictions: Predictions, output: str, *, stamp: dict[str, Any] | None = None, overwrite: bool = False
) -> None:
    """Write predictions to ``output``, which appears whole or not at all, and their stamp beside it.

    Raises
    ------
    ParameterError, StoreError
        See :func:`check_output`.
    DataError
        The source of columns that are kept has another number of rows.
    """
    replaced = check_output(output, overwrite=overwrite)
    ending = Path(name_of(output)).suffix
    write = {".zarr": _zarr, ".npy": _npy, ".parquet": _arrow, ".csv": _arrow}[ending]
    stamped = {**(stamp or {}), "dkrr": __version__, "predicted_at": utc_now(), "replaced": replaced}
    if predictions.classes:
        stamped["classes"] = list(predictions.classes)
    beside = sibling(output, ".json")

    def check(there: Path) -> None:
        if not overwrite and content_digest(str(there)) != stamped["replaced"]:
            raise StoreError(f"{output} came while the predictions were made", hint="choose another output")

    work = None if is_url(output) else work_of(output)
    if work is not None:
        Path(work).mkdir(parents=True, exist_ok=True)
    with (
        storage_errors(output, 8 * predictions.num_rows * len(predictions.names)),
        tempfile.TemporaryDirectory(prefix="export-", dir=work) as folder,
    ):
        path = os.path.join(folder, f"predictions{ending}")
        write(predictions, path)
        stamped["replaced"] = check_output(output, overwrite=overwrite)  # the last time was a while ago
        # first the stamp, which holds for what is replaced, too
        stamped["sha256"] = content_digest(path)
        if work is None:
            write_json(parent_of(beside), name_of(beside), stamped)
            _put(path, output)
        else:
            write_json(folder, "stamp.json", stamped, durable=True)
            check_fence()
            os.replace(os.path.join(folder, "stamp.json"), beside)
            put_in_place(Path(path), Path(output), check)


def _put(path: str, output: str) -> None:
    """Put a file, or the files of an array, at an address; the metadata of an array last."""
    check_fence()
    if not os.path.isdir(path):
        put_file(parent_of(output), name_of(output), Path(path))
        return
    remove_array(output)
    for key in sorted(list_keys(path), key=lambda key: (key == "zarr.json", key)):
        check_fence()
        put_file(output, key, Path(path, key))


def _zarr(predictions: Predictions, path: str) -> None:
    """The metadata comes last: without it there is no array."""
    m, k = predictions.num_rows, len(predictions.names)
    array = RowArray.unsaved(path, "", num_rows=m, num_columns=k, rows_per_chunk=min(BLOCK_ROWS, m))
    for number, block in enumerate(predictions.blocks()):
        array.write_chunk(number, block)
    array.save_shape()


def _npy(predictions: Predictions, path: str) -> None:
    shape: tuple[int, ...] = (predictions.num_rows, len(predictions.names))
    with open(path, "wb") as file:
        shape = shape[:1] if predictions.y_is_1d else shape
        header: dict[str, Any] = {"descr": "<f8", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for block in predictions.blocks():
            file.write(block.tobytes())


def _arrow(predictions: Predictions, path: str) -> None:
    import pyarrow as pa
    from pyarrow.csv import CSVWriter
    from pyarrow.parquet import ParquetWriter

    is_text = path.endswith(".csv")
    tables = _tables(predictions, is_text)
    first = next(tables)
    try:
        with (CSVWriter if is_text else ParquetWriter)(path, first.schema) as writer:
            for table in itertools.chain([first], tables):
                writer.write_table(table)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:  # a list or a structure that is kept
        ending = Path(path).suffix
        raise DataError(f"a column that is kept cannot be written to {ending} ({exc})", hint="write .parquet") from exc


def _tables(predictions: Predictions, is_text: bool) -> Iterator[Any]:
    """Blocks of rows as Arrow tables: what is kept, the numbers, the class of the largest score."""
    import pyarrow as pa

    source, m, classes = predictions.source, predictions.num_rows, np.array(predictions.classes)
    whole = classes.dtype.kind == "f" and all(isinstance(label, int) for label in predictions.classes)
    if whole or classes.dtype.kind == "O" or classes.tolist() != list(predictions.classes):
        # no type of numbers holds all of them: -1 and 2^63, 2^64, 2^53 + 1 and 0.5
        classes = np.array([str(label) for label in predictions.classes])
    lengths = [min(BLOCK_ROWS, m - start) for start in range(0, m, BLOCK_ROWS)]
    kept = {}
    if source is not None:
        for column in predictions.keep:
            name, kind = source.names[column], source.label_type(column, as_text=is_text)
            kept[name] = _cut(source.as_written(column, kind=kind), kind, lengths, name)
    for block in predictions.blocks():
        table: dict[str, Any] = {name: next(values) for name, values in kept.items()}
        table |= {name: pa.array(np.ascontiguousarray(block[:, k])) for k, name in enumerate(predictions.names)}
        if predictions.classes:
            table[predictions.label] = pa.array(classes[np.argmax(block[:, : len(classes)], axis=1)])
        yield pa.table(table)


def _cut(arrays: Iterator[Any], kind: Any, lengths: list[int], name: str) -> Iterator[Any]:
    """The values of a column in blocks of these lengths, which are all of them."""
    import pyarrow as pa

    rest = pa.chunked_array([], kind)
    for number, length in enumerate(lengths, 1):
        # of the last block, until there is no more
        while len(rest) < length + (number == len(lengths)) and (more := next(arrays, None)) is not None:
            rest = pa.chunked_array([*rest.chunks, more], kind)
        if len(rest) < length or (number == len(lengths) and len(rest) > length):
            raise DataError(
                f"column {name!r} has another number of rows than the {sum(lengths):,} that were predicted",
                hint="the file was changed: start again",
            )
        yield rest[:length]
        rest = rest[length:]


logger = logging.getLogger("dkrr.jobs.predict")
ROWS, RESULT = "data.zarr", "result.zarr"  # of a prediction, in its folder beside the output
VERSION = "version.json"


@dataclass(frozen=True, kw_only=True)
class Extras:
    """What shall stand beside predictions, or in their place.

    Parameters
    ----------
    std
        Standard deviations of f; with ``noise`` those of a new observation.
    interval
        The coverage of intervals, None for no interval.
    method
        Of the intervals.
    probabilities
        Of the classes, in the place of the decision values of a logistic loss.
    """

    std: bool = False
    noise: bool = False
    interval: float | None = None
    method: IntervalMethod = "jackknife"
    probabilities: bool = False

    @property
    def needs_variance(self) -> bool:
        return self.std or (self.interval is not None and self.method != "jackknife")

    def check(self, model: Model) -> None:
        """Refuse what this model cannot say, before anything is predicted.

        Raises
        ------
        ParameterError, StoreError
            No factor, no leave-one-out quantiles for this coverage, which is between 0 and 1, or no probabilities.
        """
        if self.probabilities and (model.provenance.get("loss") != "logistic" or model.classes is None):
            raise ParameterError(
                "this model has no probabilities, which are those of a logistic loss of classes",
                hint="fit a job with [model] loss = 'logistic'",
            )
        if self.needs_variance:
            _ = model.variance_systems
        if self.interval is not None:
            model.half_widths(self.interval, self.method, np.ones((1, model.num_targets)))

    def columns(self, names: Sequence[str]) -> list[str]:
        """Names of the columns: the targets, then each with _std, with _lower, and with _upper."""
        endings = ["", *["_std"] * self.std, *(["_lower", "_upper"] if self.interval is not None else [])]
        return [name + ending for ending in endings for name in names]

    def beside(self, model: Model, values: Floats, variance: Floats | None) -> Floats:
        """Predictions (m, t) and what stands beside them; ``variance`` is var f / sigma^2 (m, t) where it is needed."""
        if self.probabilities:
            values = np.exp(log_probabilities(values))
        parts = [values]
        if self.std and variance is not None:
            parts.append(model.deviations(variance, noise=self.noise))
        if self.interval is not None:
            flat = values[:, 0] if model.y_is_1d else values
            parts.extend(model.interval(flat, self.interval, self.method, variance))
        return np.hstack([part.reshape(len(values), -1) for part in parts])


class Predicted(NamedTuple):
    """How many rows were predicted, and by which version of a registry."""

    num_rows: int
    version: Version | None


def predict_job(
    model: str | Reference,
    data: str,
    output: str,
    *,
    extras: Extras | None = None,
    overwrite: bool = False,
    reading: dict[str, Any] | None = None,
    keep: Sequence[str] = (),
    registry: str | None = None,
    progress: Progress | None = None,
) -> Predicted:
    """Predict the rows of ``data`` into ``output`` (.zarr, .npy, .parquet or .csv).

    What stands at ``output`` is replaced if dkrr wrote it as predictions; with ``overwrite`` whatever it is, unless the
    predictions are made from it. A stamp beside it says where it came from, see :mod:`dkrr.jobs.predict`. Finished
    blocks stay beside the output until it is complete, so an interrupted prediction continues; where they are damaged,
    or of other rows or another model than this one, they are of use to nobody and made anew.

    Columns of ``data`` are the model's by name where both have names: their order is free, others are left aside. A row
    with a missing value is an error, since it would have no prediction. For one-hot targets the class of the largest
    score is there, too. A column of predictions that has the name of a kept one is called NAME_predicted.

    Parameters
    ----------
    model
        A saved model, or one of a registry.
    extras
        Further columns.
    reading
        How a text file is read: header, delimiter and decimal of :func:`~dkrr.ingest`.
    keep
        Columns of ``data`` that are copied beside the predictions (.csv and .parquet).
    registry
        Root; None: ``DKRR_MODELS``, else ./models.

    Raises
    ------
    DataError
        The data has other features than the model, or targets that cannot be told from features; or no column that is
        to be kept.
    ParameterError, StoreError
        The model cannot say what was asked for, or the output is something else's place; there is no such model, alias
        or version.
    LockedError
        Another process predicts into the same output.
    """
    work, named = work_of(output), None
    inputs = [data, str(model)]
    if isinstance(model, Reference):
        named = ModelRegistry(registry).open(model.name)
        inputs[1] = parent_of(named.resolve(model.selector).location)  # a mistake is found before anything is made
    # an input that is part of a version is all of it
    folders = [parent_of(item) for item in inputs]
    inputs += [folder for folder in folders if read_json(folder, RECORD) is not None]
    check_output(output, inputs, overwrite=overwrite)

    def predict() -> Predicted:
        version = None
        if isinstance(model, Reference) and named is not None:
            version = _version_for(named, model, data, work)
            location = version.model_path
            stamp = {"model": named.name, "selector": model.selector, "version": version.id}
        else:
            location = str(model)
            stamp = {"model": location if is_url(location) else os.path.abspath(location)}
            write_json(work, VERSION, stamp)
        predictions, origin = _predicted(
            location, data, output, extras or Extras(), overwrite, reading or {}, keep, progress
        )
        export_predictions(predictions, output, stamp=stamp | origin, overwrite=overwrite)
        _clear(work)
        return Predicted(predictions.num_rows, version)

    with nothing_new(work), hold_lock(work):
        try:
            return predict()
        except (StoreMismatchError, DamagedChunkError) as exc:
            if isinstance(exc, DamagedChunkError) and not is_below(exc.path, work):
                raise
            logger.info("what an interrupted prediction left in %s is made anew: %s", work, exc.message)
            _clear(work)
            return predict()
        finally:
            if _is_empty(children(work)):  # of one that began nothing
                delete_key(work, VERSION)


def _version_for(model: NamedModel, reference: Reference, data: str, work: str) -> Version:
    """The version an interrupted prediction began with, while it is there; else the one that is meant now.

    One that came to nothing before it had a place for its predictions (its rows could not be read, say) began nothing.
    """
    meant = {"registry": model.root, "name": reference.name, "selector": reference.selector}
    with contextlib.suppress(DkrrError):  # of a file, the rows that were read of it are compared
        meant["rows"] = open_dataset(data).digest
    found = read_json(work, VERSION)
    has_begun = bool(children(join(work, RESULT)))
    if has_begun and isinstance(found, dict) and all(found.get(key) == value for key, value in meant.items()):
        try:
            return model.resolve(str(found["version"]))
        except StoreError:
            pass  # pruned since
    _clear(work)
    version = model.resolve(reference.selector)
    write_json(work, VERSION, {**meant, "version": version.id})
    return version


def _predicted(
    location: str,
    data: str,
    output: str,
    extras: Extras,
    overwrite: bool,
    reading: dict[str, Any],
    keep: Sequence[str],
    progress: Progress | None,
) -> tuple[Predictions, dict[str, Any]]:
    """All that is computed, in the folder beside an output that is held, and what the stamp says of it."""
    if keep and not name_of(output).endswith((".csv", ".parquet")):
        raise ParameterError(
            f"{output} holds numbers alone, columns cannot be kept there", hint="write .csv or .parquet"
        )
    model = load_model(location)
    check_output(output, model.provenance.get("factors", ()), overwrite=overwrite)
    extras.check(model)
    work = work_of(output)
    dataset, table = _rows_for(model, data, work, reading, keep=keep)
    variances = None
    try:
        match_features(model, dataset)
        layout = _layout(model, table, keep, extras, output)
        result = place(work, RESULT)
        with executor_of_size(model, 0 if extras.needs_variance else dataset.num_rows) as executor:
            values, _ = predict_dataset(model, dataset, result, executor, progress)
            if extras.needs_variance:
                variances, _ = predict_dataset(model, dataset, result, executor, progress, phase="variance")
    except DataError:  # these rows stay as bad as they are, there is nothing to continue
        _clear(work)
        raise

    def read(start: int, stop: int) -> Floats:
        variance = None if variances is None else variances.read(start, stop)
        return extras.beside(model, values.read(start, stop), variance)

    origin = {"model_digest": model.digest, "num_rows": dataset.num_rows, "rows_digest": dataset.digest}
    return Predictions(num_rows=dataset.num_rows, read=read, **layout), origin


def _layout(model: Model, table: Table | None, keep: Sequence[str], extras: Extras, output: str) -> dict[str, Any]:
    """What the columns of an output are called, as :class:`~dkrr.jobs.predict.Predictions` is told.

    Raises
    ------
    DataError
        Two columns of an output that has names would have the same one.
    """
    columns = () if table is None else kept_columns(table, keep)
    kept = [table.names[column] for column in columns] if table is not None else []

    def free(name: str) -> str:
        return f"{name}_predicted" if name in kept else name

    targets = list(model.target_names) or [f"prediction_{column}" for column in range(model.num_targets)]
    names = [free(name) for name in extras.columns(targets)]
    classes = () if model.classes is None else tuple(model.classes)
    label = free((*target_columns(model.target_names, classes), "label")[0]) if classes else ""
    counts = Counter([*kept, *names, *([label] if classes else [])])
    twice = [name for name, count in counts.items() if count > 1]
    if twice and name_of(output).endswith((".csv", ".parquet")):
        raise DataError(
            f"{output} would have two columns {twice[0]!r}",
            hint="write .npy or .zarr, which have no names, keep other columns, or rename the targets and fit again",
        )
    is_flat = model.y_is_1d and len(names) == 1
    return {"names": names, "y_is_1d": is_flat, "source": table, "keep": columns, "label": label, "classes": classes}


@contextmanager
def executor_of_size(
    model: Model, num_rows: int, start: Callable[[], AbstractContextManager[Executor]] = executor_for
) -> Iterator[Executor]:
    """This process for predictions that take less time than a cluster takes to start; else what ``start()`` makes.

    Parameters
    ----------
    num_rows
        Rows to predict; 0 where more than predictions is computed, for which there are always workers.
    """
    if num_rows and not needs_workers(model, num_rows):
        with single_blas_thread():
            yield InProcessExecutor()
        return
    with start() as executor:
        yield executor


def evaluate_job(
    model_path: str,
    data: str,
    *,
    metric: str | None = None,
    intervals: float | None = None,
    reading: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score a model on the rows of ``data``, whose targets are told by name, else by where they stood in the fit.

    ``intervals``: the coverage of the jackknife intervals whose real one is counted (None: 0.9, of a model that has
    leave-one-out quantiles). ``reading`` says how a text file is read, and what is done with rows that have missing
    values: header, delimiter, decimal and missing of :func:`~dkrr.ingest`.
    """
    model = load_model(model_path)
    work = TemporaryStore()  # not beside the model, which may be a version that never changes
    try:
        dataset, _ = _rows_for(model, data, work.path, reading or {}, with_targets=True)
        with executor_of_size(model, dataset.num_rows) as executor:
            score, _ = score_dataset(model, dataset, executor, progress, store=work.path, intervals=intervals)
    finally:
        work.close()
    found = score.facts() if metric is None else {metric: score.value(metric), "rows": score.num_rows}
    if model.observed.num_targets < 2 or score.accuracy is not None:
        return found
    over, constant = f"{model.num_targets}; each score is the mean over them", sum(map(math.isnan, score.r2))
    return found | {
        "targets": over + (f", r2 without the {constant} of one value" if constant and "r2" in found else "")
    }


def _by_place(model: Model, table: Table) -> dict[str, Any]:
    """Columns of a table without names in common: where they stood when the model was fitted, else targets last."""
    if table.is_named and not model.names:
        refuse_shuffled_numbers(table.names, (), table.label)
    if columns := placed(model.places, table.names, 2):
        return dict(zip(("features", "target"), columns, strict=True))
    return {"target": list(range(-1 if model.classes is not None else -model.observed.num_targets, 0))}


def _rows_for(
    model: Model,
    data: str,
    work: str,
    reading: dict[str, Any],
    *,
    with_targets: bool = False,
    keep: Sequence[str] = (),
) -> tuple[Dataset, Table | None]:
    """The data as rows with the model's features: a data set as it is, else a table, ingested beside the output."""
    try:
        dataset = open_dataset(data)
    except StoreError:
        # missing values are no matter of how a file is read
        text = {name: value for name, value in reading.items() if name != "missing"}
        table = open_table(data, **text, named=[model.names, keep])
    else:
        if keep:
            raise DataError(
                f"columns of {data} cannot be kept, it is a data set", hint="predict the file that it was made of"
            )
        check_places(model, dataset.places, data, is_named=bool(dataset.names))
        return dataset, None
    kept_columns(table, keep)  # a mistake is found before anything is made
    destination = place(work, ROWS)
    if not with_targets:
        # rows that an interrupted prediction left are compared with the data, which may be another by now
        # by name: a number may be the name of another column
        features = [table.names[column] for column in feature_columns(model, table)]
        return ingest(table, destination, features=features), table
    observed = model.observed
    options = ordered_like(observed, table)
    if not options and table.target is None:
        labels = observed.named_targets
        is_there = table.is_named and bool(labels) and set(labels) <= set(table.names)
        options = {"target": list(labels)} if is_there else _by_place(model, table)
    one_hot = model.classes is not None and table.classes is None
    missing = reading.get("missing", "error")
    return ingest(table, destination, **options, one_hot=one_hot, classes=model.classes, missing=missing), table
