"""``cluster/local.sh`` starts what dkrr needs, runs a command against it, and ends all of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "cluster" / "local.sh"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def environment() -> dict[str, str]:
    # what local.sh has to set itself must not come from the tests' own environment
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    return {**kept, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}


def run(*arguments: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *map(str, arguments)],
        cwd=cwd, env=environment() | variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def servers(port: int) -> list[dict[str, Any]]:
    """Processes of a scheduler or of workers at the port."""
    every = (process.info for process in psutil.process_iter(["cmdline", "pid"]))
    return [info for info in every if "dask" in (line := " ".join(info["cmdline"] or [])) and str(port) in line]


@pytest.mark.system
@pytest.mark.short
def test_a_fit_on_it_uses_both_workers_and_all_of_it_ends(tmp_path: Path) -> None:
    port = free_port()
    text = (ROOT / "cluster" / "job.toml").read_text()
    assert text.count("127.0.0.1:8786") == 1
    assert text.count("n=4096") == 1
    job = tmp_path / "job.toml"
    job.write_text(text.replace("127.0.0.1:8786", f"127.0.0.1:{port}").replace("n=4096", "n=2048"))
    done = run("-p", port, sys.executable, "-m", "dkrr.cli", "fit", job, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert len(summary["peak_rss_bytes"]) == 2
    assert summary["score"]["rmse"][0] < 1.3
    assert servers(port) == []
    assert done.stderr.startswith(f"scheduler at tcp://127.0.0.1:{port}, 2 workers of 2GiB\n")


@pytest.mark.system
def test_workers_get_what_doctor_prints_and_do_not_spill(tmp_path: Path) -> None:
    port = free_port()
    python = tmp_path / "python"  # adds a line to what `dkrr doctor --env` prints, to be found again in the workers
    python.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *"doctor --env") "{sys.executable}" "$@" && echo "export FROM_DOCTOR=yes";; '
        f'*) exec "{sys.executable}" "$@";; esac\n'
    )
    python.chmod(0o755)
    script = tmp_path / "ask.py"
    script.write_text(
        "import json, os, dask\n"
        "from distributed import Client\n"
        f"client = Client('tcp://127.0.0.1:{port}')\n"
        "client.wait_for_workers(3, timeout=60)\n"
        "def ask():\n"
        "    memory = dask.config.get('distributed.worker.memory')\n"
        "    settings = [memory[key] for key in ('target', 'spill', 'pause')]\n"
        "    return [os.environ.get(name) for name in ('FROM_DOCTOR', 'OPENBLAS_NUM_THREADS')], settings\n"
        "limits = [w['memory_limit'] for w in client.scheduler_info(n_workers=-1)['workers'].values()]\n"
        "print(json.dumps([sorted(client.run(ask).values()), limits, list(client.nthreads().values())]))\n"
    )
    done = run("-n", 3, "-m", "700MiB", "-p", port, sys.executable, script, cwd=tmp_path, PYTHON=str(python))
    assert done.returncode == 0, done.stderr
    answers, limits, threads = json.loads(done.stdout)
    assert answers == [[["yes", "1"], [False, False, False]]] * 3
    assert limits == [700 * 2**20] * 3
    assert threads == [1, 1, 1]
    assert servers(port) == []
