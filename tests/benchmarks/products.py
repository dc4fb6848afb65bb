"""``python -m tests.benchmarks.products``: one product k(X, X) v side by side, every contender in a process of its own.

All contenders get the same rows and the same v and use all cores; what they compile or set up before a first product is
left out, as is the import. A figure is the median of a contender's turns, a turn the fastest of three products. KeOps
and torch come with the extra ``bench``; without them their rows say so.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from tests.benchmarks.harness import Contender, Problem, Run, run_once

__all__ = ["CONTENDERS", "LAPLACIAN", "RBF", "ProductRow", "compare", "product_table"]

MODULE = "tests.benchmarks.products"
TILE_SIZE = 5000
TORCH_ROWS = 1024
RBF = Problem(n=20_000, d=10, gamma=0.05)
LAPLACIAN = Problem(n=10_000, d=20, gamma=0.05)
# relative to |K v| in the 2-norm, against dkrr in float64
MAX_ERROR = {"float32": 1e-4, "float64": 1e-9}
ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


def _contender(name: str, function: str, precision: str, environment: dict[str, str] | None = None) -> Contender:
    return Contender(
        name=f"{name} {precision}",
        family=name,
        function=f"{MODULE}:{function}",
        environment=environment or {},
        overrides={"precision": precision},
    )


CONTENDERS: dict[str, list[Contender]] = {
    "rbf": [
        # the first one is what the answers of all others are compared with
        *(_contender("dkrr", "dkrr_rbf", precision, ONE_BLAS_THREAD) for precision in ("float64", "float32")),
        *(_contender("pykeops", "keops_rbf", precision) for precision in ("float64", "float32")),
        *(_contender("torch", "torch_rbf", precision) for precision in ("float64", "float32")),
    ],
    "laplacian": [
        _contender("dkrr", "dkrr_laplacian", "float64", ONE_BLAS_THREAD),
        _contender("sklearn", "sklearn_laplacian", "float64"),
    ],
}

TIMED_SECONDS = 1.0


def _problem(folder: str) -> tuple[Any, Any]:
    return np.load(Path(folder) / "X.npy"), np.load(Path(folder) / "y.npy")


def _timed(product: Callable[[], Any]) -> dict[str, Any]:
    """The best of at least three calls and a second: a call of 60 ms is soon disturbed by other programs."""
    answer, seconds = product(), []
    while len(seconds) < 3 or sum(seconds) < TIMED_SECONDS:
        began = time.perf_counter()
        answer = product()
        seconds.append(time.perf_counter() - began)
    return {"answer": answer, "seconds": min(seconds)}


def symmetric_product(kernel: Any, x: Any, v: Any, precision: str, threads: int) -> Any:
    """k(X, X) V (n, t) from the lower tiles, each used twice; a thread takes the next one and adds to its own sum.

    As a fit does it: with tiles dealt out beforehand the slower core decides, 0.148 against 0.114 s where one was busy.
    """
    from dkrr.linalg.products import kernel_product

    spans = [slice(start, start + TILE_SIZE) for start in range(0, len(x), TILE_SIZE)]
    pairs = iter([(rows, columns) for i, rows in enumerate(spans) for columns in spans[: i + 1]])

    def part(_: int) -> Any:
        total = np.zeros_like(v)
        for rows, columns in pairs:
            if rows == columns:
                kernel_product(kernel, x[rows], x[rows], v[rows], total[rows], same=True, precision=precision)  # type: ignore[arg-type]
            else:
                out, out_t = total[rows], total[columns]
                kernel_product(
                    kernel,
                    x[rows],
                    x[columns],
                    v[columns],
                    out,
                    u=v[rows],
                    out_t=out_t,
                    precision=precision,  # type: ignore[arg-type]
                )
        return total

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(part, range(threads)))


def _dkrr(folder: str, gamma: float, precision: str, kernel: str) -> dict[str, Any]:
    from dkrr.engine.machine import cpu_count
    from dkrr.kernels import make_kernel

    x, v = _problem(folder)
    x = x - x.mean(axis=0)
    resolved = make_kernel(kernel, gamma=gamma).resolve(x.shape[1])
    return _timed(lambda: symmetric_product(resolved, x, v[:, None], precision, cpu_count())[:, 0])


def dkrr_rbf(*, folder: str, gamma: float, precision: str, **_: Any) -> dict[str, Any]:
    """:func:`dkrr.linalg.products.kernel_product` on tile pairs, one thread a core."""
    return _dkrr(folder, gamma, precision, "rbf")


def dkrr_laplacian(*, folder: str, gamma: float, precision: str, **_: Any) -> dict[str, Any]:
    """The same with the 1-norm."""
    return _dkrr(folder, gamma, precision, "laplacian")


def sklearn_laplacian(*, folder: str, gamma: float, **_: Any) -> dict[str, Any]:
    """``laplacian_kernel(X, X) @ v``, in blocks of rows that fit into memory."""
    from sklearn.metrics.pairwise import laplacian_kernel

    x, v = _problem(folder)
    spans = [slice(start, start + TILE_SIZE) for start in range(0, len(x), TILE_SIZE)]
    return _timed(lambda: np.concatenate([laplacian_kernel(x[rows], x, gamma=gamma) @ v for rows in spans]))


def keops_rbf(*, folder: str, gamma: float, precision: str, **_: Any) -> dict[str, Any]:
    """``pykeops.numpy.LazyTensor`` on the CPU, all cores by OpenMP."""
    from pykeops.numpy import LazyTensor

    x, v = (np.ascontiguousarray(array, dtype=precision) for array in _problem(folder))
    left, right = LazyTensor(x[:, None, :]), LazyTensor(x[None, :, :])
    factor = np.array([-gamma], dtype=precision)

    def product() -> Any:
        return ((((left - right) ** 2).sum(-1) * factor).exp() @ v[:, None])[:, 0]

    return _timed(product)


def torch_rbf(*, folder: str, gamma: float, precision: str, **_: Any) -> dict[str, Any]:
    """torch in blocks of rows: one augmented product for the exponent, exp in place, times v; all cores."""
    import torch

    x, v = (torch.as_tensor(array.astype(precision)) for array in _problem(folder))
    squares = (x * x).sum(1, keepdim=True)
    ones = torch.ones_like(squares)
    left = torch.cat([2 * gamma * x, -gamma * squares, ones], 1)
    right = torch.cat([x, ones, -gamma * squares], 1).T.contiguous()
    block = torch.empty((TORCH_ROWS, len(x)), dtype=x.dtype)

    def product() -> Any:
        out = torch.empty_like(v)
        for start in range(0, len(x), TORCH_ROWS):
            rows = left[start : start + TORCH_ROWS]
            values = torch.mm(rows, right, out=block[: len(rows)]).exp_()
            out[start : start + TORCH_ROWS] = values @ v
        return out.numpy()

    return _timed(product)


@dataclass
class ProductRow:
    """One contender's turns."""

    contender: Contender
    status: str = "ok"
    seconds: list[float] = field(default_factory=list)
    error: float | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.status == "ok" else None


