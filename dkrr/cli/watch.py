"""``dkrr status --watch``: look again and again, until the run is over."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from dkrr.cli.board import PhaseLines
from dkrr.cli.output import print_json
from dkrr.cli.progress import SECONDS_BETWEEN_LINES, LiveBoard
from dkrr.cli.views import sentence

if TYPE_CHECKING:
    from dkrr.jobs.runs.status import View, Watch

__all__ = ["watch_run"]


def watch_run(looks: Watch, seconds: float, *, as_json: bool = False) -> View:
    """Show a run on stdout until it is over; the last view.

    A terminal has the board. Elsewhere lines are printed: one for each phase that is over, one when state or phase
    change, and one in ten seconds. As JSON every look is a document.
    """
    view = looks.look()
    if as_json or not sys.stdout.isatty():
        return _print_lines(looks, view, seconds, as_json)
    lines = PhaseLines()
    live = LiveBoard(sys.stdout, lambda: (view.status, view.state if view.state != view.status.state else ""))
    try:
        while True:
            for line in lines.new(view.status):
                live.say(line)
            if view.is_over:
                return view
            time.sleep(seconds)
            view = looks.look()
    finally:
        live.stop()


def _print_lines(looks: Watch, view: View, seconds: float, as_json: bool) -> View:
    lines, shown, printed = PhaseLines(), ("", ""), 0.0
    while True:
        now, what = time.monotonic(), (view.state, view.status.phase.partition(", ")[0])
        if as_json:
            print_json(view.to_dict())
        else:
            for line in lines.new(view.status):
                click.echo(line)
            if what != shown or now - printed >= SECONDS_BETWEEN_LINES:
                shown, printed = what, now
                click.echo(sentence(view))
        if view.is_over:
            return view
        time.sleep(seconds)
        view = looks.look()
