"""Charts as inline SVG: curves, histograms, points; and the same numbers as a table.

A chart has a title and a description that a screen reader speaks, text that is text, and colours that are classes of
the page's style sheet, so that light, dark and print each have their own. Curves differ by their dashes, too. No
plotting library draws them: one that writes its colours into every element would have to have them replaced again, and
takes a second and more at the end of every run; these take a millisecond, and are some kilobytes.

Widths and heights are in the units of the picture, 400 x 240, which the page scales.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from markupsafe import Markup

from dkrr.markup import DASH, cut

WIDTH, HEIGHT = 400.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 388.0, 12.0, 202.0  # of what is between the axes
LEGEND_ROW, LETTER = 15.0, 5.9
MOST_STYLES = 6
MOST_TABLE_ROWS = 24
NUM_TICKS = 6


def short_number(value: float) -> str:
    """Four digits at most."""
    return f"{value + 0.0:.4g}"


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

    def svg(self, key: str) -> Markup:
        """The picture; ``key`` begins its ids in the page, and no other one has the same."""
        parts, height = _drawn(self)
        form = (
            '<svg role="img" aria-labelledby="{0}-t {0}-d" viewBox="0 0 {1} {2}" preserveAspectRatio="xMidYMid meet">'
            '<title id="{0}-t">{3}</title><desc id="{0}-d">{4}</desc>{5}</svg>'
        )
        words = self.sentence + self.more
        return _tag(form, key, _px(WIDTH), _px(height), self.title, words, Markup("").join(parts))

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

    def marks(self) -> Iterable[tuple[float, str]]:
        """Where the ticks are, and what they say."""
        places = (10.0**tick if self.log else tick for tick in self.ticks)
        return [(self.at(place), label) for place, label in zip(places, self.labels, strict=True)]


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


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _d(form: str, *values: float) -> str:
    """The data of a path: ``_d("M{} {}H{}", ...)``."""
    return form.format(*map(_px, values))


def _tag(markup: str, *values: object) -> Markup:
    return Markup(markup).format(*values)  # noqa: S704  (a constant; format escapes the values)


def _path(kind: str, data: str, title: str = "") -> Markup:
    return _tag('<path class="{}" d="{}">{}</path>', kind, data, _tag("<title>{}</title>", title) if title else "")


def _text(x: float, y: float, content: str, kind: str = "label", anchor: str = "middle") -> Markup:
    form = '<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>'
    return _tag(form, kind, _px(x), _px(y), anchor, content)


def _legend(names: Sequence[str]) -> tuple[list[Markup], float]:
    """A piece of each curve with its name, in as many rows as they take; and their height."""
    x, y, parts = LEFT, HEIGHT + 11, []
    for number, name in enumerate(names if len(names) > 1 else ()):
        width = 36 + LETTER * min(len(name), 40)
        if x > LEFT and x + width > WIDTH:
            x, y = LEFT, y + LEGEND_ROW
        parts += [_path(f"curve s{number % MOST_STYLES}", _d("M{} {}h20", x, y - 3.5))]
        parts += [_text(x + 24, y, cut(name, 40), anchor="start")]
        x += width
    return parts, y - HEIGHT + 8 if parts else 0.0


def _drawn(chart: Chart) -> tuple[list[Markup], float]:
    """Curves, a histogram or points over a common axis, and how high they are."""
    ys, is_cloud = [y for ys in chart.columns.values() for y in ys if y is not None], chart.mark == "point"
    heights = [*ys, *(level for level, _ in chart.levels)]
    x = axis([*chart.x, *(ys if is_cloud else [])], LEFT, RIGHT, tight=not is_cloud)
    y = axis([*(chart.x if is_cloud else []), *heights], BOTTOM, TOP, log=chart.log, zero=not (is_cloud or chart.log))
    levels = [(y.at(level), label) for level, label in chart.levels]
    legend, more = _legend(list(chart.columns))
    turned = '<text class="name" transform="translate(11 {}) rotate(-90)" text-anchor="middle">{}</text>'
    parts = [
        *(_path("grid", _d("M{} {}H{}", LEFT, at, RIGHT)) for at, _ in y.marks()),
        *(_text(LEFT - 5, at + 3.5, label, anchor="end") for at, label in y.marks()),
        *(_path("axis", _d("M{} {}v4", at, BOTTOM)) for at, _ in x.marks()),
        *(_text(at, BOTTOM + 15, label) for at, label in x.marks()),
        _path("axis", _d("M{} {}H{}", LEFT, BOTTOM, RIGHT)),
        _text((LEFT + RIGHT) / 2, BOTTOM + 31, chart.x_label, "name"),
        _tag(turned, _px((TOP + BOTTOM) / 2), chart.y_label),
        *(_path("mark", _d("M{} {}H{}", LEFT, at, RIGHT)) for at, _ in levels),
        *(_text(LEFT + 4, at - 4 if at > TOP + 12 else at + 12, label, "marked", "start") for at, label in levels),
        *([_path("mark", _d("M{} {}L{} {}", LEFT, BOTTOM, RIGHT, TOP))] if is_cloud else []),
    ]
    for number, (name, column) in enumerate(chart.columns.items()):
        if chart.mark == "histogram":
            for (low, high), count in zip(itertools.pairwise(chart.x), column, strict=True):
                words = f"{short_number(low)} to {short_number(high)}: {count:,} row{'s' * (count != 1)}"
                at, left, width = y.at(count or 0), x.at(low) + 0.4, max(0.5, x.at(high) - x.at(low) - 0.8)
                form = '<rect class="bar s0" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>'
                parts.append(_tag(form, *map(_px, (left, at, width, BOTTOM - at)), words))
        else:
            kind = "points" if is_cloud else "curve"
            parts.append(_path(f"{kind} s{number % MOST_STYLES}", _pen(chart, column, x, y), name))
    return [*parts, *legend], HEIGHT + more


def _pen(chart: Chart, column: Sequence[float | None], x_axis: Axis, y_axis: Axis) -> str:
    """The way of a pen through the points of a column; lifted where there is a gap, and between points of a cloud."""
    pieces, pen = [], "M"
    for x, y in zip(chart.x, column, strict=True):
        if y is None or not math.isfinite(x + y):
            pen = "M"
            continue
        pieces.append(_d(f"{pen}{{}} {{}}", x_axis.at(x), y_axis.at(y)))
        pen = "h0M" if chart.mark == "point" else "L"
    return "".join(pieces) + "h0.1" * (len(pieces) == 1 or chart.mark == "point")  # a single point is a dot
