"""The HTML form of an object, for notebooks: a small table that takes its colours from the page it is shown in.

Only the standard library is needed. Names come from data and job files, so everything is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

__all__ = ["facts_html"]

MOST_LETTERS = 500
_CELL = "text-align:left;vertical-align:top;padding:2px 10px 2px 0;overflow-wrap:anywhere"


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
