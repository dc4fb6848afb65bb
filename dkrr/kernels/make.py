"""From what users write to a Kernel: names with scikit-learn's defaults, functions, foreign kernels, dictionaries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from dkrr.errors import ParameterError
from dkrr.kernels.base import Constant, Kernel, Product, Sum
from dkrr.kernels.checks import check_names, nearest
from dkrr.kernels.dot import Cosine, Linear, Polynomial, Sigmoid
from dkrr.kernels.function import FunctionKernel, import_function
from dkrr.kernels.histogram import Chi2
from dkrr.kernels.precomputed import Precomputed
from dkrr.kernels.sklearn_gp import SklearnKernel, is_sklearn_kernel, sklearn_kernel_from_dict
from dkrr.kernels.stationary import RBF, Laplacian, Matern

__all__ = ["kernel_from_dict", "make_kernel"]

# What a name in kernel="..." may be.
NAMED: dict[str, type[Kernel]] = {
    kind.name: kind for kind in (Chi2, Cosine, Laplacian, Linear, Matern, Polynomial, Precomputed, RBF, Sigmoid)
}
NAMED["polynomial"] = Polynomial
# What else may stand in a dictionary.
COMPOSITE: dict[str, type[Sum] | type[Product]] = {Sum.name: Sum, Product.name: Product}


def make_kernel(
    kernel: Any,
    *,
    gamma: float | None = None,
    degree: float = 3,
    coef0: float = 1,
    kernel_params: Mapping[str, Any] | None = None,
) -> Kernel:
    """Make a kernel from what scikit-learn's KernelRidge takes, and from kernels and dictionaries of ours.

    Parameters
    ----------
    kernel : str, Kernel, callable, scikit-learn Gaussian-process kernel or dict
        A name; a callable on blocks or on pairs of rows; a dictionary as :meth:`Kernel.to_dict` makes it.
    gamma, degree, coef0
        Used by the named kernels that have them and ignored by all others. gamma=None means 1 / d (1.0 for chi2).
    kernel_params
        Further parameters of a named kernel (``nu``, ``length_scale``), or keyword arguments of a callable.

    Raises
    ------
    ParameterError
        An unknown name, parameter or value.
    """
    if not isinstance(kernel_params, Mapping | None):
        raise ParameterError(f"kernel_params is {kernel_params!r}; a dictionary expected", hint='{"nu": 1.5}, or None')
    extra = _copied(dict(kernel_params or {}))
    if isinstance(kernel, str):
        if kernel not in NAMED:
            raise ParameterError(f"kernel = {kernel!r}", hint=nearest(kernel, NAMED))
        fields = {field.name for field in dataclasses.fields(NAMED[kernel])}  # type: ignore[arg-type]  # a dataclass
        check_names(f"kernel_params of kernel {kernel!r}", extra, fields)
        if gamma is not None and "gamma" in extra and extra["gamma"] != gamma:
            raise ParameterError(f"gamma = {gamma!r}, kernel_params['gamma'] = {extra['gamma']!r}", hint="give it once")
        shared = {"gamma": gamma, "degree": degree, "coef0": coef0}
        return NAMED[kernel](**{key: value for key, value in shared.items() if key in fields} | extra)
    if not isinstance(kernel, Kernel | Mapping) and callable(kernel) and not is_sklearn_kernel(kernel):
        return FunctionKernel(function=kernel, kernel_params=extra)
    if extra:
        raise ParameterError(f"kernel_params = {extra!r}", hint="the kernel object already holds its parameters")
    if isinstance(kernel, Kernel):
        return kernel
    if isinstance(kernel, Mapping):
        return kernel_from_dict(kernel)
    if is_sklearn_kernel(kernel):
        return SklearnKernel(kernel=kernel)
    raise ParameterError(f"kernel = {kernel!r}", hint="a name, a callable, a kernel object or a dictionary is expected")


def _copied(value: Any) -> Any:
    """Arrays and what they are in, copied: a kernel is what it was when it was made."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return {name: _copied(item) for name, item in value.items()} if type(value) is dict else value


def kernel_from_dict(values: Mapping[str, Any]) -> Kernel:
    """The inverse of :meth:`Kernel.to_dict`. Missing parameters take their defaults, unknown ones raise.

    Only a function kernel imports anything: the module that it names.

    Raises
    ------
    ParameterError
        An unknown kernel, parameter or value.
    """
    parameters = dict(values)
    name = parameters.pop("kernel", None)
    what = f"kernel {name!r}"
    if not isinstance(name, str):
        raise ParameterError(f"{what} in {dict(values)!r}", hint="the entry 'kernel' holds the name of a kernel")
    if name in COMPOSITE:
        kind = COMPOSITE[name]
        check_names(what, parameters, (kind.parts_field,))
        parts = parameters.get(kind.parts_field, ())
        if not isinstance(parts, (list, tuple)) or not all(isinstance(part, Mapping) for part in parts):
            raise ParameterError(f"{kind.parts_field} = {parts!r} of {what}", hint="a list of kernels is expected")
        return kind(**{kind.parts_field: tuple(kernel_from_dict(part) for part in parts)})
    if name == SklearnKernel.name:
        return sklearn_kernel_from_dict(parameters)
    if name == FunctionKernel.name:
        check_names(what, parameters, ("function", "kernel_params", "kind"))
        function = import_function(parameters.pop("function", None))
        return FunctionKernel(function=function, **parameters)
    registry = NAMED | {Constant.name: Constant}
    if name not in registry:
        every = [*registry, *COMPOSITE, FunctionKernel.name, SklearnKernel.name]
        raise ParameterError(what, hint=nearest(name, every))
    known = {field.name for field in dataclasses.fields(registry[name])}  # type: ignore[arg-type]  # a dataclass
    check_names(what, parameters, known)
    return registry[name](**parameters)
