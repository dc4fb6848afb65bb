"""What a kernel function does with its rows and returns of them, and kernels of scikit-learn."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.gaussian_process import kernels as theirs

import dkrr
from dkrr.errors import ParameterError
from dkrr.kernels import FunctionKernel, make_kernel

RNG = np.random.default_rng(0)
X, Z = 2 * RNG.standard_normal((40, 3)), 2 * RNG.standard_normal((7, 3))
Y = np.sin(X[:, 0])
WAYS: dict[str, dict[str, Any]] = {"in memory": {}, "tiles": {"tile_size": 16}, "cg": {"tile_size": 16, "solver": "cg"}}


def clipped(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    return np.asarray(np.clip(A, -1, 1) @ np.clip(B, -1, 1).T)


def clips(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    np.clip(A, -1, 1, out=A)
    np.clip(B, -1, 1, out=B)
    return np.asarray(A @ B.T)


def clips_pairs(a: np.ndarray, b: np.ndarray) -> float:
    a -= b
    return float(np.exp(-a @ a))


def pairs(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.exp(-(a - b) @ (a - b)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("changing", "pure", "kind"), [(clips, clipped, "block"), (clips_pairs, pairs, "pair")])
def test_a_function_that_works_in_its_rows_changes_nobody_elses(changing: Any, pure: Any, kind: str, way: str) -> None:
    x, z = X.copy(), Z.copy()
    kernels = [FunctionKernel(function=function, kind=kind) for function in (changing, pure)]
    found, expected = (dkrr.KernelRidge(0.1, kernel=kernel, **WAYS[way]).fit(x, Y) for kernel in kernels)
    np.testing.assert_allclose(found.predict(z), expected.predict(Z), rtol=1e-12)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(z, Z)


def with_imaginary_part(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    return np.asarray(A @ B.T + 1j)


def masked(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    return np.ma.masked_less(A @ B.T, 0.5)  # type: ignore[no-any-return, no-untyped-call]


def dates(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    return np.zeros((len(A), len(B)), "M8[s]")


def imaginary_pairs(a: np.ndarray, b: np.ndarray) -> Any:
    return complex(a @ b, 1.0)


@pytest.mark.parametrize(
    ("function", "kind", "what"),
    [
        (with_imaginary_part, None, "complex128"),  # seen by the probe
        (with_imaginary_part, "block", "complex128"),
        (masked, "block", "masked"),
        (dates, "block", "datetime64"),
        (imaginary_pairs, "pair", "complex128"),
    ],
)
def test_what_is_no_real_number_is_no_value_of_a_kernel(function: Any, kind: Any, what: str) -> None:
    kernel = FunctionKernel(function=function, kind=kind)
    with pytest.raises(dkrr.ParameterError, match=rf"kernel function {function.__name__} returned .*{what}"):
        dkrr.KernelRidge(0.1, kernel=kernel).fit(X, Y)


def test_a_masked_array_without_masked_values_is_an_array() -> None:
    def whole(A: np.ndarray, B: np.ndarray) -> np.ndarray:
        return np.ma.masked_array(clipped(A, B))  # type: ignore[no-any-return, no-untyped-call]

    found, expected = (dkrr.KernelRidge(0.1, kernel=kernel).fit(X, Y).predict(Z) for kernel in (whole, clipped))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "kernel",
    [theirs.Matern(nu=np.inf), 2.0 * theirs.Matern(0.7, nu=np.inf) + theirs.RBF([np.inf, 1.0, 2.0])],
    ids=["matern", "sum"],
)
def test_parameters_that_are_infinite_are_stored(tmp_path: Path, kernel: Any) -> None:
    expected = dkrr.KernelRidge(0.1, kernel=kernel).fit(X, Y).predict(Z)
    tiled = dkrr.KernelRidge(0.1, kernel=kernel, tile_size=16, store=str(tmp_path / "store")).fit(X, Y)
    np.testing.assert_allclose(tiled.predict(Z), expected, rtol=1e-9)
    tiled.save(tmp_path / "model.zarr")
    model = dkrr.load_model(tmp_path / "model.zarr")
    np.testing.assert_array_equal(model.predict(Z), tiled.predict(Z))
    assert model.kernel is not None
    assert model.kernel.to_dict() == make_kernel(kernel).to_dict()


def test_a_parameter_that_is_no_number_is_refused() -> None:
    with pytest.raises(dkrr.ParameterError, match="length_scale = nan of RBF"):
        make_kernel(theirs.RBF(np.nan)).to_dict()


def module_with(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the user's with a kernel function k, as its file says now."""
    (folder / "their_kernels.py").write_text(f"import numpy as np\n\n{text}\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "their_kernels", raising=False)
    importlib.invalidate_caches()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return importlib.import_module("their_kernels").k


WIDTH = "def k(A, B):\n    return np.exp(-{} * ((A[:, None] - B[None]) ** 2).sum(-1))"
TABLE = """T = {{6: {}, 8: 0.5}}
def k(A, B):
    a, b = (np.array([T.get(int(v), 1.0) for v in R[:, 0]]) for R in (A, B))
    return a[:, None] * b * np.exp(-((A[:, None, 1:] - B[None, :, 1:]) ** 2).sum(-1))"""


@pytest.mark.parametrize("first", [100, 120])
@pytest.mark.parametrize(("text", "values"), [(WIDTH, (3.0, 3.001)), (TABLE, (2.0, 2.001))], ids=["width", "table"])
def test_what_a_function_made_before_it_was_changed_is_not_used(
    text: str, values: tuple[float, float], first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    x = np.column_stack([rng.choice([1, 6, 8], 120), rng.random((120, 2))])
    y = np.sin(5 * x[:, 1])
    for value, n in zip(values, (first, 120), strict=True):
        k = module_with(text.format(value), tmp_path, monkeypatch)
        gram = dkrr.gram_matrix(x[:n], k, store=tmp_path / "store", tile_size=32).compute()
        np.testing.assert_allclose(gram, k(x[:n], x[:n]), atol=1e-14)
        est = dkrr.KernelRidge(0.1, kernel=k, solver="cholesky", tile_size=32, store=tmp_path / "store")
        inverse = np.linalg.inv(k(x[:n], x[:n]) + 0.1 * np.eye(n))
        left_out = est.fit(x[:n], y[:n]).leave_one_out().residuals[:, 0]
        np.testing.assert_allclose(left_out, inverse @ y[:n] / np.diag(inverse), atol=1e-9)


def test_a_model_of_a_function_that_was_changed_since_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    k = module_with(WIDTH.format(3.0), tmp_path, monkeypatch)
    dkrr.KernelRidge(0.1, kernel=k).fit(X, Y).save(tmp_path / "model.zarr")
    module_with(f"# the same\n{WIDTH.format(3.0)}", tmp_path, monkeypatch)
    expected = dkrr.load_model(tmp_path / "model.zarr").predict(Z)
    module_with(WIDTH.format(3.01), tmp_path, monkeypatch)
    with pytest.raises(ParameterError, match="it was changed"):
        dkrr.load_model(tmp_path / "model.zarr").predict(Z)
    module_with(WIDTH.format(3.0), tmp_path, monkeypatch)
    np.testing.assert_array_equal(dkrr.load_model(tmp_path / "model.zarr").predict(Z), expected)


def test_parameters_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """def k(A, B, **w):
    s = np.array([v for item in w.values() for v in (item.values() if isinstance(item, dict) else [item])])
    return (A * s) @ B.T"""
    k = module_with(text, tmp_path, monkeypatch)
    params = {"zeta": {"d": 3.0, "b": 0.2}, "alpha": 1.0}
    est = dkrr.KernelRidge(0.1, kernel=k, kernel_params=params, tile_size=16, store=tmp_path / "store").fit(X, Y)
    est.save(tmp_path / "model.zarr")
    np.testing.assert_array_equal(dkrr.load_model(tmp_path / "model.zarr").predict(Z), est.predict(Z))
    other = {"alpha": 1.0, "zeta": {"b": 0.2, "d": 3.0}}
    again = dkrr.KernelRidge(0.1, kernel=k, kernel_params=other, tile_size=16, store=tmp_path / "store").fit(X, Y)
    np.testing.assert_allclose(
        again.predict(Z), dkrr.KernelRidge(0.1, kernel=k, kernel_params=other).fit(X, Y).predict(Z), rtol=1e-9
    )


def test_keys_that_would_become_text_are_refused_where_they_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    k = module_with("def k(A, B, w=None):\n    return w['all'].get(6, 1) * (A @ B.T)", tmp_path, monkeypatch)
    est = dkrr.KernelRidge(0.1, kernel=k, kernel_params={"w": {"all": {6: 2.0}}}).fit(X, Y)
    with pytest.raises(ParameterError, match="keys that are no text"):
        est.save(tmp_path / "model.zarr")
    assert not (tmp_path / "model.zarr").exists()
