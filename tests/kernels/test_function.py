"""Functions as kernels: what they take, how they are named, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from dkrr.errors import DataError, ParameterError
from dkrr.kernels import kernel_from_dict, make_kernel
from tests.kernels import functions

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
def test_what_is_no_kernel_is_refused_with_its_own_words(function: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make_kernel(function).resolve(4)


def test_what_goes_wrong_after_the_probe_is_named() -> None:
    def shrinking(A: np.ndarray, B: np.ndarray) -> np.ndarray:
        return (A @ B.T)[: max(3, len(A) - 1)]

    with pytest.raises(ParameterError, match=r"returned shape \(6, 5\) for blocks of 7 and 5 rows"):
        make_kernel(shrinking).block(RNG.random((7, 4)), RNG.random((5, 4)))

    def infinite(A: np.ndarray, B: np.ndarray) -> np.ndarray:
        return 1.0 / np.maximum(5.0 - A.sum(1)[:, None] - B.sum(1)[None, :], 0.0)

    with pytest.raises(DataError, match=r"infinite.*not finite"):
        make_kernel(infinite).block(np.full((7, 4), 2.0), np.full((5, 4), 2.0))
