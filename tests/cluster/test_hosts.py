"""A scheduler and two workers on hosts of their own, on TLS; one of them is cut off in mid-factorisation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.helpers import ByHandJob, byte_for_byte
from tests.cluster.namespaces import Network, network_of
from tests.cluster.programs import make_certificates
from tests.faults import finish, wait_until
from tests.servers import ByHand, doctor_environment

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SLOWLY = "compute.cholesky.tile:1:sleep=0.2"
HOSTS = ("scheduler", "first", "second")


@contextmanager
def cluster_of_hosts(folder: Path, **environment: str) -> Iterator[tuple[Network, ByHand]]:
    """A scheduler and two workers, each on a host of its own, with the configuration that the templates have."""
    folder.mkdir()
    with network_of(*HOSTS) as network:
        tls = make_certificates(folder / "tls")
        cluster = ByHand(
            folder, {**doctor_environment(), **environment}, tls,
            host=network.address("scheduler"), prefix=network.on("scheduler"),
        )  # fmt: skip
        try:
            cluster.start_scheduler()
            for name in HOSTS[1:]:
                cluster.start_worker(host=network.address(name), prefix=network.on(name))
            yield network, cluster
        finally:
            cluster.close()


def job_on(network: Network, cluster: ByHand, folder: Path, n: int) -> ByHandJob:
    """A job whose driver is on the scheduler's host."""
    environment = {"DASK_CONFIG": str(cluster.folder / "tls/client")}
    return ByHandJob(folder, cluster.address, n, environment=environment, prefix=network.on("scheduler"))


@dataclass
class LinkCut:
    """Two fits on hosts of their own: one that nothing disturbed, and one during which a worker's link was cut."""

    undisturbed: ByHandJob
    cut: ByHandJob
    seconds: tuple[float, float]
    written: dict[str, int]


def with_a_link_cut(folder: Path) -> LinkCut:
    """Fit, and fit again with the link of one worker taken down in mid-factorisation; the worker ends by itself."""
    with cluster_of_hosts(folder / "hosts", DKRR_FAILPOINTS=SLOWLY) as (network, cluster):
        undisturbed = job_on(network, cluster, folder / "undisturbed", 1200)
        began = time.monotonic()
        undisturbed.fit()
        without = time.monotonic() - began
        job = job_on(network, cluster, folder / "cut", 1200)
        began = time.monotonic()
        process = job.command().start()
        wait_until(lambda: process.poll() is not None or len(job.tiles()) >= 20, 120)
        network.cut("first")
        written = job.fewer_than_all(20)
        ended = finish(process, 300)
        assert ended.code == 0, ended.err
        seconds = time.monotonic() - began
        # it would go on writing for a scheduler that has given its tasks to others
        cluster.workers[:] = cluster.workers[:1]
        cluster.wait_for_the_end_of_workers(120)
    return LinkCut(undisturbed, job, (without, seconds), written)


@pytest.mark.short
def test_a_link_cut_in_mid_factorisation(tmp_path: Path) -> None:
    local = ByHandJob(tmp_path / "local")
    local.fit()
    found = with_a_link_cut(tmp_path)
    assert found.seconds[1] - found.seconds[0] <= 90
    assert found.written.items() <= found.cut.tiles().items()
    byte_for_byte(local, found.cut)
    byte_for_byte(found.undisturbed, found.cut)
