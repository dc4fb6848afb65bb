"""The report of a run: every section with the run's own numbers, of runs in every state, in one file that is safe.

In a headless Chromium nothing is fetched, nothing complained of, nothing too wide, light and dark.
"""

from __future__ import annotations

import html
import json
import logging
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dkrr.errors import InterruptedRunError, NotPositiveDefiniteError
from dkrr.jobs.charts import Chart, axis
from dkrr.jobs.page import render_report, write_report
from dkrr.jobs.run_directory import RunDirectory, Status, read_status
from tests.jobs.report.runs import HOSTILE, fit_here, write_rows
from tests.pages import SECTIONS, Page, outside_references

NAMES = (HOSTILE, 'a" onload="x', "<b>&amp;")


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A finished run with a Cholesky factor, on columns with names that nobody should have."""
    folder = tmp_path_factory.mktemp("direct")
    write_rows(folder / "rows.csv", names=NAMES)
    return fit_here(folder)


@pytest.fixture(scope="module")
def iterated(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A finished run of conjugate gradients, with nothing held out."""
    return fit_here(tmp_path_factory.mktemp("iterated"), evaluate=None, solver={"name": "cg", "rank": 20})


def page_of(run: RunDirectory) -> Page:
    return Page((run.read_bytes("report.html") or b"the run left no report").decode())


def refused(page: Page) -> list[str]:
    return [name for name, words in page.sections.items() if "could not be made" in words]


@pytest.fixture(params=["direct", "iterated"])
def page(request: pytest.FixtureRequest) -> Page:
    return page_of(request.getfixturevalue(request.param))


