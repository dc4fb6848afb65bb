"""``retrain``: from delivered rows to a model in production, for a scheduler to run."""

from __future__ import annotations

from pathlib import Path

import click

from dkrr.cli.errors import Command, resumable
from dkrr.cli.output import print_facts, print_json
from dkrr.cli.progress import ProgressDisplay

__all__ = ["retrain_command"]


@click.command("retrain", cls=Command)
@click.argument("job", type=click.Path(path_type=Path), metavar="RETRAIN.TOML")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--dry-run", is_flag=True, help="Only say which batches would be appended or refused, or are missing.")
def retrain_command(job: Path, as_json: bool, dry_run: bool) -> None:
    """Add the rows that were delivered, fit, judge, and promote what passes; with nothing new, do nothing.

    Started again after any interruption it does what is missing. Exit code 7: a batch or the model was refused, and the
    model in production stays. Retry only after 6 (cluster) and 75 (interrupted). With --dry-run nothing is changed, and
    refused batches are no error.
    """
    from dkrr.errors import RefusedError
    from dkrr.jobs.retrain.spec import RetrainSpec

    spec = RetrainSpec.load(job)
    from dkrr.jobs.retrain.run import retrain

    refused: RefusedError | None = None
    with resumable(), ProgressDisplay() as progress:
        try:
            summary = retrain(spec, progress=progress, dry_run=dry_run)
        except RefusedError as exc:
            refused, summary = exc, exc.summary
    if as_json:
        print_json(summary.to_dict())
    else:
        print_facts(summary.lines())
    if refused is not None:
        raise refused
