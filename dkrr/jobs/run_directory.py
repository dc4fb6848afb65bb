"""A run is a directory: what is in it.

    job.toml      the job file as it was given, byte for byte
    job.json      the same job, checked, its paths absolute
    plan.json     what the first attempt resolved: tile size, precision, solver; every later attempt uses it
    status.json   how far the run is (:mod:`dkrr.jobs.status`), replaced every few seconds
    driver.json   who drives it, and the number of this attempt (:mod:`dkrr.store.lease`)
    cancel.json   a request to stop
    placement.json  the process that ``submit`` started as the driver
    events/       what happened: JSON lines in numbered segments, 000000.jsonl and so on
    driver.log    what a detached driver printed
    result.json   the figures of the finished run
    figures.json  figures for the report alone: data, machine, residuals, held-out rows (:mod:`dkrr.jobs.run`)
    samples.json  memory and rate over time, of each attempt (:mod:`dkrr.jobs.monitor`)
    report.html   the page of the run (:mod:`dkrr.jobs.page`), made at its end, in whatever way it ended
    model.zarr    the model; path-NUMBER.zarr those of a list of C, of which it is one
    loss-KEY.npy  coefficients of a fit with another loss than the square, while it goes on (:mod:`dkrr.jobs.loss_fit`)

Every document appears whole or not at all. A segment of events is written once and never appended to, for object
stores cannot append; numbers have no gaps, so a reader goes by exact names. An event is an object with ``time`` (UTC,
ISO 8601), ``epoch`` (of the driver), ``kind`` (state, phase, cluster, warning, error, request) and ``message``.

Nothing here imports more than the standard library, so that looking at a run costs milliseconds, on a machine that has
neither the scheduler nor the data.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dkrr.errors import StoreError
from dkrr.store.documents import create_bytes
from dkrr.store.files import (
    children,
    delete_key,
    is_below,
    is_url,
    join,
    key_size,
    local_root,
    name_of,
    parent_of,
    place,
    read_json,
    read_key,
    remove_array,
    write_json,
    write_key,
)
from dkrr.store.objects import parse_address

RUNS_VARIABLE = "DKRR_RUNS"
MAX_EVENTS = 1000
# by which a run is known: files of these names may be somebody else's
_DOCUMENTS: dict[str, dict[str, set[str]]] = {
    "status.json": {"run": {"state", "epoch", "heartbeat"}},
    "driver.json": {"run": {"epoch", "counter", "token"}},
    "job.json": {"fit": {"data", "model", "solver", "output"}, "retrain": {"retrain", "holdout", "job"}},
}
_BEGUN = r"(?:driver|status|job|\d{6})\.json(?:\.[0-9a-f]{32}\.partial)?|\.dkrr-probe-[0-9a-f]{32}(?:\.partial)?"


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
    def shown(self) -> str:
        """What a person types to mean this run from here: its name below the runs folder, else the whole location."""
        folder = runs_folder()
        same = parent_of(self.location) == (folder if is_url(folder) else os.path.abspath(folder))
        # quoted, for an address may have a question mark in it
        return self.name if same and not os.path.exists(self.name) else shlex.quote(self.location)

    @property
    def folder(self) -> Path | None:
        """The directory on a local file system; None for a URL."""
        return local_root(self.location)

    def path(self, name: str) -> str:
        """Path or URL of something in the run; local parent folders are made."""
        return place(self.location, name)

    def exists(self) -> bool:
        """Whether something of a run is there."""
        return self.has("status.json") or self.has("job.json")

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
        """Remove the whole run."""
        remove_array(self.location)


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
    # epoch; nothing else may be there, for a run that comes to nothing then is removed with its directory
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
    home = home or parent_of(model if isinstance(model, str) else ".")  # in a retrain job "model" is a table
    home = str(home).replace("{id}", name_of(here))
    if home == here or not os.path.isabs(home):
        return document
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
    near = difflib.get_close_matches(text, [run.name for run in list_runs()] if is_name else [], n=1)
    hint = f"`dkrr list` shows what there is; {RUNS_VARIABLE} names the folder"
    raise StoreError(
        f"no run {candidates[0].name!r} in {parent_of(candidates[-1].location)}",
        hint=f"did you mean {near[0]!r}?" if near else hint,
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
        data = "".join(f"{json.dumps(event, sort_keys=True)}\n" for event in events).encode()
        folder = join(self.directory.location, "events")
        number = sum(name.endswith(".jsonl") for name in children(folder))
        while not self.directory.create(_segment(number), data):  # another driver counts at the same time
            number += 1
        del self._waiting[: len(events)]


def read_events(directory: RunDirectory, start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every event from segment ``start`` on, with the number of its segment, up to what is there now."""
    number = start
    while (data := directory.read_bytes(_segment(number))) is not None:
        for line in data.decode(errors="replace").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
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
