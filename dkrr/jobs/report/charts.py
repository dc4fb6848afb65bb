"""Charts as inline SVG: curves, bars, histograms, points.

A chart has a title and a description that a screen reader speaks, text that is text, and colours that are classes of
the page's style sheet, so that light, dark and print each have their own. Curves differ by their dashes, too. No
plotting library draws them: one that writes its colours into every element would have to have them replaced again, and
takes a second and more at the end of every run; these take a millisecond, and are some kilobytes.

Widths and heights are in the units of the picture, 400 x 240, which the page scales.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from dkrr.markup import cut

__all__ = ["Series", "bar_chart", "histogram", "line_chart", "log_axis", "plain_axis", "scatter", "short_number"]

WIDTH, HEIGHT = 400.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 388.0, 12.0, 202.0  # of what is between the axes
LEGEND_ROW, LETTER = 15.0, 5.9
MOST_STYLES = 6


def short_number(value: float) -> str:
    """Four digits at most."""
    return f"{value + 0.0:.4g}"


@dataclass(frozen=True)
class Axis:
    """Values from ``low`` to ``high`` on pixels from ``start`` to ``stop``; ``log`` for powers of ten."""

    low: float
    high: float
    start: float
    stop: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Where a value is; what is outside is put to the edge."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        return self.start + min(1.0, max(0.0, (value - low) / (high - low))) * (self.stop - self.start)


def plain_axis(
    values: Iterable[float], start: float, stop: float, *, zero: bool = False, tight: bool = False, most: int = 6
) -> Axis:
    """An axis with ticks at 1, 2 or 5 times a power of ten, around all values.

    Parameters
    ----------
    zero
        Begins at zero, for lengths.
    tight
        Ends at the last value and not at a tick.
    """
    known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(known, default=0.0), max(known)
    low = min(low, 0.0) if zero else low
    if high <= low:
        wide = abs(high) * 0.1 or 1.0
        low, high = low - wide * (not zero), high + wide
    raw = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(raw)) if 0 < raw < math.inf else 0.0
    step = next((factor * power for factor in (1, 2, 5, 10) if raw <= factor * power * (1 + 1e-9)), 0.0)
    if step <= 0 or low + step == low:  # a span that floating point cannot divide
        return Axis(low, high, start, stop, (low, high), (short_number(low), short_number(high)))
    down, up = (math.ceil, math.floor) if tight else (math.floor, math.ceil)
    sign = -1e-9 if tight else 1e-9
    ticks = tuple(k * step for k in range(down(low / step + sign), up(high / step - sign) + 1))
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    digits, largest = max(0, -math.floor(math.log10(step) + 1e-9)), max(abs(tick) for tick in ticks)
    is_wide = largest >= 1e6 or 0 < largest < 1e-3
    labels = (short_number(tick) if is_wide else f"{tick + 0.0:,.{digits}f}" for tick in ticks)
    return Axis(low, high, start, stop, ticks, tuple(labels))


def log_axis(values: Iterable[float], start: float, stop: float, *, most: int = 7) -> Axis:
    """An axis of whole powers of ten around all values above zero."""
    known = [value for value in values if 0 < value < math.inf] or [0.1, 1.0]
    first, last = math.floor(math.log10(min(known)) + 1e-9), math.ceil(math.log10(max(known)) - 1e-9)
    span = max(1, last - first)
    every = -(-span // (most - 1))
    powers = range(first, first + every * -(-span // every) + 1, every)
    labels = tuple(f"1e{power}" for power in powers)
    return Axis(10.0**first, 10.0 ** powers[-1], start, stop, tuple(10.0**power for power in powers), labels, log=True)


@dataclass(frozen=True)
class Series:
    """One curve: its name, and its points; None is a gap."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]


def _px(value: object) -> object:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


