"""Status: how far a run is, as its driver last said, and whether that driver is still there.

    starting -> running -> finished | failed | interrupted
                running -> cancelling -> cancelled

A reader adds one state that no driver can write: "lost", when the driver ended without saying so. What ended, in any
way but finished, can be resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any

from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.events import utc_now
from dkrr.jobs.runs.lease import current_driver, described
from dkrr.store.lease import is_gone, is_here, is_stopped, stale_seconds

__all__ = ["ENDED", "LOST", "Meter", "Status", "View", "Watch", "look_once", "read_status", "write_status"]

ENDED = ("finished", "failed", "cancelled", "interrupted")
LOST = "lost"
NAME = "status.json"
LOST_EXIT_CODE = 75  # what an interruption has: it can be resumed
BEAT_SECONDS, BEAT_SECONDS_REMOTE = 2.0, 10.0
START_SECONDS = 120.0  # imports from a slow network disk; a driver on this machine is known by its process


@dataclass(kw_only=True)
class Status:
    """What ``status.json`` holds. Seconds are wall time, rates are of the current phase, times are UTC.

    ``phases`` are those that are over: ``number`` in their order, ``seconds``, ``tasks``, ``flops_per_second`` of the
    last time, and the number of ``times``; ``seconds`` has the sums. ``memory_bytes`` is the resident memory of the
    largest worker. ``given_up`` are the ways that led to no answer, see :class:`~dkrr.linalg.solution.Solution`.
    """

    state: str = "starting"
    epoch: int = 0
    phase: str = ""
    tasks_done: int = 0
    tasks_total: int = 0
    flops_per_second: float = 0.0
    phase_seconds: float = 0.0
    phase_seconds_left: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    phases: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory_bytes: int = 0
    elapsed_seconds: float = 0.0
    driver: dict[str, Any] | None = None
    scheduler: str = ""
    dashboard: str = ""
    num_workers: int = 0
    num_threads: int = 0
    refused_workers: list[dict[str, Any]] = field(default_factory=list)
    insecure: bool = False
    started_at: str = ""
    updated_at: str = ""
    heartbeat: int = 0
    exit_code: int | None = None
    error: dict[str, str] | None = None
    model: str = ""
    reused: dict[str, Any] = field(default_factory=dict)
    given_up: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Status:
        """From plain data; what a newer dkrr wrote besides is left out."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in document.items() if name in known})

    @property
    def is_ended(self) -> bool:
        """Whether the driver has said that it is done, one way or the other."""
        return self.state in ENDED


def read_status(directory: RunDirectory) -> Status:
    """The status of a run. Without the document: finished when there is a result, else "interrupted"."""
    document = directory.read(NAME)
    if document is not None:
        return Status.from_dict(document)
    if directory.has("result.json"):
        return Status(state="finished", exit_code=0)
    return Status(state="interrupted", exit_code=LOST_EXIT_CODE)


def write_status(directory: RunDirectory, status: Status) -> None:
    """Replace the status; ``updated_at`` becomes now."""
    status.updated_at = utc_now()
    directory.write(NAME, status.to_dict())


class Meter:
    """Puts the progress of a phase into a status: tasks, rate, seconds so far and seconds left.

    Rate and time left count from the first reading of the phase, so that tiles finished before a resume make neither
    look better.
    """

    def __init__(self, status: Status, clock: Callable[[], float] = time.monotonic) -> None:
        self.status, self.clock = status, clock
        self.began, self.done, self.flops = clock(), 0, 0.0

    def is_new(self, phase: str, done: int) -> bool:
        """Whether a reading is that of another phase, or of the same one that began again."""
        before = self.status.phase.partition(", ")[0]
        return phase.partition(", ")[0] != before or done < self.status.tasks_done

    def begin(self, phase: str, done: int = 0, flops_done: float = 0.0) -> None:
        """A phase begins, with what is done already."""
        status = self.status
        self.began, self.done, self.flops = self.clock(), done, flops_done
        status.phase, status.tasks_done, status.tasks_total = phase, done, 0
        status.flops_per_second, status.phase_seconds, status.phase_seconds_left = 0.0, 0.0, None

    def read(self, phase: str, done: int, total: int, flops_done: float, flops_total: float) -> None:
        """Take a reading, as the engine gives it."""
        status, seconds = self.status, self.clock() - self.began
        status.phase, status.tasks_done, status.tasks_total, status.phase_seconds = phase, done, total, seconds
        flops, tasks = flops_done - self.flops, done - self.done
        status.flops_per_second = flops / seconds if seconds > 0 else 0.0
        work, left = (flops, flops_total - flops_done) if flops_total > 0 else (float(tasks), float(total - done))
        known = work > 0 and seconds > 0 and total > 0
        status.phase_seconds_left = left * seconds / work if known else None


