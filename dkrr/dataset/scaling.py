"""The rows that a fit uses: which are held out, whitening if wanted, and how far later rows have drifted.

Whitening is x -> (x - mean) / std, column by column, with statistics of the training rows, or of an earlier fit that
these rows continue; they are stored and travel with the model.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset.dataset import Dataset, Mask, fields_of
from dkrr.dataset.rows import Floats, Moments, RowSummary
from dkrr.dataset.sources import open_table
from dkrr.dataset.table import Header, column_number, is_place
from dkrr.dataset.writer import claimed, writing
from dkrr.errors import DataError, ParameterError, StoreMismatchError


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
            bad = np.flatnonzero(~np.isfinite(values) | (field.name.endswith("std") & ~(values > 0)))
            if bad.size:
                raise DataError(
                    f"{field.name} has an unusable value at column {bad[0]}; finite numbers, "
                    "deviations above 0 expected",
                    hint="rescale that column: its values are too large to average",
                )

    @classmethod
    def of(cls, x: Moments, y: Moments) -> Scaling:
        """The statistics of features and targets."""
        (x_std, y_std) = (np.where(found.std == 0, 1.0, found.std) for found in (x, y))
        return cls(x_mean=x.mean, x_std=x_std, y_mean=y.mean, y_std=y_std)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Scaling:
        """The inverse of :meth:`to_dict`."""
        return cls(**{field.name: np.asarray(values[field.name], dtype=np.float64) for field in fields(cls)})

    def to_dict(self) -> dict[str, list[float]]:
        """Plain JSON; numbers survive the round trip exactly."""
        return {field.name: getattr(self, field.name).tolist() for field in fields(self)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scaling) and self.to_dict() == other.to_dict()

    def apply_x(self, X: Floats) -> Floats:
        """(X - x_mean) / x_std for X (m, d)."""
        return _changed(X, self.x_mean, self.x_std, "features")

    def apply_y(self, Y: Floats) -> Floats:
        """(Y - y_mean) / y_std for Y (m, t), or (m,) with one target."""
        return _changed(Y, self.y_mean, self.y_std, "targets")

    def invert_y(self, P: Floats) -> Floats:
        """P y_std + y_mean: predictions (m, t), or (m,) with one target, in the units of y."""
        return _changed(P, self.y_mean, self.y_std, "targets", is_back=True)


def _changed(values: Floats, mean: Floats, std: Floats, noun: str, *, is_back: bool = False) -> Floats:
    if values.shape[1:] != mean.shape and (values.ndim, mean.size) != (1, 1):
        raise DataError(f"shape {values.shape}; {mean.size} {noun} expected", hint="pass (rows, columns)")
    return np.asarray(values * std + mean if is_back else (values - mean) / std)


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
    with claimed(dest, wait=True) as existing:
        if existing is not None:
            made_of = existing.origin or {}
            differing = [name for name, value in origin.items() if made_of.get(name) != value]
            if differing:
                raise StoreMismatchError(
                    f"{existing.path} exists and was prepared from other rows (differing: {', '.join(differing)})",
                    hint="remove it, or choose another destination",
                    fields=differing,
                )
            return existing, None if made_of["resolved"] is None else Scaling.from_dict(made_of["resolved"])
        dataset.verify()  # a damaged or exchanged chunk must not be copied under a digest of its own
        if scaling is None and standardize:
            parts = dataset.X, dataset.targets
            scaling = Scaling.of(*(RowSummary.of(part, without=mask).moments() for part in parts))
        origin |= {
            "resolved": None if scaling is None else scaling.to_dict(),
            "num_rows": dataset.num_rows,
            "scaling_rows": dataset.num_rows if scaling_rows is None else scaling_rows,
        }
        num_rows = int(np.count_nonzero(~mask))
        with writing(dest, **fields_of(dataset), num_rows=num_rows, origin=origin) as writer:
            for found in dataset.generations:
                for start, stop in dataset.X.blocks(first=found.start, end=found.n):
                    rows = {name: part[~mask[start:stop]] for name, part in dataset.read_parts(start, stop).items()}
                    if scaling is not None:
                        rows |= {"X": scaling.apply_x(rows["X"])}
                        rows |= {"y": scaling.apply_y(rows["y"])} if "y" in rows else {}
                    writer.add(**rows)
                writer.mark(found.label, number=found.number)
            return writer.commit(), scaling


def mask_digest(keep: Mask) -> str:
    """SHA-256 of which rows are kept."""
    return hashlib.sha256(np.packbits(keep).tobytes()).hexdigest()


# --- rows that are held out -------------------------------------------------------------------------------------------

_VALUES = {"1": True, "true": True, "0": False, "false": False, "1.0": True, "0.0": False}


def row_hash_fraction(start: int, stop: int, fraction: float, seed: int = 0) -> Mask:
    """Rows of ``start`` to ``stop`` that belong to a random ``fraction``; a row's answer depends on its number only.

    Row i is chosen when h(i) / 2^64 < fraction, where h is the SplitMix64 output function at
    state ``seed' + (i + 1) * 0x9E3779B97F4A7C15`` and seed' that of ``seed``. Rows keep their answer when others are
    appended, and larger fractions contain smaller ones.

    Returns
    -------
    mask : (stop - start,) bool

    References
    ----------
    Steele, Lea, Flood (2014), "Fast splittable pseudorandom number generators", OOPSLA.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ParameterError(f"fraction is {fraction!r}; 0 to 1 expected", hint="use 0.1 for a tenth")
    gamma = np.uint64(0x9E3779B97F4A7C15)
    seeded = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + gamma)
    hashed = _mix(seeded + np.arange(start + 1, stop + 1, dtype=np.uint64) * gamma)
    # the upper 53 bits are exact in a float64
    return np.asarray((hashed >> np.uint64(11)) * 2.0**-53 < fraction)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def read_mask(
    source: str | os.PathLike[str],
    num_rows: int,
    *,
    column: str | int | None = None,
    header: Header = "auto",
    delimiter: str | None = None,
    decimal: str = ".",
) -> Mask:
    """Read a mask of rows from a column of any file that can be ingested.

    Parameters
    ----------
    source
        The file; values are 0, 1, true and false.
    num_rows
        Number of rows expected.
    column
        Name or number of the column; None means the first.
    header
        Of a text file; "auto" takes a first line whose value is no 0, 1, true or false for names.
    delimiter, decimal
        Of a text file, as in :func:`~dkrr.dataset.ingest`.

    Returns
    -------
    mask : (num_rows,) bool

    Raises
    ------
    DataError
        Another number of rows, or a value that is neither true nor false, with its line.
    StoreError
        The file cannot be read.
    """
    has_names = not is_place(0 if column is None else column, []) if header == "auto" else header
    text: dict[str, Any] = {"header": has_names, "delimiter": delimiter, "decimal": decimal}
    table = open_table(source, **text, allow_1d=True)
    j = column_number(table, 0 if column is None else column, "column")
    texts = (str(label).strip().lower() for _, labels in table.blocks([], j) for label in labels or ())
    values = [_VALUES.get(text, text) for text in texts]
    is_name = header == "auto" and table.num_rows is None and not has_names and isinstance(values[0], str)
    for number, value in enumerate(values):
        if isinstance(value, str) and not (is_name and number == 0):
            where = table.locate(number) or f"row {number}"
            raise DataError(
                f"mask {source}, {where}, column {j}: {value!r}; 0, 1, true or false expected",
                hint="correct the file, or choose another column",
                row=number,
                column=j,
            )
    mask = np.array(values[is_name:], dtype=bool)
    if table.dropped is not None:
        mask, kept = np.zeros(len(table.dropped), dtype=bool), mask
        mask[~table.dropped] = kept
    if len(mask) != num_rows:
        raise DataError(
            f"mask {source} has {len(mask)} rows; {num_rows} expected",
            hint="a mask needs one value for each row, those dropped for missing values included",
        )
    return mask


