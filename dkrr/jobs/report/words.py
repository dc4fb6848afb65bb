"""Figures as people read them: seconds, sizes, rates, kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from dkrr.jobs.report.axes import bytes_unit, number
from dkrr.jobs.report.blocks import DASH, cut
from dkrr.markup import telling

__all__ = ["clock", "kernel_words", "listed", "loss_words", "rate", "ratio", "reasons_of", "seconds", "size"]


def size(num_bytes: Any) -> str:
    """``812 MiB``."""
    if not isinstance(num_bytes, Real) or not math.isfinite(num_bytes):
        return "unknown"
    unit, name = bytes_unit(abs(float(num_bytes)))
    return f"{float(num_bytes) / unit:.4g} {name}"


def seconds(value: Any) -> str:
    """``12.3 s``; from two minutes on as a clock shows them, with the unit."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "unknown"
    if 0 < value < 0.001:
        return "< 1 ms"
    if value < 120:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def clock(text: Any) -> str:
    """A time of ours without the letter in its middle."""
    return str(text)[:19].replace("T", " ") + " UTC" if text else "unknown"


def rate(flops_per_second: Any) -> str:
    """``163 GF/s``; a dash where there were no flops."""
    if not isinstance(flops_per_second, int | float) or not flops_per_second > 0:
        return DASH
    return f"{flops_per_second / 1e9:.3g} GF/s"


def ratio(actual: Any, expected: Any) -> str:
    """How much more than expected: ``1.3 times``; a dash where one of them is missing."""
    known = all(isinstance(value, int | float) and math.isfinite(value) and value > 0 for value in (actual, expected))
    if known and actual < 0.01 * expected:
        return "< 0.01 times"
    return f"{actual / expected:.2g} times" if known else DASH


def listed(values: Any, form: str = ".5g", most: int = 8) -> str:
    """Some numbers, and how many more there are."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return number(values) if isinstance(values, int | float) else cut(values)
    shown = ", ".join(
        format(value, form) if isinstance(value, int | float) else cut(value, 40) for value in values[:most]
    )
    return shown + (f" and {len(values) - most:,} more" if len(values) > most else "")


def kernel_words(kernel: Any) -> str:
    """``rbf (gamma 0.1)``, sums and products with their parts."""
    if not isinstance(kernel, dict):
        return cut(kernel)
    name = str(kernel.get("kernel", next(iter(kernel), "unknown")))
    parts = telling({key: value for key, value in kernel.items() if key != "kernel"})
    inner = ", ".join(
        f"{key} {kernel_words(value) if isinstance(value, dict) else _part(value)}" for key, value in parts.items()
    )
    return cut(f"{name} ({inner})" if inner else name)


def loss_words(loss: Any) -> str:
    """``hinge loss, C 1``, ``pinball loss, C 0.5, quantile 0.05, 0.95``; "" for the square."""
    if not isinstance(loss, dict):
        return ""
    rest = [f"{name} {listed(value, 'g')}" for name, value in loss.items() if name != "loss"]
    return ", ".join([f"{cut(loss.get('loss'), 40)} loss", *rest])


def reasons_of(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """``("why float64", "...")``: a sentence for each choice of a plan that says why it was made."""
    shown = {
        "solver": plan.get("solver"),
        "precision": plan.get("precision"),
        "rank": f"rank {plan['rank']:,}" if plan.get("rank") else "no preconditioner",
        "tile_size": f"tiles of {plan.get('tile_size', 0):,}",
    }
    return [(f"why {shown[name]}", text) for name, text in (plan.get("reasons") or {}).items() if name in shown]


def _part(value: Any) -> str:
    if isinstance(value, list):
        return (
            "[" + ", ".join(kernel_words(item) if isinstance(item, dict) else _part(item) for item in value[:12]) + "]"
        )
    return f"{value:.6g}" if isinstance(value, float) else str(value)
