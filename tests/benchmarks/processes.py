"""Run a command in a fresh process and watch the memory of everything that it starts; a hard limit on all of it.

Memory is RSS, what ``top`` shows and what Dask compares with a worker's limit: it counts pages of files that are mapped
at that moment (tiles being read) and leaves out page cache that nobody maps. Memory of several processes is the sum of
their RSS at one sample, so pages that they share (libraries) are counted once for each of them: the sum errs against
programs of several processes, such as dkrr, and never in their favour.

The peak of a single process is the kernel's own high-water mark (VmHWM), which no sample can miss but that of the last
interval. ``ru_maxrss`` would not do: a child that is started through vfork begins with the peak of its parent.

A hard limit is a control group of its own, page cache included, below the one that this process is in (version 1;
version 2 also beside it). Needs the right to make one: root, or a delegated group.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
SAMPLE_SECONDS = 0.2
CONTROL_GROUPS = Path("/sys/fs/cgroup")
THREADS_AND_KERNELS = re.compile(r"(OPENBLAS|OMP|MKL|GOTO|BLIS)_.*|DKRR_FAILPOINTS")
# marks of a command line, the first of which counts: a worker's may carry a warning filter that names the tracker
KINDS = {"spawn_main": "worker", "dask_spec": "nanny", "resource_tracker": "tracker"}


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a user: nothing said about BLAS, and this checkout first on the import path."""
    environment = {name: value for name, value in os.environ.items() if not THREADS_AND_KERNELS.fullmatch(name)}
    paths = [str(ROOT), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return environment | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), **(extra or {})}


def resident_bytes(pid: int) -> tuple[int, int]:
    """(VmRSS, VmHWM) of a process in bytes; (0, 0) for one that is gone or has no memory any more."""
    with contextlib.suppress(OSError):
        found = re.findall(r"^Vm(HWM|RSS):\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        values = {name: 1024 * int(value) for name, value in found}
        return values.get("RSS", 0), values.get("HWM", 0)
    return 0, 0


@dataclass
class Completed:
    """A command that ended, and the memory of its tree: ``peaks`` of (pid, kind), and of all together."""

    returncode: int = 0
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    peaks: dict[tuple[int, str], int] = field(default_factory=dict)
    total_peak_bytes: int = 0

    @property
    def status(self) -> str:
        """ "ok", "crashed (SIGSEGV)" or the last line of stderr."""
        if self.returncode < 0:
            return f"crashed ({signal.Signals(-self.returncode).name})"
        last = (self.stderr.strip().splitlines() or ["no message"])[-1]
        return f"failed ({self.returncode}): {last}" if self.returncode else "ok"

    def peak(self, kind: str) -> int:
        """Of the largest process of a kind: "command", "worker", "nanny"."""
        return max((peak for (_, own), peak in self.peaks.items() if own == kind), default=0)


def sample(root: psutil.Process, seen: dict[int, psutil.Process], into: Completed) -> None:
    """Look at a process and all its descendants once."""
    total, root_line = 0, list[str]()
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [root, *root.children(recursive=True)]:
            seen.setdefault(process.pid, process)
            with contextlib.suppress(psutil.Error):
                # looked at every time: a process gets its own command line, and its own memory, at exec
                line = process.cmdline()
                root_line = root_line or line
                is_root = process.pid == root.pid
                if not is_root and line == root_line and time.time() - process.create_time() < 1:
                    continue  # between vfork and exec: its memory is its parent's
                kind = next((kind for mark, kind in KINDS.items() if mark in " ".join(line)), "other")
                key = process.pid, "command" if is_root else kind
                rss, peak = resident_bytes(process.pid)
                total += rss
                into.peaks[key] = max(into.peaks.get(key, 0), peak)
    into.total_peak_bytes = max(into.total_peak_bytes, total)


def run_sampled(
    command: Sequence[str], *, folder: Path, environment: Mapping[str, str] | None = None, timeout: float = 3600.0
) -> Completed:
    """Run a command to its end, or for ``timeout`` seconds, and sample it; nothing of its tree is left then.

    Raises
    ------
    TimeoutError
        It did not end in time; it was killed.
    """
    done, stopped, seen = Completed(), threading.Event(), dict[int, psutil.Process]()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder, prefix="output-") as name:
        stdout, stderr = Path(name) / "stdout", Path(name) / "stderr"
        with stdout.open("w") as out, stderr.open("w") as err:
            process = subprocess.Popen(
                list(command), cwd=ROOT, env=environment or clean_environment(), stdin=subprocess.DEVNULL,
                stdout=out, stderr=err,
            )  # fmt: skip
        root = psutil.Process(process.pid)

        def watch() -> None:
            while not stopped.is_set():
                sample(root, seen, done)
                stopped.wait(SAMPLE_SECONDS)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            done.returncode = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{' '.join(command)} did not end within {timeout:.0f} s") from None
        finally:
            done.seconds = time.perf_counter() - began
            stopped.set()
            thread.join()
            sample(root, seen, done)
            for one in seen.values():
                with contextlib.suppress(psutil.Error):
                    one.kill()  # psutil compares creation times: never a stranger with a reused id
            psutil.wait_procs(list(seen.values()), timeout=10)
            process.wait()
        done.stdout, done.stderr = (path.read_text(errors="replace") for path in (stdout, stderr))
    return done


