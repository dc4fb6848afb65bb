"""Figures of a run that only its report needs, in ``figures.json``: data, machine, work, iterations, held-out rows.

They are written while the run goes on, so that a run that fails has those it came to. All of them are bounded, whatever
the number of rows, targets, workers and iterations; 150 kB at most. Nothing that runs depends on them: where they
cannot be written, the log says so and the run goes on.

Cost: the targets are read twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from dkrr.dataset import Dataset, Scaling
from dkrr.dataset.generations import Generation
from dkrr.engine.tasks import RunSummary
from dkrr.errors import LockedError
from dkrr.jobs.prepare import Prepared
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.linalg.workspace import Workspace
from dkrr.store.documents import plain

__all__ = ["NAME", "SAMPLE_ROWS", "Figures", "data_facts", "held_out_facts", "work_facts"]

logger = logging.getLogger("dkrr.jobs.figures")

NAME = "figures.json"
SAMPLE_ROWS = 2000
MOST_NAMES = 60
MOST_HISTOGRAMS = 4
MOST_GENERATIONS = 8
NUM_BINS = 30


class Figures:
    """The document of one attempt; each part replaces that of an earlier attempt.

    Parameters
    ----------
    directory
        The run.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self._document: dict[str, Any] = {}

    def note(self, make: Callable[[], dict[str, Any]]) -> None:
        """Add the parts that ``make()`` returns to the document, and write it; only a lost lease ends the run here."""
        try:
            self._document |= plain(make())
            self.directory.write(NAME, self._document)
        except LockedError:
            raise
        except Exception as exc:
            logger.warning("figures for the report of %s are missing (%s)", self.directory.name, exc)


def work_facts(workspace: Workspace) -> dict[str, Any]:
    """What every phase did, and how the residuals fell."""
    phases = {
        name: {
            "seconds": run.seconds,
            "num_tasks": run.num_tasks,
            "num_computed": run.num_computed,
            "flops": run.flops_computed,
            "busy_seconds": run.busy_seconds,
            "peak_rss_bytes": max(run.peak_rss_bytes.values(), default=0),
        }
        for name, run in workspace.phases.items()
    }
    return {"phases": phases, "convergence": [trace.to_dict() for trace in workspace.traces if trace.iterations]}


def data_facts(prepared: Prepared) -> dict[str, Any]:
    """Rows, names, statistics, and a histogram of the first four targets, all in the units of the data."""
    train, test, scaling = prepared.train, prepared.test, prepared.scaling
    mean = train.x_mean if scaling is None else scaling.x_mean
    std = train.x_std if scaling is None else scaling.x_std
    names = [str(name) for name in train.feature_names[:MOST_NAMES]]
    return {
        "num_rows": train.num_rows,
        "num_test_rows": 0 if test is None else test.num_rows,
        "num_features": train.num_features,
        "num_targets": train.num_targets,
        "standardized": scaling is not None,
        "weight": train.weight_name,
        "generations": [_generation_words(item) for item in train.generations[-MOST_GENERATIONS:]],
        "digest": train.digest,
        "features": [{"name": name, "mean": mean[k], "std": std[k]} for k, name in enumerate(names) if k < len(mean)],
        "target_names": [str(name) for name in train.target_names[:MOST_NAMES]],
        "classes": None if train.classes is None else [str(label) for label in train.classes[:MOST_NAMES]],
        **_target_facts(train, scaling),
    }


def _generation_words(generation: Generation) -> str:
    label = f" ({str(generation.label)[:40]})" if generation.label else ""
    return f"{generation.n:,}{label}"


def _target_facts(train: Dataset, scaling: Scaling | None) -> dict[str, Any]:
    """Counts of classes, or histograms with 30 equal bins between the smallest and the largest target."""
    if train.y is None:
        return {"targets": [], "class_counts": None}
    names = train.target_names

    def blocks(count: int) -> Any:
        assert train.y is not None  # noqa: S101  (narrows the type)
        for start, stop in train.y.blocks():
            values = train.y.read(start, stop)
            yield (values if scaling is None else scaling.invert_y(values))[:, :count]

    if train.classes is not None:
        t = min(train.num_targets, MOST_NAMES)
        counts = np.zeros(train.num_targets)
        for values in blocks(train.num_targets):
            counts += np.bincount(np.argmax(values, axis=1), minlength=train.num_targets)
        return {"targets": [], "class_counts": counts[:t].astype(int).tolist()}
    t = min(train.num_targets, MOST_HISTOGRAMS)
    low, high = np.full(t, np.inf), np.full(t, -np.inf)
    total, squares = np.zeros(t), np.zeros(t)
    for values in blocks(t):
        low, high = np.minimum(low, values.min(axis=0)), np.maximum(high, values.max(axis=0))
        total += values.sum(axis=0)
    mean = total / train.num_rows
    edges = [np.linspace(a, b if b > a else a + 1.0, NUM_BINS + 1) for a, b in zip(low, high, strict=True)]
    counts = np.zeros((t, NUM_BINS))
    for values in blocks(t):
        squares += np.square(values - mean).sum(axis=0)
        for k in range(t):
            counts[k] += np.histogram(values[:, k], edges[k])[0]
    return {
        "class_counts": None,
        "targets": [
            {
                "name": str(names[k]),
                "min": low[k],
                "max": high[k],
                "mean": mean[k],
                "std": np.sqrt(squares[k] / train.num_rows),
                "edges": edges[k].tolist(),
                "counts": counts[k].astype(int).tolist(),
            }
            for k in range(t)
        ],
    }


def held_out_facts(train: Dataset, run: RunSummary) -> dict[str, Any]:
    """Truth and prediction of evenly spaced held-out rows, and counts of classes taken for others."""
    parts = [values for _, values in sorted(run.values.items()) if "sample" in values]
    if not parts:
        return {}
    pairs = np.concatenate([part["sample"] for part in parts])
    confusion = None
    if train.classes is not None and all("confusion" in part for part in parts):
        confusion = np.sum([part["confusion"] for part in parts], axis=0).tolist()
    # six digits: what a page can show
    rounded = [[[float(f"{value:.6g}") for value in pair] for pair in pairs[:, k]] for k in range(pairs.shape[1])]
    return {"pairs": rounded, "confusion": confusion}
