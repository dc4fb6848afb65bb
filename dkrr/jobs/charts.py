"""What the page of a run is made of: sentences, tables, text as it was written, and charts as inline SVG.

A chart is curves, a histogram or points, and the same numbers as a table. It has a title and a description that a
screen reader speaks, text that is text, and colours that are classes of the page's style sheet, so that light, dark and
print each have their own. Curves differ by their dashes, too. No plotting library draws them: one that writes its
colours into every element would have to have them replaced again, and takes a second and more at the end of every run;
these take a millisecond, and are some kilobytes. Here is where everything lies; the template of the page has the marks.

Widths and heights are in the units of the picture, 400 x 240, which the page scales.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from dkrr.markup import DASH, cut

WIDTH, HEIGHT = 400.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 388.0, 12.0, 202.0  # of what is between the axes
LEGEND_ROW, LETTER = 15.0, 5.9
MOST_TABLE_ROWS = 24
NUM_TICKS = 6


def short_number(value: float) -> str:
    """Four digits at most."""
    return f"{value + 0.0:.4g}"


class Text(NamedTuple):
    """A sentence; ``missing`` when it says why something is not there."""

    text: str
    missing: bool = False


class Code(NamedTuple):
    """Text as it was written, folded."""

    summary: str
    code: str


class Bar(NamedTuple):
    """A cell of a table with a bar behind its words, whose length is a share of the cell."""

    words: str
    share: float


class Table(NamedTuple):
    """Columns with a head, or names and values without one; ``folded`` ones are opened by whoever wants to see them."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | Bar]]
    caption: str = ""
    folded: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Columns of numbers as a picture and as a table.

    Parameters
    ----------
    mark
        "line": a curve of each column over ``x``. "histogram": the counts of one column between the edges ``x``.
        "point": one column against ``x``, with the same axis both ways and a line where both are equal.
    sentence
        What there is to see; ``more`` is for who does not see it.
    columns
        Values by name; None is a gap.
    levels
        Heights to mark with a line across, and what they are.
    """

    mark: Literal["line", "histogram", "point"]
    title: str
    sentence: str
    x: Sequence[float]
    columns: Mapping[str, Sequence[float | None]]
    x_label: str
    y_label: str = ""
    log: bool = False
    levels: Sequence[tuple[float, str]] = ()
    more: str = ""

    @property
    def picture(self) -> dict[str, Any]:
        """Where everything lies, for the template: the plot of the values, its axes, levels and names."""
        is_cloud = self.mark == "point"
        ys = [y for column in self.columns.values() for y in column if y is not None]
        x = axis([*self.x, *(ys if is_cloud else [])], LEFT, RIGHT, tight=not is_cloud)
        heights = [*(self.x if is_cloud else []), *ys, *(level for level, _ in self.levels)]
        y = axis(heights, BOTTOM, TOP, log=self.log, zero=not (is_cloud or self.log))
        names = _legend(list(self.columns))
        return {
            "x": x.marks(),
            "y": y.marks(),
            "levels": [(round(y.at(level), 1), label) for level, label in self.levels],
            "bars": [*self._bars(x, y)] if self.mark == "histogram" else [],
            "curves": [] if self.mark == "histogram" else [(k, _pen(self, c, x, y)) for k, c in self.columns.items()],
            "names": names,
            "height": HEIGHT + (names[-1][1] - HEIGHT + 8 if names else 0),
        }

    def _bars(self, x: Axis, y: Axis) -> Iterator[tuple[float, float, float, float, str]]:
        """Left edge, top, width, height and words of the bars of a histogram."""
        for (low, high), count in zip(itertools.pairwise(self.x), *self.columns.values(), strict=True):
            words = f"{short_number(low)} to {short_number(high)}: {count:,} row{'s' * (count != 1)}"
            top, left, right = y.at(count or 0), x.at(low) + 0.4, x.at(high) - 0.4
            yield *(round(v, 1) for v in (left, top, max(0.5, right - left), BOTTOM - top)), words  # type: ignore[misc]

    @property
    def table(self) -> Table:
        """The numbers, at most 25 rows of them, evenly spaced."""
        first = [short_number(x) for x in self.x]
        if self.mark == "histogram":
            first = [f"{low} to {high}" for low, high in itertools.pairwise(first)]
        count, columns = len(first), list(self.columns.items())[:6]
        few = 1 if self.mark == "histogram" else max(1, -(-count // MOST_TABLE_ROWS))
        chosen = sorted({*range(0, count, few), *range(count)[-1:]})
        values = [[DASH if (y := column[i]) is None else short_number(y) for i in chosen] for _, column in columns]
        caption = self.title + (f", {self.y_label}" if self.y_label not in ("", *self.columns) else "")
        return Table(
            (self.x_label, *(name for name, _ in columns)),
            list(zip((first[i] for i in chosen), *values, strict=True)),
            caption,
            folded=True,
        )


class Axis(NamedTuple):
    """Values from ``low`` to ``high`` on pixels from ``start`` to ``stop``; of ``log`` these are powers of ten."""

    low: float
    high: float
    start: float
    stop: float
    ticks: Sequence[float]
    labels: Sequence[str]
    log: bool = False

    def at(self, value: float) -> float:
        """Where a value is; what is outside is put to the edge."""
        if self.log:
            value = math.log10(value) if value > 0 else self.low
        share = (value - self.low) / (self.high - self.low)
        return self.start + min(1.0, max(0.0, share)) * (self.stop - self.start)

    def marks(self) -> list[tuple[float, str]]:
        """Where the ticks are, and what they say."""
        places = (10.0**tick if self.log else tick for tick in self.ticks)
        return [(round(self.at(place), 1), label) for place, label in zip(places, self.labels, strict=True)]


def axis(
    values: Iterable[float],
    start: float,
    stop: float,
    *,
    log: bool = False,
    zero: bool = False,
    tight: bool = False,
) -> Axis:
    """An axis with ticks at 1, 2 or 5 times a power of ten, around all values.

    Parameters
    ----------
    log
        Of whole powers of ten, around the values above zero.
    zero
        Begins at zero, for lengths.
    tight
        Ends at the last value and not at a tick.
    """
    known = [value for value in values if math.isfinite(value) and (value > 0 or not log)] or [0.1 * log, 1.0]
    if log:
        known = [math.log10(value) for value in known]
    low, high = min(known), max(known)
    low = min(low, 0.0) if zero else low
    if high <= low:
        wide = abs(high) * 0.1 or 1.0
        low, high = low - wide * (not zero), high + wide
    raw = (high - low) / (NUM_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(raw)) if 0 < raw < math.inf else 0.0
    step = next((factor * power for factor in (1, 2, 5, 10) if raw <= factor * power * (1 + 1e-9)), 0.0)
    step = max(step, 1.0) if log else step
    if step <= 0 or low + step == low:  # a span that floating point cannot divide
        return Axis(low, high, start, stop, (low, high), (short_number(low), short_number(high)))
    down, up, sign = (math.ceil, math.floor, -1e-9) if tight else (math.floor, math.ceil, 1e-9)
    ticks = tuple(k * step for k in range(down(low / step + sign), up(high / step - sign) + 1))
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    digits, largest = max(0, -math.floor(math.log10(step) + 1e-9)), max(abs(tick) for tick in ticks)
    form = f"{{:,.{digits}f}}" if 1e-3 <= largest < 1e6 or not largest else "{:.4g}"
    return Axis(low, high, start, stop, ticks, [("1e{:.0f}" if log else form).format(t + 0.0) for t in ticks], log)


def _legend(names: Sequence[str]) -> list[tuple[float, float, str]]:
    """Where a piece of each curve stands with its name, in as many rows as they take; nothing for a single one."""
    x, y, found = LEFT, HEIGHT + 11, []
    for name in names if len(names) > 1 else ():
        width = 36 + LETTER * min(len(name), 40)
        if x > LEFT and x + width > WIDTH:
            x, y = LEFT, y + LEGEND_ROW
        found.append((x, y, cut(name, 40)))
        x += width
    return found


def _pen(chart: Chart, column: Sequence[float | None], x_axis: Axis, y_axis: Axis) -> str:
    """The way of a pen through the points of a column; lifted where there is a gap, and between points of a cloud."""
    pieces, pen = [], "M"
    for x, y in zip(chart.x, column, strict=True):
        if y is None or not math.isfinite(x + y):
            pen = "M"
            continue
        pieces.append(f"{pen}{x_axis.at(x):.1f} {y_axis.at(y):.1f}")
        pen = "h0M" if chart.mark == "point" else "L"
    return "".join(pieces) + "h0.1" * (len(pieces) == 1 or chart.mark == "point")  # a single point is a dot


Block = Text | Table | Chart | Code
