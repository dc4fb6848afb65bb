"""Charts of the page: values are where they belong."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dkrr.jobs.charts import Chart, axis

finite = st.floats(allow_nan=False, allow_infinity=False, width=64)


@given(st.lists(finite, max_size=20), st.booleans(), st.booleans(), st.booleans())
def test_an_axis_holds_all_values(values: list[float], log: bool, zero: bool, tight: bool) -> None:
    values = [abs(value) or 1.0 for value in values] if log else values
    found = axis(values, 50.0, 390.0, log=log, zero=zero and not log, tight=tight and not log)
    assert found.low < found.high
    assert 1 <= len(found.ticks) == len(found.labels) <= 15
    assert all(50.0 <= found.at(value) <= 390.0 for value in values)


def chart(mark: Any, x: list[Any], *columns: list[Any], **given: Any) -> Chart:
    values = {f"name{k or ''}": column for k, column in enumerate(columns)}
    return Chart(mark=mark, x=x, columns=values, **{"title": "t", "sentence": "s", "x_label": "x"} | given)


def points_of(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path)]


def test_a_curve_goes_through_its_points_and_has_gaps() -> None:
    lines = chart("line", [0, 1, 2, 3], [0, 10, None, 5], [1, None, None, 2], levels=[(8, "limit")])
    (_, path), (_, other) = lines.picture["curves"]
    first = points_of(path)
    assert [x for x, _ in first] == sorted(x for x, _ in first)
    assert first[0][1] > first[2][1] > first[1][1]  # heights grow upwards
    assert (len(lines.picture["names"]), len(points_of(other))) == (2, 2)
    assert path.count("M") == 2  # the gap
    assert lines.picture["levels"][0][1] == "limit"
    assert lines.table.rows == [("0", "0", "1"), ("1", "10", "\u2013"), ("2", "\u2013", "\u2013"), ("3", "5", "2")]


def test_a_histogram_and_points() -> None:
    bars = chart("histogram", [0, 1, 2], [3, 6])
    first, second = (bar[3] for bar in bars.picture["bars"])
    assert second == pytest.approx(2 * first, rel=0.01)
    assert bars.table.rows == [("0 to 1", "3"), ("1 to 2", "6")]
    ((_, path),) = chart("point", [1, 2, math.nan], [1, 2, 1]).picture["curves"]
    assert len(points_of(path)) == 2
    for x, y in points_of(path):  # what is predicted rightly is on the line
        assert y == pytest.approx(202 - 190 * (x - 52) / 336, abs=0.2)
