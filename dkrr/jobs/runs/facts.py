"""Runs as people see them: found by their names, and said in facts, once for terminals, notebooks and the page.

You need it to show a run: what is said of one stands here, who shows it only lays it out. Costs the reading of two
small documents, and nothing of NumPy or Dask.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from dkrr.errors import StoreError
from dkrr.jobs.report.axes import number
from dkrr.jobs.report.words import listed, seconds, size
from dkrr.jobs.runs.directory import RUNS_VARIABLE, RunDirectory, runs_folder
from dkrr.jobs.runs.lease import described
from dkrr.jobs.runs.status import Status, View, look_once
from dkrr.markup import facts_html
from dkrr.store.files import children, is_url, join, parent_of

__all__ = [
    "Run",
    "clock_text",
    "find_run",
    "list_runs",
    "live_facts",
    "phase_words",
    "progress_words",
    "result_facts",
    "run_facts",
    "sentence",
]

# phases that count iterations; what follows a comma in a phase's name is a fact of the moment, e.g. a residual
ITERATIVE = ("cg", "refine", "nystrom")


class Run(RunDirectory):
    """A run that notebooks show."""

    def _repr_html_(self) -> str:
        """How the run stands, without waiting for anybody."""
        facts: Iterator[tuple[str, str]] = iter([("state", "there is no such run")])
        if self.exists():
            facts = run_facts(self, look_once(self, beat_seconds=0.0))
        return facts_html(f"run {self.name}", [("where", self.location), *facts])


def find_run(text: str) -> Run:
    """The run that a person means: a path, a URL, or a name below the runs folder.

    Raises
    ------
    StoreError
        There is no such run; names the nearest one.
    """
    candidates = [Run(text)]
    if not is_url(text) and os.sep not in text:
        candidates.append(Run(join(runs_folder(), text)))
    for candidate in candidates:
        if candidate.exists():
            return candidate
    where = parent_of(candidates[-1].location)
    names = [run.name for run in list_runs()] if len(candidates) > 1 else []
    near = difflib.get_close_matches(text, names, n=1)
    hint = (
        f"did you mean {near[0]!r}?" if near else f"`dkrr list` shows what there is; {RUNS_VARIABLE} names the folder"
    )
    raise StoreError(f"no run {candidates[0].name!r} in {where}", hint=hint)


def list_runs(folder: str | None = None) -> list[Run]:
    """The runs right below a folder (the runs folder by default), by name; none when there is no such folder."""
    base = runs_folder() if folder is None else folder
    runs = (Run(join(base, name)) for name in children(base))
    return [run for run in runs if run.exists()]


def run_facts(directory: RunDirectory, view: View) -> Iterator[tuple[str, str]]:
    """Everything that is known about a run, as names and values; reads two small documents."""
    result = _document(directory, "result.json") if view.state == "finished" else {}
    facts = live_facts(view)
    yield next(facts)
    yield from result_facts(result.get("plan") or _document(directory, "plan.json"), result)
    yield from facts
    if view.status.model or result.get("model_path"):
        yield "model", view.status.model or result["model_path"]
    if directory.has("report.html"):
        yield "report", directory.path("report.html")


def live_facts(view: View) -> Iterator[tuple[str, str]]:
    """What the status of a run says: state, progress, who works on it where, and what went wrong."""
    status = view.status
    yield "state", view.state + (f" ({view.reason})" if view.reason else "")
    if status.phase and not status.is_ended:
        yield "phase", progress_words(status)
    if status.seconds:
        yield "seconds", ", ".join(f"{name} {value:.1f}" for name, value in status.seconds.items())
    if factor := status.reused.get("factor"):
        yield "reused", f"{factor['rows']:,} of {factor['of_rows']:,} rows of the factor"
    for item in status.given_up:
        yield "went on", item.get("sentence", "")
    if status.driver is not None:
        yield "driver", f"{described(status.driver)}, attempt {status.epoch}"
    if status.scheduler:
        yield "scheduler", status.scheduler + (" (insecure = true)" if status.insecure else "")
    if status.dashboard:
        yield "dashboard", status.dashboard
    if status.num_workers:
        yield "workers", f"{status.num_workers:,}, {status.num_threads:,} threads"
    if status.memory_bytes:
        yield "memory", f"{size(status.memory_bytes)}, largest worker"
    for worker in status.refused_workers:
        yield "refused worker", f"{worker.get('address')}: {worker.get('reason')}"
    if status.started_at:
        yield "started", f"{status.started_at}, {clock_text(status.elapsed_seconds)} of work"
    if not status.is_ended and view.age_seconds is not None:
        yield "heartbeat", f"{view.age_seconds:.0f} s ago"
    if status.error is not None:
        yield "error", status.error.get("message", "")


def _document(directory: RunDirectory, name: str) -> dict[str, Any]:
    """A document of a run; what cannot be read is not there."""
    try:
        return directory.read(name) or {}
    except StoreError:
        return {}


def result_facts(plan: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What was fitted, how exact the answer is and how good, as far as a plan and a ``result.json`` say it."""
    took = result if result.get("solver") else plan
    if plan.get("num_rows"):
        yield "rows", f"{number(plan['num_rows'])} of {number(plan.get('num_features'))} features"
    if took.get("solver"):
        yield "solver", f"{took['solver']}, {took.get('precision')}"
    metric = str(result.get("metric") or "")
    value = (result.get("score") or {}).get(metric)
    if value is not None:
        yield f"held-out {metric}", f"{value:.2%}" if metric.endswith("accuracy") else listed(value, ".5g", 2)
    gaps = [certificate.get("gap") for certificate in result.get("certificates") or []]
    exact = [value for value in gaps or result.get("relative_residual") or [] if value is not None]
    if exact:  # of the least exact target
        yield "duality gap" if gaps else "relative residual", f"{max(exact):.1e}"
    if result.get("num_support") is not None:
        yield "support vectors", number(result["num_support"])
    if total := (result.get("seconds") or {}).get("total"):
        yield "time", seconds(total)


