"""``python -m tests.benchmarks.schedule``: what the simulation expects of more workers, as a table in Markdown.

Nominal cores (60 GF/s each), a store that all of them read and write as fast as one machine does its own files, float64
tiles of a kernel that is evaluated on the fly. A few seconds for 100,000 rows, half a minute for 1,000,000.
"""

from __future__ import annotations

from dkrr.fit.rates import TileSeconds, choose_split, choose_tiles, nominal_machine, simulate
from dkrr.linalg.direct import Split
from dkrr.linalg.workspace import choose_tile_size
from dkrr.tiles import TileGrid

ROWS, WORKERS = (100_000, 1_000_000), (8, 32, 100, 400)


def duration(seconds: float) -> str:
    """Seconds below ten minutes, minutes below two hours, else hours."""
    if seconds < 600:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.0f} h"


def row(n: int, workers: int) -> list[str]:
    """Rows, workers, tile edge and count, last terms, messages, time, efficiency, efficiency without a split."""
    way = ("float64", "on_the_fly")
    usual = choose_tile_size(n, 10, None, 8, workers)
    b = choose_tiles(n, 10, None, workers, *way, usual)
    grid, split = TileGrid(n, b), choose_split(n, b, workers, *way)
    seconds = TileSeconds.of(nominal_machine(workers), b, *way)
    found, plain = simulate(grid, split, workers, seconds), simulate(grid, Split(), workers, seconds)
    where = "all" if split.num_columns >= grid.num_tiles else f"last {split.num_columns}"
    return [
        f"{n:,}",
        f"{workers}",
        f"{b:,}",
        f"{grid.num_tiles}",
        f"{where}, w = {split.num_last}" if split.num_columns else "none",
        duration(found.seconds),
        f"{found.efficiency:.0%}",
        f"{plain.efficiency:.0%}",
    ]


def table(rows: tuple[int, ...] = ROWS, workers: tuple[int, ...] = WORKERS) -> list[str]:
    """Lines of Markdown."""
    head = ["rows", "workers", "tile b", "tiles a side", "columns split", "time", "efficiency", "without a split"]
    lines = [head, ["---:"] * 4 + ["---"] + ["---:"] * 3, *(row(n, count) for n in rows for count in workers)]
    return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
    print(*table(), sep="\n")
