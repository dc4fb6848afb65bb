"""Commands for runs that go on by themselves: submit, look, wait, cancel, resume, list, and the page of a run.

All but ``submit`` and ``resume`` read the run's directory and nothing else: they work when driver, scheduler and data
are out of reach.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dkrr.cli.errors import Command
from dkrr.cli.output import print_facts, print_json

if TYPE_CHECKING:
    from dkrr.jobs.runs.directory import RunDirectory
    from dkrr.jobs.runs.status import View
    from dkrr.jobs.runs.submit import Submitted

__all__ = [
    "cancel_command",
    "list_command",
    "logs_command",
    "report_command",
    "resume_command",
    "status_command",
    "submit_command",
    "wait_command",
]

LOOK_SECONDS = 1.0

run_argument = click.argument("run")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.command("submit", cls=Command)
@click.argument("job", type=click.Path(path_type=Path))
@json_option
def submit_command(job: Path, as_json: bool) -> None:
    """Start JOB in the background and print the name of its run. `wait`, `status`, `logs`, `cancel` take that name.

    A finished job prints its result and is not run again unless its data set holds other rows since, or a file that it
    reads was written since; one that was interrupted continues.
    """
    from dkrr.jobs.spec import JobSpec

    spec = JobSpec.load(job)
    from dkrr.jobs.runs.submit import submit_job

    _print_submitted(submit_job(spec, job.read_bytes()), as_json)


@click.command("resume", cls=Command)
@run_argument
@json_option
def resume_command(run: str, as_json: bool) -> None:
    """Start a new driver for RUN (a name, a path or a URL), which continues with what is finished.

    A finished RUN prints its result, and says when its job reads other rows by now.
    """
    from dkrr.jobs.runs.facts import find_run
    from dkrr.jobs.runs.submit import resume_run

    _print_submitted(resume_run(find_run(run)), as_json)


def _print_submitted(done: Submitted, as_json: bool) -> None:
    name = done.directory.shown
    if as_json:
        note = {"note": done.note} if done.note else {}
        found = {"run": name, "location": done.directory.location, "driver": done.started, **note}
        print_json(found | done.view.to_dict())
        return
    if done.view.state == "finished":
        if not done.note:
            click.echo(f"{name} is finished; `dkrr fit` would run it again", err=True)
        _print_view(done.directory, done.view)
        if done.note:
            click.echo(f"{name} is {done.note}", err=True)
        return
    click.echo(name)
    if done.started is None:
        click.echo(f"{name} is {done.view.state} already", err=True)
        return
    click.echo(f"driver: host {done.started['host']}, pid {done.started['pid']}", err=True)
    click.echo("it goes on when this shell ends, and stops while this machine sleeps or is off", err=True)


@click.command("status", cls=Command)
@run_argument
@click.option("--watch", is_flag=True, help="Look again every second until the run ends; Ctrl-C only ends the looking.")
@json_option
def status_command(run: str, watch: bool, as_json: bool) -> None:
    """Say how far RUN is: a name below the runs folder (./runs, or DKRR_RUNS), a path, or a URL."""
    from dkrr.jobs.runs.facts import find_run
    from dkrr.jobs.runs.status import Watch, look_once

    directory = find_run(run)
    if not watch:
        _print_view(directory, look_once(directory), as_json)
        return
    from dkrr.cli.progress import watch_run

    with _detaching(directory):
        view = watch_run(Watch(directory), LOOK_SECONDS, as_json=as_json)
        if not as_json:
            _print_view(directory, view)


@click.command("logs", cls=Command)
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends; Ctrl-C only ends the looking.")
@json_option
def logs_command(run: str, follow: bool, as_json: bool) -> None:
    """Print what happened in RUN, and what its driver printed; with --json the events, one on each line."""
    import json

    from dkrr.jobs.runs.events import Follower
    from dkrr.jobs.runs.facts import find_run
    from dkrr.jobs.runs.status import Watch

    directory = find_run(run)
    follower, looks = Follower(directory), Watch(directory)
    with _detaching(directory):
        while True:
            over = not follow or looks.look().is_over
            for event in follower.events():
                click.echo(json.dumps(event, sort_keys=True) if as_json else _event_line(event))
            for line in [] if as_json else follower.log_lines():
                click.echo(f"driver.log  {line}")
            if over:
                break
            time.sleep(LOOK_SECONDS)


@click.command("wait", cls=Command)
@run_argument
@click.pass_context
def wait_command(context: click.Context, run: str) -> None:
    """Wait until RUN ends, and end with its exit code; Ctrl-C only ends the waiting.

    A lost run (its driver is gone) ends with 75.
    """
    from dkrr.jobs.runs.facts import find_run, sentence
    from dkrr.jobs.runs.status import Watch

    directory = find_run(run)
    looks = Watch(directory)
    with _detaching(directory):
        while not (view := looks.look()).is_over:
            time.sleep(LOOK_SECONDS)
    if view.state == "finished":
        _print_view(directory, view)
        return
    click.echo(f"{directory.shown}: {sentence(view)}", err=True)
    _print_hints(directory, view)
    context.exit(view.exit_code)


@click.command("cancel", cls=Command)
@run_argument
def cancel_command(run: str) -> None:
    """Ask the driver of RUN to stop; it starts no new tile within 10 s, and `resume` continues it."""
    from dkrr.jobs.runs.facts import find_run
    from dkrr.jobs.runs.submit import cancel_run

    directory = find_run(run)
    view = cancel_run(directory)
    if view.status.is_ended:
        click.echo(f"{directory.shown} is {view.state}; there is nothing to stop", err=True)
    elif view.is_over:
        click.echo(f"{directory.shown} is lost ({view.reason}); should its driver wake up, it stops", err=True)
    else:
        click.echo(f"{directory.shown}: cancel requested; `dkrr wait {directory.shown}` waits for the end", err=True)


@click.command("list", cls=Command)
@click.argument("folder", required=False)
@json_option
def list_command(folder: str | None, as_json: bool) -> None:
    """List the runs in FOLDER, by default ./runs or what DKRR_RUNS names."""
    from dkrr.jobs.runs.directory import runs_folder
    from dkrr.jobs.runs.facts import list_runs, sentence
    from dkrr.jobs.runs.status import look_once

    runs = [(run, look_once(run, beat_seconds=0.0)) for run in list_runs(folder)]
    if as_json:
        print_json([{"run": run.shown, "location": run.location, **view.to_dict()} for run, view in runs])
        return
    if not runs:
        click.echo(f"no runs in {folder or runs_folder()}", err=True)
    print_facts((run.name, sentence(view)) for run, view in runs)


@click.command("report", cls=Command)
@click.argument("run")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write it to this file; by default report.html in the run.",
)
def report_command(run: str, output: Path | None) -> None:
    """Make the report of RUN (a name, a path or a URL): one HTML file that needs nothing else, of any state.

    Every run makes one when it ends. Prints where it is.
    """
    from dkrr.jobs.report.page import write_report
    from dkrr.jobs.runs.facts import find_run

    click.echo(write_report(find_run(run), output))


def _print_view(directory: RunDirectory, view: View, as_json: bool = False) -> None:
    """Print everything that is known about a run, and how to go on with it."""
    from dkrr.jobs.runs.facts import run_facts

    if as_json:
        print_json({"run": directory.shown, "location": directory.location, **view.to_dict()})
        return
    print_facts(run_facts(directory, view), title=f"{directory.shown}  {directory.location}")
    if view.is_over and view.state != "finished":
        _print_hints(directory, view)


def _print_hints(directory: RunDirectory, view: View) -> None:
    if view.status.error is not None and view.status.error.get("hint") and view.state != "lost":
        click.echo(f"hint: {view.status.error['hint']}", err=True)
    click.echo(
        f"`dkrr resume {directory.shown}` continues it, `dkrr logs {directory.shown}` says what happened", err=True
    )


def _event_line(event: dict[str, Any]) -> str:
    """Time, kind and message of an event."""
    time_text = str(event.get("time", "")).replace("T", " ").removesuffix("Z")[:19]
    return f"{time_text}  {event.get('kind', ''):<8}  {event.get('message', '')}"


@contextlib.contextmanager
def _detaching(directory: RunDirectory) -> Iterator[None]:
    """Ctrl-C ends the looking, not the run."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"\ndetached; {directory.shown} goes on (`dkrr cancel {directory.shown}` stops it)", err=True)
        click.get_current_context().exit(0)
