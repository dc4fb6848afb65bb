"""Commands for runs that go on by themselves: submit, look, wait, cancel, resume, list, report; and progress.

All but ``submit`` and ``resume`` read the run's directory and nothing else: they work when driver, scheduler and data
are out of reach, and within a blink: nothing is imported here that takes long.

Progress is facts and a bar on a terminal, drawn again and again; elsewhere a line in ten seconds; and a line for each
phase that is over. ``dkrr fit`` and ``dkrr status --watch`` show the same, the one from its own figures, the other from
the status of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import click

from dkrr.cli.app import json_option, main, print_facts, print_json, show
from dkrr.errors import InterruptedRunError
from dkrr.jobs.facts import live_facts, phase_words, progress_words, run_facts, sentence
from dkrr.jobs.run_directory import (
    Meter,
    RunDirectory,
    Status,
    Watch,
    find_run,
    follow_events,
    list_runs,
    look_once,
    runs_folder,
)

if TYPE_CHECKING:
    from dkrr.jobs.driver import Submitted

LOOK_SECONDS = 1.0
SECONDS_BETWEEN_LINES = 10.0
REFRESHES_PER_SECOND = 4


class ProgressDisplay:
    """Shows the progress of a run while the ``with`` block lasts.

    It is the callback ``progress(phase, done, total, flops_done, flops_total)`` of the engine. A run hands over a
    function that says how it stands (:meth:`attach`); what predicts or searches has its phases alone.

    Parameters
    ----------
    stream
        Where to show it; stderr.
    clock
        Seconds that never run backwards.
    """

    def __init__(self, stream: IO[str] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self.clock = clock
        self._meter = Meter(Status(state="running"), clock)
        self._look: Callable[[], Status] = lambda: self._meter.status
        self._live: Any = None
        self._told: dict[str, int] = {}
        self._last_line = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.tell()
        self._stop()

    def attach(self, look: Callable[[], Status]) -> None:
        """Show a run: ``look()`` says how it stands, from any thread, at any time."""
        self._stop()
        self._look, self._told = look, {}
        self._start()

    def _start(self) -> None:
        """Put up the board, where lines can be drawn again."""
        if not self.stream.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
            return
        from rich.console import Console
        from rich.live import Live

        def draw() -> Any:
            status = self._look()
            return board(status, live_facts(status), *console.size)

        console = Console(file=self.stream, highlight=False)
        # results are for whoever reads them, so stdout is left alone; warnings go above the board
        self._live = Live(
            console=console,
            get_renderable=draw,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,
        )
        self._live.start()

    def _stop(self) -> None:
        """Take the board away; the lines stay."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, phase: str, done: int, total: int, flops_done: float, flops_total: float) -> None:
        is_new = self._meter.read(phase, done, total, flops_done, flops_total)
        if self._live is None:
            self._start()
        if is_new:
            self.tell()
        if self.is_due():
            self.say(progress_words(self._look()))

    def is_due(self, *, now: bool = False) -> bool:
        """Whether it is time for a line, where there is no board; ``now`` is at any time."""
        return self._live is None and (now or self.clock() - self._last_line >= SECONDS_BETWEEN_LINES)

    def tell(self) -> None:
        """A line for each phase of a run that ended since the last time."""
        for name, phase in sorted(self._look().phases.items(), key=lambda item: int(item[1].get("number", 0))):
            times = int(phase.get("times", 1))
            if times > self._told.get(name, 0):
                self._told[name] = times
                self.say(phase_words(name, phase), last_line=self._last_line)

    def say(self, line: str, *, last_line: float | None = None) -> None:
        """A line that stays; it counts as the last one unless told otherwise."""
        self._last_line = self.clock() if last_line is None else last_line
        if self._live is not None:
            self._live.console.print(line, markup=False)
        else:
            self.stream.write(line + "\n")
            self.stream.flush()


