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

from dkrr import __version__, errors
from dkrr.errors import told
from dkrr.markup import facts_text, size

_VERBOSE = "dkrr.verbose"
MIN_PIPE_WIDTH = 120  # where there is no terminal; paths are neither cut nor wrapped there

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
            from dkrr.store.files import storage_errors

            with storage_errors(".", only_full=True):
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (KeyboardInterrupt, Exception) as exc:  # the first also while modules are loaded, say
            if isinstance(exc, OSError) and exc.errno == errno.EPIPE:
                raise  # the reader of our output left; click ends quietly
            if ctx.meta.get(_VERBOSE):
                traceback.print_exception(exc, file=sys.stderr)
            from dkrr.jobs.facts import scrub  # of what was typed, too

            error = told(exc)
            click.echo(scrub(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else "")), err=True)
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
    """A column as typed: a whole number is a position, everything else a name, also one like 01."""
    return int(text) if re.fullmatch(r"0|-?[1-9][0-9]*", text) else text


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


def show(as_json: bool, document: Any, facts: list[tuple[str, Any]], title: str = "") -> None:
    """Print what a command has found: one JSON document, or names and values for people."""
    if as_json:
        print_json(document)
    else:
        print_facts(facts, title)


def print_facts(facts: Iterable[tuple[str, Any]], title: str = "") -> None:
    """Print names and values."""
    if text := facts_text(facts, title):
        click.echo(text)


def print_json(value: Any) -> None:
    """Print one JSON document; what is not finite is null."""
    from dkrr.store.documents import plain

    click.echo(json.dumps(plain(value), indent=2, sort_keys=True, default=str, allow_nan=False))


# --- help and doctor --------------------------------------------------------------------------------------------------


@main.command("help")
@click.argument("topic", required=False, type=click.Choice(["job", "retrain", "exit-codes"]))
@click.pass_context
def help_command(context: click.Context, topic: str | None) -> None:
    """List the keys of a job file, those of RETRAIN.toml, or the exit codes; without a TOPIC the commands."""
    if topic is None:
        click.echo((context.parent or context).get_help())
    elif topic == "exit-codes":
        _print_rows("exit codes", _exit_codes(), "code", "error", "when")
    else:
        from dkrr.jobs.retrain_spec import RetrainSpec
        from dkrr.jobs.spec import JobSpec

        tables = (RetrainSpec if topic == "retrain" else JobSpec).tables()
        for name, table in tables.items():
            if topic == "job" or name not in JobSpec.model_fields:
                what = (table.__doc__ or "").partition("\n")[0].partition(": ")[2].replace("``", "")
                _print_rows(f"[{name}]  {what}", table.described_keys(), "key", "values", "default", "means")
        if topic == "retrain":
            click.echo("and the tables of a job: `dkrr help job` lists their keys")


def _print_rows(title: str, rows: Iterable[Iterable[object]], *headers: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headers, title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    width = None if sys.stdout.isatty() else max(MIN_PIPE_WIDTH, Console(width=10_000).measure(table).maximum)
    Console(file=sys.stdout, width=width).print(table)


def _exit_codes() -> list[tuple[int, str, str]]:
    """Every exit code with the error that ends with it, and when that is raised."""
    kinds = [getattr(errors, name) for name in errors.__all__ if name != "DkrrError"]
    rows = [
        (kind.exit_code, kind.__name__, (kind.__doc__ or "").partition("\n")[0].removeprefix("Raised when "))
        for kind in kinds
    ]
    unforeseen = (errors.DkrrError.exit_code, "", "something unforeseen; --verbose shows the traceback")
    return [(0, "", "done"), unforeseen, *sorted(rows)]


@main.command("doctor")
@click.option("--env", is_flag=True, help="Print only what to export for workers that others start.")
@click.option("--folder", default=".", type=click.Path(exists=True, file_okay=False), help="Where to measure the disk.")
@json_option
def doctor_command(env: bool, folder: str, as_json: bool) -> None:
    """Show CPU, BLAS, speed of arithmetic and disk, free memory and disk, and versions on this machine."""
    if env:
        from dkrr.engine.machine import environment_lines

        click.echo("\n".join(environment_lines()))
        return
    from dkrr.engine.machine import machine_report

    report = machine_report(folder)
    show(as_json, report, _machine_facts(report))
    if report["self_test_failures"]:
        raise errors.NumericalError(
            f"BLAS computes wrong numbers here: {'; '.join(report['self_test_failures'])}",
            hint="install another build of NumPy and SciPy, or unset OPENBLAS_CORETYPE",
        )


def _machine_facts(report: dict[str, Any]) -> list[tuple[str, object]]:
    speed = report["speed"]
    double, single = speed["gemm_flops_per_second_float64"] / 1e9, speed["gemm_flops_per_second_float32"] / 1e9
    free, total = size(report["free_memory_bytes"]), size(report["total_memory_bytes"])
    write, read = size(speed["disk_write_bytes_per_second"]), size(speed["disk_read_bytes_per_second"])
    libraries = [
        f"{item['internal_api']} {item.get('version')}, kernel {item.get('architecture') or 'unknown'}, "
        f"{item.get('num_threads')} threads here"
        for item in report["blas"]
    ]
    return [
        ("CPU", f"{report['cpu']}, {report['num_cpus']} usable, AVX-512 {'yes' if report['has_avx512'] else 'no'}"),
        *(("BLAS", library) for library in libraries),
        ("self-test", "passed" if not report["self_test_failures"] else "FAILED"),
        ("workers get", " ".join(f"{name}={value}" for name, value in sorted(report["worker_environment"].items()))),
        ("gemm, one thread", f"{double:.1f} GF/s float64, {single:.1f} GF/s float32"),
        ("rbf, one thread", f"{speed['kernel_entry_seconds'] * 1e9:.2f} ns an entry (10 features)"),
        ("memory", f"{free} free of {total}"),
        ("disk", f"{size(report['free_disk_bytes'])} free in {report['folder']}"),
        ("disk speed", f"write {write}/s, read {read}/s"),
        ("versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())),
    ]
