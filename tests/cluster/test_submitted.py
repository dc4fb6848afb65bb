"""A submitted run whose driver lives on a worker's machine; its scheduler is killed and started again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.helpers import ByHandJob, byte_for_byte
from tests.faults import wait_until
from tests.servers import by_hand

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SLOWLY = "cholesky.tile.after_compute:1:sleep=0.05"


def status(job: ByHandJob) -> dict[str, Any]:
    ended = job.command("status", str(job.folder / "runs/job"), "--json").run(60)
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


def test_a_driver_on_a_worker_survives_the_loss_of_its_scheduler_in_words(tmp_path: Path) -> None:
    local = ByHandJob(tmp_path / "local")
    local.fit()
    with by_hand(tmp_path / "servers", workers=1, DKRR_FAILPOINTS=SLOWLY) as cluster:
        cluster.start_worker("--name", "drivers", "--resources", "dkrr-driver=1")
        job = ByHandJob(tmp_path / "job", cluster.address, more='driver = "cluster"\n')
        run = str(job.folder / "runs/job")
        ended = job.command("submit", str(job.file)).run(120)
        assert ended.code == 0, ended.err
        wait_until(lambda: len(job.tiles()) >= 15, 120)
        cluster.kill_scheduler()
        assert job.command("wait", run).run(120).code == 6
        cluster.wait_for_the_end_of_workers()
        written = job.tiles()
        assert 15 <= len(written) < 72
        cluster.start_scheduler()
        cluster.start_worker()
        cluster.start_worker("--resources", "dkrr-driver=1")
        ended = job.command("resume", run).run(120)
        assert ended.code == 0, ended.err
        ended = job.command("wait", run).run(240)
        assert ended.code == 0, ended.err
        assert written.items() <= job.tiles().items()
        assert "cluster" in json.dumps(status(job))
        byte_for_byte(local, job)
