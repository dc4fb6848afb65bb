"""Standard deviations and intervals of estimators and saved models, against Gaussian processes and brute force."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF

import dkrr
from dkrr.errors import DataError, NumericalError, ParameterError, StoreError
from tests.reference import reference_kernel

N, D = 150, 3
ALPHA = 0.02
PATHS: dict[str, dict[str, Any]] = {"in memory": {}, "tiles": {"tile_size": 64, "solver": "cholesky"}}


def data(n: int = N, t: int = 0, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, targets (n,) or (n, t), and 60 further rows; far from the origin, so that centring counts."""
    rng = np.random.default_rng(seed)
    x, z = 5 + rng.standard_normal((n, D)), 5 + rng.standard_normal((60, D))
    y = np.stack([np.sin(x[:, 0] * (k + 1)) + 0.1 * rng.standard_normal(n) for k in range(max(1, t))], axis=1)
    return x, y if t else y[:, 0], z


def tiled_options(folder: Path, path: str) -> dict[str, Any]:
    return PATHS[path] | ({"store": folder / "store", "precision": "float64"} if path == "tiles" else {})


def brute_force_std(
    x: np.ndarray, y: np.ndarray, z: np.ndarray, weight: np.ndarray, alpha: np.ndarray, intercept: bool
) -> np.ndarray:
    """From the process with noise alpha / w on the rows of positive weight, an intercept of (almost) flat prior."""
    seen = weight > 0
    kernel = {"kernel": "rbf", "gamma": 0.5}
    columns = []
    for target, ridge in zip(y[seen].T, alpha, strict=True):
        covariance = reference_kernel(kernel, x[seen], x[seen]) + np.diag(ridge / weight[seen])
        inverse = np.linalg.inv(covariance)
        cross = reference_kernel(kernel, x[seen], z)
        variance = 1 - np.einsum("im,ij,jm->m", cross, inverse, cross)
        if intercept:
            ones = np.ones(seen.sum())
            variance += (1 - ones @ inverse @ cross) ** 2 / (ones @ inverse @ ones)
            inverse = inverse - np.outer(inverse @ ones, ones @ inverse) / (ones @ inverse @ ones)
        columns.append(np.sqrt(target @ inverse @ target / (seen.sum() - intercept) * variance))
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("intercept", [False, True])
def test_std_with_weights_intercept_and_an_alpha_a_target(tmp_path: Path, intercept: bool, path: str) -> None:
    x, y, z = data(t=3)
    weight = np.where(np.arange(N) % 7, np.random.default_rng(1).uniform(0.2, 2, N), 0.0)
    alpha = np.array([0.02, 0.5, 0.02])
    options = tiled_options(tmp_path, path)
    model = dkrr.KernelRidge(alpha=alpha, kernel="rbf", gamma=0.5, fit_intercept=intercept, **options)
    model.fit(x, y, sample_weight=weight)
    found = model.predict(z, return_std=True)[1]
    expected = brute_force_std(x, y, z, weight, alpha, intercept)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert len(model._model.variance_systems) == 2
    # a saved model knows the same, its weights included
    model.save(tmp_path / "model.zarr")
    again = dkrr.load_model(tmp_path / "model.zarr")
    np.testing.assert_allclose(again.predict_std(z), found, rtol=1e-12)
    noise = again.predict_std(z, noise=True) ** 2 - found**2
    np.testing.assert_allclose(noise, np.tile(again.sigma2 * alpha, (60, 1)), rtol=1e-9)


def test_a_standard_deviation_scales_with_the_targets_or_is_refused() -> None:
    rng = np.random.default_rng(2)
    x = rng.random((60, 3))
    y = np.sin(4 * x[:, 0]) + x[:, 1]
    usual = dkrr.KernelRidge(0.3).fit(x, y)
    wanted = usual.predict(x[:3], return_std=True)[1]
    other = dkrr.KernelRidge(0.3e120).fit(x * 1e60, y / 1e60)  # sigma2 is 1e-240, the variance of f over sigma2 1e120
    np.testing.assert_allclose(other.predict(x[:3] * 1e60, return_std=True)[1], wanted / 1e60, rtol=1e-10)
    for size, targets in ((1e70, 1e-100), (1e-90, 1e100)):  # a sigma2 beyond float64
        est = dkrr.KernelRidge(0.3 * size**2).fit(size * x, targets * y)
        for ask in (lambda: est.predict(size * x, return_std=True), lambda: est.predict_interval(x, method="gaussian")):  # noqa: B023
            with pytest.raises(NumericalError, match="sigma2 of target 0"):
                ask()
        known = usual.predict(x[:2], return_std=True, sigma2=1.0)[1]
        np.testing.assert_allclose(est.predict(size * x[:2], return_std=True, sigma2=1.0)[1], known * size, rtol=1e-10)


