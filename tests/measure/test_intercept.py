"""An intercept with weights: ones are predicted as one for any alpha, and what it costs besides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr import KernelRidge, ingest
from dkrr.engine.tasks import InProcessExecutor
from dkrr.fit.fitting import FitSettings, fit_rows
from dkrr.kernels import make_kernel
from dkrr.linalg.solution import IterativeSettings
from dkrr.linalg.workspace import Workspace
from tests.measure.figures import Judge, scaled

pytestmark = [pytest.mark.measure, pytest.mark.timeout(1800)]

ALPHAS = (1e-6, 1e-3, 1.0, 1e3, 1e6)
UNCONVERGED = {"allow_unconverged": True}
WAYS: dict[str, dict[str, Any]] = {
    "in memory, float64": {},
    "tiles, float64": {"tile_size": 256},
    "tiles, mixed": {"tile_size": 256, "precision": "mixed", "solver_params": UNCONVERGED},
    "cg": {"solver": "cg", "solver_params": UNCONVERGED},
    "cg, mixed": {"solver": "cg", "precision": "mixed", "solver_params": UNCONVERGED},
    "nystrom": {"solver": "nystrom", "solver_params": {"num_centers": 200} | UNCONVERGED},
}


def test_measure_intercept_of_ones(judge: Judge) -> None:
    n = scaled(1_500)
    rng = np.random.default_rng(0)
    x, z = rng.standard_normal((n, 5)), 3 * rng.standard_normal((200, 5))
    weight = 10.0 ** rng.uniform(-3, 3, n) * (np.arange(n) % 7 > 0)
    # alone it has nothing to solve for; the other target makes the solvers work
    y = np.column_stack([np.ones(n), np.sin(x[:, 0]) + 50])
    worst: dict[str, float] = {}
    for way, options in WAYS.items():
        for alpha in ALPHAS:
            est = KernelRidge(
                alpha=alpha, kernel="rbf", gamma=0.5, fit_intercept=True, tol=1e-6, max_iter=200, **options
            )
            found = est.fit(x, y, sample_weight=weight).predict(z)
            worst[way] = max(worst.get(way, 0.0), float(np.abs(found[:, 0] - 1).max()))
    judge(
        "intercept: y = 1",
        ", ".join(f"{way} {error:.1e}" for way, error in worst.items()),
        f"n = {n:,}, weights of 1e-3 to 1e3 and 0, alpha from {ALPHAS[0]:g} to {ALPHAS[-1]:g}: |f - 1| at most 1e-10",
        max(worst.values()) <= 1e-10,
    )


def test_measure_intercept_iterations(judge: Judge, folder: Path) -> None:
    n = scaled(6_000)
    data = ingest(f"generate:friedman?n={n}&d=10&seed=0", folder / "rows.zarr")
    assert data.y is not None
    y = data.y.read(0, n)
    # a tolerance relative to y less its mean, as it is with an intercept
    data = ingest(data.X.read(0, n), folder / "centred.zarr", y=y - y.mean(axis=0))
    kernel = make_kernel("rbf", gamma=0.05).resolve(10)
    counts: dict[bool, tuple[int, float]] = {}
    for fit_intercept in (False, True):
        settings = FitSettings(
            kernel=kernel,
            alpha=(0.1,),
            tile_size=512,
            solver="cg",
            iterative=IterativeSettings(tol=1e-8, rank=300),
            fit_intercept=fit_intercept,
        )
        work = Workspace(store=str(folder / f"store-{fit_intercept}"), executor=InProcessExecutor(), blas="measure")
        with fit_rows(data, settings, work) as result:
            solution = result.solution
        counts[fit_intercept] = solution.num_iterations, max(solution.relative_residual)
    judge(
        "intercept: iterations of cg",
        f"{counts[True][0]} with (relative residual {counts[True][1]:.1e}), {counts[False][0]} without",
        f"n = {n:,}, d = 10, tol = 1e-8, one target: at most two more than without, tol reached",
        counts[True][0] <= counts[False][0] + 2 and counts[True][1] <= 1.01e-8,
    )
