"""Factors that are continued where rows were appended, dropped or changed, against factors made in one go."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dkrr.dataset import Dataset, append, drop_generations, ingest, keep_last
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import MemoryBudgetError, NotPositiveDefiniteError
from dkrr.fit.fitting import FitResult, FitSettings, fit_rows
from dkrr.kernels import make_kernel
from dkrr.linalg.solution import IterativeSettings
from dkrr.linalg.workspace import Workspace
from dkrr.tiles import TileMatrix
from tests.faults import delete, failing_at, flip, swap
from tests.linalg.helpers import assembled

RNG = np.random.default_rng(0)
X = RNG.standard_normal((700, 3)) + 5
Y = np.stack([np.sin(X[:, 0] * (k + 1)) + 0.1 * RNG.standard_normal(len(X)) for k in range(5)], axis=1)
W = RNG.uniform(0.2, 2, len(X)) * (np.arange(len(X)) % 7 > 0)


class Workers(InProcessExecutor):
    """Runs everything here, and says that several tasks could run at once."""

    def __init__(self, num_threads: int = 1) -> None:
        self.num_threads = num_threads


def data(path: Path, ends: list[int], t: int = 1, weights: bool = False, x: Any = X) -> Dataset:
    """Generations up to the given ends."""
    for start, stop in zip([0, *ends], ends, strict=False):
        weight = W[start:stop] if weights else None
        made = append(
            x[start:stop], path, y=Y[start:stop, :t], sample_weight=weight, rows_per_chunk=None if start else 256
        )
    return made


def fit(dataset: Dataset, store: Path, *, threads: int = 1, **options: Any) -> tuple[np.ndarray, FitResult, Workspace]:
    """Coefficients, the result, and what the phases did."""
    kernel = make_kernel(options.pop("kernel", "rbf"), **options.pop("parameters", {})).resolve(dataset.num_features)
    given: dict[str, Any] = {"alpha": (1e-2,), "tile_size": 64} | options
    workspace = Workspace(str(store), Workers(threads), blas="test")
    with fit_rows(dataset, FitSettings(kernel=kernel, **given), workspace) as result:
        return result.dual_coef.read(0, dataset.num_rows), result, workspace


def tiles_of(result: FitResult) -> dict[str, Path]:
    folder = Path(result.factors[0])
    return {str(path.relative_to(folder)): path for path in folder.glob("c/*/*")}


def same_files(old: FitResult, new: FitResult) -> set[str]:
    """Tiles of the new factor that are the files of the old one."""
    before, after = tiles_of(old), tiles_of(new)
    return {key for key in before.keys() & after.keys() if before[key].samefile(after[key])}


def check(found: np.ndarray, dataset: Dataset, like: FitResult, fresh: Path, bar: float = 1e-9, **options: Any) -> Any:
    """Against the same system in a fresh store."""
    assert like.operator.rows is not None
    wanted, result, _ = fit(dataset, fresh, center=like.operator.rows.center, **options)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=bar * np.abs(wanted).max())
    return result


@settings(max_examples=10, deadline=None)
@given(
    ends=st.lists(st.integers(1, 180), min_size=2, max_size=4, unique=True).map(sorted),
    tile_size=st.sampled_from([16, 50, 64, 100, 400]),
    t=st.sampled_from([1, 5]),
    weights=st.booleans(),
    kernel=st.sampled_from(["rbf", "laplacian", "linear", "poly"]),
    gram=st.sampled_from(["on_the_fly", "stored"]),
    precision=st.sampled_from(["float64", "float32", "mixed"]),
    intercept=st.booleans(),
    threads=st.sampled_from([1, 2, 5]),
)
def test_an_extended_fit_equals_a_refit(
    ends: list[int], tile_size: int, t: int, weights: bool, kernel: str, gram: Any, precision: Any, intercept: bool,
    threads: int, tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("extend")
    # what float32 leaves of the digits is what the bar is about, not what such a matrix takes of them
    alpha = 1e-2 if kernel in ("rbf", "laplacian") else 0.1 if precision != "float32" else 1.0
    options: dict[str, Any] = {
        "tile_size": tile_size, "kernel": kernel, "gram": gram, "precision": precision, "fit_intercept": intercept,
        "alpha": (alpha,), "parameters": {"gamma": 0.1},
    }  # fmt: skip
    if precision == "mixed":
        options["iterative"] = IterativeSettings(tol=1e-11)
    ends = sorted({max(end, 2) for end in ends})
    results: list[FitResult] = []
    for start, stop in pairwise([0, *ends]):
        weight = W[start:stop] if weights else None
        made = append(X[start:stop], folder / "a.zarr", y=Y[start:stop, :t], sample_weight=weight)
        found, result, _ = fit(made, folder / "store", threads=threads, **options)
        results.append(result)
    bar = 3e-2 if precision == "float32" else 1e-9
    fresh = check(found, made, results[-1], folder / "fresh", bar, **options)
    new, old = (assembled(TileMatrix.open(item.factors[0])) for item in (results[-1], fresh))
    np.testing.assert_allclose(new, old, atol=(1e-3 if precision != "float64" else 1e-10) * np.abs(old).max())
    assert not np.triu(new, 1).any()
    # tiles of the common prefix are the old files
    if len(ends) > 1:
        full = ends[-2] // tile_size
        assert len(same_files(results[-2], results[-1])) == full * (full + 1) // 2


@pytest.mark.parametrize("threads", [1, 3])
def test_only_new_rows_are_computed(tmp_path: Path, threads: int) -> None:
    old = fit(data(tmp_path / "a.zarr", [300]), tmp_path / "store")[1]
    made = append(X[300:310], tmp_path / "a.zarr", y=Y[300:310, :1])
    _, result, workspace = fit(made, tmp_path / "store", threads=threads)
    # 300 rows are 4 tiles of 64 and 44 rows of a fifth: its 5 tiles are all that is computed
    assert workspace.phases["factorise"].num_computed == 5
    assert len(same_files(old, result)) == 10
    # finished rows of the ragged tiles have their old bytes
    first, second = (TileMatrix.open(item.factors[0]) for item in (old, result))
    for j in range(5):
        assert second.read(4, j)[:44, :44].tobytes() == first.read(4, j)[:44, :44].tobytes()
    reused = result.solution.reused["factor"]
    assert (reused["rows"], reused["of_rows"], reused["tiles"]) == (300, 310, 10)
    assert reused["share"] == pytest.approx((300 / 310) ** 3)
    assert reused["seconds"] is None  # so little was computed that it says nothing of the rate
    assert reused["sources"] == [Path(old.factors[0]).name[:12]]
    assert not list((tmp_path / "store/factors").glob("*-sums*"))


def test_what_is_another_lineage_is_not_continued(tmp_path: Path) -> None:
    store = tmp_path / "store"
    fit(data(tmp_path / "a.zarr", [150]), store)
    longer = append(X[150:170], tmp_path / "a.zarr", y=Y[150:170, :1])
    others = {"alpha": (0.5,), "precision": "float32", "parameters": {"gamma": 0.7}, "gram": "stored", "tile_size": 16}
    for name, value in others.items():
        reused = fit(longer, store, **{name: value})[1].solution.reused
        assert "factor" not in reused, name
        # another system is no reason to say anything
        assert ("not_continued" in reused) == (name not in ("alpha", "parameters"))
    said = reused["not_continued"]["factor"]
    assert re.search(r"shares 1[57]0 rows, but was made in another way \(.*tile_size \d+ there, 16 here", said)
    changed = X[:170].copy()
    changed[0, 0] += 1e-12
    for x, weight in ((X[:170], W[:170]), (changed, None)):
        made = ingest(x, tmp_path / f"{weight is None}.zarr", y=Y[:170, :1], sample_weight=weight)
        assert "factor" not in fit(made, store)[1].solution.reused
    # but a factor with other weights has only its first rows in common
    other = W[:170].copy()
    other[100] += 1
    fit(data(tmp_path / "v.zarr", [100], weights=True), store)
    again = append(X[100:170], tmp_path / "v.zarr", y=Y[100:170, :1], sample_weight=other[100:170])
    assert fit(again, store)[1].solution.reused["factor"]["rows"] == 100


@pytest.mark.parametrize("key", ["block_digests", "center_rows", "location"])
def test_a_record_that_is_damaged_tells_of_nothing(key: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    fit(data(tmp_path / "a.zarr", [150]), store)
    longer = append(X[150:170], tmp_path / "a.zarr", y=Y[150:170, :1])
    (record,) = store.glob("lineage/*.json")
    record.write_text(record.read_text().replace(f'"{key}"', f'"{key[:-1]}q"'))
    assert "factor" not in fit(longer, store)[1].solution.reused


def test_the_longest_common_prefix_is_found_whatever_became_of_the_rows(tmp_path: Path) -> None:
    """A generation dropped in the middle, rows taken back, other rows appended, blocks without a generation's end."""
    store = tmp_path / "store"
    fit(data(tmp_path / "a.zarr", [100, 200, 300]), store)
    made = drop_generations(tmp_path / "a.zarr", [2])
    found, result, workspace = fit(made, store)
    assert result.solution.reused["factor"]["rows"] == 100
    assert workspace.phases["factorise"].num_computed == 9
    check(found, made, result, tmp_path / "fresh")
    # back to the first generation: its rows are a part of a longer factor, and nothing is computed but a cut
    made = drop_generations(tmp_path / "a.zarr", [3])
    found, result, _ = fit(made, store)
    assert result.solution.reused["factor"]["rows"] == 100
    check(found, made, result, tmp_path / "fresh")
    # a window that slides has nothing in common
    data(tmp_path / "b.zarr", [100, 200])
    assert "factor" not in fit(keep_last(tmp_path / "b.zarr", generations=1), store)[1].solution.reused
    # blocks of 1,024 rows prove a prefix that no append ended with
    x = RNG.standard_normal((1400, 2))
    long = ingest(x, tmp_path / "long.zarr", y=x[:, 0])
    fit(long, store, tile_size=256)
    x[1200] += 1
    changed = ingest(x, tmp_path / "changed.zarr", y=x[:, 0])
    assert fit(changed, store, tile_size=256)[1].solution.reused["factor"]["rows"] == 1024


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("visit", [1, 7])
def test_crash_and_change(visit: int, threads: int, tmp_path: Path) -> None:
    """An extension dies, its new rows are replaced by others, and is begun again: nothing of the old rows is left."""
    fit(data(tmp_path / "a.zarr", [300]), tmp_path / "store")
    made = append(X[300:420], tmp_path / "a.zarr", y=Y[300:420, :1])
    with failing_at(f"written*/c/*:@{visit}:memoryerror"), pytest.raises(MemoryBudgetError):
        fit(made, tmp_path / "store", threads=threads)
    for number, (start, stop) in enumerate([(500, 640), (300, 420)], 2):  # others, and the same ones again
        drop_generations(tmp_path / "a.zarr", [number])
        made = append(X[start:stop], tmp_path / "a.zarr", y=Y[start:stop, :1])
        found, result, _ = fit(made, tmp_path / "store", threads=threads)
        assert result.solution.reused["factor"]["rows"] == 300
        check(found, made, result, tmp_path / f"fresh-{number}")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tiles", [("4/1", "4/4"), ("3/0", "2/1")])
