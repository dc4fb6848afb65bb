"""OperatorProduct against dense products: every kernel, weighting and shape, and damage to what passes by the store."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.dataset import Dataset, ingest
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import DamagedChunkError, DataError, NumericalError, StoreError
from dkrr.kernels import make_kernel
from dkrr.linalg.gram import build_gram
from dkrr.linalg.matmul import OperatorProduct
from dkrr.linalg.workspace import Workspace
from dkrr.store.chunks import ChunkArray
from dkrr.tiles import TileMatrix
from tests.faults import DAMAGES, FaultyStore, Twice, chunk_files, failing_at, objects_in_memory
from tests.linalg.helpers import dense, operator, rows

__all__ = ["objects_in_memory"]

KERNELS: dict[str, dict[str, Any]] = {
    "rbf": {},
    "matern": {"kernel_params": {"nu": 1.5, "length_scale": 0.75}},
    "laplacian": {},
    "linear": {},
    "poly": {"degree": 3},
    "cosine": {},
    "chi2": {},
}


class Elsewhere:
    """Runs tasks here, and is no ``InProcessExecutor``: vectors and sums pass through the store."""

    num_threads = 2

    def __init__(self, spoil: Callable[[str, tuple[int, ...]], None] = lambda phase, key: None) -> None:
        self.spoil = spoil
        self.computed: list[tuple[int, ...]] = []

    def run(self, phase: str, function: Any, payload: Any, nodes: Any, progress: Any = None) -> Any:
        def spoilt(task: Any, *key: int) -> Any:
            self.spoil(phase, key)
            outcome = function(task, *key)
            if outcome:
                self.computed.append(key)
            return outcome

        return InProcessExecutor().run(phase, spoilt, payload, nodes, progress)


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
    for executor in (InProcessExecutor(), Elsewhere()):
        product = OperatorProduct(system, work(executor), str(tmp_path / "scratch"), num_blocks=3)
        # chi2 and laplacian evaluate an exponential of a sum of rounded terms
        assert_product(product(v), a, v, eps=4e-15)
        multiplied, row_sums = product.with_row_sums(v)
        assert_product(multiplied, a, v, eps=4e-15)
        np.testing.assert_allclose(row_sums, np.abs(a).sum(axis=1), rtol=1e-12)
    if weights:
        assert not product(v)[::7].any()


@pytest.mark.parametrize("num_columns", [1, 5, 300])
@pytest.mark.parametrize(("n", "num_blocks"), [(1, None), (7, 3), (250, None), (250, 4), (1000, 7)])
def test_every_shape(tmp_path: Path, n: int, num_blocks: int | None, num_columns: int) -> None:
    dataset = rows(tmp_path, n=n, weights=n > 1)
    system = operator(dataset, alpha=0.0)
    v = np.random.default_rng(1).standard_normal((n, num_columns))
    answers = []
    for executor in (InProcessExecutor(), Elsewhere(), Twice()):
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
            np.testing.assert_allclose(product.with_row_sums(v)[1], np.abs(a).sum(axis=1), rtol=1e-12)


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


@pytest.mark.parametrize(("n", "b", "num_blocks"), [(1, 64, None), (250, 64, None), (250, 64, 2), (700, 300, 3)])
@pytest.mark.parametrize("weights", [False, True])
def test_a_given_matrix(tmp_path: Path, n: int, b: int, num_blocks: int | None, weights: bool) -> None:
    dataset = rows(tmp_path, n=n, weights=weights and n > 1)
    system = operator(dataset, tile_size=b, alpha=0.0, kernel="linear")
    a = dense(system, dataset)
    gram = TileMatrix.create(str(tmp_path / "K.zarr"), system.grid, dtype="float64")
    build_gram(system, gram, InProcessExecutor())
    system = replace(system, kernel=None, gram=gram)
    v = np.random.default_rng(1).standard_normal((n, 5))
    for executor in (InProcessExecutor(), Elsewhere()):
        product = OperatorProduct(system, work(executor), str(tmp_path / "s"), num_blocks=num_blocks)
        assert_product(product(v), a, v)
        multiplied, row_sums = product.with_row_sums(v)
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
    product = OperatorProduct(stored, work(Elsewhere()), str(tmp_path / "s"), use_gram=True)
    np.testing.assert_allclose(product(v), expected, rtol=1e-12)
    assert path.read_bytes() == whole


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> tuple[Any, np.ndarray, np.ndarray]:
    """An operator of four super-blocks' worth of rows, vectors, and their undisturbed product."""
    system = operator(rows(tmp_path, weights=True))
    v = np.random.default_rng(1).standard_normal((250, 3))
    return system, v, OperatorProduct(system, work(InProcessExecutor()), "", num_blocks=4)(v)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("what", ["v", "result"])
