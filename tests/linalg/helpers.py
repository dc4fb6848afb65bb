"""Small systems on disk for tests of the tile algorithms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dkrr.dataset import Dataset, ingest
from dkrr.engine.tasks import InProcessExecutor
from dkrr.kernels import make_kernel
from dkrr.linalg.direct import factorise
from dkrr.linalg.gram import build_gram
from dkrr.linalg.operators import RidgeOperator, rows_of
from dkrr.linalg.workspace import Workspace
from dkrr.tiles import TileGrid, TileMatrix
from tests.faults import InTurn


def rows(folder: Path, n: int = 250, d: int = 4, t: int = 3, weights: bool = False, seed: int = 0) -> Dataset:
    """n rows, some with weight zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, d))
    y = np.stack([np.sin(x[:, 0] * (k + 1)) + 0.1 * rng.standard_normal(n) for k in range(t)], axis=1)
    weight = rng.uniform(0.2, 2, n) * (np.arange(n) % 7 > 0) if weights else None
    return ingest(x, folder / "rows.zarr", y=y, sample_weight=weight)


def operator(dataset: Dataset, tile_size: int = 64, alpha: float = 1e-2, kernel: str = "rbf", **parameters: Any) -> Any:
    """The ridge operator of a data set."""
    resolved = make_kernel(kernel, **parameters).resolve(dataset.num_features)
    return RidgeOperator(
        grid=TileGrid(dataset.num_rows, tile_size),
        alpha=alpha,
        kernel=resolved,
        rows=rows_of(dataset, resolved),
        weighted=dataset.weight is not None,
    )


def dense(system: RidgeOperator, dataset: Dataset) -> np.ndarray:
    """S K S + alpha I from the whole rows at once."""
    n = dataset.num_rows
    x = dataset.X.read(0, n)
    assert system.kernel is not None
    a = system.kernel(x, x)
    if dataset.weight is not None:
        root = np.sqrt(dataset.weight.read(0, n)[:, 0])
        a = root[:, None] * a * root
    return a + system.alpha * np.eye(n)


def gram_of(system: RidgeOperator, store: Any, **attributes: Any) -> TileMatrix:
    """The Gram matrix of an operator."""
    gram = TileMatrix.create(str(store), system.grid, dtype="float64", **attributes)
    build_gram(system, gram, Workspace("", InProcessExecutor()))
    return gram


def factor_of(system: RidgeOperator, store: Any, dtype: str = "float64", **attributes: Any) -> TileMatrix:
    """The factor of an operator."""
    factor = TileMatrix.create(str(store), system.grid, dtype=dtype, **attributes)
    factorise(system, factor, Workspace("", InProcessExecutor()))
    return factor


def assembled(matrix: TileMatrix) -> np.ndarray:
    """The lower triangle of a tile matrix as one dense array."""
    full = np.zeros((matrix.grid.n, matrix.grid.n))
    for i, j in matrix.grid.lower():
        full[matrix.grid.span(i), matrix.grid.span(j)] = matrix.read(i, j)
    return full


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and modification time of every chunk below a folder."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "c" in path.relative_to(folder).parts
    }


class Apart:
    """Runs tasks here, but is not known to: what they exchange passes through the store, as between processes.

    Parameters
    ----------
    around
        Makes a task function of a phase into another one.
    """

    num_threads = 2

    def __init__(self, around: Callable[[str, Any], Any] = lambda phase, function: function) -> None:
        self.around = around

    def run(self, phase: str, function: Any, payload: Any, nodes: Any, progress: Any = None) -> Any:
        return InTurn().run(phase, self.around(phase, function), payload, nodes, progress)
