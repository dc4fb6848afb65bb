"""What a driver tells about itself while it works: heartbeat, status, events; and what it is told: to cancel, or that
somebody else has taken over.

One thread beats every two seconds (ten on an object store): it raises the counter of the lease, looks for
``cancel.json``, and replaces ``status.json``. The thread that works only leaves its figures here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dkrr.errors import CancelledError, DkrrError, LockedError, StoreError
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.events import EventLog, utc_now
from dkrr.jobs.runs.lease import DriverLease
from dkrr.jobs.runs.samples import Recorder
from dkrr.jobs.runs.status import BEAT_SECONDS, BEAT_SECONDS_REMOTE, Meter, Status, View, write_status
from dkrr.store.interruption import fenced, interrupt_main_thread

__all__ = ["CANCEL", "Monitor", "Progress", "cancelled_error", "report_at_end"]

CANCEL = "cancel.json"
POLL_SECONDS_REMOTE = 2.0
# what a cancelled run may take to leave by itself, between two tasks; then its main thread is interrupted
GRACE_SECONDS = 8.0
logger = logging.getLogger("dkrr.runs")

Progress = Callable[[str, int, int, float, float], None]


class Monitor:
    """The figures of a run that is being driven.

    Parameters
    ----------
    directory, lease
        The run, and the right to drive it.
    progress
        Who else wants to know of every finished task. Where it has a method ``attach``, it is called with a function
        that says how the run stands, as a :class:`~dkrr.jobs.runs.status.Status`.

    Called as a function it is the callback of the engine.
    """

    def __init__(self, directory: RunDirectory, lease: DriverLease, progress: Progress | None = None) -> None:
        self.directory, self.lease = directory, lease
        self.events = EventLog(directory, lease.epoch)
        self.lost: LockedError | None = None
        self.cancel_requested = False
        self._others = progress
        self._began = time.monotonic()
        self._status = Status(state="starting", epoch=lease.epoch, driver=dict(lease.record), started_at=utc_now())
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="dkrr-heartbeat")
        self._handler = _Warnings(self.events)
        self._meter = Meter(self._status)
        self._recorder = Recorder(lease.epoch, self._status.started_at)
        self._executor_facts: Callable[[], dict[str, Any]] | None = None
        self._told_at: float | None = None

    # --- called by the thread that works ------------------------------------------------------------------------------

    def start(self) -> None:
        """Write the first status and begin to beat."""
        logging.getLogger("dkrr").addHandler(self._handler)
        kind, epoch = self.lease.record.get("kind"), self.lease.epoch
        self.events.add("state", f"driver {epoch} started", host=self.lease.record["host"], driver=kind)
        self._recorder.begin(self.directory)
        self._write()
        if self._others is not None and hasattr(self._others, "attach"):
            self._others.attach(self.snapshot)
        self._thread.start()

    def stop(self) -> None:
        """End the heartbeat."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        logging.getLogger("dkrr").removeHandler(self._handler)

    def phase(self, name: str) -> None:
        """Something begins that has no tasks to count; stop here when that is asked for."""
        self.check()
        self._enter(name, 0, 0.0)

    def __call__(self, phase: str, done: int, total: int, flops_done: float, flops_total: float) -> None:
        self.progress(phase, done, total, flops_done, flops_total)

    def snapshot(self) -> Status:
        """The status as it is at this moment."""
        with self._lock:
            now = time.monotonic()
            self._status.elapsed_seconds = round(now - self._began, 3)
            self._status.phase_seconds = round(now - self._meter.began, 3)
            self._status.driver = dict(self.lease.record)
            return replace(self._status, seconds=dict(self._status.seconds), phases=dict(self._status.phases))

    def progress(self, phase: str, done: int, total: int, flops_done: float, flops_total: float) -> None:
        """The callback of the engine; raises when the run is cancelled or lost."""
        self.check()
        if self._meter.is_new(phase, done):
            self._enter(phase, done, flops_done)
        with self._lock:
            self._recorder.count(flops_done)
            self._meter.read(phase, done, total, flops_done, flops_total)
        if self._others is not None:
            self._others(phase, done, total, flops_done, flops_total)

    def working(self, facts: Callable[[], dict[str, Any]], memory: Callable[[], dict[str, int]] | None = None) -> None:
        """The run has its workers; ``facts()`` says which, ``memory()`` their resident bytes, and neither waits."""
        self._executor_facts, self._recorder.memory = facts, memory
        self._recorder.sample()
        with self._lock:
            self._status.state = "running" if self._status.state == "starting" else self._status.state
        self._take_facts()
        status = self._status
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
            raise cancelled_error(self.directory)

    def finish(self, state: str, exit_code: int, error: BaseException | None = None) -> None:
        """Write the last status and the last events; the heartbeat has been stopped."""
        with self._lock:
            self._leave(self._recorder.count(0.0, anew=True))
            self._status.state, self._status.exit_code = state, exit_code
            self._status.phase_seconds_left = None
            if error is not None:
                self._status.error = _described(error)
        self.events.add("state", state if error is None else f"{state}: {_described(error)['message']}", code=exit_code)
        try:
            self.events.flush()
            self._recorder.sample()
            with contextlib.suppress(OSError, StoreError):  # a curve that ends early is no reason to fail
                self._recorder.write(self.directory, self._status, now=True)
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
                self._insist()
                if self.lost is not None and self._told_at == float("inf"):
                    return

    def _poll(self) -> None:
        if not self.cancel_requested and self.directory.read(CANCEL) is not None:
            self.cancel_requested = True
            with self._lock:
                self._status.state = "cancelling"
            self.events.add("request", "cancel requested")
            self.lease.beat()
            self._write()

    def _beat(self) -> None:
        self.lease.beat()
        self._take_facts()
        self.note(memory_bytes=self._recorder.sample())
        self.events.flush()
        self._write()
        self._recorder.write(self.directory, self._status)

    def _insist(self) -> None:
        """Interrupt a main thread that does not come by a place where it would stop."""
        if not self.is_cancelled() or self._told_at == float("inf"):
            return
        now = time.monotonic()
        if self._told_at is None:
            self._told_at = now
        elif now - self._told_at > GRACE_SECONDS:
            interrupt_main_thread()
            self._told_at = float("inf")  # once: the clean-up that follows must not be interrupted

    def _take_facts(self) -> None:
        if self._executor_facts is not None:
            before = {str(worker.get("address")) for worker in self._status.refused_workers}
            self.note(**self._executor_facts())
            for worker in self._status.refused_workers:
                if str(worker.get("address")) not in before:
                    self.events.add("warning", f"worker {worker.get('address')} gets no task: {worker.get('reason')}")

    # --- both ---------------------------------------------------------------------------------------------------------

    def _enter(self, phase: str, done: int, flops_done: float) -> None:
        with self._lock:
            self._leave(self._recorder.count(flops_done, anew=True))
            self._meter.begin(phase, done, flops_done)
        self.events.add("phase", f"{phase.partition(', ')[0]} began", tasks_done=done)

    def _leave(self, flops_done: float) -> None:
        """Book the phase that ends, and so many flops for it."""
        status = self._status
        name = status.phase.partition(", ")[0]
        if not name:
            return
        seconds = time.monotonic() - self._meter.began
        status.seconds[name] = round(status.seconds.get(name, 0.0) + seconds, 3)
        flops = flops_done - self._meter.flops
        last = status.phases.get(name, {})
        status.phases[name] = {
            "number": last.get("number", len(status.phases)),
            "seconds": round(seconds, 3),
            "tasks": status.tasks_done - self._meter.done,
            "flops_per_second": round(flops / seconds) if seconds > 0 else 0,
            "times": 1 + int(last.get("times", 0)),
        }

    def _write(self) -> None:
        with self._lock:
            self._status.heartbeat += 1
            write_status(self.directory, self.snapshot())


