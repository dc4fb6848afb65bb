"""A run is a directory: what is in it.

    job.toml      the job file as it was given, byte for byte
    job.json      the same job, checked, its paths absolute
    plan.json     what the first attempt resolved: tile size, precision, solver; every later attempt uses it
    status.json   how far the run is (:class:`Status`), replaced every few seconds
    driver.json   who drives it, and the number of this attempt (:mod:`dkrr.store.lease`)
    cancel.json   a request to stop
    placement.json  the process that ``submit`` started as the driver
    events/       what happened: JSON lines in numbered segments, 000000.jsonl and so on
    driver.log    what a detached driver printed
    result.json   the figures of the finished run
    samples.json  memory and rate over time, of each attempt (:mod:`dkrr.jobs.driver`)
    figures.json  figures for the report alone: data, machine, residuals, held-out rows (:mod:`dkrr.jobs.run`)
    report.html   the page of the run (:mod:`dkrr.jobs.page`), made at its end, in whatever way it ended
    leave_one_out.zarr  the error of every row by a fit without it, where the job asked for it
    model.zarr    the model; path-NUMBER.zarr those of a list of C, of which it is one
    loss-KEY.npy  coefficients of a fit with another loss than the square, while it goes on (:mod:`dkrr.jobs.loss_fit`)

Every document appears whole or not at all. A segment of events is written once and never appended to, for object
stores cannot append; numbers have no gaps, so a reader goes by exact names. An event is an object with ``time`` (UTC,
ISO 8601), ``epoch`` (of the driver), ``kind`` (state, phase, cluster, warning, error, request) and ``message``.

Nothing here imports more than the standard library, so that looking at a run costs milliseconds, on a machine that has
neither the scheduler nor the data.

One process at a time drives a run: the one that ``driver.json`` names, a lease (:mod:`dkrr.store.lease`) whose epoch is
the number of the attempt. Whoever was replaced finds out before it writes.

    starting -> running -> finished | failed | interrupted
                running -> cancelling -> cancelled

A reader adds one state that no driver can write: "lost", when the driver ended without saying so. What ended, in any
way but finished, can be resumed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dkrr.errors import InterruptedRunError, StoreError, did_you_mean
from dkrr.store.documents import create_bytes
from dkrr.store.files import (
    children,
    delete_key,
    is_below,
    is_url,
    join,
    json_bytes,
    key_size,
    list_keys,
    local_root,
    name_of,
    parent_of,
    parse_json,
    place,
    read_json,
    read_key,
    remove_array,
    write_json,
    write_key,
)
from dkrr.store.lease import described, is_gone, is_here, is_stopped, owner_of, stale_seconds, watch
from dkrr.store.objects import parse_address

RUNS_VARIABLE = "DKRR_RUNS"
# of leave_one_out.zarr
LEFT_OUT = ("residuals", "inverse_diagonal")
MAX_EVENTS = 1000
# by which a run is known: files of these names may be somebody else's
_DOCUMENTS: dict[str, dict[str, set[str]]] = {
    "status.json": {"run": {"state", "epoch", "heartbeat"}},
    "driver.json": {"run": {"epoch", "counter", "token"}},
    "job.json": {"retrain": {"retrain", "holdout", "data"}, "fit": {"data", "model", "solver", "output"}},
}
_PROBE = r"\.dkrr-probe-[0-9a-f]{32}(?:\.partial)?"
_BEGUN = rf"(?:driver|status|job|\d{{6}})\.json(?:\.[0-9a-f]{{32}}\.partial|\.lock)?|{_PROBE}"
# what a driver writes before there is a plan
_UNPLANNED = (
    r"(?:(?:driver|status|job|cancel|samples|drivers/\d{6})\.json|job\.toml|events/\d{6}\.jsonl)"
    rf"(?:\.[0-9a-f]{{32}}\.partial)?|{_PROBE}"
)
_ARRAYS = r"(?:model|path-\d{3,}|leave_one_out)\.zarr"
_WRITTEN = (
    r"(?:(?:placement|plan|result|figures)\.json|driver\.log|report\.html|loss-[0-9a-f]{16}\.npy)"
    rf"(?:\.[0-9a-f]{{32}}\.partial)?|(?:[a-z]+\.json|{_ARRAYS})\.lock|{_UNPLANNED}"
)


class RunDirectory:
    """Paths and documents of one run.

    Parameters
    ----------
    location
        Path or URL of the directory; it need not exist.
    """

    def __init__(self, location: str | os.PathLike[str]) -> None:
        text = os.fspath(location)
        self.location = str(parse_address(text)) if is_url(text) else os.path.abspath(text)

    def __repr__(self) -> str:
        return f"RunDirectory({self.location!r})"

    @property
    def name(self) -> str:
        """The last part of the location."""
        return name_of(self.location)

    @property
    def found_by(self) -> str:
        """By what :func:`find_run` finds this run from here: its name below the runs folder, else the location."""
        folder = runs_folder()
        same = parent_of(self.location) == (folder if is_url(folder) else os.path.abspath(folder))
        return self.name if same and not os.path.exists(self.name) else self.location

    @property
    def shown(self) -> str:
        """What a person types in a shell to mean this run: a location may have blanks, an address a question mark."""
        return shlex.quote(self.found_by)

    @property
    def goes_on_by(self) -> str:
        """The command that continues what has ended, in backquotes."""
        is_retrain = run_kind(self.location) == "retrain"
        return "`dkrr retrain` with its job" if is_retrain else f"`dkrr resume {self.shown}`"

    @property
    def folder(self) -> Path | None:
        """The directory on a local file system; None for a URL."""
        return local_root(self.location)

    def path(self, name: str) -> str:
        """Path or URL of something in the run; local parent folders are made."""
        return place(self.location, name)

    def exists(self) -> bool:
        """Whether something of a run is there, damaged or not; documents of somebody else of these names are none."""
        try:
            return run_kind(self.location) not in (None, "other")
        except StoreError:  # whoever reads it says what is damaged
            return True

    def read(self, name: str) -> dict[str, Any] | None:
        """A JSON document of the run, e.g. "plan.json"; None when there is none.

        In a run that was moved since it was written, paths are those that things have now.

        Raises
        ------
        StoreError
            It cannot be read.
        """
        found = read_json(self.location, name)
        if found is None or (isinstance(found, dict) and is_url(self.location)):
            return found
        if not isinstance(found, dict):
            raise StoreError(f"{name} of {self.location} is not an object", hint="restore or remove it")
        return _at_present(found, self.location, lambda: self._relative(found) if name == "job.json" else set())

    def _relative(self, job: dict[str, Any]) -> set[str]:
        """Paths of a job that its file names relative to itself."""
        written: dict[str, Any] = {}
        with contextlib.suppress(ValueError):  # no TOML any more
            written = tomllib.loads((self.read_bytes("job.toml") or b"").decode())
        return {
            found
            for table, values in written.items()
            if isinstance(values, dict)
            for key, value in values.items()
            if isinstance(value, str) and not os.path.isabs(os.path.expanduser(value))
            if isinstance(found := job.get(table, {}).get(key), str)
        }

    def write(self, name: str, document: dict[str, Any]) -> None:
        """Replace a JSON document of the run."""
        write_json(self.location, name, document)

    def remove(self, name: str) -> None:
        """Remove a document; a missing one is no error."""
        delete_key(self.location, name)

    def read_bytes(self, name: str) -> bytes | None:
        """The bytes of something in the run; None when it does not exist."""
        return read_key(self.location, name)

    def write_bytes(self, name: str, data: bytes) -> None:
        """Replace the bytes of something in the run."""
        write_key(self.location, name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Write something that must not exist yet; False, and nothing changed, when it does."""
        return create_bytes(self.location, name, data) is not None

    def has(self, name: str) -> bool:
        """Whether something is there under this exact name."""
        return key_size(self.location, name) is not None

    def remove_all(self) -> None:
        """Remove the whole run; what others put into its directory stays."""
        for name in children(self.location):
            if re.fullmatch(_ARRAYS, name):
                remove_array(self.path(name))
        self._remove(_WRITTEN)

    def remove_begun(self) -> None:
        """Remove a run that came to nothing before it had a plan; what others put into its directory stays."""
        self._remove(_UNPLANNED)

    def _remove(self, what: str) -> None:
        for key in sorted(list_keys(self.location), key=lambda key: key == DRIVER):  # whoever has it may remove things
            if re.fullmatch(what, key):
                self.remove(key)
        for name in ("events", "drivers", "") if self.folder else ():
            with contextlib.suppress(OSError):
                os.rmdir(join(self.location, name))


