"""Wrong parameters, wrong rows and overflow: typed errors that name the value and the remedy, and no warnings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.gaussian_process import kernels as gp

from dkrr.errors import DataError, ParameterError
from dkrr.kernels import RBF, Precomputed, make_kernel

nan, inf = float("nan"), float("inf")


@pytest.mark.whole
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel": "rbg"}, "did you mean 'rbf'.*allowed: .*laplacian"),
        ({"kernel": "Polynominal"}, "did you mean 'polynomial'"),
        ({"kernel": "gaussian-ish?"}, "allowed: chi2"),
        ({"kernel": 3}, "a name, a callable"),
        ({"kernel": None}, "a name, a callable"),
        ({"kernel": "rbf", "gamma": 0}, "gamma = 0 .*> 0"),
        ({"kernel": "rbf", "gamma": -1.0}, "gamma = -1.0 .*> 0"),
        ({"kernel": "laplacian", "gamma": nan}, "gamma = nan"),
        ({"kernel": "sigmoid", "gamma": inf}, "gamma = inf"),
        ({"kernel": "chi2", "gamma": "scale"}, "gamma = 'scale'"),
        ({"kernel": "poly", "gamma": True}, "gamma = True"),
        ({"kernel": "poly", "degree": 0}, "degree = 0"),
        ({"kernel": "poly", "degree": nan}, "degree = nan"),
        ({"kernel": "poly", "coef0": inf}, "coef0 = inf"),
        ({"kernel": "matern", "kernel_params": {"nu": 3}}, r"nu = 3 .*\(0.5, 1.5, 2.5\)"),
        ({"kernel": "matern", "kernel_params": {"nu": "1.5"}}, "nu = '1.5'"),
        ({"kernel": "matern", "kernel_params": {"lengthscale": 1.0}}, "did you mean 'length_scale'"),
        ({"kernel": "linear", "kernel_params": {"nu": 1.5}}, "no parameter 'nu'"),
        ({"kernel": "rbf", "kernel_params": {"length_scale": 0.0}}, "length_scale = 0.0"),
        ({"kernel": "rbf", "kernel_params": {"length_scale": [1.0, -2.0]}}, r"length_scale\[1\] = -2.0"),
        ({"kernel": "rbf", "kernel_params": {"length_scale": []}}, "length_scale = "),
        ({"kernel": "rbf", "gamma": 1.0, "kernel_params": {"gamma": 2.0}}, "give it once"),
        ({"kernel": RBF(), "kernel_params": {"gamma": 2.0}}, "already holds its parameters"),
        ({"kernel": gp.RBF(), "kernel_params": {"gamma": 2.0}}, "already holds its parameters"),
        ({"kernel": gp.RBF() + gp.WhiteKernel(0.1)}, "give its noise_level as alpha"),
        ({"kernel": gp.CompoundKernel([gp.RBF(), gp.RBF()])}, "several outputs"),
        ({"kernel": {}}, "has no 'kernel', its name"),
        ({"kernel": {"sum": [{"kernel": "rbf"}]}}, "{'sum': .* has no 'kernel', its name.*'terms'"),
        ({"kernel": {"kernel": "rbf", "gama": 1.0}}, "did you mean 'gamma'"),
        ({"kernel": {"kernel": "som", "terms": []}}, "did you mean 'sum'"),
        ({"kernel": {"kernel": "sum"}}, "terms"),
        ({"kernel": {"kernel": "sum", "terms": ["rbf"]}}, "give kernels that act on rows"),
        ({"kernel": {"kernel": "sum", "factors": []}}, "did you mean|no parameter 'factors'"),
        ({"kernel": {"kernel": "product", "factors": [{"kernel": "precomputed"}]}}, "kernels that act on rows"),
        ({"kernel": {"kernel": "constant", "value": -1.0}}, "value = -1.0"),
        ({"kernel": {"kernel": "sklearn", "class": "RBG", "parameters": {}}}, "did you mean 'RBF'"),
        ({"kernel": {"kernel": "sklearn", "class": "Kernel", "parameters": {}}}, "'Kernel'"),
        ({"kernel": {"kernel": "sklearn", "class": "clone", "parameters": {}}}, "'clone'"),
        ({"kernel": {"kernel": "sklearn", "class": "RBF", "parameters": {"length": 1}}}, "did you mean 'length_scale'"),
        ({"kernel": {"kernel": "sklearn", "path": "RBF"}}, "no parameter 'path'"),
    ],
)
def test_wrong_parameters_and_dictionaries(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make_kernel(**arguments)


def test_only_positive_numbers_and_kernels_combine() -> None:
    for wrong in (0, -2.0, nan, True, "rbf", None):
        with pytest.raises(ParameterError):
            RBF() * wrong
        with pytest.raises(ParameterError):
            RBF() + wrong
    with pytest.raises(ParameterError, match="act on rows"):
        RBF() + Precomputed()


def test_resolve_decides_gamma_and_checks_the_length_scales() -> None:
    assert RBF().resolve(4) == RBF(gamma=0.25)
    assert (2 * RBF() * make_kernel("poly")).resolve(4) == 2 * RBF(gamma=0.25) * make_kernel("poly", gamma=0.25)
    assert make_kernel("chi2").resolve(4) == make_kernel("chi2", gamma=1.0)
    ard = make_kernel("matern", kernel_params={"length_scale": np.array([1.0, 2.0])})
    assert ard.resolve(2) is ard
    with pytest.raises(ParameterError, match="has 2 values, the rows have 3 features"):
        (1 + ard).resolve(3)
    with pytest.raises(ParameterError, match="rows of 3 features"):
        make_kernel(gp.Matern([1.0, 2.0])).resolve(3)


def test_histograms_are_not_negative() -> None:
    rows = np.random.default_rng(0).random((9, 4))
    bad = rows.copy()
    bad[5, 2] = -0.25
    for A, B, side in ((bad, rows, "A"), (rows, bad, "B")):
        with pytest.raises(DataError, match=rf"{side}\[5, 2\] = -0.25; kernel 'chi2'") as caught:
            make_kernel("chi2").block(A, B)
        assert (caught.value.row, caught.value.column, caught.value.value) == (5, 2, -0.25)
    with pytest.raises(DataError, match=r"A\[5, 2\]"):
        make_kernel("chi2").diag(bad)


ALL = ["linear", "poly", "rbf", "laplacian", "matern", "cosine", "sigmoid", "chi2"]
EVERY = [(name, {}) for name in ALL] + [("matern", {"nu": 0.5}), ("matern", {"nu": 2.5})]


@pytest.mark.whole
@pytest.mark.parametrize(("name", "parameters"), EVERY)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_what_is_not_finite_is_an_error_and_not_a_warning(name: str, parameters: dict[str, Any], dtype: Any) -> None:
    kernel = make_kernel(name, kernel_params=parameters)
    rows, out = np.random.default_rng(0).random((9, 4)) + 0.1, np.empty((9, 9), dtype)
    for value, message in (
        (1e200, "(?i)" + name + ".*not finite.*largest .*scale the features"),
        (nan, r"[AB]\[4, 3\] = nan"),
        (inf, r"[AB]\[4, 3\] = inf"),
    ):
        bad = rows.copy()
        bad[4, 3] = value
        for sides in ((bad, bad), (bad, rows), (rows, bad)) if value != 1e200 else ((bad, bad),):
            with pytest.raises(DataError, match=message):
                kernel.block(*sides, out)
        with pytest.raises(DataError, match="features"):
            kernel.block(bad, bad, out, same=True)
        with pytest.raises(DataError, match="features"):
            (0.5 * kernel + 1)(bad, bad)


def test_a_fractional_power_of_a_negative_number_is_an_error() -> None:
    rows = np.array([[1.0], [-3.0]])
    with pytest.raises(DataError, match=r"Polynomial.*degree=2\.5.*not finite"):
        make_kernel("poly", degree=2.5).block(rows, rows)


@pytest.mark.parametrize(
    ("A", "B", "message"),
    [
        (np.ones(3), np.ones((2, 3)), r"A has shape \(3,\)"),
        (np.ones((2, 3)), np.ones((2, 4)), "A has 3 features, B has 4"),
        (np.ones((2, 0)), np.ones((2, 0)), r"A has shape \(2, 0\)"),
        (np.ones((2, 3), dtype=complex), np.ones((2, 3)), "complex128"),
        (np.ones((2, 3)), np.full((2, 3), "x"), "B has dtype <U1"),
    ],
)
def test_wrong_rows(A: Any, B: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_kernel("rbf")(A, B)
    with pytest.raises(DataError, match=message):
        make_kernel("rbf").block(A, B)
