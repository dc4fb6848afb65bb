"""Run a command in a fresh process and watch the memory of everything that it starts.

Memory is RSS, what ``top`` shows and what Dask compares with a worker's limit: it counts pages of files that are mapped
at that moment (tiles being read) and leaves out page cache that nobody maps. Memory of several processes is the sum of
their RSS at one sample, so pages that they share (libraries) are counted once for each of them: the sum errs against
programs of several processes, dkrr and Dask, and never in their favour. PSS would divide shared pages fairly, but
reading it walks the page tables of the process, which would slow down what is timed.

The peak of a single process is the kernel's own high-water mark (VmHWM), which no sample can miss but that of the last
interval. ``ru_maxrss`` would not do: a child that is started through vfork begins with the peak of its parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

__all__ = [
    "ROOT",
    "Completed",
    "MemorySampler",
    "clean_environment",
    "kill_tree",
    "resident_bytes",
    "run_sampled",
]

ROOT = Path(__file__).resolve().parents[2]
SAMPLE_SECONDS = 0.2
_THREADS_AND_KERNELS = (
    "OPENBLAS_NUM_THREADS",
    "OPENBLAS_CORETYPE",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "DKRR_FAILPOINTS",
)


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a user: nothing said about BLAS, and this checkout first on the import path."""
    environment = {name: value for name, value in os.environ.items() if name not in _THREADS_AND_KERNELS}
    paths = [str(ROOT), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return {**environment, **(extra or {})}


def resident_bytes(pid: int | str = "self") -> tuple[int, int]:
    """(VmRSS, VmHWM) of a process in bytes; (0, 0) for one that is gone or has no memory any more."""
    values = {"VmRSS": 0, "VmHWM": 0}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in values:
                values[name] = 1024 * int(rest.split()[0])
    return values["VmRSS"], values["VmHWM"]


def kind_of(command_line: Sequence[str], *, is_root: bool) -> str:
    """What a process of the tree is."""
    if is_root:
        return "command"
    text = " ".join(command_line)
    for mark, kind in (
        ("spawn_main", "worker"),  # first: its command line may carry a warning filter that names the tracker
        ("dask_spec", "nanny"),
        ("resource_tracker", "tracker"),
    ):
        if mark in text:
            return kind
    return "other"


@dataclass
class MemorySampler:
    """Samples a process and all its descendants until :meth:`stop`.

    Attributes
    ----------
    peaks
        (pid, kind) -> largest VmHWM seen, bytes.
    total_peak_bytes
        The largest sum of RSS over the whole tree at one sample.
    tree
        Every process that was ever seen.
    """

    pid: int
    interval_seconds: float = SAMPLE_SECONDS
    peaks: dict[tuple[int, str], int] = field(default_factory=dict)
    total_peak_bytes: int = 0
    tree: dict[int, psutil.Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stopped = threading.Event()
        self._root = psutil.Process(self.pid)
        self.tree[self.pid] = self._root
        self._thread = threading.Thread(target=self._sample_until_stopped, daemon=True)

    def start(self) -> MemorySampler:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def peak_by_kind(self) -> dict[str, int]:
        """The largest process of each kind, bytes."""
        found: dict[str, int] = {}
        for (_, kind), peak in self.peaks.items():
            found[kind] = max(found.get(kind, 0), peak)
        return found

    def sample(self) -> None:
        """Take one sample now."""
        try:
            children = self._root.children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        total = 0
        root_line: list[str] = []
        for process in [self._root, *children]:
            self.tree.setdefault(process.pid, process)
            is_root = process.pid == self.pid
            with contextlib.suppress(psutil.Error):
                # looked at every time: a process gets its own command line, and its own memory, at exec
                line = process.cmdline()
                if is_root:
                    root_line = line
                elif line == root_line and time.time() - process.create_time() < 1:
                    continue  # between vfork and exec: its memory is its parent's
                rss, peak = resident_bytes(process.pid)
                total += rss
                if peak:
                    key = (process.pid, kind_of(line, is_root=is_root))
                    self.peaks[key] = max(self.peaks.get(key, 0), peak)
        self.total_peak_bytes = max(self.total_peak_bytes, total)

    def _sample_until_stopped(self) -> None:
        while not self._stopped.is_set():
            self.sample()
            self._stopped.wait(self.interval_seconds)


@dataclass(frozen=True)
class Completed:
    """A command that ended."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    memory: MemorySampler

    @property
    def status(self) -> str:
        """ "ok", "crashed (SIGSEGV)" or the last line of stderr."""
        if self.returncode == 0:
            return "ok"
        if self.returncode < 0:
            return f"crashed ({signal.Signals(-self.returncode).name})"
        lines = self.stderr.strip().splitlines()
        return f"failed ({self.returncode}): {lines[-1] if lines else 'no message'}"


def kill_tree(sampler: MemorySampler) -> None:
    """Kill what is left of a tree, processes that the sampler saw and their present children, by their ids."""
    processes = dict(sampler.tree)
    for process in list(processes.values()):
        with contextlib.suppress(psutil.Error):
            processes.update({child.pid: child for child in process.children(recursive=True)})
    for process in processes.values():
        with contextlib.suppress(psutil.Error):
            process.kill()  # psutil compares creation times: never a stranger with a reused id
    psutil.wait_procs(list(processes.values()), timeout=10)


def run_sampled(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    timeout: float = 3600.0,
) -> Completed:
    """Run a command to its end under a :class:`MemorySampler`; nothing of its tree is left then.

    Raises
    ------
    TimeoutError
        It did not end within ``timeout`` seconds; it was killed.
    """
    began = time.perf_counter()
    environment = clean_environment() if environment is None else environment
    with tempfile.TemporaryDirectory(dir=folder, prefix="output-") as name:
        output = Path(name)
        with (output / "stdout").open("w") as stdout, (output / "stderr").open("w") as stderr:
            process = subprocess.Popen(
                list(command),
                cwd=ROOT,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                text=True,
            )
        sampler = MemorySampler(process.pid).start()
        try:
            returncode = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{' '.join(command)} did not end within {timeout:.0f} s") from None
        finally:
            seconds = time.perf_counter() - began
            sampler.stop()
            kill_tree(sampler)
            process.wait()
        stdout_text, stderr_text = ((output / part).read_text(errors="replace") for part in ("stdout", "stderr"))
    return Completed(returncode, stdout_text, stderr_text, seconds, sampler)
