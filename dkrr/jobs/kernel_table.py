"""Kernels in a job file: ``kernel = "rbf"`` with its parameters, and sums and products as nested tables.

You need it only in :mod:`dkrr.jobs.spec`.
"""

from __future__ import annotations

import json
import re
from functools import reduce
from inspect import cleandoc
from operator import add, mul
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Self, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from dkrr.jobs.fields import Positive
from dkrr.kernels import Kernel, make_kernel

__all__ = ["KernelItem", "KernelParameters", "KernelTable", "Key", "Table", "kernel_tag"]

_WORDS = {str: "text", bool: "true or false", int: "whole number", float: "number", Any: "value"}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


class Key(NamedTuple):
    """A key of a table in words, for help: the values it takes, its default ("" where there is none), what it means."""

    name: str
    values: str
    default: str
    help: str


class Table(BaseModel):
    """A table of the file: every key is known, every value has its type, nothing changes afterwards.

    The section Parameters of a subclass's docstring says what each key means: that is what `dkrr help` prints.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def described_keys(cls) -> list[Key]:
        """All keys in words, from the types, the defaults and the docstrings of the classes."""
        docs = "\n".join(cleandoc(kind.__doc__ or "") for kind in cls.__mro__ if issubclass(kind, Table))
        helps = dict(re.findall(r"^(\w+)\n((?:    .*(?:\n|\Z))+)", docs, re.MULTILINE))
        kinds = get_type_hints(cls, include_extras=True)
        found = []
        for name, field in cls.model_fields.items():
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            shown = "required" if field.is_required() else "" if default is None else json.dumps(default)
            found.append(Key(name, _in_words(kinds[name]), shown, " ".join(helps.get(name, "").split())))
        return found

    @classmethod
    def tables(cls) -> dict[str, type[Table]]:
        """The tables of a document by name, none for a table without any."""
        kinds = {name: get_args(field.annotation) or (field.annotation,) for name, field in cls.model_fields.items()}
        return {
            name: kind
            for name, parts in kinds.items()
            for kind in parts
            if isinstance(kind, type) and issubclass(kind, Table)
        }


def _in_words(kind: Any) -> str:
    """The values that an annotation allows."""
    parts, origin = [part for part in get_args(kind) if part is not NoneType], get_origin(kind)
    if origin is Literal:
        return " | ".join(json.dumps(part) for part in parts)
    if origin in (Union, UnionType, list):
        return ("list of " if origin is list else "") + " or ".join(map(_in_words, parts))
    if origin is not Annotated:
        return _WORDS.get(kind, "table")
    said = [part.func.__doc__ or "" for part in parts[1:] if isinstance(part, BeforeValidator)]
    rules = [rule for part in parts[1:] for rule in getattr(part, "metadata", ())]
    ends = [f"{sign} {getattr(rule, name)}" for rule in rules for name, sign in _SIGNS.items() if hasattr(rule, name)]
    return " ".join([*(said or [_in_words(parts[0])]), *([" and ".join(ends)] if ends else [])])


def kernel_tag(value: Any) -> str:
    if isinstance(value, dict | KernelTable):
        return "kernel table"
    return "kernel number" if isinstance(value, int | float) and not isinstance(value, bool) else "kernel name"


class KernelParameters(Table):
    """Parameters that a kernel named by a string may have.

    Parameters
    ----------
    gamma
        Of rbf, laplacian, poly, sigmoid and chi2; 1 / d unless given (1 for chi2).
    degree
        Of poly; 3 unless given.
    coef0
        Of poly and sigmoid; 1 unless given.
    kernel_params
        Other parameters of a kernel: {nu = 1.5, length_scale = 0.75}; a length_scale for each feature is a list.
    """

    gamma: Positive | None = None
    degree: Positive | None = None
    coef0: Annotated[float, Field(allow_inf_nan=False)] | None = None
    kernel_params: dict[str, Any] | None = None

    def make(self, name: str) -> Kernel:
        """The kernel ``name`` with these parameters."""
        # scikit-learn's defaults, where the file is silent
        return make_kernel(
            name,
            gamma=self.gamma,
            degree=3 if self.degree is None else self.degree,
            coef0=1 if self.coef0 is None else self.coef0,
            kernel_params=self.kernel_params,
        )

    def given(self) -> list[str]:
        """Names of the parameters that the file sets."""
        return [name for name in KernelParameters.model_fields if getattr(self, name) is not None]


class KernelTable(KernelParameters):
    """``{kernel = "rbf", gamma = 0.1}``, ``{sum = [...]}`` or ``{product = [...]}`` of tables, names and numbers."""

    kernel: str | None = None
    sum: list[KernelItem] | None = None
    product: list[KernelItem] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        forms = [name for name in ("kernel", "sum", "product") if getattr(self, name) is not None]
        if len(forms) != 1:
            raise ValueError(f"one of kernel, sum and product expected, {' and '.join(forms) or 'none'} given")
        if self.kernel is None and self.given():
            raise ValueError(f"{self.given()[0]} belongs into the tables of the {forms[0]}")
        if self.kernel is None and all(isinstance(item, int | float) for item in self._items):
            raise ValueError(f"the {forms[0]} has no kernel in it")
        return self

    @property
    def _items(self) -> list[Any]:
        return self.sum or self.product or []

    def build(self) -> Kernel:
        """The kernel that the table describes."""
        if self.kernel is not None:
            return self.make(self.kernel)
        parts = [make_kernel(item) if isinstance(item, str) else item for item in self._items]
        built = [part.build() if isinstance(part, KernelTable) else part for part in parts]
        built.sort(key=lambda part: isinstance(part, int | float))  # kernels know + and * with numbers, not vice versa
        return reduce(add if self.sum is not None else mul, built)


KernelItem = Annotated[
    Annotated[str, Tag("kernel name")]
    | Annotated[KernelTable, Tag("kernel table")]
    | Annotated[float, Field(gt=0, allow_inf_nan=False), Tag("kernel number")],
    Discriminator(kernel_tag),
]
KernelTable.model_rebuild()
