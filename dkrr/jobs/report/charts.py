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
from collections.abc import Iterable, Sequence
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


def _bar(number: int, x: float, y: float, width: float, height: float, words: str) -> Markup:
    form = '<rect class="bar s{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>'
    return _tag(form, number % MOST_STYLES, *map(_px, (x, y, width, height)), words)


def _picture(key: str, title: str, description: str, height: float, parts: Iterable[Markup]) -> Markup:
    """A picture; ``key`` begins its ids in the page, and no other one has the same."""
    form = (
        '<svg role="img" aria-labelledby="{0}-t {0}-d" viewBox="0 0 {1} {2}" preserveAspectRatio="xMidYMid meet">'
        '<title id="{0}-t">{3}</title><desc id="{0}-d">{4}</desc>{5}</svg>'
    )
    return _tag(form, key, _px(WIDTH), _px(height), title, description, Markup("").join(parts))


def _frame(x: Axis, y: Axis, x_label: str, y_label: str) -> list[Markup]:
    """Grid lines, ticks with their numbers, and what the axes are."""
    turned = '<text class="name" transform="translate(11 {}) rotate(-90)" text-anchor="middle">{}</text>'
    return [
        *(_path("grid", _d("M{} {}H{}", LEFT, y.at(value), RIGHT)) for value in y.ticks),
        *(_text(LEFT - 5, y.at(v) + 3.5, label, anchor="end") for v, label in zip(y.ticks, y.labels, strict=True)),
        *(_path("axis", _d("M{} {}v4", x.at(value), BOTTOM)) for value in x.ticks),
        *(_text(x.at(value), BOTTOM + 15, label) for value, label in zip(x.ticks, x.labels, strict=True)),
        _path("axis", _d("M{} {}H{}", LEFT, BOTTOM, RIGHT)),
        _text((LEFT + RIGHT) / 2, BOTTOM + 31, x_label, "name"),
        _tag(turned, _px((TOP + BOTTOM) / 2), y_label),
    ]


def _legend(names: Sequence[str], top: float, kind: str, mark: str) -> tuple[list[Markup], float]:
    """A piece of each curve, or of each kind of bar, with its name, in as many rows as they take; and their height."""
    x, y, parts = LEFT, top + 11, []
    for number, name in enumerate(names):
        width = 36 + LETTER * min(len(name), 40)
        if x > LEFT and x + width > WIDTH:
            x, y = LEFT, y + LEGEND_ROW
        parts += [_path(f"{kind} s{number % MOST_STYLES}", _d(mark, x, y - 3.5))]
        parts += [_text(x + 24, y, cut(name, 40), anchor="start")]
        x += width
    return parts, y - top + 8 if names else 0.0


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
    marks = [(y_axis.at(value), label) for value, label in lines]
    legend, more = _legend(
        [item.name for item in series][: len(series) * (len(series) > 1)], HEIGHT, "curve", "M{} {}h20"
    )
    parts = [
        *_frame(x_axis, y_axis, x_label, y_label),
        *(_path("mark", _d("M{} {}H{}", LEFT, y, RIGHT)) for y, _ in marks),
        *(_text(LEFT + 4, y - 4 if y > TOP + 12 else y + 12, label, "marked", "start") for y, label in marks),
        *(_path(f"curve s{k % MOST_STYLES}", _curve(item, x_axis, y_axis), item.name) for k, item in enumerate(series)),
        *legend,
    ]
    return _picture(key, title, description, HEIGHT + more, parts)


def _curve(item: Series, x_axis: Axis, y_axis: Axis) -> str:
    pieces, pen = [], "M"
    for x, y in zip(item.xs, item.ys, strict=True):
        if y is None or not math.isfinite(y):
            pen = "M"
            continue
        pieces.append(_d(f"{pen}{{}} {{}}", x_axis.at(x), y_axis.at(y)))
        pen = "L"
    return "".join(pieces) + "h0.1" * (len(pieces) == 1)  # a single point is a dot


def histogram(
    key: str, title: str, description: str, edges: Sequence[float], counts: Sequence[float], *, x_label: str
) -> Markup:
    """Bars between the edges."""
    x, y = plain_axis(edges, LEFT, RIGHT, tight=True), plain_axis(counts, BOTTOM, TOP, zero=True)
    parts = _frame(x, y, x_label, "rows")
    for (low, high), count in zip(itertools.pairwise(edges), counts, strict=True):
        words = f"{short_number(low)} to {short_number(high)}: {count:,} row{'s' * (count != 1)}"
        left, width = x.at(low) + 0.4, max(0.5, x.at(high) - x.at(low) - 0.8)
        parts.append(_bar(0, left, y.at(count), width, BOTTOM - y.at(count), words))
    return _picture(key, title, description, HEIGHT, parts)


def bar_chart(
    key: str,
    title: str,
    description: str,
    names: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    labels: Sequence[str] = (),
    x_label: str,
) -> Markup:
    """Horizontal bars, one for each name, or one beside the other for each of ``labels``."""
    bar = 16.0 if len(values) == 1 else 9.0
    step, right = bar * len(values) + 8, RIGHT - 30
    bottom, left = TOP + step * len(names), min(150.0, max([LEFT, *(LETTER * min(len(n), 24) + 14 for n in names)]))
    axis = plain_axis([v for row in values for v in row if v is not None], left, right, zero=True, most=5)
    legend, more = _legend(labels, bottom + 35, "bar", "M{} {}v-5h12v9h-12z")
    parts = [
        *(_path("grid", _d("M{} {}V{}", axis.at(value), TOP - 4, bottom)) for value in axis.ticks),
        *(_text(axis.at(v), bottom + 13, label) for v, label in zip(axis.ticks, axis.labels, strict=True)),
        _text((left + right) / 2, bottom + 29, x_label, "name"),
        *(_text(left - 6, TOP + k * step + step / 2 - 0.5, cut(n, 24), anchor="end") for k, n in enumerate(names)),
        *legend,
    ]
    for (number, name), (k, row) in itertools.product(enumerate(names), enumerate(values)):
        length, y = row[number], TOP + number * step + k * bar
        if length is not None:
            shown, width = short_number(length), max(0.8, axis.at(length) - left)
            words = " ".join([f"{name}:", *labels[k : k + 1], shown])
            parts += [_bar(k, left, y, width, bar - 1, words)]
            parts += [_text(left + width + 4, y + bar / 2 + 3, shown, "small", "start")]
    return _picture(key, title, description, bottom + 38 + more, parts)


def scatter(
    key: str, title: str, description: str, points: Sequence[Sequence[float]], *, x_label: str, y_label: str
) -> Markup:
    """Points, all of them in one path, with the same axis both ways and a line where both are equal."""
    known = [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    both = [value for point in known for value in point]
    x_axis, y_axis = plain_axis(both, LEFT, RIGHT), plain_axis(both, BOTTOM, TOP)
    places = dict.fromkeys(_d("M{} {}h0", x_axis.at(x), y_axis.at(y)) for x, y in known)
    diagonal, cloud = _d("M{} {}L{} {}", LEFT, BOTTOM, RIGHT, TOP), "".join(places)
    parts = [*_frame(x_axis, y_axis, x_label, y_label), _path("mark", diagonal), _path("points s0", cloud)]
    return _picture(key, title, description, HEIGHT, parts)
