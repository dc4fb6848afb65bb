"""The report in a headless Chromium without a network: nothing fetched, nothing complained of, nothing too wide."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dkrr.jobs.page import write_report
from dkrr.jobs.run_directory import RunDirectory
from dkrr.jobs.status import Status
from tests.browser import Browser, Visit, chromium, keep
from tests.jobs.report.runs import HOSTILE, fit_here, write_rows

pytestmark = pytest.mark.system

WIDTHS = (390, 1280)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of a direct fit, of an iteration with several targets, and of a run that failed early."""
    folder = tmp_path_factory.mktemp("runs")
    names = (HOSTILE, "a_name_without_any_place_to_break_it_" * 4, "x")
    write_rows(folder / "rows.csv", num_rows=700, names=names)
    direct = fit_here(folder, "direct")
    iterated = fit_here(folder, "iterated", solver={"name": "cg", "rank": 20}, evaluate={"leave_one_out": True})
    failed = RunDirectory(folder / "runs" / ("failed_" + "x" * 100))
    error = {"type": "DataError", "message": "no_place_to_break_" * 30, "hint": "scale the features"}
    failed.write("status.json", Status(state="failed", error=error).to_dict())
    write_report(failed)
    return {
        name: Path(run.location) / "report.html"
        for name, run in (("direct", direct), ("iterated", iterated), ("failed", failed))
    }


def check(visit: Visit, width: int) -> None:
    assert visit.requests == []
    assert visit.console == []
    facts = visit.facts
    assert facts["width"] == width
    assert facts["scroll"] <= width, visit.wide
    assert facts["body"] <= width
    assert visit.wide == []  # nor does anything scroll inside, or stick out


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["direct", "iterated", "failed"])
def test_every_report(
    browser: Browser, pages: dict[str, Path], tmp_path: Path, name: str, dark: bool, width: int
) -> None:
    visit = browser.visit(pages[name], width=width, dark=dark)
    check(visit, width)
    background = sum(map(int, visit.facts["background"].strip("rgb()").split(",")))
    assert (background < 200) == dark
    keep(visit, f"{name}-{'dark' if dark else 'light'}-{width}", tmp_path)
