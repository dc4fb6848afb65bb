"""A data set as it was before rows were appended: who began with those rows goes on with them.

Appends leave all rows where they are, so the first n rows of a data set that has grown are the data set of before. You
need it where a process opens the rows of a fit for the first time after others were appended. Nothing of them is
believed: digests and statistics are made anew and must be those of then.

Cost
----
One pass over the first n rows; memory for one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dkrr.dataset.dataset import Dataset, fields_of_parts
from dkrr.dataset.rows import RowArray, RowSummary

__all__ = ["before_appends"]


def before_appends(dataset: Dataset, digests: Mapping[str, str]) -> Dataset | None:
    """The data set of the first rows that have these digests, which may be all; None where it never had those.

    Parameters
    ----------
    digests
        Of all rows, by part: of ``"X"``, and of "y" and "weight" where they matter.
    """
    if all(digest == _digest(dataset, name) for name, digest in digests.items()):
        return dataset
    end = next((item.n for item in dataset.generations if item.digest == digests["X"]), None)
    if end is None or digests.keys() - dataset.parts().keys():
        return None
    arrays = {name: RowArray(array.array, end) for name, array in dataset.parts().items()}
    records = {name: _record(array) for name, array in arrays.items()}
    if any(records[name]["digest"] != digest for name, digest in digests.items()):
        return None
    return replace(
        dataset,
        num_rows=end,
        generations=tuple(item for item in dataset.generations if item.n <= end),
        **fields_of_parts(arrays, records),
    )


def _digest(dataset: Dataset, part: str) -> str | None:
    return dataset.records[part]["digest"] if part in dataset.records else None


def _record(array: RowArray) -> dict[str, Any]:
    summary = RowSummary(array.num_columns)
    for start, stop in array.blocks():
        summary.add(array.read(start, stop))
    return summary.to_dict()
