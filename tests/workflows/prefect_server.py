"""An interpreter that has Prefect, and a Prefect server on the loopback interface; both last as long as the tests."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults import descendants, wait_until
from tests.servers import free_port

__all__ = ["PrefectServer", "environment", "prefect_interpreter", "run", "running", "server_of_our_own"]

ROOT = Path(__file__).parent.parent.parent
INSTALL_SECONDS, START_SECONDS = 900.0, 300.0


def prefect_interpreter(folder: Path) -> str:
    """One that has Prefect: this one, the one that DKRR_PREFECT_PYTHON names, or a new one in ``folder``.

    Where it cannot be installed the test is skipped, and counted.
    """
    if found := os.environ.get("DKRR_PREFECT_PYTHON"):
        return found
    if importlib.util.find_spec("prefect") is not None:
        return sys.executable
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["prefect"]
    python = str(folder / "bin/python")
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120, capture_output=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", *wanted],
            check=True, timeout=INSTALL_SECONDS, capture_output=True, text=True,
        )  # fmt: skip
    except (subprocess.SubprocessError, OSError) as exc:
        said = str(getattr(exc, "stderr", "") or exc).strip().splitlines()[-1]
        pytest.skip(f"Prefect is not installed, nor named by DKRR_PREFECT_PYTHON, and pip cannot install it: {said}")
    return python


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Variables for a process with Prefect: nothing of this machine's Prefect, and nothing of this process's paths."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_") and k != "PYTHONPATH"}
    return {
        **kept,
        "PREFECT_HOME": str(folder),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "DO_NOT_TRACK": "1",
        "DKRR_RETRY_SECONDS": "1,1",
        **more,
    }


@contextmanager
def running(command: Sequence[str], log: Path, folder: Path, variables: dict[str, str]) -> Iterator[Any]:
    """A process that ends with the block, and with it all that it has started."""
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        theirs = descendants(process.pid)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        for child in theirs:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.wait()


def run(command: Sequence[str], folder: Path, seconds: float, **variables: str) -> tuple[int, str]:
    """A command's exit code and all that it said; past ``seconds`` it is ended with what it has started."""
    log = folder / "command.log"
    with running(command, log, folder, environment(folder / "home", **variables)) as process:
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{command} did not end within {seconds:g} s: {log.read_text()[-2000:]}")
    return code, log.read_text()


@dataclass
class PrefectServer:
    """A server: its address, and what it says."""

    address: str

    @property
    def api(self) -> str:
        return f"{self.address}/api"

    def ask(self, path: str, document: dict[str, Any] | None = None) -> Any:
        """Its answer to a document (POST), or to none (GET)."""
        request = urllib.request.Request(  # noqa: S310
            f"{self.api}/{path}",
            data=None if document is None else json.dumps(document).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:  # noqa: S310
            return json.load(reply)

    def scheduled_runs(self, state: str) -> list[dict[str, Any]]:
        """Flow runs that its scheduler made and that are in a state, as COMPLETED; the oldest first."""
        document = {"flow_runs": {"state": {"type": {"any_": [state]}}}, "sort": "START_TIME_ASC"}
        return [run for run in self.ask("flow_runs/filter", document) if run["auto_scheduled"]]

    def artifacts(self, run: dict[str, Any]) -> list[str]:
        """What the tasks of a flow run left."""
        found = self.ask("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
        return [artifact["data"] for artifact in found]


@contextmanager
def server_of_our_own(python: str, folder: Path) -> Iterator[PrefectServer]:
    """A server with its scheduler and its pages, whose files are in ``folder``."""
    port = free_port()
    server = PrefectServer(f"http://127.0.0.1:{port}")
    command = [python, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    log = folder / "server.log"
    # without the variable the pages ask port 4200
    with running(command, log, folder, environment(folder, PREFECT_UI_API_URL=server.api)) as process:
        wait_until(lambda: process.poll() is not None or _is_well(server), START_SECONDS)
        assert process.poll() is None, log.read_text()
        yield server


def _is_well(server: PrefectServer) -> bool:
    try:
        return server.ask("health") is True
    except OSError:
        time.sleep(0.2)
        return False
