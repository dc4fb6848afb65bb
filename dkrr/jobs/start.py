"""Where an iteration begins: the coefficients of the earlier fit that shares the most rows with this one.

A model is remembered in the store by the rows and targets that it was fitted to, and found again by what they have in
common with others: zeros stand for rows that came later. A direct solve has no use for it. Cost: see
:mod:`dkrr.linalg.lineage`; one reading of the coefficients.
"""

from __future__ import annotations

import logging
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset
from dkrr.errors import DkrrError
from dkrr.fitting import FitSettings
from dkrr.linalg.lineage import Ancestor, ancestors, record_rows
from dkrr.linalg.workspace import Workspace
from dkrr.model import load_model

__all__ = ["begin_from", "remember"]

logger = logging.getLogger("dkrr.jobs")


def remember(store: Any, dataset: Dataset, settings: FitSettings, model_path: str) -> None:
    """Note which rows the model at ``model_path`` was fitted to."""
    if settings.kernel is None:
        return
    fields = {
        "kernel": settings.kernel.to_dict(),
        "alpha": list(settings.alpha),
        "num_targets": dataset.num_targets,
        "n": dataset.num_rows,
        "rows_digest": dataset.digest,
    }
    record_rows(store, "models", fields, dataset, model_path)


def begin_from(dataset: Dataset, settings: FitSettings, workspace: Workspace) -> NDArray[np.float64] | None:
    """Coefficients (m, t) of the first m rows, None where there are none or nothing iterates.

    What was found is noted in ``workspace.reused["start"]``.
    """
    iterates = settings.solver == "cg" or settings.precision == "mixed"
    if settings.kernel is None or not iterates:
        return None
    found = ancestors(workspace.store, dataset, settings.kernel.to_dict(), kinds=["models"])
    for item in sorted(found, key=lambda item: (-item.num_rows, _distance(item, settings))):
        if item.fields["num_targets"] != dataset.num_targets:
            continue
        try:
            model = load_model(item.location, verify=False)
            if model.provenance.get("rows_digest") != item.fields["rows_digest"]:
                continue  # another model is there by now
            coefficients = model.dual_coef.read(0, item.num_rows)
        except (DkrrError, OSError) as exc:
            logger.info("not begun from %s (%s)", item.location, exc)
            continue
        if not np.isfinite(coefficients).all():
            continue
        workspace.reused["start"] = {"rows": item.num_rows, "of_rows": dataset.num_rows, "source": item.location}
        return np.asarray(coefficients, dtype=np.float64)
    return None


def _distance(item: Ancestor, settings: FitSettings) -> float:
    """How far the alphas are apart."""
    mine, theirs = min(settings.alpha), min(item.fields["alpha"])
    return abs(log(mine / theirs)) if mine > 0 and theirs > 0 else float(mine != theirs)
