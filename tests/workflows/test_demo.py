"""The demonstration refuses a small disk before it starts, ends with its table, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from dkrr.errors import NotPositiveDefiniteError
from dkrr.jobs.plan import plan
from dkrr.jobs.run import FitSummary
from dkrr.jobs.spec import JobSpec
from dkrr.models.prediction import Score

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "workflows" / "demo.py"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the demonstration works; empty before and after."""
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def write_job(path: Path, num_rows: int = 600, tile_size: int = 200) -> Path:
    path.write_text(
        f'[data]\npath = "generate:friedman?n={num_rows}&d=5&seed=0"\nstandardize = true\n'
        '[evaluate]\nfraction = 0.2\nmetric = "r2"\n'
        '[model]\nkernel = "rbf"\ngamma = 0.05\nalpha = 0.01\n'
        # tiles of a factor are what an interrupted fit leaves, and what the tests look at
        f'[solver]\nname = "cholesky"\nprecision = "float64"\ntile_size = {tile_size}\n'
        '[cluster]\nworkers = 1\nmemory_limit = "1GiB"\n'
    )
    return path


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path / "small.toml")


def replace_fit(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    monkeypatch.setattr("dkrr.jobs.run.fit_job", function)


def never(*_: Any, **__: Any) -> None:
    pytest.fail("a fit was started")


@pytest.mark.thorough
def test_the_table_comes_last_and_the_folder_is_removed(
    demo: ModuleType, job: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--folder", str(folder), str(job)]) == 0
    out, err = capfd.readouterr()
    assert [*folder.iterdir()] == []
    lines = out.rstrip("\n").splitlines()
    assert lines[0].strip() == "exact kernel ridge regression, out of core"
    assert "small.toml" in lines[2]
    labels = [line.split("  ")[1].strip() for line in lines[4:]]
    assert labels == [
        "training rows", "kernel", "ridge alpha", "Gram matrix", "tiles on disk", "workers", "peak worker memory",
        "start of workers", "factorisation", "whole fit", "relative residual", "held-out rows", "held-out score",
        "without a model",
    ]  # fmt: skip
    assert re.search(r"r2 0\.9\d*$", lines[-2].rstrip())
    assert lines[-1].endswith("r2 0, by the mean")
    assert "1 x 1 GiB" in out
    assert err.index("disk: ") < err.index("[1/1] dkrr fit small.toml")


def test_both_columns_fit_into_a_terminal_of_80_characters(
    demo: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(ROOT / "workflows" / "large.toml", folder)
    spec = JobSpec.load(folder / "large.toml")
    summary = FitSummary(
        run_directory="", model_path="", plan=plan(spec), seconds={"total": 1234.5, "start": 12.3, "factorise": 1111.1},
        tiles_computed=210, tiles_total=210, flops_per_second=1.234e14, solver="cholesky", precision="float64",
        converged=True, num_iterations=0, peak_rss_bytes={"a": 10**9},
        client_peak_rss_bytes=0, relative_residual=[1.8e-12], backward_error=[1e-17], message="",
        score=Score(2048, [0.1163], [0.9996]), metric="rmse",
    )  # fmt: skip
    demo.show(demo.table({"digits": summary, "large": summary}))
    out = capsys.readouterr().out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert (
        out.count("20,480 x 10, 1 target")
        == out.count("GB (Gram + factor)")
        == out.count("rmse 0.1163")
        == out.count("rmse 5.815, by the mean")
        == 2
    )
    assert out.count("1234.5 s") == out.count("12.3 s") == out.count("1111.1 s, 123400 GF/s") == 2


def test_a_full_disk_is_refused_before_anything_starts(
    demo: ModuleType, job: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    replace_fit(monkeypatch, never)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 10**9))
    assert demo.main(["--folder", str(folder), str(ROOT / "workflows" / "large.toml"), str(job)]) == 3
    err = capfd.readouterr().err
    assert re.search(r"disk: 3\.\d\d GB needed for a while in .*work, 1\.00 GB free", err)
    assert "error: the job writes" in err
    assert [*folder.iterdir()] == []


def test_jobs_that_fit_one_by_one_and_not_together_are_refused(
    demo: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    replace_fit(monkeypatch, never)
    jobs = [write_job(tmp_path / f"{name}.toml", num_rows=10_000, tile_size=1_000) for name in ("one", "two")]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 2**28 + 400 * 10**6))
    assert demo.main(["--folder", str(folder), *map(str, jobs)]) == 3
    assert "error: the jobs write" in capfd.readouterr().err
    assert [*folder.iterdir()] == []


def test_a_failed_fit_ends_with_its_exit_code_and_leaves_nothing(
    demo: ModuleType, job: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fit(*_: Any, **__: Any) -> None:
        raise NotPositiveDefiniteError("tile (1, 1) is not positive definite", hint="raise alpha")

    replace_fit(monkeypatch, fit)
    assert demo.main(["--folder", str(folder), str(job)]) == 5
    out, err = capfd.readouterr()
    assert out == ""
    assert err.endswith("error: tile (1, 1) is not positive definite\nhint: raise alpha\n")
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_demonstration_leaves_nothing(
    demo: ModuleType, job: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def fit(*_: Any, **__: Any) -> None:
        assert len([*folder.iterdir()]) == 1
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            signal.raise_signal(number)  # an impatient second one, while the first is dealt with
            dealt_with.append(number)
            raise
        pytest.fail("it was not interrupted")

    dealt_with: list[signal.Signals] = []
    replace_fit(monkeypatch, fit)
    before = signal.getsignal(number)
    assert demo.main(["--folder", str(folder), str(job)]) == 130
    assert dealt_with == [number]
    assert [*folder.iterdir()] == []
    assert signal.getsignal(number) is before


def test_two_jobs_of_one_name_are_refused(demo: ModuleType, job: Path, folder: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.main(["--folder", str(folder), str(job), str(job)])
    assert ended.value.code == 2


@pytest.mark.system
@pytest.mark.short
def test_ctrl_c_in_the_middle_of_a_real_fit(folder: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path / "middle.toml", num_rows=12_000, tile_size=256)
    process = subprocess.Popen(
        [sys.executable, str(DEMO), "--folder", str(folder), str(job)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not any(folder.glob(".demo-*/runs/store/factors/*/c/*/*")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no tile of the factor appeared"
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children, "there are worker processes"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, ""), err
    assert err.endswith("interrupted; everything that was written is removed again\n")
    assert [*folder.iterdir()] == []
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []
