"""A job: the validated form of its TOML file.

You need it to turn a file that a person wrote into parameters that can be trusted: unknown keys, wrong types and
values that are not allowed are found here, with the line they stand on, before any data is opened. Relative paths
mean the folder of the job file, so a job runs the same from anywhere. Costs a few milliseconds.

A loss decides which other keys of a job have a meaning. Its defaults are filled in before a job is checked, so that the
job of a run, read again, is the same job.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import reduce
from operator import add, mul
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from dkrr.dataset.writer import check_outside
from dkrr.engine import configuration
from dkrr.errors import DkrrError, JobFileError, ParameterError, StoreError
from dkrr.fit.choices import SolverChoice
from dkrr.jobs import toml
from dkrr.jobs.run_directory import RunDirectory, may_hold
from dkrr.jobs.toml import (
    Alpha,
    ByteSize,
    Column,
    Columns,
    Count,
    Header,
    Location,
    Mask,
    Penalties,
    Positive,
    Quantile,
    Table,
    TileSize,
    Whole,
    is_data_file,
    is_loopback,
    locate,
    misplaced,
)
from dkrr.kernels import Kernel, make_kernel
from dkrr.kernels.features import degree_of
from dkrr.linalg.loss import Loss, make_loss
from dkrr.selection.choice import FoldLoss, TuneSettings
from dkrr.store.chunks import check_same
from dkrr.store.files import change_settings, is_url, join, name_of, parent_of, read_json
from dkrr.store.objects import StorageSettings

TOL = 1e-6
# whose estimators take alpha, and not C
_OF_ALPHA = ("pinball", "huber")
# the parameter of a loss, and its default
_PARAMETERS = {
    "pinball": ("quantile", 0.5),
    "huber": ("epsilon", 1.35),
    "epsilon_insensitive": ("epsilon", 0.1),
    "squared_epsilon_insensitive": ("epsilon", 0.1),
}
# keys that only systems of equations have, with all that another loss allows of them
_OF_SYSTEMS = dict.fromkeys(("tile_size", "gram", "preconditioner", "rank", "num_centers", "centers"), ("auto",))
_SOLVER = {"name": ("auto",), "precision": ("auto", "float64"), **_OF_SYSTEMS}
_OTHERS = "is for other losses than the square"
OF_LABELS = ("accuracy", "balanced_accuracy")
_TABLES = (".csv", ".csv.gz", ".parquet", ".npy")  # which have no classes of their own


# kernels by the parameters that they have; others of scikit-learn's kernels are in kernel_params
_TAKEN_BY = {
    "gamma": ("rbf", "laplacian", "poly", "polynomial", "sigmoid", "chi2"),
    "degree": ("poly", "polynomial"),
    "coef0": ("poly", "polynomial", "sigmoid"),
}


Rule = tuple[bool, tuple[str, str], str, str]  # whether it is broken, the key, what is wrong, and a hint


def _kernel_tag(value: Any) -> str:
    if isinstance(value, dict | KernelTable):
        return "kernel table"
    return "kernel number" if isinstance(value, int | float) and not isinstance(value, bool) else "kernel name"


class KernelParameters(Table):
    """Parameters that a kernel named by a string may have.

    Parameters
    ----------
    gamma
        Of rbf, laplacian, poly, sigmoid and chi2; 1 / d unless given (1 for chi2).
    degree
        Of poly; 3 unless given.
    coef0
        Of poly and sigmoid; 1 unless given.
    kernel_params
        Other parameters of a kernel: {nu = 1.5, length_scale = 0.75}; a length_scale for each feature is a list.
    """

    gamma: Positive | None = None
    degree: Positive | None = None
    coef0: Annotated[float, Field(allow_inf_nan=False)] | None = None
    kernel_params: dict[str, Any] | None = None

    def make(self, name: str) -> Kernel:
        """The kernel ``name`` with these parameters."""
        # scikit-learn's defaults, where the file is silent
        kernel = make_kernel(
            name,
            gamma=self.gamma,
            degree=3 if self.degree is None else self.degree,
            coef0=1 if self.coef0 is None else self.coef0,
            kernel_params=self.kernel_params,
        )
        for parameter, kernels in _TAKEN_BY.items():
            if getattr(self, parameter) is not None and name not in kernels:
                raise ValueError(f"{parameter} is for {', '.join(kernels)}; kernel = {name!r} has none")
        return kernel

    def given(self) -> list[str]:
        """Names of the parameters that the file sets."""
        return [name for name in KernelParameters.model_fields if getattr(self, name) is not None]


class KernelTable(KernelParameters):
    """``{kernel = "rbf", gamma = 0.1}``, ``{sum = [...]}`` or ``{product = [...]}`` of tables, names and numbers."""

    kernel: str | None = None
    sum: list[KernelItem] | None = None
    product: list[KernelItem] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        forms = [name for name in ("kernel", "sum", "product") if getattr(self, name) is not None]
        if len(forms) != 1:
            raise ValueError(f"one of kernel, sum and product expected, {' and '.join(forms) or 'none'} given")
        if self.kernel is None and self.given():
            raise ValueError(f"{self.given()[0]} belongs into the tables of the {forms[0]}")
        if self.kernel is None and all(isinstance(item, int | float) for item in self._items):
            raise ValueError(f"the {forms[0]} has no kernel in it")
        return self

    @property
    def _items(self) -> list[Any]:
        return self.sum or self.product or []

    def build(self) -> Kernel:
        """The kernel that the table describes."""
        if self.kernel is not None:
            return self.make(self.kernel)
        parts = [make_kernel(item) if isinstance(item, str) else item for item in self._items]
        built = [part.build() if isinstance(part, KernelTable) else part for part in parts]
        built.sort(key=lambda part: isinstance(part, int | float))  # kernels know + and * with numbers, not vice versa
        return reduce(add if self.sum is not None else mul, built)


KernelItem = Annotated[
    Annotated[str, Tag("kernel name")]
    | Annotated[KernelTable, Tag("kernel table")]
    | Annotated[float, Field(gt=0, allow_inf_nan=False), Tag("kernel number")],
    Discriminator(_kernel_tag),
]
KernelTable.model_rebuild()


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
        Add a constant that the ridge does not shrink; true by default with another loss than the square.
    loss
        What is minimised; the square is kernel ridge regression.
    C
        1 / (2 alpha), for other losses than the square; of a list held-out rows choose one. By default 1, where the
        loss has one and no alpha is given.
    quantile
        Of pinball; a list gives a column for each.
    epsilon
        Of huber and the insensitive losses: errors up to it are quadratic, or free.
    """

    kernel: Annotated[
        Annotated[str, Tag("kernel name")] | Annotated[KernelTable, Tag("kernel table")], Discriminator(_kernel_tag)
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

    @model_validator(mode="after")
    def _check_kernel(self) -> Self:
        if isinstance(self.kernel, KernelTable) and self.given():
            raise ValueError(f"{self.given()[0]} belongs into the kernel's own table")
        self.build_kernel()  # raises what a wrong name or parameter deserves
        return self

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        """Refuse what a loss, or its absence, does not allow, of values that are right one by one."""
        loss, alpha = self.loss, self.alpha if isinstance(self.alpha, list) else [self.alpha]
        for name in self.loss_parameters:
            if _PARAMETERS.get(loss, ("",))[0] != name:
                of = " and ".join(key for key, (parameter, _) in _PARAMETERS.items() if parameter == name)
                raise misplaced(("model", name), f"is for loss = {of}; the loss is {loss!r}", "leave it out")
        if loss == "square" and self.C is not None:
            raise misplaced(("model", "C"), _OTHERS, "give alpha, which is 1 / (2 C)")
        if loss != "square" and (min(alpha) == 0 or len(set(alpha)) < len(alpha)):
            expected = f"a number above 0, or a list of different ones, expected with loss = {loss!r}"
            raise misplaced(("model", "alpha"), f"= {self.alpha!r}; {expected}")
        try:
            self.losses()
        except ParameterError as exc:
            raise JobFileError(f"[model] {exc.message}", hint=exc.hint, key=["model", _PARAMETERS[loss][0]]) from None
        if self.C is None:
            return self
        alpha = [0.5 / value for value in self.C] if isinstance(self.C, list) else 0.5 / self.C
        return self.model_copy(update={"alpha": alpha})

    def build_kernel(self) -> Kernel:
        """The kernel of the job; gamma may still be None, which ``Kernel.resolve`` makes a number."""
        return self.kernel.build() if isinstance(self.kernel, KernelTable) else self.make(self.kernel)

    @property
    def loss_parameters(self) -> dict[str, Any]:
        """``epsilon`` or ``quantile`` of the loss, where it has one."""
        return self.model_dump(include={"epsilon", "quantile"}, exclude_none=True)

    @property
    def path(self) -> list[tuple[float, float]]:
        """C and alpha = 1 / (2 C), in increasing order of C, each as it was given where it was."""
        given = self.alpha if self.C is None else self.C
        values = given if isinstance(given, list) else [given]
        return sorted((0.5 / value, value) if self.C is None else (value, 0.5 / value) for value in values)

    def losses(self) -> list[Loss]:
        """The loss, one for each quantile of a list.

        Raises
        ------
        ParameterError
            It has no such parameter, or does not take this value.
        """
        quantiles = self.quantile if isinstance(self.quantile, list) else []
        parameters = [{"quantile": value} for value in quantiles] or [self.loss_parameters]
        return [make_loss(self.loss, **found) for found in parameters]


def _square_rules(job: JobSpec) -> Iterator[Rule]:
    is_matrix, solver, what = job.model.kernel == "precomputed", job.solver.name, "with a precomputed matrix"
    is_of_rows = is_matrix and solver in ("nystrom", "primal")
    yield is_of_rows, ("solver", "name"), f"= {solver!r} {what}", "give rows and a kernel"
    has_no_features = solver == "primal" and not is_matrix and degree_of(job.model.build_kernel()) is None
    hint = 'kernel "linear", or "poly" with a whole degree and coef0 >= 0, has; or take another solver'
    seen = f"= 'primal' with kernel {job.model.kernel!r}, which has no finite number of explicit features"
    yield has_no_features, ("solver", "name"), seen, hint
    what += ", whose columns are no features"
    yield is_matrix and job.data.standardize, ("data", "standardize"), what, "leave it out"
    for name in ("C", "folds"):
        yield job.tune is not None and getattr(job.tune, name) is not None, ("tune", name), _OTHERS, "leave it out"


def _loss_rules(job: JobSpec) -> Iterator[Rule]:
    model, evaluate, loss, one_hot = job.model, job.evaluate, job.model.loss, job.data.one_hot
    with_loss, is_for_labels = f"with loss = {loss!r}", make_loss(loss).is_for_labels
    held_out = (evaluate.path, evaluate.mask, evaluate.fraction) if evaluate else ()
    yield (
        len(model.path) > 1 and all(rows is None for rows in held_out),
        ("model", "alpha" if model.C is None else "C"),
        "is a list, and no rows are held out to choose one by",
        "set [evaluate] fraction, or give one number; `dkrr tune` chooses one of [tune] C by folds",
    )
    yield (
        model.build_kernel().name == "precomputed",
        ("model", "kernel"),
        f"= 'precomputed' {with_loss}: jobs with a loss have rows",
        "give rows and a kernel, or fit the matrix in Python: dkrr.KernelSVC(kernel='precomputed')",
    )
    for name, allowed in _SOLVER.items():
        value = getattr(job.solver, name)
        yield value not in allowed, ("solver", name), f"= {value!r} {with_loss}, which decides it", "leave it out"
    band = "; loss = 'pinball' with outer quantiles gives a band" if loss != "pinball" else ""
    for name in ("leave_one_out", "intervals"):
        yield (
            evaluate is not None and bool(getattr(evaluate, name)),
            ("evaluate", name),
            f"{with_loss}: it is known of the square alone",
            f"leave it out{band}",
        )
    where = ("data", "one_hot")
    yield one_hot and not is_for_labels, where, f"= true {with_loss}, which is for numbers", "leave it out"
    yield (
        is_for_labels and not one_hot and job.data.path.lower().endswith(_TABLES),
        where,
        f"is not true {with_loss}, which is for classes",
        "set [data] one_hot = true",
    )


def check_metric(path: tuple[str, str], loss: str, metric: str) -> None:
    """Refuse a metric, the key at ``path``, that has no meaning for predictions of a loss.

    Of the square that depends on its targets.
    """

    def has_meaning(name: str) -> bool:
        if name in ("log_loss", "pinball"):
            return loss == ("logistic" if name == "log_loss" else name)
        return loss == "square" or (name in OF_LABELS) == make_loss(loss).is_for_labels

    if not has_meaning(metric):
        known = ("rmse", "r2", *OF_LABELS, "log_loss", "pinball")
        hint = f"one of {', '.join(name for name in known if has_meaning(name))}"
        raise misplaced(path, f"= {metric!r} with loss = {loss!r}", hint)


# what a run may have otherwise than its job
NOT_CLAIMED = ("cluster", "storage", "tune")
LIMITS = ("max_iter", "allow_unconverged")


class DataSpec(Table):
    """``[data]``: where the rows come from and what their columns mean.

    With ``standardize`` rows that came after those of an earlier fit are whitened like them, unless they have drifted
    (:mod:`dkrr.dataset.scaling`): then all rows are fitted anew.

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
        What separates the fields of a text file; a comma unless given, or a semicolon where decimal is a comma.
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
        return {"header": self.header, "delimiter": self.delimiter, "decimal": self.decimal}

    def options(self) -> dict[str, Any]:
        """What :func:`~dkrr.dataset.ingest` is told, but for ``one_hot``."""
        columns = {"target": self.target, "features": self.features, "weight": self.weight}
        return {**columns, **self.text_options(), "missing": self.missing}


class HeldOutRows(Table):
    """Which rows no fit sees: those of a file, those that a mask or a column marks, or a share of all."""

    path: Location | None = None
    mask: Mask | None = None
    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None

    @property
    def mask_is_file(self) -> bool:
        """Whether ``mask`` names a file and not a column."""
        return is_data_file(self.mask)


class EvaluateSpec(HeldOutRows):
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
        Every held-out row counts alike, whatever its weight; leave-one-out errors are weighted.
    leave_one_out
        Predict every training row as by a fit without it; takes as long as the factor.
    intervals
        Coverage of prediction intervals, at most 0.999 and 1 - 1 / (n + 1) for n training rows: keep what they need,
        and count the held-out rows inside.
    """

    mask_column: Column = 0
    metric: Literal["rmse", "r2", "accuracy", "balanced_accuracy", "log_loss", "pinball"] | None = None
    leave_one_out: Annotated[bool, BeforeValidator(lambda value: value == "exact" or value)] | None = None
    intervals: Annotated[float, Field(gt=0, le=0.999)] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("path", "mask", "fraction") if getattr(self, name) is not None]
        alone = not given and (self.intervals is not None or bool(self.leave_one_out))
        if len(given) != 1 and given != ["path", "mask"] and not alone:
            raise ValueError(f"one of path, mask and fraction expected, {' and '.join(given) or 'none'} given")
        return self


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
        The relative residual at which iterations end; for other losses than the square the duality gap, 1e-6 by
        default.
    max_iter
        The most iterations.
    preconditioner
        Of cg: low-rank approximations of the Gram matrix; factor is an earlier one of these rows for another alpha.
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
    max_iter: Whole | None = None
    preconditioner: Literal["auto", "rpcholesky", "nystrom", "factor", "none"] = "auto"
    rank: Count = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    allow_unconverged: bool = False
    num_centers: Count = "auto"
    centers: Literal["auto", "rpcholesky", "uniform"] = "auto"

    @property
    def edge(self) -> int | None:
        """Rows of a tile; None for "auto"."""
        return None if self.tile_size == "auto" else int(self.tile_size)

    def settings(self) -> SolverChoice:
        """The same for everybody who solves: what is asked for, "auto" included."""
        return SolverChoice(solver=self.name, **self.model_dump(exclude={"name", "tile_size"}))