def test_damage_in_the_scratch_is_repaired(
    tmp_path: Path, small: tuple[Any, np.ndarray, np.ndarray], what: str, damage: str
) -> None:
    """To a block of V before it is read, to results before they are added; the numbers are those of an undisturbed run.

    Results are added while tasks run, so the damage comes between two tasks: the first of the order is held back.
    """
    system, v, expected = small
    scratch = tmp_path / "scratch"
    done: list[str] = []

    def spoil(phase: str, key: tuple[int, ...]) -> None:
        for path in chunk_files(scratch):
            if what in path.parts and not done:
                done.append(str(path))
                DAMAGES[damage](path)

    executor = Holding(spoil)
    product = OperatorProduct(system, work(executor), str(scratch), num_blocks=4)
    assert np.array_equal(product(v), expected)
    assert done
    assert not list(scratch.iterdir())


class Holding(Elsewhere):
    """Keeps the driver from adding anything while tasks run."""

    def run(self, phase: str, function: Any, payload: Any, nodes: Any, progress: Any = None) -> Any:
        return super().run(phase, function, payload, nodes)


def test_a_device_that_loses_everything_ends_the_product(
    tmp_path: Path, small: tuple[Any, np.ndarray, np.ndarray]
) -> None:
    system, v, _ = small
    scratch = tmp_path / "scratch"

    def spoil(phase: str, key: tuple[int, ...]) -> None:
        for path in chunk_files(scratch):
            path.unlink()

    product = OperatorProduct(system, work(Elsewhere(spoil)), str(scratch), num_blocks=4)
    with pytest.raises(StoreError, match="again and again"):
        product(v)
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("site", ["chunk.before_read", "chunk.before_write", "chunk.mid_write", "chunk.after_write"])
@pytest.mark.parametrize("action", ["eio", "estale"])
def test_every_access_may_fail_once(
    tmp_path: Path, small: tuple[Any, np.ndarray, np.ndarray], site: str, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a task it is not even noticed. In the driver it ends the product with the system's own error."""
    monkeypatch.setattr("dkrr.engine.tasks.time.sleep", lambda seconds: None)
    system, v, expected = small
    outcomes = set()
    for number in range(1, 200, 3):
        with failing_at(f"{site}:@{number}:{action}") as points:
            try:
                product = OperatorProduct(system, work(Elsewhere()), str(tmp_path / "s"), num_blocks=4)
                assert np.array_equal(product(v), expected)
                outcomes.add("B")
            except OSError:
                outcomes.add("E")
        assert not chunk_files(tmp_path / "s")
        if points.rules[0].visits < number:
            break
    else:
        pytest.fail("the fault never stopped firing")
    assert "B" in outcomes


def test_a_nan_in_a_result_is_never_written(tmp_path: Path, small: tuple[Any, np.ndarray, np.ndarray]) -> None:
    system, v, _ = small
    for executor in (InProcessExecutor(), Elsewhere()):
        product = OperatorProduct(system, work(executor), str(tmp_path / "s"), num_blocks=4)
        with failing_at("multiply.pair.after_compute:@2:nan"), pytest.raises(DataError, match="is not finite"):
            product(v)


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


def test_what_an_earlier_product_left_is_never_used(tmp_path: Path, small: tuple[Any, np.ndarray, np.ndarray]) -> None:
    """Every file of a product, put where the next one and another object's first one would have it under its number."""
    system, v, expected = small
    scratch, kept = tmp_path / "scratch", {}

    def keep(phase: str, key: tuple[int, ...]) -> None:
        kept.update({path.relative_to(scratch): path.read_bytes() for path in chunk_files(scratch)})

    product = OperatorProduct(system, work(Holding(keep)), str(scratch), num_blocks=4)
    product(-2 * v)

    def revive(phase: str, key: tuple[int, ...]) -> None:
        for path, data in kept.items():
            (scratch / path).parent.mkdir(parents=True, exist_ok=True)
            (scratch / path).write_bytes(data)

    product.workspace.executor = Elsewhere(revive)
    assert np.array_equal(product(v), expected)
    other = OperatorProduct(system, work(Elsewhere(revive)), str(scratch), num_blocks=4)
    assert np.array_equal(other(v), expected)
    assert len(kept) >= 4 + 9


def test_a_store_that_is_not_a_folder(small: tuple[Any, np.ndarray, np.ndarray], objects_in_memory: None) -> None:
    system, v, expected = small
    store = FaultyStore()
    product = OperatorProduct(system, work(Elsewhere()), store.address, num_blocks=4)
    assert np.array_equal(product(v), expected)
    assert store.counts["set"] == 4 + 10
    assert not store.contents()


def test_damaged_rows_end_the_product(tmp_path: Path) -> None:
    system = operator(rows(tmp_path))
    (chunk,) = chunk_files(tmp_path / "rows.zarr/X")
    DAMAGES["flipped"](chunk)
    with pytest.raises(DamagedChunkError) as caught:
        OperatorProduct(system, work(InProcessExecutor()), "")(np.ones((250, 1)))
    assert caught.value.path == str(tmp_path / "rows.zarr/X")


# --- progress, sizes, workers -----------------------------------------------------------------------------------------


def test_a_function_kernel(tmp_path: Path) -> None:
    """A foreign function: more super-blocks, the same product."""
    dataset = rows(tmp_path, n=100)
    kernel = make_kernel(sine).resolve(4)
    system = replace(operator(dataset, alpha=0.0), kernel=kernel)
    x = dataset.X.read(0, 100)
    v = np.random.default_rng(1).standard_normal((100, 2))
    product = OperatorProduct(replace(system, rows=replace(system.rows, center=None)), work(InProcessExecutor()), "")
    multiplied, row_sums = product.with_row_sums(v)
    assert_product(multiplied, np.sin(x @ x.T), v)
    np.testing.assert_allclose(row_sums, np.abs(np.sin(x @ x.T)).sum(axis=1), rtol=1e-12)


def sine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of both signs, also on the diagonal."""
    return np.sin(a @ b.T)


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "always"])
def test_results_that_cannot_be_removed_are_added_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasts: bool
) -> None:
    """A file of a partial sum that stays, as on a network file system, does not count twice."""
    dataset = rows(tmp_path, n=300, weights=True)
    system, v = operator(dataset, alpha=0.1, kernel="rbf"), np.random.default_rng(1).standard_normal((300, 3))
    failed: set[Any] = set()
    product = OperatorProduct(system, work(Elsewhere()), str(tmp_path / "scratch"), num_blocks=4)
    expected = product(v)

    def fail(self: ChunkArray, index: Any) -> None:
        if lasts or (self.path, index) not in failed:
            failed.add((self.path, index))
            raise OSError(errno.ESTALE, "stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(ChunkArray, "delete", fail)
        assert np.array_equal(product(v), expected)
    assert len(failed) == 10
    assert not list((tmp_path / "scratch").iterdir())