@dataclass(frozen=True)
class View:
    """A status as a reader sees it: ``state`` may be "lost", and ``reason`` then says why."""

    status: Status
    state: str
    reason: str = ""
    age_seconds: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen by itself."""
        return self.state == LOST or self.status.is_ended

    @property
    def exit_code(self) -> int:
        """The run's exit code; 75 for a lost one, which can be resumed."""
        code = LOST_EXIT_CODE if self.state == LOST else self.status.exit_code
        return 0 if code is None else code

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the status with the state that is shown."""
        return {
            **self.status.to_dict(),
            "state": self.state,
            "lost_because": self.reason,
            "heartbeat_age_seconds": self.age_seconds,
            "exit_code": self.exit_code if self.is_over else None,
        }


class Watch:
    """Looks at a run again and again, and notices when its driver is gone.

    A driver on this machine is gone when its process is. Any other one is believed for as long as its counter moved
    within the last 60 s (``DKRR_STALE_SECONDS``) of this process' own clock.
    """

    def __init__(self, directory: RunDirectory, clock: Callable[[], float] = time.monotonic) -> None:
        self.directory, self.clock = directory, clock
        self._seen: Any = None
        self._since = clock()

    def look(self) -> View:
        """The run as it is now."""
        status = read_status(self.directory)
        if status.is_ended:
            return View(status, status.state, age_seconds=_age(status))
        reason = self._reason(status)
        if reason:
            again = read_status(self.directory)  # it may have ended between the two looks
            if again.is_ended:
                return View(again, again.state, age_seconds=_age(again))
            return View(again, LOST, reason, _age(again))
        return View(status, status.state, age_seconds=_age(status))

    def _reason(self, status: Status) -> str:
        """Why the driver is lost; empty while it is believed to be there."""
        driver = current_driver(self.directory)
        placed = self.directory.read("placement.json")
        if driver is None or _is_awaited(status, driver):
            if placed is not None and "started" in placed and is_gone(placed):
                return f"its driver, {described(placed)}, ended before it began; see driver.log"
            driver = {"epoch": status.epoch, "counter": -1}
            patience = max(stale_seconds(), START_SECONDS)
        elif is_gone(driver):
            return f"its driver, {described(driver)}, is gone"
        else:
            patience = stale_seconds()
        alive = placed is not None and driver.get("counter") == -1 and is_here(placed) and "started" in placed
        seen = (driver.get("epoch"), driver.get("counter"), status.updated_at)
        if seen != self._seen or (alive and not is_stopped(placed or {})):
            self._seen, self._since = seen, self.clock()
        quiet = self.clock() - self._since
        return f"no heartbeat for {quiet:.0f} s" if quiet > patience else ""


def look_once(directory: RunDirectory, *, beat_seconds: float | None = None) -> View:
    """The run as it is now, in milliseconds; seconds when its heartbeat looks stale, for a second look then decides.

    The age of a heartbeat is a difference between two machines' clocks, so it is not believed: where it exceeds the
    limit, or is negative, the counter is watched for two and a half heartbeats (``beat_seconds`` each; by default as a
    driver beats, less often on an object store).
    """
    if beat_seconds is None:
        beat_seconds = BEAT_SECONDS if directory.folder is not None else BEAT_SECONDS_REMOTE
    watch = Watch(directory)
    view = watch.look()
    age, patience = view.age_seconds, stale_seconds()
    if view.is_over or age is None or -5 <= age <= patience:
        return view
    before = current_driver(directory)
    deadline = time.monotonic() + min(2.5 * beat_seconds, patience)
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = watch.look()
        moved = read_status(directory).updated_at != view.status.updated_at or current_driver(directory) != before
        if now.is_over or moved:
            return now
    if age < 0:  # a clock is wrong, or the driver is slow; nothing speaks for more
        return view
    if (before is None or _is_awaited(view.status, before)) and age <= max(patience, START_SECONDS):
        return view
    return replace(view, state=LOST, reason=f"no heartbeat for {age:.0f} s")


def _is_awaited(status: Status, driver: dict[str, Any]) -> bool:
    """Whether a driver was started that has not taken the lease yet, from ``driver`` or after it."""
    by_submitter = status.state == "starting" and status.driver is None
    return bool(driver.get("released")) or (by_submitter and int(driver["epoch"]) <= status.epoch)


def _age(status: Status) -> float | None:
    """Seconds since the status was written, by the clocks of its writer and of this machine."""
    try:
        written = datetime.fromisoformat(status.updated_at)
    except ValueError:
        return None
    return (datetime.now(UTC) - written).total_seconds()