def board(status: Status, facts: list[tuple[str, str]], width: int, height: int) -> Any:
    """Facts and the bar of a run as something that rich shows, at most ``width`` columns and ``height`` rows."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    facts = facts[: max(1, height - 1)]
    label = max(len(name) for name, _ in facts)
    told: list[Any] = [
        Text.assemble((f"{name:<{label}}  " if label else "", "dim"), value, no_wrap=True, overflow="crop")
        for name, value in facts
    ]
    if status.tasks_total and height >= len(facts) + 2:
        columns = min(60, max(10, width - 2))
        told.append(ProgressBar(total=status.tasks_total, completed=status.tasks_done, width=columns))
    return Group(*told)


def watch_run(looks: Watch, *, as_json: bool = False) -> Status:
    """Show a run on stdout until it is over; how it ended.

    A terminal has the board. Elsewhere lines are printed: one for each phase that is over, one when state or phase
    change, and one in ten seconds. As JSON every look is a document.
    """
    status, shown = looks.look(), ("", "")
    with ProgressDisplay(sys.stdout) as display:
        if not as_json:
            display.attach(lambda: status)
        while True:
            what = (status.state, status.phase_name)
            if as_json:
                print_json(status.to_dict())
            else:
                display.tell()
                if display.is_due(now=what != shown):
                    display.say(sentence(status))
            if status.is_over:
                return status
            time.sleep(LOOK_SECONDS)
            status, shown = looks.look(), what


# --- commands ---------------------------------------------------------------------------------------------------------


run_argument = click.argument("run", callback=lambda context, parameter, text: find_run(text))


@main.command("submit")
@click.argument("job", type=click.Path(path_type=Path))
@json_option
def submit_command(job: Path, as_json: bool) -> None:
    """Start JOB in the background and print the name of its run. `wait`, `status`, `logs`, `cancel` take that name.

    A finished job prints its result and is not run again unless its data set holds other rows since, or a file that it
    reads was written since; one that was interrupted continues.
    """
    from dkrr.jobs.driver import submit_job
    from dkrr.jobs.spec import JobSpec

    spec = JobSpec.load(job)

    _print_submitted(submit_job(spec, job.read_bytes()), as_json)


@main.command("resume")
@run_argument
@json_option
def resume_command(run: RunDirectory, as_json: bool) -> None:
    """Start a new driver for RUN (a name, a path or a URL), which continues with what is finished.

    A finished RUN prints its result, and says when its job reads other rows by now.
    """
    from dkrr.jobs.driver import resume_run

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
        click.echo(done.directory.found_by)
        who = "" if done.started is None else f"driver: host {done.started['host']}, pid {done.started['pid']}\n"
        goes_on = "it goes on when this shell ends, and stops while this machine sleeps or is off"
        click.echo(who + goes_on if who else f"{name} is {state} already", err=True)


@main.command("status")
@run_argument
@click.option("--watch", is_flag=True, help="Look again every second until the run ends; Ctrl-C only ends the looking.")
@json_option
def status_command(run: RunDirectory, watch: bool, as_json: bool) -> None:
    """Say how far RUN is: a name below the runs folder (./runs, or DKRR_RUNS), a path, or a URL."""

    if not watch:
        _print_view(run, look_once(run), as_json)
        return

    with _detaching(run):
        status = watch_run(Watch(run), as_json=as_json)
        if not as_json:
            _print_view(run, status)


@main.command("logs")
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends; Ctrl-C only ends the looking.")
@json_option
def logs_command(run: RunDirectory, follow: bool, as_json: bool) -> None:
    """Print what happened in RUN, and what its driver printed; with --json the events, one on each line."""

    looks, news, over = Watch(run), follow_events(run), False
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
    """Wait until RUN ends, and end with its exit code; Ctrl-C only ends the waiting, with 75.

    A lost run (its driver is gone) ends with 75, too.
    """

    looks = Watch(run)
    with _detaching(run, InterruptedRunError.exit_code):
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
    from dkrr.jobs.driver import cancel_run

    status, name = cancel_run(run), run.shown
    said = f"{name}: cancel requested; `dkrr wait {name}` waits for the end"
    if status.is_over:
        said = f"{name} is {status.state}; " + (
            "there is nothing to stop"
            if status.is_ended
            else f"should its driver ({status.lost_because}) wake up, it stops"
        )
    click.echo(said, err=True)


@main.command("list")
@click.argument("folder", required=False)
@json_option
def list_command(folder: str | None, as_json: bool) -> None:
    """List the runs in FOLDER, by default ./runs or what DKRR_RUNS names."""

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
    from dkrr.jobs.page import write_report

    click.echo(write_report(run, output))


def _document(run: RunDirectory, status: Status) -> dict[str, Any]:
    return {"run": run.found_by, "location": run.location, **status.to_dict()}


def _print_view(run: RunDirectory, status: Status, as_json: bool = False) -> None:
    """Print everything that is known about a run, and how to go on with it."""
    if as_json:
        print_json(_document(run, status))
        return

    print_facts(run_facts(run, status), title=f"{run.shown}  {run.location}")
    if status.is_over and status.state != "finished":
        _print_hints(run, status)


def _print_hints(run: RunDirectory, status: Status) -> None:
    hint = (status.error or {}).get("hint") if status.state != "lost" else ""
    more = f"{run.goes_on_by} continues it, `dkrr logs {run.shown}` says what happened"
    click.echo(f"hint: {hint}\n{more}" if hint else more, err=True)


@contextlib.contextmanager
def _detaching(run: RunDirectory, exit_code: int = 0) -> Iterator[None]:
    """Ctrl-C ends the looking, not the run; the command ends with an exit code of its own."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"\ndetached; {run.shown} goes on (`dkrr cancel {run.shown}` stops it)", err=True)
        click.get_current_context().exit(exit_code)
