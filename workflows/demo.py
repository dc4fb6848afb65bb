"""Fit the jobs of this folder, show what each took and how good it is, and leave nothing behind.

    python workflows/demo.py [--folder FOLDER] [JOB.toml ...]

Without jobs: digits.toml, then large.toml. Everything is written to a new folder below FOLDER (default: the project's
own; not /tmp, which may be memory), and the folder is removed at the end, also after an error, Ctrl-C, SIGTERM or a
terminal that closes. Progress goes to stderr, the table to stdout. Exit codes are those of `dkrr fit`; an interrupted
demonstration ends with 130.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dkrr.jobs.plan import Plan
    from dkrr.jobs.run import FitSummary
    from dkrr.jobs.spec import JobSpec

HERE = Path(__file__).resolve().parent
JOBS = (HERE / "digits.toml", HERE / "large.toml")
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; the exit code."""
    parser = argparse.ArgumentParser(description="Fit the demonstration jobs and remove everything they wrote.")
    parser.add_argument("jobs", nargs="*", type=Path, default=JOBS, metavar="JOB", help="job files (default: both)")
    parser.add_argument("--folder", type=Path, default=HERE.parent, help="where to write (default: the project)")
    options = parser.parse_args(arguments)
    if len({job.name for job in options.jobs}) < len(options.jobs):
        parser.error("two jobs of one name")
    say("loading dkrr")
    from dkrr.errors import DkrrError

    try:
        with signals_interrupt(), temporary_folder(options.folder) as folder:
            summaries = run([Path(shutil.copy(job, folder)) for job in options.jobs], folder)
    except KeyboardInterrupt:
        say("interrupted; everything that was written is removed again")
        return INTERRUPTED
    except DkrrError as error:
        say(f"error: {error.message}")
        say(f"hint: {error.hint}" if error.hint else "everything that was written is removed again")
        return error.exit_code
    show(table(summaries))
    return 0


def run(jobs: Sequence[Path], folder: Path) -> dict[str, FitSummary]:
    """Plan all jobs, refuse what cannot fit before anything starts, then fit them one after the other."""
    from dkrr.cli.runs import ProgressDisplay
    from dkrr.jobs.run import fit_job
    from dkrr.jobs.spec import JobSpec

    specs = {job.stem: JobSpec.load(job) for job in jobs}
    check_disk(specs, folder)
    summaries = {}
    for number, (name, spec) in enumerate(specs.items(), 1):
        say(f"[{number}/{len(specs)}] dkrr fit {name}.toml")
        with ProgressDisplay() as progress:
            summaries[name] = fit_job(spec, progress=progress)
    return summaries


def check_disk(specs: dict[str, JobSpec], folder: Path) -> None:
    """Say what the jobs will write and what there is.

    Raises
    ------
    PlanRefusedError
        A job alone, or all together, do not fit.
    """
    from dkrr.errors import PlanRefusedError
    from dkrr.jobs.plan import plan

    plans = [plan(spec) for spec in specs.values()]
    needed = sum(each.disk_needed_bytes for each in plans)
    free = shutil.disk_usage(folder).free
    say(f"disk: {gigabytes(needed)} needed for a while in {folder.parent}, {gigabytes(free)} free")
    for each in plans:
        each.check()
    if needed > free:
        raise PlanRefusedError(
            f"the jobs write {gigabytes(needed)}, {gigabytes(free)} are free in {folder.parent}",
            hint="free some, or give another disk with --folder",
        )


def table(summaries: dict[str, FitSummary]) -> Any:
    """One column a job."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, title="exact kernel ridge regression, out of core", title_style="bold")
    result.add_column("", style="cyan", no_wrap=True)
    for name in summaries:
        result.add_column(f"{name}.toml", no_wrap=True)
    columns = [facts(summary) for summary in summaries.values()]
    for label in columns[0]:
        result.add_row(label, *(column[label] for column in columns))
    return result


def facts(summary: FitSummary) -> dict[str, str]:
    """What a person wants to know about a fit."""
    plan, seconds = summary.plan, summary.seconds
    peak = max(summary.peak_rss_bytes.values())
    limit = "" if plan.memory_limit_bytes is None else f" x {plan.memory_limit_bytes / 2**30:g} GiB"
    return {
        "training rows": f"{plan.num_rows:,} x {plan.num_features}, {count(plan.num_targets, 'target')}",
        "kernel": f"{plan.kernel['kernel']}, gamma {plan.kernel['gamma']:g}",
        "ridge alpha": f"{plan.alpha[0]:g}",
        "Gram matrix": gigabytes(8 * plan.num_rows**2),
        "tiles on disk": on_disk(plan),
        "workers": f"{plan.workers}{limit}",
        "peak worker memory": gigabytes(peak),
        "start of workers": f"{seconds['start']:.1f} s",
        "factorisation": factorisation(summary),
        "whole fit": f"{seconds['total']:.1f} s",
        "relative residual": f"{max(summary.relative_residual):.1e}",
        "held-out rows": "none" if summary.score is None else f"{summary.score.num_rows:,}",
        "held-out score": f"[bold]{score(summary)}[/bold]",
        "without a model": guess(summary),
    }


def factorisation(summary: FitSummary) -> str:
    """Its time and rate; a job may do without."""
    if "factorise" not in summary.seconds:
        return f"none: {summary.num_iterations} iterations"
    return f"{summary.seconds['factorise']:.1f} s, {summary.flops_per_second / 1e9:.0f} GF/s"


def on_disk(plan: Plan) -> str:
    """Size of the matrices that the job writes, and which they are."""
    labels = {"gram": "Gram", "factor": "factor", "preconditioner": "preconditioner", "centres": "centres"}
    sizes = {name: plan.disk_bytes.get(name, 0) for name in labels}
    names = " + ".join(labels[name] for name, size in sizes.items() if size)
    return f"{gigabytes(sum(sizes.values()))} ({names})"


def score(summary: FitSummary) -> str:
    """The score on the held-out rows, and which it is."""
    if summary.score is None:
        return "none"
    value = summary.score.value(summary.metric)
    text = f"{100 * value:.2f} %" if summary.metric == "accuracy" else f"{value:.4g}"
    return f"{summary.metric} {text}"


def guess(summary: FitSummary) -> str:
    """The same score of who knows no features: of the mean of each target, or of any class."""
    if summary.score is None:
        return "none"
    if summary.metric == "accuracy":
        return f"accuracy {100 / summary.plan.num_targets:.2f} %, by guessing"
    if summary.metric == "r2":
        return "r2 0, by the mean"
    spread = [error / (1 - r2) ** 0.5 for error, r2 in zip(summary.score.rmse, summary.score.r2, strict=True) if r2 < 1]
    return f"rmse {sum(spread) / max(1, len(spread)):.4g}, by the mean"


def count(number: int, noun: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def gigabytes(num_bytes: float) -> str:
    """A size in powers of ten, as disks are sold."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def say(text: str) -> None:
    """A line on stderr, now."""
    print(text, file=sys.stderr, flush=True)


def show(result: Any) -> None:
    """Print the table, without the empty lines around it."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 80)
    with console.capture() as capture:
        console.print(result)
    print(capture.get().strip("\n").rstrip(), flush=True)


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A new folder that exists while the block runs."""
    folder = Path(tempfile.mkdtemp(prefix=".demo-", dir=parent.resolve()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into KeyboardInterrupt; later ones must not disturb the cleaning up."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(*_: Any) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
