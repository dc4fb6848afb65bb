"""The rows that a fit uses: training rows only, whitened if wanted.

Whitening is x -> (x - mean) / std, column by column, with statistics of the training rows, or of an earlier fit that
these rows continue; they are stored and travel with the model.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import destination
from dkrr.dataset.dataset import Dataset, open_dataset
from dkrr.dataset.ingest import fields_of
from dkrr.dataset.rows import Floats, row_moments
from dkrr.dataset.writer import DatasetWriter
from dkrr.errors import DataError, StoreMismatchError

__all__ = ["Scaling", "mask_digest", "prepare_rows"]

Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False, kw_only=True)
class Scaling:
    """Means and standard deviations of features and targets.

    Parameters
    ----------
    x_mean, x_std : (d,)
    y_mean, y_std : (t,)
        Population standard deviations; 1 stands for a constant column. t is 0 where there are no targets.

    Raises
    ------
    DataError
        A value is not finite, or a standard deviation is not positive.
    """

    x_mean: Floats
    x_std: Floats
    y_mean: Floats
    y_std: Floats

    def __post_init__(self) -> None:
        for field in fields(self):
            values = np.array(getattr(self, field.name), dtype=np.float64)
            values.flags.writeable = False
            object.__setattr__(self, field.name, values)
            bad = ~np.isfinite(values) | (field.name.endswith("std") & ~(values > 0))
            if values.ndim != 1 or bad.any():
                where = f" at column {int(np.flatnonzero(bad)[0])}" if values.ndim == 1 else f" of shape {values.shape}"
                raise DataError(
                    f"{field.name} has an unusable value{where}; finite numbers, deviations above 0 expected",
                    hint="rescale that column: its values are too large to average",
                )
        for mean, std in ((self.x_mean, self.x_std), (self.y_mean, self.y_std)):
            if mean.shape != std.shape:
                raise DataError(f"{mean.size} means and {std.size} standard deviations", hint="give one of each")

    @classmethod
    def from_dataset(cls, dataset: Dataset) -> Scaling:
        """The statistics of all rows of a data set."""
        return cls(x_mean=dataset.x_mean, x_std=dataset.x_std, y_mean=dataset.y_mean, y_std=dataset.y_std)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Scaling:
        """The inverse of :meth:`to_dict`."""
        return cls(**{field.name: np.asarray(values[field.name], dtype=np.float64) for field in fields(cls)})

    def to_dict(self) -> dict[str, list[float]]:
        """Plain JSON; numbers survive the round trip exactly."""
        return {field.name: getattr(self, field.name).tolist() for field in fields(self)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scaling) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.x_mean.tobytes(), self.x_std.tobytes(), self.y_mean.tobytes(), self.y_std.tobytes()))

    def apply_x(self, X: Floats, out: Floats | None = None) -> Floats:
        """(X - x_mean) / x_std for X (m, d); ``out`` may be X."""
        if X.shape[1:] != self.x_mean.shape:
            raise DataError(f"X has shape {X.shape}; {self.x_mean.size} features expected", hint="check the features")
        return np.divide(np.subtract(X, self.x_mean, out=out), self.x_std, out=out)

    def apply_y(self, Y: Floats, out: Floats | None = None) -> Floats:
        """(Y - y_mean) / y_std for Y (m, t), or (m,) with one target; ``out`` may be Y."""
        mean, std = self._targets(Y)
        whitened: Floats = np.divide(np.subtract(Y, mean, out=out), std, out=out)
        return whitened

    def invert_y(self, P: Floats, out: Floats | None = None) -> Floats:
        """P y_std + y_mean: predictions (m, t), or (m,) with one target, in the units of y; ``out`` may be P."""
        mean, std = self._targets(P)
        original: Floats = np.add(np.multiply(P, std, out=out), mean, out=out)
        return original

    def _targets(self, values: Floats) -> tuple[Any, Any]:
        if values.ndim == 1:
            if self.y_mean.size != 1:
                raise DataError(f"1-D targets, {self.y_mean.size} columns expected", hint="pass (rows, targets)")
            return self.y_mean[0], self.y_std[0]
        if values.shape[1] != self.y_mean.size:
            raise DataError(f"{values.shape[1]} target columns, {self.y_mean.size} expected", hint="check the targets")
        return self.y_mean, self.y_std


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
    mask = np.zeros(dataset.num_rows, dtype=bool) if test_mask is None else np.asarray(test_mask)
    if mask.dtype != np.bool_ or mask.shape != (dataset.num_rows,):
        raise DataError(
            f"test_mask is {mask.dtype} of shape {mask.shape}; bool of shape ({dataset.num_rows},) expected",
            hint="give one value for each row",
        )
    if mask.all():
        raise DataError(f"test_mask leaves none of {dataset.num_rows} rows for training", hint="hold out fewer rows")
    origin: dict[str, Any] = {
        "digest": {name: record["digest"] for name, record in dataset.records.items()},
        "rows": mask_digest(~mask),
        "scaling": scaling.to_dict() if scaling is not None else "training rows" if standardize else None,
    }
    if destination.inspect(dest) == "complete":
        return _reuse(dest, origin)
    with destination.writing(dest, wait=True):
        if destination.inspect(dest) == "complete":
            return _reuse(dest, origin)
        dataset.verify()  # a damaged or exchanged chunk must not be copied under a digest of its own
        if scaling is None and standardize:
            scaling = Scaling.from_dataset(dataset) if not mask.any() else _training_scaling(dataset, mask)
        origin |= {
            "resolved": None if scaling is None else scaling.to_dict(),
            "num_rows": dataset.num_rows,
            "scaling_rows": dataset.num_rows if scaling_rows is None else scaling_rows,
        }
        num_rows = int(np.count_nonzero(~mask))
        with DatasetWriter(dest, **fields_of(dataset), num_rows=num_rows, origin=origin) as writer:
            for found in dataset.generations:
                for start, stop in dataset.X.blocks(first=found.start, end=found.n):
                    rows = {name: part[~mask[start:stop]] for name, part in dataset.read_parts(start, stop).items()}
                    if scaling is not None:
                        scaling.apply_x(rows["X"], out=rows["X"])
                    if scaling is not None and "y" in rows:
                        scaling.apply_y(rows["y"], out=rows["y"])
                    writer.add(**rows)
                writer.mark(found.label, number=found.number)
            return writer.commit(), scaling


def mask_digest(keep: Mask) -> str:
    """SHA-256 of which rows are kept."""
    return hashlib.sha256(np.packbits(keep).tobytes()).hexdigest()


def _training_scaling(dataset: Dataset, without: Mask) -> Scaling:
    found = {}
    for name, rows in dataset.parts().items():
        moments = row_moments(rows, without=without)
        found[name] = moments.mean, np.where(moments.std == 0, 1.0, moments.std)
    (x_mean, x_std), (y_mean, y_std) = found["X"], found.get("y", (np.empty(0), np.empty(0)))
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
