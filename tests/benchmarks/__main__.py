"""``python -m tests.benchmarks``: tables of ratios, every contender measured in this run on an equal problem.

At the default size (n = 20,480, factorisation at 24,576, three turns) it takes about 20 minutes on two cores, up to
25 GB of disk (Dask spills) and most of 24 GB of memory. Ends with status 1 when a contender computed something else.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console

from tests.benchmarks.harness import Contender, Problem, Run, contenders, run_in_turns, run_once
from tests.benchmarks.tables import (
    comparison_rows,
    comparison_table,
    factorisation_rows,
    factorisation_table,
    machine,
)

FACTORISATION = Contender(name="factorisation", function="tests.benchmarks.factorisation:factorisation_rate")


def say(line: str) -> None:
    click.echo(line, err=True)


def tile_option(text: str) -> int | str:
    return text if text == "auto" else int(text)


@click.command()
@click.option("--n", default=20480, show_default=True, help="Rows of the fit.")
@click.option("--d", default=10, show_default=True, help="Features.")
@click.option("--factorise-n", type=int, help="Rows of the factorisation; 1.2 n by default.")
@click.option("--repeats", default=3, show_default=True, help="Turns of every contender; figures are medians.")
@click.option("--tile-size", default="auto", show_default=True, help="dkrr's tile size.")
@click.option("--gram", type=click.Choice(["on_the_fly", "stored"]), default="on_the_fly", show_default=True)
@click.option("--only", multiple=True, help="Part of a contender's name, or factorisation; may be repeated.")
@click.option("--folder", type=click.Path(file_okay=False, exists=True), help="Where the work is done: a disk.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="File for the figures as JSON.")
def main(
    n: int,
    d: int,
    factorise_n: int | None,
    repeats: int,
    tile_size: str,
    gram: str,
    only: tuple[str, ...],
    folder: str | None,
    json_path: str | None,
) -> None:
    """Measure fit time, peak memory and factorisation rate side by side."""
    chosen = [one for one in contenders().values() if not only or any(part in one.name for part in only)]
    with_rate = not only or any(part in FACTORISATION.name for part in only)
    if not chosen and not with_rate:
        raise click.UsageError(f"--only {' '.join(only)} matches none of {', '.join([*contenders(), 'factorisation'])}")
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(machine())
    results: dict[str, object] = {"machine": machine()}
    failed = False
    with tempfile.TemporaryDirectory(dir=folder, prefix="dkrr-benchmark-") as name:
        if chosen:
            problem = Problem(n=n, d=d, tile_size=tile_option(tile_size))
            comparison = run_in_turns(problem, chosen * repeats, Path(name), say=say)
            console.print(comparison_table(comparison))
            results["fit"] = comparison_rows(comparison)
            failed = bool(comparison.rejected)
        if with_rate:
            rows = factorise_n or 6 * n // 5
            runs = factorise_in_turns(Problem(n=rows, d=d, tile_size=tile_option(tile_size)), gram, repeats, Path(name))
            console.print(factorisation_table(rows, runs))
            results["factorisation"] = factorisation_rows(runs)
            failed = failed or any(run.status != "ok" for run in runs)
    if json_path is not None:
        Path(json_path).write_text(json.dumps(results, indent=1))
    sys.exit(1 if failed else 0)


def factorise_in_turns(problem: Problem, gram: str, repeats: int, folder: Path) -> list[Run]:
    problem.write(folder)
    contender = Contender(name=FACTORISATION.name, function=FACTORISATION.function, overrides={"gram": gram})
    runs = []
    for _ in range(repeats):
        runs.append(run_once(contender, problem, folder))
        say(f"factorisation: {runs[-1].status}")
    return runs


if __name__ == "__main__":
    main()
