"""How blocks are walked: exactness where it is promised, and memory within what is promised."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from dkrr.kernels import Kernel, Linear, make_kernel
from dkrr.kernels.strips import fill_rectangle, fill_symmetric, strip_shape

RNG = np.random.default_rng(6)


@pytest.mark.parametrize(("m", "n", "d"), [(1, 1, 1), (5000, 1, 3), (1, 5000, 3), (3000, 5000, 784), (10, 0, 2)])
def test_strips_are_never_empty_and_never_larger_than_the_block(m: int, n: int, d: int) -> None:
    rows, columns = strip_shape(m, n, d)
    assert 1 <= rows <= max(m, 1)
    assert 1 <= columns <= max(n, 1)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (300, 70), (33, 4100), (2049, 3)])
def test_every_entry_is_filled_once(m: int, n: int) -> None:
    counts = np.zeros((m, n))

    def fill(rows: slice, columns: slice, strip: np.ndarray) -> None:
        assert strip.flags.c_contiguous
        counts[rows, columns] += 1
        strip[...] = np.arange(m)[rows, None] * n + np.arange(n)[columns]

    frame = np.full((m, n + 1), np.nan)
    fill_rectangle(fill, frame[:, :n], 4, None)
    assert (counts == 1).all()
    assert np.array_equal(frame[:, :n].ravel(), np.arange(m * n))


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 130, 2100])
def test_the_upper_triangle_is_the_mirrored_lower_one(n: int) -> None:
    values = RNG.random((n, n))  # not symmetric at all

    def fill(rows: slice, columns: slice, strip: np.ndarray) -> None:
        strip[...] = values[rows, columns]

    out = np.full((n, n), np.nan)
    fill_symmetric(fill, out, 4, None)
    assert np.array_equal(out, np.tril(values) + np.tril(values, -1).T)


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


def test_calling_a_kernel_with_one_object_twice_is_exactly_symmetric() -> None:
    rows = RNG.random((200, 3)) + 1e4
    K = make_kernel("rbf")(rows, rows)
    assert np.array_equal(K, K.T)
    assert (K.diagonal() == 1.0).all()


def test_calling_a_kernel_is_accurate_far_from_the_origin_also_inside_a_mixture() -> None:
    near = np.round(RNG.random((50, 3)) * 256) / 256
    far = near + 2.0**24
    rbf = make_kernel("rbf")
    exact = rbf(near, near[:9])
    np.testing.assert_allclose(rbf.block(far, far[:9]), exact, rtol=1e-13)
    np.testing.assert_allclose(rbf(far, far[:9]), exact, rtol=1e-13)
    mixture = Linear() * 1e-30 + rbf  # not stationary, so that nobody else can centre the rows of rbf
    np.testing.assert_allclose(mixture.block(far, far[:9]), exact, rtol=1e-12)


KERNELS: list[Kernel] = [
    *(make_kernel(name) for name in ("linear", "poly", "rbf", "laplacian", "matern", "cosine", "chi2", "sigmoid")),
    make_kernel("matern", kernel_params={"nu": 0.5, "length_scale": [2.0] * 20}),
    2 * make_kernel("rbf") + make_kernel("linear") * make_kernel("laplacian"),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("same", [False, True])
def test_memory_besides_the_block_stays_within_the_promise(kernel: Kernel, same: bool) -> None:
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
    promised = kernel.workspace_bytes(len(A), len(B), d)
    assert peak <= promised
    assert promised < frame.nbytes, "the promise is no smaller than a temporary of the size of the block"
