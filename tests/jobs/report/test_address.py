"""The report of a run at an address: written there at its end, made again from there, and no credential in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from dkrr.cli import main
from tests.jobs.report.runs import fit_here
from tests.pages import SECTIONS, outside_references, parse_page
from tests.s3 import CANARY_KEY, CANARY_SECRET, Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]

pytestmark = pytest.mark.system


@pytest.mark.short
def test_a_run_in_a_bucket(tmp_path: Path, bucket: Bucket) -> None:
    output = {"directory": bucket.url("runs/a"), "store": str(tmp_path / "store")}
    run = fit_here(tmp_path, output=output)
    assert run.location == bucket.url("runs/a")
    assert {"runs/a/report.html", "runs/a/figures.json", "runs/a/samples.json"} <= set(bucket.listing())
    text = (run.read_bytes("report.html") or b"").decode()
    page = parse_page(text)
    assert tuple(page.sections) == SECTIONS
    assert outside_references(page) == []
    result = run.read("result.json") or {}
    assert f"{result['score']['rmse'][0]:.5g}" in page.sections["held-out"]
    run.remove("report.html")
    again = CliRunner().invoke(main, ["report", bucket.url("runs/a")])
    assert (again.exit_code, again.stdout) == (0, f"{run.path('report.html')}\n")
    elsewhere = CliRunner().invoke(main, ["report", bucket.url("runs/a"), "-o", str(tmp_path / "page.html")])
    assert elsewhere.exit_code == 0
    for found in (text, (run.read_bytes("report.html") or b"").decode(), (tmp_path / "page.html").read_text()):
        assert CANARY_KEY not in found
        assert CANARY_SECRET not in found
