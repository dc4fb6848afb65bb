"""One job file at every place: local, by hand, on TLS, under Slurm, on hosts of their own, with its store on S3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.helpers import ByHandJob
from tests.cluster.programs import make_certificates
from tests.cluster.slurm import slurm_of_our_own
from tests.cluster.test_by_hand_s3 import job_file
from tests.cluster.test_hosts import cluster_of_hosts, job_on
from tests.cluster.test_slurm import submit
from tests.faults import Command
from tests.s3 import Bucket, bucket, s3_server
from tests.servers import by_hand

__all__ = ["bucket", "s3_server"]

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

N = 700
ROWS = "generate:friedman?n=300&d=5&seed=1"


@contextmanager
def fitted_by_hand(folder: Path) -> Iterator[ByHandJob]:
    with by_hand(folder / "servers") as cluster:
        job = ByHandJob(folder / "job", cluster.address, N)
        job.fit()
        yield job


@contextmanager
def fitted_on_tls(folder: Path) -> Iterator[ByHandJob]:
    tls = make_certificates(folder / "tls")
    with by_hand(folder / "servers", roles=tls) as cluster:
        job = ByHandJob(folder / "job", cluster.address, N, environment={"DASK_CONFIG": str(tls / "client")})
        job.fit()
        yield job


@contextmanager
def fitted_under_slurm(folder: Path) -> Iterator[ByHandJob]:
    with slurm_of_our_own(folder / "slurm") as slurm:
        submitted = submit(slurm, folder, N)
        assert slurm.wait(submitted.number, 180)["JobState"] == "COMPLETED", submitted.log
        yield submitted.job


@contextmanager
def fitted_on_hosts(folder: Path) -> Iterator[ByHandJob]:
    with cluster_of_hosts(folder / "hosts") as (network, cluster):
        job = job_on(network, cluster, folder / "job", N)
        job.fit()
        yield job


PLACES = {
    "by hand": fitted_by_hand,
    "on TLS": fitted_on_tls,
    "under Slurm": fitted_under_slurm,
    "on hosts": fitted_on_hosts,
}


def without_cluster(job: ByHandJob) -> str:
    text = job.file.read_text()
    return text.replace(job.cluster(), "")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> ByHandJob:
    job = ByHandJob(tmp_path_factory.mktemp("local") / "job", n=N)
    job.fit()
    return job


@pytest.mark.parametrize("place", PLACES)
def test_the_same_job_gives_the_same_predictions(place: str, local: ByHandJob, tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    with PLACES[place](tmp_path / "place") as job:
        assert without_cluster(job) == without_cluster(local)  # the job file, unchanged but for [cluster]
        assert job.predictions() == local.predictions()


def test_the_same_with_data_and_store_on_s3(local: ByHandJob, bucket: Bucket, tmp_path: Path) -> None:
    from dkrr.dataset import ingest

    ingest(f"generate:friedman?n={N}&d=5&seed=0", bucket.url("data/d.zarr"))
    with by_hand(tmp_path / "servers") as cluster:
        fitted = Command(["fit", str(job_file(tmp_path / "job", bucket, cluster.address))]).run(180)
        assert fitted.code == 0, fitted.err
        out = tmp_path / "out.npy"
        ended = Command(["predict", bucket.url("runs/job/model.zarr"), ROWS, "-o", str(out)]).run(120)
        assert ended.code == 0, ended.err
    assert out.read_bytes() == local.predictions()
