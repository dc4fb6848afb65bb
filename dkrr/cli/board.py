"""How a run looks on a terminal while it goes on: tiles, rate, time left; and the line of a phase that is over.

``dkrr fit`` and ``dkrr status --watch`` show the same board, the one from its own figures, the other from the status.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dkrr.cli.estimate import ITERATIVE, clock_text
from dkrr.cli.triangle import ASCII, BLOCKS, triangle_lines
from dkrr.jobs.report.words import size
from dkrr.jobs.runs.status import Status

__all__ = ["PhaseLines", "board", "phase_line"]

FACTS_WIDTH = 38
MOST_ROWS = 36
LINES_BESIDE = 3  # of the terminal that the triangle leaves free
_STYLES = {"done": "green", "some": "cyan", "running": "bold yellow", "todo": "dim"}


def phase_line(name: str, phase: Mapping[str, Any]) -> str:
    """``factorise: 210 tasks in 12.3 s, 163.2 GF/s``; ``prepare: 0.8 s``."""
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


class PhaseLines:
    """Each phase that is over, once: :meth:`new` gives the lines that were not there the last time."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def new(self, status: Status) -> Iterator[str]:
        """Lines of phases that ended since, in their order."""
        for name, phase in sorted(status.phases.items(), key=lambda item: int(item[1].get("number", 0))):
            times = int(phase.get("times", 1))
            if times > self._seen.get(name, 0):
                self._seen[name] = times
                yield phase_line(name, phase)


def facts(status: Status, state: str) -> Iterator[tuple[str, str]]:
    """Names and values beside the triangle."""
    name, _, moment = status.phase.partition(", ")
    yield "state", state
    yield "phase", f"{name}, {clock_text(status.phase_seconds)}"
    if status.tasks_total:
        about = "about " if name in ITERATIVE else ""
        share = f" ({status.tasks_done / status.tasks_total:.0%})"
        yield _unit(name), f"{status.tasks_done:,} of {about}{status.tasks_total:,}{share}"
    if moment:
        yield "", moment
    if status.tiles is not None:
        yield "running", f"{int(status.tiles.get('num_running', 0)):,}"
    if status.flops_per_second > 0 and name not in ITERATIVE:
        yield "rate", f"{status.flops_per_second / 1e9:.1f} GF/s"
    if status.phase_seconds_left is not None:
        yield "left", f"{clock_text(status.phase_seconds_left)} of this phase"
    if status.given_up:
        yield "went on", f"from {status.given_up[-1].get('way')}"
        yield "with", str(status.given_up[-1].get("next"))
    if status.num_workers:
        yield "workers", f"{status.num_workers:,}, {status.num_threads:,} threads"
    if status.memory_bytes:
        yield "memory", f"{size(status.memory_bytes)}, largest worker"
    yield "elapsed", clock_text(status.elapsed_seconds)


def board(status: Status, state: str, *, width: int, height: int, unicode: bool = True) -> Any:
    """The board as something that rich shows, at most ``width`` columns and ``height`` rows.

    The facts are beside the triangle, or above it on a narrow terminal; a phase without tiles has a bar.
    """
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    names = list(facts(status, state))[: max(1, height - 1)]
    label = max(len(name) for name, _ in names)
    told = Text(no_wrap=True, overflow="ellipsis")
    for number, (name, value) in enumerate(names):
        told.append(f"{name:<{label}}  ", style="dim").append(value + ("\n" if number < len(names) - 1 else ""))
    if status.tiles is None:
        if not status.tasks_total or height < len(names) + 2:
            return told
        bar = ProgressBar(total=status.tasks_total, completed=status.tasks_done, width=min(60, max(10, width - 2)))
        return Group(told, bar if unicode else Text(_plain_bar(status, min(60, width - 2))))
    beside = width >= FACTS_WIDTH + 24
    columns = width - FACTS_WIDTH if beside else width
    free = height - LINES_BESIDE if beside else height - len(names) - 2
    rows = max(1, min(MOST_ROWS, free, columns // 2))
    picture = Text(no_wrap=True)
    lines = triangle_lines(status.tiles, rows, BLOCKS if unicode else ASCII)
    for number, line in enumerate(lines):
        for sign, kind in line:
            picture.append(sign, style=_STYLES[kind])
        picture.append("" if number == len(lines) - 1 else "\n")
    if not beside:
        return Group(told, picture)
    both = Table.grid(padding=(0, 3, 0, 0))
    both.add_row(picture, told)
    return both


def _plain_bar(status: Status, width: int) -> str:
    filled = round(width * status.tasks_done / max(1, status.tasks_total))
    return "#" * filled + "." * (width - filled)
