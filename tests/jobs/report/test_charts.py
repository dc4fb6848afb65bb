"""What the page is made of: charts whose values are where they belong, and texts without what may be a secret."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
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
    assert all(found.low - 1e-6 <= math.log10(value) <= found.high + 1e-6 for value in values)


def drawn(svg: Chart) -> ET.Element:
    return ET.fromstring(str(svg.svg("k")))  # noqa: S314  (what was made a line before)


def points_of(svg: Chart, kind: str) -> list[list[tuple[float, float]]]:
    paths = [item.get("d", "") for item in drawn(svg).iter("path") if item.get("class", "").startswith(kind)]
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path)] for path in paths]


def chart(mark: Any, x: list[Any], *columns: list[Any], name: str = "name", **given: Any) -> Chart:
    values = {f"{name}{k or ''}": column for k, column in enumerate(columns)}
    facts = {"title": name, "sentence": name, "x_label": name, "y_label": name} | given
    return Chart(mark=mark, x=x, columns=values, **facts)


def test_a_curve_goes_through_its_points_and_has_gaps() -> None:
    svg = chart("line", [0, 1, 2, 3], [0, 10, None, 5], [1, None, None, 2], x_label="seconds", levels=[(8, "limit")])
    first, second, *legend = points_of(svg, "curve")
    assert [x for x, _ in first] == sorted(x for x, _ in first)
    assert first[0][1] > first[2][1] > first[1][1]  # heights grow upwards
    assert (len(legend), len(second)) == (2, 2)
    path = next(item.get("d", "") for item in drawn(svg).iter("path") if item.get("class") == "curve s0")
    assert path.count("M") == 2  # the gap
    assert {"seconds", "name", "limit", "name1"} <= {item.text for item in drawn(svg).iter("text")}
    assert svg.table.rows == [("0", "0", "1"), ("1", "10", "\u2013"), ("2", "\u2013", "\u2013"), ("3", "5", "2")]


def test_a_histogram_and_points() -> None:
    svg = chart("histogram", [0, 1, 2], [3, 6])
    heights = [float(item.get("height", "0")) for item in drawn(svg).iter("rect")]
    assert heights[1] == pytest.approx(2 * heights[0], rel=0.01)
    assert svg.table.rows == [("0 to 1", "3"), ("1 to 2", "6")]
    cloud = chart("point", [1, 2, math.nan], [1, 2, 1])
    (line,) = points_of(cloud, "mark")
    (points,) = points_of(cloud, "points")
    assert len(points) == 2
    for x, y in points:  # what is predicted rightly is on the line
        share = (x - line[0][0]) / (line[1][0] - line[0][0])
        assert y == pytest.approx(line[0][1] + share * (line[1][1] - line[0][1]), abs=0.2)


@pytest.mark.parametrize("name", ["<script>1</script>", '"><svg onload=x>', "{0.key}", "a & b"])
def test_names_are_text(name: str) -> None:
    for svg in (
        chart("line", [0, 1], [1, 2], [1, 2], name=name, levels=[(1, name)]),
        chart("histogram", [0, 1], [1], name=name),
        chart("point", [0], [1], name=name),
    ):
        root = drawn(svg)
        assert root.find("title").text == name
        assert {item.tag for item in root.iter()} <= {"svg", "title", "desc", "path", "rect", "text"}


@pytest.mark.parametrize("mark", ["line", "point"])
def test_nothing_to_draw_is_no_error(mark: str) -> None:
    assert drawn(chart(mark, [])) is not None
    assert drawn(chart(mark, [1], [None], log=mark == "line")) is not None
    assert drawn(chart("histogram", [0.0, 0.0], [4])) is not None


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
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-the-environment")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/a/path/of/a/file")
    monkeypatch.setenv("MY_PASSWORD", "short")
    monkeypatch.setenv("MY_FOLDER", "a-folder-of-mine")
    assert "a-folder-of-mine" not in secret_values()
    assert "of-the-environment" in secret_values()
    assert "/a/path/of/a/file" not in secret_values()
    assert "short" not in secret_values()
    found = scrub({"list": ["x of-the-environment y", 3], "of-the-environment": None})
    assert found == {"list": [f"x {REMOVED} y", 3], REMOVED: None}
