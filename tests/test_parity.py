"""The tiled path gives what scikit-learn's KernelRidge gives, and what must not matter does not."""

from __future__ import annotations

import gzip
import time
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from sklearn.gaussian_process.kernels import Matern
from sklearn.kernel_ridge import KernelRidge as DenseKernelRidge
from sklearn.linear_model import Ridge
from sklearn.metrics.pairwise import pairwise_kernels

import dkrr.models.estimator
from dkrr import KernelRidge, ingest, make_kernel
from dkrr.errors import NotPositiveDefiniteError

N, TILE = 403, 67  # seven tiles a side, the last one of one row
RNG = np.random.default_rng(7)
X = RNG.random((N, 6))  # not negative, so that chi2 takes it
Y = np.stack([np.sin(3 * X[:, 0]), X[:, 1] * X[:, 2], RNG.standard_normal(N)], axis=1)
WEIGHT = RNG.uniform(0.1, 2, N) * (np.arange(N) % 6 > 0)
Z = RNG.random((91, 6))
RTOL = 1e-8

KERNELS: dict[str, dict[str, Any]] = {
    "linear": {},
    "poly": {"gamma": 0.7, "degree": 3, "coef0": 1.3},
    "rbf": {"gamma": 0.9},
    "rbf, gamma by default": {},
    "laplacian": {"gamma": 0.4},
    "cosine": {},
    "chi2": {"gamma": 0.8},
}


def assert_same(actual: np.ndarray, expected: np.ndarray, rtol: float = RTOL) -> None:
    """Agreement per target, relative to its 2-norm."""
    assert actual.shape == expected.shape
    difference = np.linalg.norm(actual - expected, axis=0)
    assert np.all(difference <= rtol * np.linalg.norm(expected, axis=0)), difference


@pytest.mark.whole
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("name", KERNELS)
def test_parity_with_scikit_learn(name: str, weighted: bool) -> None:
    parameters = {"kernel": name.partition(",")[0], "alpha": 0.05, **KERNELS[name]}
    weight = WEIGHT if weighted else None
    ours = KernelRidge(tile_size=TILE, **parameters).fit(X, Y, sample_weight=weight)
    theirs = DenseKernelRidge(**parameters).fit(X, Y, sample_weight=weight)
    assert_same(ours.dual_coef_, theirs.dual_coef_)
    assert_same(ours.predict(Z), theirs.predict(Z))
    assert max(ours.solution_.backward_error) <= 30 * N * np.finfo(float).eps
    if weighted:
        assert np.all(ours.dual_coef_[WEIGHT == 0] == 0)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_parity_of_a_precomputed_matrix(weighted: bool) -> None:
    weight = WEIGHT if weighted else None
    K, K_test = pairwise_kernels(X, metric="rbf"), pairwise_kernels(Z, X, metric="rbf")
    ours = KernelRidge(kernel="precomputed", alpha=0.05, tile_size=TILE).fit(K, Y, sample_weight=weight)
    theirs = DenseKernelRidge(kernel="precomputed", alpha=0.05).fit(K, Y, sample_weight=weight)
    assert_same(ours.dual_coef_, theirs.dual_coef_)
    assert_same(ours.predict(K_test), theirs.predict(K_test))


def test_parity_with_a_ridge_per_target() -> None:
    alpha = np.array([0.01, 0.5, 0.01])
    ours = KernelRidge(kernel="laplacian", alpha=alpha, tile_size=TILE).fit(X, Y)
    theirs = DenseKernelRidge(kernel="laplacian", alpha=alpha).fit(X, Y)
    assert_same(ours.dual_coef_, theirs.dual_coef_)


def test_an_indefinite_kernel_agrees_in_blocks_and_says_so_in_a_fit() -> None:
    kernel, parameters = "sigmoid", {"gamma": 2.0, "coef0": -1.0}
    block = make_kernel(kernel, **parameters)(Z, X)
    np.testing.assert_allclose(block, pairwise_kernels(Z, X, metric=kernel, **parameters), rtol=1e-12, atol=1e-12)
    for tile_size in ("auto", TILE):
        with pytest.raises(NotPositiveDefiniteError, match=r"not positive definite at row \d+ .*indefinite") as error:
            KernelRidge(kernel=kernel, alpha=1e-3, tile_size=tile_size, **parameters).fit(X, Y)
        assert error.value.pivot < 0
        assert error.value.suggested_alpha > 1e-3
    # a ridge beyond the most negative eigenvalue makes the same kernel usable
    gram = pairwise_kernels(X, metric=kernel, **parameters)
    alpha = 2 * float(-np.linalg.eigvalsh(gram)[0])
    ours = KernelRidge(kernel=kernel, alpha=alpha, tile_size=TILE, **parameters).fit(X, Y)
    np.testing.assert_allclose(gram @ ours.dual_coef_ + alpha * ours.dual_coef_, Y, atol=1e-9)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("alpha", [1e-3, 1.0])
