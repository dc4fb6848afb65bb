"""What a search for hyperparameters is asked, and what it answers: settings, candidates, the result.

Plain frozen data; the search itself is :mod:`dkrr.selection.tuning`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import ParameterError
from dkrr.selection.families import FAMILIES, kernel_keys

__all__ = ["Candidate", "TuneResult", "TuneSettings", "WidthKind", "best_of", "best_of_families"]

FloatArray = NDArray[np.float64]
WidthKind = Literal["shared", "per_feature"]

LEAST_ROWS, MOST_ROWS = 20, 20_000


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """What is searched, and how much.

    Parameters
    ----------
    kernels
        Families, of :data:`~dkrr.selection.families.FAMILIES`.
    widths
        "shared": one width for all features; "per_feature": one for each; "both": whichever predicts better.
    search_rows
        Sizes of the subsets on which widths are searched, ascending.
    rows
        Most rows of the subset on which the finalists are compared.
    seed
        Of the subset.
    budget_seconds
        The time that the trials may take in all; what would take longer is left out, and noted.

    Raises
    ------
    ParameterError
        A value that is not allowed.
    """

    kernels: tuple[str, ...] = FAMILIES
    widths: Literal["shared", "per_feature", "both"] = "both"
    search_rows: tuple[int, ...] = (1_000, 2_000)
    rows: int = 8_000
    seed: int = 0
    budget_seconds: float = 480.0

    def __post_init__(self) -> None:
        unknown = [name for name in self.kernels if name not in FAMILIES]
        if unknown or not self.kernels or len(set(self.kernels)) < len(self.kernels):
            raise ParameterError(
                f"kernels = {list(self.kernels)}", hint=f"some of {', '.join(FAMILIES)} are expected, each once"
            )
        if self.widths not in ("shared", "per_feature", "both"):
            raise ParameterError(f"widths = {self.widths!r}", hint="'shared', 'per_feature' or 'both' is expected")
        sizes = [*self.search_rows, self.rows]
        if not self.search_rows or sizes[0] < LEAST_ROWS or sizes[-1] > MOST_ROWS or sizes != sorted(sizes):
            raise ParameterError(
                f"search_rows = {list(self.search_rows)}, rows = {self.rows}",
                hint=f"ascending numbers from {LEAST_ROWS} to {MOST_ROWS:,} are expected",
            )
        if not self.budget_seconds > 0:
            raise ParameterError(f"budget_seconds = {self.budget_seconds!r}", hint="a number above 0 is expected")


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A kernel, its widths, an alpha, and how well they did on a number of rows."""

    family: str
    widths: FloatArray
    alpha: float
    loo_rmse: float
    num_rows: int
    loss: float | None = None
    factor: float = 1.0
    origin: str = "likelihood"

    @property
    def kind(self) -> WidthKind:
        """Whether there is one width for all features."""
        return "shared" if len(self.widths) == 1 else "per_feature"

    def keys(self) -> dict[str, Any]:
        """Kernel and alpha as ``[model]`` of a job, and :class:`~dkrr.KernelRidge`, take them."""
        return {**kernel_keys(self.family, self.widths), "alpha": self.alpha}

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "kernel": self.family,
            "widths_kind": self.kind,
            "widths": self.widths.tolist(),
            "alpha": self.alpha,
            "loo_rmse": self.loo_rmse,
            "loss": self.loss,
            "num_rows": self.num_rows,
            "factor": self.factor,
            "origin": self.origin,
        }


@dataclass(kw_only=True, eq=False)
class TuneResult:
    """The choice, and everything that led to it.

    ``candidates`` are the finalists on the same ``num_rows`` rows, best first; ``records`` one dictionary a trial in
    order; ``slices`` the errors over (factor, alpha) that were computed; ``notes`` what the budget left out.
    ``seconds`` is the time of the trials, divided among the threads that ran them.
    """

    best: Candidate
    candidates: list[Candidate]
    records: list[dict[str, Any]]
    slices: list[dict[str, Any]]
    notes: list[str]
    seconds: float

    def parameters(self) -> dict[str, Any]:
        """Arguments of :class:`~dkrr.KernelRidge`: kernel, its parameters and alpha."""
        return self.best.keys()

    def to_dict(self) -> dict[str, Any]:
        """Plain data: all that a picture or a report needs."""
        return {
            "best": self.best.to_dict(),
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "slices": self.slices,
            "trials": self.records,
            "notes": self.notes,
            "seconds": self.seconds,
        }


def best_of_families(candidates: list[Candidate]) -> list[Candidate]:
    """Of several starts of one family, that of the smallest loss."""
    best: dict[str, Candidate] = {}
    for candidate in candidates:
        held = best.get(candidate.family)
        if held is None or _loss(candidate) < _loss(held):
            best[candidate.family] = candidate
    return list(best.values())


def _loss(candidate: Candidate) -> float:
    return np.inf if candidate.loss is None else candidate.loss


def best_of(candidates: list[Candidate], kind: WidthKind) -> Candidate | None:
    """The candidate of a kind with the smallest leave-one-out error."""
    own = [candidate for candidate in candidates if candidate.kind == kind]
    return min(own, key=lambda candidate: candidate.loo_rmse) if own else None
