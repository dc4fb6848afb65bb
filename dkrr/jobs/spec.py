"""A job: the validated form of its TOML file.

You need it to turn a file that a person wrote into parameters that can be trusted: unknown keys, wrong types and
values that are not allowed are found here, with the line they stand on, before any data is opened. Relative paths
mean the folder of the job file, so a job runs the same from anywhere. Costs a few milliseconds.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from dkrr.fit.choices import SolverChoice
from dkrr.jobs import loss_spec, mistakes, toml
from dkrr.jobs.cluster_spec import ClusterSpec, with_cluster_of_this_place
from dkrr.jobs.fields import (
    Alpha,
    Column,
    Columns,
    Header,
    Location,
    NumCenters,
    Penalties,
    Quantile,
    Rank,
    TileSize,
    is_data_file,
    locate,
)
from dkrr.jobs.kernel_table import KernelParameters, KernelTable, Table, kernel_tag
from dkrr.jobs.mistakes import nearest
from dkrr.jobs.tune_spec import TuneSpec
from dkrr.kernels import Kernel
from dkrr.store.files import is_url, join, parent_of, with_settings, without_settings
from dkrr.store.objects import StorageSettings

__all__ = [
    "ClusterSpec",
    "DataSpec",
    "EvaluateSpec",
    "JobSpec",
    "KernelTable",
    "ModelSpec",
    "OutputSpec",
    "SolverSpec",
    "StorageSpec",
    "TuneSpec",
    "nearest",
]


class DataSpec(Table):
    """``[data]``: where the rows come from and what their columns mean.

    With ``standardize`` rows that came after those of an earlier fit are whitened like them, unless they have drifted
    (:mod:`dkrr.dataset.drift`): then all rows are fitted anew.

    Parameters
    ----------
    path
        The rows: .csv, .csv.gz, .npy, .parquet (a file or a folder), .zarr, an s3:// address, sklearn:NAME or
        generate:NAME?n=1000&d=10. Relative paths mean the folder of the job file.
    target
        The columns of y; -1 is the last one. A data set (.zarr) knows its own.
    features
        The columns of X; all others unless given.
    weight
        The column of the sample weights.
    header
        Whether the first line of a text file has names.
    delimiter
        What separates the fields of a text file; found unless given.
    decimal
        What stands before the fraction of a number in a text file.
    missing
        "drop" leaves out, and counts, rows that lack a value.
    one_hot
        Turn the classes of the target into one column each.
    standardize
        Whiten X and y with mean and standard deviation of the training rows; predictions are in the units of y.
    """

    path: Location
    target: Columns | None = None
    features: Columns | None = None
    weight: Column | None = None
    header: Header = "auto"
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    decimal: Literal[".", ","] = "."
    missing: Literal["error", "drop"] = "error"
    one_hot: bool = False
    standardize: bool = False

    def text_options(self) -> dict[str, Any]:
        """How text files are read, for :func:`~dkrr.dataset.ingest`; what is left out has its default."""
        options = {"header": self.header, "delimiter": self.delimiter}
        return options if self.decimal == "." else {**options, "decimal": self.decimal}

    def options(self) -> dict[str, Any]:
        """What :func:`~dkrr.dataset.ingest` is told, but for ``one_hot``."""
        options = {"target": self.target, "features": self.features, "weight": self.weight, **self.text_options()}
        return options if self.missing == "error" else {**options, "missing": self.missing}


class EvaluateSpec(Table):
    """``[evaluate]``: which rows are held out, and the score on them. One of ``path``, ``mask``, ``fraction``.

    ``mask`` is a column of the data (name or number) or a file, of which ``mask_column`` is used; true means held out.
    With ``path`` as well those rows are only left out of the fit, and the rows of ``path`` alone are predicted.
    ``metric`` None means accuracy for one-hot targets, pinball for that loss, and rmse otherwise. ``intervals`` is the
    coverage of prediction intervals: the model gets quantiles of its leave-one-out residuals, and held-out rows are
    counted. With ``leave_one_out`` every training row is predicted as by a fit without it. Both may stand alone.

    Parameters
    ----------
    path
        Held-out rows of their own.
    mask
        A column of the data, or a file with a value for each row; true means held out.
    mask_column
        Which column of a mask file.
    fraction
        The share of the rows that is held out, decided for each row by a hash of its number.
    metric
        The score that is shown first: rmse for numbers, accuracy for classes, pinball for quantiles unless given.
    leave_one_out
        Predict every training row as by a fit without it; takes as long as the factor.
    intervals
        Coverage of prediction intervals: keep what they need, and count the held-out rows inside.
    """

    path: Location | None = None
    mask: Column | None = None
    mask_column: Column = 0
    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    metric: Literal["rmse", "r2", "accuracy", "balanced_accuracy", "log_loss", "pinball"] | None = None
    leave_one_out: bool | None = None
    intervals: Annotated[float, Field(gt=0, lt=1)] | None = None

    @field_validator("mask")
    @classmethod
    def _locate_mask(cls, value: Any, info: ValidationInfo) -> Any:
        return locate(value, info) if is_data_file(value) else value

    @field_validator("leave_one_out", mode="before")
    @classmethod
    def _is_exact(cls, value: Any) -> Any:
        return True if value == "exact" else value  # the word of jobs that had a choice

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("path", "mask", "fraction") if getattr(self, name) is not None]
        alone = not given and (self.intervals is not None or bool(self.leave_one_out))
        if len(given) != 1 and given != ["path", "mask"] and not alone:
            raise ValueError(f"one of path, mask and fraction expected, {' and '.join(given) or 'none'} given")
        return self

    @property
    def mask_is_file(self) -> bool:
        """Whether ``mask`` names a file and not a column of the data."""
        return is_data_file(self.mask)


class ModelSpec(KernelParameters):
    """``[model]``: the kernel and the ridge ``alpha`` (never multiplied by n), with scikit-learn's defaults.

    ``fit_intercept`` adds a constant that the ridge does not shrink; other losses than the square have one by default.
    Those take ``C`` = 1 / (2 alpha) or ``alpha``, which is then known either way: one for all targets, or a list of
    which the held-out rows choose one (of the square a list has an alpha for each target). They have a parameter
    ``quantile`` (pinball) or ``epsilon`` (huber and the insensitive ones, in standard deviations of y with
    ``standardize``). What is left out is what the estimators have: C = 1, alpha = 1 for pinball and huber.

    Parameters
    ----------
    kernel
        A name; or a sum or product of kernels as nested tables: {sum = [{kernel = "rbf", gamma = 0.1}, "linear"]}.
    alpha
        The ridge, added to the diagonal as it is; a list has one for each target, or, with another loss than
        the square, those of which held-out rows choose one.
    fit_intercept
        Add a constant that the ridge does not shrink.
    loss
        What is minimised; the square is kernel ridge regression.
    C
        1 / (2 alpha), for other losses than the square; of a list held-out rows choose one.
    quantile
        Of pinball; a list gives a column for each.
    epsilon
        Of huber and the insensitive losses: errors up to it are quadratic, or free.
    """

    kernel: Annotated[
        Annotated[str, Tag("kernel name")] | Annotated[KernelTable, Tag("kernel table")], Discriminator(kernel_tag)
    ] = "linear"
    alpha: Alpha = 1.0
    fit_intercept: bool = False
    loss: Literal[
        "square",
        "hinge",
        "squared_hinge",
        "logistic",
        "epsilon_insensitive",
        "squared_epsilon_insensitive",
        "pinball",
        "huber",
    ] = "square"
    C: Penalties | None = None
    quantile: Quantile | None = None
    epsilon: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_loss(cls, values: Any) -> Any:
        return loss_spec.with_defaults(values) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _check_kernel(self) -> Self:
        if isinstance(self.kernel, KernelTable) and self.given():
            raise ValueError(f"{self.given()[0]} belongs into the kernel's own table")
        self.build_kernel()  # raises what a wrong name or parameter deserves
        return self

    def build_kernel(self) -> Kernel:
        """The kernel of the job; gamma may still be None, which ``Kernel.resolve`` makes a number."""
        return self.kernel.build() if isinstance(self.kernel, KernelTable) else self.make(self.kernel)


class SolverSpec(Table):
    """``[solver]``: how the system is solved. "auto" is what the plan expects to be fastest among the exact solvers.

    ``tol``, ``max_iter``, ``seed`` and ``allow_unconverged`` are for everything that iterates (cg, nystrom, and
    precision = "mixed"); ``preconditioner`` and ``rank`` for cg; ``num_centers`` and ``centers`` for nystrom, an
    approximation, which is never chosen by "auto".

    Parameters
    ----------
    name
        The way to the answer; nystrom is an approximation.
    tile_size
        Rows of a tile.
    precision
        float64; mixed: float32 inside, a float64 answer; float32: a float32 answer. "auto" gives a float64 answer.
    gram
        stored keeps the Gram matrix on disk; on_the_fly evaluates each tile when it is needed.
    tol
        The relative residual at which iterations end; the duality gap for other losses than the square.
    max_iter
        The most iterations.
    preconditioner
        Of cg; factor is an earlier factor of the same rows for another alpha.
    rank
        Of the preconditioner of cg.
    seed
        Of everything random: the rows of a preconditioner, of centres.
    allow_unconverged
        Keep, and record, an answer that did not reach tol, instead of an error.
    num_centers
        Of nystrom: the number m of rows that stand for all.
    centers
        Of nystrom: how they are chosen.
    """

    name: Literal["auto", "cholesky", "cg", "nystrom", "primal"] = "auto"
    tile_size: TileSize = "auto"
    precision: Literal["auto", "float64", "float32", "mixed"] = "auto"
    gram: Literal["auto", "stored", "on_the_fly"] = "auto"
    tol: Annotated[float, Field(gt=0, lt=1)] = 1e-8
    max_iter: Annotated[int, Field(ge=1)] | None = None
    preconditioner: Literal["auto", "rpcholesky", "nystrom", "factor", "none"] = "auto"
    rank: Rank = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    allow_unconverged: bool = False
    num_centers: NumCenters = "auto"
    centers: Literal["auto", "rpcholesky", "uniform"] = "auto"

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        self.choice()  # raises what a combination without a meaning deserves
        return self

    def choice(self) -> SolverChoice:
        """The same for everybody who solves: what is asked for, "auto" included."""
        return SolverChoice(
            solver=self.name,
            precision=self.precision,
            gram=self.gram,
            tol=self.tol,
            max_iter=self.max_iter,
            preconditioner=self.preconditioner,
            rank=self.rank,
            seed=self.seed,
            allow_unconverged=self.allow_unconverged,
            num_centers=self.num_centers,
            centers=self.centers,
        )


class StorageSpec(Table):
    """``[storage]``: how the s3:// addresses of the job are reached. Credentials are found by each process itself.

    In memory every address of the job carries these settings (:mod:`dkrr.store.files`), so that tasks need no more.

    Parameters
    ----------
    endpoint_url
        The address of the server, where it is not Amazon's.
    region
        The region of the bucket.
    profile
        The profile of ~/.aws whose credentials are used.
    allow_http
        Allow an endpoint without encryption.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    allow_http: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.settings()  # raises what an endpoint without encryption deserves
        return self

    def settings(self) -> StorageSettings:
        """The same, as part of an address."""
        return StorageSettings(**self.model_dump())


