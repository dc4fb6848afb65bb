"""Axes of a chart: where the ticks are, what stands beside them, and where a value is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Axis", "bytes_unit", "log_axis", "number", "plain_axis", "short_number"]


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
        share = (value - low) / (high - low) if high > low else 0.0
        return self.start + min(1.0, max(0.0, share)) * (self.stop - self.start)


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
    known = [value for value in values if math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    low = min(low, 0.0) if zero else low
    if high <= low:
        wide = abs(high) * 0.1 or 1.0
        low, high = (low, high + wide) if zero else (low - wide, high + wide)
    step = _step((high - low) / (most - 1))
    if not math.isfinite(step) or step <= 0 or low + step == low:  # a span that floating point cannot divide
        return Axis(low, high, start, stop, (low, high), (short_number(low), short_number(high)))
    first = math.ceil(low / step - 1e-9) if tight else math.floor(low / step + 1e-9)
    last = math.floor(high / step + 1e-9) if tight else math.ceil(high / step - 1e-9)
    ticks = tuple(k * step for k in range(first, last + 1))
    if not tight:
        low, high = min(low, ticks[0]), max(high, ticks[-1])
    return Axis(low, high, start, stop, ticks, _labels(ticks, step))


def log_axis(values: Iterable[float], start: float, stop: float, *, most: int = 7) -> Axis:
    """An axis of whole powers of ten around all values above zero."""
    known = [value for value in values if math.isfinite(value) and value > 0]
    low, high = (min(known), max(known)) if known else (0.1, 1.0)
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    every = -(-(last - first) // (most - 1))
    powers = range(first, last + 1, every)
    if powers[-1] != last:
        last = powers[-1] + every
        powers = range(first, last + 1, every)
    ticks = tuple(10.0**power for power in powers)
    return Axis(10.0**first, 10.0**last, start, stop, ticks, tuple(f"1e{power}" for power in powers), log=True)


def _step(raw: float) -> float:
    if raw <= 0 or not math.isfinite(raw):
        return 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    return next((factor * power for factor in (1, 2, 5) if raw <= factor * power * (1 + 1e-9)), 10 * power)


def _labels(ticks: tuple[float, ...], step: float) -> tuple[str, ...]:
    largest = max(abs(tick) for tick in ticks)
    if largest >= 1e6 or (0 < largest < 1e-3):
        return tuple(short_number(tick) for tick in ticks)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return tuple(f"{tick + 0.0:,.{digits}f}" for tick in ticks)


def short_number(value: float) -> str:
    """Four digits at most."""
    return f"{value + 0.0:.4g}"


def number(value: float | None) -> str:
    """A number for a table: thousands apart, five digits where it is no whole one."""
    if value is None or not math.isfinite(value):
        return "unknown"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.5g}"


def bytes_unit(largest: float) -> tuple[float, str]:
    """What to divide sizes by so that the largest is read easily, and the unit's name."""
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024.0**power:
            return 1024.0**power, name
    return 1.0, "B"
