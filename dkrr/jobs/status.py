"""Status: how far a run is, as its driver last said, and whether that driver is still there.

One process at a time drives a run: the one that ``driver.json`` names, a lease (:mod:`dkrr.store.lease`) whose epoch is
the number of the attempt. Whoever was replaced finds out before it writes.

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

from dkrr.errors import InterruptedRunError
from dkrr.jobs.run_directory import RunDirectory, utc_now
from dkrr.store.lease import Lease, described, is_gone, is_here, is_stopped, owner_of, stale_seconds, watch

ENDED = ("finished", "failed", "cancelled", "interrupted")
LOST = "lost"
NAME, DRIVER = "status.json", "driver.json"
BEAT_SECONDS, BEAT_SECONDS_REMOTE = 2.0, 10.0
START_SECONDS = 120.0  # imports from a slow network disk; a driver on this machine is known by its process


@dataclass(kw_only=True)
class Status:
    """What ``status.json`` holds. Seconds are wall time, rates are of the current phase, times are UTC.

    ``phases`` are those that are over: ``number`` in their order, ``seconds``, ``tasks``, ``flops_per_second`` of the
    last time, and the number of ``times``; ``seconds`` has the sums. ``memory_bytes`` is the resident memory of the
    largest worker. ``lost_because`` says why a reader takes the run for lost. ``given_up`` are the ways that led to no
    answer, see :class:`~dkrr.linalg.solution.Solution`.
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
    num_workers: int = 0
    num_threads: int = 0
    refused_workers: list[dict[str, Any]] = field(default_factory=list)
    insecure: bool = False
    started_at: str = ""
    updated_at: str = ""
    heartbeat: int = 0
    exit_code: int | None = None
    error: dict[str, str] | None = None
    lost_because: str = ""
    model: str = ""
    reused: dict[str, Any] = field(default_factory=dict)
    given_up: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for those who look."""
        return {**asdict(self), "heartbeat_age_seconds": self.age_seconds}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Status:
        """From plain data; what a newer dkrr wrote besides is left out."""
        return cls(**{item.name: document[item.name] for item in fields(cls) if item.name in document})

    @property
    def is_ended(self) -> bool:
        """Whether the driver has said that it is done, one way or the other."""
        return self.state in ENDED

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen by itself."""
        return self.is_ended or self.state == LOST

    @property
    def age_seconds(self) -> float | None:
        """Seconds since it was written, by the clocks of its writer and of this machine."""
        try:
            return (datetime.now(UTC) - datetime.fromisoformat(self.updated_at)).total_seconds()
        except ValueError:
            return None

    @property
    def phase_name(self) -> str:
        """The phase without what follows a comma, a fact of the moment such as a residual."""
        return self.phase.partition(", ")[0]


def current_driver(directory: RunDirectory) -> dict[str, Any] | None:
    """The process of the latest attempt, with its ``epoch``, ``counter`` and ``released``; None before the first."""
    found = directory.read(DRIVER)
    return None if found is None else {**owner_of(found), **found}


def driver_lease(directory: RunDirectory, kind: str) -> Lease:
    """The right to drive a run; ``kind`` is "fit", in the foreground, "here", a detached process, or "retrain"."""
    return Lease(directory.location, DRIVER, directory.location, kind=kind)


def read_status(directory: RunDirectory) -> Status:
    """The status of a run; "interrupted" before there is one."""
    return Status.from_dict(
        directory.read(NAME) or {"state": "interrupted", "exit_code": InterruptedRunError.exit_code}
    )


def write_status(directory: RunDirectory, status: Status) -> None:
    """Replace the status; ``updated_at`` becomes now."""
    status.updated_at = utc_now()
    directory.write(NAME, asdict(status))


