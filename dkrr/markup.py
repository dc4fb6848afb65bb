"""How an object is shown: in a few lines of text, and in notebooks as a small table in the colours of the page.

Only the standard library is needed. Names come from data and job files, so everything is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["facts_html", "lines_text", "named", "telling"]

MOST_LETTERS = 500
_CELL = "text-align:left;vertical-align:top;padding:2px 10px 2px 0;overflow-wrap:anywhere"


def telling(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a kernel that say something: a length scale of 1 and a gamma that is left to the rows do not."""
    silent = {"length_scale": 1.0, "gamma": None}
    return {name: value for name, value in parameters.items() if name not in silent or value != silent[name]}


def lines_text(first: str, *more: str) -> str:
    """A first line and others below it, each cut at 500 characters."""
    return "\n  ".join(_cut(line) for line in (first, *more))


def named(count: int, noun: str, names: Sequence[str] = ()) -> str:
    """``2 targets: y, z``, at most eight of the names."""
    shown = ", ".join(map(str, names[:8])) + (", ..." if len(names) > 8 else "")
    return f"{count:,} {noun}{'s' * (count != 1)}" + (f": {shown}" if shown else "")


def facts_html(title: str, facts: Iterable[tuple[str, object]], note: str = "") -> str:
    """Names and values as a table with a title; ``note`` is a sentence below it.

    Values longer than 500 characters are cut.
    """
    rows = "".join(
        f'<tr><th scope="row" style="{_CELL};font-weight:500;white-space:nowrap">{escape(_cut(name))}</th>'
        f'<td style="{_CELL}">{escape(_cut(value))}</td></tr>'
        for name, value in facts
    )
    below = f'<p style="margin:4px 0">{escape(_cut(note))}</p>' if note else ""
    return (
        '<div class="dkrr"><table style="border-collapse:collapse">'
        f'<caption style="text-align:left;font-weight:600;caption-side:top">{escape(_cut(title))}</caption>'
        f"<tbody>{rows}</tbody></table>{below}</div>"
    )


def _cut(value: object) -> str:
    text = str(value)
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}\u2026"