class OutputSpec(Table):
    """``[output]``: where the run and the store are, and what stays in the store afterwards.

    Parameters
    ----------
    directory
        The directory of the run; runs/NAME for NAME.toml unless given. {id} becomes the id of the run.
    store
        Where Gram matrices and factors are, which runs share; "store" beside the run unless given.
    keep
        What stays in the store: everything, the factor (new targets and more rows use it), or nothing but the model.
    """

    directory: Location = "runs/job"
    store: Location | None = None
    keep: Literal["all", "factor", "model"] = "factor"

    @field_validator("directory", "store")
    @classmethod
    def _only_id(cls, value: str | None) -> str | None:
        if value is not None and any(brace in value.replace("{id}", "") for brace in "{}"):
            raise ValueError("{id} is the only thing that braces may hold")
        return value

    def run_directory(self, run_id: str) -> str:
        """Folder or address of the run ``run_id``."""
        return self.directory.replace("{id}", run_id)

    def store_directory(self, run_id: str) -> str:
        """Root of Gram matrices and factors; by default the folder "store" beside the run's directory."""
        if self.store is not None:
            return self.store.replace("{id}", run_id)
        directory = self.run_directory(run_id)
        parent = parent_of(directory)
        return "store" if parent == "." and not directory.startswith(".") else join(parent, "store")


