"""Faults on purpose: a store that fails, chunk files that are spoilt, processes that are killed, and what to compare.

``FaultyStore`` is for the loop of SQLite's tests: let the first access fail, then the second, and so on until no fault
fires any more; after each, everything must be right or end in a typed error, and right when it is run again.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import obstore
import obstore.store
import psutil
import pytest

from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import DkrrError
from dkrr.store import objects
from tests.hooks import failpoints

# --- a store that fails -----------------------------------------------------------------------------------------------

GET_KINDS = ("error", "stale", "short", "missing", "flip")
SET_KINDS = ("error", "full", "torn", "short", "dropped", "flip")
_ERRNOS = {"error": errno.EIO, "stale": errno.ESTALE, "full": errno.ENOSPC, "torn": errno.EIO}


@dataclass
class Fault:
    """What happens at the ``number``-th get or set (counted from 1), and for ever after when ``forever``.

    Kinds of a get: "error" (EIO), "stale" (ESTALE), "short" (half the bytes), "missing" (no such key), "flip" (a bit).
    Kinds of a set: "error", "full" (ENOSPC), "torn" (half is stored, then EIO), "short" (half is stored, nothing is
    said), "dropped" (nothing is stored, nothing is said), "flip" (a bit).
    """

    operation: Literal["get", "set"]
    number: int
    kind: str
    forever: bool = False

    def is_due(self, operation: str, count: int) -> bool:
        return operation == self.operation and (count >= self.number if self.forever else count == self.number)


class FaultyStore:
    """An object store in memory, at an address of its own; accesses below it are counted, and one of them fails.

    Tests that have one use the fixture ``objects_in_memory``.
    """

    def __init__(self, fault: Fault | None = None) -> None:
        self.memory = obstore.store.MemoryStore()
        bucket = f"memory-{len(_IN_MEMORY)}"
        _IN_MEMORY[bucket] = self
        self.address = f"s3://{bucket}/at"
        self.arm(fault)

    def arm(self, fault: Fault | None) -> None:
        """Count from zero, towards another fault."""
        self.fault, self.counts, self.fired = fault, {"get": 0, "set": 0}, 0

    def _due(self, operation: str, path: str) -> str:
        if not path.startswith("at/"):  # a lock beside it
            return ""
        self.counts[operation] += 1
        if self.fault is None or not self.fault.is_due(operation, self.counts[operation]):
            return ""
        self.fired += 1
        if self.fault.kind == "missing":
            raise FileNotFoundError(errno.ENOENT, "missing on purpose", path)
        return self.fault.kind

    def get(self, path: str) -> Any:
        kind = self._due("get", path)
        _fail(kind, path)
        found = obstore.get(self.memory, path)
        if not kind:
            return found
        data = _spoilt(bytes(found.bytes()), kind)
        meta = {**found.meta, "size": len(data)}
        return SimpleNamespace(meta=meta, bytes=lambda: data, stream=lambda min_chunk_size: iter([data]))

    def get_range(self, path: str, *, start: int, length: int) -> Any:
        kind = self._due("get", path)
        _fail(kind, path)
        data = bytes(obstore.get_range(self.memory, path, start=start, length=length))
        return _spoilt(data, kind) if kind else data

    def put(self, path: str, parts: Any, **options: Any) -> Any:
        kind = self._due("set", path)
        data = parts if isinstance(parts, bytes) else b"".join(parts)
        if kind in ("torn", "short", "flip"):
            obstore.put(self.memory, path, _spoilt(data, kind))
        _fail(kind, path)
        return {"e_tag": kind} if kind else obstore.put(self.memory, path, data, **options)

    def lose(self, key: str) -> None:
        """Remove a key, past the faults."""
        obstore.delete(self.memory, f"at/{key}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def contents(self) -> dict[str, bytes]:
        """Every key and its bytes, past the faults."""
        keys = sorted(str(item["path"]) for page in obstore.list(self.memory, "at") for item in page)
        return {key.removeprefix("at/"): bytes(obstore.get(self.memory, key).bytes()) for key in keys}


_IN_MEMORY: dict[str, FaultyStore] = {}


@pytest.fixture(scope="module")
def objects_in_memory() -> Iterator[None]:
    """Addresses of FaultyStores are theirs."""
    usual = objects._client

    def client(bucket: str, *settings: Any) -> Any:
        return _IN_MEMORY[bucket] if bucket in _IN_MEMORY else usual(bucket, *settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "_client", client)
        yield


def _fail(kind: str, path: str) -> None:
    if kind in _ERRNOS:
        raise OSError(_ERRNOS[kind], f"{os.strerror(_ERRNOS[kind])} on purpose", path)


def _spoilt(data: bytes, kind: str) -> bytes:
    if kind == "flip":
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    return data[: len(data) // 2]


@contextmanager
def failing_at(specification: str) -> Iterator[failpoints.Failpoints]:
    """Failpoints in this process while the block runs."""
    points = failpoints.arm(specification)
    assert points is not None
    try:
        yield points
    finally:
        failpoints.arm(None)


def attempt(action: Callable[[], Any], success: str) -> str:
    """``success``, or E for a typed error of one line; an error without a type is a failure."""
    try:
        action()
    except DkrrError as exc:
        return "E" if exc.message and "\n" not in str(exc) else f"a bad message: {exc!r}"
    return success


class InTurn(InProcessExecutor):
    """The graph of two workers, whose last columns have partial sums; its tasks run one after the other, here."""

    num_threads = 2


class Spoiling(InTurn):
    """Runs ``spoil()`` once, right before task ``key`` of ``phase``: behind the back of a run that is on its way."""

    def __init__(self, phase: str, key: tuple[int, ...], spoil: Callable[[], None]) -> None:
        self.phase, self.key, self.spoil = phase, key, spoil
        self.done = False

    def run(self, phase: str, function: Any, payload: Any, nodes: Any, progress: Any = None) -> Any:
        def spoilt(task: Any, *key: int) -> Any:
            if (phase, key) == (self.phase, self.key) and not self.done:
                self.done = True
                self.spoil()
            return function(task, *key)

        return super().run(phase, spoilt, payload, nodes, progress)


class Twice(InTurn):
    """Runs every task twice, as a scheduler does that lost a receipt; the second receipt counts."""

    def __init__(self) -> None:
        self.computed_again: list[tuple[Any, ...]] = []

    def run(self, phase: str, function: Any, payload: Any, nodes: Any, progress: Any = None) -> Any:
        def twice(task: Any, *key: int) -> Any:
            function(task, *key)
            outcome = function(task, *key)
            if outcome is True:
                self.computed_again.append((phase, *key))
            return outcome

        return super().run(phase, twice, payload, nodes, progress)


# --- chunk files ------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    """Half of the file is gone."""
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """One bit in the middle changes."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def zero(path: Path) -> None:
    """All bytes are zero, as after a power failure."""
    path.write_bytes(bytes(path.stat().st_size))


