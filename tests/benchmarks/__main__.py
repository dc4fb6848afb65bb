"""``python -m tests.benchmarks``: tables of ratios, every contender measured in this run on an equal problem.

At the default size (n = 20,480, factorisation at 24,576, three turns) it takes about 20 minutes on two cores, up to
25 GB of disk (Dask spills) and most of 24 GB of memory. Products compare k(X, X) v, from what is compiled on; KeOps and
torch come with the extra ``bench``. Ends with status 1 when a contender computed something else.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tests.benchmarks.contenders import FACTORISATION, LAPLACIAN, PRODUCTS, RBF, contenders
from tests.benchmarks.harness import Problem, Run, fastest, figures, machine, run_in_turns, run_once, table

__all__ = ["factorisation_table", "fit_table", "product_runs", "product_table", "ratio_to_dkrr"]

MEMORY_NOTE = (
    "peak memory: the largest sum of RSS over the whole process tree (for dkrr and Dask: client, scheduler, nannies, "
    "workers), mapped pages counted, unmapped page cache not"
)
TIME_NOTE = "fit: wall time of the call, with start and end of the cluster; start: the cluster's share of it"


def fit_table(problem: Problem, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Fit time and peak memory; ratios are dkrr's figure over the contender's."""
    own, best = rows.get(fastest(rows, "dkrr") or ""), fastest(rows, "sklearn")

    def ratio(name: str) -> Callable[[Mapping[str, Any]], Any]:
        return lambda row: None if own is None or row["family"] == "dkrr" else own[name] / row[name]

    return table(
        f"fit: n = {problem.n:,}, d = {problem.d}, rbf gamma {problem.gamma:g}, alpha {problem.alpha:g}, float64",
        f"the fastest scikit-learn that ran: {best}\n{TIME_NOTE}\n{MEMORY_NOTE}",
        rows,
        {
            "fit s": lambda row: row["seconds"],
            "range s": lambda row: f"{min(row['all_seconds']):.2f}..{max(row['all_seconds']):.2f}",
            "start s": lambda row: row["start_seconds"],
            "peak GB": lambda row: row["peak_bytes"] / 1e9,
            "dkrr / time": ratio("seconds"),
            "dkrr / memory": ratio("peak_bytes"),
            "answers differ": lambda row: row["difference"],
            "BLAS": lambda row: row["facts"][0]["blas"],
        },
    )


def factorisation_table(n: int, runs: list[Run]) -> Table:
    """Rates of factorisation and gemm, one row a run."""

    def rate(name: str) -> Callable[[Mapping[str, Any]], float]:
        return lambda run: float(run[name]) / 1e9

    return table(
        f"factorisation: n = {n:,}, float64",
        "GF/s: n^3/3 over wall time; gemm: C -= A B^T at the tile's edge on the same workers at once",
        {f"run {k}": {"status": run.status, **run.facts} for k, run in enumerate(runs)},
        {
            "tile": lambda run: f"{run['tile_size']:,}",
            "Gram": lambda run: run["gram"],
            "s": lambda run: run["seconds"],
            "GF/s": rate("flops_per_second"),
            "gemm before": rate("gemm_before"),
            "gemm after": rate("gemm_after"),
            "ratio": lambda run: run["ratio"],
            "BLAS": lambda run: run["blas"],
        },
    )


def product_runs(kind: str, problem: Problem, repeats: int, folder: Path, only: tuple[str, ...] = ()) -> list[Run]:
    """Turns of the contenders (of some families) that are installed; the others have their status alone."""
    chosen = [one for one in PRODUCTS[kind] if not only or one.family in only]
    there = [one for one in chosen if importlib.util.find_spec(one.family) is not None]
    missing = [one for one in chosen if one not in there]
    runs = run_in_turns(problem, there * repeats, folder, reference="dkrr")
    return runs + [Run(one, f"not installed: pip install {one.family}, or the extra bench", {}) for one in missing]


def ratio_to_dkrr(rows: Mapping[str, Mapping[str, Any]], name: str) -> float | None:
    """A contender's time over that of dkrr in the same precision."""
    own, other = rows[f"dkrr {name.rpartition(' ')[2]}"]["seconds"], rows[name]["seconds"]
    return None if own is None or other is None else other / own


def product_table(kind: str, problem: Problem, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Seconds, nanoseconds an entry of the full matrix, and the ratio to dkrr in the same precision."""
    named = {name: {**row, "ratio": ratio_to_dkrr(rows, name)} for name, row in rows.items()}
    return table(
        f"k(X, X) v: {kind}, n = {problem.n:,}, d = {problem.d}, gamma {problem.gamma:g}",
        "ns: wall time over n^2; error: against dkrr in float64",
        named,
        {
            "s": lambda row: row["seconds"],
            "ns": lambda row: row["seconds"] / problem.n**2 * 1e9,
            "time / dkrr": lambda row: row["ratio"],
            "error": lambda row: row["difference"],
        },
    )


@click.command()
@click.option("--n", default=20480, show_default=True, help="Rows of the fit.")
@click.option("--d", default=10, show_default=True, help="Features.")
@click.option("--factorise-n", type=int, help="Rows of the factorisation; 1.2 n by default.")
@click.option("--repeats", default=3, show_default=True, help="Turns of every contender; figures are medians.")
@click.option("--tile-size", default="auto", show_default=True, help="dkrr's tile size.")
@click.option("--gram", type=click.Choice(["on_the_fly", "stored"]), default="on_the_fly", show_default=True)
@click.option("--only", multiple=True, help="Part of a contender's name, factorisation or products; may be repeated.")
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
    """Measure fit time, peak memory, factorisation rate and products side by side."""

    def is_wanted(name: str) -> bool:
        return not only or any(part in name for part in only)

    chosen = [one for one in contenders().values() if is_wanted(one.name)]
    if not chosen and not is_wanted("factorisation") and not is_wanted("products"):
        raise click.UsageError(f"--only {' '.join(only)} matches none of {', '.join([*contenders(), 'factorisation'])}")
    tiles = tile_size if tile_size == "auto" else int(tile_size)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(machine())
    results: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory(dir=folder, prefix="dkrr-benchmark-") as name:
        if chosen:
            problem = Problem(n=n, d=d, tile_size=tiles)
            runs = run_in_turns(problem, chosen * repeats, Path(name), say=lambda line: click.echo(line, err=True))
            results["fit"] = figures(runs)
            console.print(fit_table(problem, results["fit"]))
        if is_wanted("factorisation"):
            problem = Problem(n=factorise_n or 6 * n // 5, d=d, tile_size=tiles)
            problem.write(Path(name))
            contender = replace(FACTORISATION, overrides={"gram": gram})
            runs = [run_once(contender, problem, Path(name)) for _ in range(repeats)]
            results["factorisation"] = {f"run {k}": {"status": run.status, **run.facts} for k, run in enumerate(runs)}
            console.print(factorisation_table(problem.n, runs))
        for kind, problem in (("rbf", RBF), ("laplacian", LAPLACIAN)) if is_wanted("products") else ():
            results[kind] = figures(product_runs(kind, problem, repeats, Path(name)))
            console.print(product_table(kind, problem, results[kind]))
    if json_path is not None:
        Path(json_path).write_text(json.dumps(results, indent=1))
    rows = [row for part in results.values() if isinstance(part, dict) for row in part.values()]
    sys.exit(1 if any(row["status"].startswith(("rejected", "failed")) for row in rows) else 0)


if __name__ == "__main__":
    main()
