"""Progress on a terminal: facts and a bar, drawn again and again; elsewhere a line in ten seconds; and a line for each
phase that is over.

``dkrr fit`` and ``dkrr status --watch`` show the same, the one from its own figures, the other from the status of the
run. A :class:`ProgressDisplay` is the callback ``progress(phase, done, total, flops_done, flops_total)`` of the engine.
A run that is driven here hands over a function that says how it stands (:meth:`ProgressDisplay.attach`); what predicts
or searches has its phase alone.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

import click

from dkrr.cli.output import print_json

if TYPE_CHECKING:
    from dkrr.jobs.runs.status import Meter, Status, View, Watch

__all__ = ["LiveBoard", "PhaseLines", "ProgressDisplay", "board", "watch_run"]

SECONDS_BETWEEN_LINES = 10.0
REFRESHES_PER_SECOND = 4


class ProgressDisplay:
    """Shows the progress of a run while the ``with`` block lasts.

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
        self._meter: Meter | None = None
        self._live: LiveBoard | None = None
        self._source: Callable[[], Status] | None = None
        self._lines = PhaseLines()
        self._last_line = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def attach(self, source: Callable[[], Status]) -> None:
        """Show a run: ``source()`` says how it stands, from any thread, at any time."""
        from dkrr.jobs.runs.facts import live_facts
        from dkrr.jobs.runs.status import View

        def look() -> tuple[Status, list[tuple[str, str]]]:
            status = source()
            return status, list(live_facts(View(status, status.state)))

        if self._live is not None:
            self._live.stop()
        self._source, self._lines = source, PhaseLines()
        self._live = LiveBoard(self.stream, look) if _is_terminal(self.stream) else None

    def __call__(self, phase: str, done: int, total: int, flops_done: float, flops_total: float) -> None:
        from dkrr.jobs.runs.facts import progress_words
        from dkrr.jobs.runs.status import Meter, Status

        meter = self._meter = self._meter or Meter(Status(), self.clock)
        if meter.is_new(phase, done):
            meter.begin(phase, done, flops_done)
            self._tell()
        meter.read(phase, done, total, flops_done, flops_total)
        if self._live is None and _is_terminal(self.stream):
            self._live = LiveBoard(self.stream, lambda: (meter.status, [("", progress_words(meter.status))]))
        if self._live is None and self.clock() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = self.clock()
            self._say(progress_words(meter.status))

    def _tell(self) -> None:
        """A line for each phase of a run that ended since the last time."""
        for line in self._lines.new(self._source()) if self._source is not None else ():
            if self._live is not None:
                self._live.say(line)
            else:
                self._say(line)

    def _say(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()


def _is_terminal(stream: IO[str]) -> bool:
    """Whether lines can be drawn again."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


class PhaseLines:
    """Each phase that is over, once: :meth:`new` gives the lines that were not there the last time."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def new(self, status: Status) -> Iterator[str]:
        """Lines of phases that ended since, in their order."""
        from dkrr.jobs.runs.facts import phase_words

        for name, phase in sorted(status.phases.items(), key=lambda item: int(item[1].get("number", 0))):
            times = int(phase.get("times", 1))
            if times > self._seen.get(name, 0):
                self._seen[name] = times
                yield phase_words(name, phase)


class LiveBoard:
    """Facts and a bar at the bottom of a terminal, drawn again four times a second; lines go above them.

    Parameters
    ----------
    stream
        A terminal.
    look
        The status, and what is to be said of it.
    """

    def __init__(self, stream: IO[str], look: Callable[[], tuple[Status, list[tuple[str, str]]]]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._look = look
        self._console = Console(file=stream, highlight=False)
        self._live = Live(
            console=self._console,
            get_renderable=self._draw,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,  # results are for whoever reads them; warnings go above the board
        )
        self._live.start()

    def say(self, line: str) -> None:
        """A line that stays."""
        self._console.print(line, markup=False)

    def stop(self) -> None:
        """Take the board away; the lines stay."""
        self._live.stop()

    def _draw(self) -> Any:
        return board(*self._look(), *self._console.size)


def board(status: Status, facts: list[tuple[str, str]], width: int, height: int) -> Any:
    """Facts and the bar of a status as something that rich shows, at most ``width`` columns and ``height`` rows."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    facts = facts[: max(1, height - 1)]
    label = max(len(name) for name, _ in facts)
    told = [
        Text.assemble((f"{name:<{label}}  " if label else "", "dim"), value, no_wrap=True, overflow="ellipsis")
        for name, value in facts
    ]
    if not status.tasks_total or height < len(facts) + 2:
        return Group(*told)
    columns = min(60, max(10, width - 2))
    return Group(*told, ProgressBar(total=status.tasks_total, completed=status.tasks_done, width=columns))


def watch_run(looks: Watch, seconds: float, *, as_json: bool = False) -> View:
    """Show a run on stdout until it is over; the last view.

    A terminal has the board. Elsewhere lines are printed: one for each phase that is over, one when state or phase
    change, and one in ten seconds. As JSON every look is a document.
    """
    from dkrr.jobs.runs.facts import live_facts, sentence

    view = looks.look()
    lines, shown, printed = PhaseLines(), ("", ""), 0.0
    is_live = _is_terminal(sys.stdout) and not as_json
    live = LiveBoard(sys.stdout, lambda: (view.status, list(live_facts(view)))) if is_live else None
    say: Callable[[str], None] = click.echo if live is None else live.say
    try:
        while True:
            now, what = time.monotonic(), (view.state, view.status.phase.partition(", ")[0])
            if as_json:
                print_json(view.to_dict())
            else:
                for line in lines.new(view.status):
                    say(line)
                if live is None and (what != shown or now - printed >= SECONDS_BETWEEN_LINES):
                    shown, printed = what, now
                    click.echo(sentence(view))
            if view.is_over:
                return view
            time.sleep(seconds)
            view = looks.look()
    finally:
        if live is not None:
            live.stop()
