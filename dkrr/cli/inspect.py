"""Commands that look at what is there: ``info``, ``doctor`` and ``gc``; and ``help`` on files and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from dkrr import errors
from dkrr.cli.app import json_option, main, print_table, show
from dkrr.markup import kernel_words, size

if TYPE_CHECKING:
    from dkrr.jobs.garbage import Garbage

__all__: list[str] = []


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
        from dkrr.jobs.retrain.spec import RetrainSpec
        from dkrr.jobs.spec import JobSpec

        for name, table in (JobSpec if topic == "job" else RetrainSpec).tables().items():
            what = (table.__doc__ or "").partition("\n")[0].partition(": ")[2].replace("``", "")
            if name == "job":
                click.echo("and the tables of a job: `dkrr help job` lists their keys")
            else:
                _print_rows(f"[{name}]  {what}", table.described_keys(), "key", "values", "default", "means")


def _print_rows(title: str, rows: Iterable[Iterable[object]], *headers: str) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(*headers, title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    print_table(table)


def _exit_codes() -> list[tuple[int, str, str]]:
    """Every exit code with the error that ends with it, and when that is raised."""
    kinds = [getattr(errors, name) for name in errors.__all__ if name != "DkrrError"]
    rows = [
        (kind.exit_code, kind.__name__, (kind.__doc__ or "").partition("\n")[0].removeprefix("Raised when "))
        for kind in kinds
    ]
    unforeseen = (errors.DkrrError.exit_code, "", "something unforeseen; --verbose shows the traceback")
    return [(0, "", "done"), unforeseen, *sorted(rows)]


@main.command("info")
@click.argument("path")
@click.option("--verify", "whole", is_flag=True, help="Read everything and compare it with its checksums.")
@json_option
def info_command(path: str, whole: bool, as_json: bool) -> None:
    """Say what PATH is (data set, model, Gram matrix, factor, run); with --verify, whether it is whole."""
    from dkrr.jobs.inspection import describe, verify

    found, problems = describe(path), verify(path) if whole else []
    document = {"kind": found.kind, "path": found.path, **found.facts} | ({"problems": problems} if whole else {})
    facts = [(name, kernel_words(value) if name == "kernel" else value) for name, value in found.facts.items()]
    show(as_json, document, facts, title=f"{found.kind} {found.path}")
    lines = [f"problem: {problem}" for problem in problems] or ["verified: everything is there and unchanged"] * whole
    for line in lines * (not as_json):
        click.echo(f"  {line}")
    if problems:
        raise errors.StoreError(
            f"{found.path} has {len(problems)} problem{'s' if len(problems) > 1 else ''}",
            hint="delete what is damaged and start the job again, or restore it",
        )


@main.command("gc")
@click.argument("path", default="runs")
@click.option("--runs", multiple=True, help="Another folder with runs or models that use the store; repeatable.")
@click.option("--older-than", default=3600.0, metavar="SECONDS", help="Leave what changed later alone (default 3600).")
@click.option("--yes", is_flag=True, help="Delete without asking.")
def gc_command(path: str, runs: tuple[str, ...], older_than: float, yes: bool) -> None:
    """List, then delete, what no run and no model needs.

    PATH is a store, the folder that holds it, or a job file; the default is "runs". Runs, models and registries that
    used the store from elsewhere are known to it; --runs names those that were moved since. Before it is deleted each
    item is looked at again under its lock, and kept if it has changed.
    """
    from dkrr.jobs.garbage import delete_garbage, find_garbage

    store, own = _store(path)

    def look() -> list[Garbage]:
        return find_garbage(store, [*own, *runs], kept_seconds=older_than)

    items = look()
    for item in items:
        click.echo(f"{size(item.num_bytes):>10}  {item.location}  ({item.reason})")
    total = size(sum(item.num_bytes for item in items))
    if not items:
        click.echo("nothing to delete")
    elif yes or (sys.stdin.isatty() and click.confirm(f"delete {total}?", err=True)):
        freed, kept = delete_garbage(items, look)
        click.echo(f"deleted {size(freed)}")
        for item in kept:
            click.echo(f"      kept  {item.location}  ({item.reason})")
    else:
        click.echo(f"{total} can be deleted with --yes")


def _store(path: str) -> tuple[str, list[str]]:
    """The store that a path or address means, and the run of a job file, if it is there."""
    from dkrr.store.files import children, join

    if path.endswith(".toml"):
        from dkrr.jobs.spec import JobSpec

        job = JobSpec.load(path)
        return job.store, [job.directory] if children(job.directory) else []
    return (join(path, "store") if "store" in children(path) else path), []


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
