"""How blocks are walked: exactness where it is promised, and memory within what is promised."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from dkrr.kernels import Kernel, make_kernel

RNG = np.random.default_rng(6)


@pytest.mark.parametrize("n", [700, 2100])
def test_symmetry_and_the_diagonal_are_exact_far_from_the_origin(n: int) -> None:
    # the product of augmented rows is off by far more than an ulp here, and differently on both sides of the diagonal
    rows = RNG.random((n, 3)) + 6
    for name in ("rbf", "matern"):
        kernel = make_kernel(name)
        plain = kernel.block(rows, rows)
        assert not (plain.diagonal() == 1.0).all(), "the case is too easy: it does not test anything"
        assert plain.max() <= 1.0, "not clipped: a squared distance below 0 makes a covariance above 1, or NaN"
        out = kernel.block(rows, rows, same=True)
        assert np.array_equal(out, out.T)
        assert (out.diagonal() == 1.0).all()


KERNELS: list[Kernel] = [
    *(make_kernel(name) for name in ("linear", "poly", "rbf", "laplacian", "matern", "cosine", "chi2", "sigmoid")),
    make_kernel("matern", kernel_params={"nu": 0.5, "length_scale": [2.0] * 20}),
    2 * make_kernel("rbf") + make_kernel("linear") * make_kernel("laplacian"),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
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
