"""Between a data set and a solver: right-hand sides S Y, guesses of u, and coefficients S u.

All targets of a fit through one solver: which of them share a factor or an iteration, with an intercept or without.

Conjugate gradients take all targets and alphas at once; a factor is made for each distinct alpha.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset
from dkrr.errors import DamagedChunkError, NumericalError, ParameterError
from dkrr.linalg.blocks import BlockColumns, FloatMatrix, FloatVector
from dkrr.linalg.cg.mixed import MixedFactor, MixedSolver
from dkrr.linalg.cg.solver import CGSolver
from dkrr.linalg.factor.direct import CholeskySolver
from dkrr.linalg.intercept import Centring, centre_dataset
from dkrr.linalg.matmul import residual_norms
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.settings import IterativeSettings
from dkrr.linalg.solution import Solution
from dkrr.linalg.workspace import Workspace
from dkrr.store.files import place

Solved = tuple[list[int], Solution, BlockColumns]

"""Numbers of some targets, how they were solved, and their u."""


def target_alphas(alpha: Any, num_targets: int) -> NDArray[np.float64]:
    """An alpha for each target (t,), of one or of as many.

    Raises
    ------
    ParameterError
        No target; another number of alphas, or a negative one.
    """
    values = np.asarray(alpha, dtype=np.float64).ravel()
    if not num_targets:
        raise ParameterError("the rows have no target", hint="name one with target=")
    if len(values) not in (1, num_targets):
        raise ParameterError(f"{len(values)} values of alpha for {num_targets} targets; 1 or {num_targets} expected")
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ParameterError(f"alpha = {values.min()}", hint="give a number that is at least 0")
    return np.broadcast_to(values, (num_targets,)).copy()


def start_from(dataset: Dataset, dual_coef: FloatMatrix) -> FloatMatrix:
    """u = S^-1 dual_coef (n, t), zero for new rows and for rows without weight."""
    values = np.asarray(dual_coef, dtype=np.float64)
    values = values[:, None] if values.ndim == 1 else values
    n, m = dataset.num_rows, len(values)
    if m > n or values.shape[1] != dataset.num_targets or not np.isfinite(values).all():
        raise ParameterError(
            f"start has shape {np.shape(dual_coef)}; at most ({n}, {dataset.num_targets}) finite numbers expected",
            hint="give the coefficients of an earlier fit of the first rows",
        )
    start = np.zeros((n, dataset.num_targets))
    start[:m] = values
    if dataset.weight is not None:
        root = np.sqrt(dataset.weight.read(0, m))
        start[:m] = np.divide(values, root, out=np.zeros_like(values), where=root > 0)
    return start


def right_hand_sides(
    dataset: Dataset,
    operator: RidgeOperator,
    targets: list[int],
    store: Any,
    *,
    centring: Centring | None = None,
) -> BlockColumns:
    """S Y in blocks. A block that an earlier attempt left is compared: the residual rests on it.

    Parameters
    ----------
    centring
        Of all targets of the data set, to be subtracted from Y.
    """
    assert dataset.y is not None  # noqa: S101  (narrows the type)
    rhs = BlockColumns.create(store, "rhs", operator.grid, len(targets), "float64")
    for i in range(operator.grid.num_tiles):
        span = operator.grid.span(i)
        block = dataset.y.read(span.start, span.stop)[:, targets]
        if centring is not None:
            block = centring.take(targets).apply(block)
        root = operator.root_weight(i)
        if root is not None:
            block = root[:, None] * block
        for panel in range(rhs.num_panels):
            part = block[:, rhs.columns(panel)]
            if not (rhs.is_valid(i, panel) and _holds(rhs, i, panel, part)):
                rhs.write(i, panel, part)
    return rhs


def _holds(rhs: BlockColumns, i: int, panel: int, part: np.ndarray[Any, Any]) -> bool:
    try:
        return np.array_equal(rhs.read(i, panel), part)
    except DamagedChunkError:
        return False


def dual_coef_block(operator: RidgeOperator, solutions: list[Solved], i: int, num_targets: int) -> np.ndarray[Any, Any]:
    block = np.empty((operator.grid.rows(i), num_targets))
    for targets, _, u in solutions:
        block[:, targets] = u.read_rows(i)
    root = operator.root_weight(i)
    return block if root is None else root[:, None] * block


class _FitSettings(Protocol):
    """What is needed of the settings of a fit."""

    @property
    def solver(self) -> str: ...
    @property
    def precision(self) -> Literal["float64", "float32", "mixed"]: ...
    @property
    def iterative(self) -> IterativeSettings: ...
    @property
    def fit_intercept(self) -> bool: ...
    @property
    def accept_limit(self) -> bool: ...


@dataclass
class SolvedTargets:
    """Solutions of all targets in groups, the factors that were made, and the intercepts (t,) if there are any."""

    solutions: list[Solved] = field(default_factory=list)
    factors: list[str] = field(default_factory=list)
    intercept: FloatVector | None = None


def solve_targets(
    dataset: Dataset,
    settings: _FitSettings,
    operator: RidgeOperator,
    source: RidgeOperator,
    workspace: Workspace,
    store: Any,
    alphas: tuple[float, ...],
    digests: dict[str, Any],
    start: FloatMatrix | None,
    ready: Callable[[], object],
    shared: Any = None,
) -> SolvedTargets:
    """Solve (S K S + alpha_k I) u_k = S y_k for all targets, and for their intercepts where they are wanted.

    Parameters
    ----------
    operator, source
        A from the kernel, and A as solvers read it, perhaps from a stored Gram matrix.
    store
        Right-hand sides, solutions and the state of an iteration are kept here.
    alphas
        One for each target.
    digests
        ``weight_digest`` and ``source_digest``.
    start : (n, t), optional
        A guess of u, for iterations. Where it is good already, nothing is built.
    ready
        Called before a stored Gram matrix of ``source`` is read.
    shared
        Where a preconditioner is kept that another way may use as well; None means beside the iteration.
    """
    task = _Targets(dataset, settings, operator, workspace)
    if start is None or not (settings.solver == "cg" or settings.precision == "mixed"):
        ready()
    if settings.solver == "cg":
        own = place(store, "cg")
        prepared = CGSolver(
            settings=settings.iterative,
            precision="mixed" if settings.precision == "mixed" else "float64",
            accept_limit=settings.accept_limit,
        ).prepare(
            source.with_alpha(min(alphas)),
            workspace,
            store=own if shared is None else shared,
            num_columns=len(alphas),
            ready=ready,
            **digests,
        )
        targets = list(range(len(alphas)))
        rhs = task.right_hand_sides(targets, own)
        task.settle(targets, rhs, prepared.solve(rhs, np.array(alphas), start, in_plane=task.in_plane), alphas)
        return task.found
    for number, (alpha, targets) in enumerate(_groups(alphas)):
        with_alpha = source.with_alpha(alpha)
        if settings.precision == "mixed":
            mixed = MixedSolver(settings=settings.iterative).prepare(
                with_alpha, workspace, **digests, at_once=start is None, ready=ready
            )
            begin = None if start is None else start[:, targets]
            rhs = task.right_hand_sides(targets, place(store, f"alpha-{number}"))
            try:
                solved = mixed.solve(rhs, begin, in_plane=task.in_plane)
            except NumericalError as exc:
                exc.factors = [*task.found.factors, *_places(mixed)]  # type: ignore[attr-defined]
                raise
            task.settle(targets, rhs, solved, (alpha,) * len(targets))
            task.found.factors += _places(mixed)
            continue
        factor = CholeskySolver(precision=settings.precision).prepare(with_alpha, workspace, **digests)
        task.found.factors.append(factor.factor.location)
        rhs = task.right_hand_sides(targets, place(store, f"alpha-{number}"))
        task.add(targets, *factor.solve(rhs, bordered=task.in_plane))
    return task.found


def _places(mixed: MixedFactor) -> list[str]:
    """Where the factor is, if one was made."""
    location = mixed.location()
    return [] if location is None else [location]


def _groups(alphas: tuple[float, ...]) -> Iterator[tuple[float, list[int]]]:
    """Every distinct alpha with the targets that have it."""
    for alpha in dict.fromkeys(alphas):
        yield alpha, [target for target, value in enumerate(alphas) if value == alpha]


class _Targets:
    """The targets as solvers are given them, and what was found for them."""

    def __init__(self, dataset: Dataset, settings: _FitSettings, operator: RidgeOperator, workspace: Workspace) -> None:
        self.dataset, self.operator, self.workspace = dataset, operator, workspace
        self.in_plane = settings.fit_intercept
        self.centring = centre_dataset(dataset) if settings.fit_intercept else None
        self.found = SolvedTargets(intercept=None if self.centring is None else self.centring.offset)

    def right_hand_sides(self, targets: list[int], store: Any) -> BlockColumns:
        """S Y of some targets, centred for an intercept."""
        return right_hand_sides(self.dataset, self.operator, targets, store, centring=self.centring)

    def settle(
        self, targets: list[int], rhs: BlockColumns, solved: tuple[BlockColumns, Solution], alphas: tuple[float, ...]
    ) -> None:
        """Take the answer of an iteration; with an intercept, find that and the residual of the whole system."""
        u, solution = solved
        intercept = np.zeros(len(targets))
        if self.in_plane:
            operator, work, alpha = self.operator, self.workspace, np.array(alphas)
            norms, intercept = residual_norms(
                operator, rhs, u, work, rhs.array.store, alpha=alpha, normal=operator.normal()
            )
            solution = replace(solution, relative_residual=norms.relative_residual, backward_error=norms.backward_error)
        self.add(targets, u, solution, intercept)

    def add(self, targets: list[int], u: BlockColumns, solution: Solution, intercept: FloatVector) -> None:
        """Keep a solution; its intercept is that of centred targets."""
        self.found.solutions.append((targets, solution, u))
        if self.found.intercept is not None:
            self.found.intercept[targets] += intercept
