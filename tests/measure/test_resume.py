"""Resume: a killed fit computes only what it had not, and ends with the same bytes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from dkrr.tiles import TileGrid
from tests.benchmarks.processes import clean_environment, started
from tests.measure.figures import SCALE, Judge, scaled
from tests.measure.jobs import Tile, fit_command, job_document, read_result, run_fit, tile_files, tiles, write_job

pytestmark = [pytest.mark.measure, pytest.mark.timeout(1800)]

N = scaled(8192, least=1024)
TILE_SIZE = 512 if SCALE == 1 else 64
DOCUMENT = job_document(N, solver={"tile_size": TILE_SIZE})
NUM_TILES = TileGrid(N, TILE_SIZE).num_lower


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tile]:
    """The factor of a run that nothing disturbs."""
    job = write_job(tmp_path_factory.mktemp("undisturbed"), DOCUMENT)
    done = run_fit(job)
    assert done.status == "ok", done.stderr
    found = tiles(job.parent / "store")
    assert len(found) == NUM_TILES
    return found


def kill_half_way(job: Path) -> None:
    """Start the command, send it SIGKILL when half of its tiles are there, and wait until its workers are gone."""
    with started(fit_command(job), environment=clean_environment(), folder=job.parent) as (process, sampler, _):
        while len(tile_files(job.parent / "store")) < NUM_TILES // 2:
            assert process.poll() is None, "the command ended before it could be killed"
            time.sleep(0.002)
        sampler.sample()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        _, orphans = psutil.wait_procs(list(sampler.tree.values()), timeout=10)
        assert not orphans, "workers outlive their command, and may still write"


def test_measure_resume(judge: Judge, folder: Path, undisturbed: dict[str, Tile]) -> None:
    job = write_job(folder, DOCUMENT)
    kill_half_way(job)
    before = tiles(folder / "store")
    finish_and_judge(judge, "resume: killed half-way", job, before, undisturbed)


def test_measure_resume_with_a_hole(judge: Judge, folder: Path, undisturbed: dict[str, Tile]) -> None:
    job = write_job(folder, DOCUMENT)
    kill_half_way(job)
    files = tile_files(folder / "store")
    holes = [key for key in files if 0 < column(key) < row(key) and right_of(key) in files]
    hole = sorted(holes, key=lambda key: (row(key), column(key)))[len(holes) // 2]
    files[hole].unlink()
    before = tiles(folder / "store")
    assert right_of(hole) in before
    name = hole.partition("/")[2]
    finish_and_judge(judge, f"resume: killed, tile {name} deleted", job, before, undisturbed)


def finish_and_judge(judge: Judge, line: str, job: Path, before: dict[str, Tile], undisturbed: dict[str, Tile]) -> None:
    assert 0 < len(before) < NUM_TILES
    done = run_fit(job)
    assert done.status == "ok", done.stderr
    after = tiles(job.parent / "store")
    rewritten = [key for key, tile in before.items() if after.get(key) != tile]
    different = [key for key, tile in undisturbed.items() if after.get(key, Tile(0, "")).sha256 != tile.sha256]
    computed = read_result(job)["tiles_computed"]
    judge(
        line,
        f"{len(before)} of {NUM_TILES} tiles were there; {computed} computed, {len(rewritten)} valid ones written "
        f"again, {len(different)} differ from an undisturbed run",
        f"n = {N:,}: the missing ones computed, 0, 0",
        computed == NUM_TILES - len(before) and not rewritten and not different and len(after) == NUM_TILES,
    )


def row(key: str) -> int:
    return int(key.split("/")[1])


def column(key: str) -> int:
    return int(key.split("/")[2])


def right_of(key: str) -> str:
    array = key.split("/")[0]
    return f"{array}/{row(key)}/{column(key) + 1}"
