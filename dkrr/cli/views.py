"""How a run is shown: one line, a table of facts, its end, its result, its events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from dkrr.address import join
from dkrr.cli.estimate import clock_text
from dkrr.cli.output import print_facts, print_json
from dkrr.jobs.documents import exactness

if TYPE_CHECKING:
    from dkrr.jobs.runs.directory import RunDirectory
    from dkrr.jobs.runs.status import View

__all__ = ["event_line", "print_end", "print_result", "print_view", "sentence"]


def sentence(view: View) -> str:
    """``running, factorise: 120 of 210, 163.2 GF/s, 0:41 left``."""
    status = view.status
    if view.state == "lost":
        return f"lost: {view.reason}"
    if status.is_ended:
        message = "" if status.error is None else f": {status.error.get('message', '')}"
        return f"{view.state}{message}"
    parts = [view.state, _progress(view)] if status.phase else [view.state]
    return ", ".join(parts)


def _progress(view: View) -> str:
    status = view.status
    count = f": {status.tasks_done:,} of {status.tasks_total:,} tasks" if status.tasks_total else ""
    parts = [f"{status.phase}{count}"]
    if status.flops_per_second > 0:
        parts.append(f"{status.flops_per_second / 1e9:.1f} GF/s")
    if status.phase_seconds_left is not None:
        parts.append(f"{clock_text(status.phase_seconds_left)} left")
    return ", ".join(parts)


def print_view(directory: RunDirectory, view: View, as_json: bool) -> None:
    """Print everything that is known about a run, and how to go on with it."""
    if as_json:
        print_json({"run": directory.shown, "location": directory.location, **view.to_dict()})
        return
    print_facts(_facts(view), title=f"{directory.shown}  {directory.location}")
    if view.is_over and view.state != "finished":
        _print_hints(directory, view)


def _facts(view: View) -> Iterator[tuple[str, Any]]:
    status = view.status
    yield "state", view.state + (f" ({view.reason})" if view.reason else "")
    if status.phase and not status.is_ended:
        yield "phase", _progress(view)
    if status.seconds:
        yield "seconds", ", ".join(f"{name} {value:.1f}" for name, value in status.seconds.items())
    factor = status.reused.get("factor")
    if factor:
        yield "reused", f"{factor['rows']:,} of {factor['of_rows']:,} rows of the factor"
    for item in status.given_up:
        yield "went on", item.get("sentence", "")
    if status.driver is not None:
        driver = status.driver
        yield "driver", f"process {driver.get('pid')} on {driver.get('host')}, attempt {status.epoch}"
    if status.scheduler:
        yield "scheduler", status.scheduler + (" (insecure = true)" if status.insecure else "")
    if status.dashboard:
        yield "dashboard", status.dashboard
    if status.num_workers:
        yield "workers", f"{status.num_workers}, {status.num_threads} threads"
    for worker in status.refused_workers:
        yield "refused worker", f"{worker.get('address')}: {worker.get('reason')}"
    if status.started_at:
        yield "started", f"{status.started_at}, {clock_text(status.elapsed_seconds)} of work"
    if not status.is_ended and view.age_seconds is not None:
        yield "heartbeat", f"{view.age_seconds:.0f} s ago"
    if status.error is not None:
        yield "error", status.error.get("message", "")
    if status.model:
        yield "model", status.model


def print_end(directory: RunDirectory, view: View) -> None:
    """Say on stderr how a run ended that is not finished."""
    click.echo(f"{directory.shown}: {sentence(view)}", err=True)
    _print_hints(directory, view)


def _print_hints(directory: RunDirectory, view: View) -> None:
    if view.status.error is not None and view.status.error.get("hint") and view.state != "lost":
        click.echo(f"hint: {view.status.error['hint']}", err=True)
    click.echo(
        f"`dkrr resume {directory.shown}` continues it, `dkrr logs {directory.shown}` says what happened", err=True
    )


def print_result(directory: RunDirectory, view: View) -> None:
    """The figures of a finished run, from its result.json."""
    result = directory.read("result.json") or {}
    print_facts(_result_facts(result, view), title=f"{directory.shown}  {directory.location}")


def _result_facts(result: dict[str, Any], view: View) -> Iterator[tuple[str, Any]]:
    plan, score = result.get("plan") or {}, result.get("score")
    yield "state", view.state
    if plan:
        yield "rows", f"{plan.get('num_rows', 0):,} x {plan.get('num_features', 0):,}"
    if "solver" in result:
        yield "solver", f"{result['solver']}, {result.get('precision')}"
    for item in result.get("given_up", []):
        yield "went on", item.get("sentence", "")
    if exact := exactness(result):
        name, value = exact
        yield ("residual", f"relative {value:.1e}") if name == "relative residual" else (name, f"{value:.1e}")
    if result.get("num_support") is not None:
        yield "support vectors", f"{result['num_support']:,}"
    if score and result.get("metric"):
        value = score.get(result["metric"])
        value = sum(value) / len(value) if isinstance(value, list) and value else value
        yield f"held-out {result['metric']}", f"{value:.5g}" if isinstance(value, float) else value
    if "total" in result.get("seconds", {}):
        yield "seconds", f"{result['seconds']['total']:.1f}"
    if result.get("model_path"):
        yield "model", result["model_path"]
    if result.get("run_directory"):
        yield "report", join(result["run_directory"], "report.html")


def event_line(event: dict[str, Any]) -> str:
    """Time, kind and message of an event."""
    time_text = str(event.get("time", "")).replace("T", " ").removesuffix("Z")[:19]
    return f"{time_text}  {event.get('kind', ''):<8}  {event.get('message', '')}"
