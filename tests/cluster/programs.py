"""What tests of the templates need: Debian packages, certificates, and ``dkrr`` and ``dask`` as commands."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import import_path

__all__ = ["CLUSTER", "make_certificates", "need", "programs"]

CLUSTER = Path(__file__).parent.parent.parent / "cluster"


def need(*names: str, package: str) -> None:
    """Skip the test, loudly, where a Debian package is not installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [name for name in names if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: apt-get install {package}")
    if os.geteuid() != 0:
        pytest.skip("needs root")


def make_certificates(folder: Path, *options: str) -> Path:
    """The folders of an authority of our own for scheduler, worker and client."""
    command = [str(CLUSTER / "tls/make-certificates.sh"), *options, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def programs(folder: Path) -> Path:
    """A folder with commands that run this interpreter on the code under test."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, module in {"dkrr": "-m dkrr.cli ", "dask": "-m dask ", "python": ""}.items():
        command = folder / name
        command.write_text(
            f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(import_path())}\n"
            f'exec {shlex.quote(sys.executable)} {module}"$@"\n'
        )
        command.chmod(0o755)
    return folder
