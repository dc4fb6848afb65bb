"""RETRAIN.toml: which model is retrained, on what, and what a new version must prove before it is served.

    [retrain]
    name = "protein"
    data = "protein.zarr"            # the data set that grows
    incoming = "incoming/*.csv.gz"   # new rows: a file, a folder or a pattern
    [holdout]
    fraction = 0.1
    [model]                          # this and the other tables of a job, or job = "protein.toml" in [retrain]
    kernel = "rbf"

The tables ``[data]``, ``[model]``, ``[solver]``, ``[cluster]``, ``[storage]``, ``[tune]`` and ``[output]`` are those of
a job (:mod:`dkrr.jobs.spec`). ``[data] path`` holds the first rows, from which the data set is made when it does not
exist. Relative paths mean the folder of the file.

``incoming`` means new rows as files that somebody delivers (:func:`deliveries`). A batch is a file (or a folder of
Parquet, or a Zarr array) and is known by its bytes, not by its name: the same bytes under another name are the same
batch, and a corrected file under the old name is a new one. The size and times of a file, or the ETag of an object,
tell one that is unchanged without reading it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from dkrr.dataset.table import is_visible
from dkrr.errors import InterruptedRunError, JobFileError, StoreError
from dkrr.jobs.registry import check_name
from dkrr.jobs.spec import HeldOutRows, JobSpec, OutputSpec, check_metric
from dkrr.jobs.toml import BUILT_IN, FILE_SUFFIXES, Location, Source, Table, misplaced
from dkrr.store.files import file_state, is_url, join, list_entries, name_of, overlaps, parent_of
from dkrr.store.objects import Entry, find_object

Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RetrainTable(Table):
    """``[retrain]``: the model, its data set, where new rows come from, and how often the search is repeated.

    Parameters
    ----------
    name
        The name of the model in the registry.
    data
        The data set (.zarr) that grows; made from the first batch, or from [data] path.
    incoming
        New rows: a file, a folder, or a pattern such as incoming/*.csv.
    registry
        A folder or an s3:// address with models and their versions.
    job
        A job file, instead of the tables of a job in this file.
    search_every
        Every so many fits kernel, widths and alpha are searched again.
    """

    name: Annotated[str, AfterValidator(check_name)]
    data: Location
    incoming: Location
    registry: Annotated[Location, Field(validate_default=True)] = "models"  # in the folder of the file, too
    job: Location | None = None
    search_every: Annotated[int, Field(ge=1)] | None = None

    @field_validator("data")
    @classmethod
    def _is_a_dataset(cls, value: str) -> str:
        if not name_of(value).endswith(".zarr"):
            raise ValueError("a data set (.zarr) expected: rows are added to it")
        return value


class HoldoutSpec(HeldOutRows):
    """``[holdout]``: rows that no fit sees, of this version or a later one. One of ``path``, ``mask``, ``fraction``.

    ``fraction`` is decided once for each row by a hash of its number. ``mask`` is a column of the incoming files, by
    name, or by number where they have no names, or a file with one value for each row that the data set ever had.
    ``path`` holds rows of their own, which are never added to the data set; rows that were held out before stay out of
    the fits.

    Parameters
    ----------
    path
        Held-out rows of their own.
    mask
        A column of the incoming files, or a file with one value for each row that the data set ever had.
    fraction
        The share of the rows that is held out, decided once for each row by a hash of its number.
    """

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("path", "mask", "fraction") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"one of path, mask and fraction expected, {' and '.join(given) or 'none'} given")
        return self


class GateSpec(Table):
    """``[gate]``: what a model must show on held-out rows before it is promoted.

    Parameters
    ----------
    min_rows
        Held-out rows; with fewer nothing is judged, and nothing promoted.
    tolerance
        How much worse than the model in production the score may be: a share of its rmse, log loss or pinball loss, of
        which less is better, or so much less accuracy or r2. It covers the noise of the score.
    max_residual
        The largest relative residual of the solve; with another loss than the square the largest duality gap.
    min_r2
        Coefficient of determination that must be exceeded for every target: 0 is what the mean of the targets has, so
        a model that learnt its training rows by heart does not pass, whether or not there is one to compare with. With
        a loss for classes or quantiles the same of its metric, where 0 is what the best constant has.
    metric
        None means rmse for numbers and accuracy for one-hot targets, log_loss with loss = "logistic", and pinball with
        that.
    """

    min_rows: Annotated[int, Field(ge=1)] = 100
    tolerance: Share = 0.01
    max_residual: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-6
    min_r2: Annotated[float, Field(lt=1, allow_inf_nan=False)] = 0.0
    metric: Literal["rmse", "r2", "accuracy", "balanced_accuracy", "log_loss", "pinball"] | None = None


class DriftSpec(Table):
    """``[drift]``: how far new rows may be from those the lineage began with, column by column.

    Parameters
    ----------
    shift
        Difference of means, in standard deviations.
    scale
        Ratio of standard deviations, either way.
    distance
        Largest difference of the two distribution functions (Kolmogorov-Smirnov), 0 to 1.
    correlation
        Difference of the correlation of a feature with a target, 0 to 2.
    """

    shift: Share = 1.0
    scale: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 4.0
    distance: Share = 0.4
    correlation: Share = 0.3


class WindowSpec(Table):
    """``[window]``: how much stays in the data set; older generations or rows leave it. One of the two.

    Parameters
    ----------
    rows
        The last so many rows stay.
    generations
        The last so many generations stay.
    """

    rows: Annotated[int, Field(ge=1)] | None = None
    generations: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.rows is None) == (self.generations is None):
            raise ValueError("one of rows and generations expected")
        return self


class MlflowSpec(Table):
    """``[mlflow]``: where runs and models are logged besides; needs ``dkrr[mlflow]``.

    Parameters
    ----------
    tracking_uri
        The server or folder of MLflow.
    experiment
        The experiment that runs belong to.
    log_model
        Log the model as well, without pickle.
    """

    tracking_uri: str
    experiment: str = "dkrr"
    log_model: bool = True


class RetrainSpec(JobSpec):
    """The whole of RETRAIN.toml: the tables of a job, and those above. Its run is ``<registry>/<name>/retrain``."""

    retrain: RetrainTable
    holdout: HoldoutSpec
    gate: GateSpec = GateSpec()
    drift: DriftSpec = DriftSpec()
    window: WindowSpec | None = None
    mlflow: MlflowSpec | None = None

    @model_validator(mode="after")
    def _check_retrain(self) -> Self:
        model, mask = self.model, self.holdout.mask
        if model.loss != "square" and isinstance(model.alpha, list):
            hint = "give one; [retrain] search_every chooses it by folds"
            where = ("model", "alpha" if model.C is None else "C")
            raise misplaced(where, "is a list; a retrain job has one value", hint)
        if self.gate.metric is not None:
            check_metric(("gate", "metric"), model.loss, self.gate.metric)
        if self.retrain.search_every is not None and self.solver.name == "primal":
            where, hint = ("solver", "name"), "leave it out, or [retrain] search_every"
            raise misplaced(where, "= 'primal', and kernels of a search, with a width, have no features", hint)
        if mask is not None and not self.holdout.mask_is_file and self.data.features is None:
            hint = "name the features, so that the mask is not one of them"
            raise misplaced(("holdout", "mask"), "is a column, and [data] features is missing", hint)
        return self

    @property
    def initial(self) -> str | None:
        """The first rows, where they are not in the data set already."""
        return None if self.data.path == self.retrain.data else self.data.path

    @classmethod
    def checked(cls, document: dict[str, Any], source: Source, *, base: Path, name: str) -> Self:
        """With the tables of the job from their own file, if they have one, and what follows from the other tables."""
        retrain, where = document.get("retrain"), source.name or "the document"
        if not isinstance(retrain, dict):
            raise JobFileError(f"{where} has no [retrain]", hint="give name, data and incoming")
        if isinstance(file := retrain.get("job"), str):
            if tables := [table for table in document if table in JobSpec.model_fields]:
                raise JobFileError(
                    f"[retrain] job = {file!r} and [{tables[0]}] in the same file",
                    hint="the tables of the job stand in one place",
                )
            document = {**JobSpec.load(base / os.path.expanduser(file)).to_dict(), **document}
        data, output, evaluate = (document.get(table, {}) for table in ("data", "output", "evaluate"))
        if "holdout" not in document:
            rows = {
                key: evaluate[key] for key in ("path", "fraction") if isinstance(evaluate, dict) and key in evaluate
            }
            if not rows or "mask" in evaluate:
                raise JobFileError(
                    f"{where} has no [holdout]",
                    hint="rows that no fit sees are what a new model is judged by: fraction = 0.1, say",
                )
            document = {**document, "holdout": rows}
        if isinstance(data, dict) and "data" in retrain:
            document = {**document, "data": {"path": retrain["data"], **data}}
        if isinstance(output, dict):
            directory = join(str(retrain.get("registry", "models")), str(retrain.get("name")), "retrain")
            own = {"store": join(directory, "store"), **output, "directory": directory}
            document = {**document, "output": own}
        return super().checked(document, source, base=base, name=name)

    def kept(self) -> dict[str, Any]:
        """What a fit shall leave besides its model, where that is asked for."""
        evaluate = self.evaluate
        errors = {} if evaluate is None else {name: getattr(evaluate, name) for name in ("leave_one_out", "intervals")}
        tiles = {"keep": self.output.keep} if self.output.keep != OutputSpec().keep else {}
        return {name: value for name, value in errors.items() if value} | tiles

    def deliveries(self) -> list[Delivery]:
        """The files that may hold batches, by name; not the data set, nor what says which rows are held out."""
        mask = self.holdout.mask if self.holdout.mask_is_file else None
        own = [str(path) for path in (self.retrain.data, self.holdout.path, mask) if path is not None]
        return deliveries(self.retrain.incoming, own)

    def held_out_bytes(self) -> Any:
        """What tells held-out rows in a file, or folder, of their own from others: its bytes, which are read."""
        path = self.holdout.path
        if path is None or path.startswith(BUILT_IN):
            return path
        found = Delivery(name_of(path), path, _state(path))
        if not found.state:
            raise StoreError(f"[holdout] path: nothing is at {path}", hint="restore it, or name other held-out rows")
        return [[found.name, found.content_hash()]]

    def job_tables(self) -> dict[str, Any]:
        """The tables of the job as plain nested dicts."""
        return {name: table for name, table in self.to_dict().items() if name in JobSpec.model_fields}


# --- what is delivered -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Delivery:
    """A file that was found: its name, where it is, and what tells it from a changed one without reading it."""

    name: str
    location: str
    state: Any

    def content_hash(self) -> str:
        """SHA-256 of the bytes of a batch; of an object store the ETags stand for them.

        Raises
        ------
        InterruptedRunError
            The file changed while it was read.
        """
        digest, is_here = hashlib.sha256(), not is_url(self.location)
        if not is_here:
            digest.update(repr([[key.partition("/")[2], *facts] for key, *facts in self.state]).encode())
        with contextlib.suppress(FileNotFoundError):
            for name, *_ in self.state if is_here else ():
                with open(os.path.join(self.location, name).rstrip("/"), "rb") as stream:
                    digest.update(name.encode() + hashlib.file_digest(stream, "sha256").digest())
            if _state(self.location) == self.state:
                return digest.hexdigest()
        raise InterruptedRunError(
            f"{self.location} was changed while it was read",
            hint="start again when it is complete; write files under another name and rename them",
        )


def deliveries(incoming: str, without: Sequence[str] = ()) -> list[Delivery]:
    """What a file, a folder or a pattern means now, by name; a folder or pattern may mean nothing.

    Files of the job itself that lie there (``without``) are no deliveries.

    In a folder only files of known formats count, and none whose name begins with a dot: whoever writes a file there
    slowly gives it another ending first.

    Raises
    ------
    StoreError
        The folder does not exist, where a mistyped name would mean "nothing new" for ever.
    """
    name = name_of(incoming)
    # what is there by this very name is meant
    is_pattern = any(mark in name for mark in "*?[") and not os.path.lexists(incoming)
    is_file = not is_pattern and (_is_data(name) or os.path.isfile(incoming))
    folder = parent_of(incoming) if is_pattern or is_file else incoming
    found = []
    for other, state in (_objects(folder) if is_url(folder) else dict.fromkeys(_names(folder))).items():
        location = join(folder, other)
        is_meant = fnmatch.fnmatchcase(other, name) if is_pattern else other == name if is_file else _is_data(other)
        if is_meant and not other.startswith(".") and not any(overlaps(location, own) for own in without):
            found.append(Delivery(other, location, _state(location) if state is None else state))
    return found


def _is_data(name: str) -> bool:
    return name.lower().endswith(FILE_SUFFIXES) and not name.startswith(".")


def _names(folder: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as exc:
        raise StoreError(
            f"{folder} cannot be listed ({exc.strerror})", hint="[retrain] incoming names it; make the folder"
        ) from None


def _state(location: str) -> Any:
    """Name, size and times of last change of a file, or of every file in a folder that counts; none of nothing."""
    if is_url(location):
        name, found = name_of(location), find_object(parent_of(location), name_of(location))
        below = [replace(item, key=f"{name}/{item.key}") for item in list_entries(location) if _counts(name, item.key)]
        return [_facts(item) for item in ([] if found is None else [found]) + below]
    if not os.path.isdir(location):
        return [["", *file_state(location)]] if os.path.exists(location) else []
    paths = sorted(os.path.join(folder, name) for folder, _, names in os.walk(location) for name in names)
    named = [(os.path.relpath(path, location), path) for path in paths]
    return [[name, *file_state(path)] for name, path in named if _counts(location, name)]


def _counts(delivery: str, name: str) -> bool:
    """Whether a file of a folder is part of a delivery: hidden ones, which no reader sees, are that of arrays alone."""
    return delivery.endswith(".zarr") or is_visible(name)


def _objects(folder: str) -> dict[str, list[Any]]:
    """The same below an address: objects right there, and everything below a prefix."""
    found: dict[str, list[Any]] = {}
    for item in list_entries(folder):
        delivery, _, name = item.key.partition("/")
        if _counts(delivery, name):
            found.setdefault(delivery, []).append(_facts(item))
    return found


def _facts(item: Entry) -> list[Any]:
    return [item.key, item.num_bytes, item.version]
