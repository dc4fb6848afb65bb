"""A grid of alphas through tiles, for rows beyond an eigendecomposition in memory.

    cholesky    one stored Gram matrix; for each alpha a factor, the solution, the exact diagonal of the inverse
    primal      two passes over the rows for all alphas: :mod:`dkrr.linalg.primal.solver`

Factors of alphas that are not the best of any target are removed as soon as that is known, so that at most t + 1 lie on
the disk at once; those that were in the store before, or that another fit has used meanwhile, stay there. The smallest
alpha comes first: where it is too small for a factor, that is known before the others are paid for.

Cost
----
cholesky: 2/3 n^3 flops an alpha and n^2 / 2 numbers more on disk than one fit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset
from dkrr.engine.cluster import blas_of
from dkrr.engine.tasks import Executor
from dkrr.errors import ParameterError
from dkrr.fitting import FitSettings
from dkrr.leave_one_out import leave_one_out_rows
from dkrr.linalg.primal.solver import stored_source
from dkrr.linalg.workspace import Workspace
from dkrr.model import Model
from dkrr.planning.candidates import Candidate, Problem
from dkrr.planning.costs import factorise_seconds
from dkrr.planning.planner import Decision, Ways
from dkrr.planning.pricing import DISK_RESERVE_BYTES
from dkrr.planning.ways import may_be_primal
from dkrr.resources import free_bytes
from dkrr.selection.path import Chosen, choose
from dkrr.selection.primal import primal_search
from dkrr.selection.scoring import Scoring, held_out
from dkrr.tiled import TiledFit
from dkrr.tiles import TileMatrix

__all__ = ["PathFit"]

logger = logging.getLogger("dkrr.selection")

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PathFit(TiledFit):
    """A fit through tiles whose alpha is the one of a grid with the best leave-one-out score.

    Parameters
    ----------
    grid
        All alphas; ``alpha`` is the smallest of them, by which solvers are priced.
    scoring, stored
        See :meth:`dkrr.selection.path.AlphaPath.search`.
    take
        Called with what was chosen.
    """

    grid: tuple[float, ...]
    scoring: Scoring
    stored: Literal["errors", "predictions"] | None
    take: Callable[[Chosen], None]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.choice.solver in ("cg", "nystrom"):
            raise ParameterError(
                f"solver {self.choice.solver!r} with a grid of alphas, of which it has no leave-one-out errors",
                hint="give 'auto', 'cholesky' or 'primal', or a KernelRidge each",
            )

    def _decide(self, problem: Problem, dataset: Dataset, executor: Executor, root: Any) -> Decision:
        """The cheaper of a factor and its inverse's diagonal for each alpha, and of two passes in feature space."""
        k, t = len(self.grid), problem.num_targets
        whole = replace(problem, alpha=tuple(np.repeat(self.grid, t)), num_targets=k * t)
        choice = replace(self.choice, precision=self._precision)
        if choice.solver == "auto" and not may_be_primal(whole, choice):
            choice = replace(choice, solver="cholesky")
        decision = super(PathFit, replace(self, choice=choice))._decide(whole, dataset, executor, root)
        exact = [item for item in decision.candidates if item.solver != "cg"]
        usable = [self._with_diagonals(item, problem, executor, root) for item in exact]
        feasible = [item for item in usable if not item.infeasible] or usable
        best = min(feasible, key=lambda item: item.total_seconds)
        for item in sorted(feasible, key=lambda item: item.total_seconds):
            logger.info("%d alphas by %s: %.0f s", k, item.name, item.total_seconds)
        return replace(
            decision, chosen=best, candidates=tuple(usable), reasons={"solver": f"the cheapest for {k} alphas"}
        )

    @property
    def _precision(self) -> str:
        """Leave-one-out errors are those of a float64 factor, unless a float32 answer is asked for."""
        return "float32" if self.choice.precision == "float32" else "float64"

    def _with_diagonals(self, item: Candidate, problem: Problem, executor: Executor, root: Any) -> Candidate:
        """A candidate with what the diagonals of the inverses cost, and the factors that lie on the disk at once."""
        if item.solver != "cholesky":
            return item
        held = min(len(self.grid), problem.num_targets + 1 if self.scoring.per_target else 2)
        disk = item.disk_bytes | {"factor": item.disk_bytes.get("factor", 0) // len(self.grid) * held}
        free = free_bytes(root)
        if (
            item.infeasible.startswith("writes ")
            and free is not None
            and sum(disk.values()) + DISK_RESERVE_BYTES <= free
        ):
            item = replace(item, infeasible="")  # all factors together would not fit
        if not item.seconds:
            return replace(item, disk_bytes=disk)
        machine = self._machine(problem, executor, root)
        one = factorise_seconds(machine, problem.num_rows, item.tile_size, item.precision, "stored")
        return replace(item, disk_bytes=disk, seconds=item.seconds | {"leave-one-out": len(self.grid) * one})

    def _primal(self, dataset: Dataset, settings: FitSettings, root: Any, executor: Executor) -> Model:
        workspace = Workspace(store=root, executor=executor, blas=blas_of(executor))
        y, _ = _targets(dataset)
        bordered = settings.fit_intercept
        with stored_source(dataset, settings.kernel, workspace, fit_intercept=bordered) as source:
            scoring = self._scoring(dataset)
            chosen = primal_search(
                source, y, np.array(self.grid), scoring, fit_intercept=bordered, stored=self.stored
            )  # fmt: skip
        self.take(chosen)
        return super()._primal(dataset, replace(settings, alpha=self._chosen_alphas(chosen)), root, executor)

    def _model(
        self,
        dataset: Dataset,
        settings: FitSettings,
        root: Any,
        executor: Executor,
        given: TileMatrix | None = None,
        digest: str = "",
        ways: Ways | None = None,
    ) -> Model:
        """The model of the best alpha, from a factor of each."""
        settings = replace(settings, gram="stored", precision=self._precision)  # type: ignore[arg-type]
        (y, weight), scoring = _targets(dataset), self._scoring(dataset)
        (n, t), k = y.shape, len(self.grid)
        scores = np.full((t, k) if scoring.per_target else (k,), -np.inf)
        values = None if self.stored is None else np.empty((n, t, k))
        kept = dict[int, Model]()
        workspace = Workspace(store=root, executor=executor, blas=blas_of(executor), maker=self.maker)
        for number in np.argsort(self.grid, kind="stable").tolist():
            one = replace(settings, alpha=(self.grid[number],))
            model = super()._model(dataset, one, root, executor, given, digest)
            loo = leave_one_out_rows(dataset, one, workspace, model, given=given, source_digest=digest)
            scores[..., number] = scoring.of_left_out(loo, y, weight)
            logger.info("alpha %.3g: score %s", self.grid[number], scores[..., number])
            if values is not None:
                values[:, :, number] = held_out(loo, y, weight, self.stored)
            kept[number] = model
            for other in set(kept) - set(np.ravel(np.argmax(scores, axis=-1)).tolist()):
                for location in kept.pop(other).provenance.get("factors", []):
                    if workspace.discard(location):
                        logger.info("removed %s: its alpha is not the best", location)
        chosen = choose(scores, t, values)
        self.take(chosen)
        if len(kept) == 1:
            return next(iter(kept.values()))
        settings = replace(settings, alpha=self._chosen_alphas(chosen))
        return super()._model(dataset, settings, root, executor, given, digest)

    def _scoring(self, dataset: Dataset) -> Scoring:
        t = dataset.num_targets
        return replace(self.scoring, per_target=self.scoring.per_target and t > 1, is_1d=t == 1)

    def _chosen_alphas(self, chosen: Chosen) -> tuple[float, ...]:
        """One alpha, or one for each target."""
        numbers = chosen.index[:1] if chosen.scores.ndim == 1 else chosen.index
        return tuple(self.grid[number] for number in numbers)


def _targets(dataset: Dataset) -> tuple[Floats, Floats | None]:
    """y (n, t) and weights (n,) in memory."""
    assert dataset.y is not None  # noqa: S101  (narrows the type)
    n = dataset.num_rows
    return dataset.y.read(0, n), None if dataset.weight is None else dataset.weight.read(0, n)[:, 0]
