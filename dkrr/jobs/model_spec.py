"""``[model]`` of a job: the kernel, sums and products of some as nested tables, and the loss.

You need it only in :mod:`dkrr.jobs.spec`. A loss decides which other keys of a job have a meaning. Its defaults are
filled in before a job is checked, so that the job of a run, read again, is the same job. Costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import add, mul
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from dkrr.errors import JobFileError, ParameterError
from dkrr.jobs.toml import Alpha, Penalties, Positive, Quantile, Table, misplaced
from dkrr.kernels import Kernel, make_kernel
from dkrr.linalg.loss import Loss, make_loss

if TYPE_CHECKING:
    from dkrr.jobs.spec import JobSpec


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


def with_defaults(document: dict[str, Any]) -> dict[str, Any]:
    """A job of another loss than the square with what it leaves out.

    Raises
    ------
    JobFileError
        Both are.
    """
    model, solver = document.get("model"), document.get("solver", {})
    loss = model.get("loss", "square") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(solver, dict) or not isinstance(loss, str) or loss == "square":
        return document
    if "alpha" in model and "C" in model:
        raise misplaced(("model", "C"), "and alpha are both given", "give one of them: C = 1 / (2 alpha)")
    own = {"fit_intercept": True, **dict([_PARAMETERS[loss]] if loss in _PARAMETERS else [])}
    if "alpha" not in model and "C" not in model and loss not in _OF_ALPHA:
        own["C"] = 1.0
    return {**document, "model": {**own, **model}, "solver": {"tol": TOL, **solver}}


def check_job(job: JobSpec) -> None:
    """Refuse what a loss does not allow of the other tables of a job, whose values are right one by one."""
    for is_wrong, path, message, hint in _square_rules(job) if job.model.loss == "square" else _loss_rules(job):
        if is_wrong:
            raise misplaced(path, message, hint)
    if job.evaluate is not None and job.evaluate.metric is not None:
        check_metric(("evaluate", "metric"), job.model.loss, job.evaluate.metric)


def _square_rules(job: JobSpec) -> Iterator[Rule]:
    is_matrix, solver, what = job.model.kernel == "precomputed", job.solver.name, "with a precomputed matrix"
    is_of_rows = is_matrix and solver in ("nystrom", "primal")
    yield is_of_rows, ("solver", "name"), f"= {solver!r} {what}", "give rows and a kernel"
    what += ", whose columns are no features"
    yield is_matrix and job.data.standardize, ("data", "standardize"), what, "leave it out"
    for name in ("C", "folds"):
        yield job.tune is not None and getattr(job.tune, name) is not None, ("tune", name), _OTHERS, "leave it out"


def _loss_rules(job: JobSpec) -> Iterator[Rule]:
    model, evaluate, loss, one_hot = job.model, job.evaluate, job.model.loss, job.data.one_hot
    with_loss, is_for_labels = f"with loss = {loss!r}", make_loss(loss).is_for_labels
    yield (
        len(model.path) > 1 and not job.holds_out,
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
