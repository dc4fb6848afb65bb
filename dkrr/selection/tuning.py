"""Choosing kernel, widths and alpha on subsets of the rows, then checking and refining the choice on more of them.

    1  search      every family with one shared width, then with one width for each feature, on a small subset:
                   the marginal likelihood is maximised from two starts each
    2  search      the best of them (by leave-one-out error), continued on a larger subset
    3  slice       the best with a shared width and the best with one for each feature: the leave-one-out error over
                   (factor on the widths) x alpha, one eigendecomposition a factor
    4  check       the finalists on the most rows that the time allows, alpha refined; of those whose error is as good
                   as the smallest, the best conditioned is chosen (:mod:`dkrr.selection.choice`)

With another loss than the square its widths are those of the square to begin with: slices and check are then what a fit
of it loses on held-out rows, by folds and over C (:class:`~dkrr.selection.choice.FoldLoss`), and the smallest C that is
as good as the best is chosen.

The subsets are nested. Leave-one-out errors are in units of the targets' standard deviations. Several targets share
kernel and alpha.

The choice is a function of the rows, the settings and the seed, down to the bits on one kind of CPU, as long as the
budget cuts nothing off. Where it does, a note says so.

Cost: see :func:`~dkrr.selection.trials.trial_flops`; with 1,000, 2,000 and 8,000 rows about 3e12 flops.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from dkrr.engine.cluster import memory_limit_of
from dkrr.engine.tasks import Executor, Progress
from dkrr.errors import DataError
from dkrr.linalg.sizes import BASELINE_BYTES
from dkrr.resources import find_dataset, find_executor, rows_on_disk
from dkrr.selection.budget import Budget
from dkrr.selection.choice import TuneResult, TuneSettings
from dkrr.selection.stages import Tuner
from dkrr.selection.subset import Subset, draw_subset
from dkrr.stores import full_disk, place
from dkrr.temporary import TemporaryStore

__all__ = ["tune"]

# a cluster takes longer to start than a search on so few rows
IN_PROCESS_ROWS = 500


def tune(
    X: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    settings: TuneSettings | None = None,
    store: str | None = None,
    executor: Executor | None = None,
    fit_intercept: bool = False,
    progress: Progress | None = None,
) -> TuneResult:
    """Choose kernel, widths and alpha for rows.

    Parameters
    ----------
    X, y, sample_weight
        All that :meth:`dkrr.KernelRidge.fit` takes. Whiten the features first (``[data] standardize`` does), or one
        width for all of them means little.
    settings
        What is searched; :class:`~dkrr.selection.choice.TuneSettings` by default.
    store
        Root below which the subset and a document for each trial are kept, under ``tune``; a search that was
        interrupted continues with them. None: a temporary folder.
    executor
        Who runs the trials, as many at once as it has threads, each with one BLAS thread. None: this process for few
        rows, else the caller's Dask client or a local cluster.
    fit_intercept
        Whether the fit will have an intercept.

    Returns
    -------
    TuneResult
        ``dkrr.KernelRidge(**result.parameters())`` is the estimator.

    Raises
    ------
    DataError
        No targets, fewer than two rows of positive weight, or targets that are all constant.
    """
    settings = settings or TuneSettings()
    most = max(settings.rows, *settings.search_rows)
    with ExitStack() as stack:
        if store is None:
            store = stack.enter_context(closing(TemporaryStore())).path
        stack.enter_context(full_disk(store))
        dataset = stack.enter_context(rows_on_disk(find_dataset(X), y, sample_weight, store))
        if executor is None:
            executor = stack.enter_context(find_executor(min(most, dataset.num_rows), IN_PROCESS_ROWS))
        parts = [dataset.digest, dataset.digest_y, dataset.digest_weight, settings.seed, fit_intercept]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]
        subset = draw_subset(dataset, most, settings.seed, place(store, "tune", f"{digest}.zarr", f"rows-{most}"))
        _require_variation(subset, min(settings.search_rows), dataset.target_names)
        limit = memory_limit_of(executor)
        budget = Budget(
            total_seconds=settings.budget_seconds,
            num_threads=executor.num_threads,
            memory_bytes=None if limit is None else max(0, limit - BASELINE_BYTES),
        )
        tuner = Tuner(
            subset=subset,
            digest=digest,
            settings=settings,
            intercept=fit_intercept,
            executor=executor,
            folder=place(store, "tune", f"{digest}.zarr", "trials"),
            num_rows=dataset.num_rows,
            budget=budget,
            progress=progress,
        )
        return tuner.run()


def _require_variation(subset: Subset, num_rows: int, names: Sequence[str]) -> None:
    """A likelihood has no best width where every target is constant; one among others that vary does no harm."""
    rows = subset.read(min(num_rows, subset.num_rows), intercept=False)
    if np.ptp(rows.y, axis=0).any():
        return
    shown = ", ".join(repr(name) for name in names[:4]) + (", ..." if len(names) > 4 else "")
    raise DataError(
        f"target{'s' * (len(names) > 1)} {shown} {'are' if len(names) > 1 else 'is'} the same in all {len(rows.y):,} "
        "rows that the search begins with: no width predicts it better than another",
        hint="name another target, or let the search begin with more rows ([tune] search_rows)",
    )
