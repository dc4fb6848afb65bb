"""Scheduled scoring: predict with a model of a registry, so that the same command can run every night.

The alias is resolved once, at the start. The version is written beside the output before anything is predicted, so a
prediction that was interrupted among its rows goes on with the version it began with, although the alias may name
another one by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dkrr.engine.tasks import Progress
from dkrr.errors import StoreError
from dkrr.jobs.export import check_output, work_of
from dkrr.jobs.registry import ModelRegistry, NamedModel, Reference, Version
from dkrr.jobs.serve import RESULT, holding, predict_held
from dkrr.jobs.uncertain import Asked
from dkrr.store.files import children, join, parent_of, read_json, remove_array, write_json

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
    overwrite: bool = False,
    reading: dict[str, Any] | None = None,
    keep: Sequence[str] = (),
    progress: Progress | None = None,
) -> Scored:
    """Predict the rows of ``data`` into ``output`` with a registered model, see :func:`dkrr.jobs.serve.predict_job`.

    Parameters
    ----------
    registry
        Root; None: ``DKRR_MODELS``, else ./models.
    asked, reading, keep, progress
        As there.

    Raises
    ------
    StoreError
        There is no such model, alias or version.
    LockedError
        Another process predicts into the same output.
    DataError
        The rows have other features than the model.
    """
    check_output(output, overwrite=True)  # its name
    model = ModelRegistry(registry).open(reference.name)
    found = model.resolve(reference.selector)  # a mistake is found before anything is made
    work = work_of(output)

    def predicted() -> Scored:
        version = _version_for(model, reference, work)
        stamp = {
            "model": model.name,
            "selector": reference.selector,
            "version": version.id,
            "model_digest": version.model_digest,
        }
        options: dict[str, Any] = {"asked": asked, "overwrite": overwrite, "reading": reading, "progress": progress}
        return Scored(predict_held(version.model_path, data, output, **options, keep=keep, stamp=stamp), version)

    return holding(output, [parent_of(found.location), data], predicted, overwrite=overwrite)


def _version_for(model: NamedModel, reference: Reference, work: str) -> Version:
    """The version an interrupted prediction began with, while it is there; else the one that is meant now.

    One that came to nothing before it had a place for its predictions (its rows could not be read, say) began nothing.
    """
    meant = {"registry": model.root, "name": reference.name, "selector": reference.selector}
    found = read_json(work, NAME)
    has_begun = bool(children(join(work, RESULT)))
    if has_begun and isinstance(found, dict) and all(found.get(key) == value for key, value in meant.items()):
        try:
            return model.resolve(str(found["version"]))
        except StoreError:
            pass  # pruned since
    remove_array(work)
    version = model.resolve(reference.selector)
    write_json(work, NAME, {**meant, "version": version.id})
    return version
