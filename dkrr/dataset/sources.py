"""Which kind of source is this? The one place that opens them, and fetches those at an address.

Nothing is read whole: a .npy file is read piece by piece, dask arrays, Zarr arrays and data sets chunk by chunk. CSV,
Parquet and NumPy files at an s3:// address are read from their beginning to their end, some of them twice, so a copy
that lives as long as its table is simpler than a file that is read over the network, and no slower. Zarr arrays and
data sets are read in place. Cost: the bytes of the source, in Dask's temporary directory or the system's.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset.dataset import FORMAT, Dataset, array_name, attributes_of, open_dataset
from dkrr.dataset.rows import Floats, RowArray
from dkrr.dataset.table import (
    ArrayTable,
    Table,
    array_table,
    as_array,
    frame_labels,
    is_visible,
    joined,
    unchanged,
    unique_names,
    was_changed,
)
from dkrr.errors import DataError, ParameterError, StoreError, did_you_mean
from dkrr.store.documents import refuse_links
from dkrr.store.files import (
    check_space,
    children,
    is_url,
    join,
    key_size,
    list_entries,
    name_of,
    parent_of,
    read_json,
    storage_errors,
    zarr_store,
)
from dkrr.store.objects import Entry, get_file

__all__ = ["Table", "open_table"]

_TEXT, _FILES = (".csv", ".csv.gz"), (".csv", ".csv.gz", ".parquet", ".npy")


def open_table(
    source: Any,
    *,
    header: Any = "auto",
    delimiter: str | None = None,
    decimal: str = ".",
    named: Iterable[Any] = (),
    y: Any = None,
    sample_weight: Any = None,
    allow_1d: bool = False,
) -> Table:
    """The table behind any source, joined with targets and weights that are given apart.

    ``header``, ``delimiter`` and ``decimal`` are those of a text file, see :class:`~dkrr.dataset.arrow.CsvTable`.
    ``named`` has columns that are asked for, one by one or in lists, None among them: of a text file they tell names in
    its first line from values. With ``allow_1d`` an array of one axis is one column.

    Raises
    ------
    DataError, StoreError
        The source is missing, damaged, of the wrong shape or type, or of another length than ``y``.
    """
    columns = [name for item in named for name in (item if isinstance(item, list | tuple) else [item])]
    text = {"header": header, "delimiter": delimiter, "decimal": decimal, "named": columns}
    table = _open_any(source, "X", text, allow_1d=allow_1d)
    given = [name for name, value in (("y", y), ("sample_weight", sample_weight)) if value is not None]
    if given and (table.target is not None or table.weight is not None):
        raise ParameterError(f"{table.label} brings its own targets; {' and '.join(given)} given too", hint="drop them")
    targets = None if y is None else _open_any(y, "y", {}, prefix="y", allow_1d=True)
    options: dict[str, Any] = {"prefix": "weight", "allow_1d": True}
    weights = None if sample_weight is None else _open_any(sample_weight, "sample_weight", {}, **options)
    return joined(table, targets, weights)


def _open_any(source: Any, label: str, text: dict[str, Any], **options: Any) -> Table:
    if isinstance(source, Table):
        return source
    if isinstance(source, str | os.PathLike):
        return _open_path(os.fspath(source), os.fspath(source), text, **options)
    if isinstance(source, Dataset):
        return dataset_table(source)
    libraries = {kind.__module__.partition(".")[0] for kind in type(source).__mro__}
    if "zarr" in libraries:
        return zarr_table(source, label, **options)
    if "dask" in libraries:
        return dask_table(source, label, **options)
    labels = frame_labels(source)
    if "pandas" in libraries or (labels is not None and hasattr(source, "__arrow_c_stream__")):
        from dkrr.dataset.arrow import FrameTable  # loads pyarrow

        return FrameTable(source, label, **options)
    return array_table(source, label, names=None if labels is None else unique_names(labels, label), **options)


def _open_path(place: str, label: str, text: dict[str, Any], **options: Any) -> Table:
    if place.startswith("sklearn:"):
        return sklearn_table(place)
    if place.startswith("generate:"):
        return generated_table(place)
    if is_url(place):
        copy = _fetch(place)
        if copy is None:
            return open_zarr(place, label, **options)
        table = _open_path(str(copy), label, text, **options)
        weakref.finalize(table, shutil.rmtree, copy.parent, ignore_errors=True)
        return table
    path, is_file = Path(place), os.path.isfile(place)
    name = path.name.lower() if is_file else ""
    with storage_errors(place):
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            if not path.parent.is_dir():
                missing, near = f"{path} does not exist, nor does the folder {path.parent}", "check the path"
            else:
                missing = f"{path} does not exist in {path.parent}"
                near = did_you_mean(path.name, os.listdir(path.parent), "check the path")
            raise StoreError(missing, hint=near) from None
        if is_file:
            path.open("rb").close()  # no permission is found here, with the system's own words
        elif place.endswith(".zarr") or any((path / key).exists() for key in ("zarr.json", ".zarray", ".zgroup")):
            return open_zarr(place, label, **options)
        if name.endswith(".npy"):
            return npy_table(path, label, **options)
        if not is_file or name.endswith((*_TEXT, ".parquet")):
            from dkrr.dataset import arrow  # loads pyarrow

            return arrow.CsvTable(path, label, **text) if name.endswith(_TEXT) else arrow.ParquetTable(path, label)
    raise DataError(
        f"{label} has an unknown format; {', '.join(_FILES)}, .zarr, sklearn:NAME or generate:NAME expected",
        hint="convert it to one of these",
    )


def _fetch(url: str) -> Path | None:
    """A copy of a file, or of all Parquet files below an address, in a new folder that the caller removes.

    None for what is read in place.
    """
    name, parent = name_of(url), parent_of(url)
    size = key_size(parent, name) if name.endswith(_FILES) else None
    sizes, listed = {name: size or 0}, list[Entry]()
    if size is None:
        if name.endswith(".zarr") or "zarr.json" in children(url):  # whose chunks need not be listed
            return None
        listed = list_entries(url)
        sizes = {f"{name}/{item.key}": item.num_bytes for item in listed if is_visible(item.key)}
        if not any(key.endswith(".parquet") for key in sizes):
            if name.endswith(_FILES):
                raise StoreError(f"{url} does not exist", hint="check the address")
            return None
    import dask

    folder = Path(tempfile.mkdtemp(prefix="dkrr-", dir=dask.config.get("temporary-directory", None)))
    try:
        check_space(folder, sum(sizes.values()))
        for key in sizes:
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            if get_file(parent, key, folder / key) is None:
                raise StoreError(f"{join(parent, key)} was removed while it was read", hint="start again")
        if listed:
            _check_objects(url, listed)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder / name


# --- arrays -----------------------------------------------------------------------------------------------------------


def npy_table(path: Path, label: str, **options: Any) -> Table:
    """A .npy file, C or Fortran order, any byte order; pickled objects are refused."""
    check = unchanged([path])
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as exc:
        raise DataError(f"{label} is not a readable .npy file ({exc})", hint="write it again with numpy.save") from exc
    found, expected = path.stat().st_size, array.offset + array.nbytes
    if found != expected:
        raise DataError(
            f"{label} has {found:,} bytes; {expected:,} expected",
            hint="copy it again, or save one array alone: more is behind its first",
        )
    shape, dtype, begin, width = array.shape, array.dtype, array.offset, math.prod(array.shape[1:])
    is_columns = array.flags.f_contiguous and not array.flags.c_contiguous

    def numbers(first: int, count: int) -> NDArray[Any]:
        return np.fromfile(path, dtype, count, offset=begin + first * dtype.itemsize)

    def read(start: int, stop: int) -> NDArray[Any]:
        is_last = stop == shape[0]
        try:
            if is_columns:
                return np.stack([numbers(j * shape[0] + start, stop - start) for j in range(width)], axis=1)
            return numbers(start * width, (stop - start) * width).reshape(stop - start, width)
        except (OSError, ValueError):
            is_last = True  # whatever is wrong with the bytes of a file that was replaced
            raise
        finally:
            if is_last:
                check()

    return ArrayTable(label, shape, read, **options)


def dask_table(source: Any, label: str, **options: Any) -> Table:
    """A dask array or data frame, computed one row block after the other."""
    if hasattr(type(source), "to_dask_array"):
        labels = [source.name] if source.ndim == 1 else source.columns
        options["names"] = None if labels[0] is None else unique_names(labels, label)
        frame, source = source, source.to_dask_array(lengths=True)  # one pass over the graph for the numbers of rows

        def read_labels(start: int, stop: int, j: int) -> list[Any]:
            column = frame if frame.ndim == 1 else frame.iloc[:, j]
            return list(column.to_dask_array(lengths=source.chunks[0])[start:stop].compute().tolist())

        options["read_labels"] = read_labels  # beside floats integers would be floats
    if not hasattr(type(source), "chunks"):
        raise DataError(
            f"{label} is of type {type(source).__name__}; a dask array expected",
            hint="pass its .to_dask_array(lengths=True)",
        )
    if any(math.isnan(length) for length in source.shape):
        raise DataError(
            f"{label} is a dask array with unknown chunk sizes, shape {source.shape}; known sizes expected",
            hint="call compute_chunk_sizes() on it first",
        )
    # a filter leaves partitions without rows
    ends = np.cumsum([length for length in source.chunks[0] if length] if source.chunks else ()).tolist()
    return ArrayTable(label, source.shape, lambda a, b: as_array(source[a:b].compute(), label), ends=ends, **options)


def dataset_table(dataset: Dataset) -> Table:
    """A data set as a source, with its own names, targets and weights; it is verified before the first row is read."""
    check = functools.cache(dataset.check_still_there)

    def read(rows: RowArray, start: int, stop: int) -> Floats:
        check()
        return rows.read(start, stop)

    names = {"X": dataset.feature_names, "y": dataset.target_names, "weight": [dataset.weight_name or "weight"]}
    parts: dict[str, Table] = {
        name: ArrayTable(
            str(dataset.path) if name == "X" else f"{name} of {dataset.path}",
            (rows.num_rows, rows.num_columns),
            functools.partial(read, rows),
            names=names[name],
            chunk=rows.rows_per_chunk,
        )
        for name, rows in dataset.parts().items()
    }
    parts["X"].is_named = bool(dataset.names)
    if "y" in parts:
        parts["y"].is_named = bool(dataset.named_targets)
    table = joined(parts["X"], parts.get("y"), parts.get("weight"))
    table.target_is_1d, table.classes, table.places = dataset.y_is_1d, dataset.classes, dataset.places
    table.dropped = ~dataset.kept if dataset.num_dropped else None
    return table


# --- Zarr -------------------------------------------------------------------------------------------------------------

# what the metadata says is looked at before anything is opened: a filter that is found by its name may run code
_CODECS = {"blosc", "bytes", "crc32c", "gzip", "sharding_indexed", "transpose", "zstd"}
_PARTS = ("X", "y", "weight")


def open_zarr(location: Any, label: str, **options: Any) -> Table:
    """The Zarr format 3 array, group or data set at a path or a URL.

    Raises
    ------
    StoreError
        Format 2, a symbolic link, an unknown codec, or not what was expected.
    DataError
        Values that are not numbers.
    """
    refuse_links(location, is_deep=False)
    document = read_json(location, "zarr.json")
    if not isinstance(document, dict):
        is_old = any(read_json(location, name) is not None for name in (".zarray", ".zgroup"))
        what = "Zarr format 2; format 3 expected" if is_old else "not a Zarr format 3 array or group (no zarr.json)"
        raise StoreError(f"{label} is {what}", hint="check the path, and convert what is of format 2")
    if document.get("attributes", {}).get("dkrr_format") == FORMAT:
        return dataset_table(open_dataset(location))
    _check_present(location, document.get("shape", [None])[0], label)
    for found in (document, *(read_json(location, f"{name}/zarr.json") for name in _PARTS)):
        if found is not None and found.get("node_type") != "group":
            _check_array(found, label)

    import zarr

    check = functools.partial(_check_objects, location, list_entries(location)) if is_url(location) else None
    return zarr_table(zarr.open(zarr_store(location), mode="r", zarr_format=3), label, check=check, **options)


def _check_objects(url: str, listed: list[Entry]) -> None:
    """Refuse objects below an address that are others than were listed: one is never of two versions, several are."""
    if list_entries(url) != listed:
        raise was_changed(url)


def _check_present(location: Any, num_rows: Any, label: str) -> None:
    """Refuse an array of a data set with rows that were dropped, or that an append left which came to nothing."""
    around = attributes_of(parent_of(location))
    present = {} if around is None else {array_name(part, around["version"]) for part in around["arrays"]}
    if around is not None and (name_of(location) not in present or num_rows != around["num_rows"]):
        raise DataError(
            f"{label} has other rows than the data set that it lies in, {parent_of(location)}",
            hint="name the data set",
        )


def zarr_table(node: Any, label: str, *, check: Callable[[], None] | None = None, **options: Any) -> Table:
    """An opened Zarr array, or a group with X and, if there, y and weight; a data set that was opened as a group.

    ``check`` raises where it was changed; for a local one there is one by default.
    """
    import zarr

    folder = getattr(node.store, "root", None)  # of a local store
    if folder is not None:
        location = str(Path(folder, node.path))
        if not isinstance(node, zarr.Array) and node.attrs.get("dkrr_format") == FORMAT:
            return dataset_table(open_dataset(location))
        _check_present(location, node.shape[0] if isinstance(node, zarr.Array) and node.ndim else None, label)
    if isinstance(node, zarr.Array):
        _check_array(node.metadata.to_dict(), label)
        chunk = (getattr(node, "shards", None) or node.chunks or (1,))[0]
        if folder is not None:
            check = unchanged(Path(location).rglob("*"))

        def read(start: int, stop: int) -> NDArray[Any]:
            found = np.asarray(node[start:stop])
            if stop == node.shape[0] and check is not None:
                check()
            return found

        return ArrayTable(label, node.shape, read, chunk=chunk, **options)
    arrays = {name: node.get(name) for name in _PARTS}
    if not isinstance(arrays["X"], zarr.Array) or set(node.array_keys()) - set(arrays):
        raise DataError(
            f"{label} is a group that holds {', '.join(sorted(node)) or 'nothing'}; X, and optionally y and weight, "
            "expected",
            hint="name the array inside the group, or rename it",
        )
    parts = {
        name: zarr_table(array, f"{name} of {label}", check=check, prefix=name.lower(), allow_1d=name != "X")
        for name, array in arrays.items()
        if array is not None
    }
    return joined(parts["X"], parts.get("y"), parts.get("weight"))


def _check_array(document: dict[str, Any], label: str) -> None:
    if document.get("zarr_format") != 3 or document.get("node_type") != "array":
        raise StoreError(f"{label} is no Zarr array of format 3; format 2 is not read", hint="convert it to format 3")
    dtype = document.get("data_type")
    name = dtype.get("name") if isinstance(dtype, dict) else dtype
    if re.fullmatch(r"bool|u?int(8|16|32|64)|float(16|32|64)", str(name)) is None:
        raise DataError(f"{label} has dtype {name}; numbers expected", hint="convert it to float64", dtype=str(name))
    unknown = set(re.findall(r'"name": "([^"]*)"', json.dumps(document.get("codecs")))) - _CODECS
    if unknown:
        raise StoreError(
            f"{label} uses the codec {min(unknown)!r}; {', '.join(sorted(_CODECS))} expected",
            hint="write it again without that codec",
        )


# --- made up ----------------------------------------------------------------------------------------------------------

GENERATED_ROWS = 1024
_SETS = ("breast_cancer", "diabetes", "digits", "iris", "wine")


def sklearn_table(source: str) -> Table:
    """``sklearn:<name>``: a data set that scikit-learn ships; its last column is the target."""
    name = _known("scikit-learn data set", source.partition(":")[2], _SETS)
    from sklearn import datasets

    bunch = getattr(datasets, f"load_{name}")()
    names = [*map(str, bunch.feature_names), "target"]
    table = array_table(np.column_stack([bunch.data, bunch.target]), source, names=names)
    table.target, table.target_is_1d = (len(names) - 1,), True
    return table


def _known(what: str, name: str, known: Sequence[str]) -> str:
    if name not in known:
        raise ParameterError(
            f"{what} {name!r} is unknown; {', '.join(known)} exist",
            hint=did_you_mean(name, known, "choose one of them"),
        )
    return name


def _friedman(random: np.random.Generator, d: int, t: int, noise: float, seed: int) -> Floats:
    X = random.random((GENERATED_ROWS, d))
    y = 10 * np.sin(np.pi * X[:, 0] * X[:, 1]) + 20 * (X[:, 2] - 0.5) ** 2 + 10 * X[:, 3] + 5 * X[:, 4]
    return np.column_stack([X, y[:, None] + noise * random.standard_normal((GENERATED_ROWS, t))])


def _normal(random: np.random.Generator, d: int, t: int, noise: float, seed: int) -> Floats:
    X = random.standard_normal((GENERATED_ROWS, d))
    directions = np.random.default_rng([seed, 1 << 40]).standard_normal((d, t))
    directions /= np.linalg.norm(directions, axis=0)
    # einsum and not a BLAS product: its bits do not depend on the BLAS kernel of the machine
    y = np.sin(np.einsum("ij,jk->ik", X, directions))
    return np.column_stack([X, y + noise * random.standard_normal((GENERATED_ROWS, t))])


# function, noise where none is given, fewest features
_MAKERS: dict[str, tuple[Callable[..., Floats], float, int]] = {
    "friedman": (_friedman, 1.0, 5),
    "normal": (_normal, 0.1, 1),
}


def generated_table(source: str) -> Table:
    """``generate:<name>?n=...``: rows of a formula with noise; the last t columns are the targets.

    ``friedman``: x uniform on [0, 1]^d, y = 10 sin(pi x0 x1) + 20 (x2 - 1/2)^2 + 10 x3 + 5 x4 + noise e.
    ``normal``: x standard normal, y_j = sin(a_j . x) + noise e with unit vectors a_j. e is standard normal.
    Parameters: n rows, d features, t targets, noise, seed.

    Rows come in fixed blocks of 1,024 with a random stream each, seeded by (seed, block number). So row i is the same
    whatever is read before it, in whatever pieces, and the first n rows are the same for every longer n.

    References
    ----------
    Friedman (1991), "Multivariate adaptive regression splines", The Annals of Statistics 19.
    """
    name, _, query = source.partition(":")[2].partition("?")
    make, noise, fewest = _MAKERS[_known("generator", name, sorted(_MAKERS))]
    least: dict[str, float] = {"n": 1, "d": fewest, "t": 1, "noise": 0, "seed": 0}
    given: dict[str, float] = {"n": 20480, "d": 10, "t": 1, "noise": noise, "seed": 0}
    for key, text in parse_qsl(query, keep_blank_values=True):
        _known(f"parameter of generate:{name}", key, sorted(given))
        try:
            given[key] = float(text) if key == "noise" else int(text)
        except ValueError:
            given[key] = math.nan
        if not least[key] <= given[key] < math.inf:
            wanted = "a number" if key == "noise" else "an integer"
            raise ParameterError(
                f"{source}: {key} is {text!r}; {wanted} of at least {least[key]} expected",
                hint=f"write {key}={least[key]} or more, or leave {key} out",
            )
    n, d, t, seed = (int(given[key]) for key in ("n", "d", "t", "seed"))

    def read(start: int, stop: int) -> Floats:
        numbers = range(start // GENERATED_ROWS, -(-stop // GENERATED_ROWS))
        streams = [np.random.default_rng([seed, number]) for number in numbers]
        return np.concatenate([make(random, d, t, given["noise"], seed) for random in streams])[: stop - start]

    names = [*(f"x{j}" for j in range(d)), *(["y"] if t == 1 else [f"y{k}" for k in range(t)])]
    table = ArrayTable(source, (n, d + t), read, names=names, chunk=GENERATED_ROWS)
    table.target, table.target_is_1d = tuple(range(d, d + t)), t == 1
    return table
