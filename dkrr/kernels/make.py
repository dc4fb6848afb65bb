"""From what users write to a kernel: names with scikit-learn's defaults, functions, foreign kernels, dictionaries.

A Python function is a kernel on blocks of rows, or on pairs of rows as scikit-learn calls it. Which of the two it is,
is found once by probing it on blocks of 2 and 3 rows. In dictionaries (fingerprints, models) it is named
``module:qualname`` and imported again by that name, so that only importable functions can be stored; lambdas and local
functions work as long as everything stays in one process. A name stands for whatever its module says today, so some
values are kept beside it: tiles of a function that was changed are not those of the function, nor is its model.

Kernels of :mod:`sklearn.gaussian_process.kernels` are evaluated by scikit-learn itself, strip by strip, with its
temporaries of the size of a strip. scikit-learn is imported only when one is met. The native kernels of the same names
are several times faster, and exact for rows of 1e8 lengths, which scikit-learn rounds by 1e-8 of one when it divides
them by the length scale.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import pkgutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from dkrr.errors import ParameterError
from dkrr.kernels.base import Checks, Constant, Fill, FloatArray, Kernel, Product, Sum, check_names, nearest, one_of
from dkrr.kernels.formulas import RBF, Chi2, Cosine, Laplacian, Linear, Matern, Polynomial, Precomputed, Sigmoid

BLOCKS = "let it take blocks (m, d) and (n, d) and return (m, n)"
MODULE = "sklearn.gaussian_process.kernels"
REFUSED = {
    "WhiteKernel": "leave it out and give its noise_level as alpha",
    "CompoundKernel": "it has several outputs: give one kernel",
}
INFINITE = "float"  # the only key of a dictionary that stands for an infinite number


def _callable(kernel: str, name: str, value: Any) -> Callable[..., Any]:
    if not callable(value):
        raise ParameterError(f"{name} = {value!r} of kernel {kernel!r}", hint="a callable is expected")
    return value  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, repr=False)
class FunctionKernel(Kernel):
    """k(A, B) = function(A, B, **kernel_params), or function(a_i, b_j, **kernel_params) for each pair of rows

    Parameters
    ----------
    function
        Symmetric and entry-wise: a block kernel is called on copies of pieces of A and B, which it may change. Returns
        real numbers.
    kernel_params
        Keyword arguments for the function.
    kind
        "block", "pair", or None: probed by :meth:`resolve`.
    probe
        What it makes of some fixed rows, found by :meth:`resolve`; later it has to make the same of them.

    Notes
    -----
    Cost: a pair function takes about a microsecond or more an entry, a thousand times the built-in kernels.
    """

    name = "function"
    checks: ClassVar[Checks] = {
        "function": _callable,
        "kind": one_of("block", "pair"),
        "kernel_params": lambda *given: dict(json.loads(given[2]) if isinstance(given[2], str) else given[2]),
        "probe": lambda *given: tuple(given[2]),
    }
    function: Callable[..., Any]
    kernel_params: Mapping[str, Any] = field(default_factory=dict, hash=False)
    kind: str | None = None
    probe: tuple[str, ...] = ()

    @property
    def _label(self) -> str:
        return f"kernel function {getattr(self.function, '__qualname__', repr(self.function))}"

    def resolve(self, num_features: int) -> Self:
        super().resolve(num_features)
        if self.probe:
            if "_is_checked" not in vars(self):
                self._check_unchanged(num_features)
                object.__setattr__(self, "_is_checked", True)  # until it comes into another process
            return self
        found = self
        if self.kind is None:
            found = dataclasses.replace(self, kind=self._probed_kind(num_features))
            if found.kind == "pair":
                warnings.warn(f"{self._label} takes pairs of rows, which is slow: {BLOCKS}", UserWarning, stacklevel=2)
        return dataclasses.replace(found, probe=tuple(map(repr, found.probed_values(num_features))))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_is_checked"}

    def _parameters(self) -> dict[str, Any]:
        return {name: value for name, value in super()._parameters().items() if name != "probe"}

    def probed_values(self, num_features: int) -> list[float]:
        """k of two fixed rows with three others and with two that are close to them."""
        rows = _probe_rows(num_features)
        near, values = rows[:2] + 0.01 * (rows[2:4] - rows[:2]), np.empty((2, 5))
        with np.errstate(all="ignore"):
            self._fill(rows[:2], np.concatenate([rows[2:], near]), values.size)(slice(0, 2), slice(0, 5), values)
        return [float(value) for value in values.ravel()]

    def _check_unchanged(self, num_features: int) -> None:
        """Raise ParameterError where the function makes other values of the probe's rows than it made then."""
        before, now = np.array(self.probe, dtype=np.float64), np.array(self.probed_values(num_features))
        finite = np.abs(before[np.isfinite(before)])
        # on another processor the last digits are others
        if not np.allclose(before, now, rtol=1e-11, atol=1e-11 * finite.max(initial=0.0), equal_nan=True):
            number = int(np.argmax(np.abs(before - now)))
            raise ParameterError(
                f"{self._label} makes {now[number]:.12g} of two rows of which it made {before[number]:.12g} when this "
                "was computed: it was changed",
                hint="restore the function; or give the new one another name, and fit again",
            )

    def _probed_kind(self, num_features: int) -> str:
        """Find out what the function takes."""
        rows = _probe_rows(num_features)
        cause: Exception | None = None
        for kind, A, B, shape in (("block", rows[:2], rows[2:], (2, 3)), ("pair", rows[0], rows[2], ())):
            try:
                with np.errstate(all="ignore"):
                    values = self._values(A, B)
                    # with d = 3, np.dot of two rows also makes (2, 3) of the blocks, but then fails here
                    alone = self._values(A[1:], B[2:]) if kind == "block" else values
                    if values.shape != shape or alone.ndim != len(shape) or alone.size != 1:
                        continue
                    backward = self._values(B, A).T
            except ParameterError:
                raise
            except Exception as error:  # whatever a foreign function raises on blocks, it may still take pairs
                cause = error
                continue
            near = 1e-8 * np.abs(values[np.isfinite(values)]).max(initial=0.0)
            if not np.allclose(alone.ravel(), values.ravel()[-1], atol=near, equal_nan=True):
                raise ParameterError(
                    f"{self._label} makes {values[1, 2]:g} of two rows within blocks "
                    f"and {alone[0, 0]:g} of the same rows alone",
                    hint="an entry may depend on its two rows only",
                )
            if values.shape != backward.shape or not np.allclose(values, backward, atol=near, equal_nan=True):
                raise ParameterError(f"{self._label} is not symmetric", hint="k(a, b) = k(b, a) is expected")
            return kind
        raise ParameterError(
            f"{self._label} made neither (2, 3) of blocks of 2 and 3 rows "
            "nor a number of two rows" + (f" ({type(cause).__name__}: {cause})" if cause else ""),
            hint=BLOCKS,
        ) from cause

    def _values(self, left: FloatArray, right: FloatArray, shape: tuple[int, ...] | None = None) -> Any:
        """What the function returns of copies (it may work in its rows, and these may be the caller's), as float64.

        ``shape`` is what is expected: (m, n), or () for a pair.
        """
        found = self.function(left.copy(), right.copy(), **self.kernel_params)
        if shape == () and isinstance(found, float):
            return found  # usually; the checks take as long as a short function
        values, is_masked = np.asarray(found), np.ma.is_masked(found)  # asarray uncovers what is under the mask
        if is_masked or values.dtype.kind not in "biufO":
            what = "masked values" if is_masked else f"values of dtype {values.dtype}"
            raise ParameterError(f"{self._label} returned {what}", hint="real numbers are expected")
        if shape is not None and values.shape != shape:
            given = f"blocks of {len(left)} and {len(right)} rows" if shape else "two rows"
            raise ParameterError(
                f"{self._label} returned shape {values.shape} for {given}",
                hint=f"{shape if shape else 'a number'} is expected",
            )
        return values.astype(np.float64, copy=False)

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        def fill(rows: slice, columns: slice, strip: FloatArray) -> None:
            if self.kind == "block":
                strip[...] = self._values(A[rows], B[columns], strip.shape)
                return
            for values, a in zip(strip, A[rows], strict=True):
                values[:] = [self._values(a, b, ()) for b in B[columns]]

        return fill

    def _diag(self, A: FloatArray) -> FloatArray:
        if self.kind == "pair":
            return np.array([self._values(a, a, ()) for a in A])
        return np.array([self._values(a, a, (1, 1))[0, 0] for a in A[:, np.newaxis]])

    def to_dict(self) -> dict[str, Any]:
        try:
            params = json.loads(json.dumps(self.kernel_params, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ParameterError(
                f"kernel_params of {self._label} cannot be stored ({error})",
                hint="numbers, strings, lists and dictionaries can",
            ) from error
        if any(not isinstance(key, str) for key in _keys(self.kernel_params)):
            raise ParameterError(
                f"kernel_params of {self._label} has keys that are no text, which would be text when it is read again",
                hint="write the keys as text, and let the function convert them",
            )
        hint = "define it at the top level of a module that can be imported"
        module, qualname = (getattr(self.function, name, None) for name in ("__module__", "__qualname__"))
        if not module or not qualname or module == "__main__" or "<" in qualname:
            raise ParameterError(f"{self._label} of {module} cannot be stored by name", hint=hint)
        # documents are written with their keys sorted, and a function may take its arguments in order
        shown = params if (text := json.dumps(params)) == json.dumps(params, sort_keys=True) else text
        name = f"{module}:{qualname}"
        if _import_function(name) is not self.function:
            raise ParameterError(f"kernel function {name} is not what importing that name gives", hint=hint)
        found = {"kernel": self.name, "function": name, "kernel_params": shown, "kind": self.kind}
        return found | ({"probe": list(self.probe)} if self.probe else {})


def _keys(value: Any) -> Iterator[Any]:
    """The keys of all dictionaries within a value."""
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _keys(item)
    yield from (value if isinstance(value, Mapping) else ())


def _probe_rows(num_features: int) -> FloatArray:
    """Five rows that are always the same, distinct, and between 0.1 and 0.9."""
    golden = (np.arange(5.0 * num_features) * 0.6180339887498949) % 1.0
    return np.asarray((0.1 + 0.8 * golden).reshape(5, num_features))


def _import_function(name: Any) -> Callable[..., Any]:
    """The function named ``module:qualname``. Importing runs the module's code."""
    try:
        found: Any = pkgutil.resolve_name(str(name))
    except (ValueError, ImportError, AttributeError) as error:
        raise ParameterError(
            f"kernel function {name!r} cannot be imported ({error})",
            hint="give 'module:qualname', and install or correct the module",
        ) from error
    if not callable(found):
        raise ParameterError(f"kernel function {name!r} is a {type(found).__name__}", hint="a callable is expected")
    return found  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, repr=False)
class SklearnKernel(Kernel):
    """k(A, B) = kernel(A, B) of a scikit-learn Gaussian-process kernel, its hyperparameters as they are

    ``WhiteKernel`` is refused: between two sets of rows it is 0, and its noise on the diagonal is what ``alpha`` is.
    """

    name = "sklearn"
    checks: ClassVar[Checks] = {"kernel": lambda kernel, name, value: _own_copy(name, value)}
    kernel: Any = field(hash=False)

    @property
    def stationary(self) -> bool:
        return bool(self.kernel.is_stationary())

    def extent(self, rows: FloatArray) -> float:
        lengths = [part.length_scale for part in _nested(self.kernel) if hasattr(part, "length_scale")]
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
        return lambda rows, columns, strip: np.copyto(strip, self.kernel(A[rows], B[columns]))

    def _diag(self, A: FloatArray) -> FloatArray:
        return np.asarray(self.kernel.diag(A), dtype=np.float64)

    def to_dict(self) -> dict[str, Any]:
        return {"kernel": self.name, **_plain(self.kernel)}


def _is_sklearn_kernel(value: Any) -> bool:
    """Whether ``value`` is a Gaussian-process kernel, told by the names of its bases, without the import."""
    return any(base.__name__ == "Kernel" and base.__module__ == MODULE for base in type(value).__mro__)


def _nested(kernel: Any) -> list[Any]:
    """The kernel and all kernels within it."""
    return [kernel, *filter(_is_sklearn_kernel, kernel.get_params().values())]


def _own_copy(name: str, value: Any) -> Any:
    if not _is_sklearn_kernel(value):
        raise ParameterError(f"{name} = {value!r}", hint=f"an object of {MODULE} is expected")
    from sklearn.base import clone

    for part in _nested(value):
        if type(part).__name__ in REFUSED:
            raise ParameterError(f"{part!r} inside the kernel {value!r}", hint=REFUSED[type(part).__name__])
    return clone(value)  # theirs can be changed in place


def _plain(kernel: Any) -> Any:
    """Class and parameters as JSON, of kernels within kernels too; no bounds, which only their optimizer needs."""

    def encode(value: Any) -> Any:
        if isinstance(value, (np.ndarray, np.generic)):
            return value.tolist()
        kind = type(value)
        if kind.__module__ != MODULE:
            what, hint = f"{kind.__module__}.{kind.__name__} in a kernel", f"classes of {MODULE}, numbers and lists can"
            raise ParameterError(f"{what} cannot be stored by name", hint=hint)
        given = value.get_params(deep=False).items()
        kept = {name: item for name, item in sorted(given) if not name.endswith("_bounds")}
        for name, item in kept.items():
            if isinstance(item, (float, np.ndarray)) and np.isnan(item).any():
                raise ParameterError(f"{name} = {item!r} of {kind.__name__} cannot be stored", hint="numbers can")
        return {"class": kind.__name__, "parameters": kept}

    # JSON has no infinite number
    return json.loads(json.dumps(kernel, default=encode), parse_constant=lambda name: {INFINITE: name})


def _object(value: dict[str, Any]) -> Any:
    """The inverse of :func:`_plain` for one object of JSON, what is within it done."""
    if set(value) == {INFINITE}:
        return float(value[INFINITE])
    if "class" not in value:
        return value
    from sklearn.gaussian_process import kernels

    check_names("kernel 'sklearn'", value, ("class", "parameters"))
    name, parameters = value["class"], value.get("parameters", {})
    kinds = (kind for kind in vars(kernels).values() if inspect.isclass(kind) and kind.__module__ == MODULE)
    own = {k.__name__: k for k in kinds if issubclass(k, kernels.Kernel) and not inspect.isabstract(k)}
    if name not in own:
        raise ParameterError(f"scikit-learn kernel class {name!r}", hint=nearest(str(name), own))
    check_names(f"scikit-learn kernel {name}", parameters, inspect.signature(own[name]).parameters)
    return own[name](**{key: np.asarray(item) if isinstance(item, list) else item for key, item in parameters.items()})


# What a name in kernel="..." may be.
NAMED: dict[str, type[Kernel]] = {
    kind.name: kind for kind in (Chi2, Cosine, Laplacian, Linear, Matern, Polynomial, Precomputed, RBF, Sigmoid)
}
NAMED["polynomial"] = Polynomial
# What may stand in a dictionary.
STORED = NAMED | {kind.name: kind for kind in (Constant, Sum, Product, FunctionKernel, SklearnKernel)}


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
        fields = _fields(NAMED[kernel])
        check_names(f"kernel_params of kernel {kernel!r}", extra, fields)
        shared = {"gamma": gamma, "degree": degree, "coef0": coef0}
        for (key, value), default in zip(shared.items(), (None, 3, 1), strict=True):
            if value != default and key in extra and extra[key] != value:
                raise ParameterError(f"{key} = {value!r}, kernel_params[{key!r}] = {extra[key]!r}", hint="give it once")
        return NAMED[kernel](**{key: value for key, value in shared.items() if key in fields} | extra)
    if isinstance(kernel, Kernel | Mapping) or _is_sklearn_kernel(kernel):
        if extra:
            raise ParameterError(f"kernel_params = {extra!r}", hint="the kernel object already holds its parameters")
        if isinstance(kernel, Mapping):
            return kernel_from_dict(kernel)
        return kernel if isinstance(kernel, Kernel) else SklearnKernel(kernel=kernel)
    if callable(kernel):
        return FunctionKernel(function=kernel, kernel_params=extra)
    raise ParameterError(f"kernel = {kernel!r}", hint="a name, a callable, a kernel object or a dictionary is expected")


def _fields(kind: type[Kernel]) -> list[str]:
    return [one.name for one in dataclasses.fields(kind)]  # type: ignore[arg-type]  # a dataclass


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
    if "kernel" not in parameters:
        hint = "{'kernel': 'rbf', 'gamma': 0.1} is one; kernels are added as {'kernel': 'sum', 'terms': [...]}"
        raise ParameterError(f"kernel = {parameters!r} has no 'kernel', its name", hint=hint)
    name = parameters.pop("kernel")
    if str(name) not in STORED:
        raise ParameterError(f"kernel = {name!r} in a dictionary", hint=nearest(str(name), STORED))
    what, kind = f"kernel {name!r}", STORED[str(name)]
    if kind is SklearnKernel:
        text = json.dumps({"class": None} | parameters)
        return SklearnKernel(kernel=json.loads(text, object_hook=_object))
    check_names(what, parameters, _fields(kind))
    if issubclass(kind, Sum | Product):
        parts = parameters.get(kind.parts_field)
        if isinstance(parts, (list, tuple)):
            parts = [kernel_from_dict(part) if isinstance(part, Mapping) else part for part in parts]
        parameters = {kind.parts_field: parts}
    if kind is FunctionKernel:
        parameters["function"] = _import_function(parameters.get("function"))
    return kind(**parameters)
