"""OperatorProduct against dense products: every kernel, weighting and shape, and damage to what passes by the store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.dataset import Dataset, ingest
from dkrr.engine.tasks import DaskExecutor, InProcessExecutor
from dkrr.errors import DamagedChunkError, NumericalError
from dkrr.linalg.gram import build_gram
from dkrr.linalg.matmul import OperatorProduct
from dkrr.linalg.workspace import Workspace
from dkrr.tiles import TileMatrix
from tests.faults import DAMAGES, Twice, chunk_files
from tests.linalg.helpers import Apart, dense, operator, rows

KERNELS: dict[str, dict[str, Any]] = {
    "rbf": {},
    "matern": {"kernel_params": {"nu": 1.5, "length_scale": 0.75}},
    "laplacian": {},
    "linear": {},
    "poly": {"degree": 3},
    "cosine": {},
    "chi2": {},
}


def work(executor: Any) -> Workspace:
    return Workspace(store="", executor=executor)


def nonnegative_rows(folder: Path, n: int, weights: bool) -> Dataset:
    """As :func:`rows`, with features that chi2 takes."""
    rng = np.random.default_rng(n)
    weight = rng.uniform(0.2, 2, n) * (np.arange(n) % 7 > 0) if weights else None
    return ingest(rng.random((n, 4)), folder / "rows.zarr", y=rng.standard_normal(n), sample_weight=weight)


def assert_product(found: np.ndarray, a: np.ndarray, v: np.ndarray, eps: float = 1e-15) -> None:
    """|found - A v| <= 30 eps |A| |v|, entry by entry."""
    assert found.shape == v.shape
    assert found.dtype == np.float64
    assert (np.abs(found - a @ v) <= 30 * eps * (np.abs(a) @ np.abs(v)) + 1e-300).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("weights", [False, True])
def test_every_kernel(tmp_path: Path, kernel: str, weights: bool) -> None:
    dataset = nonnegative_rows(tmp_path, 250, weights)
    system = operator(dataset, alpha=0.0, kernel=kernel, **KERNELS[kernel])
    a = dense(system, dataset)
    v = np.random.default_rng(1).standard_normal((250, 5))
    for executor in (InProcessExecutor(), Apart()):
        product = OperatorProduct(system, work(executor), str(tmp_path / "scratch"), num_blocks=3)
        # chi2 and laplacian evaluate an exponential of a sum of rounded terms
        assert_product(product(v), a, v, eps=4e-15)
        multiplied, row_sums = product.exact(v), product.row_sums
        assert_product(multiplied, a, v, eps=4e-15)
        np.testing.assert_allclose(row_sums, np.abs(a).sum(axis=1), rtol=1e-12)
    if weights:
        assert not product(v)[::7].any()


@pytest.mark.parametrize(
    ("n", "num_blocks", "num_columns"), [(1, None, 1), (7, 3, 5), (250, None, 300), (250, 4, 1), (1000, 7, 5)]
)
def test_every_shape(tmp_path: Path, n: int, num_blocks: int | None, num_columns: int) -> None:
    dataset = rows(tmp_path, n=n, weights=n > 1)
    system = operator(dataset, alpha=0.0)
    v = np.random.default_rng(1).standard_normal((n, num_columns))
    answers = []
    for executor in (InProcessExecutor(), Apart(), Twice()):
        product = OperatorProduct(system, work(executor), str(tmp_path / "scratch"), num_blocks=num_blocks)
        answers.append(product(v))
    assert_product(answers[0], dense(system, dataset), v)
    # whether vectors pass through memory or through the store makes no bit of difference
    assert np.array_equal(answers[0], answers[1])
    assert np.array_equal(answers[0], answers[2])
    assert not chunk_files(tmp_path / "scratch")
    assert not list((tmp_path / "scratch").iterdir())


def test_blocks_of_a_super_block_and_bands_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks and bands inside the pairs: the same product."""
    dataset = rows(tmp_path, n=700, weights=True)
    a = dense(operator(dataset, alpha=0.0), dataset)
    v = np.random.default_rng(1).standard_normal((700, 2))
    monkeypatch.setattr("dkrr.linalg.matmul.BLOCK_ROWS", 48)
    for band_bytes in (1, 48 * 2 * 4 * 8, 1 << 20):
        monkeypatch.setattr("dkrr.linalg.matmul.BAND_BYTES", band_bytes)
        for kernel in ("rbf", "linear"):
            system = operator(dataset, alpha=0.0, kernel=kernel)
            a = dense(system, dataset)
            product = OperatorProduct(system, work(InProcessExecutor()), "", num_blocks=2)
            assert_product(product(v), a, v)
            product.exact(v)
            np.testing.assert_allclose(product.row_sums, np.abs(a).sum(axis=1), rtol=1e-12)


