"""Drive a run: take its lease, fence its writes, tell how it stands, hear who wants it to stop, say how it ended.

``dkrr fit`` in the foreground and detached drivers do the same, in the same directory, so either finds what the other
has done, and never both of them drive one run.

One thread looks every two seconds for ``cancel.json`` and replaces ``status.json`` (every ten seconds on an object
store). The thread that works only leaves its figures in a :class:`Monitor`.

Submitting a job, resuming a run and asking it to stop return at once. ``python -m dkrr.jobs.run RUN`` is the driver
of a submitted run: it runs or resumes it in the foreground, reads the job from its directory, and ends with the exit
codes of the command line. Its output is the run's ``driver.log`` (on an object store: from its end on).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil

from dkrr.errors import CancelledError, InterruptedRunError, LockedError, StoreError, told
from dkrr.jobs.run_directory import (
    BEAT_SECONDS,
    BEAT_SECONDS_REMOTE,
    DRIVER,
    EventLog,
    Meter,
    RunDirectory,
    Status,
    current_driver,
    look_once,
    read_status,
    run_kind,
    utc_now,
    write_status,
)
from dkrr.store.files import key_size, remove_drafts, storage_errors
from dkrr.store.interruption import fenced, interrupt_main_thread
from dkrr.store.lease import Lease, described, hold_lock, process_record

if TYPE_CHECKING:
    from dkrr.jobs.spec import JobSpec


CANCEL = "cancel.json"
POLL_SECONDS_REMOTE = 2.0
# what a cancelled run may take to leave by itself, between two tasks; then its main thread is interrupted
GRACE_SECONDS = 8.0
MOST_SAMPLES = 240
MOST_WORKERS = 12
WRITE_SECONDS = 20.0
logger = logging.getLogger("dkrr.runs")

Progress = Callable[[str, int, int, float, float], None]


class Samples:
    """Memory of the workers, and the rate, over the time of one attempt: bounded however long it takes.

    When 240 samples are there, neighbours become one (the larger of two sizes) and every later one stands for twice the
    time. The driver and up to 12 workers, the largest, have a curve each.
    ``samples.json`` has those of the last attempt, some 30 kB at most.
    """

    def __init__(self) -> None:
        # seconds since the attempt began, flops until then, resident bytes by process
        self.samples: list[tuple[float, float, dict[str, int]]] = []
        self._count, self._every = 0, 1

    def add(self, seconds: float, flops: float, memory_bytes: dict[str, int]) -> None:
        """Take a sample; ``flops`` are all until now."""
        self.samples.append((seconds, flops, {**memory_bytes, "driver": psutil.Process().memory_info().rss}))
        if self._count % self._every:
            self.samples[-2:] = [_as_one(*self.samples[-2:])]
        self._count += 1
        if len(self.samples) > MOST_SAMPLES:
            first, last = self.samples[:-1], self.samples[-1:]
            self.samples = [*map(_as_one, first[::2], first[1::2]), *last]
            self._every *= 2

    def to_dict(self) -> dict[str, Any]:
        """Plain data: columns, with None where a process was not there."""
        times, flops, memory = zip(*self.samples, strict=True) if self.samples else ((), (), ())
        peaks = {name: max(sizes.get(name, 0) for sizes in memory) for name in set().union(*memory)}
        names = sorted(peaks, key=lambda name: (name == "driver", peaks[name]))[-1 - MOST_WORKERS :]
        spans = zip(itertools.pairwise((0.0, *times)), itertools.pairwise((0.0, *flops)), strict=True)
        return {
            "seconds": [round(value, 2) for value in times],
            "flops_per_second": [round((done - first) / max(now - then, 1e-9)) for (then, now), (first, done) in spans],
            "memory_bytes": {name: [sizes.get(name) for sizes in memory] for name in names},
        }


def _as_one(early: tuple[float, float, dict[str, int]], late: tuple[float, float, dict[str, int]]) -> Any:
    """The later of two samples, with the larger of the sizes in both."""
    sizes = {name: max(item.get(name, 0) for item in (early[2], late[2])) for name in {**early[2], **late[2]}}
    return *late[:2], sizes


class Monitor:
    """The figures of a run that is being driven.

    Parameters
    ----------
    directory, lease
        The run, and the right to drive it.
    progress
        Who else wants to know of every finished task. Where it has a method ``attach``, it is called with a function
        that says how the run stands, as a :class:`~dkrr.jobs.run_directory.Status`.

    Called as a function it is the callback of the engine.
    """

    def __init__(self, directory: RunDirectory, lease: Lease, progress: Progress | None = None) -> None:
        self.directory, self.lease = directory, lease
        self.events = EventLog(directory, lease.epoch)
        self.lost: LockedError | None = None
        self.cancel_requested = False
        self._others = progress
        self._status = Status(state="starting", epoch=lease.epoch, started_at=utc_now())
        self._status.driver = {**process_record(), "kind": lease.kind, "epoch": lease.epoch, "token": lease.token}
        self._meter = Meter(self._status)
        self._began = self._samples_written = time.monotonic()
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="dkrr-heartbeat")
        # Python prints warnings that no handler takes, and this one must not be what silences them
        printed = [] if logger.hasHandlers() or logging.lastResort is None else [logging.lastResort]
        self._handlers: list[logging.Handler] = [_Warnings(self.events), *printed]
        self._executor_facts: Callable[[], dict[str, Any]] = dict
        self._memory: Callable[[], dict[str, int]] = dict
        self._samples = Samples()
        self._told_at: float | None = None

    # --- called by the thread that works ------------------------------------------------------------------------------

    def start(self) -> None:
        """Write the first status and begin to beat."""
        for handler in self._handlers:
            logging.getLogger("dkrr").addHandler(handler)
        self.events.add("state", f"driver {self.lease.epoch} started", driver=self.lease.kind)
        self._write()
        if self._others is not None and hasattr(self._others, "attach"):
            self._others.attach(self.snapshot)
        self._thread.start()

    def stop(self) -> None:
        """End the heartbeat."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        for handler in self._handlers:
            logging.getLogger("dkrr").removeHandler(handler)

    def phase(self, name: str) -> None:
        """Something begins that has no tasks to count; stop here when that is asked for."""
        self.check()
        with self._lock:
            self._meter.begin(name)
        self.events.add("phase", f"{name} began", tasks_done=0)

    def snapshot(self) -> Status:
        """The status as it is at this moment."""
        with self._lock:
            now = time.monotonic()
            self._status.elapsed_seconds = round(now - self._began, 3)
            self._status.phase_seconds = round(now - self._meter.began, 3)
            return replace(self._status, seconds=dict(self._status.seconds), phases=dict(self._status.phases))

    def __call__(self, phase: str, done: int, total: int, flops_done: float, flops_total: float) -> None:
        """The callback of the engine; raises when the run is cancelled or lost."""
        self.check()
        with self._lock:
            is_new = self._meter.read(phase, done, total, flops_done, flops_total)
        if is_new:
            self.events.add("phase", f"{self._status.phase_name} began", tasks_done=done)
        if self._others is not None:
            self._others(phase, done, total, flops_done, flops_total)

    def working(self, facts: Callable[[], dict[str, Any]], memory: Callable[[], dict[str, int]] = dict) -> None:
        """The run has its workers; ``facts()`` says which, ``memory()`` their resident bytes, and neither waits."""
        self._executor_facts, self._memory = facts, memory
        self._sample()
        status = self._status
        self.note(state="running" if status.state == "starting" else status.state)
        self._take_facts()
        self.events.add(
            "cluster", f"{status.num_workers} workers, {status.num_threads} threads", scheduler=status.scheduler
        )

    def note(self, **values: Any) -> None:
        """Set fields of the status."""
        with self._lock:
            for name, value in values.items():
                setattr(self._status, name, value)

    def is_cancelled(self) -> bool:
        """Whether no new task shall start: cancelled, or driven by somebody else by now."""
        return self.cancel_requested or self.lost is not None

    def check(self) -> None:
        """Return when the run shall go on.

        Raises
        ------
        LockedError
            Another driver has taken over.
        CancelledError
            Somebody asked for it.
        """
        if self.lost is not None:
            raise self.lost
        if self.cancel_requested:
            raise _cancelled(self.directory)

    def finish(self, state: str, exit_code: int, error: BaseException | None = None) -> None:
        """Write the last status and the last events; the heartbeat has been stopped."""
        facts = None
        if error is not None:
            seen = told(error)
            facts = {"type": type(error).__name__, "message": seen.message, "hint": seen.hint}
        with self._lock:
            self._meter.end()
            self.note(state=state, exit_code=exit_code, error=facts)
        self.events.add("state", state if facts is None else f"{state}: {facts['message']}", code=exit_code)
        try:
            self.events.flush()
            self._sample()
            with contextlib.suppress(OSError, StoreError):  # a curve that ends early is no reason to fail
                self._write_samples()
            report_at_end(self.directory, self.snapshot())  # first: who waits for the status finds the report
        finally:
            self._write()

    # --- the heartbeat ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        remote = self.directory.folder is None
        beat, poll = (BEAT_SECONDS_REMOTE, POLL_SECONDS_REMOTE) if remote else (BEAT_SECONDS, BEAT_SECONDS)
        last = time.monotonic()
        with fenced(self.lease.check, holder=self.lease.holder):
            while not self._stop.wait(poll):
                try:
                    self._poll()
                    if time.monotonic() - last >= beat - 0.01:
                        last = time.monotonic()
                        self._beat()
                except LockedError as exc:
                    self.lost = exc
                except (OSError, StoreError) as exc:
                    # a full disk may have room in a few seconds; another driver may take over if this lasts
                    logger.warning("the status of %s cannot be written (%s)", self.directory.location, exc)
                if self.is_cancelled():
                    self._insist()

    def _poll(self) -> None:
        if not self.cancel_requested and self.directory.read(CANCEL) is not None:
            self.cancel_requested = True
            self.note(state="cancelling")
            self.events.add("request", "cancel requested")
            self._write()

    def _beat(self) -> None:
        self._take_facts()
        self._sample()
        self.events.flush()
        self._write()
        if time.monotonic() - self._samples_written >= WRITE_SECONDS:
            self._write_samples()

    def _insist(self) -> None:
        """Interrupt, once, a main thread that does not come by a place where it would stop."""
        now = time.monotonic()
        self._told_at = self._told_at or now
        if now - self._told_at > GRACE_SECONDS:
            interrupt_main_thread()
            self._told_at = float("inf")  # the clean-up that follows must not be interrupted

    def _take_facts(self) -> None:
        before = [worker.get("address") for worker in self._status.refused_workers]
        self.note(**self._executor_facts())
        for worker in self._status.refused_workers:
            if worker.get("address") not in before:
                self.events.add("warning", f"worker {worker.get('address')} gets no task: {worker.get('reason')}")

    def _sample(self) -> None:
        memory = self._memory()
        with self._lock:
            self._samples.add(time.monotonic() - self._began, self._meter.work, memory)
            self._status.memory_bytes = max(memory.values(), default=self._status.memory_bytes)

    def _write_samples(self) -> None:
        self._samples_written = time.monotonic()
        self.directory.write("samples.json", self._samples.to_dict() | {"epoch": self.lease.epoch})

    def _write(self) -> None:
        with self._lock:
            self._status.heartbeat += 1
            write_status(self.directory, self.snapshot())


