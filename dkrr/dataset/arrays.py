"""Sources that are one matrix whose rows can be read anywhere: NumPy, .npy, dask, Zarr, data sets, generated rows.

Nothing is read whole and nothing stays mapped: mapped pages count as resident memory, so those of a memory map are
dropped as soon as they are copied, and a .npy file is read piece by piece.
"""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset.columns import did_you_mean
from dkrr.dataset.dataset import Dataset, open_dataset
from dkrr.dataset.destination import FORMAT
from dkrr.dataset.rows import Floats, RowArray
from dkrr.dataset.table import BLOCK_BYTES, Block, Join, Table, check_shape, to_floats, unchanged, with_mask
from dkrr.errors import DataError, ParameterError, StoreError
from dkrr.store.files import local_root, read_json, zarr_store

__all__ = [
    "ArrayTable",
    "array_table",
    "dask_table",
    "dataset_table",
    "generated_table",
    "npy_table",
    "open_zarr",
    "sklearn_table",
    "zarr_table",
]

Read = Callable[[int, int], Any]


class ArrayTable(Table):
    """A 2-D (or 1-D) array behind a function that reads its rows ``start`` to ``stop``.

    Parameters
    ----------
    names
        Of columns; None makes them up from ``prefix``.
    ends
        Where blocks end, or how many rows they have; None: blocks of 16 MiB.
    """

    def __init__(
        self,
        label: str,
        shape: Sequence[float],
        read: Read,
        *,
        prefix: str = "x",
        allow_1d: bool = False,
        names: Sequence[str] | None = None,
        ends: Sequence[int] | int | None = None,
    ) -> None:
        num_rows, width = check_shape(shape, label, allow_1d=allow_1d)
        generic = [prefix] if allow_1d and width == 1 else [f"{prefix}{j}" for j in range(width)]
        super().__init__(label, generic if names is None else names, num_rows, is_named=names is not None)
        self.is_1d, self._read = len(shape) == 1, read
        if ends is None or isinstance(ends, int):
            step = ends or max(256, BLOCK_BYTES // (8 * width))
            ends = [*range(step, num_rows, step), num_rows]
        self._ends = ends

    def blocks(self, columns: Sequence[int], label_column: int | None = None) -> Iterator[Block]:
        start, chosen = 0, list(columns)
        for stop in self._ends:
            raw = self._read(start, stop)
            raw = raw.reshape(len(raw), -1)
            labels = None if label_column is None else raw[:, label_column].tolist()
            part = raw if chosen == list(range(raw.shape[1])) else raw[:, chosen]
            yield to_floats(part, self.label, start) if chosen else np.empty((len(raw), 0)), labels
            start = stop


def array_table(values: Any, label: str, *, names: Sequence[str] | None = None, **options: Any) -> Table:
    """A list, an array in memory, a memory map, or anything with ``__array__``.

    Raises
    ------
    DataError
        Sparse, ragged, or not an array at all.
    """
    array = _as_array(values, label)
    mapped = _shared_map(array)

    def read(start: int, stop: int) -> NDArray[Any]:
        if mapped is None:
            return array[start:stop]
        copy = array[start:stop].copy()
        mapped.madvise(mmap.MADV_DONTNEED)
        return copy

    return ArrayTable(label, array.shape, read, names=names, **options)


def _as_array(values: Any, label: str) -> NDArray[Any]:
    values = with_mask(values)
    if isinstance(values, np.ndarray):
        return values if isinstance(values, np.ma.MaskedArray) else np.asarray(values)
    if type(values).__module__.partition(".")[0] == "scipy" and hasattr(values, "toarray"):
        raise DataError(f"{label} is sparse ({type(values).__name__}); dense rows expected", hint="pass .toarray()")
    if not isinstance(values, list | tuple) and not hasattr(values, "__array__"):
        raise DataError(
            f"{label} is of type {type(values).__name__}; a path, NumPy, pandas, dask or Zarr array expected",
            hint="convert it with numpy.asarray",
        )
    try:
        return np.asarray(values)
    except (ValueError, TypeError) as exc:
        raise DataError(f"{label} is not a rectangular array ({exc})", hint="give every row the same length") from exc


def _shared_map(array: Any) -> mmap.mmap | None:
    """The memory map under an array, unless pages dropped from it would be lost (mode "c" keeps changes there)."""
    mode = None
    while array is not None and not isinstance(array, mmap.mmap):
        mode = getattr(array, "mode", mode)
        array = getattr(array, "base", None)
    return array if mode in ("r", "r+", "w+") and hasattr(mmap, "MADV_DONTNEED") else None


def npy_table(path: Path, label: str, **options: Any) -> Table:
    """A .npy file, C or Fortran order, any byte order; pickled objects are refused."""
    check = unchanged([path])
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as exc:
        raise DataError(f"{label} is not a readable .npy file ({exc})", hint="write it again with numpy.save") from exc
    offset, dtype, is_columns = array.offset, array.dtype, array.flags.f_contiguous and not array.flags.c_contiguous
    found, expected = path.stat().st_size, offset + array.nbytes
    if found != expected:
        raise DataError(
            f"{label} has {found:,} bytes; {expected:,} expected",
            hint="copy it again, or save one array alone: more is behind its first",
        )
    width = math.prod(array.shape[1:])

    def read(start: int, stop: int) -> NDArray[Any]:
        part = partial(np.fromfile, path, dtype)
        size, num_rows = dtype.itemsize, stop - start
        try:
            if not is_columns:
                rows = part(num_rows * width, offset=offset + start * width * size)
                return np.asarray(rows.reshape(num_rows, width))
            columns = [part(num_rows, offset=offset + (j * shape[0] + start) * size) for j in range(width)]
            return np.stack(columns, axis=1)
        finally:  # whatever is wrong with the bytes of a file that was replaced
            check()

    shape = array.shape
    return ArrayTable(label, shape, read, **options)


def dask_table(array: Any, label: str, **options: Any) -> Table:
    """A dask array, computed one row block after the other."""
    if any(math.isnan(length) for length in array.shape):
        raise DataError(
            f"{label} is a dask array with unknown chunk sizes, shape {array.shape}; known sizes expected",
            hint="call compute_chunk_sizes() on it first",
        )
    ends = np.cumsum(array.chunks[0] if array.chunks else ()).tolist()
    read: Read = lambda start, stop: _as_array(array[start:stop].compute(), label)  # noqa: E731
    return ArrayTable(label, array.shape, read, ends=ends, **options)


def _row_table(rows: RowArray, label: str, names: Sequence[str]) -> Table:
    step = rows.rows_per_chunk * max(1, BLOCK_BYTES // (8 * rows.num_columns * rows.rows_per_chunk))
    return ArrayTable(label, (rows.num_rows, rows.num_columns), rows.read, names=names, ends=step)


def dataset_table(dataset: Dataset) -> Table:
    """A data set as a source, with its own names, targets and weights; every chunk is verified."""
    label = str(dataset.path)
    table = x = _row_table(dataset.X, label, dataset.feature_names)
    x.is_named = bool(dataset.names)
    y = None if dataset.y is None else _row_table(dataset.y, f"y of {label}", dataset.target_names)
    weight = None
    if dataset.weight is not None:
        weight = _row_table(dataset.weight, f"weight of {label}", [dataset.weight_name or "weight"])
    if y is not None or weight is not None:
        table = Join(x, y, weight)
        table.target_is_1d, table.classes = dataset.y_is_1d, dataset.classes
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
    root, document = local_root(location), read_json(location, "zarr.json")
    if root is not None:
        for name in ("zarr.json", *_PARTS):
            if (root / name).is_symlink():
                raise StoreError(f"{name} of {label} is a symbolic link", hint="only plain files and folders are read")
    if not isinstance(document, dict):
        is_old = any(read_json(location, name) is not None for name in (".zarray", ".zgroup"))
        what = "Zarr format 2; format 3 expected" if is_old else "not a Zarr format 3 array or group (no zarr.json)"
        raise StoreError(f"{label} is {what}", hint="check the path, and convert what is of format 2")
    if document.get("attributes", {}).get("dkrr_format") == FORMAT:
        return dataset_table(open_dataset(location))
    for found in (document, *(read_json(location, f"{name}/zarr.json") for name in _PARTS)):
        if found is not None and found.get("node_type") != "group":
            _check_array(found, label)

    import zarr

    return zarr_table(zarr.open(zarr_store(location), mode="r", zarr_format=3), label, **options)


def zarr_table(node: Any, label: str, **options: Any) -> Table:
    """An opened Zarr array, or a group with X and, if there, y and weight."""
    import zarr

    if isinstance(node, zarr.Array):
        _check_array(node.metadata.to_dict(), label)
        rows = (getattr(node, "shards", None) or node.chunks or (1,))[0]
        step = rows * max(1, BLOCK_BYTES // (8 * max(1, math.prod(node.shape[1:])) * rows))
        return ArrayTable(label, node.shape, lambda a, b: np.asarray(node[a:b]), ends=step, **options)
    arrays = {name: node.get(name) for name in _PARTS}
    if not isinstance(arrays["X"], zarr.Array) or set(node.array_keys()) - set(arrays):
        raise DataError(
            f"{label} is a group that holds {', '.join(sorted(node)) or 'nothing'}; X, and optionally y and weight, "
            "expected",
            hint="name the array inside the group, or rename it",
        )
    x, y, weight = (
        None if array is None else zarr_table(array, f"{name} of {label}", prefix=name.lower(), allow_1d=name != "X")
        for name, array in arrays.items()
    )
    return Join(x, y, weight) if x is not None and (y is not None or weight is not None) else x  # type: ignore[return-value]


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
            raise ParameterError(f"{source}: {key} is {text!r}; {wanted} of at least {least[key]} expected")
    n, d, t, seed = (int(given[key]) for key in ("n", "d", "t", "seed"))

    def read(start: int, stop: int) -> Floats:  # one block
        random = np.random.default_rng([seed, start // GENERATED_ROWS])
        return make(random, d, t, given["noise"], seed)[: stop - start]

    names = [*(f"x{j}" for j in range(d)), *(["y"] if t == 1 else [f"y{k}" for k in range(t)])]
    table = ArrayTable(source, (n, d + t), read, names=names, ends=GENERATED_ROWS)
    table.target, table.target_is_1d = tuple(range(d, d + t)), t == 1
    return table
