"""Relative paths mean the current folder of who gives them, wherever the work is done, and whenever."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dkrr

X = np.random.default_rng(0).random((300, 3))
Y = np.sin(6 * X[:, 0]) + X[:, 1]
OPTIONS: dict[str, Any] = {"kernel": "rbf", "gamma": 2.0, "alpha": 0.01, "tile_size": 128}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.fixture
def workers_there(folder: Path, cluster_client: Any) -> Iterator[None]:
    before = cluster_client.run(os.getcwd)
    cluster_client.run(os.chdir, str(folder / "there"))
    yield
    cluster_client.run(os.chdir, next(iter(before.values())))


@pytest.mark.parametrize("solver", ["cholesky", "cg", "nystrom"])
def test_a_store_and_a_data_set_are_those_of_the_client(solver: str, folder: Path, workers_there: None) -> None:
    wanted = dkrr.KernelRidge(**OPTIONS, solver=solver, store=folder / "store").fit(X, Y).predict(X)
    found = dkrr.KernelRidge(**OPTIONS, solver=solver, store="store").fit(X, Y)
    np.testing.assert_allclose(found.predict(X), wanted, rtol=1e-6)
    dkrr.ingest(X, "d.zarr", y=Y)
    found = dkrr.KernelRidge(**OPTIONS, solver=solver).fit("d.zarr")
    np.testing.assert_allclose(found.predict(X), wanted, rtol=1e-6)
    assert not list((folder / "there").iterdir())


def test_a_fit_stays_where_it_was_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dkrr.ingest(X, "d.zarr", y=Y)
    est = dkrr.KernelRidge(**OPTIONS, solver="cholesky", store="store").fit("d.zarr")
    wanted = est.predict(X[:9], return_std=True)
    left_out = est.leave_one_out().residuals
    monkeypatch.chdir(folder / "there")
    np.testing.assert_array_equal(est.predict(X[:9], return_std=True), wanted)
    np.testing.assert_array_equal(est.leave_one_out().residuals, left_out)
    assert not list((folder / "there").iterdir())
    assert est.get_params()["store"] == "store"