class ClusterSpec(Table):
    """``[cluster]``: where the work runs. ``scheduler`` is "local", tcp://..., tls://... or a scheduler file.

    A job that names no scheduler gets what Dask's configuration says under ``dkrr.cluster`` for all keys it leaves out.

    Parameters
    ----------
    scheduler
        "local" starts workers here; or tcp://host:port, tls://host:port, or a scheduler file.
    workers
        The number of worker processes; one for each core unless given. Of a scheduler: how many to wait for.
    threads_per_worker
        Threads of each; processes are faster than threads.
    memory_limit
        Memory of each worker; tiles are chosen to fit into it.
    insecure
        Allow a scheduler on tcp:// that is not on this machine: whoever reaches it can run any code there.
    """

    scheduler: str = "local"
    workers: Whole | None = None
    threads_per_worker: Whole = 1
    memory_limit: ByteSize = "auto"
    insecure: bool = False

    @field_validator("scheduler")
    @classmethod
    def _check_scheduler(cls, value: str, info: ValidationInfo) -> str:
        if value == "local":
            return value
        if is_url(value) and urlsplit(value).scheme not in {"tcp", "tls"}:
            raise ValueError('"local", tcp://host:port, tls://host:port or a scheduler file expected')
        return locate(value, info)

    @model_validator(mode="after")
    def _refuse_open_scheduler(self) -> Self:
        # whoever reaches an open scheduler can run any code on its workers
        if self.scheduler.startswith("tcp://") and not self.insecure and not is_loopback(self.scheduler):
            raise ValueError(
                f"scheduler {self.scheduler} is reached without encryption and authentication;"
                " use tls://, or say insecure = true where the network is trusted"
            )
        return self


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

    def settings(self) -> StorageSettings:
        """The same, as part of an address."""
        return StorageSettings(**self.model_dump())