def delete(path: Path) -> None:
    """The file is gone."""
    path.unlink()


def swap(first: Path, second: Path) -> None:
    """Two files change places; each passes its checksum."""
    between = first.with_name("between")
    first.rename(between)
    second.rename(first)
    between.rename(second)


DAMAGES: dict[str, Callable[[Path], None]] = {"truncated": truncate, "flipped": flip, "zeroed": zero, "deleted": delete}


def chunk_files(folder: Path) -> list[Path]:
    """The chunks of every array below a folder, without what a killed writer left."""
    return sorted(
        path
        for path in folder.rglob("*")
        if "c" in path.relative_to(folder).parts and path.suffix != ".partial" and path.is_file()
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Key and bytes of every chunk below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in chunk_files(folder)}


def times(folder: Path) -> dict[str, int]:
    """Key and time of modification (nanoseconds) of every chunk below a folder."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in chunk_files(folder)}


# --- processes --------------------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """The first true value of ``condition()``; the test fails when there is none within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:g} s in vain")
        time.sleep(0.01)
    return value


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that stands still while the block runs, and then goes on where it was: a zombie writer."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@dataclass
class Run:
    """How a command ended."""

    code: int
    out: str
    err: str


@dataclass
class Command:
    """A command of dkrr in a process of its own, with failpoints for it and its workers."""

    arguments: list[str]
    failpoints: str = ""
    once: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def start(self) -> subprocess.Popen[str]:
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **self.environment}
        variables.pop("DKRR_FAILPOINTS", None)
        if self.failpoints:
            variables["DKRR_FAILPOINTS"] = self.failpoints
        if self.once is not None:
            variables["DKRR_FAILPOINTS_ONCE"] = str(self.once)
        process = subprocess.Popen(
            [sys.executable, "-m", "dkrr.cli", *self.arguments],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    def run(self, seconds: float = 60.0) -> Run:
        """Start it and wait for its end."""
        return finish(self.start(), seconds)


started: list[subprocess.Popen[str]] = []
"""Commands of the test that is running."""


def end_commands() -> None:
    """Kill the commands that a failed test left behind."""
    for process in started:
        if process.poll() is None:
            process.kill()
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()
    started.clear()


def finish(process: subprocess.Popen[str], seconds: float = 60.0) -> Run:
    """Wait for the end of a command; past ``seconds`` it hangs, and that is a failure."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"{process.args} did not end within {seconds:g} s: {err[-2000:]}")
    return Run(process.returncode, out, err)


def descendants(pid: int) -> list[psutil.Process]:
    """All processes that a process has started, and theirs."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
