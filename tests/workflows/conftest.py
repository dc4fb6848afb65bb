"""A retrain job that has all to do, and the command that schedulers run."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from dkrr.jobs import toml
from tests.jobs.retrain.project import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A batch was delivered, and nothing done yet."""
    project = Project(tmp_path / "p", cluster={"workers": 1, "memory_limit": "1GiB"})
    (project.folder / "RETRAIN.toml").write_text(toml.dumps(project.document))
    project.deliver("n1", seed=1)
    return project


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """What stands in a reader's environment as ``dkrr``."""
    path = tmp_path / "bin/dkrr"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(os.pathsep.join(filter(None, sys.path)))}\nexport PYTHONPATH\n'
                    f'exec {shlex.quote(sys.executable)} -m dkrr.cli "$@"\n')  # fmt: skip
    path.chmod(0o755)
    return path
