"""Everything that a run's directory says about it, read once, of any state and of any version.

Documents may be missing, may be from an older dkrr, may be damaged: what cannot be read is not there, and the section
that needed it says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from dkrr.errors import DkrrError
from dkrr.jobs.report.scrub import scrub
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.events import read_events
from dkrr.jobs.runs.samples import read_attempts
from dkrr.jobs.runs.status import Status, View

__all__ = ["Findings", "gather"]

MOST_EVENTS = 300
MOST_JOB_BYTES = 60_000


@dataclass
class Findings:
    """What is known about a run.

    ``result`` is empty unless the last attempt finished: what an earlier one found is not what this page is about.
    """

    name: str
    location: str
    shown: str
    state: str
    reason: str
    status: Status
    job: dict[str, Any] = field(default_factory=dict)
    job_text: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    num_events: int = 0
    has_earlier_result: bool = False
    has_model: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether the run came to its end."""
        return self.state == "finished"

    def before(self, event: str) -> str:
        """Why something is not there that comes when "it was solved", say."""
        if self.state in ("starting", "running", "cancelling"):
            return f"the run is {self.state}"
        if self.is_finished:
            return "this run did not record it"
        return f"the run {'' if self.state == 'failed' else 'was '}{self.state} before {event}"

    def part(self, *names: str) -> Any:
        """Something of ``figures.json``, e.g. ``part("data", "num_rows")``; None where it is not."""
        found: Any = self.figures
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    @property
    def attempt(self) -> dict[str, Any]:
        """The samples of the last attempt; empty where there are none."""
        return self.attempts[-1] if self.attempts and self.attempts[-1].get("epoch") == self.status.epoch else {}


def gather(directory: RunDirectory, view: View) -> Findings:
    """Read the documents of a run whose state is known."""
    found = _read(directory, "result.json")
    finished = view.state == "finished"
    events: list[dict[str, Any]] = []
    num_events = 0
    try:
        for _, event in read_events(directory):
            if isinstance(event, dict):
                num_events += 1
                events.append(event)
                if len(events) > 2 * MOST_EVENTS:  # the first and the last ones say most
                    del events[MOST_EVENTS : len(events) - MOST_EVENTS]
    except (OSError, DkrrError):
        pass
    try:
        attempts = read_attempts(directory)
    except (OSError, DkrrError, ValueError):
        attempts = []
    return Findings(
        name=scrub(directory.name),
        location=scrub(directory.location),
        shown=scrub(directory.shown),
        state=view.state,
        reason=scrub(view.reason),
        status=Status.from_dict(scrub(view.status.to_dict())),
        job=_read(directory, "job.json"),
        job_text=_job_text(directory),
        plan=_read(directory, "plan.json") or (found.get("plan") or {} if finished else {}),
        result=found if finished else {},
        figures=_read(directory, "figures.json"),
        attempts=scrub(attempts),
        events=scrub(events),
        num_events=num_events,
        has_earlier_result=bool(found) and not finished,
        has_model=_has_model(directory),
    )


def _read(directory: RunDirectory, name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = scrub(directory.read(name) or {})
    except (OSError, DkrrError, ValueError):
        return {}
    return found


def _has_model(directory: RunDirectory) -> bool:
    try:
        return directory.has("model.zarr/zarr.json")
    except (OSError, DkrrError):
        return False


def _job_text(directory: RunDirectory) -> str:
    try:
        data = directory.read_bytes("job.toml")
    except (OSError, DkrrError):
        return ""
    if data is None:
        document = _read(directory, "job.json")
        return json.dumps(document, indent=1, sort_keys=True) if document else ""
    text = data[:MOST_JOB_BYTES].decode(errors="replace")
    left = len(data) - MOST_JOB_BYTES
    found: str = scrub(text + (f"\n… {left:,} bytes more in job.toml" if left > 0 else ""))
    return found
