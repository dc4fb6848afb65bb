"""Tiles of K and of A = S K S + alpha I, the lazy matrix of them, and what is found that no checksum finds."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest

import dkrr
from dkrr.errors import StoreError
from dkrr.jobs.inspection import describe, verify
from dkrr.linalg.catalogue import factor_fields, gram_fields, key_of
from dkrr.linalg.gram import factor_sample_agrees, gram_samples_agree, verify_tiles
from dkrr.linalg.products import ArrayRows
from dkrr.linalg.solution import Solution
from dkrr.models.model import Model
from dkrr.store.files import write_json
from tests.faults import DAMAGES, swap
from tests.linalg.helpers import dense, factor_of, gram_of, operator, rows, snapshot


@pytest.mark.parametrize("form", ["rbf", "laplacian", "stored", "given"])
@pytest.mark.parametrize(("n", "b"), [(1, 64), (64, 64), (65, 64), (700, 300)])
def test_tiles(tmp_path: Path, form: str, n: int, b: int) -> None:
    dataset = rows(tmp_path, n=n, weights=n > 1)
    system = operator(dataset, tile_size=b, alpha=0.3, kernel="rbf" if form in ("stored", "given") else form)
    a, grid = dense(system, dataset), system.grid
    if form in ("stored", "given"):
        gram = gram_of(system, tmp_path / "K.zarr")
        system = replace(system, gram=gram, kernel=system.kernel if form == "stored" else None)
    for i, j in grid.lower():
        tile = system.tile(i, j, np.empty(grid.shape(i, j)))
        np.testing.assert_allclose(tile, a[grid.span(i), grid.span(j)], atol=1e-13)
        np.testing.assert_allclose(system.tile(i, j, np.empty(tile.shape, np.float32)), tile, rtol=3e-7)
    np.testing.assert_allclose(system.diagonal_from(0) + 0.3, np.diag(a), atol=1e-13)


def test_rows_that_changed_are_not_the_rows_that_were_meant(tmp_path: Path) -> None:
    system = operator(rows(tmp_path))
    other = replace(system, rows=replace(system.rows, digest="0" * 64))
    with pytest.raises(StoreError, match="other rows"):
        other.gram_tile(0, 0)


def test_a_lazy_symmetric_matrix_whose_tiles_are_stored_once(tmp_path: Path) -> None:
    def stored() -> dict[str, tuple[bytes, int]]:
        return {name: value for name, value in snapshot(tmp_path).items() if name.startswith("grams")}

    x = np.random.default_rng(0).standard_normal((210, 4))
    lazy = dkrr.gram_matrix(da.from_array(x, chunks=(50, 4)), kernel="rbf", gamma=0.3, store=tmp_path, tile_size=64)
    assert lazy.chunks == ((64, 64, 64, 18),) * 2
    assert not stored()
    with dask.config.set(scheduler="synchronous"):
        corner = lazy[:64, 64:128].compute()
        assert [name[-5:] for name in stored()] == ["c/1/0"]
        full, first = lazy.compute(), stored()
        assert len(first) == 10
        again = lazy.compute()
    assert stored() == first
    np.testing.assert_array_equal(full, full.T)
    np.testing.assert_array_equal(full, again)
    np.testing.assert_array_equal(corner, full[:64, 64:128])
    np.testing.assert_allclose(full, dkrr.make_kernel("rbf", gamma=0.3)(x, x), atol=1e-13)


# --- samples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "option"), [("gram", None), ("gram", 4.0), ("factor", "float64"), ("factor", "float32")]
)
def test_every_exchange_of_two_tiles_is_found(tmp_path: Path, kind: str, option: Any) -> None:
    """Also of a short-ranged kernel, most of whose entries are nearly zero; of a factor at the first of them.

    Nothing is found where nothing is wrong, also at a small alpha, where L L^T cancels most.
    """
    alpha = 1e-3 if option == "float32" else 1e-7
    system = operator(rows(tmp_path, n=256, weights=True), alpha=alpha, gamma=option if kind == "gram" else None)
    path, is_gram = tmp_path / "M", kind == "gram"
    matrix = gram_of(system, path) if is_gram else factor_of(system, path, option)
    agrees = gram_samples_agree if is_gram else factor_sample_agrees
    assert all(agrees(system, matrix, *tile) for tile in system.grid.lower())
    for first, second in combinations(system.grid.lower(), 2):  # as a continued factorisation meets them
        paths = [path / "c" / str(i) / str(j) for i, j in (first, second)]
        swap(*paths)
        assert not agrees(system, matrix, *first), (first, second)
        assert not (is_gram and agrees(system, matrix, *second)), (first, second)
        swap(*paths)


# --- everything at a place --------------------------------------------------------------------------------------------


def test_of_a_row_of_wrong_tiles_the_first_is_named(tmp_path: Path) -> None:
    system = operator(rows(tmp_path, n=6 * 64))
    factor, gram = factor_of(system, tmp_path / "L"), gram_of(system, tmp_path / "K")
    assert verify_tiles(factor, system, is_factor=True) == []
    assert verify_tiles(gram, system, is_factor=False) == []
    for name in ("L", "K"):
        swap(tmp_path / name / "c/3/1", tmp_path / name / "c/5/2")
    problems = verify_tiles(factor, system, is_factor=True)
    named = [problem.split(" passes its checksum and is wrong")[0] for problem in problems]
    assert named == ["tile (3, 1)", "tile (5, 2)"]
    assert verify_tiles(factor, is_factor=True) == []  # nothing to compare with
    problems = verify_tiles(gram, system, is_factor=False)
    assert problems == [
        f"tile {tile} passes its checksum and holds other entries than its rows give" for tile in ("(3, 1)", "(5, 2)")
    ]


@pytest.mark.parametrize(("kind", "weights"), [("grams", False), ("factors", True)])
def test_info_finds_the_rows_of_a_store_and_compares(tmp_path: Path, kind: str, weights: bool) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/unrelated.zarr").mkdir()
    data = rows(tmp_path / "rows", n=200, weights=weights)
    system = operator(data)
    if kind == "grams":
        fields = gram_fields(system, "float64")
    else:
        fields = factor_fields(system, "float64", data.digest_weight, "test")
    path = tmp_path / kind / f"{key_of(fields)}.zarr"
    (gram_of if kind == "grams" else factor_of)(system, path, attributes=fields)
    assert verify(str(path)) == []
    swap(path / "c/1/0", path / "c/2/0")
    problems = verify(str(path))
    assert problems
    assert problems[0].startswith("tile (1, 0) passes its checksum and ")


def test_a_run_is_verified_with_its_model_and_what_it_keeps(tmp_path: Path) -> None:
    data = rows(tmp_path, n=200)
    system = operator(data)
    path = tmp_path / "factors" / "x.zarr"
    fields = factor_fields(system, "float64", None, "test")
    factor_of(system, path, attributes=fields)
    solution = Solution(
        solver="cholesky", precision="float64", converged=True, num_iterations=0, relative_residual=[0.0],
        backward_error=[0.0],
    )  # fmt: skip
    coefficients = ArrayRows(np.ones((200, 1)))
    run = tmp_path / "run"
    Model(kernel=system.kernel, x_fit=data.X, dual_coef=coefficients, solution=solution).save(run / "model.zarr")
    write_json(str(run), "job.json", {"data": {}, "model": {}, "solver": {}, "output": {}})
    write_json(str(run), "plan.json", {})
    result = {"model_path": "", "relative_residual": [1e-12], "seconds": {"total": 1.0}, "kept": {str(path): 1}}
    write_json(str(run), "result.json", result | {"plan": {"num_rows": 200}})
    assert describe(str(run))[0] == "run"
    assert verify(str(run)) == []
    DAMAGES["flipped"](path / "c/1/0")
    DAMAGES["deleted"](run / "model.zarr/dual_coef/c/0/0")
    (run / "plan.json").unlink()
    (run / "result.json.0f.partial").write_bytes(b"")
    problems = verify(str(run))
    assert problems[0] == "plan.json is missing"
    assert problems[1].startswith("dual_coef/c/0/0 of ")
    assert problems[2].startswith(f"{path}: tile (1, 0) is damaged (crc32c ")
    assert problems[3:] == ["result.json.0f.partial is left by an interrupted write"]
