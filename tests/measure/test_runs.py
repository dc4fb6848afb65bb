"""Runs: a driver that was stopped and replaced, one that was killed, and what looking and submitting cost."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from dkrr.jobs.inspection import verify
from dkrr.jobs.run_directory import RunDirectory
from dkrr.jobs.status import read_status
from dkrr.tiles import TileGrid
from tests.faults import Command, contents, end_commands, finish, wait_until
from tests.measure.figures import SCALE, Judge, scaled
from tests.measure.jobs import job_document, tile_files, tiles, write_job

pytestmark = [pytest.mark.measure, pytest.mark.timeout(1800)]

N = scaled(8192, least=1024)
TILE_SIZE = 512 if SCALE == 1 else 64
NUM_TILES = TileGrid(N, TILE_SIZE).num_lower
CANARY = "canary-0e5b27"
# less to wait than the 60 s that people have; heartbeats come every two seconds
ENVIRONMENT = {"DKRR_STALE_SECONDS": "15", "AWS_SECRET_ACCESS_KEY": CANARY}


def dkrr(*arguments: str, seconds: float = 900.0) -> str:
    done = Command([*arguments], environment=ENVIRONMENT).run(seconds)
    assert done.code == 0, done.err
    return done.out


def state_of(run: RunDirectory) -> str:
    return str(json.loads(dkrr("status", run.location, "--json"))["state"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    dkrr("fit", str(write_job(folder, job_document(N, solver={"tile_size": TILE_SIZE}))))
    return folder


def model_of(folder: Path) -> dict[str, bytes]:
    return contents(folder / "run/model.zarr")


def test_measure_a_stopped_driver(judge: Judge, folder: Path, undisturbed: Path) -> None:
    job = write_job(folder, job_document(N, solver={"tile_size": TILE_SIZE}))
    run = RunDirectory(folder / "run")
    first = Command(["fit", str(job)], environment=ENVIRONMENT).start()
    try:
        wait_until(lambda: len(tile_files(folder / "store")) >= NUM_TILES // 3, 300)
        os.kill(first.pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(first.pid).status() == "stopped")
        wait_until(lambda: state_of(run) == "lost", 120)
        time.sleep(2)  # what its workers had begun
        before = tiles(folder / "store")
        dkrr("resume", run.location)
        wait_until(lambda: (s := read_status(run)).epoch == 2 and s.phase == "factorise", 300)
        os.kill(first.pid, signal.SIGCONT)
        ended = finish(first, 120)
        dkrr("wait", run.location)
    finally:
        end_commands()
    after, wanted = tiles(folder / "store"), tiles(undisturbed / "store")
    rewritten = [key for key, tile in before.items() if after.get(key) != tile]
    different = [key for key, tile in wanted.items() if key not in after or after[key].sha256 != tile.sha256]
    mixed = [*verify(run.location), *(str(path) for path in folder.rglob("*.partial"))]
    leaks = [str(path) for path in folder.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
    status = read_status(run)
    judge(
        "driver stopped, run resumed by a second, first continued",
        f"first ended with {ended.code}, run {status.state} in attempt {status.epoch}; {len(rewritten)} of "
        f"{len(before)} valid tiles written again, {len(different)} of {len(wanted)} differ from an undisturbed run, "
        f"model {'equal' if model_of(folder) == model_of(undisturbed) else 'DIFFERS'}, {len(mixed)} problems",
        "8, finished, 2; 0, 0, equal, 0",
        (ended.code, status.state, status.epoch) == (8, "finished", 2)
        and not (rewritten or different or mixed)
        and model_of(folder) == model_of(undisturbed),
    )
    judge("canary in the environment", f"in {len(leaks)} files of run and store", "0", not leaks)


def test_measure_a_killed_driver(judge: Judge, folder: Path, undisturbed: Path) -> None:
    job = write_job(folder, job_document(N, solver={"tile_size": TILE_SIZE}))
    run = RunDirectory(folder / "run")
    started = time.perf_counter()
    dkrr("submit", str(job))
    submitted = time.perf_counter() - started
    wait_until(lambda: len(tile_files(folder / "store")) >= NUM_TILES // 3, 300)
    started = time.perf_counter()
    dkrr("status", run.location)
    looked = time.perf_counter() - started
    os.kill((read_status(run).driver or {})["pid"], signal.SIGKILL)
    lost = state_of(run)
    time.sleep(2)
    before = tiles(folder / "store")
    dkrr("resume", run.location)
    dkrr("wait", run.location)
    after, wanted = tiles(folder / "store"), tiles(undisturbed / "store")
    rewritten = [key for key, tile in before.items() if after.get(key) != tile]
    same = {key: tile.sha256 for key, tile in after.items()} == {key: tile.sha256 for key, tile in wanted.items()}
    judge(
        "driver killed, run resumed",
        f"shown as {lost}; {len(rewritten)} of {len(before)} valid tiles written again; factor and model "
        f"{'equal' if same and model_of(folder) == model_of(undisturbed) else 'DIFFER'}",
        "lost; 0; equal",
        lost == "lost" and not rewritten and same and model_of(folder) == model_of(undisturbed),
    )
    judge(
        "seconds of submit, and of status during a fit",
        f"{submitted:.1f}, {looked:.1f}",
        "5, 2",
        submitted < 5 and looked < 2,
    )