@contextlib.contextmanager
def driving(
    directory: RunDirectory,
    *,
    kind: str = "fit",
    progress: Progress | None = None,
    above: int = 0,
) -> Iterator[Monitor]:
    """Be the driver of a run while the block runs.

    Parameters
    ----------
    kind
        What the driver is: "fit" or "retrain", in the foreground, or "here", a detached process. Of that one somebody
        else prepared the attempt: a request to cancel that is there already is meant for it; otherwise older requests
        are removed. A "fit" that was new and came to nothing before it had a plan (bad data, say) is removed with its
        directory; the others have something in there before.
    progress
        Called for every finished task.
    above
        See :class:`~dkrr.store.lease.Lease`.

    Raises
    ------
    LockedError
        Another driver is alive, or has taken over since.
    CancelledError
        Somebody asked for it.
    """
    folder, stays = directory.folder, kind != "fit" or directory.exists()
    new = [] if folder is None or stays else [path for path in folder.parents if not path.exists()]
    lease = Lease(directory.location, DRIVER, directory.location, kind=kind, above=above)
    with lease.held():
        monitor = Monitor(directory, lease, progress)
        try:
            with storage_errors(directory.location, only_full=True):
                if kind != "here":
                    directory.remove(CANCEL)
                remove_drafts(directory.location, "[rs]*.json")  # status and results: others write none of these
                try:
                    monitor.start()
                    yield monitor
                finally:
                    monitor.stop()
                monitor.finish("finished", 0)
        except BaseException as error:
            _raise_if_lost(monitor, error)
            if not stays and not directory.has("plan.json"):
                directory.remove_begun()
                for path in new:
                    with contextlib.suppress(OSError):
                        path.rmdir()
                raise
            state, code = "failed", told(error).exit_code
            if code == InterruptedRunError.exit_code:
                state = "cancelled" if monitor.cancel_requested else "interrupted"
            with contextlib.suppress(OSError, StoreError):  # the error itself matters more than its record
                monitor.finish(state, code, error)
            if state == "cancelled" and not isinstance(error, CancelledError):
                raise _cancelled(directory) from None
            raise


