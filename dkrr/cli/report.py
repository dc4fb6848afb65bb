"""``dkrr report``: the page of a run, made again."""

from __future__ import annotations

from pathlib import Path

import click

from dkrr.cli.errors import Command

__all__ = ["report_command"]


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
    from dkrr.jobs.runs.directory import find_run

    click.echo(write_report(find_run(run), output))