def test_std_refuses_what_has_none(tmp_path: Path) -> None:
    x, y, z = data()
    fit = partial(dkrr.KernelRidge, alpha=ALPHA, kernel="rbf", gamma=0.5)
    model, centres = fit().fit(x, y), fit(solver="nystrom", solver_params={"num_centers": 20}).fit(x, y)
    np.save(tmp_path / "z.npy", z)
    np.testing.assert_allclose(
        model.predict(str(tmp_path / "z.npy"), return_std=True)[1], model.predict(z, return_std=True)[1], rtol=1e-12
    )
    gram = dkrr.KernelRidge(kernel="precomputed").fit(reference_kernel({"kernel": "rbf", "gamma": 0.5}, x, x), y)
    for asked, rows, options, message in (
        (model, da.from_array(z), {}, "standard deviations of a dask array"),
        (model, np.where(z > 6, np.nan, z), {}, "NaN"),
        (model, z, {"sigma2": [1.0, -2.0]}, "sigma2 is"),
        (gram, np.zeros((2, N)), {}, "precomputed matrix has no standard deviation"),
        (centres, z, {}, "solver 'nystrom'"),
    ):
        with pytest.raises((ParameterError, DataError), match=message):
            asked.predict(rows, return_std=True, **options)
    lower, upper = centres.predict_interval(z)
    assert (lower < upper).all()
    with pytest.raises(ParameterError, match=r"no normalised residuals|solver 'nystrom'"):
        centres.predict_interval(z, 0.9, "normalised")


# --- factors of more rows than are factorised in memory: here any -----------------------------------------------------


