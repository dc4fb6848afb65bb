"""Predictions with standard deviations and intervals, or as probabilities: the columns that ``dkrr predict`` writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dkrr.dataset import Dataset, RowArray
from dkrr.engine.tasks import Executor, Progress
from dkrr.errors import ParameterError
from dkrr.linalg.inference.leave_one_out import IntervalMethod, check_coverage, check_method
from dkrr.linalg.losses.loss import log_probabilities
from dkrr.models.model import BLOCK_ROWS, Model
from dkrr.models.prediction import predict_variance
from dkrr.models.uncertainty import half_widths, interval, standard_deviation

__all__ = ["Asked", "probability_table", "uncertain_columns", "uncertain_table"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What shall stand beside predictions.

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

    Raises
    ------
    ParameterError
        The coverage is not between 0 and 1, or the method is unknown.
    """

    std: bool = False
    noise: bool = False
    interval: float | None = None
    method: IntervalMethod = "jackknife"
    probabilities: bool = False

    def __post_init__(self) -> None:
        check_method(self.method)
        if self.interval is not None:
            check_coverage(self.interval)

    @property
    def needs_variance(self) -> bool:
        return self.std or (self.interval is not None and self.method != "jackknife")

    def check(self, model: Model) -> None:
        """Refuse what this model cannot say, before anything is predicted.

        Raises
        ------
        ParameterError, StoreError
            No factor, no leave-one-out quantiles for this coverage, or no probabilities.
        """
        if self.probabilities and (model.provenance.get("loss") != "logistic" or model.classes is None):
            raise ParameterError(
                "this model has no probabilities, which are those of a logistic loss of classes",
                hint="fit a job with [model] loss = 'logistic'",
            )
        if self.needs_variance:
            _ = model.spread
        if self.interval is not None:
            half_widths(model, self.interval, self.method, np.ones((1, model.num_targets)))


def uncertain_columns(names: list[str], asked: Asked) -> list[str]:
    """Names of the columns: the targets, then each with _std, with _lower, and with _upper."""
    endings = ["", *(["_std"] if asked.std else []), *(["_lower", "_upper"] if asked.interval is not None else [])]
    return [name + ending for ending in endings for name in names]


def probability_table(predictions: RowArray, store: Any) -> RowArray:
    """Decision values (m, k) as probabilities, an array in ``store``."""
    table = RowArray.create(
        store,
        "probabilities",
        num_rows=predictions.num_rows,
        num_columns=predictions.num_columns,
        rows_per_chunk=predictions.rows_per_chunk,
    )
    for number, (start, stop) in enumerate(table.blocks()):
        table.write_chunk(number, np.exp(log_probabilities(predictions.read(start, stop))))
    return table


def uncertain_table(
    model: Model,
    dataset: Dataset,
    predictions: RowArray,
    asked: Asked,
    store: Any,
    executor: Executor,
    progress: Progress | None = None,
) -> RowArray:
    """Predictions (m, t) and what was asked for beside them, as an array ``table`` in ``store``.

    Cost
    ----
    That of :func:`~dkrr.models.prediction.predict_variance` where a standard deviation is needed.
    """
    variances = None
    if asked.needs_variance:
        variances, _ = predict_variance(model, dataset, store, executor, progress)
    num_columns = len(uncertain_columns(["y"] * model.num_targets, asked))
    table = RowArray.create(
        store,
        f"table-{num_columns}",
        num_rows=predictions.num_rows,
        num_columns=num_columns,
        rows_per_chunk=min(BLOCK_ROWS, predictions.num_rows),
    )
    for number, (start, stop) in enumerate(table.blocks()):
        values = predictions.read(start, stop)
        variance = None if variances is None else variances.read(start, stop)
        flat = values[:, 0] if model.y_is_1d else values
        parts = [values]
        if asked.std and variance is not None:
            parts.append(standard_deviation(model, variance, noise=asked.noise))
        if asked.interval is not None:
            parts.extend(interval(model, flat, asked.interval, asked.method, variance))
        table.write_chunk(number, np.hstack([part.reshape(len(values), -1) for part in parts]))
    return table
