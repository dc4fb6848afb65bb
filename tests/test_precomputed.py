"""kernel="precomputed": the matrix as NumPy, dask, Zarr or a file, on tiles and in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from sklearn.kernel_ridge import KernelRidge as DenseKernelRidge
from sklearn.metrics.pairwise import rbf_kernel

from dkrr import KernelRidge
from dkrr.errors import DataError

N, TILE = 250, 64
RNG = np.random.default_rng(1)
X = RNG.standard_normal((N, 4))
Y = np.stack([np.sin(X[:, 0]), X[:, 1]], axis=1)
WEIGHT = RNG.uniform(0, 2, N) * (np.arange(N) % 4 > 0)
K = rbf_kernel(X)
K_TEST = rbf_kernel(RNG.standard_normal((31, 4)), X)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path) -> Iterator[Path]:
    """Dask's temporary directory; no test leaves anything there."""
    with dask.config.set({"temporary-directory": str(tmp_path / "temporary")}):
        yield tmp_path / "temporary"
    assert not (tmp_path / "temporary").exists() or list((tmp_path / "temporary").iterdir()) == []


def on_disk(folder: Path, matrix: np.ndarray) -> Path:
    np.save(folder / "K.npy", matrix)
    return folder / "K.npy"


def as_zarr(folder: Path, matrix: np.ndarray) -> Any:
    return zarr.create_array(str(folder / "K.zarr"), data=matrix, chunks=(90, 40), overwrite=True)


FORMS: dict[str, Any] = {
    "array": lambda folder, K: K,
    "Fortran": lambda folder, K: np.asfortranarray(K),
    "dask": lambda folder, K: da.from_array(K, chunks=(70, 101)),
    "float32 dask": lambda folder, K: da.from_array(K, chunks=50).astype(np.float32),
    "zarr": as_zarr,
    "zarr path": lambda folder, K: as_zarr(folder, K) and folder / "K.zarr",
    ".npy": on_disk,
    "memory map": lambda folder, K: np.load(on_disk(folder, K), mmap_mode="r"),
}


@pytest.mark.parametrize("tile_size", ["auto", TILE])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_the_matrix(name: str, tile_size: Any, tmp_path: Path) -> None:
    expected = DenseKernelRidge(kernel="precomputed", alpha=0.1).fit(K, Y, sample_weight=WEIGHT)
    rtol = 1e-5 if "float32" in name else 1e-9
    fit = KernelRidge(kernel="precomputed", alpha=0.1, tile_size=tile_size)
    fit.fit(FORMS[name](tmp_path, K), Y, sample_weight=WEIGHT)
    assert np.linalg.norm(fit.dual_coef_ - expected.dual_coef_) < rtol * np.linalg.norm(expected.dual_coef_)
    assert not fit.dual_coef_[WEIGHT == 0].any()
    assert fit.solution_.backward_error[0] < 1e-12
    for rows in (K_TEST, da.from_array(K_TEST, chunks=(10, 100))):
        predicted = fit.predict(rows)
        assert type(predicted) is type(rows)
        np.testing.assert_allclose(np.asarray(predicted), expected.predict(K_TEST), rtol=100 * rtol, atol=rtol)


def test_a_kept_store_holds_a_factor_and_no_copy_of_the_matrix(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for _ in range(2):
        KernelRidge(kernel="precomputed", alpha=0.1, tile_size=TILE, store=store).fit(da.from_array(K, chunks=99), Y)
    assert [len(list((store / name).glob("*.zarr"))) for name in ("factors", "grams", "rows")] == [1, 0, 0]
    # another matrix is another factor, whatever its row numbers
    KernelRidge(kernel="precomputed", alpha=0.1, tile_size=TILE, store=store).fit(rbf_kernel(X, gamma=0.1), Y)
    assert len(list((store / "factors").glob("*.zarr"))) == 2


def spoiled(place: tuple[int, int], value: float) -> np.ndarray:
    return np.where((np.arange(N)[:, None] == place[0]) & (np.arange(N) == place[1]), value, K)


BAD: dict[str, tuple[np.ndarray, str]] = {
    "not square": (K[:, :-1], r"\(250, 249\)"),
    "NaN below the diagonal": (spoiled((200, 3), np.nan), "row 200, column 3"),
    "infinity above the diagonal": (spoiled((3, 200), np.inf), "row 3, column 200"),
    "not symmetric": (spoiled((240, 70), 0.5), r"entry \(240, 70\) is 0\.5, its mirror image"),
    "not symmetric in the last tile": (spoiled((249, 248), -0.1), r"entry \(249, 248\) is -0\.1"),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", ["array", "dask", "zarr path", ".npy"])
@pytest.mark.parametrize("tile_size", ["auto", TILE])
@pytest.mark.parametrize("case", BAD)
def test_bad_matrices(case: str, tile_size: Any, name: str, tmp_path: Path) -> None:
    matrix, message = BAD[case]
    store = tmp_path / "store"
    for given in ({}, {"store": store}):
        estimator = KernelRidge(kernel="precomputed", tile_size=tile_size, **given)
        with pytest.raises(DataError, match=message) as error:
            estimator.fit(FORMS[name](tmp_path, matrix), Y)
        assert isinstance(error.value, ValueError)
        assert not store.exists()