def _raise_if_lost(monitor: Monitor, error: BaseException) -> None:
    """Raise the error of a driver that was replaced, whatever it stumbled over while it found out."""
    if isinstance(error, LockedError):
        try:
            monitor.lease.check()
        except LockedError:
            raise error from None
    elif monitor.lost is not None:
        raise monitor.lost from error


def _cancelled(directory: RunDirectory) -> CancelledError:
    return CancelledError("cancelled on request", hint=f"{directory.goes_on_by} continues it")


def report_at_end(directory: RunDirectory, status: Status) -> None:
    """Make the page of a run that ends with ``status``.

    Never raises, not even when it is interrupted: the run is over, its model is written, and a page is no reason to
    call that a failure. What went wrong is a warning that names the command that makes the page again.
    """
    try:
        from dkrr.jobs.page import write_report

        write_report(directory, status=status)
    except (Exception, KeyboardInterrupt) as exc:
        reason = f"{type(exc).__name__}: {exc}".rstrip(": ")
        logger.warning(
            "the report of the run could not be made (%s); `dkrr report %s` makes it again", reason, directory.shown
        )


class _Warnings(logging.Handler):
    """Warnings of dkrr become events; they are printed as before."""

    def __init__(self, events: EventLog) -> None:
        super().__init__(logging.WARNING)
        self.events = events

    def emit(self, record: logging.LogRecord) -> None:
        self.events.add("warning", record.getMessage(), logger=record.name)


