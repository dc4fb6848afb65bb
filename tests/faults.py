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
from typing import Any, Literal

import psutil
import pytest
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import MemoryStore, WrapperStore

from dkrr import failpoints
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import DkrrError

__all__ = [
    "DAMAGES",
    "Command",
    "Fault",
    "FaultyStore",
    "InTurn",
    "Run",
    "Spoiling",
    "Twice",
    "attempt",
    "chunk_files",
    "contents",
    "delete",
    "descendants",
    "end_commands",
    "failing_at",
    "finish",
    "flip",
    "kill_all_workers",
    "kill_worker",
    "lasts_from",
    "stopped",
    "swap",
    "times",
    "truncate",
    "wait_until",
    "worker_pids",
    "zero",
]

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


class FaultyStore(WrapperStore[Store]):
    """A store whose accesses are counted, and one of which fails. It is no ``LocalStore``: dkrr goes by key."""

    def __init__(self, store: Store | None = None, fault: Fault | None = None) -> None:
        super().__init__(MemoryStore() if store is None else store)
        self.fault = fault
        self.counts = {"get": 0, "set": 0}
        self.fired = 0

    def arm(self, fault: Fault | None) -> None:
        """Count from zero, towards another fault."""
        self.fault, self.counts, self.fired = fault, {"get": 0, "set": 0}, 0

    def _due(self, operation: str) -> str:
        self.counts[operation] += 1
        if self.fault is None or not self.fault.is_due(operation, self.counts[operation]):
            return ""
        self.fired += 1
        return self.fault.kind

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        kind = self._due("get")
        if kind in _ERRNOS:
            raise OSError(_ERRNOS[kind], f"{os.strerror(_ERRNOS[kind])} on purpose", key)
        value = await self._store.get(key, prototype, byte_range)
        if not kind or value is None or kind == "missing":
            return None if kind == "missing" else value
        return _buffer(_spoilt(value.to_bytes(), kind))

    async def set(self, key: str, value: Buffer) -> None:
        kind = self._due("set")
        if kind in ("torn", "short", "flip"):
            await self._store.set(key, _buffer(_spoilt(value.to_bytes(), kind)))
        if kind in _ERRNOS:
            raise OSError(_ERRNOS[kind], f"{os.strerror(_ERRNOS[kind])} on purpose", key)
        if not kind:
            await self._store.set(key, value)

    def contents(self) -> dict[str, bytes]:
        """Every key and its bytes, past the faults."""
        from zarr.core.sync import collect_aiterator, sync

        keys = sorted(collect_aiterator(self._store.list()))
        return {key: sync(self._store.get(key, default_buffer_prototype())).to_bytes() for key in keys}


def _buffer(data: bytes) -> Buffer:
    return default_buffer_prototype().buffer.from_bytes(data)


def _spoilt(data: bytes, kind: str) -> bytes:
    if kind == "flip":
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    return data[: len(data) // 2]


@contextmanager
def failing_at(specification: str) -> Iterator[failpoints.Failpoints]:
    """Failpoints in this process while the block runs."""
    before = failpoints._active
    failpoints._active = points = failpoints.Failpoints(specification)
    try:
        yield points
    finally:
        failpoints._active = before


def lasts_from(points: failpoints.Failpoints, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first fault fires at every visit from the given one on."""
    rule = points.rules[0]

    def is_due() -> bool:
        rule.visits += 1
        return rule.visits >= number

    monkeypatch.setattr(rule, "is_due", is_due)


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


def worker_pids(client: Any) -> dict[str, int]:
    """Process id of every worker, by address."""
    return dict(client.run(os.getpid))


def kill_worker(pid: int) -> None:
    """SIGKILL, as the kernel does when memory runs out."""
    os.kill(pid, signal.SIGKILL)


def kill_all_workers(client: Any) -> None:
    """All at once; their nannies start others."""
    for pid in worker_pids(client).values():
        kill_worker(pid)


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
    prefix: list[str] = field(default_factory=list)

    def start(self) -> subprocess.Popen[str]:
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **self.environment}
        variables.pop("DKRR_FAILPOINTS", None)
        if self.failpoints:
            variables["DKRR_FAILPOINTS"] = self.failpoints
        if self.once is not None:
            variables["DKRR_FAILPOINTS_ONCE"] = str(self.once)
        process = subprocess.Popen(
            [*self.prefix, sys.executable, "-m", "dkrr.cli", *self.arguments],
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