class _Drawing:
    """Pieces of one picture; ``key`` begins its ids in the page, and no other chart has the same."""

    def __init__(self, key: str, title: str, description: str, height: float = HEIGHT) -> None:
        self.parts: list[Markup] = []
        self.add(
            '<svg role="img" aria-labelledby="{0}-t {0}-d" viewBox="0 0 {1} {2}" preserveAspectRatio="xMidYMid meet">'
            '<title id="{0}-t">{3}</title><desc id="{0}-d">{4}</desc>',
            key, WIDTH, height, title, description,
        )  # fmt: skip

    def add(self, markup: str, *values: object) -> None:
        self.parts.append(Markup(markup).format(*map(_px, values)))  # noqa: S704  (a constant; format escapes values)

    def text(self, x: float, y: float, content: str, kind: str = "label", anchor: str = "middle") -> None:
        self.add('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>', kind, x, y, anchor, content)

    def bar(self, number: int, x: float, y: float, width: float, height: float, words: str) -> None:
        self.add(
            '<rect class="bar s{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>',
            number % MOST_STYLES, x, y, width, height, words,
        )  # fmt: skip

    def frame(self, x: Axis, y: Axis, x_label: str, y_label: str) -> None:
        """Grid lines, ticks with their numbers, and what the axes are."""
        for value, label in zip(y.ticks, y.labels, strict=True):
            self.add('<path class="grid" d="M{} {}H{}"/>', LEFT, y.at(value), RIGHT)
            self.text(LEFT - 5, y.at(value) + 3.5, label, anchor="end")
        for value, label in zip(x.ticks, x.labels, strict=True):
            self.add('<path class="axis" d="M{} {}v4"/>', x.at(value), BOTTOM)
            self.text(x.at(value), BOTTOM + 15, label)
        self.add('<path class="axis" d="M{} {}H{}"/>', LEFT, BOTTOM, RIGHT)
        self.text((LEFT + RIGHT) / 2, BOTTOM + 31, x_label, "name")
        turned = '<text class="name" transform="translate(11 {}) rotate(-90)" text-anchor="middle">{}</text>'
        self.add(turned, (TOP + BOTTOM) / 2, y_label)

    def legend(self, mark: str, places: Iterable[tuple[float, float, int, str]]) -> None:
        """A piece of each curve, or of each kind of bar, with its name."""
        for x, y, number, name in places:
            self.add(mark, number % MOST_STYLES, x, y - 3.5)
            self.text(x + 24, y, name, anchor="start")

    def markup(self) -> Markup:
        return Markup("").join([*self.parts, Markup("</svg>")])


def _places(names: Sequence[str], top: float) -> Iterator[tuple[float, float, int, str]]:
    """Where the names of a legend stand, in as many rows as they take."""
    x, y = LEFT, top + 11
    for number, name in enumerate(names):
        shown = cut(name, 40)
        width = 36 + LETTER * len(shown)
        if x > LEFT and x + width > WIDTH:
            x, y = LEFT, y + LEGEND_ROW
        yield x, y, number, shown
        x += width


def line_chart(
    key: str,
    title: str,
    description: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    log: bool = False,
    lines: Sequence[tuple[float, str]] = (),
) -> Markup:
    """Curves over a common axis; ``lines`` are heights to mark with a line across, and what they are."""
    ys = [y for item in series for y in item.ys if y is not None] + [value for value, _ in lines]
    x_axis = plain_axis([x for item in series for x in item.xs], LEFT, RIGHT, tight=True)
    y_axis = log_axis(ys, BOTTOM, TOP) if log else plain_axis(ys, BOTTOM, TOP, zero=True)
    names = list(_places([item.name for item in series] if len(series) > 1 else [], HEIGHT))
    height = HEIGHT + LEGEND_ROW * len({y for _, y, _, _ in names}) + 4 * bool(names)
    drawing = _Drawing(key, title, description, height)
    drawing.frame(x_axis, y_axis, x_label, y_label)
    for value, label in lines:
        y = y_axis.at(value)
        drawing.add('<path class="mark" d="M{} {}H{}"/>', LEFT, y, RIGHT)
        drawing.text(LEFT + 4, y - 4 if y > TOP + 12 else y + 12, label, "marked", "start")
    for number, item in enumerate(series):
        path, curve = _path(item, x_axis, y_axis), '<path class="curve s{}" d="{}"><title>{}</title></path>'
        drawing.add(curve, number % MOST_STYLES, path, item.name)
    drawing.legend('<path class="curve s{}" d="M{} {}h20"/>', names)
    return drawing.markup()


