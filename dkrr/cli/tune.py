"""``tune``: a job in, the same job with kernel, widths and alpha chosen out."""

from __future__ import annotations

from pathlib import Path

import click

from dkrr.cli.errors import Command, resumable
from dkrr.cli.output import print_json, print_table
from dkrr.cli.progress import ProgressDisplay

__all__ = ["tune_command"]


@click.command("tune", cls=Command)
@click.argument("job", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Job file to write.")
@click.option("--rows", type=click.IntRange(min=1), help="Most rows of the subsets; [tune] rows by default.")
@click.option("--time", "budget_seconds", type=float, metavar="SECONDS", help="Time for the search, about 8 minutes.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the subset.")
@click.option("--picture/--no-picture", default=True, help="Draw the search.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def tune_command(
    job: Path,
    output: Path,
    rows: int | None,
    budget_seconds: float | None,
    seed: int | None,
    picture: bool,
    as_json: bool,
) -> None:
    """Choose kernel, width (shared, and one for each feature) and alpha for JOB, and write a job that uses them.

    Searches on random subsets of the training rows, compares the best on more of them. Interrupted and started again,
    it continues with the trials that are finished.
    """
    from dkrr.jobs.spec import JobSpec

    spec = JobSpec.load(job)
    from dkrr.jobs.tune import tune_job

    with resumable(), ProgressDisplay() as progress:
        summary = tune_job(
            spec,
            output,
            rows=rows,
            budget_seconds=budget_seconds,
            seed=seed,
            picture=picture,
            progress=progress,
        )
    if as_json:
        print_json(summary.to_dict())
    else:
        print_table(summary.table())
    click.echo(summary.where, err=as_json)