class JobSpec(Table):
    """The whole job. Read one with :meth:`load`; it is frozen, and its paths are absolute."""

    data: DataSpec
    evaluate: EvaluateSpec | None = None
    model: ModelSpec = ModelSpec()
    solver: SolverSpec = SolverSpec()
    cluster: ClusterSpec = ClusterSpec()
    storage: StorageSpec = StorageSpec()
    tune: TuneSpec | None = None
    output: OutputSpec = OutputSpec()

    @model_validator(mode="before")
    @classmethod
    def _tol_of_the_loss(cls, values: Any) -> Any:
        return loss_spec.with_tol(values) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _centres_are_rows(self) -> Self:
        if self.solver.name in ("nystrom", "primal") and self.model.kernel == "precomputed":
            raise ValueError(f"[solver] name = {self.solver.name!r} with a precomputed matrix: give rows and a kernel")
        if self.data.standardize and self.model.kernel == "precomputed":
            raise ValueError(
                "[data] standardize with a precomputed matrix, whose columns are no features: leave it out"
            )
        return self

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> JobSpec:
        """Read and check a job file.

        Raises
        ------
        JobFileError
            The file cannot be read, is not TOML, or holds something that is unknown or not allowed.
        """
        path = Path(path)
        text, document = toml.read_toml(
            path, not_text="a job file is TOML; `dkrr init DATA` writes one", unreadable="`dkrr init DATA` writes one"
        )
        return cls._checked(document, base=path.absolute().parent, name=path.stem, text=text, source=str(path))

    @classmethod
    def from_dict(cls, document: dict[str, Any], base: str | os.PathLike[str] = ".", name: str = "job") -> JobSpec:
        """Check a job given as nested dicts; relative paths mean the folder ``base``.

        Raises
        ------
        JobFileError
            Something is unknown or not allowed.
        """
        return cls._checked(document, base=Path(base).absolute(), name=name, text="", source="")

    @classmethod
    def from_run(cls, document: dict[str, Any]) -> JobSpec:
        """The job that the ``job.json`` of a run holds; keys that another version of dkrr had are left out.

        Raises
        ------
        JobFileError
            A value is not allowed.
        """
        document = copy.deepcopy(document)
        for path, _ in _unknown_keys(document):
            table: Any = document
            for name in path[:-1]:
                table = table[name]
            del table[path[-1]]
        return cls.from_dict(document)

    @classmethod
    def _checked(cls, document: dict[str, Any], *, base: Path, name: str, text: str, source: str) -> JobSpec:
        document = with_cluster_of_this_place(document, base)
        mistakes.refuse_secrets(document, text=text, source=source)
        for path, choices in _unknown_keys(document):
            raise mistakes.unknown_key(path, choices, text=text, source=source)
        if isinstance(document.get("output", {}), dict):
            document = {**document, "output": {"directory": f"runs/{name}", **document.get("output", {})}}
        try:
            job = cls.model_validate(document, context={"base": base})
        except ValidationError as exc:
            raise mistakes.describe(exc, text=text, source=source) from None
        for mistake in loss_spec.mistakes_of(job, document):
            raise mistakes.located(mistake.message, mistake.path, text=text, source=source, hint=mistake.hint)
        return job._with_locations(with_settings)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain nested dicts that :meth:`from_dict` reads back exactly."""
        document: dict[str, dict[str, Any]] = self.as_written().model_dump(mode="json", exclude_none=True)
        # runs that began before there were these keys are still the same jobs
        if self.model.loss == "square":
            del document["model"]["loss"]
            if not self.model.fit_intercept:
                del document["model"]["fit_intercept"]
        elif self.model.C is not None:
            del document["model"]["alpha"]  # which C makes
        for key, default in (("decimal", "."), ("missing", "error")):
            if document["data"][key] == default:
                del document["data"][key]
        return document

    def as_written(self) -> Self:
        """The job with addresses that leave it to ``[storage]`` how they are reached, as a file has them."""
        return self._with_locations(without_settings)

    def _with_locations(self, change: Callable[[str, StorageSettings], str]) -> Self:
        """The job with all its locations changed; only addresses are, and only by settings."""
        settings = self.storage.settings()
        if settings == StorageSettings():
            return self
        changed: dict[str, Table] = {}
        for name, keys in (("data", ["path"]), ("evaluate", ["path", "mask"]), ("output", ["directory", "store"])):
            table = getattr(self, name)
            found = {key: getattr(table, key) for key in keys if is_url(getattr(table, key, None))}
            if found:
                changed[name] = table.model_copy(update={key: change(url, settings) for key, url in found.items()})
        return self.model_copy(update=changed)

    def to_toml(self) -> str:
        """The job as the text of a TOML file."""
        return toml.dumps(self.to_dict())


def _unknown_keys(document: dict[str, Any]) -> list[tuple[tuple[Any, ...], list[str]]]:
    """Path and the right names for every key of ``document`` that does not exist.

    pydantic finds them too, but spread over the branches of a union and without the names that would be right.
    """
    found: list[tuple[tuple[Any, ...], list[str]]] = []

    def visit(table: Any, path: tuple[Any, ...], names: dict[str, Any]) -> None:
        if isinstance(table, dict):
            found.extend(((*path, key), list(names)) for key in table if key not in names)

    def visit_kernel(item: Any, path: tuple[Any, ...]) -> None:
        if isinstance(item, dict):
            visit(item, path, KernelTable.model_fields)
            for form in ("sum", "product"):
                for index, part in enumerate(item[form] if isinstance(item.get(form), list) else []):
                    visit_kernel(part, (*path, form, index))

    visit(document, (), JobSpec.model_fields)
    for table, model in JobSpec.tables().items():
        visit(document.get(table), (table,), model.model_fields)
    if isinstance(document.get("model"), dict):
        visit_kernel(document["model"].get("kernel"), ("model", "kernel"))
    return found
