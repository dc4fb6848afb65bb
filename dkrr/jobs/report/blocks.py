"""What sections of the page are made of: sentences, facts, tables, charts. The template knows how each is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

__all__ = ["DASH", "Block", "Chart", "Code", "Facts", "Section", "Table", "Text", "cut"]

MOST_LETTERS = 400
DASH = "\u2013"  # where there is nothing to say


def cut(text: object, most: int = MOST_LETTERS) -> str:
    """Text of bounded length, for names and messages come from outside."""
    shown = str(text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


@dataclass(frozen=True)
class Text:
    """A sentence; ``missing`` when it says why something is not there."""

    text: str
    missing: bool = False
    kind: str = "text"


@dataclass(frozen=True)
class Facts:
    """Names and values beside each other."""

    rows: Sequence[tuple[str, str]]
    caption: str = ""
    kind: str = "facts"


@dataclass(frozen=True)
class Table:
    """Columns with a head; ``folded`` ones are opened by whoever wants to see them."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    folded: bool = False
    kind: str = "table"


@dataclass(frozen=True)
class Chart:
    """A picture, what it shows, and the same numbers for whoever does not see it."""

    svg: Markup
    caption: str
    table: Table | None = None
    kind: str = "chart"


@dataclass(frozen=True)
class Code:
    """Text as it was written, folded."""

    summary: str
    text: str
    kind: str = "code"


Block = Text | Facts | Table | Chart | Code


@dataclass
class Section:
    """One section of the page; ``key`` is its anchor."""

    key: str
    title: str
    blocks: list[Block] = field(default_factory=list)

    def missing(self, sentence: str) -> Section:
        """Say why there is nothing to show."""
        self.blocks.append(Text(sentence, missing=True))
        return self
