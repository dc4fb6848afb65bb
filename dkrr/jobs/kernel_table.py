"""Kernels in a job file: ``kernel = "rbf"`` with its parameters, and sums and products as nested tables.

You need it only in :mod:`dkrr.jobs.spec`.
"""

from __future__ import annotations

from functools import reduce
from operator import add, mul
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from dkrr.jobs.fields import Positive
from dkrr.kernels import Kernel, make_kernel

__all__ = ["KernelItem", "KernelParameters", "KernelTable", "Table", "kernel_tag"]


class Table(BaseModel):
    """A table of the file: every key is known, every value has its type, nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def kernel_tag(value: Any) -> str:
    if isinstance(value, dict | KernelTable):
        return "kernel table"
    return "kernel number" if isinstance(value, int | float) and not isinstance(value, bool) else "kernel name"


class KernelParameters(Table):
    """Parameters that a kernel named by a string may have."""

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