def test_linear_is_primal_ridge(alpha: float, weighted: bool) -> None:
    weight = WEIGHT if weighted else None
    dual = KernelRidge(kernel="linear", alpha=alpha, tile_size=TILE).fit(X, Y, sample_weight=weight)
    primal = Ridge(alpha=alpha, fit_intercept=False, solver="cholesky").fit(X, Y, sample_weight=weight)
    assert_same(X.T @ dual.dual_coef_, primal.coef_.T)
    assert_same(dual.predict(Z), primal.predict(Z))


# --- what must not matter --------------------------------------------------------------------------------------------

REFERENCE = {"kernel": "rbf", "gamma": 0.9, "alpha": 0.05}


@pytest.fixture(scope="module")
def reference() -> np.ndarray:
    """Coefficients from one dense solve."""
    return KernelRidge(**REFERENCE).fit(X, Y, sample_weight=WEIGHT).dual_coef_


@pytest.mark.parametrize("tile_size", [1, 40, 201, 202, 402, 403, 404, 1000])
def test_tile_size_does_not_matter(tile_size: int, reference: np.ndarray) -> None:
    rows = slice(0, 15) if tile_size == 1 else slice(None)
    expected = reference
    if tile_size == 1:
        expected = KernelRidge(**REFERENCE).fit(X[rows], Y[rows], sample_weight=WEIGHT[rows]).dual_coef_
    fit = KernelRidge(**REFERENCE, tile_size=tile_size).fit(X[rows], Y[rows], sample_weight=WEIGHT[rows])
    assert_same(fit.dual_coef_, expected, 1e-10)


@pytest.mark.parametrize("chunks", [((403,), (6,)), (50, 6), (1000, 1), ((1, 400, 2), (2, 4))])
def test_chunks_do_not_matter(chunks: Any, reference: np.ndarray, tmp_path: Path) -> None:
    source = da.from_array(X, chunks=chunks)
    fit = KernelRidge(**REFERENCE, tile_size=TILE).fit(source, Y, sample_weight=WEIGHT)
    assert_same(fit.dual_coef_, reference, 1e-10)
    dataset = ingest(source, tmp_path / "rows.zarr", y=Y, sample_weight=WEIGHT, rows_per_chunk=37)
    again = KernelRidge(**REFERENCE, tile_size=TILE).fit(dataset)
    assert np.array_equal(again.dual_coef_, fit.dual_coef_)


@pytest.mark.parametrize(
    "change",
    [np.asfortranarray, lambda a: a.astype(">f8"), lambda a: np.repeat(a, 2, axis=1)[:, ::2], lambda a: a[::-1][::-1]],
    ids=["Fortran", "big-endian", "every other column", "negative strides"],
)
def test_memory_order_does_not_matter(change: Any, tmp_path: Path) -> None:
    plain = KernelRidge(**REFERENCE, tile_size=TILE).fit(X, Y)
    np.save(tmp_path / "X.npy", change(X))
    read_only = change(X).copy(order="K")
    read_only.flags.writeable = False
    for form in (change(X), str(tmp_path / "X.npy"), np.load(tmp_path / "X.npy", mmap_mode="r"), read_only):
        fit = KernelRidge(**REFERENCE, tile_size=TILE).fit(form, change(Y) if isinstance(form, np.ndarray) else Y)
        assert np.array_equal(fit.dual_coef_, plain.dual_coef_)
        assert np.array_equal(fit.predict(change(Z)), plain.predict(Z))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint8", "bool", "object", "longdouble"])
def test_dtype_does_not_matter(dtype: str) -> None:
    values = (X * 10).round() if dtype != "bool" else X > 0.5
    exact = KernelRidge(**REFERENCE, tile_size=TILE).fit(values.astype(np.float64), Y)
    for tile_size in ("auto", TILE):
        fit = KernelRidge(**REFERENCE, tile_size=tile_size).fit(values.astype(dtype), Y)
        assert_same(fit.dual_coef_, exact.dual_coef_, 1e-10)
        assert_same(fit.predict(values.astype(dtype)), exact.predict(values.astype(np.float64)), 1e-10)
    lazy = KernelRidge(**REFERENCE, tile_size=TILE).fit(da.from_array(values.astype(dtype), chunks=100), Y)
    assert np.array_equal(lazy.dual_coef_, exact.dual_coef_)


def test_row_order_does_not_matter(reference: np.ndarray) -> None:
    order = np.random.default_rng(3).permutation(N)
    fit = KernelRidge(**REFERENCE, tile_size=TILE).fit(X[order], Y[order], sample_weight=WEIGHT[order])
    assert_same(fit.dual_coef_, reference[order], 1e-10)


