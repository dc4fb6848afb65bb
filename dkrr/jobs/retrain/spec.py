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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from dkrr.errors import InterruptedRunError, JobFileError, StoreError
from dkrr.jobs.model_spec import check_metric
from dkrr.jobs.registry import check_name
from dkrr.jobs.spec import HeldOutRows, JobSpec
from dkrr.jobs.toml import FILE_SUFFIXES, Location, Source, Table, misplaced
from dkrr.store.files import (
    file_state,
    is_url,
    join,
    list_entries,
    name_of,
    overlaps,
    parent_of,
    with_settings,
)
from dkrr.store.objects import StorageSettings

JOB_TABLES = ("data", "evaluate", "model", "solver", "cluster", "storage", "tune", "output")

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

    ``fraction`` is decided once for each row by a hash of its number. ``mask`` is a column of the incoming files (name
    or number), or a file with one value for each row of the data set. ``path`` holds rows of their own, which are never
    added to the data set; rows that were held out before stay out of the fits.

    Parameters
    ----------
    path
        Held-out rows of their own.
    mask
        A column of the incoming files, or a file with one value for each row of the data set.
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


class _OwnTables(Table):
    """What stands in RETRAIN.toml and in no job file."""

    retrain: RetrainTable
    holdout: HoldoutSpec | None = None
    gate: GateSpec = GateSpec()
    drift: DriftSpec = DriftSpec()
    window: WindowSpec | None = None
    mlflow: MlflowSpec | None = None