def _path(item: Series, x_axis: Axis, y_axis: Axis) -> str:
    pieces, pen = [], "M"
    for x, y in zip(item.xs, item.ys, strict=True):
        is_there = y is not None and math.isfinite(y)
        if y is not None and is_there:
            pieces.append(f"{pen}{_px(float(x_axis.at(x)))} {_px(float(y_axis.at(y)))}")
        pen = "L" if is_there else "M"
    return "".join(pieces) + "h0.1" * (len(pieces) == 1)  # a single point is a dot


def histogram(
    key: str, title: str, description: str, edges: Sequence[float], counts: Sequence[float], *, x_label: str
) -> Markup:
    """Bars between the edges."""
    x_axis = plain_axis(edges, LEFT, RIGHT, tight=True)
    y_axis = plain_axis(counts, BOTTOM, TOP, zero=True)
    drawing = _Drawing(key, title, description)
    drawing.frame(x_axis, y_axis, x_label, "rows")
    for (low, high), count in zip(itertools.pairwise(edges), counts, strict=True):
        left, right, height = x_axis.at(low), x_axis.at(high), y_axis.at(count)
        words = f"{short_number(low)} to {short_number(high)}: {count:,} row{'s' * (count != 1)}"
        drawing.bar(0, left + 0.4, height, max(0.5, right - left - 0.8), BOTTOM - height, words)
    return drawing.markup()


def bar_chart(
    key: str,
    title: str,
    description: str,
    names: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    labels: Sequence[str] = ("",),
    x_label: str,
) -> Markup:
    """Horizontal bars, one for each name, or one beside the other for each of ``labels``."""
    is_group = len(labels) > 1
    bar = 9.0 if is_group else 16.0
    step = bar * len(labels) + 8
    bottom, right = TOP + step * len(names), RIGHT - 30
    left = min(150.0, max([LEFT, *(LETTER * min(len(name), 24) + 14 for name in names)]))
    axis = plain_axis([v for row in values for v in row if v is not None], left, right, zero=True, most=5)
    drawing = _Drawing(key, title, description, bottom + 38 + (LEGEND_ROW + 4) * is_group)
    for value, label in zip(axis.ticks, axis.labels, strict=True):
        drawing.add('<path class="grid" d="M{} {}V{}"/>', axis.at(value), TOP - 4, bottom)
        drawing.text(axis.at(value), bottom + 13, label)
    drawing.text((left + right) / 2, bottom + 29, x_label, "name")
    for number, name in enumerate(names):
        top = TOP + number * step
        drawing.text(left - 6, top + bar * len(labels) / 2 + 3.5, cut(name, 24), anchor="end")
        for k, label in enumerate(labels):
            length = values[k][number]
            if length is not None:
                width, y, words = max(0.8, axis.at(length) - left), top + k * bar, f"{name}: {label} "
                drawing.bar(k, left, y, width, bar - 1, words + short_number(length))
                drawing.text(left + width + 4, y + bar / 2 + 3, short_number(length), "small", "start")
    if is_group:
        drawing.legend('<path class="bar s{}" d="M{} {}v-5h12v9h-12z"/>', _places(labels, bottom + 35))
    return drawing.markup()


def scatter(
    key: str, title: str, description: str, points: Sequence[Sequence[float]], *, x_label: str, y_label: str
) -> Markup:
    """Points, all of them in one path, with the same axis both ways and a line where both are equal."""
    known = [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    both = [value for point in known for value in point]
    x_axis, y_axis = plain_axis(both, LEFT, RIGHT), plain_axis(both, BOTTOM, TOP)
    drawing = _Drawing(key, title, description)
    drawing.frame(x_axis, y_axis, x_label, y_label)
    drawing.add('<path class="mark" d="M{} {}L{} {}"/>', LEFT, BOTTOM, RIGHT, TOP)
    places = dict.fromkeys(f"M{_px(x_axis.at(x))} {_px(y_axis.at(y))}h0" for x, y in known)
    drawing.add('<path class="points s0" d="{}"/>', "".join(places))
    return drawing.markup()
