"""Leave-one-out of a run: the error of every training row by a fit that had not seen it, beside the model.

With ``[evaluate] leave_one_out`` the run's folder gets ``leave_one_out.zarr``: ``residuals`` (n, t) in the units of y
and ``inverse_diagonal``, in the order of the training rows, with the figures per target as attributes. With
``[evaluate] intervals`` the saved model gets the quantiles that its prediction intervals rest on. Nothing is factorised
that the fit factorised.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset, RowArray
from dkrr.engine.tasks import RunSummary
from dkrr.errors import ConvergenceError
from dkrr.fit.fitting import FitSettings
from dkrr.jobs.spec import JobSpec
from dkrr.linalg.inference.leave_one_out import LeaveOneOut
from dkrr.linalg.workspace import Workspace
from dkrr.models.leave_one_out import factor_settings, leave_one_out_rows
from dkrr.models.model import BLOCK_ROWS, load_model
from dkrr.models.uncertainty import loo_quantiles
from dkrr.store.files import place, remove_array, write_json
from dkrr.tiles import TileMatrix

__all__ = ["leave_out", "wants_leave_one_out"]

logger = logging.getLogger("dkrr.jobs")


def wants_leave_one_out(job: JobSpec) -> bool:
    """Whether the job asks for leave-one-out, or for intervals, which rest on it."""
    evaluate = job.evaluate
    return evaluate is not None and (bool(evaluate.leave_one_out) or evaluate.intervals is not None)


def leave_out(
    job: JobSpec,
    dataset: Dataset,
    settings: FitSettings,
    workspace: Workspace,
    model_path: str,
    directory: str,
    *,
    given: TileMatrix | None = None,
    source_digest: str = "",
) -> dict[str, Any] | None:
    """Leave-one-out of a run whose model is saved, if the job asks for it: the figures per target, in the units of y.

    None, with a warning, also where the job allows a fit that did not converge, and this one is too far from a solution
    for leave-one-out: then the model has no quantiles. Its seconds are those of one phase.

    Parameters
    ----------
    dataset, settings, workspace, given, source_digest
        Of the fit, whose factors are still in the store.
    model_path, directory
        Of the run.

    Cost
    ----
    That of :func:`dkrr.models.leave_one_out.leave_one_out_rows`: n^3 / 3 flops from a float64 factor.
    """
    if not wants_leave_one_out(job):
        return None
    model = load_model(model_path, verify=False)
    work = replace(workspace, phases={})
    tile_size = None if job.solver.tile_size == "auto" else int(job.solver.tile_size)
    settings = factor_settings(settings, dataset, work, model, tile_size)
    try:
        found = leave_one_out_rows(dataset, settings, work, model, given=given, source_digest=source_digest)
    except ConvergenceError as exc:
        if model.solution.converged:
            raise
        # allowed by the job, whose model says so; an earlier attempt may have left the figures of another one
        remove_array(place(directory, "leave_one_out.zarr"))
        logger.warning("no leave-one-out of a fit that did not converge: %s", exc.message)
        return None
    if model.scaling is not None:
        found = found.in_units(model.scaling.y_std)
    total = RunSummary()
    for summary in work.phases.values():
        total.merge(replace(summary, values={}))
    workspace.record("leave_one_out", total)
    assert job.evaluate is not None  # noqa: S101  (narrows the type)
    if job.evaluate.intervals is not None:
        model.with_quantiles(loo_quantiles(model, found)).write(model_path, overwrite=True)
    return _written(found, directory) if job.evaluate.leave_one_out else found.summary()


def _written(found: LeaveOneOut, directory: str) -> dict[str, Any]:
    """Write residuals and diagonal to the run's folder; the figures per target."""
    location = place(directory, "leave_one_out.zarr")
    remove_array(location)
    for name, values in (("residuals", found.residuals), ("inverse_diagonal", found.inverse_diagonal)):
        _write_rows(location, name, values)
    figures = found.summary()
    write_json(location, "zarr.json", {"zarr_format": 3, "node_type": "group", "attributes": figures})
    return figures


def _write_rows(location: str, name: str, values: NDArray[np.float64]) -> None:
    n, columns = values.shape
    rows = RowArray.create(location, name, num_rows=n, num_columns=columns, rows_per_chunk=min(BLOCK_ROWS, n))
    for number, (start, stop) in enumerate(rows.blocks()):
        rows.write_chunk(number, np.ascontiguousarray(values[start:stop]))
