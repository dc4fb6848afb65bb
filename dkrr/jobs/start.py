"""Where an iteration begins: the coefficients of the earlier fit that shares the most rows with this one.

A model is remembered in the store by the rows and targets that it was fitted to, and found again by what they have in
common with others: zeros stand for rows that came later. A direct solve has no use for it. A model of another loss than
the square has lost its rows with coefficients of 0; the others stand in it in the order of the data set. Cost: see
:mod:`dkrr.linalg.catalogue`; one reading of the coefficients.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset
from dkrr.errors import DkrrError
from dkrr.fit.fitting import FitSettings
from dkrr.kernels import Kernel
from dkrr.linalg.catalogue import Ancestor, ancestors, record_rows
from dkrr.linalg.losses.loss import make_loss
from dkrr.linalg.workspace import Workspace
from dkrr.models.model import Model, load_model

__all__ = ["begin_from", "begin_loss_from", "remember"]

logger = logging.getLogger("dkrr.jobs")


def remember(
    store: Any,
    dataset: Dataset,
    kernel: Kernel | None,
    alpha: Sequence[float],
    model_path: str,
    loss: dict[str, Any] | None = None,
) -> None:
    """Note which rows the model at ``model_path`` was fitted to, with which ``loss`` where it was not the square."""
    if kernel is None:
        return
    fields = {
        "kernel": kernel.to_dict(),
        "alpha": list(alpha),
        "num_targets": dataset.num_targets,
        "n": dataset.num_rows,
        "rows_digest": dataset.digest,
        **({} if loss is None else {"loss": loss}),
    }
    record_rows(store, "models", fields, dataset, model_path)


def begin_from(dataset: Dataset, settings: FitSettings, workspace: Workspace) -> NDArray[np.float64] | None:
    """Coefficients (m, t) of the first m rows, None where there are none or nothing iterates.

    What was found is noted in ``workspace.reused["start"]``.
    """
    iterates = settings.solver == "cg" or settings.precision == "mixed"
    if settings.kernel is None or not iterates:
        return None
    return _begin_from(dataset, settings.kernel, settings.alpha, None, workspace)


def begin_loss_from(
    dataset: Dataset, kernel: Kernel, alpha: float, loss: dict[str, Any], workspace: Workspace
) -> NDArray[np.float64] | None:
    """:func:`begin_from` of another loss than the square."""
    return _begin_from(dataset, kernel, [alpha], loss, workspace)


def _begin_from(
    dataset: Dataset, kernel: Kernel, alpha: Sequence[float], loss: dict[str, Any] | None, workspace: Workspace
) -> NDArray[np.float64] | None:
    found = ancestors(workspace.store, dataset, kernel.to_dict(), kinds=["models"])
    for item in sorted(found, key=lambda item: (-item.num_rows, _distance(item, alpha))):
        if item.fields["num_targets"] != dataset.num_targets or item.fields.get("loss") != loss:
            continue
        try:
            model = load_model(item.location, verify=False)
            if model.provenance.get("rows_digest") != item.fields["rows_digest"]:
                continue  # another model is there by now
            if loss is None:
                coefficients = model.dual_coef.read(0, item.num_rows)
            else:
                coefficients = _of_rows(model, dataset, item.num_rows)
                if not make_loss(loss["loss"]).is_smooth:  # those at a bound are at the new one
                    coefficients *= item.fields["alpha"][0] / alpha[0]
        except (DkrrError, OSError) as exc:
            logger.info("not begun from %s (%s)", item.location, exc)
            continue
        if not np.isfinite(coefficients).all():
            continue
        workspace.reused["start"] = {"rows": item.num_rows, "of_rows": dataset.num_rows, "source": item.location}
        return np.asarray(coefficients, dtype=np.float64)
    return None


def _of_rows(model: Model, dataset: Dataset, num_rows: int) -> NDArray[np.float64]:
    """Coefficients of the first rows of a data set: those of a model whose rows are some of them, in their order."""
    coefficients = model.dual_coef.read(0, model.num_rows)
    found = np.zeros((num_rows, model.num_targets))
    if model.x_fit is None:
        return found
    own, place = [row.tobytes() for row in model.x_fit.read(0, model.num_rows)], 0
    for number, row in enumerate(dataset.X.read(0, num_rows)):
        if place < len(own) and row.tobytes() == own[place]:
            found[number], place = coefficients[place], place + 1
    return found


def _distance(item: Ancestor, alpha: Sequence[float]) -> float:
    """How far the alphas are apart."""
    mine, theirs = min(alpha), min(item.fields["alpha"])
    return abs(log(mine / theirs)) if mine > 0 and theirs > 0 else float(mine != theirs)
