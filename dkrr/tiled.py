"""The estimator's fit on tiles: rows or a given matrix in, a model out.

It decides what "auto" means for rows that an estimator was handed, refuses what does not fit a worker or the disk, and
cleans up: what the caller has in memory does not stay in a store that is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dkrr.dataset import Dataset, RowArray
from dkrr.engine.session import blas_of, memory_limit_of
from dkrr.engine.tasks import Executor
from dkrr.errors import DataError
from dkrr.fitting import FitSettings, choose_gram, choose_tile_size, fit_rows
from dkrr.given import given_rows, store_given_matrix
from dkrr.kernels import Kernel
from dkrr.linalg.direct import Workspace
from dkrr.linalg.predict import ArrayRows
from dkrr.model import Model
from dkrr.resources import (
    check_disk,
    find_executor,
    nothing_new,
    resolve_tile_size,
    rows_on_disk,
    source_table,
    tiles_bytes,
)
from dkrr.stores import remove_array
from dkrr.threads import single_blas_thread
from dkrr.tiles import TileGrid, TileMatrix
from dkrr.validation import check_alpha

__all__ = ["TiledFit"]


@dataclass(frozen=True, kw_only=True)
class TiledFit:
    """A fit whose rows, tiles and coefficients are on disk.

    Parameters
    ----------
    kernel
        As given; resolved for the rows.
    alpha
        One ridge, or one per target.
    tile_size
        None means "auto".
    max_in_process_rows
        Up to so many rows the tasks run in this process when there is no client.
    feature_names
        Names of the columns of rows in memory.
    """

    kernel: Kernel
    alpha: Any
    precision: Literal["float64", "float32"]
    tile_size: int | None
    max_in_process_rows: int
    feature_names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        self.kernel.to_dict()  # arrays are keyed by the kernel, so a function without a name is refused now

    @property
    def is_given(self) -> bool:
        """Whether X is the Gram matrix itself."""
        return self.kernel.name == "precomputed"

    def store_bytes(self, X: Any, y: Any) -> int:
        """What a temporary store will hold; 0 where only reading tells the number of rows."""
        alpha = check_alpha(self.alpha).tolist()
        if self.is_given:
            n, d = given_rows(X), 1
        else:
            table = source_table(X, y)
            n, d = table.num_rows or 0, len(table.names)
        if not n:
            return 0
        b = self.tile_size or choose_tile_size(n, d, None, np.dtype(self.precision).itemsize)
        return tiles_bytes(TileGrid(n, b), self.precision, alpha, self._gram(alpha)) + 8 * n * d

    def solve(self, X: Any, y: Any, weight: Any, root: Any) -> tuple[Model, RowArray | None]:
        """The model, with coefficients in memory, and its rows on disk (None for a given matrix).

        Parameters
        ----------
        X, y, weight
            What an estimator's ``fit`` takes.
        root
            The store.
        """
        return self._solve_given(X, y, weight, root) if self.is_given else self._solve_rows(X, y, weight, root)

    def _gram(self, alpha: list[float]) -> Literal["stored", "on_the_fly"]:
        return choose_gram(None if self.is_given else self.kernel, len(set(alpha)))

    def _solve_rows(self, X: Any, y: Any, weight: Any, root: Any) -> tuple[Model, RowArray]:
        source_table(X, y)
        with rows_on_disk(X, y, weight, root) as dataset:
            n, d = dataset.num_rows, dataset.num_features
            alpha = check_alpha(self.alpha, dataset.num_targets).tolist()
            kernel, gram = self.kernel.resolve(d), self._gram(alpha)
            with find_executor(n, self.max_in_process_rows) as executor:
                b = resolve_tile_size(self.tile_size, n, d, self.precision, memory_limit_of(executor))
                grid = TileGrid(n, b)
                known: dict[str, list[Any]] = {
                    "rows_digest": [dataset.digest],
                    "kernel": [kernel.to_dict()],
                    "alpha": [*alpha, None],
                }
                check_disk(root, tiles_bytes(grid, self.precision, alpha, gram), grid, known)
                settings = FitSettings(
                    kernel=kernel, alpha=tuple(alpha), tile_size=b, precision=self.precision, gram=gram
                )
                return self._model(dataset, settings, root, executor), dataset.X

    def _solve_given(self, K: Any, y: Any, weight: Any, root: Any) -> tuple[Model, None]:
        n = given_rows(K)
        if y is None:
            raise DataError("fit requires y to be passed, but the target y is None")
        alpha = check_alpha(self.alpha).tolist()
        with find_executor(n, self.max_in_process_rows) as executor:
            b = resolve_tile_size(self.tile_size, n, 1, self.precision, memory_limit_of(executor))
            grid = TileGrid(n, b)
            check_disk(root, tiles_bytes(grid, self.precision, alpha, "stored"), grid, {"rows_digest": []})
            with nothing_new(root):
                dataset, given, digest = store_given_matrix(K, y, weight, root, b)
            try:
                alpha = check_alpha(self.alpha, dataset.num_targets).tolist()
                settings = FitSettings(
                    kernel=None, alpha=tuple(alpha), tile_size=b, precision=self.precision, gram="stored"
                )
                return self._model(dataset, settings, root, executor, given, digest), None
            finally:
                # the caller has the matrix: a store that is kept needs no copy of it
                remove_array(dataset.path)
                remove_array(given.location)

    def _model(
        self,
        dataset: Dataset,
        settings: FitSettings,
        root: Any,
        executor: Executor,
        given: TileMatrix | None = None,
        digest: str = "",
    ) -> Model:
        workspace = Workspace(store=root, executor=executor, blas=blas_of(executor))
        fit = fit_rows(dataset, settings, workspace, given=given, source_digest=digest)
        with single_blas_thread(), fit as result:
            coefficients = result.dual_coef.read(0, dataset.num_rows)
        rows = result.operator.rows
        center = None if given is not None or rows is None else rows.center
        names = self.feature_names
        if names is None:
            names = () if given is not None else dataset.feature_names
        return Model(
            kernel=settings.kernel,
            x_fit=None if given is not None else dataset.X,
            dual_coef=ArrayRows(coefficients),
            solution=result.solution,
            center=None if center is None else np.asarray(center),
            y_is_1d=dataset.y_is_1d,
            feature_names=list(names),
            target_names=list(dataset.target_names),
            classes=None if dataset.classes is None else list(dataset.classes),
            provenance={
                "alpha": list(settings.alpha),
                "tile_size": settings.tile_size,
                "precision": settings.precision,
                "gram": settings.gram,
                "rows_digest": digest or dataset.digest,
                "targets_digest": dataset.digest_y,
            },
        )
