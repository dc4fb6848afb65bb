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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from dkrr.jobs.report.axes import Axis, log_axis, plain_axis, short_number

__all__ = ["Series", "bar_chart", "histogram", "line_chart", "scatter"]

WIDTH, HEIGHT = 400.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 12.0, 12.0, 38.0
LEGEND_ROW, LETTER = 15.0, 5.9
MOST_STYLES = 6


@dataclass(frozen=True)
class Series:
    """One curve: its name, and its points; None is a gap."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]


@dataclass
class _Drawing:
    """Pieces of one picture."""

    key: str
    title: str
    description: str
    height: float = HEIGHT
    parts: list[Markup] = field(default_factory=list)

    def add(self, markup: str, *values: object) -> None:
        self.parts.append(Markup(markup).format(*values))  # noqa: S704  (a constant; values are escaped by format)

    def text(self, x: float, y: float, content: str, kind: str = "label", anchor: str = "middle") -> None:
        self.add('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>', kind, _px(x), _px(y), anchor, content)

    def __html__(self) -> str:
        head = Markup(
            '<svg role="img" aria-labelledby="{0}-t {0}-d" viewBox="0 0 {1} {2}" preserveAspectRatio="xMidYMid meet">'
            '<title id="{0}-t">{3}</title><desc id="{0}-d">{4}</desc>'
        ).format(self.key, _px(WIDTH), _px(self.height), self.title, self.description)
        return head + Markup("").join(self.parts) + Markup("</svg>")

    def markup(self) -> Markup:
        return Markup(self.__html__())  # noqa: S704  (every value in it was escaped)


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _frame(drawing: _Drawing, x: Axis, y: Axis, x_label: str, y_label: str, bottom: float) -> None:
    """Grid lines, ticks with their numbers, and what the axes are."""
    for value, label in zip(y.ticks, y.labels, strict=True):
        drawing.add('<path class="grid" d="M{} {}H{}"/>', _px(LEFT), _px(y.at(value)), _px(WIDTH - RIGHT))
        drawing.text(LEFT - 5, y.at(value) + 3.5, label, anchor="end")
    for value, label in zip(x.ticks, x.labels, strict=True):
        drawing.add('<path class="axis" d="M{} {}v4"/>', _px(x.at(value)), _px(bottom))
        drawing.text(x.at(value), bottom + 15, label)
    drawing.add('<path class="axis" d="M{} {}H{}"/>', _px(LEFT), _px(bottom), _px(WIDTH - RIGHT))
    drawing.text((LEFT + WIDTH - RIGHT) / 2, bottom + 31, x_label, "name")
    middle = (TOP + bottom) / 2
    drawing.add(
        '<text class="name" transform="translate(11 {}) rotate(-90)" text-anchor="middle">{}</text>',
        _px(middle),
        y_label,
    )


def _legend(drawing: _Drawing, names: Sequence[str], top: float) -> None:
    """A piece of each curve with its name, in as many rows as that takes."""
    for x, y, number, name in _places(names, top):
        drawing.add('<path class="curve s{}" d="M{} {}h20"/>', number % MOST_STYLES, _px(x), _px(y - 3.5))
        drawing.text(x + 24, y, name, anchor="start")


def _places(names: Sequence[str], top: float) -> Iterator[tuple[float, float, int, str]]:
    x, y = LEFT, top + 11
    for number, name in enumerate(names):
        shown = name if len(name) <= 40 else name[:38] + "…"
        width = 24 + LETTER * len(shown) + 12
        if x > LEFT and x + width > WIDTH - RIGHT + 12:
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
    """Curves over a common axis.

    Parameters
    ----------
    key
        Of its ids in the page; no other chart has the same.
    lines
        Heights to mark with a line across, and what they are.
    """
    xs = [x for item in series for x in item.xs]
    ys = [y for item in series for y in item.ys if y is not None]
    bottom = HEIGHT - BOTTOM
    x_axis = plain_axis(xs, LEFT, WIDTH - RIGHT, tight=True)
    make = log_axis if log else plain_axis
    options = {} if log else {"zero": True}
    y_axis = make([*ys, *(value for value, _ in lines)], bottom, TOP, **options)
    names = [item.name for item in series] if len(series) > 1 else []
    rows = {y for _, y, _, _ in _places(names, HEIGHT)}
    drawing = _Drawing(key, title, description, HEIGHT + LEGEND_ROW * len(rows) + 4 * bool(rows))
    _frame(drawing, x_axis, y_axis, x_label, y_label, bottom)
    for value, label in lines:
        height = y_axis.at(value)
        drawing.add('<path class="mark" d="M{} {}H{}"/>', _px(LEFT), _px(height), _px(WIDTH - RIGHT))
        drawing.text(LEFT + 4, height - 4 if height > TOP + 12 else height + 12, label, "marked", "start")
    for number, item in enumerate(series):
        drawing.add(
            '<path class="curve s{}" d="{}"><title>{}</title></path>',
            number % MOST_STYLES,
            _path(item, x_axis, y_axis),
            item.name,
        )
    _legend(drawing, names, HEIGHT)
    return drawing.markup()


def _path(item: Series, x_axis: Axis, y_axis: Axis) -> str:
    pieces, pen_is_down = [], False
    for x, y in zip(item.xs, item.ys, strict=True):
        if y is None or not math.isfinite(y):
            pen_is_down = False
            continue
        pieces.append(f"{'L' if pen_is_down else 'M'}{_px(x_axis.at(x))} {_px(y_axis.at(y))}")
        pen_is_down = True
    if len(pieces) == 1:  # a single point is a dot
        pieces.append("h0.1")
    return "".join(pieces)


def histogram(
    key: str, title: str, description: str, edges: Sequence[float], counts: Sequence[float], *, x_label: str
) -> Markup:
    """Bars between the edges."""
    bottom = HEIGHT - BOTTOM
    x_axis = plain_axis(edges, LEFT, WIDTH - RIGHT, tight=True)
    y_axis = plain_axis(counts, bottom, TOP, zero=True)
    drawing = _Drawing(key, title, description)
    _frame(drawing, x_axis, y_axis, x_label, "rows", bottom)
    for (low, high), count in zip(itertools.pairwise(edges), counts, strict=True):
        left, right, height = x_axis.at(low), x_axis.at(high), y_axis.at(count)
        drawing.add(
            '<rect class="bar s0" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>',
            _px(left + 0.4),
            _px(height),
            _px(max(0.5, right - left - 0.8)),
            _px(bottom - height),
            f"{short_number(low)} to {short_number(high)}: {count:,} row{'s' * (count != 1)}",
        )
    return drawing.markup()


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
    group = len(values)
    bar = 16.0 if group == 1 else 9.0
    step = bar * group + 8
    bottom = TOP + step * len(names)
    left = min(150.0, max([LEFT, *(LETTER * min(len(name), 24) + 14 for name in names)]))
    x_axis = plain_axis(
        [v for row in values for v in row if v is not None], left, WIDTH - RIGHT - 30, zero=True, most=5
    )
    drawing = _Drawing(key, title, description, bottom + BOTTOM + (LEGEND_ROW + 4 if group > 1 else 0))
    for value, label in zip(x_axis.ticks, x_axis.labels, strict=True):
        drawing.add('<path class="grid" d="M{} {}V{}"/>', _px(x_axis.at(value)), _px(TOP - 4), _px(bottom))
        drawing.text(x_axis.at(value), bottom + 13, label)
    drawing.text((left + WIDTH - RIGHT - 30) / 2, bottom + 29, x_label, "name")
    for number, name in enumerate(names):
        top = TOP + number * step
        shown = name if len(name) <= 24 else name[:22] + "…"
        drawing.text(left - 6, top + bar * group / 2 + 3.5, shown, anchor="end")
        for k in range(group):
            length = values[k][number]
            if length is None:
                continue
            width = max(0.8, x_axis.at(length) - left)
            what = f"{labels[k]} " if labels else ""
            drawing.add(
                '<rect class="bar s{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>',
                k % MOST_STYLES,
                _px(left),
                _px(top + k * bar),
                _px(width),
                _px(bar - 1),
                f"{name}: {what}{short_number(length)}",
            )
            drawing.text(left + width + 4, top + k * bar + bar / 2 + 3, short_number(length), "small", "start")
    x = left
    for k, label in enumerate(labels if group > 1 else ()):
        drawing.add(
            '<rect class="bar s{}" x="{}" y="{}" width="12" height="9"/>', k % MOST_STYLES, _px(x), _px(bottom + 38)
        )
        drawing.text(x + 16, bottom + 46, label, anchor="start")
        x += 16 + LETTER * len(label) + 16
    return drawing.markup()


def scatter(
    key: str,
    title: str,
    description: str,
    points: Sequence[Sequence[float]],
    *,
    x_label: str,
    y_label: str,
    diagonal: bool = False,
) -> Markup:
    """Points, all of them in one path; ``diagonal`` has the same axis both ways and a line where both are equal."""
    bottom = HEIGHT - BOTTOM
    known = [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    xs, ys = [x for x, _ in known], [y for _, y in known]
    both = [*xs, *ys]
    x_axis = plain_axis(both if diagonal else xs, LEFT, WIDTH - RIGHT)
    y_axis = plain_axis(both if diagonal else ys, bottom, TOP)
    drawing = _Drawing(key, title, description)
    _frame(drawing, x_axis, y_axis, x_label, y_label, bottom)
    if diagonal:
        low, high = x_axis.low, x_axis.high
        ends = (x_axis.at(low), y_axis.at(low), x_axis.at(high), y_axis.at(high))
        drawing.add('<path class="mark" d="M{} {}L{} {}"/>', *map(_px, ends))
    else:
        drawing.add('<path class="mark" d="M{} {}H{}"/>', _px(LEFT), _px(y_axis.at(0.0)), _px(WIDTH - RIGHT))
    places = dict.fromkeys(f"M{_px(x_axis.at(x))} {_px(y_axis.at(y))}h0" for x, y in known)
    drawing.add('<path class="points s0" d="{}"/>', "".join(places))
    return drawing.markup()