@dataclass(frozen=True)
class Submitted:
    """What became of a submission: ``started`` is a record of the new driver's process, None when none was needed.

    ``note`` says what a finished run, which was not started again, leaves to do.
    """

    directory: RunDirectory
    status: Status
    started: dict[str, Any] | None = None
    note: str = ""


def submit_job(job: JobSpec, source: bytes) -> Submitted:
    """Make the run of a job and start its driver; nothing is started when the run is on its way, or finished.

    A run that is finished begins once more when its data set holds other rows since, a file that it reads was written
    since, its iterations may go on further, or its model is gone: it continues with what it has.

    Parameters
    ----------
    job
        The checked job.
    source
        Its file, byte for byte.

    Raises
    ------
    StoreMismatchError
        The directory holds another job; the differing fields are listed.
    LockedError
        It is driven, and its driver has not said yet for which job.
    """
    directory = RunDirectory(job.directory)
    job.check_claim(directory.location)  # before anything is written there
    with hold_lock(directory.path("job.json"), wait=True):  # of two at once the second finds the first
        job.check_claim(directory.location)
        if directory.exists():
            from dkrr.jobs.prepare import changed_since

            status = look_once(directory)
            if not status.is_over:
                if not directory.has("job.json"):
                    raise _is_driven(directory, status, "it has not said yet what it fits; try again in a while")
                job.check_claim(directory.location, is_driven=True)
                return Submitted(directory, status)
            if status.state == "finished" and job.has_same_limits(directory.read("job.json") or {}):
                result = directory.read("result.json") or {}
                is_there = key_size(str(result.get("model_path")), "zarr.json") is not None
                if is_there and not changed_since(job, result):
                    return Submitted(directory, status)
        before = {name: directory.read_bytes(name) for name in ("job.json", "job.toml")}
        directory.write("job.json", job.to_dict())  # first: it is what makes the folder a run
        directory.write_bytes("job.toml", source)
        try:
            return _start(directory)
        except BaseException:  # what it was finished for is not what was asked for now
            for name, data in before.items():
                if data is not None:
                    directory.write_bytes(name, data)
            raise


