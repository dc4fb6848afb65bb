"""Commands before there is a job: ``init`` writes its file, ``ingest`` brings rows into a data set."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dkrr.cli.errors import Command
from dkrr.cli.output import print_facts

if TYPE_CHECKING:
    from dkrr.dataset import Dataset

__all__ = ["given_options", "ingest_command", "init_command", "missing_option", "text_options"]


def column(text: str) -> str | int:
    """A column as typed: a whole number is a position, everything else a name."""
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def text_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a command that say how a text file is read, see :func:`given_options`."""
    for option in (
        click.option("--decimal", type=click.Choice([".", ","]), help="What stands before the fraction in a CSV file."),
        click.option("--delimiter", metavar="CHAR", help="What separates the fields of a CSV file."),
        click.option("--header/--no-header", default=None, help="Whether a CSV file has a header; found by default."),
    ):
        command = option(command)
    return command


missing_option = click.option(
    "--missing",
    type=click.Choice(["error", "drop"]),
    help="What to do with rows that have missing values; an error by default.",
)


def given_options(**options: Any) -> dict[str, Any]:
    """Those that were typed."""
    return {name: value for name, value in options.items() if value is not None}


@click.command("init", cls=Command)
@click.argument("data")
@click.option("--target", multiple=True, metavar="NAME", help="Target column: a name or a number (-1 is the last).")
@text_options
@missing_option
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write, instead of stdout.")
def init_command(data: str, target: tuple[str, ...], output: Path | None, **reading: Any) -> None:
    """Print a commented job file for DATA, with whitening and a gamma from the median distance of its rows."""
    from dkrr.errors import JobFileError
    from dkrr.jobs.init import init_job
    from dkrr.store.documents import create_bytes

    exists = JobFileError(f"{output} exists", hint="choose another name or remove it")
    if output is not None and os.path.lexists(output):
        raise exists
    base = None if output is None else output.parent
    targets = [column(name) for name in target] or None
    text = init_job(data, targets, base=base, reading=given_options(**reading))
    if output is None:
        click.echo(text, nl=False)
    elif create_bytes(output.parent, output.name, text.encode()) is None:
        raise exists
    else:
        click.echo(f"wrote {output}", err=True)


@click.command("ingest", cls=Command)
@click.argument("source")
@click.argument("dest", required=False)
@click.option("--target", multiple=True, metavar="NAME", help="Target column: a name or a number; may be repeated.")
@click.option("--features", multiple=True, metavar="NAME", help="Feature column, instead of all others; repeatable.")
@click.option("--weight", metavar="NAME", help="Column of sample weights.")
@text_options
@missing_option
@click.option("--one-hot", is_flag=True, help="Turn the classes of the target into one column each.")
@click.option("--append", is_flag=True, help="Add the rows to the data set that DEST holds, as one generation.")
@click.option("--label", metavar="TEXT", help="What the generation is called; appended once under this name.")
@click.option("--drop-generation", multiple=True, type=int, metavar="K", help="Take generation K out; repeatable.")
@click.option("--keep-generations", type=int, metavar="K", help="Keep the last K generations.")
@click.option("--keep-rows", type=int, metavar="M", help="Keep the last M rows.")
def ingest_command(
    source: str,
    dest: str | None,
    target: tuple[str, ...],
    features: tuple[str, ...],
    weight: str | None,
    one_hot: bool,
    append: bool,
    label: str | None,
    drop_generation: tuple[int, ...],
    keep_generations: int | None,
    keep_rows: int | None,
    **reading: Any,
) -> None:
    """Bring the rows of SOURCE into the data set DEST, or take rows out of it.

    SOURCE is a .csv, .csv.gz, .parquet, .npy or .zarr, or sklearn:digits, or generate:friedman?n=20480&d=10.

    With --drop-generation, --keep-generations or --keep-rows the data set becomes a new version with fewer rows, after
    the append if there is one; without SOURCE (`dkrr ingest DEST --keep-rows 100000`) nothing else happens.
    """
    from dkrr.dataset import drop_generations, ingest, keep_last

    takes_out = bool(drop_generation) or keep_generations is not None or keep_rows is not None
    if dest is None and not takes_out:
        raise click.UsageError("DEST is missing: where shall the rows go?")
    if takes_out and dest is not None and not append:
        raise click.UsageError("rows are taken out of a data set by itself, or after --append")
    if keep_generations is not None and keep_rows is not None:
        raise click.UsageError("--keep-generations or --keep-rows, not both")
    if label is not None and not append:
        raise click.UsageError("--label names an append: give --append as well")
    if dest is None:
        dest = source
    else:
        dataset = ingest(
            source,
            dest,
            target=[column(name) for name in target] or None,
            features=[column(name) for name in features] or None,
            weight=None if weight is None else column(weight),
            one_hot=one_hot,
            append=append,
            label=label,
            **given_options(**reading),
        )
    if drop_generation:
        dataset = drop_generations(dest, drop_generation)
    if keep_generations is not None or keep_rows is not None:
        dataset = keep_last(dest, generations=keep_generations, rows=keep_rows)
    print_facts(dataset_facts(dataset))


def dataset_facts(dataset: Dataset) -> list[tuple[str, object]]:
    """What a data set is, for people."""
    return [
        ("data set", dataset.path),
        ("rows", f"{dataset.num_rows:,}"),
        *([("dropped", f"{dataset.num_dropped:,} rows with missing values")] if dataset.num_dropped else []),
        ("generations", len(dataset.generations)),
        ("features", dataset.num_features),
        ("targets", ", ".join(dataset.target_names) or "none"),
    ]
