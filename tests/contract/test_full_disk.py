"""A disk that fills up ends a command with exit code 3, and with room again the same command does its work."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import dkrr
from dkrr.cli import main
from dkrr.engine.tasks import InProcessExecutor
from dkrr.jobs.registry import ModelRegistry
from dkrr.selection.choice import TuneSettings
from dkrr.selection.tuning import tune
from tests.contract.helpers import run
from tests.jobs.retrain.project import in_process

X = np.random.default_rng(2).standard_normal((60, 3))
Y = np.sin(X[:, 0])
JOB = """
[data]
path = "data.csv"
target = [-1]
[evaluate]
fraction = 0.2
[model]
kernel = "rbf"
gamma = 0.1
alpha = 0.1
[solver]
name = "{solver}"
tile_size = 32
[output]
directory = "runs/a"
"""


@contextlib.contextmanager
def full_from(number: int) -> Iterator[list[int]]:
    """The disk is full from the given write on: every file appears by a rename or a link, and none does any more."""
    seen = [0]

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **options: Any) -> Any:
            seen[0] += 1
            if seen[0] >= number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))
            return function(*arguments, **options)

        return act

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "link"):
            patch.setattr(os, name, failing(getattr(os, name)))
        patch.setattr("dkrr.engine.tasks.IO_ATTEMPTS", 1)
        yield seen


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    in_process(monkeypatch)
    Path("data.csv").write_text("a,b,c,y\n" + "".join(f"{a},{b},{c},{np.sin(a)}\n" for a, b, c in X.tolist()))
    return tmp_path


def tried(*arguments: object, numbers: Iterator[int], tidy: Callable[[], None] = lambda: None) -> None:
    """Let the disk fill up earlier and later, each time in a fresh place, until it does not matter."""
    for number in numbers:
        with full_from(number) as seen:
            result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        if seen[0] < number:
            assert result.exit_code == 0, result.output
            return
        assert result.exit_code == 3, (number, result.output)
        assert re.search("full|no space", result.output), result.output
        assert "free" in result.output
        run(*arguments)
        assert not list(Path().rglob("*.partial"))
        tidy()
    pytest.fail("the disk was never large enough")


def fibonacci() -> Iterator[int]:
    a, b = 1, 2
    while True:
        yield a
        a, b = b, a + b


@pytest.mark.parametrize("solver", ["cholesky", "cg"])
def test_a_fit(place: Path, solver: str) -> None:
    Path("job.toml").write_text(JOB.format(solver=solver))

    def tidy() -> None:
        assert json.loads(Path("runs/a/status.json").read_text())["state"] == "finished"
        dkrr.load_model("runs/a/model.zarr")
        shutil.rmtree("runs")

    tried("fit", "job.toml", numbers=fibonacci(), tidy=tidy)


def test_what_a_full_disk_ended_is_said_in_its_status(place: Path) -> None:
    Path("job.toml").write_text(JOB.format(solver="cholesky"))
    run("plan", "job.toml")
    failing = os.replace
    with pytest.MonkeyPatch.context() as patch:

        def full(source: Any, target: Any, **options: Any) -> None:
            if "model.zarr" in str(target):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
            failing(source, target, **options)

        patch.setattr(os, "replace", full)
        run("fit", "job.toml", exits=3)
    status = json.loads(Path("runs/a/status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 3)
    assert "free" in status["error"]["message"]
    run("fit", "job.toml")


def test_the_first_file_of_a_run_is_all_that_a_killed_driver_left(place: Path) -> None:
    Path("job.toml").write_text(JOB.format(solver="cholesky"))
    with full_from(2):
        run("fit", "job.toml", exits=3)
    Path("runs/a/drivers").mkdir(parents=True, exist_ok=True)
    run("fit", "job.toml")


def test_a_first_job_file(place: Path) -> None:
    tried("init", "data.csv", "-o", "job.toml", numbers=fibonacci(), tidy=lambda: Path("job.toml").unlink())


def test_rows_that_are_ingested(place: Path) -> None:
    with full_from(1), pytest.raises(dkrr.StorageFullError):
        dkrr.ingest("data.csv", "data.zarr")
    tried("ingest", "data.csv", "data.zarr", numbers=fibonacci(), tidy=lambda: shutil.rmtree("data.zarr"))


@pytest.mark.parametrize("ending", [".csv", ".zarr"])
def test_predictions(place: Path, ending: str) -> None:
    dkrr.KernelRidge(kernel="rbf", gamma=0.1).fit(X, Y).save("model.zarr")
    np.save("rows.npy", X)

    def tidy() -> None:
        assert {path.name for path in Path().glob("p.*")} == {f"p{ending}", f"p{ending}.json"}
        Path(f"p{ending}.json").unlink()
        shutil.rmtree("p.zarr") if ending == ".zarr" else Path("p.csv").unlink()

    tried("predict", "model.zarr", "rows.npy", "-o", f"p{ending}", numbers=fibonacci(), tidy=tidy)


def test_a_promotion(place: Path) -> None:
    dkrr.KernelRidge(kernel="rbf", gamma=0.1).fit(X, Y).save("model.zarr")
    model = ModelRegistry("models").open("demo")
    first, second = model.add("model.zarr", key="1" * 40), model.add("model.zarr", key="2" * 40)
    model.promote(first.id)

    def tidy() -> None:
        model.promote(first.id)

    tried("models", "promote", "demo", second.id, "--registry", "models", numbers=fibonacci(), tidy=tidy)


@pytest.mark.parametrize("solver", ["cholesky", "cg", "nystrom", "primal"])
def test_an_estimator_and_a_model(place: Path, solver: str) -> None:
    kernel = "linear" if solver == "primal" else "rbf"
    for number in fibonacci():
        estimator = dkrr.KernelRidge(kernel=kernel, solver=solver, tile_size=32, store=str(place / f"store-{number}"))
        with full_from(number) as seen, contextlib.suppress(dkrr.StorageFullError):
            estimator.fit(X, Y).save(place / f"{number}.zarr")
        if seen[0] < number:
            break
        estimator.fit(X, Y).save(place / f"{number}.zarr")
        dkrr.load_model(place / f"{number}.zarr")


def tuned(place: Path) -> Callable[[], object]:
    settings = TuneSettings(rows=60, search_rows=(30,))
    return lambda: tune(X, Y, settings=settings, store=str(place / "store"), executor=InProcessExecutor())


def left_out(place: Path, **options: Any) -> Callable[[], object]:
    return dkrr.KernelRidge(kernel="rbf", tile_size=32, store=str(place / "store"), **options).fit(X, Y).leave_one_out


def matrix(place: Path) -> Callable[[], object]:
    def computed() -> object:
        return dkrr.gram_matrix(X, store=str(place / "store"), tile_size=32).compute(scheduler="synchronous")

    return computed


BESIDE_FITS: dict[str, Callable[[Path], Callable[[], object]]] = {
    "cross-validation": lambda place: (
        lambda: dkrr.KernelRidgeCV(kernel="rbf", tile_size=32, store=str(place / "store")).fit(X, Y)
    ),
    "search": tuned,
    "leave-one-out": left_out,
    "leave-one-out after cg": lambda place: left_out(place, solver="cg"),
    "Gram matrix": matrix,
}


@pytest.mark.parametrize("name", BESIDE_FITS)
def test_what_is_computed_beside_a_fit(place: Path, name: str) -> None:
    for number in fibonacci():
        compute = BESIDE_FITS[name](place)
        with full_from(number) as seen, contextlib.suppress(dkrr.StorageFullError):
            compute()
        if seen[0] < number:
            break
        compute()
        shutil.rmtree(place / "store")
