"""Kernels of :mod:`sklearn.gaussian_process.kernels`, wrapped. scikit-learn is imported only when one is met.

They are evaluated by scikit-learn itself, strip by strip, with its temporaries of the size of a strip. The native
kernels of the same names are several times faster, and exact for rows of 1e8 lengths, which scikit-learn rounds by 1e-8
of one when it divides them by the length scale.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from dkrr.errors import ParameterError
from dkrr.kernels.base import Kernel
from dkrr.kernels.checks import check_names, nearest
from dkrr.kernels.strips import Fill, FloatArray

__all__ = ["SklearnKernel", "is_sklearn_kernel", "sklearn_kernel_from_dict"]

MODULE = "sklearn.gaussian_process.kernels"
INFINITE = "float"  # the only key of a dictionary that stands for an infinite number


def is_sklearn_kernel(value: Any) -> bool:
    """Whether ``value`` is a Gaussian-process kernel, told by the names of its bases, without the import."""
    return any(base.__name__ == "Kernel" and base.__module__ == MODULE for base in type(value).__mro__)


@dataclass(frozen=True, kw_only=True)
class SklearnKernel(Kernel):
    """k(A, B) = kernel(A, B) of a scikit-learn Gaussian-process kernel, its hyperparameters as they are

    ``WhiteKernel`` is refused: between two sets of rows it is 0, and its noise on the diagonal is what ``alpha`` is.
    """

    name = "sklearn"
    kernel: Any

    def __post_init__(self) -> None:
        if not is_sklearn_kernel(self.kernel):
            raise ParameterError(f"kernel = {self.kernel!r}", hint=f"an object of {MODULE} is expected")
        from sklearn.base import clone

        kernel = clone(self.kernel)  # ours alone from here: theirs can be changed in place
        for part in _parts(kernel):
            if type(part).__name__ == "WhiteKernel":
                raise ParameterError(
                    f"{part!r} inside the kernel {self.kernel!r}", hint="leave it out and give its noise_level as alpha"
                )
            if type(part).__name__ == "CompoundKernel":
                raise ParameterError(f"{self.kernel!r} has several outputs", hint="give one kernel")
        object.__setattr__(self, "kernel", kernel)

    def __hash__(self) -> int:
        return hash(repr(self.kernel))

    @property
    def stationary(self) -> bool:
        return bool(self.kernel.is_stationary())

    def extent(self, rows: FloatArray) -> float:
        lengths = [part.length_scale for part in _parts(self.kernel) if hasattr(part, "length_scale")]
        return float(np.sqrt(np.square(rows).sum(axis=1).max()) / min(map(np.min, lengths))) if lengths else 0.0

    def resolve(self, num_features: int) -> Self:
        super().resolve(num_features)
        try:
            self.kernel(np.full((1, num_features), 0.5))
        except ValueError as error:  # an anisotropic length scale of another length
            raise ParameterError(
                f"kernel {self.kernel!r} does not take rows of {num_features} features ({error})",
                hint="give a number, or one per feature",
            ) from error
        return self

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        def fill(rows: slice, columns: slice, strip: FloatArray) -> None:
            strip[...] = self.kernel(A[rows], B[columns])

        return fill

    def _diag(self, A: FloatArray) -> FloatArray:
        return np.asarray(self.kernel.diag(A), dtype=np.float64)

    def to_dict(self) -> dict[str, Any]:
        return {"kernel": self.name, **_node(self.kernel)}


def _parts(kernel: Any) -> list[Any]:
    """The kernel and all kernels nested in it."""
    nested = [value for value in kernel.get_params(deep=False).values() if is_sklearn_kernel(value)]
    return [kernel, *(part for value in nested for part in _parts(value))]


def _node(kernel: Any) -> dict[str, Any]:
    """Class and parameters; without the bounds, which only matter to scikit-learn's optimizer."""
    kind = type(kernel)
    if kind.__module__ != MODULE:
        raise ParameterError(
            f"kernel class {kind.__module__}.{kind.__name__} cannot be stored by name",
            hint=f"only those of {MODULE} can",
        )
    parameters = {}
    for name, value in sorted(kernel.get_params(deep=False).items()):
        if not name.endswith("_bounds"):
            parameters[name] = _node(value) if is_sklearn_kernel(value) else _plain(kind.__name__, name, value)
    return {"class": kind.__name__, "parameters": parameters}


def _plain(kernel: str, name: str, value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(kernel, name, item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(kernel, name, item) for key, item in value.items()}
    if isinstance(value, float) and math.isinf(value):
        return {INFINITE: str(value)}  # JSON has no such number
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and not math.isnan(value)):
        return value
    raise ParameterError(f"{name} = {value!r} of {kernel} cannot be stored", hint="numbers, strings and lists can")


def sklearn_kernel_from_dict(values: dict[str, Any]) -> SklearnKernel:
    """The inverse of :meth:`SklearnKernel.to_dict`, for the dictionary without its "kernel" entry."""
    return SklearnKernel(kernel=_build(values))


def _build(node: dict[str, Any]) -> Any:
    from sklearn.gaussian_process import kernels

    check_names("kernel 'sklearn'", node, ("class", "parameters"))
    allowed = {
        name: kind
        for name, kind in vars(kernels).items()
        if inspect.isclass(kind)
        and issubclass(kind, kernels.Kernel)
        and kind.__module__ == MODULE
        and not inspect.isabstract(kind)
    }
    name, parameters = node.get("class"), node.get("parameters", {})
    if name not in allowed:
        raise ParameterError(f"scikit-learn kernel class {name!r}", hint=nearest(str(name), allowed))
    check_names(f"scikit-learn kernel {name}", parameters, inspect.signature(allowed[name]).parameters)
    return allowed[name](**{key: _value(value) for key, value in parameters.items()})


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        if "class" in value:
            return _build(value)
        if set(value) == {INFINITE}:
            return float(value[INFINITE])
        return {key: _value(item) if isinstance(item, dict) else item for key, item in value.items()}
    return np.asarray([_value(item) for item in value]) if isinstance(value, list) else value
