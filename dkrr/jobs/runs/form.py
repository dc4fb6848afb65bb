"""A run in a few facts, as it was last written: for its HTML form in notebooks."""

from __future__ import annotations

from collections.abc import Iterator

from dkrr.jobs.documents import exactness
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.status import look_once

__all__ = ["run_facts"]


def run_facts(directory: RunDirectory) -> Iterator[tuple[str, str]]:
    """State, progress, figures of the result, and where everything is; reads four small documents."""
    yield "where", directory.location
    if not directory.exists():
        yield "state", "there is no such run"
        return
    view = look_once(directory, beat_seconds=0.0)
    status, plan, result = view.status, directory.read("plan.json"), directory.read("result.json")
    yield "state", view.state + (f": {view.reason}" if view.reason else "")
    if status.error is not None:
        yield "error", str(status.error.get("message", ""))
    if status.phase and not status.is_ended:
        count = f", {status.tasks_done:,} of {status.tasks_total:,} tasks" if status.tasks_total else ""
        yield "phase", status.phase + count
    if plan:
        yield "rows", f"{plan.get('num_rows', 0):,} of {plan.get('num_features', 0):,} features"
        yield "solver", f"{plan.get('solver')}, {plan.get('precision')}"
    if result and view.state == "finished":
        if exact := exactness(result):
            yield exact[0], f"{exact[1]:.1e}"
        value = (result.get("score") or {}).get(result.get("metric") or "")
        value = sum(value) / len(value) if isinstance(value, list) and value else value
        if isinstance(value, float):
            yield f"held-out {result['metric']}", f"{value:.5g}"
    yield "time", f"{status.elapsed_seconds:.1f} s in attempt {status.epoch}"
    if directory.has("report.html"):
        yield "report", directory.path("report.html")
