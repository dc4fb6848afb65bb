"""Products with kernels, fused and in tasks, and the two numbers of a solution, against dense ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.dataset import ingest
from dkrr.engine.tasks import DaskExecutor, InProcessExecutor
from dkrr.errors import DamagedChunkError, DataError, NumericalError
from dkrr.kernels import Kernel, make_kernel, pairwise
from dkrr.linalg.matmul import OperatorProduct, residual_norms, sampled_row_sums
from dkrr.linalg.operators import BlockColumns
from dkrr.linalg.products import kernel_product
from dkrr.linalg.workspace import Workspace
from dkrr.tiles import TileGrid
from tests.faults import DAMAGES, Twice
from tests.laws import check_products
from tests.linalg.helpers import Apart, dense, gram_of, operator, rows
from tests.reference import reference_kernel


def matern(nu: float, length_scale: Any = 1.0) -> Kernel:
    return make_kernel("matern", kernel_params={"nu": nu, "length_scale": length_scale})


@pytest.fixture
def always_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise, "MIN_COLUMNS", 1)


def relative(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.usefixtures("always_compiled")
@pytest.mark.parametrize("name", ["rbf", "laplacian", "linear"])
@pytest.mark.parametrize("d", [1, 2, 63, 64, 65, 200])
def test_any_number_of_features(name: str, d: int) -> None:
    rng = np.random.default_rng(0)
    check_products(make_kernel(name), rng.standard_normal((30, d)), rng.standard_normal((80, d)), 1, 1, rng)


@pytest.mark.parametrize("shift", [0.0, 100.0])
@pytest.mark.parametrize(("precision", "bar"), [("float64", 1e-13), ("float32", 1e-6)])
@pytest.mark.parametrize("t", [1, 3])
def test_error_of_the_norm_also_far_from_the_origin(shift: float, precision: Any, bar: float, t: int) -> None:
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((3000, 10))
    v = rng.standard_normal((3000, t))
    for kernel in (make_kernel("rbf", gamma=0.05), matern(0.5), matern(1.5), matern(2.5), make_kernel("laplacian")):
        kernel = kernel.resolve(10)
        moved = rows + shift
        exact = reference_kernel(kernel.to_dict(), moved[:500], moved) @ v
        centred = moved - moved.mean(axis=0)
        out = np.zeros((500, t))
        kernel_product(kernel, centred[:500], centred, v, out, precision=precision)
        assert relative(out, exact) < bar, kernel
        out = np.zeros((3000, t))
        kernel_product(kernel, centred, centred, v, out, same=True, precision=precision)
        assert relative(out[:500], exact) < bar, kernel


@pytest.mark.usefixtures("always_compiled")
@pytest.mark.parametrize("name", ["rbf", "matern", "poly", "laplacian"])
def test_a_row_has_the_same_bits_whatever_its_neighbours(name: str) -> None:
    rng = np.random.default_rng(4)
    a, b, v = rng.standard_normal((301, 6)), rng.standard_normal((700, 6)), rng.standard_normal((700, 3))
    kernel = make_kernel(name).resolve(6)
    whole = np.zeros((301, 3))
    kernel_product(kernel, a, b, v, whole)
    for cuts in ([1, 2, 5, 130], [64, 131], [299]):
        for part, expected in zip(np.split(a, cuts), np.split(whole, cuts), strict=True):
            out = np.zeros((len(part), 3))
            kernel_product(kernel, part, b, v, out)
            np.testing.assert_array_equal(out, expected)


@pytest.mark.usefixtures("always_compiled")
@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("name", ["rbf", "laplacian", "matern", "poly", "linear"])
def test_what_is_not_finite_is_named(name: str, precision: Any) -> None:
    good, bad = np.ones((20, 3)), np.ones((20, 3))
    bad[4, 1] = np.nan
    kernel, v = make_kernel(name).resolve(3), np.ones((20, 1))
    with pytest.raises(DataError, match=r"B\[4, 1\] = nan"):
        kernel_product(kernel, good, bad, v, np.zeros((20, 1)), precision=precision)
    bad[4, 1] = np.inf
    with pytest.raises(DataError, match=r"A\[4, 1\] = inf"):
        kernel_product(kernel, bad, good, v, np.zeros((20, 1)), precision=precision)
    huge = np.full((20, 3), 1e160)
    with pytest.raises(DataError, match="scale the features"):
        kernel_product(kernel, huge, huge, v, np.zeros((20, 1)), precision=precision)


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
@pytest.mark.parametrize(("n", "num_blocks", "t"), [(1, 0, 1), (7, 3, 5), (250, 0, 300), (250, 4, 1), (700, 2, 3)])
def test_products_in_every_shape(
    tmp_path: Path, kernel: str, n: int, num_blocks: int, t: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through memory and through the store, tasks run twice, blocks of a super-block: the same bits."""
    monkeypatch.setattr("dkrr.linalg.matmul.BLOCK_ROWS", 100)
    if num_blocks and kernel != "given":
        monkeypatch.setattr("dkrr.linalg.matmul.super_blocks", lambda n, *_: TileGrid(n, -(-n // num_blocks)))
    dataset = rows(tmp_path, n=n, weights=n > 1)
    system = operator(dataset, alpha=0.0, kernel="linear" if kernel == "given" else kernel)
    a, v, answers = dense(system, dataset), np.random.default_rng(1).standard_normal((n, t)), []
    if kernel == "given":
        system = replace(system, gram=gram_of(system, tmp_path / "K.zarr"), kernel=None)
    for executor in (InProcessExecutor(), Apart(), Twice()):
        product = product_of(system, executor, tmp_path / "scratch")
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


def test_on_workers_it_has_the_same_bits(tmp_path: Path, cluster_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dkrr.linalg.matmul.super_blocks", lambda n, *_: TileGrid(n, 225))
    system = operator(rows(tmp_path, n=900, weights=True), alpha=0.1)
    v = np.random.default_rng(1).standard_normal((900, 3))
    here, there = (
        product_of(system, executor, tmp_path / "scratch")
        for executor in (InProcessExecutor(), DaskExecutor(cluster_client))
    )
    assert np.array_equal(there(v), here(v))
    assert np.array_equal(there.exact(v), here.exact(v))
    assert not list((tmp_path / "scratch").iterdir())


ALPHAS = np.array([0.3, 0.3, 1e4, 0.0])


def negative_definite(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Its diagonal is negative, so that |A| is not |K| + alpha I."""
    return -1.0 - a @ b.T


@pytest.mark.parametrize("form", ["rbf", "linear", "sigmoid", "negative", "given", "given, indefinite"])
@pytest.mark.parametrize("bordered", [False, True])
def test_both_numbers(tmp_path: Path, form: str, bordered: bool) -> None:
    dataset = rows(tmp_path, weights=True)
    system = operator(dataset, alpha=0.0, kernel=form if form in ("rbf", "sigmoid") else "linear")
    if form in ("negative", "given, indefinite"):
        kernel = make_kernel(negative_definite).resolve(4)
        system = replace(system, kernel=kernel, rows=replace(system.rows, center=None))
    k = dense(system, dataset)
    if form.startswith("given"):
        system = replace(system, gram=gram_of(system, tmp_path / "K.zarr"), kernel=None)
    rng = np.random.default_rng(0)
    rhs, u = rng.standard_normal((250, 4)), rng.standard_normal((250, 4))
    u[:, 1] *= 1e-6
    s = system.normal()
    if bordered:
        u[:, 0] -= s * (s @ u[:, 0]) / (s @ s)
    blocks = (BlockColumns.create(str(tmp_path / "solve"), name, system.grid, 4, "float64") for name in ("rhs", "u"))
    work = Workspace(store="", executor=InProcessExecutor())
    right, answer = (part.fill(values) for part, values in zip(blocks, (rhs, u), strict=True))
    found = residual_norms(system, right, answer, work, "", alpha=ALPHAS, normal=s if bordered else None)
    for column, alpha in enumerate(ALPHAS):
        a, y, x = k + alpha * np.eye(250), rhs[:, column], u[:, column]
        b = s @ (y - a @ x) / (s @ s) if bordered else 0.0
        r = y - a @ x - b * s
        backward = np.abs(r).max() / (np.abs(a).sum(axis=1).max() * np.abs(x).max() + np.abs(y - b * s).max())
        if bordered:
            backward = max(backward, abs(s @ x) / (s.sum() * np.abs(x).max()))
            assert found.intercept[column] == pytest.approx(b, rel=1e-10)
        assert found.relative_residual[column] == pytest.approx(np.linalg.norm(r) / np.linalg.norm(y), rel=1e-10)
        assert found.backward_error[column] == pytest.approx(backward, rel=1e-10)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("form", ["rbf", "poly", "sigmoid"])
def test_sums_of_some_rows_bound_the_norm_from_below(tmp_path: Path, form: str, weights: bool) -> None:
    n, rng = 1500, np.random.default_rng(3)
    x = rng.standard_normal((n, 4))
    x[1001] *= 30.0  # one row of an unbounded kernel is the norm
    weight = rng.uniform(0.5, 2.0, n) if weights else None
    dataset = ingest(x, tmp_path / "far.zarr", y=x[:, 0], sample_weight=weight)
    system = operator(dataset, alpha=0.3, kernel=form)
    norm = np.abs(dense(system, dataset) - 0.3 * np.eye(n)).sum(axis=1).max()
    found = sampled_row_sums(system)
    assert len(found) <= 256
    assert norm / 2 <= found.max() <= norm * (1 + 1e-12)
