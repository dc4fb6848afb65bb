"""The HTML forms of plans, solutions, models and runs: the figures of the object, and nothing that could be markup."""

from __future__ import annotations

from pathlib import Path

import pytest

import dkrr
from dkrr.jobs.plan import plan
from dkrr.jobs.run_directory import RunDirectory
from dkrr.linalg.solution import Solution
from dkrr.markup import facts_html
from tests.jobs.report.runs import HOSTILE, fit_here, write_rows
from tests.pages import Page, outside_references


def read(form: str) -> Page:
    page = Page(form)
    assert outside_references(page) == []
    assert page.count("table") == 1
    assert page.count("script") == 0
    return page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("forms")
    write_rows(folder / "rows.csv", names=(HOSTILE, "b", "c"))
    return fit_here(folder)


def test_names_and_values_are_escaped_and_bounded() -> None:
    form = facts_html(HOSTILE, [(HOSTILE, HOSTILE), ("long", "x" * 10_000)], HOSTILE)
    read(form)
    assert "<script>" not in form
    assert form.count("&lt;script&gt;") == 4
    assert len(form) < 3000


def test_a_plan(run: RunDirectory) -> None:
    found = plan(dict((run.read("job.json") or {}) | {"output": {"directory": run.location + "-planned"}}))
    form = found._repr_html_()
    read(form)
    for words in (f"{found.num_rows:,} x {found.num_features}", "cholesky", f"{found.num_test_rows:,} held out", "rbf"):
        assert words in form
    assert "[bold]" not in form


def test_a_solution() -> None:
    solution = Solution(
        solver="cg", precision="float64", converged=False, num_iterations=1234, relative_residual=[1e-9, 3e-4],
        backward_error=[1e-15, 2e-9], seconds={"multiply": 1.5}, message=f"stopped {HOSTILE}",
    )  # fmt: skip
    form = solution._repr_html_()
    read(form)
    for words in ("1,234", "3.00e-04 (target 1)", "2.00e-09", "NO", "multiply 1.50", "&lt;script&gt;"):
        assert words in form


def test_a_model(run: RunDirectory) -> None:
    model = dkrr.load_model(Path(run.location) / "model.zarr")
    form = model._repr_html_()
    read(form)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;, b, c" in form
    assert f"{model.num_rows:,}" in form
    assert ">0.1<" in form
    assert model.location is not None
    assert model.location in form
