"""The results as tables for people, and as plain data."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from dkrr.engine.machine import cpu_count
from tests.benchmarks.harness import Comparison, Run

__all__ = ["comparison_rows", "comparison_table", "factorisation_rows", "factorisation_table", "machine"]

MEMORY_NOTE = (
    "peak memory: the largest sum of RSS over the whole process tree (for dkrr and Dask: client, scheduler, nannies, "
    "workers), mapped pages counted, unmapped page cache not"
)
TIME_NOTE = "fit: wall time of the call, with start and end of the cluster; start: the cluster's share of it"


def machine() -> str:
    """CPU, cores, versions."""
    cpu = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    names = ("numpy", "scipy", "scikit-learn", "dask", "distributed", "zarr")
    return f"{cpu}, {cpu_count()} CPUs; " + ", ".join(f"{name} {version(name)}" for name in names)


def comparison_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """One dict a contender; ratios are dkrr's figure over the contender's, None where one of them has none."""
    dkrr = comparison.fastest("dkrr")
    best = comparison.fastest("sklearn")
    own_seconds = None if dkrr is None else comparison.median_seconds(dkrr)
    own_bytes = None if dkrr is None else comparison.median_peak_bytes(dkrr)
    rows = []
    for contender in comparison.order:
        runs = comparison.good(contender)
        seconds, peak = comparison.median_seconds(contender), comparison.median_peak_bytes(contender)
        rows.append(
            {
                "contender": contender.name,
                "family": contender.family,
                "status": comparison.status(contender),
                "seconds": seconds,
                "all_seconds": [run.seconds for run in runs],
                "start_seconds": _start(runs),
                "peak_bytes": peak,
                "peak_bytes_by_kind": runs[0].peak_by_kind if runs else {},
                "time_ratio": None if own_seconds is None or seconds is None else own_seconds / seconds,
                "memory_ratio": None if own_bytes is None or peak is None else own_bytes / peak,
                "difference": max((run.difference for run in runs if run.difference is not None), default=None),
                "blas": runs[0].facts["blas"] if runs else "",
                "is_best_sklearn": contender == best,
                "facts": [run.facts for run in runs],
            }
        )
    return rows


def _start(runs: list[Run]) -> float | None:
    starts = sorted(run.facts["start_seconds"] for run in runs if "start_seconds" in run.facts)
    return starts[len(starts) // 2] if starts else None


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def comparison_table(comparison: Comparison) -> Table:
    """Fit time and peak memory, one row a contender."""
    problem = comparison.problem
    table = Table(
        title=f"fit: n = {problem.n:,}, d = {problem.d}, rbf gamma {problem.gamma:g}, alpha {problem.alpha:g}, float64",
        caption=f"{TIME_NOTE}\n{MEMORY_NOTE}",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("contender", "BLAS"):
        table.add_column(name)
    for name in ("fit s", "range s", "start s", "peak GB", "dkrr / time", "dkrr / memory", "answers differ"):
        table.add_column(name, justify="right")
    for row in comparison_rows(comparison):
        name = row["contender"] + (" *" if row["is_best_sklearn"] else "")
        if row["status"] != "ok":
            table.add_row(name, f"[bold]{row['status']}[/bold]", *["-"] * 7)
            continue
        own = row["family"] == "dkrr"
        table.add_row(
            name,
            row["blas"],
            _text(row["seconds"], ".2f"),
            f"{min(row['all_seconds']):.2f}..{max(row['all_seconds']):.2f}",
            _text(row["start_seconds"], ".2f"),
            _text(row["peak_bytes"] / 1e9, ".2f"),
            "" if own else _text(row["time_ratio"], ".2f"),
            "" if own else _text(row["memory_ratio"], ".2f"),
            _text(row["difference"], ".0e"),
        )
    if comparison.fastest("sklearn") is not None:
        table.caption = f"* the fastest scikit-learn that ran\n{table.caption}"
    return table


def factorisation_rows(runs: list[Run]) -> list[dict[str, Any]]:
    """One dict a run."""
    return [
        {"status": run.status, **run.facts}
        | ({"ratio": run.facts["flops_per_second"] / run.facts["gemm_flops_per_second"]} if run.facts else {})
        for run in runs
    ]


def factorisation_table(n: int, runs: list[Run]) -> Table:
    """Rates of factorisation and gemm, one row a run."""
    table = Table(
        title=f"factorisation: n = {n:,}, float64",
        caption="GF/s: n^3/3 over wall time; gemm: C -= A B^T at the tile's edge on the same workers at once",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("tile", "Gram", "BLAS", "s", "GF/s", "gemm before", "gemm after", "ratio"):
        table.add_column(name, justify="left" if name in ("Gram", "BLAS") else "right")
    for row in factorisation_rows(runs):
        if row["status"] != "ok":
            table.add_row("", "", f"[bold]{row['status']}[/bold]", *["-"] * 5)
            continue
        rates = (row[name] / 1e9 for name in ("flops_per_second", "gemm_before", "gemm_after"))
        table.add_row(
            f"{row['tile_size']:,}",
            row["gram"],
            row["blas"],
            f"{row['seconds']:.2f}",
            *(f"{rate:.1f}" for rate in rates),
            f"[bold]{row['ratio']:.3f}[/bold]",
        )
    return table
