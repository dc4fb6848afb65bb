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

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from dkrr.dataset import Dataset, Floats, row_hash_fraction
from dkrr.dataset.rows import decode_floats
from dkrr.jobs.retrain.spec import DriftSpec

SAMPLE_ROWS = 20_000
NUM_QUANTILES = 101
# with fewer rows the spread of a column and its correlations say nothing
LEAST_ROWS = 8


class Finding(NamedTuple):
    """One statistic of one column that is beyond its limit, and a sentence that says so."""

    column: str
    statistic: str
    sentence: str


class Reference:
    """What new rows are compared with.

    Attributes
    ----------
    document
        All of it as plain data.
    names
        Of the features, then of the targets.
    mean, std : (d + t,)
        Of all rows; 1 stands for the standard deviation of a constant column.
    values, shares
        For each column some of its values, ascending from the least, and the share of rows that is not above each.
    correlation : (d, t)
    moving : (d + t,)
        p, the share of rows that have not the most common value of a column; 0 where it was constant.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.num_rows, self.num_features = int(document["num_rows"]), int(document["num_features"])
        self.names: list[str] = document["names"]
        self.mean, self.std = np.array(document["mean"]), np.array(document["std"])
        self.values, self.shares = ([np.array(column) for column in document[key]] for key in ("values", "shares"))
        self.correlation = np.array(document["correlation"]).reshape(self.num_features, -1)
        self.moving: Floats = np.array([1.0 - np.diff(column, prepend=0.0).max() for column in self.shares])

    @classmethod
    def of(cls, dataset: Dataset) -> Reference:
        """The statistics of a data set as it is now."""
        rows = _sample(dataset)
        values = [np.unique(np.quantile(column, np.linspace(0, 1, NUM_QUANTILES))) for column in rows.T]
        return cls(
            {
                "num_rows": dataset.num_rows,
                "names": [*dataset.feature_names, *dataset.target_names],
                "num_features": dataset.num_features,
                "mean": [*dataset.x_mean.tolist(), *dataset.y_mean.tolist()],
                "std": [*dataset.x_std.tolist(), *dataset.y_std.tolist()],
                "values": [column.tolist() for column in values],
                "shares": [_shares(column, at).tolist() for column, at in zip(rows.T, values, strict=True)],
                "correlation": _correlation(rows, dataset.num_features).tolist(),
            }
        )

    def finding(self, j: int | np.integer[Any], statistic: str, sentence: str) -> Finding:
        kind, name = "feature" if j < self.num_features else "target", self.names[int(j)]
        return Finding(name, statistic, f"{kind} {name}: {sentence}")

    def chance(self, num_rows: int) -> Floats:
        """Relative error of the count of rows that have not the most common value of a column, among m (d + t,)."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.sqrt((1 - self.moving) / (num_rows * self.moving)))

    def distance(self, column: Floats, j: int) -> float:
        """sup |F - F_ref| between some values and column j."""
        values = self.values[j]
        inside = np.abs(_shares(column, values) - self.shares[j])
        return float(max(np.max(inside), np.mean(column < values[0])))  # nothing was below the least value


def compare_rows(reference: Reference, dataset: Dataset, limits: DriftSpec) -> list[Finding]:
    """What is beyond its limit in the rows of a data set with the same columns; none means that they are alike."""
    m, d = dataset.num_rows, reference.num_features
    noise = 1.0 / np.sqrt(m)
    findings = _moments(reference, dataset, limits, noise, noise + reference.chance(m))
    rows = _sample(dataset)
    distances = [reference.distance(column, j) for j, column in enumerate(rows.T)]
    bar = limits.distance + 2 * noise
    for j in np.flatnonzero(np.array(distances) > bar):
        sentence = f"its distribution function differs by {distances[j]:.2f} from before ({bar:.2f} allowed)"
        others = [reference.distance(rows[:, j], i) for i in range(d)] if j < d else [np.inf]
        near = int(np.argmin(others))
        if near != j and others[near] < min(distances[j] / 2, 0.2):
            sentence += f"; its values look like those of {reference.names[near]}"
        findings.append(reference.finding(j, "distance", sentence))
    if m < LEAST_ROWS:
        return findings
    difference = np.abs(_correlation(rows, d) - reference.correlation)
    # where a column is constant, nothing is known of what it has to do with a target
    difference[((reference.moving == 0) | (np.ptp(rows, axis=0) == 0))[:d]] = 0.0
    bar = limits.correlation + 4 * noise
    return findings + [
        reference.finding(
            j,
            "correlation",
            f"its correlation with {reference.names[d + k]} differs by {difference[j, k]:.2f} from "
            f"{reference.correlation[j, k]:.2f} ({bar:.2f} allowed)",
        )
        for j, k in np.argwhere(difference > bar)
    ]


