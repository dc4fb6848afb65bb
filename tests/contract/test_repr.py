"""What Python shows of the things that a fit leaves: a few lines, and kernels with what was given to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dkrr
from dkrr.kernels import RBF, Chi2, Laplacian, Linear, Matern, Polynomial, Sigmoid, kernel_from_dict, make_kernel
from tests.contract.helpers import run

X = np.random.default_rng(0).random((50, 3))
Y = np.stack([X.sum(axis=1)] * 40, axis=1)


def test_a_model_is_three_lines(tmp_path: Path) -> None:
    est = dkrr.KernelRidge(kernel="rbf", gamma=0.5, alpha=0.25).fit(X, Y)
    est.save(tmp_path / "model.zarr")
    model = dkrr.load_model(tmp_path / "model.zarr")
    lines = repr(model).splitlines()
    assert len(lines) == 3
    assert "RBF(gamma=0.5), alpha 0.25" in lines[0]
    assert "50 rows of 3 features, 40 targets" in lines[0]
    assert "cholesky, float64" in lines[1]
    assert lines[2].strip() == str(tmp_path / "model.zarr")
    assert all(len(line) < 300 for line in lines)


def test_a_model_without_a_kernel_has_a_repr_too() -> None:
    est = dkrr.KernelRidge(kernel="precomputed", alpha=[1.0, 2.0]).fit(X @ X.T, Y[:, :2])
    assert "precomputed, alpha 1, 2" in repr(est._model)


def test_solutions_and_leave_one_out_are_three_lines() -> None:
    est = dkrr.KernelRidge(kernel="rbf", gamma=0.5).fit(X, Y)
    solution, left_out = repr(est.solution_), repr(est.leave_one_out())
    assert len(solution.splitlines()) == len(left_out.splitlines()) == 3
    assert "cholesky, float64, converged" in solution
    assert "40 targets" in solution
    assert "50 rows, 40 targets" in left_out
    assert "array(" not in left_out


def test_a_data_set_is_three_lines(tmp_path: Path) -> None:
    np.savetxt(tmp_path / "t.csv", np.c_[X, Y[:, :1]], delimiter=",", header="a,b,c,y", comments="")
    lines = repr(dkrr.ingest(str(tmp_path / "t.csv"), str(tmp_path / "t.zarr"), target="y")).splitlines()
    assert len(lines) == 3
    assert lines[0] == f"Dataset {tmp_path / 't.zarr'}"
    assert "50 rows, 3 features: a, b, c; 1 target: y" in lines[1]


def test_a_plan_is_its_table() -> None:
    job = {
        "data": {"path": "generate:friedman?n=60&d=5&seed=0"},
        "model": {"kernel": "matern", "kernel_params": {"length_scale": 2.0}},
    }
    assert "matern (length_scale 2, nu 1.5), alpha 1" in repr(dkrr.plan(job))


GIVEN = {
    "RBF(gamma=0.5)": make_kernel("rbf", gamma=0.5),
    "RBF()": make_kernel("rbf"),
    "RBF(length_scale=3.0)": make_kernel("rbf", kernel_params={"length_scale": 3}),
    "RBF(length_scale=(1.0, 2.0))": RBF(length_scale=(1, 2)),
    "RBF(length_scale=2.0, gamma=0.5)": RBF(length_scale=2, gamma=0.5),
    "RBF(gamma=0.25)": RBF().resolve(4),
    "Laplacian(gamma=0.1)": Laplacian(gamma=0.1),
    "Matern(length_scale=2.0, nu=2.5)": Matern(length_scale=2, nu=2.5),
    "Matern(nu=1.5)": Matern(),
    "Polynomial(degree=3, coef0=1.0)": Polynomial(),
    "Sigmoid(gamma=2.0, coef0=0.0)": Sigmoid(gamma=2, coef0=0),
    "Chi2(gamma=1.0)": Chi2(),
    "Sum(terms=(RBF(gamma=0.5), Linear()))": RBF(gamma=0.5) + Linear(),
}


def test_a_kernel_shows_what_was_given() -> None:
    assert [repr(kernel) for kernel in GIVEN.values()] == list(GIVEN)
    for shown, kernel in GIVEN.items():
        assert eval(shown, vars(dkrr.kernels)) == kernel  # noqa: S307
        assert kernel_from_dict(kernel.to_dict()) == kernel


@pytest.mark.parametrize(
    ("parameters", "shown", "hidden"),
    [
        ({"gamma": 0.5}, "rbf (gamma 0.5)", "length_scale"),
        ({"kernel_params": {"length_scale": 3.0}}, "length_scale 3", ""),
    ],
)
def test_commands_show_a_kernel_as_it_was_given(
    tmp_path: Path, parameters: dict[str, Any], shown: str, hidden: str
) -> None:
    dkrr.KernelRidge(kernel="rbf", **parameters).fit(X, Y).save(tmp_path / "model.zarr")
    said = run("info", tmp_path / "model.zarr", said=shown).output
    assert not hidden or hidden not in said
