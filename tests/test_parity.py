"""The tiled path gives what scikit-learn's KernelRidge gives, and what must not matter does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from dkrr import KernelRidge
from dkrr.engine.cluster import local_cluster

N, TILE = 403, 67  # seven tiles a side, the last one of one row
RNG = np.random.default_rng(7)
X = RNG.random((N, 6))  # not negative, so that chi2 takes it
Y = np.stack([np.sin(3 * X[:, 0]), X[:, 1] * X[:, 2], RNG.standard_normal(N)], axis=1)
WEIGHT = RNG.uniform(0.1, 2, N) * (np.arange(N) % 6 > 0)
Z = RNG.random((91, 6))
RTOL = 1e-8


def assert_same(actual: np.ndarray, expected: np.ndarray, rtol: float = RTOL) -> None:
    """Agreement per target, relative to its 2-norm."""
    assert actual.shape == expected.shape
    difference = np.linalg.norm(actual - expected, axis=0)
    assert np.all(difference <= rtol * np.linalg.norm(expected, axis=0)), difference


# --- what must not matter --------------------------------------------------------------------------------------------

REFERENCE = {"kernel": "rbf", "gamma": 0.9, "alpha": 0.05}


@pytest.fixture(scope="module")
def reference() -> np.ndarray:
    """Coefficients from one dense solve."""
    return KernelRidge(**REFERENCE).fit(X, Y, sample_weight=WEIGHT).dual_coef_


@pytest.mark.parametrize("tile_size", [31, 402, 403])
def test_tile_size_does_not_matter(tile_size: int, reference: np.ndarray) -> None:
    fit = KernelRidge(**REFERENCE, tile_size=tile_size).fit(X, Y, sample_weight=WEIGHT)
    assert_same(fit.dual_coef_, reference, 1e-10)


@pytest.mark.parametrize(
    "change", [np.asfortranarray, lambda a: a[::-1].astype(">f8")[::-1]], ids=["Fortran", "big-endian"]
)
def test_memory_order_does_not_matter(change: Any, tmp_path: Path) -> None:
    plain = KernelRidge(**REFERENCE, tile_size=TILE).fit(X, Y)
    np.save(tmp_path / "X.npy", change(X))
    read_only = change(X).copy(order="K")
    read_only.flags.writeable = False
    for form in (change(X), str(tmp_path / "X.npy"), np.load(tmp_path / "X.npy", mmap_mode="r"), read_only):
        fit = KernelRidge(**REFERENCE, tile_size=TILE).fit(form, change(Y) if isinstance(form, np.ndarray) else Y)
        assert np.array_equal(fit.dual_coef_, plain.dual_coef_)
        assert np.array_equal(fit.predict(change(Z)), plain.predict(Z))


def test_number_of_workers_does_not_matter(cluster_client: Any, reference: np.ndarray) -> None:
    there = KernelRidge(**REFERENCE, tile_size=TILE).fit(X, Y, sample_weight=WEIGHT)
    with (
        local_cluster(workers=1, threads_per_worker=2, memory_limit="1GiB") as cluster,
        Client(cluster, set_as_default=False) as client,
        client.as_current(),
    ):
        fit = KernelRidge(**REFERENCE, tile_size=TILE).fit(X, Y, sample_weight=WEIGHT)
    assert_same(fit.dual_coef_, reference, 1e-10)
    # the order of every sum is fixed, so one worker and two give the same bits
    assert np.array_equal(there.dual_coef_, fit.dual_coef_)
