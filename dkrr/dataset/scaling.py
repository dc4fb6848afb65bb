"""Whitening: x -> (x - mean) / std, column by column, with statistics that are stored and travel with the model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from dkrr.dataset.rows import Floats
from dkrr.errors import DataError

if TYPE_CHECKING:
    from dkrr.dataset.dataset import Dataset

__all__ = ["Scaling"]


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
