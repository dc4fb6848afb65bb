"""What the page is made of: charts whose values are where they belong, and texts without what may be a secret."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dkrr.jobs.charts import Chart, axis
from dkrr.jobs.facts import REMOVED, scrub, secret_values

finite = st.floats(allow_nan=False, allow_infinity=False, width=64)


@given(st.lists(finite, max_size=20), st.booleans(), st.booleans())
def test_an_axis_holds_all_values(values: list[float], zero: bool, tight: bool) -> None:
    found = axis(values, 50.0, 390.0, zero=zero, tight=tight)
    assert found.low < found.high
    assert 1 <= len(found.ticks) == len(found.labels) <= 15
    for value in values:
        assert 50.0 <= found.at(value) <= 390.0
        assert found.low <= value * (1 + 1e-12) or math.isclose(value, found.low, abs_tol=1e-300)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 10], ("0", "2", "4", "6", "8", "10")),
        ([0.12, 0.87], ("0.0", "0.2", "0.4", "0.6", "0.8", "1.0")),
        ([1200, 9700], ("0", "2,000", "4,000", "6,000", "8,000", "10,000")),
        ([5], ("4.4", "4.6", "4.8", "5.0", "5.2", "5.4", "5.6")),
        ([], ("0.0", "0.2", "0.4", "0.6", "0.8", "1.0")),
        ([math.nan, math.inf, 0, 2e9], ("0", "5e+08", "1e+09", "1.5e+09", "2e+09")),
    ],
)
def test_ticks_are_round(values: list[float], labels: tuple[str, ...]) -> None:
    assert tuple(axis(values, 0.0, 1.0).labels) == labels


@given(st.lists(st.floats(min_value=1e-300, max_value=1e300), max_size=20))
def test_a_logarithmic_axis_holds_all_values(values: list[float]) -> None:
    found = axis(values, 200.0, 10.0, log=True)
    assert 2 <= len(found.ticks) <= 8
    assert all(10.0 - 1e-6 <= found.at(value) <= 200.0 + 1e-6 for value in values)


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


@pytest.mark.parametrize("mark", ["line", "point", "histogram"])
def test_nothing_to_draw_is_no_error(mark: str) -> None:
    for x, y in ((), ()), ([1], [None]), ([0.0, 0.0], [4]):
        if (mark == "histogram") == (len(x) > len(y) or not x):
            assert chart(mark, [*x], *([[*y]] if x else [])).picture["height"] == 240


# --- secrets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "https://user:hidden@host/path",
        "s3://bucket/key?X-Amz-Signature=hidden",
        "the key AKIAHIDDENHIDDENHIDD was refused".replace("HIDDENHIDDENHIDD", "ABCDEFGHIJKLMNOP"),
        "password=hidden",
        "password: hidden",
        "AWS_SECRET_ACCESS_KEY=hidden",
        "api-key = hidden",
        "Authorization: Bearer hidden.hidden",
    ],
)
def test_secrets_are_removed(text: str) -> None:
    found = scrub(text, [])
    assert REMOVED in found
    assert "hidden" not in found
    assert "ABCDEFGHIJKLMNOP" not in found


def test_values_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"AWS_SESSION_TOKEN": "of-the-environment", "A_TOKEN_FILE": "/a/path/of/a/file", "MY_PASSWORD": "short"}
    for name, value in (values | {"MY_FOLDER": "a-folder-of-mine"}).items():
        monkeypatch.setenv(name, value)
    assert secret_values().count("of-the-environment") == 1
    assert not {"a-folder-of-mine", "/a/path/of/a/file", "short"} & {*secret_values()}
    found = scrub({"list": ["x of-the-environment y", 3], "of-the-environment": None})
    assert found == {"list": [f"x {REMOVED} y", 3], REMOVED: None}
