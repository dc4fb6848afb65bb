"""Progress on stderr: a board on a terminal, one line in ten seconds elsewhere, and a line for each phase that is over.

An instance is the callback ``progress(phase, done, total, flops_done, flops_total)`` that the engine calls. A run that
is driven here hands over a function that says how it stands (:meth:`ProgressDisplay.attach`); then the board shows
tiles, workers and memory as well. What predicts or searches has a bar.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from dkrr.cli.estimate import Estimate

if TYPE_CHECKING:
    from dkrr.jobs.runs.status import Status

__all__ = ["SECONDS_BETWEEN_LINES", "LiveBoard", "ProgressDisplay"]

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
        self.estimate: Estimate | None = None
        self._bar: Any = None
        self._task: Any = None
        self._live: LiveBoard | None = None
        self._source: Callable[[], Status] | None = None
        self._lines: Any = None
        self._last_line = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._source is not None:
            self._tell(self._source())
        if self._live is not None:
            self._live.stop()
            self._live = None

    def attach(self, source: Callable[[], Status]) -> None:
        """Show a run: ``source()`` says how it stands, from any thread, at any time."""
        from dkrr.cli.board import PhaseLines

        self._source, self._lines = source, PhaseLines()
        if self.stream.isatty():
            self._live = LiveBoard(self.stream, lambda: (source(), ""))

    def __call__(self, phase: str, done: int, total: int, flops_done: float, flops_total: float) -> None:
        now = self.clock()
        name = phase.partition(", ")[0]
        before = None if self.estimate is None else self.estimate.phase.partition(", ")[0]
        if self.estimate is None or before != name or done < self.estimate.done:
            self.estimate = Estimate(phase, now, done, flops_done)
            if self._source is not None:
                self._tell(self._source())
            elif self.stream.isatty():
                self._add_task(name, total)
        self.estimate.phase = phase
        self.estimate.update(now, done, total, flops_done, flops_total)
        facts = self.estimate.sentence()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total or None, facts=facts.partition(": ")[2])
        elif self._live is None and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._say(facts)

    def _add_task(self, name: str, total: int) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[facts]}"),
                console=Console(file=self.stream),
            )
            self._bar.start()
        self._task = self._bar.add_task(name, total=total, facts="")

    def _tell(self, status: Status) -> None:
        """A line for each phase that ended since the last time."""
        for line in self._lines.new(status):
            if self._live is not None:
                self._live.say(line)
            else:
                self._say(line)

    def _say(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()


class LiveBoard:
    """The board of a run at the bottom of a terminal, drawn again four times a second; lines go above it.

    Parameters
    ----------
    stream
        A terminal.
    look
        The status, and the state as a reader sees it ("" for that of the status).
    """

    def __init__(self, stream: IO[str], look: Callable[[], tuple[Status, str]]) -> None:
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
        from dkrr.cli.board import board

        status, state = self._look()
        width, height = self._console.size
        return board(
            status, state or status.state, width=width, height=height, unicode=self._console.encoding.startswith("utf")
        )