def compare_means(reference: Reference, dataset: Dataset, limits: DriftSpec) -> list[Finding]:
    """The same for means and standard deviations alone, which a data set knows without reading its rows.

    Of a column that was constant they tell the least share of rows that have another value now, by the inequality of
    Cauchy and Schwarz: delta^2 / (delta^2 + std^2), where delta is how far the mean has moved.
    """
    mean, std = _mean_and_std(dataset)
    square = np.square(mean - reference.mean)
    share = np.divide(square, square + np.square(std), out=np.zeros_like(square), where=square > 0)
    return _moments(reference, dataset, limits, 0.0, reference.chance(reference.num_rows)) + [
        reference.finding(
            j,
            "distance",
            f"it was constant, and has another value in at least {share[j]:.0%} of the rows "
            f"({limits.distance:.0%} allowed)",
        )
        for j in np.flatnonzero((reference.moving == 0) & (share > limits.distance))
    ]


def _moments(reference: Reference, dataset: Dataset, limits: DriftSpec, noise: float, chance: Floats) -> list[Finding]:
    mean, std = _mean_and_std(dataset)
    shift, most = np.abs(mean - reference.mean) / reference.std, limits.shift + 4 * chance
    findings = [
        reference.finding(
            j,
            "shift",
            f"its mean is {mean[j]:.6g}, {shift[j]:.3g} standard deviations from {reference.mean[j]:.6g} "
            f"({most[j]:.3g} allowed)",
        )
        for j in np.flatnonzero(~(shift <= most))
    ]
    if dataset.num_rows < LEAST_ROWS:
        return findings
    ratio, bar = std / reference.std, limits.scale * (1 + 4 * chance)
    may_stand_still = (std == 0) & (reference.moving <= limits.distance + 2 * noise)
    return findings + [
        reference.finding(
            j,
            "scale",
            f"its standard deviation is {std[j]:.6g}, {ratio[j]:.3g} times the {reference.std[j]:.6g} of before "
            f"({1 / bar[j]:.3g} to {bar[j]:.3g} allowed)",
        )
        for j in np.flatnonzero(~((ratio <= bar) & ((ratio >= 1 / bar) | may_stand_still)))
    ]


def _mean_and_std(dataset: Dataset) -> tuple[Floats, Floats]:
    """Means, and standard deviations as they are: 0 for a constant column (d + t,)."""
    stds = [decode_floats(dataset.records[name]["std"]) for name in ("X", "y") if name in dataset.records]
    return np.concatenate([dataset.x_mean, dataset.y_mean]), np.concatenate(stds)


def rows_of(dataset: Dataset, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Floats]]:
    """The rows from ``start`` to ``stop``, X and y side by side, in blocks: (first row, block)."""
    arrays = [array for array in (dataset.X, dataset.y) if array is not None]
    for first, last in dataset.X.blocks():
        low, high = max(first, start), min(last, dataset.num_rows if stop is None else stop)
        if low < high:
            yield low, np.column_stack([array.read(low, high) for array in arrays])


def _sample(dataset: Dataset) -> Floats:
    """About 20,000 rows of X and y side by side, the same ones each time."""
    share = min(1.0, SAMPLE_ROWS / dataset.num_rows)
    parts = [rows[row_hash_fraction(at, at + len(rows), share, seed=1)] for at, rows in rows_of(dataset)]
    return np.concatenate(parts)


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
