"""Every kernel against every law; how blocks are walked: exactness where it is promised, and memory."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.gaussian_process import kernels as gp

from dkrr.kernels import Constant, Kernel, Linear, kernel_from_dict, make_kernel
from dkrr.kernels.pairwise import Pairwise
from tests.kernels.functions import block_rbf
from tests.laws import assert_close, check_kernel, check_round_trip
from tests.reference import reference_kernel

ARD = [0.5, 1.0, 2.0, 3.0, 0.25]
rbf, laplacian, linear = make_kernel("rbf", gamma=0.7), make_kernel("laplacian"), Linear()

KERNELS: dict[str, Kernel] = {
    "linear": linear,
    "poly": make_kernel("poly"),
    "poly of degree 1": make_kernel("poly", degree=1, gamma=2.0),
    "poly of degree 12": make_kernel("poly", degree=12, gamma=0.2),
    "poly of degree 2.5": make_kernel("polynomial", degree=2.5, coef0=0.5),
    "rbf": make_kernel("rbf"),
    "rbf, narrow": make_kernel("rbf", gamma=20.0),
    "rbf, one length scale a feature": make_kernel("rbf", gamma=0.3, kernel_params={"length_scale": ARD}),
    "laplacian": laplacian,
    "laplacian, one length scale a feature": make_kernel("laplacian", kernel_params={"length_scale": ARD}),
    "matern 0.5": make_kernel("matern", kernel_params={"nu": 0.5, "length_scale": 0.6}),
    "matern 1.5": make_kernel("matern"),
    "matern 1.5, narrow": make_kernel("matern", kernel_params={"length_scale": 0.05}),
    "matern 2.5, one length scale a feature": make_kernel("matern", kernel_params={"nu": 2.5, "length_scale": ARD}),
    "cosine": make_kernel("cosine"),
    "sigmoid": make_kernel("sigmoid", gamma=0.1, coef0=-0.2),
    "chi2": make_kernel("chi2", gamma=0.4),
    "constant": Constant(value=2.5),
    "sum": rbf + laplacian + 0.5,
    "sum with a constant first": 0.25 + linear,
    "product": 3 * rbf * laplacian,
    "mixture": 2.0 * rbf + linear * (laplacian + 1),
    "scikit-learn RBF": make_kernel(gp.RBF(0.8)),
    "scikit-learn DotProduct": make_kernel(gp.DotProduct(0.5)),
    "scikit-learn composite": make_kernel(2.0 * gp.Matern(ARD, nu=1.5) + gp.RationalQuadratic(alpha=0.7) ** 2),
    "function of blocks": make_kernel(block_rbf, kernel_params={"gamma": 0.4}),
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_laws(kernel: Kernel) -> None:
    check_kernel(kernel, np.random.default_rng(7))


@pytest.mark.parametrize("name", ["linear", "poly", "rbf", "laplacian", "matern", "chi2"])
@pytest.mark.parametrize("num_features", [1, 40])
def test_laws_with_one_feature_and_with_many(name: str, num_features: int) -> None:
    check_kernel(make_kernel(name), np.random.default_rng(8), num_features=num_features)


@dataclass(frozen=True, kw_only=True, repr=False)
class Smoother(Pairwise):
    """k(a, b) = (1 + r + 2/5 r^2 + 1/15 r^3) exp(-r), r = sqrt(7) |a - b|: Matern 7/2"""

    name = "smoother"
    distance = "squared"
    c = 7.0  # type: ignore[assignment]
    positive_semidefinite = True

    @staticmethod
    def formula(v: Any, x: Any) -> Any:
        r = v.sqrt(x, out=x)
        return (r * (r * (r * (1 / 15) + 0.4) + 1.0) + 1.0) * v.exp(-r)


def test_a_kernel_is_a_formula() -> None:
    kernel, rng = Smoother(), np.random.default_rng(12)
    A, B = rng.random((300, 5)), rng.random((70, 5))
    assert_close(kernel(A, B), gp.Matern(nu=3.5)(A, B), "against scikit-learn's general Matern kernel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.laws.reference_kernel", lambda values, A, B: gp.Matern(nu=3.5)(A, B))
        check_kernel(kernel, rng, storable=False)


positive = st.floats(1e-3, 1e3)
leaves = st.one_of(
    st.just({"kernel": "linear"}),
    st.just({"kernel": "cosine"}),
    st.builds(lambda v: {"kernel": "constant", "value": v}, positive),
    st.builds(lambda g: {"kernel": "chi2", "gamma": g}, positive),
    st.builds(
        lambda k, g, s: {"kernel": k, "gamma": g, "length_scale": s},
        st.sampled_from(["rbf", "laplacian"]),
        st.none() | positive,
        positive | st.lists(positive, min_size=3, max_size=3),
    ),
    st.builds(
        lambda nu, s: {"kernel": "matern", "nu": nu, "length_scale": s}, st.sampled_from([0.5, 1.5, 2.5]), positive
    ),
    st.builds(
        lambda g, p, c: {"kernel": "poly", "gamma": g, "degree": p, "coef0": c},
        st.none() | st.floats(0.01, 2.0),
        st.integers(1, 9),
        st.floats(0.0, 2.0),
    ),
)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, min_size=1, max_size=3).flatmap(
        lambda parts: st.sampled_from([{"kernel": "sum", "terms": parts}, {"kernel": "product", "factors": parts}])
    ),
    max_leaves=4,
)


@given(values=trees, m=st.integers(1, 20), n=st.integers(1, 20), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_any_parameters_and_any_tree(values: dict, m: int, n: int, seed: int) -> None:

    rng = np.random.default_rng(seed)
    A, B = rng.random((m, 3)), rng.random((n, 3))
    kernel = kernel_from_dict(values)
    assert kernel_from_dict(kernel.to_dict()) == kernel
    resolved = kernel.resolve(3)
    check_round_trip(resolved, A)
    expected = reference_kernel(resolved.to_dict(), A, B)
    # gamma up to 1e3 multiplies the rounding error of |a - b|^2 in the exponent
    scale = 1e3 * max(1.0, np.abs(expected).max())
    assert_close(resolved(A, B) / scale, expected / scale, f"{kernel}")


RNG = np.random.default_rng(6)


@pytest.mark.parametrize("n", [700, 2100])
def test_symmetry_and_the_diagonal_are_exact_far_from_the_origin(n: int) -> None:
    # the product of augmented rows is off by far more than an ulp here, and differently on both sides of the diagonal
    rows = RNG.random((n, 3)) + 5
    for kernel in (make_kernel("rbf"), make_kernel("matern", kernel_params={"length_scale": 4.0})):
        plain = kernel.block(rows, rows)
        assert not (plain.diagonal() == 1.0).all(), "the case is too easy: it does not test anything"
        assert plain.max() <= 1.0, "not clipped: a squared distance below 0 makes a covariance above 1, or NaN"
        out = kernel.block(rows, rows, same=True)
        assert np.array_equal(out, out.T)
        assert (out.diagonal() == 1.0).all()


WALKED: list[Kernel] = [
    *(make_kernel(name) for name in ("linear", "poly", "rbf", "laplacian", "matern", "cosine", "chi2", "sigmoid")),
    make_kernel("matern", kernel_params={"nu": 0.5, "length_scale": [2.0] * 20}),
    2 * make_kernel("rbf") + make_kernel("linear") * make_kernel("laplacian"),
]


@pytest.mark.parametrize("kernel", WALKED, ids=str)
@pytest.mark.parametrize("same", [False, True])
def test_memory_besides_the_block_is_small(kernel: Kernel, same: bool) -> None:
    m, n, d = 2000, 1500, 20
    A = RNG.random((m, d))
    B = A if same else RNG.random((n, d))
    kernel = kernel.resolve(d)
    frame = np.empty((len(A), len(B) + 8))
    kernel.block(A, B, frame[:, : len(B)], same=same)  # the memory of loading compiled code is not the block's
    tracemalloc.start()
    try:
        kernel.block(A, B, frame[:, : len(B)], same=same)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < frame.nbytes / 2, "there is a temporary of the size of the block"