# --- a hard limit ----------------------------------------------------------------------------------------------------


class NoControlGroupError(Exception):
    """No control group with a memory limit can be made here; the message says what was tried."""


@dataclass(frozen=True)
class LimitedGroup:
    """A control group with a memory limit, of version 1 or 2."""

    path: Path
    version: int

    @property
    def prefix(self) -> tuple[str, ...]:
        """Put before a command: it enters the group, then becomes the command."""
        return ("/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"))

    @property
    def peak_bytes(self) -> int:
        """The most memory that was ever charged to the group, page cache included."""
        return int((self.path / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")).read_text())

    @property
    def num_kills(self) -> int:
        """Processes of the group that the kernel killed for the limit."""
        text = (self.path / ("memory.oom_control" if self.version == 1 else "memory.events")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])


@contextmanager
def limited_group(limit_bytes: int) -> Iterator[LimitedGroup]:
    """A new group with a limit; at the end its processes are killed and it is removed.

    Raises
    ------
    NoControlGroupError
        None can be made here.
    """
    group, tried = None, []
    for parent, version in _parents():
        path = parent / f"dkrr-measure-{uuid.uuid4().hex[:8]}"
        try:
            path.mkdir()
            (path / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(str(limit_bytes))
            swap = path / ("memory.memsw.limit_in_bytes" if version == 1 else "memory.swap.max")
            if swap.exists():  # not with a kernel without swap
                swap.write_text(str(limit_bytes if version == 1 else 0))
        except OSError as exc:
            tried.append(f"{parent}: {exc.strerror}")
            with contextlib.suppress(OSError):
                path.rmdir()
        else:
            group = LimitedGroup(path, version)
            break
    if group is None:
        raise NoControlGroupError("no control group with a memory limit: " + ("; ".join(tried) or "none is mounted"))
    try:
        yield group
    finally:
        for pid in (group.path / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for _ in range(100):  # until the kernel has given the last process' pages back
            with contextlib.suppress(OSError):
                group.path.rmdir()
                break
            time.sleep(0.1)


def _parents() -> Iterator[tuple[Path, int]]:
    """Groups in which one with a memory limit may be made, and their version."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        own = CONTROL_GROUPS / name.lstrip("/")
        if "memory" in controllers.split(","):
            yield CONTROL_GROUPS / "memory" / name.lstrip("/"), 1
        elif not controllers:  # a group with processes cannot have children with limits: maybe it is to be a sibling
            yield from ((parent, 2) for parent in dict.fromkeys((own, own.parent)))