@pytest.mark.parametrize("damage", [flip, delete, swap])
def test_a_base_that_is_gone_or_damaged_or_wrong_costs_work_only(
    damage: Any, tiles: tuple[str, str], threads: int, tmp_path: Path
) -> None:
    """Ragged tiles, of which the finished rows are kept, and whole ones."""
    old = fit(data(tmp_path / "a.zarr", [300]), tmp_path / "store")[1]
    paths = [tiles_of(old)[f"c/{tile}"] for tile in tiles]
    if damage is swap:
        swap(*paths)
    else:
        for path in paths:
            damage(path)
    made = append(X[300:310], tmp_path / "a.zarr", y=Y[300:310, :1])
    found, result, _ = fit(made, tmp_path / "store", threads=threads)
    check(found, made, result, tmp_path / "fresh")


def test_a_matrix_that_stops_being_definite_names_the_new_row(tmp_path: Path) -> None:
    x = X[:120].copy()
    data(tmp_path / "a.zarr", [100], x=x)
    fit(data(tmp_path / "b.zarr", [100], x=x), tmp_path / "store", alpha=(0.0,), parameters={"gamma": 50.0})
    x[110] = x[3]
    made = append(x[100:120], tmp_path / "a.zarr", y=Y[100:120, :1])
    for threads in (1, 2):
        with pytest.raises(NotPositiveDefiniteError, match="not positive definite at row 110"):
            fit(made, tmp_path / "store", threads=threads, alpha=(0.0,), parameters={"gamma": 50.0})
