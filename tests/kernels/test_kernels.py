"""What users write as a kernel: names of scikit-learn, functions, features, and errors that name the remedy."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from sklearn.gaussian_process import kernels as gp
from sklearn.metrics.pairwise import pairwise_kernels

from dkrr.errors import DataError, ParameterError
from dkrr.kernels import RBF, Precomputed, kernel_from_dict, make_kernel
from dkrr.kernels.features import count_features, feature_map
from tests.kernels import functions

nan, inf = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel": "rbg"}, "did you mean 'rbf'.*allowed: .*laplacian"),
        ({"kernel": "Polynominal"}, "did you mean 'polynomial'"),
        ({"kernel": "gaussian-ish?"}, "allowed: chi2"),
        ({"kernel": 3}, "a name, a callable"),
        ({"kernel": None}, "a name, a callable"),
        ({"kernel": "rbf", "gamma": 0}, "gamma = 0 .*> 0"),
        ({"kernel": "rbf", "gamma": np.longdouble("1e-400")}, "gamma = .*> 0"),
        ({"kernel": "poly", "degree": 4, "kernel_params": {"degree": 2}}, "degree = 4, .* = 2.*give it once"),
        ({"kernel": "poly", "coef0": 5, "kernel_params": {"coef0": 2}}, "coef0 = 5, .* = 2.*give it once"),
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


def test_chi2_of_features_whose_squares_underflow() -> None:
    unit, rows = 1e-160, np.random.default_rng(0).random((9, 4))
    found = make_kernel("chi2", gamma=1 / unit).block(unit * rows, unit * rows)
    np.testing.assert_allclose(found, make_kernel("chi2").block(rows, rows), rtol=1e-13)


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


RNG = np.random.default_rng(5)


@pytest.mark.parametrize("num_features", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("function", "kind"),
    [(functions.block_rbf, "block"), (functions.pair_overlap, "pair"), (functions.pair_dot, "pair")],
)
def test_blocks_and_pairs_are_told_apart(function: Any, kind: str, num_features: int) -> None:
    slow = pytest.warns(UserWarning, match="takes pairs of rows, which is slow") if kind == "pair" else nullcontext()
    with slow:
        kernel = make_kernel(function).resolve(num_features)
    A, B = RNG.random((7, num_features)), RNG.random((5, num_features))
    alone = [[np.squeeze(function(*((a[None], b[None]) if kind == "block" else (a, b)))) for b in B] for a in A]
    np.testing.assert_allclose(kernel.block(A, B), alone)  # warnings are errors here: no second one
    assert kernel_from_dict(kernel.to_dict()) == kernel


def test_keyword_arguments_reach_the_function() -> None:
    A, B = RNG.random((7, 4)), RNG.random((5, 4))
    kernel = make_kernel(functions.block_rbf, kernel_params={"gamma": 3.0})
    np.testing.assert_allclose(kernel(A, B), make_kernel("rbf", gamma=3.0)(A, B), rtol=1e-12)
    assert kernel.to_dict()["kernel_params"] == {"gamma": 3.0}


def test_functions_without_an_importable_name_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def local(A: np.ndarray, B: np.ndarray) -> np.ndarray:
        return A @ B.T

    for function in (local, lambda A, B: A @ B.T, local.__get__):
        with pytest.raises(ParameterError, match="top level of a module"):
            make_kernel(function).to_dict()
    monkeypatch.setattr(functions.pair_dot, "__module__", "__main__")
    with pytest.raises(ParameterError, match="of __main__ cannot be stored"):
        make_kernel(functions.pair_dot).to_dict()


def test_arguments_that_are_not_json_are_not_stored() -> None:
    for value in (np.ones(2), float("nan"), {1, 2}):
        with pytest.raises(ParameterError, match="kernel_params of kernel function block_rbf cannot be stored"):
            make_kernel(functions.block_rbf, kernel_params={"gamma": value}).to_dict()


@pytest.mark.parametrize("name", ["tests.kernels.functions:absent", "no_such_module_here:f", "block_rbf", ":f", None])
def test_names_that_cannot_be_imported(name: Any) -> None:
    with pytest.raises(ParameterError, match="kernel function"):
        kernel_from_dict({"kernel": "function", "function": name})


def broken(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    raise KeyError("the table is missing")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (functions.lopsided, "lopsided is not symmetric"),
        (functions.normalised, r"normalised makes .* an entry may depend on its two rows only"),
        (functions.wrong_shape, "wrong_shape made neither"),
        (broken, r"made neither .*KeyError: 'the table is missing'"),
    ],
)
@pytest.mark.parametrize("size", [1.0, 1e-12])
def test_what_is_no_kernel_is_refused_with_its_own_words(function: Any, message: str, size: float) -> None:
    def small(A: np.ndarray, B: np.ndarray) -> np.ndarray:
        return np.asarray(size * function(A, B))

    small.__qualname__ = small.__name__ = function.__name__
    with pytest.raises(ParameterError, match=message):
        make_kernel(small).resolve(4)


def test_what_goes_wrong_after_the_probe_is_named() -> None:
    def shrinking(A: np.ndarray, B: np.ndarray) -> np.ndarray:
        return (A @ B.T)[: max(3, len(A) - 1)]

    with pytest.raises(ParameterError, match=r"returned shape \(6, 5\) for blocks of 7 and 5 rows"):
        make_kernel(shrinking).block(RNG.random((7, 4)), RNG.random((5, 4)))

    def infinite(A: np.ndarray, B: np.ndarray) -> np.ndarray:
        return 1.0 / np.maximum(5.0 - A.sum(1)[:, None] - B.sum(1)[None, :], 0.0)

    with pytest.raises(DataError, match=r"infinite.*not finite"):
        make_kernel(infinite).block(np.full((7, 4), 2.0), np.full((5, 4), 2.0))


DRAWS = np.random.default_rng(3)
A, B = DRAWS.random((300, 6)), DRAWS.random((70, 6))
NORMAL_A, NORMAL_B = DRAWS.standard_normal((300, 6)), DRAWS.standard_normal((70, 6))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("linear", {}),
        ("poly", {}),
        ("polynomial", {"gamma": 0.3, "degree": 4, "coef0": 2.0}),
        ("rbf", {}),
        ("rbf", {"gamma": 2.0}),
        ("laplacian", {}),
        ("laplacian", {"gamma": 0.2}),
        ("cosine", {}),
        ("sigmoid", {}),
        ("sigmoid", {"gamma": 0.05, "coef0": -1}),
    ],
)
def test_named_kernels(name: str, parameters: dict[str, Any]) -> None:
    kernel = make_kernel(name, **parameters)
    expected = pairwise_kernels(NORMAL_A, NORMAL_B, metric=name, filter_params=True, **parameters)
    np.testing.assert_allclose(kernel(NORMAL_A, NORMAL_B), expected, rtol=1e-13, atol=1e-13 * np.abs(expected).max())


@pytest.mark.parametrize(
    "foreign",
    [
        gp.Matern(0.75, nu=0.5),
        gp.Matern([0.5, 1.0, 2.0, 3.0, 4.0, 0.7], nu=2.5),
        gp.ConstantKernel(2.0) * gp.Matern([1.0, 2.0, 3.0, 0.5, 0.6, 0.7], nu=2.5) + gp.DotProduct(0.3),
        gp.ExpSineSquared(1.2, 3.0),
        gp.RationalQuadratic(0.8, 0.4) ** 2,
        gp.PairwiseKernel(gamma=0.2, metric="laplacian"),
    ],
    ids=lambda kernel: type(kernel).__name__,
)
def test_gaussian_process_kernels(foreign: Any) -> None:
    kernel = make_kernel(foreign)
    np.testing.assert_allclose(kernel.block(A, A, same=True), foreign(A), rtol=1e-13, atol=1e-13)
    if isinstance(foreign, gp.Matern):
        kernel = make_kernel("matern", kernel_params={"nu": foreign.nu, "length_scale": foreign.length_scale})
    np.testing.assert_allclose(kernel(A, B), foreign(A, B), rtol=1e-13, atol=1e-13)


def test_parameters_of_other_kernels_are_ignored() -> None:
    for name in ("linear", "cosine", "matern", "precomputed"):
        assert make_kernel(name, gamma=0.3, degree=7, coef0=9) == make_kernel(name)


@pytest.mark.parametrize("d", [1, 2, 3, 7])
@pytest.mark.parametrize("degree", [1, 2, 3, 5])
@pytest.mark.parametrize(("gamma", "coef0"), [(None, 1), (0.7, 2.5), (1.3, 0)])
def test_inner_products_are_the_kernel(d: int, degree: int, gamma: float | None, coef0: float) -> None:
    kernel = make_kernel("poly", degree=degree, gamma=gamma, coef0=coef0).resolve(d)
    rng = np.random.default_rng(d * 10 + degree)
    x, z = rng.standard_normal((40, d)), rng.standard_normal((30, d))
    features = feature_map(kernel, d)
    fx, fz = features.design(x), features.design(z)
    assert fx.shape == (40, features.num_features)
    scale = np.sqrt(np.outer(kernel.diag(x), kernel.diag(z)))
    assert np.max(np.abs(fx @ fz.T - kernel(x, z)) / scale) < 1e-14 * 5


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ({"kernel": "rbf", "gamma": 1.0}, "'rbf'.*linear.*poly"),
        ({"kernel": "poly", "degree": 2.5}, "degree = 2.5.*whole"),
        ({"kernel": "poly", "coef0": -1.0}, "coef0 = -1.0.*coef0 >= 0"),
        ({"kernel": "poly", "degree": 300}, "degree = 300.*at most 170"),
        ({"kernel": "sum", "terms": [{"kernel": "linear"}]}, "'sum'"),
        (None, "precomputed"),
    ],
)
def test_kernels_without_finite_features_are_refused(kernel: dict[str, Any] | None, message: str) -> None:
    found = None if kernel is None else kernel_from_dict(kernel)
    assert count_features(found, 3) is None
    with pytest.raises(ParameterError, match=message):
        feature_map(found, 3)
