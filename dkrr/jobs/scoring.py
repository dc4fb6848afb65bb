"""Scheduled scoring: predict with a model of a registry, so that the same command can run every night.

The alias is resolved once, at the start. The version is written beside the output before anything is predicted, so a
prediction that was interrupted goes on with the version it began with, although the alias may name another one by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dkrr._version import __version__
from dkrr.address import is_url, sibling
from dkrr.engine.tasks import Progress
from dkrr.errors import StoreError, StoreMismatchError
from dkrr.jobs.export import check_output
from dkrr.jobs.registry import ModelRegistry, NamedModel, Reference, Version
from dkrr.jobs.runs.events import utc_now
from dkrr.jobs.serve import predict_job
from dkrr.jobs.uncertain import Asked
from dkrr.lock import hold_lock
from dkrr.stores import place, read_json, remove_array, write_json

__all__ = ["Scored", "predict_registered"]

NAME = "version.json"


@dataclass(frozen=True)
class Scored:
    """How many rows were predicted, and by which version."""

    num_rows: int
    version: Version


def predict_registered(
    reference: Reference,
    data: str,
    output: str,
    *,
    registry: str | None = None,
    asked: Asked | None = None,
    progress: Progress | None = None,
) -> Scored:
    """Predict the rows of ``data`` into ``output`` with a registered model, see :func:`dkrr.jobs.serve.predict_job`.

    Parameters
    ----------
    registry
        Root; None: ``DKRR_MODELS``, else ./models.

    Raises
    ------
    StoreError
        There is no such model, alias or version.
    LockedError
        Another process predicts into the same output.
    DataError
        The rows have other features than the model.
    """
    check_output(output)
    model = ModelRegistry(registry).open(reference.name)
    model.resolve(reference.selector)  # a mistake is found before anything is made
    work = sibling(output, ".work")
    if not is_url(work):
        place(work)
    with hold_lock(work):
        version = _version_for(model, reference, work)
        stamp = _stamp(model, reference, version)
        try:
            num_rows = predict_job(version.model_path, data, output, asked=asked, progress=progress, stamp=stamp)
        except StoreMismatchError:
            # what an interrupted prediction left is of other rows: nobody wants it any more
            remove_array(work)
            version = _version_for(model, reference, work)
            stamp = _stamp(model, reference, version)
            num_rows = predict_job(version.model_path, data, output, asked=asked, progress=progress, stamp=stamp)
        return Scored(num_rows, version)


def _version_for(model: NamedModel, reference: Reference, work: str) -> Version:
    """The version an interrupted prediction began with, while it is there; else the one that is meant now."""
    meant = {"registry": model.root, "name": reference.name, "selector": reference.selector}
    found = read_json(work, NAME)
    if isinstance(found, dict) and all(found.get(key) == value for key, value in meant.items()):
        try:
            return model.resolve(str(found["version"]))
        except StoreError:
            pass  # pruned since
    remove_array(work)
    version = model.resolve(reference.selector)
    write_json(work, NAME, {**meant, "version": version.id})
    return version


def _stamp(model: NamedModel, reference: Reference, version: Version) -> dict[str, Any]:
    return {
        "model": model.name,
        "selector": reference.selector,
        "version": version.id,
        "model_digest": version.model_digest,
        "dkrr": __version__,
        "predicted_at": utc_now(),
    }
