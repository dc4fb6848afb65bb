"""The group of all commands and what they share: options, output, and how a command ends.

stdout has results: a table for people, JSON for programs; everything else goes to stderr. A command ends with one line
and a hint, an exit code, and a traceback only with ``--verbose``.

Nothing but click is imported: ``dask`` loads this with every command of its own.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import click

from dkrr._version import __version__
from dkrr.errors import told

_VERBOSE = "dkrr.verbose"
PIPE_WIDTH = 120  # rich assumes 80 columns where there is no terminal, and would cut paths

Function = Callable[..., Any]


def _set_verbose(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.meta[_VERBOSE] = True  # shared by a command and the groups above it
        logger, handler = logging.getLogger("dkrr"), logging.StreamHandler()
        logger.setLevel(logging.DEBUG)
        if not logger.handlers:
            handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            logger.addHandler(handler)
            logger.propagate = False


class _Verbose(click.Command):
    """A command that knows ``--verbose``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["-v", "--verbose"],
                is_flag=True,
                expose_value=False,
                is_eager=True,
                callback=_set_verbose,
                help="Show the log, and the traceback of an error.",
            )
        )


class CommandGroup(_Verbose, click.Group):
    """A group whose commands end with the exit code of their error.

    The errors are met here and not in ``main()``: below ``dask krr`` another program's ``main()`` runs.
    """

    command_class = _Verbose

    def invoke(self, ctx: click.Context) -> Any:
        try:
            from dkrr.store.files import full_disk

            with full_disk("."):
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (KeyboardInterrupt, Exception) as exc:  # the first also while modules are loaded, say
            if isinstance(exc, OSError) and exc.errno == errno.EPIPE:
                raise  # the reader of our output left; click ends quietly
            if ctx.meta.get(_VERBOSE):
                traceback.print_exception(exc, file=sys.stderr)
            error = told(exc)
            click.echo(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), err=True)
            ctx.exit(error.exit_code)


@click.group(name="krr", cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dkrr")
def main() -> None:
    """Exact kernel ridge regression, out of core, on Dask and Zarr.

    Start with `dkrr init DATA > job.toml`, look at it with `dkrr plan job.toml`, run it with `dkrr fit job.toml`,
    or `dkrr submit job.toml` and walk away. `dkrr fit DATA --target NAME` writes such a file and runs it.

    `dkrr help job` lists the keys of a job file, `dkrr help exit-codes` what a command ends with.
    """


# --- options ----------------------------------------------------------------------------------------------------------

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
missing_option = click.option(
    "--missing",
    type=click.Choice(["error", "drop"]),
    help="What to do with rows that have missing values; an error by default.",
)
_text_options = (
    click.option("--decimal", type=click.Choice([".", ","]), help="What stands before the fraction in a CSV file."),
    click.option("--delimiter", metavar="CHAR", help="What separates the fields of a CSV file."),
    click.option("--header/--no-header", default=None, help="Whether a CSV file has a header; found by default."),
)


def column(text: str) -> str | int:
    """A column as typed: a whole number is a position, everything else a name."""
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def reading_options(command: Function) -> Function:
    """Options that say how a text file is read; the command gets those that were typed as one argument ``reading``."""

    @functools.wraps(command)
    def call(**values: Any) -> Any:
        found = {name: values.pop(name, None) for name in ("decimal", "delimiter", "header", "missing")}
        return command(**values, reading={name: value for name, value in found.items() if value is not None})

    for option in _text_options:
        call = option(call)
    return call


# --- output -----------------------------------------------------------------------------------------------------------


def show(as_json: bool, document: Any, facts: Any, title: str | None = None) -> None:
    """Print what a command has found: one JSON document, or for people a list of facts or something that rich shows."""
    if as_json:
        print_json(document)
    elif isinstance(facts, list):
        print_facts(facts, title)
    else:
        print_table(facts)


def print_table(table: Any) -> None:
    """Print a rich table, or anything else that rich can show."""
    from rich.console import Console

    Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)


def print_facts(facts: Iterable[tuple[str, Any]], title: str | None = None) -> None:
    """Print names and values as two aligned columns; nothing is cut, so lines can be searched."""
    facts = list(facts)
    width = max((len(name) for name, _ in facts), default=0)
    for line in [title] * bool(title) + [f"  {name:<{width}}  {value}" for name, value in facts]:
        click.echo(line)


def print_json(value: Any) -> None:
    """Print one JSON document; what is not finite is null."""
    from dkrr.store.documents import plain

    click.echo(json.dumps(plain(value), indent=2, sort_keys=True, default=str, allow_nan=False))