# --- drift ------------------------------------------------------------------------------------------------------------

# before everything is fitted anew: a mean may move by one standard deviation
DRIFT_LIMIT = 1.0

# of fewer rows a mean and a spread say little
MIN_ROWS = 30
NOISE = 3.0


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How far rows that came later lie from the rows whose statistics they are whitened with, in the worst column.

        drift_j = max(|mean_j(new) - mean_j| / std_j - 3 / sqrt(m), log(std_j(new) / std_j))

    for column j and m new rows: a mean that moved by one standard deviation, beyond three times the noise of a mean of
    m rows, counts as 1, and so does a spread that is e times as large. A spread that shrank is no harm. Whitening rests
    on statistics that no longer describe the rows when this is large: kernels then see columns at the wrong scale, and
    a fit should be made anew with statistics of all rows.

    Parameters
    ----------
    value
        0 where there are too few new rows to tell.
    column
        Name of the column, "" where there is none.
    num_rows
        m.
    """

    value: float = 0.0
    column: str = ""
    num_rows: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"value": self.value, "column": self.column, "rows": self.num_rows}

    def words(self) -> str:
        """How far, and how far it may be."""
        if 0 < self.num_rows < MIN_ROWS:
            return f"{self.num_rows:,} newer rows are too few to say how far they drift"
        of_column = f"{self.column}; " if self.column else ""
        return f"{self.num_rows:,} newer rows drift by {self.value:.2g} ({of_column}limit {DRIFT_LIMIT:g})"


def measure_drift(scaling: Scaling, x: Moments, y: Moments | None, names: tuple[str, ...]) -> Drift:
    """The drift of new rows.

    Parameters
    ----------
    scaling
        The statistics that they are whitened with.
    x, y
        Moments of their features and targets, before whitening.
    names
        Of all features, then of all targets.
    """
    if x.count < MIN_ROWS:
        return Drift(num_rows=x.count)
    found = []
    for mean, std, new in ((scaling.x_mean, scaling.x_std, x), (scaling.y_mean, scaling.y_std, y)):
        if new is not None and mean.size:
            with np.errstate(divide="ignore", over="ignore"):
                moved = np.abs(new.mean - mean) / std - NOISE / np.sqrt(new.count)
                found.append(np.maximum(moved, np.log(new.std / std)))
    # what overflowed has drifted as far as anything can
    values = np.nan_to_num(np.concatenate(found), nan=np.inf, posinf=np.inf, neginf=0.0)
    worst = int(np.argmax(values))
    return Drift(value=max(0.0, float(values[worst])), column=names[worst], num_rows=x.count)
