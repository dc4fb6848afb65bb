"""How figures and objects are written for people: words for sizes, times and kernels, tables for notebooks.

Only the standard library is needed. Names come from data and job files, so what becomes HTML is escaped, and cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from numbers import Real
from typing import Any

Facts = list[tuple[str, str]]
MOST_LETTERS = 500
DASH = "\u2013"  # where there is nothing to say
_CELL = "text-align:left;vertical-align:top;padding:2px 10px 2px 0;overflow-wrap:anywhere"


def cut(text: object, most: int = MOST_LETTERS) -> str:
    """Text of bounded length, for names and messages come from outside."""
    shown = str(text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}\u2026"


def known(*rows: tuple[str, Any]) -> Facts:
    """Those of the names and values of which there is something to say."""
    return [(name, str(value)) for name, value in rows if value]


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def number(value: Any) -> str:
    """A number for a table: thousands apart, five digits where it is no whole one."""
    if not _is_number(value):
        return "unknown"
    return f"{int(value):,}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.5g}"


def bytes_unit(largest: float) -> tuple[float, str]:
    """What to divide sizes by so that the largest is read easily, and the unit's name."""
    names = ("B", "KiB", "MiB", "GiB", "TiB")
    power = sum(largest >= 1024.0**k for k in range(1, len(names)))
    return 1024.0**power, names[power]


def size(num_bytes: Any) -> str:
    """``812 MiB``."""
    if not _is_number(num_bytes):
        return "unknown"
    unit, name = bytes_unit(abs(num_bytes))
    return f"{num_bytes / unit:.4g} {name}"


def seconds(value: Any) -> str:
    """``12.3 s``; from two minutes on as a clock shows them, with the unit."""
    if not _is_number(value):
        return "unknown"
    if value < 120:
        return "< 1 ms" if 0 < value < 0.001 else f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {rest:02} s"


def clock_text(duration: float) -> str:
    """``1:02:03``, or ``2:03`` below an hour."""
    minutes, rest = divmod(round(duration), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def rate(flops_per_second: Any) -> str:
    """``163 GF/s``; a dash where there were no flops."""
    return f"{flops_per_second / 1e9:.3g} GF/s" if _is_number(flops_per_second) and flops_per_second > 0 else DASH


def listed(values: Any, form: str = ".5g", most: int = 8) -> str:
    """Some numbers or names, and how many more there are."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return number(values) if isinstance(values, int | float) else cut(values)
    shown = (format(value, form) if isinstance(value, int | float) else cut(value, 40) for value in values[:most])
    return ", ".join(shown) + (f" and {len(values) - most:,} more" if len(values) > most else "")


def named(count: int, noun: str, names: Sequence[str] = ()) -> str:
    """``2 targets: y, z``, at most eight of the names."""
    shown = ", ".join(map(str, names[:8])) + (", ..." if len(names) > 8 else "")
    return f"{count:,} {noun}{'s' * (count != 1)}" + (f": {shown}" if shown else "")


def telling(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a kernel that say something: a length scale of 1 and a gamma that is left to the rows do not."""
    silent = {"length_scale": 1.0, "gamma": None}
    return {name: value for name, value in parameters.items() if name not in silent or value != silent[name]}


def kernel_words(kernel: Any) -> str:
    """``rbf (gamma 0.1)``, sums and products with their parts."""
    if isinstance(kernel, list):
        return f"[{', '.join(kernel_words(item) for item in kernel[:12])}]"
    if not isinstance(kernel, dict):
        return f"{kernel:.6g}" if isinstance(kernel, float) else cut(kernel)
    name = str(kernel.get("kernel", next(iter(kernel), "unknown")))
    parts = telling({key: value for key, value in kernel.items() if key != "kernel"})
    inner = ", ".join(f"{key} {kernel_words(value)}" for key, value in parts.items())
    return cut(f"{name} ({inner})" if inner else name)


def loss_words(loss: Any) -> str:
    """``hinge loss, C 1``, ``pinball loss, C 0.5, quantile 0.05, 0.95``; "" for the square."""
    if not isinstance(loss, dict):
        return ""
    rest = [f"{name} {listed(value, 'g')}" for name, value in loss.items() if name != "loss"]
    return ", ".join([f"{cut(loss.get('loss'), 40)} loss", *rest])


def reasons_of(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """``("why float64", "...")``: a sentence for each choice of a plan that says why it was made."""
    shown = {
        "solver": plan.get("solver"),
        "precision": plan.get("precision"),
        "rank": f"rank {plan['rank']:,}" if plan.get("rank") else "no preconditioner",
        "tile_size": f"tiles of {plan.get('tile_size', 0):,}",
    }
    return [(f"why {shown[name]}", text) for name, text in (plan.get("reasons") or {}).items() if name in shown]


def lines_text(first: str, *more: str) -> str:
    """A first line and others below it, each cut at 500 characters."""
    return "\n  ".join(cut(line) for line in (first, *more))


def facts_text(facts: Iterable[tuple[str, object]], title: str = "") -> str:
    """Names and values as two aligned columns below a title; nothing is cut, so lines can be searched."""
    rows = list(facts)
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join([title] * bool(title) + [f"  {name:<{width}}  {value}" for name, value in rows])


def facts_html(title: str, facts: Iterable[tuple[str, object]], note: str = "") -> str:
    """Names and values as a table with a title; ``note`` is a sentence below it.

    Values longer than 500 characters are cut.
    """
    rows = "".join(
        f'<tr><th scope="row" style="{_CELL};font-weight:500;white-space:nowrap">{escape(cut(name))}</th>'
        f'<td style="{_CELL}">{escape(cut(value))}</td></tr>'
        for name, value in facts
    )
    below = f'<p style="margin:4px 0">{escape(cut(note))}</p>' if note else ""
    return (
        '<div class="dkrr"><table style="border-collapse:collapse">'
        f'<caption style="text-align:left;font-weight:600;caption-side:top">{escape(cut(title))}</caption>'
        f"<tbody>{rows}</tbody></table>{below}</div>"
    )
