"""A retrain job whose tasks run in this process, and whose first night is over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.retrain.project import Project, in_process


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry for every executor that was started."""
    return in_process(monkeypatch)


@pytest.fixture
def project(tmp_path: Path, started: list[str]) -> Project:
    """One night is over: a model is in production."""
    project = Project(tmp_path / "p")
    project.deliver("night-1", seed=1)
    project.run()
    return project
