"""Samples and ``--verify`` find what a checksum cannot, and only that."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.jobs.inspection import describe, verify
from dkrr.linalg.catalogue import factor_fields, gram_fields, key_of
from dkrr.linalg.gram import factor_sample_agrees, gram_samples_agree, verify_tiles
from dkrr.linalg.products import ArrayRows
from dkrr.linalg.solution import Solution
from dkrr.models.model import Model
from dkrr.store.files import write_json
from tests.faults import DAMAGES, objects_in_memory, swap
from tests.linalg.helpers import factor_of, gram_of, operator, rows

__all__ = ["objects_in_memory"]


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