@pytest.fixture(scope="module")
def single_worker() -> Any:
    """A client of one worker process of two threads."""
    from distributed import Client

    from dkrr.engine.cluster import local_cluster

    with (
        local_cluster(workers=1, threads_per_worker=2, memory_limit="1GiB") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def test_number_of_workers_does_not_matter(cluster_client: Any, single_worker: Any, reference: np.ndarray) -> None:
    coefficients = []
    for client in (cluster_client, single_worker):
        with client.as_current():
            fit = KernelRidge(**REFERENCE, tile_size=TILE).fit(X, Y, sample_weight=WEIGHT)
        coefficients.append(fit.dual_coef_)
        assert_same(fit.dual_coef_, reference, 1e-10)
    # the order of every sum is fixed, so one worker and two give the same bits
    assert np.array_equal(*coefficients)


def test_translation_does_not_matter() -> None:
    grid = np.round(X * 256) / 256  # exact far from the origin, too
    near = KernelRidge(kernel="rbf", gamma=0.9, tile_size=TILE).fit(grid, Y)
    far = KernelRidge(kernel="rbf", gamma=0.9, tile_size=TILE).fit(grid + 2.0**20, Y)
    assert_same(far.dual_coef_, near.dual_coef_, 1e-9)
    assert_same(far.predict(Z + 2.0**20), near.predict(Z + 2.0**20 - 2.0**20), 1e-6)


# --- real data -------------------------------------------------------------------------------------------------------

REAL = ("pol", "elevators", "bike")


def whitened(folder: Path, num_train: int | None = None, num_test: int | None = None) -> tuple[np.ndarray, ...]:
    """Training and test rows of split 0, whitened with the training rows' statistics."""
    with gzip.open(folder / "data.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",")
    with gzip.open(folder / "test_mask.csv.gz", "rt") as file:
        held_out = np.loadtxt(file, delimiter=",", usecols=0) == 1
    train, test = table[~held_out][:num_train], table[held_out][:num_test]
    std = train.std(axis=0)
    train, test = ((part - train.mean(axis=0)) / np.where(std > 0, std, 1) for part in (train, test))
    return train[:, :-1], train[:, -1:], test[:, :-1], test[:, -1:]


def compare_on_real_data(rows: tuple[np.ndarray, ...], kernel: str, tile_size: Any) -> dict[str, float]:
    """Both sides on the same rows; the largest relative differences, times in seconds, and the test RMSE."""
    train, y, test, truth = rows
    alpha = 0.1
    if kernel == "rbf":
        parameters: dict[str, Any] = {"kernel": "rbf", "gamma": 0.5 / train.shape[1]}
        theirs, K, K_test = DenseKernelRidge(alpha=alpha, **parameters), train, test
    else:
        parameters = {"kernel": "matern", "kernel_params": {"nu": 1.5, "length_scale": 3.0}}
        matern = Matern(nu=1.5, length_scale=3.0)
        theirs, K, K_test = DenseKernelRidge(alpha=alpha, kernel="precomputed"), matern(train), matern(test, train)
    begin = time.perf_counter()
    theirs.fit(K, y)
    expected = theirs.predict(K_test)
    middle = time.perf_counter()
    ours = KernelRidge(alpha=alpha, tile_size=tile_size, **parameters).fit(train, y)
    predicted = ours.predict(test)
    end = time.perf_counter()
    return {
        "dual_coef": float(np.linalg.norm(ours.dual_coef_ - theirs.dual_coef_) / np.linalg.norm(theirs.dual_coef_)),
        "predict": float(np.linalg.norm(predicted - expected) / np.linalg.norm(expected)),
        "scikit-learn": middle - begin,
        "dkrr": end - middle,
        "rmse": float(np.sqrt(np.mean((predicted - truth) ** 2))),
    }


@pytest.mark.parametrize("kernel", ["rbf", "matern"])
@pytest.mark.parametrize("name", REAL)
def test_parity_on_real_data(name: str, kernel: str, data_folder: Path) -> None:
    result = compare_on_real_data(whitened(data_folder / name, 1500, 300), kernel, 271)
    assert result["dual_coef"] < RTOL, result
    assert result["predict"] < RTOL, result
    assert result["rmse"] < 1, result  # of 1, the standard deviation


@pytest.mark.measure
@pytest.mark.timeout(3600)
def test_measure_parity_real_data(data_folder: Path) -> None:
    print("\nset        kernel  rows    dual_coef  predict    scikit-learn s  dkrr s  rmse")
    worst = 0.0
    for name in REAL:
        rows = whitened(data_folder / name)
        for kernel in ("rbf", "matern"):
            result = compare_on_real_data(rows, kernel, "auto")
            worst = max(worst, result["dual_coef"], result["predict"])
            print(
                f"{name:<10} {kernel:<7} {len(rows[0]):>6,}  {result['dual_coef']:.1e}    {result['predict']:.1e}    "
                f"{result['scikit-learn']:>14.1f}  {result['dkrr']:>6.1f}  {result['rmse']:.3f}"
            )
    assert worst < RTOL
    assert len(rows[0]) > dkrr.models.estimator.MAX_IN_PROCESS_ROWS  # these fits ran on tiles
