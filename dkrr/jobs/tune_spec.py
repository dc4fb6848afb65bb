"""``[tune]`` of a job file: what `dkrr tune` searches. You need it only in :mod:`dkrr.jobs.spec`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dkrr.jobs.fields import Penalties
from dkrr.jobs.kernel_table import Table
from dkrr.selection.choice import TuneSettings

__all__ = ["TuneSpec"]

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

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        self.settings()  # raises what a wrong value deserves
        return self

    def settings(self) -> TuneSettings:
        """The same for the search."""
        return TuneSettings(
            kernels=tuple(self.kernels),
            widths=self.widths,
            search_rows=tuple(self.search_rows) if "search_rows" in self.model_fields_set else self._sizes(),
            rows=self.rows,
            seed=self.seed,
            budget_seconds=self.budget_seconds,
        )

    def _sizes(self) -> tuple[int, ...]:
        """The usual sizes of the subsets, as far as ``rows`` allows."""
        return tuple(sorted({min(size, self.rows) for size in self.search_rows}))
