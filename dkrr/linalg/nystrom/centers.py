"""Which rows are the centres of a Nystrom regression, and which ones its preconditioner looks at.

Centres are rows with a positive weight: drawn without replacement, or chosen by randomly pivoted Cholesky from a random
part of the rows, which covers the kernel's range with fewer centres when it is far from uniform.

Cost
----
One pass over the weights, and one over the chunks that hold a row that was drawn. Pivoting: m kernel columns of the
candidates and 8 c (m + d) bytes for c candidates, in the driver.

References
----------
Chen, Epperly, Tropp and Webber, Randomly pivoted Cholesky, 2022, arXiv 2207.06503.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset, RowArray
from dkrr.errors import DataError, ParameterError
from dkrr.kernels import Kernel
from dkrr.linalg.lowrank.rpcholesky import pivot_rows
from dkrr.linalg.nystrom.precondition import sample_size
from dkrr.linalg.settings import NystromSettings

__all__ = ["ChosenRows", "choose_rows", "read_rows"]

FloatMatrix = NDArray[np.float64]
Indices = NDArray[np.int64]

CANDIDATE_BYTES = 1 << 30
# fewer candidates than this many times m leave pivoting nothing to choose
MIN_CANDIDATES = 2


@dataclass(frozen=True)
class ChosenRows:
    """Row numbers, ascending, and what a sampled row stands for.

    Parameters
    ----------
    centers : (m,) int
    sample : (s,) int
        Other rows with a positive weight, drawn uniformly.
    factor
        Rows with a positive weight that are no centres, for each one in the sample.
    """

    centers: Indices
    sample: Indices
    factor: float


def choose_rows(
    dataset: Dataset,
    kernel: Kernel,
    center: tuple[float, ...] | None,
    nystrom: NystromSettings,
    seed: int,
) -> ChosenRows:
    """Choose centres and sample; the same for the same rows, weights and seed, whatever the chunks.

    Raises
    ------
    ParameterError
        More centres than rows with a positive weight.
    DataError
        The kernel is zero on all rows that centres are chosen from.
    """
    n, m = dataset.num_rows, nystrom.num_centers
    used = np.arange(n)
    if dataset.weight is not None:
        used = np.flatnonzero(dataset.weight.read(0, n)[:, 0] > 0)
    if m > len(used):
        kind = "" if len(used) == n else " with a positive weight"
        raise ParameterError(
            f"{m:,} centres of {len(used):,} rows{kind}", hint=f"set num_centers to at most {len(used):,}"
        )
    random = np.random.default_rng([seed, 1])
    if nystrom.centers == "uniform":
        centers = np.sort(random.choice(used, m, replace=False))
    else:
        # as many as 1 GiB holds columns of, at least 2 m
        most = max(MIN_CANDIDATES * m, CANDIDATE_BYTES // (8 * (m + dataset.num_features)))
        count = min(len(used), most)
        candidates = np.sort(random.choice(used, count, replace=False))
        rows = read_rows(dataset.X, candidates, center)
        # fewer than m where the rows left over are in the span of those that were chosen
        centers = np.sort(candidates[pivot_rows(kernel, rows, m, seed, max_bytes=max(CANDIDATE_BYTES, 8 * m * count))])
        if not len(centers):
            raise DataError(f"{kernel.describe()} is zero on all {count:,} candidates", hint="use another kernel")
    others = np.setdiff1d(used, centers, assume_unique=True)
    size = sample_size(len(used), len(centers))
    sample = np.sort(np.random.default_rng([seed, 2]).choice(others, size, replace=False))
    return ChosenRows(centers, sample, len(others) / size if size else 0.0)


def read_rows(array: RowArray, numbers: Indices, center: tuple[float, ...] | None = None) -> FloatMatrix:
    """The rows (s, k) with these ascending numbers, centred if asked; only chunks that hold one are read."""
    result = np.empty((len(numbers), array.num_columns))
    for start, stop in array.blocks():
        first, last = np.searchsorted(numbers, (start, stop))
        if first < last:
            result[first:last] = array.read(start, stop)[numbers[first:last] - start]
    if center is not None:
        result -= np.asarray(center)
    return result