def test_it_is_one_well_formed_file_that_asks_nobody_for_anything(page: Page) -> None:
    assert (outside_references(page), refused(page)) == ([], [])
    assert "://" not in page.text
    assert len(page.text.encode()) < 200_000
    (policy,) = [a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'")
    assert len(page.ids) == len(set(page.ids))
    assert [tag for tag in ("html", "head", "body", "main", "h1") if page.count(tag) != 1] == []
    assert [level for level, _ in page.headings] == [1] + [2] * len(SECTIONS)
    pictures = [*page.root.iter("svg")]
    for picture in pictures:
        title, *rest = picture
        assert picture.attrib["aria-labelledby"].split() == [title.attrib["id"], rest[0].attrib["id"]]
        assert min(len(title.text or ""), len(rest[0].text or "") - 17) > 3
    # what a picture shows is also a table: one inside its figure, or right behind it
    assert page.count("table") > len(pictures)
    assert tuple(page.sections) == SECTIONS
    assert all(len(words) > 60 for words in page.sections.values())


def test_the_numbers_of_a_direct_fit(direct: RunDirectory) -> None:
    page, result = page_of(direct), direct.read("result.json") or {}
    plan, figures = result["plan"], direct.read("figures.json") or {}
    sections = page.sections
    assert [name for name in NAMES if name not in sections["data"]] == []  # text, and nothing else
    assert page.count("script") == page.count("b") == 0
    assert page.headings[0][1].split() == ["run", "finished"]
    assert result["message"] in page.text
    assert re.search(r"factorise [\d.]+ s 6 6 [\d.]+ GF/s \d+%", sections["time"])  # 3 tiles a side
    score, versions = result["score"], figures["environment"]["driver"]["versions"]
    expected = {
        "asked": ["cholesky", "standardize = true", *plan["reasons"].values()],
        "data": [f"{figures['data'][name]:,}" for name in ("num_rows", "num_test_rows")] + ["Histogram of target"],
        "time": ["prepare", "factorise", "solve", "residual", "evaluate"],
        "memory": ["this process"],
        "convergence": ["There were no iterations"],
        "residuals": [f"{max(result[name]):.3e}" for name in ("relative_residual", "backward_error")],
        "held-out": [f"{score['rmse'][0]:.5g}", f"all {score['num_rows']} held-out rows"],
        "plan": ["prepare", f"{plan['estimated_seconds']['factorise']:.3g} s"],
        "reuse": ["Nothing was resumed"],
        "versions": ["openblas", *(f"{name} {version}" for name, version in versions.items())],
        "events": ["driver 1 started"],
    }
    assert {key: [text for text in words if text not in sections[key]] for key, words in expected.items()} == {
        key: [] for key in expected
    }


@pytest.mark.parametrize("whitened", [True, False])
def test_a_constant_feature_has_no_spread(whitened: bool, tmp_path: Path) -> None:
    rows = np.loadtxt(write_rows(tmp_path / "rows.csv"), delimiter=",", skiprows=1)
    rows[:, 1] = 5.0
    np.savetxt(tmp_path / "rows.csv", rows, delimiter=",", header="a,b,c,target", comments="")
    run = fit_here(tmp_path, data={"standardize": whitened})
    shown = {item["name"]: (item["mean"], item["std"]) for item in (run.read("figures.json") or {})["data"]["features"]}
    assert shown["b"] == (5.0, 0.0)


def test_the_numbers_of_an_iteration(iterated: RunDirectory) -> None:
    page, result = page_of(iterated), iterated.read("result.json") or {}
    trace = (iterated.read("figures.json") or {})["convergence"][0]
    assert trace["iterations"] == list(range(result["num_iterations"] + 1))
    assert trace["relative_residual"][-1] == pytest.approx(result["relative_residual"])
    words = page.sections["convergence"]
    assert f"after {result['num_iterations']:,} iterations, 1e-08 was asked for" in words
    assert "tol 1e-08" in words
    assert "No rows were held out" in page.sections["held-out"]


def test_a_start_from_another_run_is_reuse(tmp_path: Path) -> None:
    for name in ("one", "other"):
        words = page_of(fit_here(tmp_path, name, solver={"name": "cg", "rank": 20})).sections["reuse"]
        assert ("Nothing was resumed" in words) == (name == "one")
    assert "coefficients of" in words


def test_the_curves_of_several_alphas_are_those_of_their_targets(tmp_path: Path) -> None:
    data = {"target": [-2, -1]}
    run = fit_here(tmp_path, data=data, model={"alpha": [0.1, 0.2]}, solver={"precision": "mixed"})
    traces = (run.read("figures.json") or {})["convergence"]
    assert [trace["curves"] for trace in traces] == [["target 0"], ["target 1"]]


def test_the_iterations_of_a_loss_are_those_of_the_result(tmp_path: Path) -> None:
    run = fit_here(tmp_path, model={"kernel": "rbf", "loss": "huber"}, solver=None)
    (trace,) = (run.read("figures.json") or {})["convergence"]
    assert trace["iterations"][-1] == (run.read("result.json") or {})["num_iterations"]


def test_several_targets_and_classes(tmp_path: Path) -> None:
    draws = np.random.default_rng(3)
    X = draws.standard_normal((300, 2))
    labels = (X[:, 0] > 0).astype(int) + 2 * (X[:, 1] > 0)
    rows = [f"{a:.9g},{b:.9g},{label}" for (a, b), label in zip(X, labels, strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join(["a,b,label", *rows]) + "\n")
    run = fit_here(tmp_path, data={"one_hot": True, "standardize": False}, evaluate={"metric": "accuracy"})
    result, figures = run.read("result.json") or {}, run.read("figures.json") or {}
    confusion = np.array(figures["held_out"]["confusion"])
    assert confusion.sum() == result["score"]["num_rows"]
    assert np.trace(confusion) / confusion.sum() == pytest.approx(result["score"]["accuracy"])
    page = page_of(run)
    assert f"{result['score']['accuracy']:.2%}" in page.sections["held-out"]
    assert "what they were taken for" in page.sections["held-out"]
    assert "Training rows of each class" in page.sections["data"]


# --- runs that did not finish -----------------------------------------------------------------------------------------


def test_a_failed_run_has_a_report_that_says_so(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.csv", num_rows=200)
    rows.write_text(rows.read_text() + rows.read_text().partition("\n")[2])  # every row twice
    with pytest.raises(NotPositiveDefiniteError) as caught:
        fit_here(tmp_path, model={"alpha": 0.0})
    run = RunDirectory(tmp_path / "runs/run")
    page = page_of(run)
    assert (page.headings[0][1].split(), refused(page)) == (["run", "failed"], [])
    assert caught.value.message.rstrip(".") in re.sub(r"\s+", " ", page.text.replace("&#39;", "'"))
    before = "the run failed before"
    expected = {
        "convergence": before,
        "residuals": before,
        "held-out": before,
        "plan": "come to its end (failed)",
        "time": "prepare",
    }
    assert [key for key, words in expected.items() if words not in page.sections[key]] == []


def test_an_interrupted_run_and_what_its_second_attempt_found(tmp_path: Path) -> None:
    def interrupt(phase: str, done: int, *_: Any) -> None:
        if (phase, done) == ("factorise", 4):
            raise InterruptedRunError("interrupted")

    with pytest.raises(InterruptedRunError):
        fit_here(tmp_path, progress=interrupt)
    run = RunDirectory(tmp_path / "runs/run")
    first = page_of(run)
    assert (first.headings[0][1].split(), refused(first)) == (["run", "interrupted"], [])
    assert [words for words in ("4 of 6 tasks", "`dkrr resume") if words not in first.text] == []
    fit_here(tmp_path)
    words = page_of(run).sections["reuse"]
    assert "6, 2 computed, 4 found valid" in words
    assert "This is attempt 2" in words


def test_a_run_that_runs_and_one_that_was_lost(direct: RunDirectory) -> None:
    status = replace(
        read_status(direct), state="running", exit_code=None, phase="factorise", tasks_done=3, tasks_total=6
    )
    reason = "its driver, process 1 on b, is gone"
    running = Page(render_report(direct, status))
    assert "was running in the phase factorise" in running.text
    assert "the run is running" in running.sections["residuals"]
    lost = Page(render_report(direct, replace(status, state="lost", lost_because=reason)))
    assert "The run was lost: its driver, process 1 on b, is gone." in lost.text
    assert "An earlier attempt finished" in lost.text
    assert refused(running) == refused(lost) == []


# --- what must not happen ---------------------------------------------------------------------------------------------


def test_documents_that_are_damaged_cost_a_section_and_not_the_page(
    direct: RunDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory(tmp_path / "runs/copy")
    for name in ("status.json", "job.json", "plan.json", "result.json"):
        run.write(name, direct.read(name) or {})
    run.write_bytes("figures.json", b"{ no json")
    run.write("samples.json", {"epoch": 1, "seconds": "soon", "memory_bytes": 7})
    with caplog.at_level(logging.ERROR):
        page = Page(render_report(run))
    assert set(refused(page)) <= {"memory", "rate"}
    assert "cholesky" in page.sections["asked"]
    empty = RunDirectory(tmp_path / "runs/empty")
    empty.write("status.json", Status(state="failed", error={"message": "no job"}).to_dict())
    page = Page(Path(write_report(empty)).read_text())
    assert (tuple(page.sections), refused(page)) == (SECTIONS, [])
    assert "The run failed: no job." in page.text


def test_secrets_do_not_appear(direct: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-of-the-environment")
    run = RunDirectory(tmp_path / "runs/copy")
    for name in ("job.json", "plan.json", "figures.json"):
        run.write(name, direct.read(name) or {})
    leaks = "GET https://user:canary-in-an-address@host/x?X-Amz-Signature=canary-in-a-query AKIACANARYCANARYCANA"
    message = f"{leaks} canary-of-the-environment Authorization: Bearer canary-in-a-header password=canary-given"
    error = {"type": "StoreError", "message": message, "hint": message}
    run.write("status.json", Status(state="failed", error=error, epoch=1).to_dict())
    run.write_bytes("job.toml", f"# {message}\n".encode())
    event = {"time": "2026-01-01T00:00:00.000Z", "kind": "warning", "message": message, "epoch": 1}
    run.write_bytes("events/000000.jsonl", (json.dumps(event) + "\n").encode())
    text = render_report(run)
    assert "canary" not in text.lower()
    assert "[removed]" in text


def test_it_stays_small_whatever_the_run_is_like(direct: RunDirectory, tmp_path: Path) -> None:
    run, long = RunDirectory(tmp_path / "runs/large"), "<&" * 20_000
    documents = {name: direct.read(f"{name}.json") or {} for name in ("job", "plan", "result", "figures", "status")}
    data, result = documents["figures"]["data"], documents["result"]
    data |= {
        "num_features": 10**5, "target_names": [long] * 60, "num_targets": 5000,
        "features": [{"name": long, "mean": 0.5, "std": 1.0}] * 60,
    }  # fmt: skip
    trace = {
        "name": long, "tol": 1e-9, "alpha": [0.1], "num_targets": 6, "is_over": True,
        "iterations": list(range(500)), "curves": [long] * 6, "relative_residual": [[0.5] * 6] * 500,
    }  # fmt: skip
    pairs = [[[k * 1.37, k * 0.7] for k in range(2000)] for _ in range(4)]
    documents["figures"] |= {"convergence": [trace] * 8, "held_out": {"pairs": pairs}}
    result |= {
        "relative_residual": [1e-10] * 5000, "backward_error": [1e-10] * 5000,
        "peak_rss_bytes": {f"tcp://10.0.0.{k}:{k}": 10**9 + k for k in range(3000)},
    }  # fmt: skip
    ways = [{"name": long, "disk_bytes": {}, "infeasible": long, "total_seconds": 1.0}] * 100
    documents["plan"]["candidates"] = ways
    memory = {f"tcp://worker-{k}": [10**9] * 240 for k in range(12)}
    times = {"seconds": list(range(240)), "flops_per_second": [1e9] * 240}
    for name, document in (documents | {"samples": {"epoch": 1, "memory_bytes": memory, **times}}).items():
        run.write(f"{name}.json", document)
    run.write_bytes("job.toml", long.encode() * 20)
    event = json.dumps({"time": "t", "kind": "warning", "message": long, "epoch": 1})
    run.write_bytes("events/000000.jsonl", f"{event}\n".encode() * 150)
    data = Path(write_report(run)).read_bytes()
    assert len(data) < 2_000_000
    page = Page(data.decode())
    assert refused(page) == []
    assert len(page.ids) == len(set(page.ids))


# --- charts: values are where they belong -----------------------------------------------------------------------------

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


# --- in a browser -----------------------------------------------------------------------------------------------------

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (390, 1280)
# frames have the width of a screen and the policy of their page; this page has none, and looks into them
LOOK = """<script>
const sizes = e => e.getBoundingClientRect();
const wide = (e, most) => !e.closest('.skip') && sizes(e).width > 0 && (sizes(e).right > most + 0.5
  || e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX !== 'visible' && e.clientWidth > 0);
onload = () => { document.body.textContent = JSON.stringify([...document.querySelectorAll('iframe')].map(frame => {
  const page = frame.contentDocument, most = frame.clientWidth;
  return {scrolls: page.documentElement.scrollWidth > most, background: getComputedStyle(page.body).backgroundColor,
          fetched: frame.contentWindow.performance.getEntriesByType('resource').map(e => e.name),
          wide: [...page.querySelectorAll('body *')].filter(e => wide(e, most)).map(e => e.outerHTML.slice(0, 80))};
})) }
</script>"""


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports of a direct fit, of an iteration, and of a run that failed early, in frames of each width."""
    folder = tmp_path_factory.mktemp("runs")
    names = (HOSTILE, "a_name_without_any_place_to_break_it_" * 4, "x")
    write_rows(folder / "rows.csv", num_rows=700, names=names)
    direct = fit_here(folder, "direct")
    iterated = fit_here(folder, "iterated", solver={"name": "cg", "rank": 20}, evaluate={"leave_one_out": True})
    failed = RunDirectory(folder / "runs" / ("failed_" + "x" * 100))
    error = {"type": "DataError", "message": "no_place_to_break_" * 30, "hint": "scale the features"}
    failed.write("status.json", Status(state="failed", error=error).to_dict())
    write_report(failed)
    pages = [f"file://{run.location}/report.html" for run in (direct, iterated, failed)]
    style = "border: 0; height: 900px; width"
    tags = [f'<iframe style="{style}: {width}px" src="{page}"></iframe>' for page in pages for width in WIDTHS]
    (folder / "frames.html").write_text("".join(tags) + LOOK)
    return folder / "frames.html"


@pytest.mark.system
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_report(frames: Path, dark: bool) -> None:
    if PROGRAM is None:
        pytest.skip("no Chromium on this machine")
    command = [
        PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
        "--allow-file-access-from-files", "--virtual-time-budget=10000", f"--user-data-dir={frames.parent}/profile",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        frames.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    seen = json.loads(html.unescape(done.stdout.partition("<body>")[2].partition("</body>")[0]))
    assert len(seen) == 3 * len(WIDTHS)
    for page in seen:
        assert (page["scrolls"], page["fetched"], page["wide"]) == (False, [], [])
        assert (sum(map(int, page["background"].strip("rgb()").split(","))) < 200) == dark