def run_kind(location: str) -> str | None:
    """What the documents in a directory make it.

    "fit" or "retrain" by its job, "run" before that is written, "other" where one is somebody else's, None without any.
    """
    kinds = {}
    for name, forms in _DOCUMENTS.items():
        document = read_json(location, name)
        if document is not None:
            keys = document.keys() if isinstance(document, dict) else set()
            kinds[name] = next((kind for kind, form in forms.items() if keys >= form), "other")
    return "other" if "other" in kinds.values() else kinds.get("job.json", kinds.get("status.json"))


def may_hold(location: str, kind: str) -> bool:
    """Whether a directory may become, or go on to be, that of a run of a kind: "fit" or "retrain"."""
    found = run_kind(location)
    if found is not None:
        return found in (kind, "run")
    # nothing is there, or what is left of a driver that was killed, or had no room, right after it took the first
    # epoch
    names = [name for name in children(location) if name != "drivers"] + children(join(location, "drivers"))
    return all(re.fullmatch(_BEGUN, name) for name in names)


def _at_present(document: dict[str, Any], here: str, relative: Callable[[], set[str]]) -> dict[str, Any]:
    """A document that names the run it belongs to, with present paths: those of the run, and what moved along with it.

    Something outside the run moved along where it is beside the run as it was before, and is at its old path no longer
    or was copied with a job file that named it by a ``relative`` path.
    A store that did not move along stays the store of the run.
    """
    output, model = document.get("output"), document.get("model")
    home = document.get("run_directory") or (output or {}).get("directory")
    if not home and isinstance(model, str) and model:  # in a retrain job it is a table
        home = parent_of(model)
    home = str(home or "")
    if not os.path.isabs(home) or re.fullmatch(re.escape(home).replace(r"\{id\}", "[^/]*"), here):
        return document
    home = home.replace("{id}", name_of(here))
    old, new, copied = Path(home), Path(here), relative()
    while old.name == new.name and old.name:
        old, new = old.parent, new.parent

    def present(value: Any) -> Any:
        if isinstance(value, dict):
            return {present(key): present(item) for key, item in value.items()}
        if isinstance(value, list):
            return [present(item) for item in value]
        if not isinstance(value, str) or not os.path.isabs(value):
            return value
        if is_below(value, home):
            return here + value[len(home) :]
        moved = str(new / Path(value).relative_to(old)) if Path(value).is_relative_to(old) else value
        return moved if os.path.exists(moved) and (value in copied or not os.path.exists(value)) else value

    found: dict[str, Any] = present(document)
    if output:
        found["output"]["directory"] = here
        store = join(parent_of(home), "store")
        if "store" not in output and os.path.isdir(store) and not os.path.isdir(join(parent_of(here), "store")):
            found["output"]["store"] = store
    return found