def cancelled_error(directory: RunDirectory) -> CancelledError:
    """The error that a cancelled run ends with."""
    return CancelledError("cancelled on request", hint=f"`dkrr resume {directory.shown}` continues it")


def report_at_end(directory: RunDirectory, status: Status) -> None:
    """Make the page of a run that ends with ``status``.

    Never raises, not even when it is interrupted: the run is over, its model is written, and a page is no reason to
    call that a failure. What went wrong is a warning that names the command that makes the page again.
    """
    try:
        from dkrr.jobs.report.page import write_report

        write_report(directory, view=View(status, status.state))
    except (Exception, KeyboardInterrupt) as exc:
        reason = f"{type(exc).__name__}: {exc}".rstrip(": ")
        logger.warning(
            "the report of the run could not be made (%s); `dkrr report %s` makes it again", reason, directory.shown
        )


def _described(error: BaseException) -> dict[str, str]:
    if isinstance(error, DkrrError):
        return {"type": type(error).__name__, "message": error.message, "hint": error.hint}
    text = (str(error).splitlines() or [""])[0]
    return {"type": type(error).__name__, "message": f"{type(error).__name__}: {text}".rstrip(": "), "hint": ""}


class _Warnings(logging.Handler):
    """Warnings of dkrr become events; they are printed as before."""

    def __init__(self, events: EventLog) -> None:
        super().__init__(logging.WARNING)
        self.events = events

    def emit(self, record: logging.LogRecord) -> None:
        self.events.add("warning", record.getMessage(), logger=record.name)
        # Python prints warnings that no handler takes, and this one must not be what silences them
        own = logging.getLogger("dkrr")
        alone = all(isinstance(handler, _Warnings) for handler in own.handlers) and own.handlers[0] is self
        if alone and not logging.getLogger().handlers and logging.lastResort is not None:
            logging.lastResort.handle(record)