def sentence(view: View) -> str:
    """``running, factorise: 120 of 210 tasks, 163.2 GF/s, 0:41 left``."""
    status = view.status
    if view.state == "lost":
        return f"lost: {view.reason}"
    if status.is_ended:
        return view.state + ("" if status.error is None else f": {status.error.get('message', '')}")
    return f"{view.state}, {progress_words(status)}" if status.phase else view.state


def progress_words(status: Status) -> str:
    """``factorise: 120 of 210 tasks, 163.2 GF/s, 0:41 left``; ``cg: iteration 12 of about 40, 1:30 left``."""
    name, _, moment = status.phase.partition(", ")
    parts = [name]
    if name in ITERATIVE:
        about = f" of about {status.tasks_total:,}" if status.tasks_total else ""
        parts = [f"{name}: iteration {status.tasks_done:,}{about}"]
    elif status.tasks_total:
        parts = [f"{name}: {status.tasks_done:,} of {status.tasks_total:,} {_unit(name)}"]
    if moment:
        parts.append(moment)
    if status.flops_per_second > 0 and name not in ITERATIVE:
        parts.append(f"{status.flops_per_second / 1e9:.1f} GF/s")
    if status.phase_seconds_left is not None:
        parts.append(f"{clock_text(status.phase_seconds_left)} left")
    return ", ".join(parts)


def phase_words(name: str, phase: Mapping[str, Any]) -> str:
    """Of a phase that is over: ``factorise: 210 tasks in 12.3 s, 163.2 GF/s``; ``prepare: 0.8 s``."""
    took, count = float(phase.get("seconds", 0.0)), int(phase.get("tasks", 0))
    spent = f"{took:.1f} s" if took < 120 else clock_text(took)
    unit = _unit(name) if count != 1 else _unit(name).removesuffix("s")
    text = f"{name}: {count:,} {unit} in {spent}" if count else f"{name}: {spent}"
    rate = float(phase.get("flops_per_second", 0.0))
    return f"{text}, {rate / 1e9:.1f} GF/s" if count and rate >= 5e7 and name not in ITERATIVE else text


def _unit(name: str) -> str:
    if name in ITERATIVE:
        return "iterations"
    return "tiles" if name == "gram" else "trials" if name.startswith("tune ") else "tasks"


def clock_text(duration: float) -> str:
    """``1:02:03``, or ``2:03`` below an hour."""
    minutes, rest = divmod(round(duration), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