def compare(
    kind: str, problem: Problem, repeats: int, folder: Path, *, only: tuple[str, ...] = ()
) -> dict[str, ProductRow]:
    """Contenders (of some families) take turns; one that is missing, fails or computes something else has no time."""
    problem.write(folder)
    rows = {one.name: ProductRow(one) for one in CONTENDERS[kind] if not only or one.family in only}
    reference: Any = None
    for _ in range(repeats):
        for row in rows.values():
            if row.status != "ok":
                continue
            if importlib.util.find_spec(row.contender.family) is None:
                row.status = f"not installed: pip install {row.contender.family}, or the extra bench"
                continue
            run: Run = run_once(row.contender, problem, folder)
            row.status = run.status
            if run.status != "ok":
                continue
            reference = run.answer if reference is None else reference
            row.error = float(np.linalg.norm(run.answer - reference) / np.linalg.norm(reference))
            if not row.error < MAX_ERROR[row.contender.overrides["precision"]]:
                row.status = f"rejected: answers differ by {row.error:.1e}"
            row.seconds.append(run.seconds)
    return rows


def product_table(kind: str, problem: Problem, rows: dict[str, ProductRow]) -> Table:
    """Seconds, nanoseconds an entry of the full matrix, and the ratio to dkrr in the same precision."""
    table = Table(
        title=f"k(X, X) v: {kind}, n = {problem.n:,}, d = {problem.d}, gamma {problem.gamma:g}",
        caption="ns: wall time over n^2; error: against dkrr in float64",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("contender", "s", "ns", "time / dkrr", "error"):
        table.add_column(name, justify="left" if name == "contender" else "right")
    for name, row in rows.items():
        if row.median is None:
            table.add_row(name, f"[bold]{row.status}[/bold]", "", "", "")
            continue
        ratio = ratio_to_dkrr(rows, name)
        shown = "-" if ratio is None else f"{ratio:.1f}"
        table.add_row(name, f"{row.median:.3f}", f"{row.median / problem.n**2 * 1e9:.3f}", shown, f"{row.error:.0e}")
    return table


def ratio_to_dkrr(rows: dict[str, ProductRow], name: str) -> float | None:
    """A contender's time over that of dkrr in the same precision."""
    own, other = rows[f"dkrr {rows[name].contender.overrides['precision']}"].median, rows[name].median
    return None if own is None or other is None else other / own


@click.command()
@click.option("--n", type=int, help="Rows; 20,000 for rbf and 10,000 for laplacian by default.")
@click.option("--repeats", default=3, show_default=True, help="Turns of every contender.")
@click.option("--only", type=click.Choice(list(CONTENDERS)), help="One kernel.")
def main(n: int | None, repeats: int, only: str | None) -> None:
    """Measure products with a kernel side by side."""
    failed = False
    for kind, problem in (("rbf", RBF), ("laplacian", LAPLACIAN)):
        if only not in (None, kind):
            continue
        chosen = problem if n is None else Problem(n=n, d=problem.d, gamma=problem.gamma)
        with tempfile.TemporaryDirectory(prefix="dkrr-products-") as name:
            rows = compare(kind, chosen, repeats, Path(name))
        Console(width=None if sys.stdout.isatty() else 150).print(product_table(kind, chosen, rows))
        failed = failed or any(row.status.startswith(("rejected", "failed", "crashed")) for row in rows.values())
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
