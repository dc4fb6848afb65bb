"""Local clusters start from any script, die with it and leave nothing behind; bad connections fail in words."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
from distributed import Client

from dkrr.engine import local
from dkrr.engine.cluster import connect, find_client, local_cluster
from dkrr.errors import ClusterError, ParameterError
from tests.faults import descendants, wait_until

LINUX = sys.platform.startswith("linux")
linux_only = pytest.mark.skipif(not LINUX, reason="PR_SET_PDEATHSIG exists on Linux only")

SCRIPT = """
import sys
from distributed import Client
from dkrr import local_cluster
{extra}
def add(a, b):
    return a + b

with local_cluster(workers=2, memory_limit="1GiB") as cluster, Client(cluster) as client:
    print(client.submit(add, 1, 2).result(), client.submit({remote}).result())
"""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def client(scratch: Path) -> Iterator[Client]:
    """Two workers, started in a thread that has ended since: they must not die with the thread."""
    clusters: list[Any] = []
    with dask.config.set({"temporary-directory": str(scratch), "dkrr-test": {"object": object(), "number": 7}}):
        thread = threading.Thread(target=lambda: clusters.append(local_cluster(workers=2, memory_limit="1GiB")))
        thread.start()
        thread.join()
    with clusters[0] as cluster, Client(cluster, set_as_default=False) as client:
        yield client


def alive(pids: list[int]) -> list[int]:
    """Those of pids that are running; a process may end between any two questions about it."""

    def runs(pid: int) -> bool:
        try:
            return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    return [pid for pid in pids if runs(pid)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


# --- starting ---------------------------------------------------------------------------------------------------------


def test_runs_from_a_plain_file_beside_a_module_and_a_decoy(tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "helper.py").write_text("def double(x):\n    return 2 * x\n")
    # a file of this name where the command is typed must not be what the workers import
    (tmp_path / "numpy.py").write_text("raise SystemExit('imported from the current folder')")
    (folder / "script.py").write_text(SCRIPT.format(extra="import helper", remote="helper.double, 21"))
    command = [sys.executable, "-W", "error", str(folder / "script.py")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    # asyncio says so when somebody else was the first to see that a server has ended; nothing depends on it
    said = re.sub(r"Unknown child process pid.*\n", "", done.stderr)
    assert (done.returncode, done.stdout, said) == (0, "3 42\n", "")


def test_workers_are_as_promised(client: Client, scratch: Path) -> None:
    def settings(dask_worker: Any) -> dict[str, Any]:
        import dask
        import threadpoolctl

        return {
            "memory": dask.config.get("distributed.worker.memory"),
            "number": dask.config.get("dkrr-test", None),
            "threads": [library["num_threads"] for library in threadpoolctl.threadpool_info()],
            "environment": [os.environ[name] for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")],
            "nthreads": dask_worker.state.nthreads,
            "limit": dask_worker.memory_manager.memory_limit,
            "folder": dask_worker.local_directory,
        }

    answers = client.run(settings)
    assert len(answers) == 2
    for answer in answers.values():
        memory = answer["memory"]
        assert [memory[name] for name in ("target", "spill", "pause", "terminate")] == [False, False, False, 0.95]
        assert answer["number"] == {"object": None, "number": 7}
        assert set(answer["threads"]) == {1}
        assert answer["environment"] == ["1", "1"]
        assert (answer["nthreads"], answer["limit"]) == (1, 2**30)
        assert scratch in Path(answer["folder"]).parents


def test_everything_listens_on_loopback_only(client: Client) -> None:
    processes = [psutil.Process(), *descendants(os.getpid())]
    ports = [c.laddr for p in processes for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    assert len(ports) >= 5  # scheduler, two nannies, two workers
    assert {address.ip for address in ports} == {"127.0.0.1"}


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "GRACE_SECONDS", 30.0)
    before = {process.pid for process in descendants(os.getpid())}
    with dask.config.set({"temporary-directory": str(tmp_path)}):
        config = copy.deepcopy(dask.config.config)
        with local_cluster(workers=1, memory_limit=2**30):
            assert list(tmp_path.rglob("worker-*"))
            pids = [process.pid for process in descendants(os.getpid()) if process.pid not in before]
            assert dask.config.config == config
            started = time.monotonic()
        assert time.monotonic() - started < local.GRACE_SECONDS  # it ended by itself
    wait_until(lambda: not alive(pids), 5)  # the resource tracker ends a little later
    assert pids
    assert not list(tmp_path.rglob("worker-*"))


@pytest.mark.parametrize(
    "arguments",
    [{"workers": 1.5}, {"threads_per_worker": 0}, {"memory_limit": "much"}, {"memory_limit": None}],
)
def test_wrong_parameters(arguments: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=next(iter(arguments))):
        local_cluster(**arguments)


def test_a_worker_that_cannot_start_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_COMMAND", "raise SystemExit(7)")
    with pytest.raises(ClusterError, match="ended with status 7"):
        local_cluster(workers=2)


ORPHANS = """
import ctypes, sys, time, psutil
from distributed import Client
from dkrr import local_cluster

def freeze():
    ctypes.PyDLL(None).sleep(60)  # holds the interpreter lock: only the kernel can end this process

cluster = local_cluster(workers=2, memory_limit="1GiB")
client = Client(cluster)
future = client.submit(freeze)
while not any(client.processing().values()):
    time.sleep(0.01)
print(*(process.pid for process in psutil.Process().children(recursive=True)), flush=True)
time.sleep(60)
"""


@linux_only
def test_no_process_survives_a_kill_of_the_command(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment()
    ) as command:
        assert command.stdout is not None
        pids = [int(word) for word in command.stdout.readline().split()]
        assert len(alive(pids)) >= 4  # two nannies, two workers
        time.sleep(0.2)  # the worker is inside its call
        command.kill()
        try:
            wait_until(lambda: not alive(pids), 5)
        finally:
            for pid in alive(pids):
                os.kill(pid, signal.SIGKILL)


# --- finding ----------------------------------------------------------------------------------------------------------


def test_the_usual_client_is_found(client: Client) -> None:
    assert find_client() is None
    with Client(client.cluster) as default:
        assert find_client() is default
        with client.as_current():
            assert find_client() is client
    assert find_client() is None


# --- connecting -------------------------------------------------------------------------------------------------------


def test_connect_by_address_and_by_file(client: Client, tmp_path: Path) -> None:
    address = client.scheduler_info()["address"]
    path = tmp_path / "scheduler.json"
    path.write_text(json.dumps({"address": address}))
    for scheduler in (address, path, str(path)):
        with connect(scheduler, workers=2, timeout=5) as other:
            assert other.submit(sum, [1, 2], pure=False).result() == 3
            assert find_client() is None  # it did not become the default


@pytest.mark.parametrize("host", ["[2001:db8::1]", "127.0.0.1.example"])
def test_plain_tcp_to_another_machine_is_refused(host: str) -> None:
    with pytest.raises(ClusterError, match="plain tcp") as caught:
        connect(f"tcp://{host}:8786")
    assert "insecure" in caught.value.hint


@pytest.mark.parametrize("content", [None, "[]", '{"address": "nonsense"}'])
def test_bad_scheduler_files(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "scheduler.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises((ClusterError, ParameterError), match=r"scheduler\.json|scheduler address is"):
        connect(path)