def runs_folder() -> str:
    """Where runs are looked for by name: ``DKRR_RUNS``, a path or a URL, else ./runs."""
    return os.environ.get(RUNS_VARIABLE) or "runs"


def find_run(text: str) -> RunDirectory:
    """The run that a person means: a path, a URL, or a name below the runs folder.

    Raises
    ------
    StoreError
        There is no such run; names the nearest one.
    """
    is_name = not is_url(text) and os.sep not in text
    candidates = [RunDirectory(text), *([RunDirectory(join(runs_folder(), text))] if is_name else [])]
    for candidate in candidates:
        if candidate.exists():
            return candidate
    hint = f"`dkrr list` shows what there is; {RUNS_VARIABLE} names the folder"
    raise StoreError(
        f"no run {candidates[0].name!r} in {parent_of(candidates[-1].location)}",
        hint=did_you_mean(text, [run.name for run in list_runs()] if is_name else [], hint),
    )


def list_runs(folder: str | None = None) -> list[RunDirectory]:
    """The runs right below a folder (the runs folder by default), by name; none when there is no such folder."""
    base = runs_folder() if folder is None else folder
    return [run for name in children(base) if (run := RunDirectory(join(base, name))).exists()]


def utc_now() -> str:
    """Date and time in UTC, to the millisecond, as text."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _segment(number: int) -> str:
    return f"events/{number:06d}.jsonl"


class EventLog:
    """Collects events of one driver; :meth:`flush` makes a segment of them. Any thread may add.

    At most 1,000 are kept between two flushes: a driver that warns in a loop must not fill memory or disk.
    """

    def __init__(self, directory: RunDirectory, epoch: int) -> None:
        self.directory, self.epoch = directory, epoch
        self._waiting: list[dict[str, Any]] = []

    def add(self, kind: str, message: str, **facts: Any) -> None:
        """Remember an event."""
        if len(self._waiting) == MAX_EVENTS:
            kind, message, facts = "warning", "more events were dropped", {}
        if len(self._waiting) <= MAX_EVENTS:
            self._waiting.append({"time": utc_now(), "epoch": self.epoch, "kind": kind, "message": message, **facts})

    def flush(self) -> None:
        """Write what was added since the last time as a new segment; nothing when nothing was.

        Raises
        ------
        OSError, StoreError
            It cannot be written; the events are kept for the next time.
        """
        events = list(self._waiting)
        if not events:
            return
        data = b"".join(json_bytes(event, indent=None) + b"\n" for event in events)
        folder = join(self.directory.location, "events")
        number = sum(re.fullmatch(r"[0-9]{6,}\.jsonl", name) is not None for name in children(folder))
        while not self.directory.create(_segment(number), data):  # another driver counts at the same time
            number += 1
        del self._waiting[: len(events)]


def read_events(directory: RunDirectory, start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every event from segment ``start`` on, with the number of its segment, up to what is there now."""
    number = start
    while (data := directory.read_bytes(_segment(number))) is not None:
        for line in data.splitlines():
            try:
                event = parse_json(line, directory.location, _segment(number))
            except StoreError:
                event = {"time": "", "kind": "warning", "message": f"unreadable line in {_segment(number)}"}
            yield number, event
        number += 1


def follow_events(directory: RunDirectory) -> Iterator[tuple[list[dict[str, Any]], list[str]]]:
    """Again and again: events that were not there the last time, and whole lines that the driver printed since."""
    segment = offset = 0
    while True:
        found = list(read_events(directory, segment))
        data = (directory.read_bytes("driver.log") or b"")[offset:]
        whole = data[: data.rfind(b"\n") + 1]
        segment, offset = found[-1][0] + 1 if found else segment, offset + len(whole)
        yield [event for _, event in found], whole.decode(errors="replace").splitlines()


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