def test_no_columns_and_bad_vectors(tmp_path: Path) -> None:
    system = operator(rows(tmp_path))
    product = OperatorProduct(system, work(InProcessExecutor()), "")
    assert product(np.zeros((250, 0))).shape == (250, 0)
    with pytest.raises(ValueError, match=r"\(250, t\) expected"):
        product(np.zeros(250))
    v = np.ones((250, 3))
    v[17, 2] = np.nan
    with pytest.raises(NumericalError, match="column 2"):
        product(v)


def test_float32_entries(tmp_path: Path) -> None:
    dataset = rows(tmp_path, n=1000)
    system = operator(dataset, alpha=0.0)
    v = np.random.default_rng(1).standard_normal((1000, 5))
    expected = dense(system, dataset) @ v
    product = OperatorProduct(system, work(InProcessExecutor()), "", precision="float32")
    found = product(v)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert 1e-12 < error < 1e-6


@pytest.mark.parametrize(("n", "b", "num_blocks"), [(1, 64, None), (250, 64, 2), (700, 300, 3)])
@pytest.mark.parametrize("weights", [False, True])
def test_a_given_matrix(tmp_path: Path, n: int, b: int, num_blocks: int | None, weights: bool) -> None:
    dataset = rows(tmp_path, n=n, weights=weights and n > 1)
    system = operator(dataset, tile_size=b, alpha=0.0, kernel="linear")
    a = dense(system, dataset)
    gram = TileMatrix.create(str(tmp_path / "K.zarr"), system.grid, dtype="float64")
    build_gram(system, gram, InProcessExecutor())
    system = replace(system, kernel=None, gram=gram)
    v = np.random.default_rng(1).standard_normal((n, 5))
    for executor in (InProcessExecutor(), Apart()):
        product = OperatorProduct(system, work(executor), str(tmp_path / "s"), num_blocks=num_blocks)
        assert_product(product(v), a, v)
        multiplied, row_sums = product.exact(v), product.row_sums
        assert_product(multiplied, a, v)
        np.testing.assert_allclose(row_sums, np.abs(a).sum(axis=1), rtol=1e-12)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tiles(tmp_path: Path, damage: str) -> None:
    """Those of a given matrix end the product; those of a kernel are computed again where they are used at all."""
    dataset = rows(tmp_path)
    system = operator(dataset, alpha=0.0)
    gram = TileMatrix.create(str(tmp_path / "K.zarr"), system.grid, dtype="float64")
    build_gram(system, gram, InProcessExecutor())
    stored = replace(system, gram=gram)
    v = np.ones((250, 1))
    expected = dense(system, dataset) @ v
    path = tmp_path / "K.zarr/c/2/1"
    whole = path.read_bytes()
    DAMAGES[damage](path)
    with pytest.raises(DamagedChunkError) as caught:
        OperatorProduct(replace(stored, kernel=None), work(InProcessExecutor()), "")(v)
    assert caught.value.index == (2, 1)
    np.testing.assert_allclose(OperatorProduct(stored, work(InProcessExecutor()), "")(v), expected, rtol=1e-12)
    assert not path.exists() or path.read_bytes() != whole
    product = OperatorProduct(stored, work(Apart()), str(tmp_path / "s"), use_gram=True)
    np.testing.assert_allclose(product(v), expected, rtol=1e-12)
    assert path.read_bytes() == whole


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_nan_in_a_tile_is_blamed_on_it(tmp_path: Path) -> None:
    system = operator(rows(tmp_path))
    gram = TileMatrix.create(str(tmp_path / "K.zarr"), system.grid, dtype="float64")
    build_gram(system, gram, InProcessExecutor())
    tile = np.array(gram.read(2, 1))
    tile[3, 4] = np.nan
    gram.write(2, 1, tile)
    stored = replace(system, gram=gram)
    v = np.ones((250, 1))
    with pytest.raises(DamagedChunkError, match=r"\(2, 1\)"):
        OperatorProduct(replace(stored, kernel=None), work(InProcessExecutor()), "")(v)
    found = OperatorProduct(stored, work(InProcessExecutor()), "", use_gram=True)(v)
    np.testing.assert_allclose(found, OperatorProduct(system, work(InProcessExecutor()), "")(v), rtol=1e-12)


def test_on_workers_it_has_the_same_bits(tmp_path: Path, cluster_client: Any) -> None:
    system = operator(rows(tmp_path, n=900, weights=True), alpha=0.1)
    v = np.random.default_rng(1).standard_normal((900, 3))
    here, there = (
        OperatorProduct(system, work(executor), str(tmp_path / "scratch"), num_blocks=4)
        for executor in (InProcessExecutor(), DaskExecutor(cluster_client))
    )
    assert np.array_equal(there(v), here(v))
    assert np.array_equal(there.exact(v), here.exact(v))
    assert np.array_equal(there.row_sums, here.row_sums)
    assert not list((tmp_path / "scratch").iterdir())
