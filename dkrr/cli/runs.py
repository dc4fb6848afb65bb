"""Commands for runs that go on by themselves: submit, look, wait, cancel, resume, list, and the page of a run.

All but ``submit`` and ``resume`` read the run's directory and nothing else: they work when driver, scheduler and data
are out of reach.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dkrr.cli.app import json_option, main, print_facts, print_json, show

if TYPE_CHECKING:
    from dkrr.jobs.runs.directory import RunDirectory
    from dkrr.jobs.runs.driver import Submitted
    from dkrr.jobs.runs.status import Status


LOOK_SECONDS = 1.0


def _find(context: click.Context, parameter: click.Parameter, text: str) -> RunDirectory:
    from dkrr.jobs.runs.directory import find_run

    return find_run(text)


run_argument = click.argument("run", callback=_find)


@main.command("submit")
@click.argument("job", type=click.Path(path_type=Path))
@json_option
def submit_command(job: Path, as_json: bool) -> None:
    """Start JOB in the background and print the name of its run. `wait`, `status`, `logs`, `cancel` take that name.

    A finished job prints its result and is not run again unless its data set holds other rows since, or a file that it
    reads was written since; one that was interrupted continues.
    """
    from dkrr.jobs.spec import JobSpec

    spec = JobSpec.load(job)
    from dkrr.jobs.runs.driver import submit_job

    _print_submitted(submit_job(spec, job.read_bytes()), as_json)


@main.command("resume")
@run_argument
@json_option
def resume_command(run: RunDirectory, as_json: bool) -> None:
    """Start a new driver for RUN (a name, a path or a URL), which continues with what is finished.

    A finished RUN prints its result, and says when its job reads other rows by now.
    """
    from dkrr.jobs.runs.driver import resume_run

    _print_submitted(resume_run(run), as_json)


def _print_submitted(done: Submitted, as_json: bool) -> None:
    name, state = done.directory.shown, done.status.state
    if as_json:
        note = {"note": done.note} if done.note else {}
        print_json({**_document(done.directory, done.status), "driver": done.started, **note})
    elif state == "finished":
        _print_view(done.directory, done.status)
        click.echo(f"{name} is {done.note or 'finished; `dkrr fit` would run it again'}", err=True)
    else:
        click.echo(name)
        who = "" if done.started is None else f"driver: host {done.started['host']}, pid {done.started['pid']}\n"
        goes_on = "it goes on when this shell ends, and stops while this machine sleeps or is off"
        click.echo(who + goes_on if who else f"{name} is {state} already", err=True)


@main.command("status")
@run_argument
@click.option("--watch", is_flag=True, help="Look again every second until the run ends; Ctrl-C only ends the looking.")
@json_option
def status_command(run: RunDirectory, watch: bool, as_json: bool) -> None:
    """Say how far RUN is: a name below the runs folder (./runs, or DKRR_RUNS), a path, or a URL."""
    from dkrr.jobs.runs.status import Watch, look_once

    if not watch:
        _print_view(run, look_once(run), as_json)
        return
    from dkrr.cli.progress import watch_run

    with _detaching(run):
        status = watch_run(Watch(run), LOOK_SECONDS, as_json=as_json)
        if not as_json:
            _print_view(run, status)


@main.command("logs")
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends; Ctrl-C only ends the looking.")
@json_option
def logs_command(run: RunDirectory, follow: bool, as_json: bool) -> None:
    """Print what happened in RUN, and what its driver printed; with --json the events, one on each line."""
    from dkrr.jobs.runs import directory
    from dkrr.jobs.runs.status import Watch

    looks, news, over = Watch(run), directory.follow(run), False
    with _detaching(run):
        while not over:
            over = not follow or looks.look().is_over
            events, printed = next(news)
            for event in events:
                when, words = str(event.get("time", ""))[:19].replace("T", " "), event.get("message", "")
                line = f"{when}  {event.get('kind', ''):<8}  {words}"
                click.echo(json.dumps(event, sort_keys=True) if as_json else line)
            for line in printed * (not as_json):
                click.echo(f"driver.log  {line}")
            time.sleep(0.0 if over else LOOK_SECONDS)


@main.command("wait")
@run_argument
@click.pass_context
def wait_command(context: click.Context, run: RunDirectory) -> None:
    """Wait until RUN ends, and end with its exit code; Ctrl-C only ends the waiting.

    A lost run (its driver is gone) ends with 75.
    """
    from dkrr.jobs.report.facts import sentence
    from dkrr.jobs.runs.status import Watch

    looks = Watch(run)
    with _detaching(run):
        while not (status := looks.look()).is_over:
            time.sleep(LOOK_SECONDS)
    if status.state == "finished":
        _print_view(run, status)
    else:
        click.echo(f"{run.shown}: {sentence(status)}", err=True)
        _print_hints(run, status)
    context.exit(status.exit_code or 0)


@main.command("cancel")
@run_argument
def cancel_command(run: RunDirectory) -> None:
    """Ask the driver of RUN to stop; it starts no new tile within 10 s, and `resume` continues it."""
    from dkrr.jobs.runs.driver import cancel_run

    status, name = cancel_run(run), run.shown
    text = f"{name}: cancel requested; `dkrr wait {name}` waits for the end"
    if status.is_ended:
        text = f"{name} is {status.state}; there is nothing to stop"
    elif status.is_over:
        text = f"{name} is lost ({status.lost_because}); should its driver wake up, it stops"
    click.echo(text, err=True)


@main.command("list")
@click.argument("folder", required=False)
@json_option
def list_command(folder: str | None, as_json: bool) -> None:
    """List the runs in FOLDER, by default ./runs or what DKRR_RUNS names."""
    from dkrr.jobs.report.facts import sentence
    from dkrr.jobs.runs.directory import list_runs, runs_folder
    from dkrr.jobs.runs.status import look_once

    runs = [(run, look_once(run, beat_seconds=0.0)) for run in list_runs(folder)]
    if not runs and not as_json:
        click.echo(f"no runs in {folder or runs_folder()}", err=True)
    facts = [(run.name, sentence(status)) for run, status in runs]
    show(as_json, [_document(run, status) for run, status in runs], facts)


@main.command("report")
@run_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write it to this file; by default report.html in the run.",
)
def report_command(run: RunDirectory, output: Path | None) -> None:
    """Make the report of RUN (a name, a path or a URL): one HTML file that needs nothing else, of any state.

    Every run makes one when it ends. Prints where it is.
    """
    from dkrr.jobs.report.page import write_report

    click.echo(write_report(run, output))


def _document(run: RunDirectory, status: Status) -> dict[str, Any]:
    return {"run": run.shown, "location": run.location, **status.to_dict()}


def _print_view(run: RunDirectory, status: Status, as_json: bool = False) -> None:
    """Print everything that is known about a run, and how to go on with it."""
    if as_json:
        print_json(_document(run, status))
        return
    from dkrr.jobs.report.facts import run_facts

    print_facts(run_facts(run, status), title=f"{run.shown}  {run.location}")
    if status.is_over and status.state != "finished":
        _print_hints(run, status)


def _print_hints(run: RunDirectory, status: Status) -> None:
    hint = (status.error or {}).get("hint") if status.state != "lost" else ""
    more = f"`dkrr resume {run.shown}` continues it, `dkrr logs {run.shown}` says what happened"
    click.echo(f"hint: {hint}\n{more}" if hint else more, err=True)


@contextlib.contextmanager
def _detaching(run: RunDirectory) -> Iterator[None]:
    """Ctrl-C ends the looking, not the run."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"\ndetached; {run.shown} goes on (`dkrr cancel {run.shown}` stops it)", err=True)
        click.get_current_context().exit(0)