class Meter:
    """Puts the progress of one phase after another into a status: tasks, rate, seconds so far and seconds left.

    Rate and time left count from the first reading of a phase, so that tiles finished before a resume make neither look
    better. ``work`` is the number of flops that all phases have done here.
    """

    def __init__(self, status: Status, clock: Callable[[], float] = time.monotonic) -> None:
        self.status, self.clock = status, clock
        self.began, self.done, self.flops, self.last_flops, self.work = clock(), 0, 0.0, 0.0, 0.0

    def begin(self, phase: str, done: int = 0, flops_done: float = 0.0) -> None:
        """A phase begins, with what is done already; the one before is over."""
        self.end()
        status = self.status
        self.began, self.done, self.flops, self.last_flops = self.clock(), done, flops_done, flops_done
        status.phase, status.tasks_done, status.tasks_total = phase, done, 0
        status.flops_per_second, status.phase_seconds, status.phase_seconds_left = 0.0, 0.0, None

    def read(self, phase: str, done: int, total: int, flops_done: float, flops_total: float) -> bool:
        """Take a reading, as the engine gives it; whether it is the first one of a phase."""
        status = self.status
        is_new = phase.partition(", ")[0] != status.phase_name or done < status.tasks_done
        if is_new:
            self.begin(phase, done, flops_done)
        seconds = self.clock() - self.began
        self.work += max(0.0, flops_done - self.last_flops)
        self.last_flops = flops_done
        status.phase, status.tasks_done, status.tasks_total, status.phase_seconds = phase, done, total, seconds
        flops, tasks = flops_done - self.flops, done - self.done
        status.flops_per_second = flops / seconds if seconds > 0 else 0.0
        work, left = (flops, flops_total - flops_done) if flops_total > 0 else (float(tasks), float(total - done))
        known = work > 0 and seconds > 0 and total > 0
        status.phase_seconds_left = left * seconds / work if known else None
        return is_new

    def end(self) -> None:
        """Book the phase that is over."""
        status, name = self.status, self.status.phase_name
        if not name:
            return
        seconds, last = self.clock() - self.began, status.phases.get(name, {})
        status.seconds[name] = round(status.seconds.get(name, 0.0) + seconds, 3)
        status.phases[name] = {
            "number": last.get("number", len(status.phases)),
            "seconds": round(seconds, 3),
            "tasks": status.tasks_done - self.done,
            "flops_per_second": round((self.last_flops - self.flops) / seconds) if seconds > 0 else 0,
            "times": 1 + int(last.get("times", 0)),
        }
        status.phase_seconds_left = None


class Watch:
    """Looks at a run again and again, and notices when its driver is gone.

    A driver on this machine is gone when its process is. Any other one is believed for as long as its counter moved
    within the last 60 s (``DKRR_STALE_SECONDS``) of this process' own clock.
    """

    def __init__(self, directory: RunDirectory, clock: Callable[[], float] = time.monotonic) -> None:
        self.directory, self.clock = directory, clock
        self.seen: Any = None
        self._since, self.patience = clock(), stale_seconds()

    def look(self) -> Status:
        """The run as it is now."""
        status = read_status(self.directory)
        reason = "" if status.is_ended else self._reason(status)
        return _lost(read_status(self.directory), reason) if reason else status

    def _reason(self, status: Status) -> str:
        """Why the driver is lost; empty while it is believed to be there."""
        driver, self.patience = current_driver(self.directory), stale_seconds()
        if driver is not None and not _is_awaited(status, driver):
            if is_gone(driver):
                return f"its driver, {described(driver)}, is gone"
            seen, is_alive = (driver["epoch"], driver.get("counter"), status.updated_at), False
        else:
            started = self.directory.read("placement.json") or {}
            if is_gone(started):
                return f"its driver, {described(started)}, ended before it began; see driver.log"
            self.patience = max(self.patience, START_SECONDS)
            seen, is_alive = (status.epoch, -1, status.updated_at), is_here(started) and not is_stopped(started)
        if seen != self.seen or is_alive:
            self.seen, self._since = seen, self.clock()
        quiet = self.clock() - self._since
        return f"no heartbeat for {quiet:.0f} s" if quiet > self.patience else ""


def look_once(directory: RunDirectory, *, beat_seconds: float | None = None) -> Status:
    """The run as it is now, in milliseconds; seconds when its heartbeat looks stale, for a second look then decides.

    The age of a heartbeat is a difference between two machines' clocks, so it is not believed: where it exceeds the
    limit, or is negative, the counter is watched for two and a half heartbeats (``beat_seconds`` each; by default as a
    driver beats, less often on an object store).
    """
    if beat_seconds is None:
        beat_seconds = BEAT_SECONDS if directory.folder is not None else BEAT_SECONDS_REMOTE
    looks = Watch(directory)
    status = looks.look()
    age, seen = status.age_seconds, looks.seen
    if status.is_over or age is None or -5 <= age <= stale_seconds():
        return status
    driver = current_driver(directory)
    watch(lambda: current_driver(directory), driver, min(2.5 * beat_seconds, stale_seconds()))
    now = looks.look()
    # where a clock is ahead, nothing speaks for more
    is_there = now.is_over or looks.seen != seen or age <= looks.patience
    return now if is_there else _lost(now, f"no heartbeat for {age:.0f} s")


def _lost(status: Status, reason: str) -> Status:
    """A run whose driver is gone, unless it has ended between two looks."""
    is_ended, code = status.is_ended, InterruptedRunError.exit_code
    return status if is_ended else replace(status, state=LOST, lost_because=reason, exit_code=code)


def _is_awaited(status: Status, driver: dict[str, Any]) -> bool:
    """Whether a driver was started that has not taken the lease yet, from ``driver`` or after it."""
    by_submitter = status.state == "starting" and status.driver is None
    return bool(driver.get("released")) or (by_submitter and int(driver["epoch"]) <= status.epoch)
