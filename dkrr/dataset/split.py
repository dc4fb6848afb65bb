"""The rows that a fit uses: training rows only, whitened with their own statistics if wanted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import destination
from dkrr.dataset.dataset import Dataset, open_dataset
from dkrr.dataset.ingest import fields_of
from dkrr.dataset.rows import Floats
from dkrr.dataset.scaling import Scaling
from dkrr.dataset.summary import RowSummary
from dkrr.dataset.writer import DatasetWriter
from dkrr.errors import DataError, StoreMismatchError

__all__ = ["mask_digest", "prepare_rows"]

Mask = NDArray[np.bool_]


def prepare_rows(
    dataset: Dataset,
    dest: Any,
    *,
    test_mask: Mask | None = None,
    standardize: bool = False,
    scaling: Scaling | None = None,
    scaling_rows: int | None = None,
) -> tuple[Dataset, Scaling | None]:
    """Write the training rows of a data set to a data set of their own.

    Parameters
    ----------
    dataset
        All rows.
    dest
        Folder, URL or store. What an earlier call with the same arguments wrote there is returned as it is, and what
        another process is writing there is waited for.
    test_mask : (n,) bool, optional
        True for rows to leave out.
    standardize
        Whiten X and y: ``(x - mean) / std`` with mean and population standard deviation of the training rows,
        unweighted; 1 stands for the standard deviation of a constant column. Weights are copied.
    scaling
        Whiten with these statistics instead, so that rows which came later continue an earlier fit.
    scaling_rows
        So many first rows of a data set these are statistics of; written down only.

    Returns
    -------
    train : Dataset
        Its generations are those of ``dataset``, counted in training rows.
    scaling : Scaling or None
        What the rows were whitened with.

    Raises
    ------
    DataError
        A mask of another length, or one that leaves no row.
    StoreMismatchError
        ``dest`` holds other rows.

    Cost
    ----
    Reads the data set twice, or three times to standardize; writes the training rows; memory for a few chunks.
    """
    keep = _kept(dataset, test_mask)
    origin: dict[str, Any] = {
        "digest": {name: record["digest"] for name, record in dataset.records.items()},
        "rows": mask_digest(keep),
        "scaling": scaling.to_dict() if scaling is not None else "training rows" if standardize else None,
    }
    if destination.inspect(dest) == "complete":
        return _reuse(dest, origin)
    with destination.writing(dest, wait=True):
        if destination.inspect(dest) == "complete":
            return _reuse(dest, origin)
        return _write(dataset, dest, keep, origin, standardize, scaling, scaling_rows)


def _write(
    dataset: Dataset,
    dest: Any,
    keep: Mask,
    origin: dict[str, Any],
    standardize: bool,
    scaling: Scaling | None,
    scaling_rows: int | None,
) -> tuple[Dataset, Scaling | None]:
    dataset.verify()  # a damaged or exchanged chunk must not be copied under a digest of its own
    if scaling is None and standardize:
        scaling = _training_scaling(dataset, keep)
    origin |= {
        "resolved": None if scaling is None else scaling.to_dict(),
        "num_rows": dataset.num_rows,
        "scaling_rows": dataset.num_rows if scaling_rows is None else scaling_rows,
    }
    writer = DatasetWriter(
        dest,
        **fields_of(dataset),
        num_rows=int(np.count_nonzero(keep)),
        origin=origin,
    )
    ends = {generation.n: generation for generation in dataset.generations}
    with writer:
        for start, stop in _cut(dataset, sorted(ends)):
            rows = {name: array.read(start, stop)[keep[start:stop]] for name, array in dataset.parts().items()}
            if scaling is not None:
                scaling.apply_x(rows["X"], out=rows["X"])
                if "y" in rows:
                    scaling.apply_y(rows["y"], out=rows["y"])
            writer.add(rows["X"], rows.get("y"), rows.get("weight"))
            if stop in ends:
                writer.mark(ends[stop].label, number=ends[stop].number)
        return writer.commit(), scaling


def mask_digest(keep: Mask) -> str:
    """SHA-256 of which rows are kept."""
    return hashlib.sha256(np.packbits(keep).tobytes()).hexdigest()


def _kept(dataset: Dataset, test_mask: Mask | None) -> Mask:
    if test_mask is None:
        return np.ones(dataset.num_rows, dtype=bool)
    mask = np.asarray(test_mask)
    if mask.dtype != np.bool_ or mask.shape != (dataset.num_rows,):
        raise DataError(
            f"test_mask is {mask.dtype} of shape {mask.shape}; bool of shape ({dataset.num_rows},) expected",
            hint="give one value for each row",
        )
    if mask.all():
        raise DataError(f"test_mask leaves none of {dataset.num_rows} rows for training", hint="hold out fewer rows")
    return ~mask


def _cut(dataset: Dataset, ends: list[int]) -> Iterator[tuple[int, int]]:
    """Chunks of the data set, cut again where a generation ends."""
    for start, stop in dataset.X.blocks():
        inner = [n for n in ends if start < n < stop]
        yield from zip([start, *inner], [*inner, stop], strict=True)


def _training_scaling(dataset: Dataset, keep: Mask) -> Scaling:
    if keep.all():
        return Scaling.from_dataset(dataset)
    statistics: dict[str, tuple[Floats, Floats]] = {"y": (np.empty(0), np.empty(0))}
    for name, array in dataset.parts().items():
        if name == "weight":
            continue
        summary = RowSummary(array.num_columns, digests=False)
        for start, stop in array.blocks():
            summary.add(array.read(start, stop)[keep[start:stop]])
        moments = summary.moments()
        statistics[name] = (moments.mean, np.where(moments.std == 0, 1.0, moments.std))
    (x_mean, x_std), (y_mean, y_std) = statistics["X"], statistics["y"]
    return Scaling(x_mean=x_mean, x_std=x_std, y_mean=y_mean, y_std=y_std)


def _reuse(dest: Any, origin: dict[str, Any]) -> tuple[Dataset, Scaling | None]:
    existing = open_dataset(dest)
    found = existing.origin or {}
    resolved = found.get("resolved")
    if any(found.get(name) != value for name, value in origin.items()):
        differing = [name for name, value in origin.items() if found.get(name) != value]
        raise StoreMismatchError(
            f"{existing.path} exists and was prepared from other rows (differing: {', '.join(differing)})",
            hint="remove it, or choose another destination",
            fields=differing,
        )
    return existing, None if resolved is None else Scaling.from_dict(resolved)
