"""The report in a headless Chromium: nothing fetched, nothing complained of, nothing too wide, light and dark."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from dkrr.jobs.page import write_report
from dkrr.jobs.run_directory import RunDirectory, Status
from tests.jobs.report.runs import HOSTILE, fit_here, write_rows

pytestmark = pytest.mark.system

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
