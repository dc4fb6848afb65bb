"""How far rows are from those a lineage began with, column by column.

The reference is taken once and frozen: means and standard deviations of all rows, the distribution function of each
column and the correlations of features with targets on a sample of about 20,000 rows. New rows are compared with it by
four statistics, each with a limit that is widened by what chance does to a batch of m rows:

    shift        |mean - mean_ref| / std_ref                      + 4 / sqrt(m)
    scale        max(std / std_ref, std_ref / std)                * (1 + 4 / sqrt(m))
    distance     sup |F - F_ref|  (Kolmogorov-Smirnov)            + 2 / sqrt(m)
    correlation  |corr(x, y) - corr_ref(x, y)|                    + 4 / sqrt(m)

A column that was exchanged for another one differs in distribution, or, where all columns are alike, in what it has to
do with the target. Cost: one pass over the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dkrr.dataset import Dataset, Floats, row_hash_fraction
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
        For each column some of its values, ascending, and the share of rows that is not above each.
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
    findings = _moments(reference, _means(dataset), _stds(dataset) if m >= LEAST_ROWS else None, limits, noise)
    rows = _sample(dataset)
    distances = [
        float(np.max(np.abs(_shares(column, at) - share)))
        for column, at, share in zip(rows.T, reference.values, reference.shares, strict=True)
    ]
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
    """The same for means and standard deviations alone, which a data set knows without reading its rows."""
    return _moments(reference, _means(dataset), _stds(dataset), limits, 0.0)


def _moments(reference: Reference, mean: Floats, std: Floats | None, limits: DriftSpec, noise: float) -> list[Finding]:
    findings = []
    shift = np.abs(mean - reference.mean) / reference.std
    bar = limits.shift + 4 * noise
    for j in np.flatnonzero(~(shift <= bar)):
        sentence = (
            f"its mean is {mean[j]:.6g}, {shift[j]:.3g} standard deviations from {reference.mean[j]:.6g} "
            f"({bar:.3g} allowed)"
        )
        findings.append(_finding(reference, j, "shift", shift[j], bar, sentence))
    if std is None:
        return findings
    ratio = std / reference.std
    bar = limits.scale * (1 + 4 * noise)
    for j in np.flatnonzero(~((ratio <= bar) & (ratio >= 1 / bar))):
        sentence = (
            f"its standard deviation is {std[j]:.6g}, {ratio[j]:.3g} times the {reference.std[j]:.6g} of before "
            f"({1 / bar:.3g} to {bar:.3g} allowed)"
        )
        findings.append(_finding(reference, j, "scale", max(ratio[j], 1 / max(ratio[j], 1e-300)), bar, sentence))
    return findings


def _correlations(reference: Reference, rows: Floats, bar: float) -> list[Finding]:
    difference = np.abs(_correlation(rows, reference.num_features) - reference.correlation)
    findings = []
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
    distances = [
        float(np.max(np.abs(_shares(rows[:, j], reference.values[i]) - reference.shares[i]))) for i in range(d)
    ]
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
    return np.concatenate([dataset.x_std, dataset.y_std])


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
