"""OperatorProduct against dense products: kernels, weights and shapes, and damage to what passes by the store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.engine.tasks import DaskExecutor, InProcessExecutor
from dkrr.errors import DamagedChunkError, NumericalError
from dkrr.linalg.matmul import OperatorProduct
from dkrr.linalg.workspace import Workspace
from tests.faults import DAMAGES, Twice
from tests.linalg.helpers import Apart, dense, gram_of, operator, rows


def product_of(system: Any, executor: Any = None, scratch: Any = "", **options: Any) -> OperatorProduct:
    return OperatorProduct(
        system, Workspace(store="", executor=executor or InProcessExecutor()), str(scratch), **options
    )


def assert_product(found: np.ndarray, a: np.ndarray, v: np.ndarray, eps: float = 4e-15) -> None:
    """|found - A v| <= 30 eps |A| |v|, entry by entry."""
    assert found.shape == v.shape
    assert found.dtype == np.float64
    assert (np.abs(found - a @ v) <= 30 * eps * (np.abs(a) @ np.abs(v)) + 1e-300).all()


@pytest.mark.parametrize("kernel", ["rbf", "laplacian", "poly", "given"])
@pytest.mark.parametrize(
    ("n", "num_blocks", "t"), [(1, None, 1), (7, 3, 5), (250, None, 300), (250, 4, 1), (700, 2, 3)]
)
def test_products_in_every_shape(
    tmp_path: Path, kernel: str, n: int, num_blocks: int | None, t: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through memory and through the store, tasks run twice, blocks of a super-block: the same bits."""
    monkeypatch.setattr("dkrr.linalg.matmul.BLOCK_ROWS", 100)
    dataset = rows(tmp_path, n=n, weights=n > 1)
    system = operator(dataset, alpha=0.0, kernel="linear" if kernel == "given" else kernel)
    a, v, answers = dense(system, dataset), np.random.default_rng(1).standard_normal((n, t)), []
    if kernel == "given":
        system = replace(system, gram=gram_of(system, tmp_path / "K.zarr"), kernel=None)
    for executor in (InProcessExecutor(), Apart(), Twice()):
        product = product_of(system, executor, tmp_path / "scratch", num_blocks=num_blocks)
        answers.append(product(v))
        assert_product(product.exact(v), a, v)
        np.testing.assert_allclose(product.row_sums, np.abs(a).sum(axis=1), rtol=1e-12)
    assert_product(answers[0], a, v)
    assert np.array_equal(answers[0], answers[1])
    assert np.array_equal(answers[0], answers[2])
    assert not list((tmp_path / "scratch").iterdir())


def test_a_vector_that_is_not_finite_is_named(tmp_path: Path) -> None:
    product, v = product_of(operator(rows(tmp_path))), np.ones((250, 3))
    v[17, 2] = np.nan
    with pytest.raises(NumericalError, match="column 2"):
        product(v)


@pytest.mark.parametrize("damage", [*DAMAGES, "a NaN"])
def test_damaged_tiles(tmp_path: Path, damage: str) -> None:
    """Those of a given matrix end the product; those of a kernel are computed again where they are used at all."""
    dataset = rows(tmp_path)
    system = operator(dataset, alpha=0.0)
    gram = gram_of(system, tmp_path / "K.zarr")
    stored, v, path = replace(system, gram=gram), np.ones((250, 1)), tmp_path / "K.zarr/c/2/1"
    expected, whole = dense(system, dataset) @ v, path.read_bytes()
    if damage == "a NaN":
        tile = np.array(gram.read(2, 1))
        tile[3, 4] = np.nan
        gram.write(2, 1, tile)
    else:
        DAMAGES[damage](path)
    with pytest.raises(DamagedChunkError) as caught:
        product_of(replace(stored, kernel=None))(v)
    assert caught.value.index == (2, 1)
    np.testing.assert_allclose(product_of(stored)(v), expected, rtol=1e-12)
    assert not path.exists() or path.read_bytes() != whole
    product = product_of(stored, Apart(), tmp_path / "s", use_gram=True)
    np.testing.assert_allclose(product(v), expected, rtol=1e-12)
    assert path.read_bytes() == whole


def test_on_workers_it_has_the_same_bits(tmp_path: Path, cluster_client: Any) -> None:
    system = operator(rows(tmp_path, n=900, weights=True), alpha=0.1)
    v = np.random.default_rng(1).standard_normal((900, 3))
    here, there = (
        product_of(system, executor, tmp_path / "scratch", num_blocks=4)
        for executor in (InProcessExecutor(), DaskExecutor(cluster_client))
    )
    assert np.array_equal(there(v), here(v))
    assert np.array_equal(there.exact(v), here.exact(v))
    assert not list((tmp_path / "scratch").iterdir())