class RetrainSpec(_OwnTables):
    """The whole of RETRAIN.toml. Read one with :meth:`load`; it is frozen, and its paths are absolute."""

    holdout: HoldoutSpec
    job: JobSpec

    @property
    def directory(self) -> str:
        """Where the state of the retrain job is: ``<registry>/<name>/retrain``."""
        return join(self.retrain.registry, self.retrain.name, "retrain")

    @property
    def store(self) -> str:
        """Store of Gram matrices and factors, the same for every fit of the lineage."""
        return self.job.output.store or join(self.directory, "store")

    @property
    def initial(self) -> str | None:
        """The first rows, where they are not in the data set already."""
        return None if self.job.data.path == self.retrain.data else self.job.data.path

    @property
    def own_files(self) -> list[str]:
        """What is no batch, where it lies among them: the data set, and what says which rows are held out."""
        mask = self.holdout.mask if self.holdout.mask_is_file else None
        return [str(path) for path in (self.retrain.data, self.holdout.path, mask) if path is not None]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RetrainSpec:
        """Read and check a RETRAIN.toml.

        Raises
        ------
        JobFileError
            The file cannot be read, is not TOML, or holds something that is unknown or not allowed.
        """
        path = Path(path)
        source, document = Source.read(path, not_text="it should be TOML", unreadable="check the path")
        return cls._checked(document, source, base=path.absolute().parent)

    @classmethod
    def from_dict(cls, document: dict[str, Any], base: str | os.PathLike[str] = ".") -> RetrainSpec:
        """Check what is given as nested dicts; relative paths mean the folder ``base``.

        Raises
        ------
        JobFileError
            Something is unknown or not allowed.
        """
        return cls._checked(document, Source(), base=Path(base).absolute())

    @classmethod
    def _checked(cls, document: dict[str, Any], source: Source, *, base: Path) -> RetrainSpec:
        tables = _OwnTables.tables()
        for name in document:
            if name not in tables and name not in JOB_TABLES:
                raise source.unknown_key((name,), [*tables, *JOB_TABLES])
        own = {name: table for name, table in document.items() if name in tables}
        if "retrain" not in own:
            raise JobFileError(f"{source.name or 'the document'} has no [retrain]", hint="give name, data and incoming")
        found = source.check(_OwnTables, own, base)
        job = _job(document, found.retrain, base=base, source=source)
        _check_loss(job, found.gate.metric, source)
        holdout, settings = found.holdout or _holdout_of(job, source.name), job.storage.settings()
        if holdout.mask is not None and not holdout.mask_is_file and job.data.features is None:
            raise JobFileError(
                "[holdout] mask is a column, and [data] features is missing",
                hint="name the features, so that the mask is not one of them",
            )
        located = {
            "retrain": _located(found.retrain, ("data", "incoming", "registry"), settings),
            "holdout": _located(holdout, ("path", "mask"), settings),
        }
        return cls(**dict(found) | located, job=job)

    def deliveries(self) -> list[Delivery]:
        """The files that may hold batches, by name."""
        return deliveries(self.retrain.incoming, self.own_files)

    def held_out_bytes(self) -> Any:
        """What tells held-out rows in a file of their own from others: the bytes of the file, which are read."""
        path = self.holdout.path
        if path is None or path.startswith(("sklearn:", "generate:")):
            return path
        return [path, [[found.name, found.content_hash()] for found in deliveries(path)]]

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts, for records and the directory of the job."""
        own = self.model_dump(mode="json", exclude_none=True, exclude={"job"})
        return {**own, "job": self.job.to_dict()}


def _job(document: dict[str, Any], retrain: RetrainTable, *, base: Path, source: Source) -> JobSpec:
    """The job of the fits: from its own file, or from its tables here."""
    tables = {name: document[name] for name in JOB_TABLES if name in document}
    if retrain.job is not None:
        if tables:
            raise JobFileError(
                f"[retrain] job = {retrain.job!r} and [{next(iter(tables))}] in the same file",
                hint="the tables of the job stand in one place",
            )
        return JobSpec.load(retrain.job)
    data = tables.get("data", {})
    tables["data"] = {"path": retrain.data, **data} if isinstance(data, dict) else data
    return JobSpec.checked(tables, source, base=base, name=retrain.name)


def _check_loss(job: JobSpec, metric: str | None, source: Source) -> None:
    """Refuse what a loss does not allow here."""
    loss = job.model.loss
    try:
        if loss != "square" and isinstance(job.model.alpha, list):
            name = "alpha" if job.model.C is None else "C"
            hint = "give one; [retrain] search_every chooses it by folds"
            raise misplaced(("model", name), "is a list; a retrain job has one value", hint)
        if metric is not None:
            check_metric(("gate", "metric"), loss, metric)
    except JobFileError as exc:
        raise source.error(exc.message, tuple(exc.key), exc.hint) from None


def _holdout_of(job: JobSpec, source: str) -> HoldoutSpec:
    """[holdout] from [evaluate] of the job, where that says which rows are held out."""
    evaluate = job.evaluate
    if evaluate is None or evaluate.mask is not None or not (evaluate.path or evaluate.fraction):
        raise JobFileError(
            f"{source or 'the document'} has no [holdout]",
            hint="rows that no fit sees are what a new model is judged by: fraction = 0.1, say",
        )
    return HoldoutSpec(path=evaluate.path, fraction=evaluate.fraction)


def _located(table: Any, names: tuple[str, ...], settings: StorageSettings) -> Any:
    found = {name: getattr(table, name) for name in names if is_url(getattr(table, name))}
    return table.model_copy(update={name: with_settings(url, settings) for name, url in found.items()})


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
        digest = hashlib.sha256()
        if is_url(self.location):
            digest.update(repr(self.state).encode())
            return digest.hexdigest()
        with contextlib.suppress(FileNotFoundError):
            for name, *_ in self.state:
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
    is_pattern = any(mark in name for mark in "*?[")
    is_file = not is_pattern and (_is_data(name) or os.path.isfile(incoming))
    folder = parent_of(incoming) if is_pattern or is_file else incoming
    found = []
    for other, state in (_objects(folder) if is_url(folder) else dict.fromkeys(_names(folder))).items():
        location = join(folder, other)
        is_meant = fnmatch.fnmatchcase(other, name) if is_pattern else other == name if is_file else _is_data(other)
        if is_meant and not any(overlaps(location, own) for own in without):
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
    """Name, size and times of last change of a file, or of every file in a folder."""
    if not os.path.isdir(location):
        return [["", *file_state(location)]]
    paths = sorted(os.path.join(folder, name) for folder, _, names in os.walk(location) for name in names)
    return [[os.path.relpath(path, location), *file_state(path)] for path in paths]


def _objects(folder: str) -> dict[str, list[Any]]:
    """The same below an address: objects right there, and everything below a prefix."""
    found: dict[str, list[Any]] = {}
    for item in list_entries(folder):
        found.setdefault(item.key.partition("/")[0], []).append([item.key, item.num_bytes, item.version])
    return found