def stored(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """A fit that leaves its factor, further rows, and their standard deviations."""
    monkeypatch.setattr("dkrr.models.model.MAX_DENSE_ROWS", 10)
    x, y, z = data()
    defaults = {"solver": "cholesky", "precision": "float64", "tile_size": 64, "store": folder / "store"}
    model = dkrr.KernelRidge(**({"alpha": ALPHA, "kernel": "rbf", "gamma": 0.5} | defaults | options)).fit(x, y)
    process = GaussianProcessRegressor(RBF(1.0), alpha=ALPHA, optimizer=None).fit(x, y)
    return model, z, process.predict(z, return_std=True)[1]


def test_the_factor_of_the_fit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, z, expected = stored(tmp_path, monkeypatch)
    np.testing.assert_allclose(model.predict(z, return_std=True, sigma2=1.0)[1], expected, atol=1e-10)
    assert len(list((tmp_path / "store" / "factors").glob("*.zarr"))) == 1
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(again.predict(z, return_std=True, sigma2=1.0)[1], expected, atol=1e-10)
    next((tmp_path / "store" / "factors").glob("*.zarr/c/2/0")).unlink()
    with pytest.raises(StoreError, match="is not whole: 1 of 6 tiles are missing"):
        pickle.loads(pickle.dumps(model)).predict(z, return_std=True)


@pytest.mark.parametrize("options", [{"store": None}, {"solver": "cg", "precision": "auto"}, {"precision": "float32"}])
def test_without_a_float64_factor_the_error_names_the_cost(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, z, _ = stored(tmp_path, monkeypatch, **options)
    with pytest.raises(StoreError, match=r"needs a float64 Cholesky factor") as error:
        model.predict(z, return_std=True)
    assert "1.1e+06 flops" in error.value.hint
    assert "store=" in error.value.hint
    assert model.predict(z).shape == (60,)


def test_after_mixed_the_factor_is_made_once_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, z, expected = stored(tmp_path, monkeypatch, precision="mixed")
    with caplog.at_level("INFO", logger="dkrr.tiled"):
        found = model.predict(z, return_std=True, sigma2=1.0)[1]
        np.testing.assert_array_equal(model.predict(z, return_std=True, sigma2=1.0)[1], found)
    np.testing.assert_allclose(found, expected, atol=1e-10)
    said = "a standard deviation needs a float64 factor of 150 rows, which this fit has not"
    assert [record.message for record in caplog.records] == [said]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [{}, {"fit_intercept": True}])
def test_intervals_are_those_of_n_refits(tmp_path: Path, path: str, options: dict[str, Any]) -> None:
    n = 60
    x, y, z = data(n, t=2)
    weight = np.where(np.arange(n) % 9, np.random.default_rng(3).uniform(0.5, 2, n), 0.0)
    parameters: dict[str, Any] = {"alpha": 0.1, "kernel": "rbf", "gamma": 0.5, **options}
    model = dkrr.KernelRidge(**parameters, **tiled_options(tmp_path, path)).fit(x, y, sample_weight=weight)
    errors, ratios = [], []
    for i in np.flatnonzero(weight):
        keep = np.arange(n) != i
        without = dkrr.KernelRidge(**parameters).fit(x[keep], y[keep], sample_weight=weight[keep])
        value, deviation = without.predict(x[i : i + 1], return_std=True, sigma2=1.0)
        errors.append(np.abs(y[i] - value[0]))
        ratios.append(errors[-1] / np.sqrt(deviation[0] ** 2 + 0.1 / weight[i]))
    rank = int(np.ceil((len(errors) + 1) * 0.9)) - 1
    values, deviation = model.predict(z, return_std=True, sigma2=1.0, noise=True)
    lower, upper = model.predict_interval(z, 0.9)
    np.testing.assert_allclose(lower, values - np.sort(errors, axis=0)[rank], rtol=1e-7)
    np.testing.assert_allclose(upper, values + np.sort(errors, axis=0)[rank], rtol=1e-7)
    # of constant width, also where variances are known
    found = model._model.interval(values, 0.9, "jackknife", deviation**2)
    np.testing.assert_allclose(found, (lower, upper), rtol=1e-12)
    lower, upper = model.predict_interval(z, 0.9, "normalised")
    np.testing.assert_allclose((upper - lower) / 2, np.sort(ratios, axis=0)[rank] * deviation, rtol=1e-7)
    # a saved model gives the same without its factor
    model.save(tmp_path / "model.zarr")
    again = dkrr.load_model(tmp_path / "model.zarr")
    np.testing.assert_allclose(again.predict_interval(z, 0.9), model.predict_interval(z, 0.9), rtol=1e-12)
    np.testing.assert_allclose(again.predict_interval(z, 0.9, "normalised")[0], lower, rtol=1e-9)


def test_intervals_of_few_rows() -> None:
    x, y, z = data(12)
    model = dkrr.KernelRidge(alpha=ALPHA, kernel="rbf").fit(x, y)
    for coverage, message in ((0.95, r"at most 0\.923"), (90, "between 0 and 1")):
        with pytest.raises(ParameterError, match=message):
            model.predict_interval(z, coverage)
    lowest, low = (np.subtract(*model.predict_interval(z, coverage)) for coverage in (1e-12, 1e-3))
    np.testing.assert_array_equal(lowest, low)
    with pytest.raises(ParameterError, match="no leave-one-out quantiles"):
        dkrr.KernelRidge(kernel="rbf").fit(x, y)._model.predict_interval(z)


@pytest.mark.parametrize("options", [{}, {"tile_size": 64}, {"solver": "cg"}], ids=str)
@pytest.mark.parametrize("fill", [-9999.0, 1e20, 9.96921e36], ids=str)
def test_targets_of_rows_without_weight_say_nothing_of_the_scale(fill: float, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((150, 2))
    y, w = 3 + np.sin(x[:, 0]) + 0.1 * rng.standard_normal(150), np.arange(150) % 10 > 0
    est = dkrr.KernelRidge(0.1, **{"kernel": "rbf", "fit_intercept": True, **options})
    expected = est.fit(x, np.where(w, y, 0.0), w).predict(x[:5], return_std=True)
    found = est.fit(x, np.where(w, y, fill), w).predict(x[:5], return_std=True)
    np.testing.assert_allclose(found, expected, rtol=1e-7)
    # those of next to no weight are rows that count, and say next to nothing
    found = est.fit(x, np.where(w, y, 1e20), np.where(w, 1.0, 1e-60)).predict(x[:5], return_std=True)
    np.testing.assert_allclose(found[1], np.array(expected[1]) * np.sqrt((w.sum() - 1) / 149), rtol=1e-7)
