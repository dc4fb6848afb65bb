"""Variances from a factor in tiles or in memory, against a dense inverse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.engine.tasks import InProcessExecutor
from dkrr.kernels import make_kernel
from dkrr.linalg.dense import DenseFactor
from dkrr.linalg.direct import CholeskySolver
from dkrr.linalg.leave_one_out import VarianceSystem, maximum_likelihood_scale
from dkrr.linalg.products import ArrayRows
from dkrr.linalg.workspace import Workspace
from tests.linalg.helpers import dense, operator, rows


def brute_force(a: np.ndarray, k: np.ndarray, own: np.ndarray, root: np.ndarray, intercept: bool) -> np.ndarray:
    """k_zz - k^T S A^-1 S k, and the border of an intercept, from the inverse; k is (n, m)."""
    inverse = np.linalg.inv(a)
    scaled = root[:, None] * k
    values = own - np.einsum("im,ij,jm->m", scaled, inverse, scaled)
    if intercept:
        values += np.square(1 - root @ inverse @ scaled) / (root @ inverse @ root)
    return values


def system(folder: Path, tile_size: int | None, **options: Any) -> tuple[VarianceSystem, np.ndarray, np.ndarray]:
    """A system of 250 rows with its dense A and S; ``tile_size`` None keeps the factor in memory."""
    intercept = options.pop("intercept", False)
    dataset = rows(folder, weights=options.pop("weights", False))
    described = operator(dataset, tile_size or 64, **options)
    n = dataset.num_rows
    root = np.ones(n) if described.root_weights() is None else described.root_weights()
    x = dataset.X.read(0, n)
    center = None if described.rows.center is None else np.array(described.rows.center)
    if tile_size is None:
        centred = x if center is None else x - center
        factor: Any = DenseFactor.of(described.kernel, centred, described.root_weights(), described.alpha)
    else:
        work = Workspace(store=folder / "store", executor=InProcessExecutor())
        factor = CholeskySolver().prepare(described, work).factor
    found = VarianceSystem(
        factor=factor,
        kernel=described.kernel,
        x=dataset.X if tile_size else ArrayRows(x),
        alpha=described.alpha,
        center=center,
        root=described.root_weights(),
        intercept=intercept,
    )
    return found, dense(described, dataset), root


@pytest.mark.parametrize("tile_size", [None, 64, 300])
@pytest.mark.parametrize(("weights", "intercept"), [(False, False), (True, False), (False, True), (True, True)])
def test_variance_is_that_of_the_dense_inverse(
    tmp_path: Path, tile_size: int | None, weights: bool, intercept: bool
) -> None:
    found, a, root = system(tmp_path, tile_size, weights=weights, intercept=intercept)
    z = np.random.default_rng(5).standard_normal((70, 4)) * 2
    x = found.x.read(0, 250)
    expected = brute_force(a, found.kernel(x, z), found.kernel.diag(z), root, intercept)
    np.testing.assert_allclose(found.variance(z), expected, rtol=0, atol=1e-11)
    assert np.ptp(expected) > 0.1


def test_blocks_of_rows_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _, _ = system(tmp_path, 64, intercept=True)
    z = np.random.default_rng(5).standard_normal((70, 4))
    whole = found.variance(z)
    monkeypatch.setattr("dkrr.linalg.leave_one_out.block_rows", lambda n: 9)
    np.testing.assert_allclose(found.variance(z), whole, rtol=1e-12)


@pytest.mark.parametrize(("weights", "intercept"), [(False, False), (True, False), (False, True), (True, True)])
def test_the_scale_maximises_the_likelihood(weights: bool, intercept: bool) -> None:
    rng = np.random.default_rng(1)
    n = 40
    x, y = rng.standard_normal((n, 2)), 100 + rng.standard_normal((n, 2))
    weight = np.where(np.arange(n) % 5, rng.uniform(0.5, 2, n), 0.0) if weights else np.ones(n)
    seen = weight > 0
    kernel, alpha = make_kernel("rbf", gamma=0.3), 0.2
    covariance = kernel(x[seen], x[seen]) + np.diag(alpha / weight[seen])
    ones, targets = np.ones((seen.sum(), 1)), y[seen]
    inverse = np.linalg.inv(covariance)
    if intercept:  # the likelihood of contrasts
        inverse -= inverse @ ones @ ones.T @ inverse / (ones.T @ inverse @ ones)
    dual_coef = np.zeros((n, 2))
    dual_coef[seen] = inverse @ targets
    found = maximum_likelihood_scale(ArrayRows(y), ArrayRows(dual_coef), int(seen.sum()), intercept=intercept)
    dof = seen.sum() - intercept  # the derivative of the likelihood in the scale is zero there
    np.testing.assert_allclose(found, np.einsum("it,ij,jt->t", targets, inverse, targets) / dof, rtol=1e-9)
