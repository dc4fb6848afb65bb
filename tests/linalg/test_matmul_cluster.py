"""Products and residuals on real workers: the same bits on any number of them, also when some are killed on the way."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client

from dkrr.engine.cluster import local_cluster
from dkrr.engine.tasks import DaskExecutor
from dkrr.linalg.blocks import BlockColumns
from dkrr.linalg.matmul import OperatorProduct, ResidualNorms, residual_norms
from dkrr.linalg.workspace import Workspace
from tests.faults import kill_all_workers, wait_until, worker_pids
from tests.linalg.helpers import dense, operator, rows

pytestmark = pytest.mark.system

N, SIDE = 1000, 6


@contextmanager
def cluster(workers: int, failpoints: str = "", once: Path | None = None) -> Iterator[Any]:
    """A client of workers with failpoints; this process has none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DKRR_FAILPOINTS", failpoints)
        patch.setenv("DKRR_FAILPOINTS_ONCE", str(once or ""))
        with (
            local_cluster(workers=workers, memory_limit="1GiB") as processes,
            Client(processes, set_as_default=False) as client,
        ):
            client.wait_for_workers(workers, timeout=60)
            yield client


class System:
    """Rows, vectors, and a product with them on a client's workers."""

    def __init__(self, folder: Path, kernel: str) -> None:
        self.folder = folder
        self.dataset = rows(folder, n=N, weights=True)
        self.operator = operator(self.dataset, alpha=0.1, kernel=kernel)
        self.v = np.random.default_rng(1).standard_normal((N, 3))
        self.scratch = folder / "scratch"

    def multiply(self, client: Any, progress: Any = None, left_over: bool = False) -> tuple[np.ndarray, ...]:
        executor = DaskExecutor(client, stall_seconds=60.0)
        workspace = Workspace("", executor, progress)
        product = OperatorProduct(self.operator, workspace, str(self.scratch), num_blocks=SIDE)
        answer = product(self.v), *product.with_row_sums(self.v)
        assert left_over or not list(self.scratch.iterdir())
        return answer

    def residual(self, client: Any) -> ResidualNorms:
        rhs, u = (
            BlockColumns.create(str(self.folder / "solve"), name, self.operator.grid, 3, "float64")
            for name in ("rhs", "u")
        )
        for i, panel in rhs.blocks():
            u.write(i, panel, self.v[self.operator.grid.span(i)])
            rhs.write(i, panel, 2 * self.v[self.operator.grid.span(i)])
        executor = DaskExecutor(client, stall_seconds=60.0)
        return residual_norms(self.operator, rhs, u, Workspace("", executor), str(self.scratch))


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> System:
    return System(tmp_path_factory.mktemp("system"), "rbf")


@pytest.fixture(scope="module")
def undisturbed(system: System) -> tuple[np.ndarray, ...]:
    with cluster(1) as client:
        return system.multiply(client)


def same(answer: tuple[np.ndarray, ...], other: tuple[np.ndarray, ...]) -> bool:
    return all(np.array_equal(mine, yours) for mine, yours in zip(answer, other, strict=True))


@pytest.mark.parametrize("kernel", [pytest.param("rbf", marks=pytest.mark.short), "linear"])
def test_the_same_bits_on_any_number_of_workers(kernel: str, tmp_path: Path) -> None:
    system = System(tmp_path, kernel)
    with cluster(1) as client:
        answer = system.multiply(client)
    with cluster(3) as client:
        for _ in range(2):
            assert same(system.multiply(client), answer)
    a = dense(system.operator.with_alpha(0.0), system.dataset)
    bar = 3e-14 * (np.abs(a) @ np.abs(system.v))
    assert (np.abs(answer[0] - a @ system.v) <= bar).all()
    np.testing.assert_allclose(answer[2], np.abs(a).sum(axis=1), rtol=1e-12)


@pytest.mark.parametrize("site", ["before_read", "after_compute", "after_write"])
def test_a_worker_is_killed(system: System, undisturbed: tuple[np.ndarray, ...], site: str, tmp_path: Path) -> None:
    with cluster(2, f"multiply.pair.{site}:@4:sigkill;chunk.mid_write:@7:sigkill", tmp_path / "once") as client:
        assert same(system.multiply(client), undisturbed)
        assert {path.name for path in (tmp_path / "once").iterdir()} == {"0", "1"}


def test_all_workers_are_killed_and_come_back(system: System, undisturbed: tuple[np.ndarray, ...]) -> None:
    with cluster(2, "multiply.pair.after_write:1:sleep=0.05") as client:
        happened = threading.Event()

        def progress(phase: str, done: int, *_: float) -> None:
            if done == 9 and not happened.is_set():
                happened.set()
                kill_all_workers(client)

        assert same(system.multiply(client, progress), undisturbed)
        assert happened.is_set()


def test_a_worker_that_stands_still_and_comes_back(
    system: System, undisturbed: tuple[np.ndarray, ...], tmp_path: Path
) -> None:
    """Stopped right before it hands over its sums; the scheduler gives it up, and its pair goes to another one.

    What it writes when it is woken belongs to a product that is over.
    """
    with (
        dask.config.set({"distributed.scheduler.worker-ttl": "2s"}),
        cluster(2, "multiply.pair.after_compute:@3:sigstop", tmp_path / "once") as client,
    ):
        pids = set(worker_pids(client).values())
        assert same(system.multiply(client), undisturbed)
        assert list((tmp_path / "once").iterdir())
        for pid in pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue
        wait_until(lambda: len(worker_pids(client)) == 2)
        assert same(system.multiply(client, left_over=True), undisturbed)
