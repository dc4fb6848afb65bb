"""How far rows are from those a lineage began with, column by column.

The reference is taken once and frozen: means and standard deviations of all rows, the distribution function of each
column and the correlations of features with targets on a sample of about 20,000 rows. New rows are compared with it by
four statistics, each with a limit that is widened by what chance does to a batch of m rows:

    shift        |mean - mean_ref| / std_ref                      + 4 c
    scale        max(std / std_ref, std_ref / std)                * (1 + 4 c)
    distance     sup |F - F_ref|  (Kolmogorov-Smirnov)            + 2 / sqrt(m)
    correlation  |corr(x, y) - corr_ref(x, y)|                    + 4 / sqrt(m)

    c = 1 / sqrt(m) + sqrt((1 - p) / (m p)),   p = share of the frozen rows that have not the most common value

The second term of c is the relative error of a count of such rows. It is nothing for a column of numbers that are all
different, and much for a flag that is rare: a hundred rows have it once or not at all. Where p is 0, the column was
constant: it had no unit to measure by, so its distribution alone is compared, that is the share of rows with another
value. So it is where a column of new rows is constant, unless p is beyond the limit of the distance itself.

A column that was exchanged for another one differs in distribution, or, where all columns are alike, in what it has to
do with the target. Cost: one pass over the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dkrr.dataset import Dataset, Floats, row_hash_fraction
from dkrr.dataset.rows import decode_floats
from dkrr.jobs.retrain.spec import DriftSpec

__all__ = ["Finding", "Reference", "compare_means", "compare_rows"]

SAMPLE_ROWS = 20_000
NUM_QUANTILES = 101
# with fewer rows the spread of a column and its correlations say nothing
LEAST_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One statistic of one column that is beyond its limit."""

    column: str
    statistic: str
    value: float
    limit: float
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "column": self.column,
            "statistic": self.statistic,
            "value": self.value,
            "limit": self.limit,
            "sentence": self.sentence,
        }


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What new rows are compared with.

    Parameters
    ----------
    num_rows
        n.
    names
        Of the features, then of the targets.
    num_features
        d.
    mean, std : (d + t,)
        Of all rows; 1 stands for the standard deviation of a constant column.
    values, shares
        For each column some of its values, ascending from the least, and the share of rows that is not above each.
    correlation : (d, t)
    """

    num_rows: int
    names: tuple[str, ...]
    num_features: int
    mean: Floats
    std: Floats
    values: list[Floats]
    shares: list[Floats]
    correlation: Floats

    @classmethod
    def of(cls, dataset: Dataset) -> Reference:
        """The statistics of a data set as it is now."""
        rows = _sample(dataset)
        d = dataset.num_features
        values = [np.unique(np.quantile(column, np.linspace(0, 1, NUM_QUANTILES))) for column in rows.T]
        return cls(
            num_rows=dataset.num_rows,
            names=(*dataset.feature_names, *dataset.target_names),
            num_features=d,
            mean=np.concatenate([dataset.x_mean, dataset.y_mean]),
            std=np.concatenate([dataset.x_std, dataset.y_std]),
            values=values,
            shares=[_shares(column, at) for column, at in zip(rows.T, values, strict=True)],
            correlation=_correlation(rows, d),
        )

    @property
    def moving(self) -> Floats:
        """p (d + t,): the share of rows that have not the most common value of a column; 0 where it was constant."""
        return np.array([1.0 - np.diff(column, prepend=0.0).max() for column in self.shares])

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "num_rows": self.num_rows,
            "names": list(self.names),
            "num_features": self.num_features,
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
            "values": [column.tolist() for column in self.values],
            "shares": [column.tolist() for column in self.shares],
            "correlation": self.correlation.tolist(),
        }

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Reference:
        """The inverse of :meth:`to_dict`."""
        d, count = int(document["num_features"]), len(document["names"])
        return cls(
            num_rows=int(document["num_rows"]),
            names=tuple(document["names"]),
            num_features=d,
            mean=np.array(document["mean"], dtype=np.float64),
            std=np.array(document["std"], dtype=np.float64),
            values=[np.array(column, dtype=np.float64) for column in document["values"]],
            shares=[np.array(column, dtype=np.float64) for column in document["shares"]],
            correlation=np.array(document["correlation"], dtype=np.float64).reshape(d, count - d),
        )


def compare_rows(reference: Reference, dataset: Dataset, limits: DriftSpec) -> list[Finding]:
    """What is beyond its limit in the rows of a data set with the same columns; none means that they are alike."""
    m = dataset.num_rows
    noise = 1.0 / np.sqrt(m)
    stds = _stds(dataset) if m >= LEAST_ROWS else None
    findings = _moments(reference, _means(dataset), stds, limits, noise, noise + _chance(reference, m))
    rows = _sample(dataset)
    distances = [_distance(reference, rows[:, j], j) for j in range(rows.shape[1])]
    bar = limits.distance + 2 * noise
    for j in np.flatnonzero(np.array(distances) > bar):
        sentence = f"its distribution function differs by {distances[j]:.2f} from before ({bar:.2f} allowed)"
        findings.append(
            _finding(reference, j, "distance", distances[j], bar, sentence + _looks_like(reference, rows, int(j)))
        )
    if m >= LEAST_ROWS:
        findings.extend(_correlations(reference, rows, limits.correlation + 4 * noise))
    return findings


def compare_means(reference: Reference, dataset: Dataset, limits: DriftSpec) -> list[Finding]:
    """The same for means and standard deviations alone, which a data set knows without reading its rows.

    Of a column that was constant they tell the least share of rows that have another value now, by the inequality of
    Cauchy and Schwarz: delta^2 / (delta^2 + std^2), where delta is how far the mean has moved.
    """
    mean, std = _means(dataset), _stds(dataset)
    findings = _moments(reference, mean, std, limits, 0.0, _chance(reference, reference.num_rows))
    square = np.square(mean - reference.mean)
    share = np.divide(square, square + np.square(std), out=np.zeros_like(square), where=square > 0)
    for j in np.flatnonzero((reference.moving == 0) & (share > limits.distance)):
        sentence = f"it was constant, and has another value in at least {share[j]:.0%} of the rows"
        sentence += f" ({limits.distance:.0%} allowed)"
        findings.append(_finding(reference, j, "distance", share[j], limits.distance, sentence))
    return findings


def _chance(reference: Reference, num_rows: int) -> Floats:
    """Relative error of the count of rows that have not the most common value of a column, among m (d + t,)."""
    p = reference.moving
    with np.errstate(divide="ignore"):
        return np.asarray(np.sqrt((1 - p) / (num_rows * p)))


def _moments(
    reference: Reference, mean: Floats, std: Floats | None, limits: DriftSpec, noise: float, chance: Floats
) -> list[Finding]:
    findings = []
    shift = np.abs(mean - reference.mean) / reference.std
    bar = limits.shift + 4 * chance
    for j in np.flatnonzero(~(shift <= bar)):
        sentence = (
            f"its mean is {mean[j]:.6g}, {shift[j]:.3g} standard deviations from {reference.mean[j]:.6g} "
            f"({bar[j]:.3g} allowed)"
        )
        findings.append(_finding(reference, j, "shift", shift[j], bar[j], sentence))
    if std is None:
        return findings
    ratio = std / reference.std
    bar = limits.scale * (1 + 4 * chance)
    may_stand_still = (std == 0) & (reference.moving <= limits.distance + 2 * noise)
    for j in np.flatnonzero(~((ratio <= bar) & ((ratio >= 1 / bar) | may_stand_still))):
        sentence = (
            f"its standard deviation is {std[j]:.6g}, {ratio[j]:.3g} times the {reference.std[j]:.6g} of before "
            f"({1 / bar[j]:.3g} to {bar[j]:.3g} allowed)"
        )
        findings.append(_finding(reference, j, "scale", max(ratio[j], 1 / max(ratio[j], 1e-300)), bar[j], sentence))
    return findings


def _correlations(reference: Reference, rows: Floats, bar: float) -> list[Finding]:
    difference = np.abs(_correlation(rows, reference.num_features) - reference.correlation)
    findings = []
    # where a column is constant, nothing is known of what it has to do with a target
    is_constant = (reference.moving == 0) | (np.ptp(rows, axis=0) == 0)
    difference[is_constant[: reference.num_features]] = 0.0
    for j, k in np.argwhere(difference > bar):
        target = reference.names[reference.num_features + k]
        before = reference.correlation[j, k]
        sentence = (
            f"its correlation with {target} differs by {difference[j, k]:.2f} from {before:.2f} ({bar:.2f} allowed)"
        )
        findings.append(_finding(reference, int(j), "correlation", difference[j, k], bar, sentence))
    return findings


def _looks_like(reference: Reference, rows: Floats, j: int) -> str:
    """Which other feature the values of column j look like, if they look like one."""
    d = reference.num_features
    if j >= d:
        return ""
    distances = [_distance(reference, rows[:, j], i) for i in range(d)]
    i = int(np.argmin(distances))
    near = i != j and distances[i] < distances[j] / 2 and distances[i] < 0.2
    return f"; its values look like those of {reference.names[i]}" if near else ""


def _finding(
    reference: Reference, j: int | np.integer[Any], statistic: str, value: float, limit: float, sentence: str
) -> Finding:
    name = reference.names[int(j)]
    kind = "feature" if j < reference.num_features else "target"
    return Finding(
        column=name, statistic=statistic, value=float(value), limit=float(limit), sentence=f"{kind} {name}: {sentence}"
    )


def _means(dataset: Dataset) -> Floats:
    return np.concatenate([dataset.x_mean, dataset.y_mean])


def _stds(dataset: Dataset) -> Floats:
    """Standard deviations as they are: 0 for a constant column."""
    return np.concatenate(
        [decode_floats(dataset.records[name]["std"]) for name in ("X", "y") if name in dataset.records]
    )


def _sample(dataset: Dataset) -> Floats:
    """About 20,000 rows of X and y side by side, the same ones each time."""
    share = min(1.0, SAMPLE_ROWS / dataset.num_rows)
    parts = []
    for start, stop in dataset.X.blocks():
        chosen = row_hash_fraction(start, stop, share, seed=1)
        columns = [dataset.X.read(start, stop)[chosen]]
        if dataset.y is not None:
            columns.append(dataset.y.read(start, stop)[chosen])
        parts.append(np.hstack(columns))
    return np.concatenate(parts)


def _distance(reference: Reference, column: Floats, j: int) -> float:
    """sup |F - F_ref| between some values and column j of the reference."""
    values = reference.values[j]
    inside = np.abs(_shares(column, values) - reference.shares[j])
    return float(max(np.max(inside), np.mean(column < values[0])))  # nothing was below the least value


def _shares(column: Floats, at: Floats) -> Floats:
    """The share of a column that is not above each of the values."""
    return np.searchsorted(np.sort(column), at, side="right") / len(column)


def _correlation(rows: Floats, num_features: int) -> Floats:
    """Correlation (d, t) of features with targets; 0 where a column is constant."""
    centred = rows - rows.mean(axis=0)
    norms = np.sqrt(np.square(centred).sum(axis=0))
    norms[norms == 0] = np.inf
    scaled: Floats = centred / norms
    return scaled[:, :num_features].T @ scaled[:, num_features:]
