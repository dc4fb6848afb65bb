"""Commands that look at what is there: ``info``, ``doctor`` and ``gc``; and ``help`` on files and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from dkrr import errors
from dkrr.cli.errors import Command
from dkrr.cli.output import print_facts, print_json, print_table
from dkrr.jobs.report.words import kernel_words, size

if TYPE_CHECKING:
    from dkrr.engine.machine import MachineReport
    from dkrr.jobs.garbage import Garbage

__all__ = ["doctor_command", "gc_command", "help_command", "info_command"]

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")


@click.command("help", cls=Command)
@click.argument("topic", required=False, type=click.Choice(["job", "retrain", "exit-codes"]))
@click.pass_context
def help_command(context: click.Context, topic: str | None) -> None:
    """List the keys of a job file, those of RETRAIN.toml, or the exit codes; without a TOPIC the commands."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    def show(title: str, rows: Iterable[Iterable[object]], *headers: str) -> None:
        table = Table(*headers, title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
        for row in rows:
            table.add_row(*(Text(str(cell)) for cell in row))
        print_table(table)

    if topic is None:
        click.echo((context.parent or context).get_help())
    elif topic == "exit-codes":
        show("exit codes", exit_codes(), "code", "error", "when")
    else:
        from dkrr.jobs.retrain.spec import RetrainSpec
        from dkrr.jobs.spec import JobSpec

        for name, table in (JobSpec if topic == "job" else RetrainSpec).tables().items():
            if name == "job":
                click.echo("and the tables of a job: `dkrr help job` lists their keys")
                continue
            what = (table.__doc__ or "").partition("\n")[0].partition(": ")[2].replace("``", "")
            show(f"[{name}]  {what}", table.described_keys(), "key", "values", "default", "means")


def exit_codes() -> list[tuple[int, str, str]]:
    """Every exit code with the error that ends with it, and when that is raised."""
    kinds = sorted((getattr(errors, name) for name in errors.__all__), key=lambda kind: (kind.exit_code, kind.__name__))
    lines = [((kind.__doc__ or "").partition("\n")[0].removeprefix("Raised when "), kind) for kind in kinds]
    unforeseen = (errors.DkrrError.exit_code, "", "something unforeseen; --verbose shows the traceback")
    listed = [(kind.exit_code, kind.__name__, line) for line, kind in lines if kind is not errors.DkrrError]
    return [(0, "", "done"), unforeseen, *listed]


@click.command("info", cls=Command)
@click.argument("path")
@click.option("--verify", "whole", is_flag=True, help="Read everything and compare it with its checksums.")
@json_option
def info_command(path: str, whole: bool, as_json: bool) -> None:
    """Say what PATH is (data set, model, Gram matrix, factor, run); with --verify, whether it is whole."""
    from dkrr.errors import StoreError
    from dkrr.jobs.inspection import describe, verify

    found = describe(path)
    problems = verify(path) if whole else []
    if as_json:
        document = {"kind": found.kind, "path": found.path, **found.facts}
        print_json({**document, "problems": problems} if whole else document)
    else:
        facts = {name: kernel_words(value) if name == "kernel" else value for name, value in found.facts.items()}
        print_facts(facts.items(), title=f"{found.kind} {found.path}")
        for problem in problems:
            click.echo(f"  problem: {problem}")
        if whole and not problems:
            click.echo("  verified: everything is there and unchanged")
    if problems:
        raise StoreError(
            f"{found.path} has {len(problems)} problem{'s' if len(problems) > 1 else ''}",
            hint="delete what is damaged and start the job again, or restore it",
        )


@click.command("gc", cls=Command)
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
    total = sum(item.num_bytes for item in items)
    if not items:
        click.echo("nothing to delete")
    elif yes or (sys.stdin.isatty() and click.confirm(f"delete {size(total)}?", err=True)):
        freed, kept = delete_garbage(items, look)
        click.echo(f"deleted {size(freed)}")
        for item in kept:
            click.echo(f"      kept  {item.location}  ({item.reason})")
    else:
        click.echo(f"{size(total)} can be deleted with --yes")


def _store(path: str) -> tuple[str, list[str]]:
    """The store that a path or address means, and the run of a job file, if it is there."""
    from dkrr.store.files import children, join

    if path.endswith(".toml"):
        from dkrr.jobs.claim import run_id
        from dkrr.jobs.spec import JobSpec

        job = JobSpec.load(path)
        run = job.output.run_directory(run_id(job))
        return job.output.store_directory(run_id(job)), [run] if children(run) else []
    return (join(path, "store") if "store" in children(path) else path), []


@click.command("doctor", cls=Command)
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
    from dkrr.errors import NumericalError

    report = machine_report(folder)
    if as_json:
        print_json(report.to_dict())
    else:
        print_facts(_machine_facts(report))
    if report.self_test_failures:
        raise NumericalError(
            f"BLAS computes wrong numbers here: {'; '.join(report.self_test_failures)}",
            hint="install another build of NumPy and SciPy, or unset OPENBLAS_CORETYPE",
        )


def _machine_facts(report: MachineReport) -> Iterator[tuple[str, object]]:
    yield "CPU", f"{report.cpu}, {report.num_cpus} usable, AVX-512 {'yes' if report.has_avx512 else 'no'}"
    for library in report.blas:
        kernel, threads = library.get("architecture") or "unknown", library.get("num_threads")
        yield "BLAS", f"{library['internal_api']} {library.get('version')}, kernel {kernel}, {threads} threads here"
    yield "self-test", "passed" if not report.self_test_failures else "FAILED"
    yield "workers get", " ".join(f"{name}={value}" for name, value in sorted(report.worker_environment.items()))
    speed = report.speed
    double, single = speed.gemm_flops_per_second_float64 / 1e9, speed.gemm_flops_per_second_float32 / 1e9
    yield "gemm, one thread", f"{double:.1f} GF/s float64, {single:.1f} GF/s float32"
    yield "rbf, one thread", f"{speed.kernel_entry_seconds * 1e9:.2f} ns an entry (10 features)"
    free, total = size(report.free_memory_bytes), size(report.total_memory_bytes)
    yield "memory", f"{free} free of {total}"
    yield "disk", f"{size(report.free_disk_bytes)} free in {report.folder}"
    write, read = size(speed.disk_write_bytes_per_second), size(speed.disk_read_bytes_per_second)
    yield "disk speed", f"write {write}/s, read {read}/s"
    yield "versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())