def resume_run(directory: RunDirectory) -> Submitted:
    """Start a new driver for a run that has ended without being finished; nothing for a finished one.

    Where a finished one reads other rows by now, ``note`` says so: a run is resumed for the rows that it was made for,
    and only its job begins with others.

    Raises
    ------
    LockedError
        Its driver is alive.
    StoreError
        The run has no job, or one of retraining.
    """
    if run_kind(directory.location) == "retrain":
        raise StoreError(f"{directory.shown} is not a fit", hint=f"{directory.goes_on_by} continues it")
    job, status = job_of(directory), look_once(directory)
    if status.state == "finished":
        from dkrr.jobs.prepare import changed_since

        return Submitted(directory, status, note=changed_since(job, directory.read("result.json") or {}))
    if not status.is_over:
        hint = f"`dkrr wait {directory.shown}`, or `dkrr cancel {directory.shown}` and resume it then"
        raise _is_driven(directory, status, hint)
    return _start(directory)


def _is_driven(directory: RunDirectory, status: Status, hint: str) -> LockedError:
    who = current_driver(directory)
    driver = "" if who is None else f", driven by {described(who)}"
    return LockedError(f"{directory.shown} is {status.state}{driver}", hint=hint)


def job_of(directory: RunDirectory) -> JobSpec:
    from dkrr.jobs.spec import JobSpec

    document = directory.read("job.json")
    if document is None:
        raise StoreError(f"{directory.location} has no job.json", hint="submit its job again, or check the path")
    return JobSpec.from_dict(document)


def _start(directory: RunDirectory) -> Submitted:
    directory.remove(CANCEL)
    # the process of the last driver says nothing about this one
    directory.write("placement.json", {"kind": "here"})
    before, epoch = read_status(directory), int((current_driver(directory) or {"epoch": 0})["epoch"])
    try:
        write_status(directory, Status(state="starting", epoch=epoch, started_at=utc_now()))
        record = start_driver(directory)
    except BaseException:
        before.state = before.state if before.is_ended else "interrupted"
        write_status(directory, before)
        raise
    directory.write("placement.json", record)
    return Submitted(directory, look_once(directory), record)


def start_driver(directory: RunDirectory) -> dict[str, Any]:
    """Start a detached driver of a run on this machine; it outlives the shell, and stops when the machine sleeps.

    It has a session of its own (no terminal, no SIGHUP), nothing on stdin, and its output in the run's ``driver.log``;
    that of a run on an object store goes to a temporary file of this machine, which the record names.

    Returns
    -------
    record : dict
        ``kind`` ("here"), ``log``, and what :func:`dkrr.store.lease.process_record` says; plain values.
    """
    from dkrr.engine.machine import subprocess_environment

    # -P: a file numpy.py in the current folder must not become NumPy
    command = [sys.executable, "-P", "-m", "dkrr.jobs.run", directory.location]
    log = directory.path("driver.log")
    if directory.folder is None:
        descriptor, log = tempfile.mkstemp(prefix=f"dkrr-{directory.name}-", suffix=".log")
        os.close(descriptor)
        command.append(log)
    pid = os.posix_spawn(
        sys.executable,
        command,
        subprocess_environment(),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP],  # a shell's background jobs ignore SIGINT
    )
    return {"kind": "here", **process_record(pid), "log": log}


def cancel_run(directory: RunDirectory) -> Status:
    """Leave a request to stop; the run as it was seen then. Nothing is written for one that has ended.

    The driver looks for it every two seconds, starts no new task, and ends; what is finished is kept. A lost run gets
    the request too: should its driver wake up, it stops.
    """
    status = look_once(directory)
    if not status.is_ended:
        directory.write(CANCEL, {"requested_at": utc_now(), "by": process_record()})
    return status
