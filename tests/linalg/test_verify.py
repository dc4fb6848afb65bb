"""Samples and ``--verify`` find what a checksum cannot, and only that."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.engine.tasks import InProcessExecutor
from dkrr.jobs.inspection import describe, verify
from dkrr.linalg.catalogue import factor_fields, gram_fields, key_of
from dkrr.linalg.direct import factorise
from dkrr.linalg.gram import build_gram, factor_sample_agrees, gram_samples_agree, verify_factor, verify_gram
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.products import ArrayRows
from dkrr.linalg.solution import Solution
from dkrr.models.model import Model
from dkrr.store.files import write_json
from dkrr.tiles import TileMatrix
from tests.faults import DAMAGES, objects_in_memory, swap
from tests.linalg.helpers import operator, rows

__all__ = ["objects_in_memory"]


def factor_of(system: RidgeOperator, store: Any, dtype: str = "float64") -> TileMatrix:
    factor = TileMatrix.create(store, system.grid, dtype=dtype)
    factorise(system, factor, InProcessExecutor())
    return factor


def gram_of(system: RidgeOperator, store: Any) -> TileMatrix:
    gram = TileMatrix.create(store, system.grid, dtype="float64")
    build_gram(system, gram, InProcessExecutor())
    return gram


# --- samples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "dtype", "weights"), [("rbf", "float64", True), ("linear", "float32", False)])
def test_right_tiles_agree_with_room_to_spare(tmp_path: Path, kernel: str, dtype: str, weights: bool) -> None:
    """Also at a small alpha, where L L^T cancels most."""
    data = rows(tmp_path, n=200, weights=weights)
    system = operator(data, tile_size=48, kernel=kernel, alpha=1e-3 if dtype == "float32" else 1e-7)
    factor = factor_of(system, tmp_path / "L", dtype)
    gram = gram_of(system, tmp_path / "K")
    for i, j in system.grid.lower():
        assert gram_samples_agree(system, gram, i, j)
        assert factor_sample_agrees(system, factor, i, j)


@pytest.mark.parametrize(
    ("kind", "option"), [("gram", None), ("gram", 4.0), ("factor", "float64"), ("factor", "float32")]
)
def test_every_exchange_of_two_tiles_is_found(tmp_path: Path, kind: str, option: Any) -> None:
    """Also of a short-ranged kernel, most of whose entries are nearly zero; of a factor at the first of them."""
    system = operator(rows(tmp_path, n=256), gamma=option if kind == "gram" else None)
    path, is_gram = tmp_path / "M", kind == "gram"
    matrix = gram_of(system, path) if is_gram else factor_of(system, path, option)
    agrees = gram_samples_agree if is_gram else factor_sample_agrees
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
    assert verify_factor(factor, system) == []
    assert verify_gram(gram, system) == []
    for name in ("L", "K"):
        swap(tmp_path / name / "c/3/1", tmp_path / name / "c/5/2")
    problems = verify_factor(factor, system)
    named = [problem.split(" passes its checksum and is wrong")[0] for problem in problems]
    assert named == ["tile (3, 1)", "tile (5, 2)"]
    assert verify_factor(factor) == []  # nothing to compare with
    problems = verify_gram(gram, system)
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
    matrix = TileMatrix.create(str(path), system.grid, dtype="float64", attributes=fields)
    if kind == "grams":
        build_gram(system, matrix, InProcessExecutor())
    else:
        factorise(system, matrix, InProcessExecutor())
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
    factorise(
        system, TileMatrix.create(str(path), system.grid, dtype="float64", attributes=fields), InProcessExecutor()
    )
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
    assert describe(str(run)).kind == "run"
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
