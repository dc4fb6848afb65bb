"""Jobs whose data, store and run are at s3:// addresses, on real workers: the same bytes as in folders."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import pytest

from dkrr.dataset import ingest
from dkrr.engine.cluster import local_cluster
from dkrr.jobs.inspection import verify
from dkrr.jobs.plan import plan
from dkrr.jobs.predict import evaluate_job, predict_job
from dkrr.jobs.run import fit_job
from dkrr.jobs.spec import JobSpec
from dkrr.store.files import delete_key, join, list_keys, read_key, write_key
from tests.s3 import CANARY_KEY, CANARY_SECRET, Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]

pytestmark = pytest.mark.system

MOST_TASK_BYTES = 10 * 2**10


class Stop(Exception):
    """Somebody pressed a key."""


@pytest.fixture(scope="module")
def address(s3_server: Any) -> Iterator[str]:
    """A scheduler whose workers are started when the credentials are in the environment."""
    with local_cluster(workers=2, memory_limit="1GiB") as cluster:
        yield str(cluster.scheduler_address)


@pytest.fixture
def make(tmp_path: Path, bucket: Bucket, address: str) -> Callable[[str], JobSpec]:
    """The same job in folders ("here") and at addresses ("there")."""
    draws = np.random.default_rng(3)
    X = draws.standard_normal((500, 5))
    y = np.sin(X[:, 0]) + 0.3 * X[:, 1] ** 2
    ingest(X, str(tmp_path / "d.zarr"), y=y)
    ingest(X, bucket.url("data/d.zarr"), y=y)

    def spec(where: str) -> JobSpec:
        here = where == "here"
        document: dict[str, Any] = {
            "data": {"path": str(tmp_path / "d.zarr") if here else bucket.plain("data/d.zarr"), "standardize": True},
            "evaluate": {"fraction": 0.2},
            "model": {"kernel": "rbf", "gamma": 0.2, "alpha": 0.1},
            "solver": {"name": "cholesky", "tile_size": 64, "gram": "stored"},
            "cluster": {"scheduler": address},
            "output": {"directory": str(tmp_path / "runs/a") if here else bucket.plain("runs/a"), "keep": "all"},
        }
        if not here:
            document["storage"] = bucket.storage()
        return JobSpec.from_dict(document)

    return spec


def chunks(store: str) -> dict[str, bytes]:
    """Every tile of a store by key."""
    keys = [
        key for key in list_keys(store) if key.startswith(("factors", "grams")) and "/c/" in key and "-sums" not in key
    ]
    return {key: read_key(store, key) or b"" for key in keys}


def interrupted(job: JobSpec, phase: str, num_done: int) -> None:
    def progress(now: str, done: int, *_: Any) -> None:
        if now == phase and done == num_done:
            raise Stop

    with pytest.raises(Stop):
        fit_job(job, progress=progress)
    time.sleep(3)  # tasks that were running end by themselves, and write what they have


@pytest.mark.short
def test_an_interrupted_run_ends_with_the_bytes_of_a_local_one(
    make: Callable[[str], JobSpec], bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = make("here"), make("there")
    expected = fit_job(here)
    sent: list[bytes] = []
    submit = distributed.Client.submit

    def recording(client: Any, function: Any, *args: Any, **options: Any) -> Any:
        sent.append(pickle.dumps((function, args[:3])))  # what follows are futures
        return submit(client, function, *args, **options)

    monkeypatch.setattr(distributed.Client, "submit", recording)
    store, run = there.store, there.directory
    interrupted(there, "gram", 4)
    interrupted(there, "factorise", 5)
    valid = set(chunks(store))
    assert plan(there).disk_present_bytes == sum(len(data) for data in chunks(store).values())
    puts = len(bucket.puts())
    found = fit_job(there)
    again = {key.removeprefix("runs/store/") for key in bucket.puts()[puts:]} & valid
    assert again == set(), "valid tiles were written again"
    assert chunks(store) == chunks(here.store)
    assert found.relative_residual == expected.relative_residual
    assert found.score == expected.score
    data = bucket.url("data/d.zarr")
    for job, output in ((here, str(tmp_path / "p.npy")), (there, bucket.url("out/p.npy"))):
        predict_job(join(job.directory, "model.zarr"), data, output)
    assert read_key(bucket.url("out"), "p.npy") == (tmp_path / "p.npy").read_bytes()
    # what was locked on objects says that it is free
    assert bucket.listing("out") == ["p.npy", "p.npy.json", "p.npy.work.lock"]
    assert evaluate_job(join(run, "model.zarr"), data)["r2"] > 0.9
    assert verify(run) == []
    again_summary = fit_job(there)
    assert again_summary.tiles_computed == 0

    assert sent
    assert max(map(len, sent)) < MOST_TASK_BYTES
    everything = {key: read_key(bucket.url(), key) or b"" for key in bucket.listing()}
    for secret in (CANARY_KEY.encode(), CANARY_SECRET.encode()):
        assert not [key for key, data in everything.items() if secret in data or secret in key.encode()]
        assert not [data for data in sent if secret in data]


def test_a_store_that_fails_now_and_then_changes_nothing(make: Callable[[str], JobSpec], bucket: Bucket) -> None:
    here, there = make("here"), make("there")
    fit_job(here)
    bucket.server.fail(
        {"method": "PUT", "path": "/c/", "times": 20, "every": 3, "status": 503},
        {"method": "GET", "path": "/c/", "times": 20, "every": 4, "status": 500},
        {"method": "GET", "path": "zarr.json", "times": 5, "every": 3, "status": 503},
        {"method": "PUT", "path": "json", "times": 5, "every": 3, "lose_answer": True},
    )
    fit_job(there)
    failed = [item for item in bucket.server.log() if item["status"] in (500, 503)]
    assert len(failed) >= 45
    assert chunks(there.store) == chunks(here.store)


def test_objects_that_were_deleted_or_cut_are_made_again(make: Callable[[str], JobSpec], bucket: Bucket) -> None:
    there = make("there")
    fit_job(there)
    store = there.store
    whole = chunks(store)
    factor = [key for key in whole if key.startswith("factors")]
    delete_key(store, factor[3])
    write_key(store, factor[7], whole[factor[7]][:500])
    flipped = bytearray(whole[factor[9]])
    flipped[16] ^= 1
    write_key(store, factor[9], bytes(flipped))
    problems = verify(there.directory)
    assert len(problems) == 3, problems
    delete_key(there.directory, "result.json")
    fit_job(there)
    assert chunks(store) == whole
