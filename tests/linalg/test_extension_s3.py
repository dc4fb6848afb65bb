"""Extending a factor on an object store: tiles of the common prefix are copied by the store."""

from __future__ import annotations

from typing import Any

import numpy as np

from dkrr.dataset import append
from dkrr.engine.tasks import InProcessExecutor
from dkrr.fit.fitting import FitSettings, fit_rows
from dkrr.kernels import make_kernel
from dkrr.linalg.workspace import Workspace
from dkrr.store.files import read_key
from tests.s3 import Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]

RNG = np.random.default_rng(0)
X = RNG.standard_normal((300, 3))
Y = np.sin(X[:, 0])


def fit(dataset: Any, store: str) -> tuple[np.ndarray, Any]:
    settings = FitSettings(kernel=make_kernel("rbf").resolve(3), alpha=(1e-2,), tile_size=64)
    with fit_rows(dataset, settings, Workspace(store, InProcessExecutor(), blas="test")) as result:
        return result.dual_coef.read(0, dataset.num_rows), result


def test_tiles_are_copied_by_the_store(bucket: Bucket, tmp_path: Any) -> None:
    data = bucket.url("data.zarr")
    old = fit(append(X[:200], data, y=Y[:200]), bucket.url("store"))[1]
    made = append(X[200:215], data, y=Y[200:215])
    before = len(bucket.server.log())
    found, result = fit(made, bucket.url("store"))
    reused = result.solution.reused["factor"]
    assert (reused["rows"], reused["tiles"]) == (200, 6)
    requests = bucket.server.log()[before:]
    name = result.factors[0].partition("?")[0].rpartition("/")[2]
    written = [r for r in requests if r["method"] == "PUT" and f"{name}/c/" in r["path"] and r["bytes"] > 64 * 64]
    assert len(written) == 4  # the ragged row block; six tiles were never in this process
    for i in range(3):
        for j in range(i + 1):
            tiles = [read_key(factor.factors[0], f"c/{i}/{j}") for factor in (old, result)]
            assert tiles[0] == tiles[1] is not None
    here, _ = fit(append(X[:215], tmp_path / "d.zarr", y=Y[:215]), str(tmp_path / "store"))
    np.testing.assert_allclose(found, here, rtol=0, atol=1e-9 * np.abs(here).max())
