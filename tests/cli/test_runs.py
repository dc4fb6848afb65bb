"""``submit``, ``status``, ``logs``, ``wait``, ``cancel``, ``resume``, ``list``: what they print, and how they end.

Progress: the board of a run on every width, lines that come ten seconds apart, rates from the start of a phase.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.cli.runs import ProgressDisplay, board
from dkrr.dataset import append, drop_generations, ingest
from dkrr.jobs.facts import live_facts
from dkrr.jobs.run_directory import EventLog, RunDirectory, Status, write_status
from dkrr.jobs.spec import JobSpec
from dkrr.store.lease import process_record
from tests.contract.helpers import run as dkrr
from tests.jobs.retrain.project import in_process

JOB = """# as a person wrote it
[data]
path = "generate:friedman?n=60&d=5&seed=0"
[model]
kernel = "rbf"
alpha = 0.1
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a job file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DKRR_RUNS", raising=False)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


@pytest.fixture
def run(folder: Path) -> RunDirectory:
    """runs/job with a job and no driver."""
    directory = RunDirectory(folder / "runs/job")
    directory.write("job.json", JobSpec.load(folder / "job.toml").to_dict())
    return directory


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs whose drivers were started; the driver is this process."""
    started: list[str] = []

    def start(directory: RunDirectory) -> dict[str, Any]:
        started.append(directory.location)
        return {"kind": "here", **process_record()}

    monkeypatch.setattr("dkrr.jobs.driver.start_driver", start)
    return started


def ended(run: RunDirectory, state: str, code: int, **values: Any) -> None:
    write_status(run, Status(state=state, exit_code=code, epoch=1, **values))


def finished(run: RunDirectory) -> None:
    run.write("plan.json", {"num_rows": 60})
    run.write("model.zarr/zarr.json", {})
    run.write(
        "result.json",
        {
            "plan": {"num_rows": 60, "num_features": 5}, "solver": "cholesky", "precision": "float64",
            "relative_residual": [1e-13], "metric": "r2", "score": {"r2": [0.93], "num_rows": 10},
            "seconds": {"total": 12.0}, "model_path": run.path("model.zarr"),
        },
    )  # fmt: skip
    ended(run, "finished", 0)


# --- submit and resume ------------------------------------------------------------------------------------------------


def test_submit_prints_the_name_and_keeps_the_file(folder: Path, placed: list[str]) -> None:
    result = dkrr("submit", "job.toml")
    assert (result.stdout, f"pid {os.getpid()}" in result.stderr) == ("job\n", True)
    assert placed == [str(folder / "runs/job")]
    run = RunDirectory("runs/job")
    assert run.read_bytes("job.toml") == JOB.encode()
    assert JobSpec.from_dict(run.read("job.json") or {}) == JobSpec.load(folder / "job.toml")
    again = dkrr("submit", "job.toml")
    assert (again.stdout, again.stderr) == ("job\n", "job is starting already\n")
    assert len(placed) == 1


def test_a_finished_job_prints_its_result(run: RunDirectory, placed: list[str]) -> None:
    finished(run)
    lines = ("rows               60 of 5 features", "held-out r2        0.93", "relative residual  1.0e-13")
    for command in (("submit", "job.toml"), ("resume", "job"), ("wait", "job")):
        dkrr(*command, said=[f"  {line}\n" for line in lines])
    assert placed == []


def test_a_finished_job_is_submitted_again_where_its_model_is_gone(run: RunDirectory, placed: list[str]) -> None:
    finished(run)
    run.remove("model.zarr/zarr.json")
    dkrr("submit", "job.toml")
    assert len(placed) == 1


@pytest.mark.parametrize("limit", ["max_iter = 500", "allow_unconverged = true"])
def test_a_finished_job_whose_iterations_may_go_further_is_submitted_again(
    limit: str, folder: Path, run: RunDirectory, placed: list[str]
) -> None:
    finished(run)
    (folder / "job.toml").write_text(f"{JOB}[solver]\n{limit}\n")
    dkrr("submit", "job.toml")
    assert len(placed) == 1


def test_what_submit_prints_is_taken_by_the_other_commands(
    folder: Path, placed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "job.toml").write_text(f'{JOB}[output]\ndirectory = "out dir/a"\n')
    printed = dkrr("submit", "job.toml").stdout.strip()
    assert printed == str(folder / "out dir/a")
    assert json.loads(dkrr("status", printed, "--json").stdout)["run"] == printed
    ended(RunDirectory(printed), "failed", 5)
    dkrr("wait", printed, exits=5, said=f"`dkrr resume '{printed}'`")


def test_a_run_is_not_its_own_store(folder: Path) -> None:
    (folder / "job.toml").rename(folder / "store.toml")
    dkrr("fit", "store.toml", exits=4, said="runs/store would be the run and its store")
    assert not (folder / "runs").exists()


def test_a_status_names_files_where_they_are(folder: Path) -> None:
    (folder / "rows.csv").write_text("a,y\n1,2\n3,nan\n")
    (folder / "job.toml").write_text('[data]\npath = "rows.csv"\ntarget = "y"\n')
    run = RunDirectory(folder / "runs/job")
    run.write("job.json", JobSpec.load(folder / "job.toml").to_dict())
    dkrr("fit", "job.toml", exits=4, said=f"{folder}/rows.csv has")
    assert f"{folder}/rows.csv has" in dkrr("status", "job").output


@pytest.mark.parametrize("directory", ["runs/exp-{id}", "runs/{id}/out", "runs/{id}"])
def test_a_run_whose_directory_has_its_id_in_it_goes_on(
    directory: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    (folder / "job.toml").write_text(f'{JOB}[output]\ndirectory = "{directory}"\nstore = "store/{{id}}"\n')
    dkrr("fit", "job.toml")
    (location,) = (path.parent for path in folder.rglob("result.json"))
    (location / "result.json").unlink()
    write_status(RunDirectory(location), Status(state="interrupted", exit_code=75))
    job = JobSpec.from_dict(RunDirectory(location).read("job.json") or {})
    assert (job.directory, job.store) == (str(location), str(folder / "store" / job.run_id))
    assert job.run_id in str(location)
    dkrr("fit", "job.toml")
    assert (location / "result.json").exists()


def test_an_attempt_that_failed_before_its_plan_shows_none_of_an_earlier_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    rows = np.random.default_rng(0).random((40, 3))
    np.savetxt(folder / "rows.csv", rows, delimiter=",", header="a,b,y", comments="")
    (folder / "job.toml").write_text('[data]\npath = "rows.csv"\ntarget = "y"\n')
    dkrr("fit", "job.toml")
    page = folder / "runs/job/report.html"
    assert "40 of 2 features" in dkrr("status", "job").output
    assert "The rows of this run" in page.read_text()
    rows[3, 1] = np.nan
    np.savetxt(folder / "rows.csv", np.vstack([rows, rows]), delimiter=",", header="a,b,y", comments="")
    dkrr("fit", "job.toml", exits=4)
    assert "40 of 2 features" not in dkrr("status", "job").output
    assert not RunDirectory(folder / "runs/job").has("figures.json")


def test_resuming_a_finished_run_says_that_its_data_set_has_grown(folder: Path, placed: list[str]) -> None:
    x = np.arange(60.0).reshape(20, 3)
    made = ingest(x[:12], folder / "rows.zarr", y=x[:12, 0])
    (folder / "job.toml").write_text(JOB.replace("generate:friedman?n=60&d=5&seed=0", "rows.zarr"))
    run = RunDirectory(folder / "runs/job")
    run.write("job.json", JobSpec.load(folder / "job.toml").to_dict())
    finished(run)
    data = {"rows": 12, "digests": [made.digest, made.digest_y, None], "generation": 1}
    run.write("result.json", {**(run.read("result.json") or {}), "data": data})
    assert dkrr("resume", "job").stderr == "job is finished; `dkrr fit` would run it again\n"
    append(x[12:], folder / "rows.zarr", y=x[12:, 0])
    said = (
        f"complete for generation 1 of {folder}/rows.zarr (12 rows), which is at generation 2 now (20 rows): "
        "start `dkrr fit JOB` to extend the fit to generation 2"
    )
    assert dkrr("resume", "job").stderr == f"job is {said}\n"
    assert json.loads(dkrr("resume", "job", "--json").stdout)["note"] == said
    drop_generations(folder / "rows.zarr", [2])
    assert "would run it again" in dkrr("resume", "job").stderr
    dkrr("submit", "job.toml")
    assert placed == []


# --- looking ----------------------------------------------------------------------------------------------------------


def test_wait_ends_with_the_code_of_the_run(run: RunDirectory) -> None:
    error = {"type": "NotPositiveDefiniteError", "message": "row 3", "hint": "raise alpha"}
    ended(run, "failed", 5, error=error)
    assert dkrr("wait", "job", exits=5).stderr.startswith("job: failed: row 3\nhint: raise alpha\n")
    ended(run, "cancelled", 75)
    dkrr("wait", "job", exits=75)


@pytest.mark.parametrize("command", [("wait", "job"), ("status", "job", "--watch"), ("logs", "job", "-f")])
def test_looking_goes_on_until_the_run_ends_and_ctrl_c_detaches(
    command: tuple[str, ...], run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a driver of this machine that lives: the process that has started this one
    run.write("driver.json", {"token": "t", "epoch": 1, "counter": 0, "owner": process_record(os.getppid())})
    write_status(run, Status(state="running", epoch=1, phase="gram"))

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dkrr.cli.runs.time.sleep", interrupt)
        exits = 75 if command[0] == "wait" else 0  # what waits for it must not go on as if it were done
        assert "detached; job goes on (`dkrr cancel job` stops it)" in dkrr(*command, exits=exits).stderr
    assert not run.has("cancel.json")
    threading.Timer(0.5, finished, (run,)).start()
    started = time.monotonic()
    result = dkrr(*command)
    assert time.monotonic() - started > 0.5
    assert command[0] != "status" or result.stdout.startswith("running, gram\nfinished\n")


def test_logs_are_events_and_what_the_driver_printed(run: RunDirectory) -> None:
    log = EventLog(run, 1)
    log.add("state", "driver 1 started")
    log.flush()
    Path(run.path("driver.log")).write_text("Traceback\n")
    first, *rest = dkrr("logs", "job").stdout.splitlines()
    assert (first[21:], rest) == ("state     driver 1 started", ["driver.log  Traceback"])
    assert json.loads(dkrr("logs", "job", "--json").stdout)["kind"] == "state"


def test_looking_imports_nothing_heavy(run: RunDirectory) -> None:
    finished(run)
    code = (
        "import sys\nfrom dkrr.cli import main\n"
        "for words in (['status', 'job'], ['logs', 'job'], ['list'], ['cancel', 'job']):\n"
        "    try:\n        main(words)\n    except SystemExit as exc:\n        assert exc.code == 0, words\n"
        "heavy = {'numpy', 'scipy', 'zarr', 'dask', 'distributed', 'pydantic', 'rich', 'sklearn', 'pyarrow'}\n"
        "sys.exit(' '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# --- progress ---------------------------------------------------------------------------------------------------------


def running(**values: Any) -> Status:
    known: dict[str, Any] = {
        "state": "running", "phase": "factorise", "tasks_done": 55, "tasks_total": 210,
        "flops_per_second": 163.2e9, "phase_seconds": 65.0, "phase_seconds_left": 41.0, "num_workers": 2,
        "num_threads": 2, "elapsed_seconds": 70.0, "memory_bytes": 812 * 2**20, "started_at": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    return Status(**(known | values))


def shown(status: Status, width: int, height: int, encoding: str = "utf-8") -> list[str]:
    from rich.console import Console

    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width, height=height, force_terminal=False, legacy_windows=False)
    console.print(board(status, live_facts(status), width, height))
    stream.seek(0)
    return stream.read().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (40, 20), (20, 10), (200, 8), (200, 6)])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_it_fits_the_terminal(width: int, height: int, encoding: str) -> None:
    lines = shown(running(given_up=[{"sentence": "went on with cg float64"}]), width, height, encoding)
    assert len(lines) <= height
    assert max(len(line) for line in lines) <= width
    text = "\n".join(lines)
    assert text.isascii() == (encoding == "ascii" or (width, height) == (200, 6))
    assert "factorise" in text
    if width >= 80 and height >= 20:
        assert lines[-1].startswith("━" * 15 if encoding == "utf-8" else "-" * 15)
        facts = ("55 of 210 tasks", "163.2 GF/s", "0:41 left", "2, 2 threads", "812 MiB", "1:10 of work", "went on")
        assert [fact for fact in facts if fact not in text] == []


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_run_that_is_driven_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    status = running()
    with ProgressDisplay(stream) as progress:
        progress.attach(lambda: status)
        progress("factorise", 0, 210, 0.0, 210e9)
        progress._live.refresh()
        status.phases = {"factorise": {"number": 0, "seconds": 12.3, "tasks": 210, "times": 1}}
        progress("solve", 0, 10, 0.0, 1e9)
    assert [
        fact for fact in ("━", "55 of 210", "factorise: 210 tasks in 12.3 s") if fact not in stream.getvalue()
    ] == []


def test_one_line_in_ten_seconds() -> None:
    now, stream = [100.0], io.StringIO()
    with ProgressDisplay(stream, lambda: now[0]) as progress:
        for second in range(35):
            now[0] = 100.0 + second
            progress("factorise", second, 100, second * 1e9, 100e9)
    assert stream.getvalue().splitlines() == [
        "factorise: 10 of 100 tasks, 1.0 GF/s, 1:30 left",
        "factorise: 20 of 100 tasks, 1.0 GF/s, 1:20 left",
        "factorise: 30 of 100 tasks, 1.0 GF/s, 1:10 left",
    ]
