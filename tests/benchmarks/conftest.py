"""The table of figures: filled by the fixture ``judge``, printed at the end of the session."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.harness import FIGURES, Judge, table_lines


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Judge:
    """Record a figure and assert its bar; what a test prints about it also stands in the table at the end."""
    return Judge(request.config.stash.setdefault(FIGURES, []))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for large files, removed with everything in it as soon as the test ends, however it ends."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    figures = config.stash.setdefault(FIGURES, [])
    if figures:
        terminalreporter.section("measured figures")
        for line in table_lines([("", "line", "figure", "bar"), *figures]):
            terminalreporter.write_line(line)
