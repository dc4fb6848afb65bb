"""A run that was submitted to the scheduler of somebody else, which is killed and started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.helpers import ByHandJob, byte_for_byte
from tests.faults import wait_until
from tests.servers import by_hand

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SLOWLY = "cholesky.tile.after_compute:1:sleep=0.05"


def test_a_detached_driver_survives_the_loss_of_its_scheduler_in_words(tmp_path: Path) -> None:
    local = ByHandJob(tmp_path / "local")
    local.fit()
    with by_hand(tmp_path / "servers", DKRR_FAILPOINTS=SLOWLY) as cluster:
        job = ByHandJob(tmp_path / "job", cluster.address)
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
        cluster.start_worker()
        ended = job.command("resume", run).run(120)
        assert ended.code == 0, ended.err
        ended = job.command("wait", run).run(240)
        assert ended.code == 0, ended.err
        assert written.items() <= job.tiles().items()
        byte_for_byte(local, job)
