"""Progress on a terminal: facts and a bar, drawn again and again; elsewhere a line in ten seconds; and a line for each
phase that is over.

``dkrr fit`` and ``dkrr status --watch`` show the same, the one from its own figures, the other from the status of the
run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, Self

from dkrr.cli.app import print_json

if TYPE_CHECKING:
    from dkrr.jobs.runs.status import Meter, Status, Watch


SECONDS_BETWEEN_LINES = 10.0
REFRESHES_PER_SECOND = 4


class ProgressDisplay:
    """Shows the progress of a run while the ``with`` block lasts.

    It is the callback ``progress(phase, done, total, flops_done, flops_total)`` of the engine. A run hands over a
    function that says how it stands (:meth:`attach`); what predicts or searches has its phase alone.

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
        self._look: Callable[[], Status] | None = None
        self._meter: Meter | None = None
        self._live: Any = None
        self._phase = ""
        self._told: dict[str, int] = {}
        self._last_line = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.tell()
        self._stop()

    def attach(self, look: Callable[[], Status], *, whole: bool = True) -> None:
        """Show a run: ``look()`` says how it stands, from any thread, at any time; only its phase if not ``whole``."""
        from dkrr.jobs.report.facts import live_facts, progress_words

        def draw() -> Any:
            status = look()
            facts = live_facts(status) if whole else [("", progress_words(status))]
            return board(status, facts, *console.size)

        self._stop()
        self._look, self._told = look, {}
        if self.stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):  # lines can be drawn again
            from rich.console import Console
            from rich.live import Live

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
        from dkrr.jobs.report.facts import progress_words
        from dkrr.jobs.runs.status import Meter, Status

        if self._look is None:
            self._meter = meter = Meter(Status(), self.clock)
            self.attach(lambda: meter.status, whole=False)
        if self._meter is not None:
            self._meter.read(phase, done, total, flops_done, flops_total)
        elif phase.partition(", ")[0] != self._phase:
            self._phase = phase.partition(", ")[0]
            self.tell()
        if self._look is not None and self.is_due():
            self.say(progress_words(self._look()))

    def is_due(self, *, now: bool = False) -> bool:
        """Whether it is time for a line, where there is no board; ``now`` is at any time."""
        return self._live is None and (now or self.clock() - self._last_line >= SECONDS_BETWEEN_LINES)

    def tell(self) -> None:
        """A line for each phase of a run that ended since the last time."""
        from dkrr.jobs.report.facts import phase_words

        phases = self._look().phases if self._look is not None and self._meter is None else {}
        for name, phase in sorted(phases.items(), key=lambda item: int(item[1].get("number", 0))):
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


def watch_run(looks: Watch, seconds: float, *, as_json: bool = False) -> Status:
    """Show a run on stdout until it is over; how it ended.

    A terminal has the board. Elsewhere lines are printed: one for each phase that is over, one when state or phase
    change, and one in ten seconds. As JSON every look is a document.
    """
    from dkrr.jobs.report.facts import sentence

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
            time.sleep(seconds)
            status, shown = looks.look(), what
