"""The whole story at s3:// addresses: submitted, looked at, its scheduler killed, resumed; the bytes of a local fit."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from dkrr.cli import main
from dkrr.dataset import ingest
from dkrr.jobs.inspection import verify
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.models.model import load_model
from dkrr.store.files import join, list_keys, read_json, read_key
from tests.cluster.helpers import ByHandJob
from tests.faults import Command, Run, contents, wait_until
from tests.s3 import CANARY_KEY, CANARY_SECRET, Bucket, bucket, s3_server
from tests.servers import by_hand

__all__ = ["bucket", "s3_server"]

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SLOWLY = "cholesky.tile.after_compute:1:sleep=0.05"
N = 700
ROWS = f"generate:friedman?n={N}&d=5&seed=0"


def job_file(folder: Path, bucket: Bucket, scheduler: str) -> Path:
    """The job of :class:`ByHandJob` with data, run and store in a bucket."""
    local = ByHandJob(folder, scheduler, n=N)
    text = local.file.read_text().replace(ROWS, bucket.plain("data/d.zarr"))
    storage = "\n".join(f"{name} = {str(value).lower()!r}" for name, value in bucket.storage().items())
    local.file.write_text(
        f"{text}[storage]\n{storage}\n[output]\ndirectory = {bucket.plain('runs/job')!r}\n".replace("'true'", "true")
    )
    return local.file


def tiles(bucket: Bucket) -> dict[str, bytes]:
    """The tiles of the factor by key; sums that wait for their last terms are none."""
    place = bucket.url("runs/store/factors")
    return {key: read_key(place, key) or b"" for key in list_keys(place) if "/c/" in key and "-sums" not in key}


def num_tiles(bucket: Bucket) -> int:
    return len([key for key in list_keys(bucket.url("runs/store/factors")) if "/c/" in key and "-sums" not in key])


def dkrr(*arguments: str, seconds: float = 120.0) -> Run:
    return Command([*arguments]).run(seconds)


@pytest.fixture
def run(bucket: Bucket) -> Iterator[RunDirectory]:
    """The run; its drivers end with the test."""
    directory = RunDirectory(bucket.url("runs/job"))
    yield directory
    for key in bucket.listing("runs/job/drivers"):
        record = read_json(bucket.url("runs/job/drivers"), key) or {}
        with contextlib.suppress(ProcessLookupError):
            os.kill(record["pid"], signal.SIGKILL)


def test_a_submitted_run_survives_its_scheduler(tmp_path: Path, bucket: Bucket, run: RunDirectory) -> None:
    local = ByHandJob(tmp_path / "local", n=N)
    local.fit()
    ingest(ROWS, bucket.url("data/d.zarr"))
    with by_hand(tmp_path / "servers", DKRR_FAILPOINTS=SLOWLY) as cluster:
        file = job_file(tmp_path / "job", bucket, cluster.address)
        submitted = dkrr("submit", str(file))
        assert submitted.code == 0, submitted.err
        wait_until(lambda: num_tiles(bucket) >= 8, 120)
        seen = dkrr("status", run.location)
        # it is written every ten seconds, so the phase may be an older one
        assert (seen.code, "attempt 1" in seen.out) == (0, True), seen
        cluster.kill_scheduler()
        ended = dkrr("wait", run.location)
        assert ended.code == 6, ended
        cluster.wait_for_the_end_of_workers()
        valid, puts = tiles(bucket), len(bucket.puts())
        assert 8 <= len(valid) < 28
        cluster.start_scheduler()
        cluster.start_worker()
        cluster.start_worker()
        resumed = dkrr("resume", run.location)
        assert resumed.code == 0, resumed.err
        ended = dkrr("wait", run.location)
        assert ended.code == 0, ended.err
    written = {key.removeprefix("runs/store/factors/") for key in bucket.puts()[puts:]}
    assert not written & valid.keys(), "valid tiles were written again"
    folder = tmp_path / "local/runs/store/factors"
    assert tiles(bucket) == {key: data for key, data in contents(folder).items() if "/c/" in key and "-sums" not in key}
    rows = np.random.default_rng(1).uniform(size=(300, 5))
    models = [load_model(place) for place in (str(local.model), join(run.location, "model.zarr"))]
    assert models[0].predict(rows).tobytes() == models[1].predict(rows).tobytes()
    assert verify(run.location) == []
    logs, listed = (
        CliRunner().invoke(main, [*words]) for words in (("logs", run.location), ("list", bucket.url("runs")))
    )
    assert (logs.exit_code, "driver 2 started" in logs.stdout) == (0, True), logs.output
    assert (listed.exit_code, "finished" in listed.stdout) == (0, True), listed.output
    everything = {key: read_key(bucket.url(), key) or b"" for key in bucket.listing()}
    secrets = (CANARY_KEY.encode(), CANARY_SECRET.encode())
    assert not [key for key, data in everything.items() for secret in secrets if secret in data]
    printed = [part for done in (submitted, seen, ended, resumed) for part in (done.out, done.err)]
    for text in (*printed, logs.output, listed.output):
        assert CANARY_KEY not in text
        assert CANARY_SECRET not in text