_DEFAULT = TuneSettings()


class TuneSpec(Table):
    """``[tune]``: kernels, widths, sizes of the subsets, seed and time of a search; nothing is needed here.

    ``C`` (those of ``[model]`` where that has a list) and the number of ``folds`` are for other losses than the square.

    Parameters
    ----------
    kernels
        The kernels that are searched.
    widths
        One width for all features, one for each, or whichever predicts better.
    search_rows
        Sizes of the subsets on which widths are searched.
    rows
        The most rows on which the best are compared.
    seed
        Of the subsets.
    budget_seconds
        Time of the search; what would take longer is left out, and noted.
    C
        The values that are tried, for other losses than the square; those of [model] where that has a list.
    folds
        How many folds decide between them.
    """

    kernels: list[str] = Field(default_factory=lambda: list(_DEFAULT.kernels))
    widths: Literal["shared", "per_feature", "both"] = _DEFAULT.widths
    search_rows: list[int] = Field(default_factory=lambda: list(_DEFAULT.search_rows))
    rows: int = _DEFAULT.rows
    seed: Annotated[int, Field(ge=0, lt=2**32)] = _DEFAULT.seed
    budget_seconds: Annotated[float, Field(gt=0)] = _DEFAULT.budget_seconds
    C: Penalties | None = None
    folds: Annotated[int, Field(ge=2)] | None = None

    def settings(self) -> TuneSettings:
        """The same for the search."""
        sizes = self.search_rows
        return TuneSettings(
            kernels=tuple(self.kernels),
            widths=self.widths,
            # the usual sizes of the subsets as far as rows allow
            search_rows=tuple(
                sizes if "search_rows" in self.model_fields_set else sorted({min(n, self.rows) for n in sizes})
            ),
            rows=self.rows,
            seed=self.seed,
            budget_seconds=self.budget_seconds,
        )


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
    # keys of [cluster] that Dask's configuration gave
    _of_this_place: frozenset[str] = PrivateAttr(default=frozenset())

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_loss(cls, document: Any) -> Any:
        """A job of another loss than the square with what it leaves out."""
        if not isinstance(document, dict):
            return document
        model, solver = document.get("model", {}), document.get("solver", {})
        loss = model.get("loss", "square") if isinstance(model, dict) and isinstance(solver, dict) else "square"
        if not isinstance(loss, str) or loss == "square":
            return document
        if "alpha" in model and "C" in model:
            raise misplaced(("model", "C"), "and alpha are both given", "give one of them: C = 1 / (2 alpha)")
        own = {"fit_intercept": True, **dict([_PARAMETERS[loss]] if loss in _PARAMETERS else [])}
        if "alpha" not in model and "C" not in model and loss not in _OF_ALPHA:
            own["C"] = 1.0
        return {**document, "model": {**own, **model}, "solver": {"tol": TOL, **solver}}

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Refuse what a loss does not allow of the other tables, whose values are right one by one."""
        for is_wrong, path, message, hint in (_square_rules if self.model.loss == "square" else _loss_rules)(self):
            if is_wrong:
                raise misplaced(path, message, hint)
        if self.evaluate is not None and self.evaluate.metric is not None:
            check_metric(("evaluate", "metric"), self.model.loss, self.evaluate.metric)
        return self

    @property
    def run_id(self) -> str:
        """What ``{id}`` in the output becomes: 12 hexadecimal digits that belong to this job and no other."""
        if "{id}" not in self.output.directory:
            return name_of(self.output.directory)
        text = json.dumps(_claimed(self.to_dict(), limits=True), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def directory(self) -> str:
        """Folder or address of the run."""
        return self.output.directory.replace("{id}", self.run_id)

    @property
    def store(self) -> str:
        """Root of Gram matrices and factors; by default the folder "store" beside the run's directory."""
        if self.output.store is not None:
            return self.output.store.replace("{id}", self.run_id)
        parent = parent_of(self.directory)
        return "store" if parent == "." and not self.directory.startswith(".") else join(parent, "store")

    def check_claim(self, directory: str, *, is_driven: bool = False) -> None:
        """Refuse a directory that is not this job's.

        Where the work is done ([cluster], [storage]) may change from one attempt to the next, and so may how far an
        iteration goes ([solver] max_iter, allow_unconverged), which then goes on from where it stopped. A directory
        whose job never came as far as a plan (its data was refused, say) may be taken by another one, unless it
        ``is_driven`` now.

        Raises
        ------
        StoreMismatchError
            The directory belongs to another job; the differing keys are listed.
        StoreError
            It holds something else, or lies in a model, a version or a data set.
        """
        check_outside(directory)
        if not may_hold(directory, "fit"):
            raise StoreError(f"{directory} exists and is not a run of dkrr", hint="give another [output] directory")
        if os.path.abspath(self.store) == os.path.abspath(directory):
            raise StoreError(f"{directory} would be the run and its store", hint="give another [output] directory")
        found = RunDirectory(directory).read("job.json")
        if found is None or not (is_driven or read_json(directory, "plan.json")):
            return
        there, wanted = (
            {f"[{table}] {key}": value for table, values in _claimed(job).items() for key, value in values.items()}
            for job in (found, self.to_dict())
        )
        check_same(directory, there, wanted, "holds another job", "give another [output] directory, or remove it")

    def has_same_limits(self, document: dict[str, Any]) -> bool:
        """Whether an iteration may go as far as in another form of this job, of a run."""
        one, other = (job.get("solver", {}) for job in (document, self.to_dict()))
        return all((one.get(name) or None) == (other.get(name) or None) for name in LIMITS)

    @property
    def leaves_out(self) -> bool:
        """Whether leave-one-out is asked for, or intervals, which rest on it."""
        return self.evaluate is not None and bool(self.evaluate.leave_one_out or self.evaluate.intervals)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read and check a job file.

        Raises
        ------
        JobFileError
            The file cannot be read, is not TOML, or holds something that is unknown or not allowed.
        """
        path, hint = Path(path), "`dkrr init DATA` writes one"
        source, document = toml.Source.read(path, not_text=f"a job file is TOML; {hint}", unreadable=hint)
        return cls.checked(document, source, base=path.absolute().parent, name=path.stem)

    @classmethod
    def from_dict(cls, document: dict[str, Any], base: str | os.PathLike[str] = ".", name: str = "job") -> Self:
        """Check a job given as nested dicts; relative paths mean the folder ``base``.

        Raises
        ------
        JobFileError
            Something is unknown or not allowed.
        """
        return cls.checked(document, toml.Source(), base=Path(base).absolute(), name=name)

    @classmethod
    def checked(cls, document: dict[str, Any], source: toml.Source, *, base: Path, name: str) -> Self:
        """Check a job that comes from ``source``, whose run is called ``name`` where it has no other name."""
        here = _cluster_of_this_place(document, base)
        if here:
            document = {**document, "cluster": here | document.get("cluster", {})}
        if isinstance(document.get("output", {}), dict):
            document = {**document, "output": {"directory": f"runs/{name}", **document.get("output", {})}}
        storage = None
        with contextlib.suppress(TypeError, AttributeError, DkrrError):  # what is wrong with it is said by the check
            storage = StorageSettings(**document.get("storage", {}))
        job = source.check(cls, document, base, storage=storage)
        job._of_this_place = frozenset(here)
        return job

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain nested dicts that :meth:`from_dict` reads back exactly."""
        left_out = "loss" if self.model.loss == "square" else "alpha" if self.model.C is not None else ""
        unset = {
            name for name, value in {"decimal": ".", "missing": "error"}.items() if getattr(self.data, name) == value
        }
        tune = set() if self.tune is None else TuneSpec.model_fields.keys() - self.tune.model_fields_set
        return self.written(exclude={"model": {left_out}, "data": unset, "tune": tune})  # alpha is what C makes

    def written(self, location: Callable[[str], str] = str, **options: Any) -> dict[str, dict[str, Any]]:
        """Plain nested dicts as a file has them: addresses leave it to ``[storage]`` how they are reached.

        Parameters
        ----------
        location
            What else becomes of a path or address.
        options
            Of ``model_dump`` of pydantic. With ``exclude_unset`` what Dask's configuration says is left out, too.
        """
        if options.get("exclude_unset"):
            options["exclude"] = {**dict.fromkeys(options.get("exclude", ()), True), "cluster": {*self._of_this_place}}
        settings = self.storage.settings()
        context = {"location": lambda text: location(change_settings(text, settings, StorageSettings()))}
        return self.model_dump(mode="json", exclude_none=True, context=context, **options)

    def to_toml(self) -> str:
        """The job as the text of a TOML file."""
        return toml.dumps(self.to_dict())

    def fold_loss(self) -> FoldLoss | None:
        """What a search for C is asked, by the metric of ``[evaluate]`` or the one of the loss; None of the square.

        Of the loss are the share of wrong classes (hinges), the log loss (logistic), and the loss itself (the others).
        """
        model, tune = self.model, self.tune
        if model.loss == "square":
            return None
        own = {"hinge": "accuracy", "squared_hinge": "accuracy", "logistic": "log_loss"}.get(model.loss, model.loss)
        metric = (self.evaluate and self.evaluate.metric) or own
        given: dict[str, Any] = {}
        if tune is not None and tune.C is not None:
            given["C"] = tuple(tune.C) if isinstance(tune.C, list) else (tune.C,)
        elif len(model.path) > 1:
            given["C"] = tuple(C for C, _ in model.path)
        if tune is not None and tune.folds is not None:
            given["num_folds"] = tune.folds
        quantiles: list[Any] = model.quantile if isinstance(model.quantile, list) else [model.quantile]
        return FoldLoss(
            loss=model.loss,
            metric="rmse" if metric == "r2" else metric,  # the best one is the same
            epsilon=model.epsilon,
            quantile=None if model.quantile is None else tuple(quantiles),
            **given,
        )


def _claimed(document: dict[str, Any], *, limits: bool = False) -> dict[str, Any]:
    """What a run's directory belongs to; with ``limits`` how far an iteration goes is part of it."""
    claimed = {table: values for table, values in document.items() if table not in NOT_CLAIMED}
    solver = {name: value for name, value in claimed.get("solver", {}).items() if limits or name not in LIMITS}
    # runs of the first releases have a job without the default
    return {**claimed, "model": {"fit_intercept": False} | claimed.get("model", {}), "solver": solver}


def _cluster_of_this_place(document: dict[str, Any], base: Path) -> dict[str, Any]:
    """What ``dkrr.cluster`` of Dask's configuration says besides the job's own keys, if that names no scheduler."""
    own = document.get("cluster", {})
    if not isinstance(own, dict) or "scheduler" in own:
        return {}
    table = configuration.cluster_defaults(ClusterSpec.model_fields)
    if table:
        toml.Source("Dask's configuration of dkrr").check(ClusterSpec, table, base, ("cluster",))
    return {name: value for name, value in table.items() if name not in own}
