"""All targets of a fit through one solver: which of them share a factor or an iteration, with an intercept or without.

Conjugate gradients take all targets and alphas at once; a factor is made for each distinct alpha.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset
from dkrr.errors import NumericalError
from dkrr.linalg.blocks import BlockColumns
from dkrr.linalg.cg.mixed import MixedFactor, MixedSolver
from dkrr.linalg.cg.solver import CGSolver
from dkrr.linalg.factor.bordered import solve_bordered, with_bordered_residual
from dkrr.linalg.factor.direct import CholeskySolver
from dkrr.linalg.intercept import centre_dataset
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.settings import IterativeSettings
from dkrr.linalg.solution import Solution
from dkrr.linalg.targets import Solved, right_hand_sides
from dkrr.linalg.workspace import Workspace
from dkrr.store.files import place

__all__ = ["SolvedTargets", "solve_targets"]

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]


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
        rhs = task.right_hand_sides(targets, place(store, f"alpha-{number}"), with_normal=task.in_plane)
        if task.in_plane:
            task.add(targets, *solve_bordered(factor, rhs))
        else:
            task.add(targets, *factor.solve(rhs))
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

    def right_hand_sides(self, targets: list[int], store: Any, *, with_normal: bool = False) -> BlockColumns:
        """S Y of some targets, centred for an intercept."""
        return right_hand_sides(
            self.dataset, self.operator, targets, store, centring=self.centring, with_normal=with_normal
        )

    def settle(
        self, targets: list[int], rhs: BlockColumns, solved: tuple[BlockColumns, Solution], alphas: tuple[float, ...]
    ) -> None:
        """Take the answer of an iteration; with an intercept, find that and the residual of the whole system."""
        u, solution = solved
        if self.in_plane:
            found = with_bordered_residual(solution, self.operator, rhs, u, alphas, self.workspace)
            self.add(targets, u, *found)
        else:
            self.add(targets, u, solution)

    def add(
        self, targets: list[int], u: BlockColumns, solution: Solution, intercept: FloatVector | None = None
    ) -> None:
        """Keep a solution; its intercept is that of centred targets."""
        self.found.solutions.append((targets, solution, u))
        if intercept is not None and self.found.intercept is not None:
            self.found.intercept[targets] += intercept
