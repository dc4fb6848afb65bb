"""The search: what it chooses, that it is the same again, that it continues, and what a budget leaves out.

The marginal likelihood and its gradient against dense formulas and differences; leave-one-out in three ways.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.stats import multivariate_normal

import dkrr.selection.tuning
from dkrr import DataError, Dataset, ParameterError, ingest
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import InterruptedRunError, NotPositiveDefiniteError
from dkrr.selection.choice import FAMILIES, Explained, FoldLoss, TuneResult, TuneSettings, family_kernel, kernel_keys
from dkrr.selection.tuning import draw_subset, tune

N, D = 400, 4
SMALL = TuneSettings(kernels=("rbf", "matern32"), search_rows=(60, 120), rows=240, seed=3)


@pytest.fixture(scope="module")
def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Four features of which one does not matter and one matters most."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((N, D))
    y = np.sin(3 * x[:, 0]) + 0.5 * x[:, 1] + 0.1 * x[:, 2] + 0.1 * rng.standard_normal(N)
    return x, y


@pytest.fixture(scope="module")
def dataset(arrays: tuple[np.ndarray, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    x, y = arrays
    return ingest(x, str(tmp_path_factory.mktemp("data") / "rows.zarr"), y=y)


def search(dataset: Dataset, store: Path, settings: TuneSettings = SMALL, **options: Any) -> TuneResult:
    return tune(dataset, settings=settings, store=str(store), executor=InProcessExecutor(), **options)


@pytest.fixture(scope="module")
def result(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    return search(dataset, tmp_path_factory.mktemp("store"))


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key != "seconds"}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def test_widths_follow_what_matters(result: TuneResult) -> None:
    best = result.best
    assert best.kind == "per_feature"
    assert list(np.argsort(best.widths)) == [0, 1, 2, 3]
    assert best.widths[3] > 20 * best.widths[0]
    assert best.num_rows == 240
    errors = [candidate.loo_rmse for candidate in result.candidates]
    assert errors == sorted(errors)
    assert {candidate.kind for candidate in result.candidates} == {"shared", "per_feature"}
    shared = min(candidate.loo_rmse for candidate in result.candidates if candidate.kind == "shared")
    assert best.loo_rmse < 0.8 * shared
    assert not result.notes


def test_the_same_seed_gives_the_same_bytes(result: TuneResult, dataset: Dataset, tmp_path: Path) -> None:
    again = search(dataset, tmp_path)
    assert json.dumps(without_times(again.to_dict())) == json.dumps(without_times(result.to_dict()))
    other = search(dataset, tmp_path, replace(SMALL, seed=4))
    assert other.best.widths.tolist() != result.best.widths.tolist()


def test_an_interrupted_search_continues(
    result: TuneResult, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    visits = 0

    write_json = dkrr.selection.tuning.write_json

    def stop(folder: str, name: str, found: Any) -> None:
        nonlocal visits
        visits += "/trials" in folder
        if visits == 12:
            raise InterruptedRunError("stopped")
        write_json(folder, name, found)

    monkeypatch.setattr(dkrr.selection.tuning, "write_json", stop)
    with pytest.raises(InterruptedRunError):
        search(dataset, tmp_path)
    monkeypatch.undo()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("tune/*.zarr/trials/*.json")}
    assert len(before) == 11
    assert without_times(search(dataset, tmp_path).to_dict()) == without_times(result.to_dict())
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_weights_several_targets_an_intercept_and_a_constant_feature(
    arrays: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    x, y = arrays
    weight = np.where(np.arange(N) % 4 == 0, 0.0, 1.0 + np.arange(N) % 3)
    targets = np.column_stack([y, 100 * np.cos(x[:, 1]) + 1000])
    targets[weight == 0] = 1e6  # rows that do not count
    data = ingest(np.column_stack([x, np.full(N, 7.0)]), str(tmp_path / "rows.zarr"), y=targets, sample_weight=weight)
    found = search(data, tmp_path, replace(SMALL, kernels=("rbf",)), fit_intercept=True)
    assert np.isfinite(found.best.widths).all()
    assert found.best.loo_rmse < 0.4
    subset = draw_subset(data, N, 3, str(tmp_path / "all.zarr"))
    assert subset.num_rows == np.count_nonzero(weight)
    assert sorted(subset.weight.read(0, subset.num_rows)[:, 0]) == sorted(weight[weight > 0])


@pytest.mark.parametrize("size", [1e-17, 1e9])
def test_units_of_the_columns_are_those_of_the_widths(
    size: float, result: TuneResult, arrays: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    x, y = arrays
    found = tune(x * size, y * size, settings=SMALL, store=str(tmp_path), executor=InProcessExecutor())
    assert found.best.loo_rmse < 2 * result.best.loo_rmse < 0.3
    # of several targets each counts alike
    both = Explained(x=x, y=np.column_stack([y, size * y]))
    np.testing.assert_allclose(both.deviation / [1.0, size], y.std(), rtol=1e-9)


@pytest.mark.parametrize("size", [1e-8, 1e8])
def test_alphas_are_refined_whatever_the_unit_of_weights_is(size: float, arrays: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = arrays
    found = [
        Explained(x=x[:100], y=y[:100, None], weight=np.full(100, c)).refine("rbf", np.array([1.0]), 1e-3 * c, 5)
        for c in (1.0, size)
    ]
    np.testing.assert_allclose(np.array(list(found[1])) / size, list(found[0]), rtol=1e-3)


@pytest.mark.parametrize("size", [1e-8, 1e8])
def test_weights_times_a_number_want_alpha_times_it(
    size: float, result: TuneResult, arrays: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    x, y = arrays
    weight = np.full(N, size)
    found = tune(x, y, weight, settings=SMALL, store=str(tmp_path), executor=InProcessExecutor())
    assert found.best.loo_rmse < 2 * result.best.loo_rmse < 0.3


@pytest.mark.parametrize("seed", [1, 2])
def test_where_most_rows_coincide_the_unit_of_a_column_is_none_of_the_widths(seed: int, tmp_path: Path) -> None:
    random, settings = np.random.default_rng(seed), replace(SMALL, kernels=("rbf",), search_rows=(60,))
    x = np.where(random.random(N) < 0.8, 0.0, random.uniform(0, 6, N))[:, None]
    y = np.sin(2 * x[:, 0]) + 0.1 * random.standard_normal(N)
    for size in (1e-6, 1.0, 1e6):
        found = tune(x * size, y, settings=settings, store=str(tmp_path / str(size)), executor=InProcessExecutor())
        assert found.best.loo_rmse < 0.4


@pytest.mark.parametrize("widths", ["shared", "both"])
def test_a_constant_column_changes_nothing(widths: Any, tmp_path: Path) -> None:
    """One of ones beside small numbers, and one that is constant but for rounding."""
    random = np.random.default_rng(0)
    x = random.standard_normal((N, 3))
    y = np.sin(2 * x[:, 0]) + 0.1 * random.standard_normal(N)
    few = np.where(np.arange(N) % 7, 0.3, np.nextafter(0.3, 1))
    rows = 1e-5 * np.column_stack([x, 1e5 * np.ones(N), 1e5 * few])
    found = tune(rows, y, settings=replace(SMALL, widths=widths), store=str(tmp_path), executor=InProcessExecutor())
    assert found.best.loo_rmse < 0.4
    assert np.min(found.best.widths) > 1e-7


def test_a_number_that_is_added_to_the_targets_is_no_matter_of_an_intercept(
    arrays: tuple[np.ndarray, np.ndarray],
) -> None:
    x, y = arrays
    weight = 1.0 + np.arange(N) % 3
    near, far = (
        Explained(x=x, y=(y + c)[:, None], weight=weight, intercept=True).evaluate("rbf", np.array([1.0]), 0.1)
        for c in (0.0, 1e9)
    )
    assert far[0] == pytest.approx(near[0], rel=1e-5)
    np.testing.assert_allclose(far[1], near[1], rtol=1e-4)


def test_an_alpha_at_the_end_of_what_is_tried_is_noted(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((120, 2))
    noise = np.random.default_rng(1).standard_normal(120)
    settings = replace(SMALL, kernels=("rbf",), search_rows=(60,), rows=120)
    found = tune(x, noise, settings=settings, store=str(tmp_path), executor=InProcessExecutor())
    assert found.notes == ["alpha 1e+03 is at an end of what is tried, 1e-06 to 1e+03"]


def test_a_budget_leaves_out_and_says_so(dataset: Dataset, tmp_path: Path) -> None:
    found = search(dataset, tmp_path, replace(SMALL, budget_seconds=1e-6))
    assert {record["stage"] for record in found.records} == {"shared width", "width per feature"}
    assert found.best.num_rows == 60
    assert [note.partition(":")[0] for note in found.notes] == [
        "width per feature", "search on 120 rows", "slice", "no check",
    ]  # fmt: skip
    assert not found.slices


def test_rows_without_targets_are_refused(arrays: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    data = ingest(arrays[0], str(tmp_path / "rows.zarr"))
    with pytest.raises(DataError, match="no target"):
        search(data, tmp_path)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"kernels": ("rbf", "cubic")}, "kernels = .*'cubic'"),
        ({"kernels": ("rbf", "rbf")}, "each once"),
        ({"widths": "some"}, "widths = 'some'"),
        ({"search_rows": (2000, 1000)}, "ascending"),
        ({"search_rows": (5,)}, "from 20"),
        ({"budget_seconds": 0.0}, "budget_seconds = 0.0"),
    ],
)
def test_settings_that_are_not_allowed(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ParameterError, match=expected):
        TuneSettings(**change)


# --- how well a kernel explains rows ---------------------------------------------------------------------------------

ROWS, FEATURES, TARGETS = 90, 4, 2
Array = NDArray[np.float64]


def rows(*, weighted: bool = False, intercept: bool = False, n: int = ROWS) -> Explained:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((n, FEATURES)) * [1.0, 2.0, 0.5, 1.0] + [3.0, 0.0, -1.0, 0.0]
    y = (
        np.column_stack([np.sin(x[:, 0]) + 0.3 * x[:, 1], np.cos(2 * x[:, 2])])
        + 0.1 * rng.standard_normal((n, TARGETS))
        + 2
    )
    x[1] = x[0]  # a row that is there twice
    weight = rng.uniform(0.2, 3.0, n) if weighted else None
    return Explained(x=x, y=y, weight=weight, intercept=intercept)


CASES = pytest.mark.parametrize(("weighted", "intercept"), [(False, False), (True, False), (False, True), (True, True)])


@CASES
def test_the_loss_is_the_density_of_a_gaussian(weighted: bool, intercept: bool) -> None:
    data = rows(weighted=weighted, intercept=intercept)
    widths, alpha = np.array([2.0]), 0.3
    noise = np.diag(alpha / data.root**2)
    covariance = family_kernel("matern32", widths)(data.x, data.x) + noise
    factor = cho_factor(covariance)
    mean = np.average(data.y, axis=0, weights=data.weight)
    deviation = np.sqrt(np.average((data.y - mean) ** 2, axis=0, weights=data.weight))
    centred = np.empty_like(data.y)
    for k, y in enumerate(data.y.T):
        shift = 0.0
        if intercept:  # generalised least squares
            solved = cho_solve(factor, np.ones(ROWS))
            shift = float(solved @ y / solved.sum())
        centred[:, k] = y - shift
    variance = float(np.mean(np.sum(centred * cho_solve(factor, centred), axis=0) / deviation**2)) / ROWS
    total = 0.0
    for y, c in zip(centred.T, deviation, strict=True):
        total -= multivariate_normal(mean=np.zeros(ROWS), cov=variance * c**2 * covariance).logpdf(y) / (ROWS * TARGETS)
    assert data.evaluate("matern32", widths, alpha)[0] == pytest.approx(total, rel=1e-10)


@CASES
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared", [True, False])
def test_the_gradient_is_that_of_differences(family: str, shared: bool, weighted: bool, intercept: bool) -> None:
    data = rows(weighted=weighted, intercept=intercept)
    at = np.log(np.append([2.5] if shared else [2.0, 4.0, 1.0, 3.0], 0.2))
    _, gradient, _ = data.evaluate(family, np.exp(at[:-1]), float(np.exp(at[-1])))
    h = 1e-5
    differences = []
    for step in h * np.eye(len(at)):
        high, low = (data.evaluate(family, np.exp(p[:-1]), float(np.exp(p[-1])))[0] for p in (at + step, at - step))
        differences.append((high - low) / (2 * h))
    np.testing.assert_allclose(gradient, differences, rtol=2e-6, atol=1e-8)


@CASES
def test_leave_one_out_is_that_of_a_path_and_of_refined_alphas(weighted: bool, intercept: bool) -> None:
    data = rows(weighted=weighted, intercept=intercept)
    widths, alphas = np.array([1.5, 3.0, 1.0, 2.0]), [0.02, 0.5]
    expected = [data.evaluate("matern52", widths, alpha)[2] for alpha in alphas]
    squares = data.path("matern52", widths, np.array(alphas))
    np.testing.assert_allclose(np.sqrt(squares.mean(axis=0)), expected, rtol=1e-8)
    for alpha, of_rows in data.refine("matern52", widths, 0.02, 5).items():
        assert np.sqrt(of_rows.mean()) == pytest.approx(data.evaluate("matern52", widths, alpha)[2], rel=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared", [True, False])
def test_the_keys_of_a_family_build_its_kernel(family: str, shared: bool) -> None:
    x = np.random.default_rng(0).standard_normal((20, FEATURES))
    widths = np.array([1.7]) if shared else np.array([0.5, 1.0, 2.0, 4.0])
    difference = np.abs(x[:, None] - x[None]) / widths
    r = np.sqrt((difference**2).sum(-1))
    expected = {
        "rbf": np.exp(-(r**2) / 2),
        "laplacian": np.exp(-difference.sum(-1)),
        "matern12": np.exp(-r),
        "matern32": (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r),
        "matern52": (1 + np.sqrt(5) * r + 5 * r**2 / 3) * np.exp(-np.sqrt(5) * r),
    }[family]
    np.testing.assert_allclose(family_kernel(family, widths)(x, x), expected, atol=1e-12)
    assert ("kernel_params" in kernel_keys(family, widths)) == (not shared or family.startswith("matern"))


def test_rows_that_coincide_without_noise_are_named() -> None:
    with pytest.raises(NotPositiveDefiniteError, match="of 90 rows is not positive definite at row 1 "):
        rows().evaluate("rbf", np.ones(1), 0.0)


@pytest.mark.parametrize(
    ("loss", "y"),
    [
        (FoldLoss(loss="hinge", metric="accuracy", C=(0.1, 1.0)), np.arange(60.0) % 2),
        (
            FoldLoss(loss="pinball", metric="pinball", quantile=(0.1, 0.9), C=(0.1, 1.0)),
            np.random.default_rng(0).random((60, 2)),
        ),
    ],
    ids=["labels in one column", "quantiles of two targets"],
)
def test_targets_that_are_not_those_of_the_loss_are_refused(loss: FoldLoss, y: np.ndarray) -> None:
    settings = TuneSettings(kernels=("rbf",), search_rows=(30,), rows=60, fold_loss=loss)
    with pytest.raises(DataError, match="expected"):
        tune(np.random.default_rng(1).random((60, 2)), y, settings=settings)
