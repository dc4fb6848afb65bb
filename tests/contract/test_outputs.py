"""What a command writes takes the place of nothing but its own earlier output, and is there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from click.testing import CliRunner

import dkrr
from dkrr.cli import main
from dkrr.errors import LockedError, StoreError
from dkrr.jobs.registry import ModelRegistry, NamedModel
from dkrr.store import files as stores
from dkrr.store.lease import hold_lock, process_record
from dkrr.store.objects import put_file
from tests.contract.helpers import contents, killed_while_removing, run, unchanged
from tests.faults import failing_at, flip
from tests.jobs.retrain.project import Project, in_process
from tests.s3 import Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]

ROWS = np.random.default_rng(5).standard_normal((40, 3))
ENDINGS = [".npy", ".csv", ".parquet", ".zarr"]


def make_model(path: Path, alpha: float = 0.1) -> Path:
    dkrr.KernelRidge(alpha=alpha, kernel="rbf", gamma=0.3).fit(ROWS, np.sin(ROWS[:, 0])).save(path)
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, a data set, a csv and a folder of Parquet files, which is the current one."""
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model.zarr")
    dkrr.ingest(ROWS, "data.zarr")
    (tmp_path / "rows.csv").write_text("a,b,c\n" + "".join(f"{a},{b},{c}\n" for a, b, c in ROWS.tolist()))
    (tmp_path / "deep").mkdir()
    np.save(tmp_path / "deep" / "rows.npy", ROWS)
    return tmp_path


def promoted() -> NamedModel:
    """The model as a version of demo, which is in production."""
    model = ModelRegistry("models").open("demo")
    model.add("model.zarr")
    model.promote()
    return model


def link(source: str, name: str) -> str:
    os.symlink(source, name)
    return name


def hard_link(source: str, name: str) -> str:
    os.link(source, name)
    return name


@pytest.mark.parametrize("option", [[], ["--overwrite"]], ids=["plain", "overwrite"])
@pytest.mark.parametrize(
    ("data", "output"),
    [
        ("data.zarr", lambda: "data.zarr"),
        ("data.zarr", lambda: "./deep/../data.zarr"),
        ("data.zarr/", lambda: "data.zarr/"),
        ("data.zarr", lambda: link("data.zarr", "other.zarr")),
        ("data.zarr", lambda: "data.zarr/inside.npy"),
        ("rows.csv", lambda: "rows.csv"),
        ("rows.csv", lambda: str(Path("rows.csv").absolute())),
        ("rows.csv", lambda: link("rows.csv", "other.csv")),
        ("rows.csv", lambda: hard_link("rows.csv", "other.csv")),
        ("data.zarr", lambda: "model.zarr"),
        ("data.zarr", lambda: "model.zarr/p.npy"),
        ("deep.zarr/rows.npy", lambda: str(shutil.copytree("deep", "deep.zarr"))),
        ("p.csv.json", lambda: str(shutil.copy("rows.csv", "p.csv.json")).removesuffix(".json")),
    ],
)
def test_an_input_is_never_the_output(place: Path, data: str, output: Callable[[], str], option: list[str]) -> None:
    name = output()
    with unchanged(place):
        run("predict", "model.zarr", data, "-o", name, *option, exits=4)


def users_file(name: str) -> None:
    Path(name).write_text("mine")


def users_folder(name: str) -> None:
    Path(name).mkdir()
    Path(name, "notes.txt").write_text("mine")


def users_array(name: str) -> None:
    shutil.copytree("model.zarr/dual_coef", name)


def users_link(name: str) -> None:
    users_file("elsewhere")
    os.symlink("elsewhere", name)


def users_stamp(name: str) -> None:
    Path(f"{name}.json").write_text('{"dkrr": "0", "mine": 1}')


def edited_predictions(name: str) -> None:
    run("predict", "model.zarr", "data.zarr", "-o", name)
    if Path(name).is_dir():
        Path(name, "notes.txt").write_text("mine")
    else:
        with open(name, "ab") as file:
            file.write(b"1.0\n")


@pytest.mark.parametrize("ending", [".csv", ".zarr"])
@pytest.mark.parametrize(
    "make",
    [users_file, users_folder, users_array, users_link, users_stamp, edited_predictions],
    ids=lambda f: f.__name__,
)
def test_only_predictions_of_dkrr_are_replaced_unless_told_so(
    place: Path, make: Callable[[str], None], ending: str
) -> None:
    name = f"out{ending}"
    make(name)
    with unchanged(place):
        run("predict", "model.zarr", "data.zarr", "-o", name, exits=4, said="--overwrite")
    run("predict", "model.zarr", "data.zarr", "-o", name, "--overwrite")
    if make is users_link:
        assert Path("elsewhere").read_text() == "mine"
    run("predict", "model.zarr", "data.zarr", "-o", name)


@pytest.mark.parametrize("ending", [".csv", ".zarr"])
@pytest.mark.parametrize("make", [users_file, users_folder, edited_predictions], ids=lambda f: f.__name__)
def test_what_was_overwritten_once_is_asked_about_again_where_it_was_put_back(
    place: Path, make: Callable[[str], None], ending: str
) -> None:
    name = f"out{ending}"
    make(name)
    shutil.copytree(name, "kept") if Path(name).is_dir() else shutil.copy(name, "kept")
    run("predict", "model.zarr", "data.zarr", "-o", name, "--overwrite")
    shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink()
    Path("kept").rename(name)
    with unchanged(place):
        run("predict", "model.zarr", "data.zarr", "-o", name, exits=4)


def test_a_folder_of_the_users_is_not_taken_for_half_made_predictions(place: Path) -> None:
    users_folder("out.csv.work")
    Path("out.npy.work").mkdir()
    dkrr.ingest(ROWS, "out.npy.work/data.zarr")  # a name that dkrr uses itself
    with unchanged(place):
        run("predict", "model.zarr", "rows.csv", "-o", "out.npy", exits=4)
        for option in ([], ["--overwrite"]):
            run("predict", "model.zarr", "data.zarr", "-o", "out.csv", *option, exits=4)


def test_a_prediction_that_was_killed_can_be_started_again_and_another_at_work_is_named(place: Path) -> None:
    command = [str(Path(sys.executable).with_name("dkrr")), "predict", "model.zarr", "rows.csv", "-o", "out.csv"]
    for number in (1, 3):  # the second takes a lock over first
        environment = {**os.environ, "DKRR_FAILPOINTS": f"write*:@{number}:sigkill"}
        assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert Path("out.csv.work/data.zarr.lock").exists()
    with hold_lock("out.csv.work"):
        run(*command[1:], exits=8)
    Path("out.csv.work/mine.partial").write_text("mine")
    run(*command[1:], exits=4)
    Path("out.csv.work/mine.partial").unlink()
    run(*command[1:])
    assert {path.name for path in place.glob("out.csv*")} == {"out.csv", "out.csv.json"}


def test_a_prediction_that_was_killed_as_it_cleared_up_is_in_nobodys_way(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree = shutil.rmtree

    def killed(folder: Any, **options: Any) -> None:
        if not str(folder).endswith((".work", "result.zarr")):
            return rmtree(folder, **options)
        for file in Path(folder).iterdir():  # files go first, and then the process is killed
            if file.is_file():
                file.unlink()
        raise KeyboardInterrupt

    given = "predict", "model.zarr", "rows.csv", "-o", "out.csv"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        run(*given, exits=None)
    assert Path("out.csv.work/result.zarr").exists()
    run(*given)
    assert not Path("out.csv.work").exists()


def test_a_prediction_that_was_killed_as_it_wrote_its_stamp_leaves_nothing_behind(place: Path) -> None:
    command = ["predict", "model.zarr", "rows.csv", "-o", "out.csv"]
    killing = "\n".join([
        "import os, signal",
        "from dkrr.cli import main",
        "replace = os.replace",
        "def killed(draft, path):",
        "    if str(path).endswith('out.csv.json'):",
        "        os.kill(os.getpid(), signal.SIGKILL)",
        "    return replace(draft, path)",
        "os.replace = killed",
        f"main({command!r})",
    ])  # fmt: skip
    assert subprocess.run([sys.executable, "-c", killing], check=False).returncode == -signal.SIGKILL
    run(*command)
    assert {path.name for path in place.glob("out.csv*")} == {"out.csv", "out.csv.json"}


def other_model(place: Path) -> None:
    shutil.rmtree(place / "model.zarr")
    make_model(place / "model.zarr", alpha=10.0)


def other_rows(place: Path) -> None:
    lines = (place / "rows.csv").read_text().splitlines()
    (place / "rows.csv").write_text("\n".join([lines[0], *lines[30:5:-1]]) + "\n")


def damaged_rows(place: Path) -> None:
    flip(place / "out.csv.work/data.zarr/X/c/0/0")


def damaged_predictions(place: Path) -> None:
    flip(next(place.glob("out.csv.work/result.zarr/predictions-*/c/0/0")))


@pytest.mark.parametrize("count", range(1, 14))
def test_a_prediction_that_is_killed_while_it_clears_its_folder_can_be_made_again(count: int, place: Path) -> None:
    command = ["predict", "model.zarr", "rows.csv", "-o", "out.csv"]
    with killed_while_removing(place / "out.csv.work", count):
        CliRunner().invoke(main, command)
    lines = (place / "rows.csv").read_text().splitlines()
    (place / "rows.csv").write_text("\n".join([*lines[:8], "1,2,3", *lines[9:]]) + "\n")
    run(*command)
    rows = np.loadtxt("rows.csv", delimiter=",", skiprows=1)
    predicted = np.loadtxt("out.csv", skiprows=1)
    np.testing.assert_allclose(predicted, dkrr.load_model("model.zarr").predict(rows), rtol=1e-12)
    assert {path.name for path in place.glob("out.csv*")} == {"out.csv", "out.csv.json"}


@pytest.mark.parametrize("count", range(1, 14))
def test_other_rows_are_predicted_by_the_version_of_their_day(count: int, place: Path) -> None:
    """Whoever predicted by the version before was killed after its output was complete."""
    demo = promoted()
    command = ["predict", "demo@production", "rows.csv", "-o", "out.csv"]
    with killed_while_removing(place / "out.csv.work", count):
        CliRunner().invoke(main, command)
    other_model(place)
    other_rows(place)
    demo.add("model.zarr")
    demo.promote()
    run(*command)
    assert json.loads(Path("out.csv.json").read_text())["version"].startswith("0002")
    rows = np.loadtxt("rows.csv", delimiter=",", skiprows=1)
    predicted = dkrr.load_model("model.zarr").predict(rows)
    np.testing.assert_allclose(np.loadtxt("out.csv", skiprows=1), predicted, rtol=1e-12)


@pytest.mark.parametrize(
    "change", [other_model, other_rows, damaged_rows, damaged_predictions], ids=lambda change: change.__name__
)
def test_what_an_interrupted_prediction_left_is_made_anew_where_it_does_not_fit(
    place: Path, change: Callable[[Path], None]
) -> None:
    command = ["predict", "model.zarr", "rows.csv", "-o", "out.csv"]
    with failing_at("write*/out.csv.json:1:eio"):
        run(*command, exits=4)
    assert list(Path().glob("out.csv.work/result.zarr/predictions-*/c/0/0"))
    change(place)
    run(*command)
    rows = np.loadtxt("rows.csv", delimiter=",", skiprows=1)
    predicted = np.loadtxt("out.csv", skiprows=1)
    np.testing.assert_allclose(predicted, dkrr.load_model("model.zarr").predict(rows), rtol=1e-12)
    assert {path.name for path in place.glob("out.csv*")} == {"out.csv", "out.csv.json"}


def test_data_that_are_damaged_do_not_cost_what_was_predicted(place: Path) -> None:
    command = ["predict", "model.zarr", "data.zarr", "-o", "out.csv"]
    with failing_at("write*/out.csv.json:1:eio"):
        run(*command, exits=4)
    flip(place / "data.zarr/X/c/0/0")
    with unchanged(place / "out.csv.work"):
        run(*command, exits=4)


@pytest.mark.parametrize("ending", ENDINGS)
def test_predictions_are_replaced_by_others_and_say_who_made_them(place: Path, ending: str) -> None:
    make_model(place / "other.zarr", alpha=10.0)
    found = []
    for model in ("model.zarr", "other.zarr"):
        run("predict", model, "data.zarr", "-o", f"p{ending}")
        found.append(contents(place / f"p{ending}") or Path(f"p{ending}").read_bytes())
        said = json.loads(Path(f"p{ending}.json").read_text())
        assert (said["num_rows"], said["dkrr"]) == (40, dkrr.__version__)
    assert found[0] != found[1]
    assert {path.name for path in place.glob("p.*")} == {f"p{ending}", f"p{ending}.json"}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("site", ["write*.json", "sync*/predictions.*", "sync{place}"])
def test_an_output_is_whole_after_any_fault(place: Path, ending: str, site: str) -> None:
    make_model(place / "other.zarr", alpha=10.0)
    output = place / f"p{ending}"

    def predicted() -> Any:
        return contents(output) if output.is_dir() else output.read_bytes() if output.exists() else None

    fault = f"{site.format(place=place)}:1:eio"
    with failing_at(fault):
        run("predict", "model.zarr", "data.zarr", "-o", output, exits=None)
    first = predicted()
    assert (first is None) == ("{place}" not in site)
    run("predict", "model.zarr", "data.zarr", "-o", output)
    whole = predicted()
    assert first in (None, whole)
    with failing_at(fault):
        run("predict", "other.zarr", "data.zarr", "-o", output, exits=None)
    assert (predicted() == whole) == ("{place}" not in site)
    run("predict", "other.zarr", "data.zarr", "-o", output)
    assert predicted() not in (None, whole)
    assert {path.name for path in place.glob("p.*")} == {output.name, f"{output.name}.json"}


def test_json_has_null_for_what_is_no_number(place: Path) -> None:
    dkrr.ingest(ROWS, "same.zarr", y=np.ones(40))
    result = run("evaluate", "model.zarr", "same.zarr", "--json")
    assert json.loads(result.stdout, parse_constant=pytest.fail)["r2"] is None


def test_nothing_is_written_beside_a_version_when_it_is_scored(place: Path) -> None:
    model = promoted()
    (place / "scored.csv").write_text("a,b,c,y\n" + "".join(f"{a},{b},{c},{np.sin(a)}\n" for a, b, c in ROWS.tolist()))
    folders = {path: path.stat().st_mtime_ns for path in (place / "models").rglob("*") if path.is_dir()}
    with unchanged(place):
        for name in ("demo@production", model.resolve().model_path, "model.zarr"):
            result = run("evaluate", name, "scored.csv", "--registry", "models", "--json")
            assert json.loads(result.stdout)["r2"] > 0.9
        # a folder's time changes when something appears in it, though it be gone again
        assert {path: path.stat().st_mtime_ns for path in folders} == folders


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_model_replaces_a_model_and_nothing_else(place: Path) -> None:
    model = dkrr.load_model("model.zarr")
    users_folder("folder")
    users_file("file")
    os.symlink("model.zarr", "link.zarr")
    os.symlink("nowhere", "dangling.zarr")
    shutil.copytree("model.zarr", "mixed.zarr")
    Path("mixed.zarr/X_fit/notes.txt").write_text("mine")
    with unchanged(place):
        for name in ("folder", "file", "data.zarr", "rows.csv", "link.zarr", "dangling.zarr", "mixed.zarr"):
            for overwrite in (False, True):
                with pytest.raises(dkrr.StoreError):
                    model.save(name, overwrite=overwrite)
    model.save("model.zarr", overwrite=True)  # over itself
    np.testing.assert_array_equal(dkrr.load_model("model.zarr").predict(ROWS), model.predict(ROWS))


def test_a_model_whose_rows_are_on_disk_is_saved_over_itself(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dkrr.models.model.IN_MEMORY_BYTES", 0)
    model = dkrr.load_model("model.zarr")
    expected = model.predict(ROWS)
    model.save("model.zarr", overwrite=True)
    np.testing.assert_array_equal(model.predict(ROWS), expected)
    np.testing.assert_array_equal(dkrr.load_model("model.zarr").predict(ROWS), expected)


def test_predictions_say_which_model_made_them_where_another_took_its_place(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dkrr.jobs import predict

    first, compute = dkrr.load_model("model.zarr"), predict.predict_dataset

    def replaced(*args: Any, **options: Any) -> Any:
        found = compute(*args, **options)
        other = make_model(place / "other.zarr", alpha=10.0)
        dkrr.load_model(other).save("model.zarr", overwrite=True)
        return found

    monkeypatch.setattr(predict, "predict_dataset", replaced)
    run("predict", "model.zarr", "rows.csv", "-o", "out.npy")
    np.testing.assert_allclose(np.load("out.npy"), first.predict(ROWS))
    assert json.loads(Path("out.npy.json").read_text())["model_digest"] == first.digest


def test_predictions_are_not_written_into_what_they_are_made_from(place: Path) -> None:
    x = np.sort(ROWS[:, :1], axis=0)
    estimator = dkrr.KernelRidge(alpha=0.1, kernel="rbf", gamma=0.3).fit(x, np.sin(x[:, 0]))
    estimator.save("one.zarr")
    model = estimator._model
    expected = model.predict(x)
    before = x.copy()
    for out in (x, x[:, 0], model.x_fit.read(0, 40) if model.x_fit is not None else x):
        with pytest.raises(dkrr.ParameterError, match="out"):
            model.predict(x, out=out)
    rows = np.lib.format.open_memmap("rows.npy", mode="w+", dtype=np.float64, shape=(40, 1))
    rows[:] = x
    again = np.lib.format.open_memmap("rows.npy", mode="r+")
    with pytest.raises(dkrr.ParameterError, match="out"):
        model.predict(rows, out=again)
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(rows, before)
    np.testing.assert_array_equal(model.predict(x, out=np.empty(40)), expected)
    table = np.zeros((40, 2))
    table[:, 0] = x[:, 0]
    np.testing.assert_array_equal(model.predict(table[:, :1], out=table[:, 1]), expected)  # beside, and not over


class CrashError(BaseException):
    """The process is gone: nothing that it would do on its way out happens."""


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "renames"])
def test_a_crash_while_a_model_is_replaced_leaves_one_that_gc_keeps(
    place: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dkrr.store import files as stores

    (place / "store" / "factors").mkdir(parents=True)
    old, new = dkrr.load_model("model.zarr"), dkrr.load_model(make_model(place / "other.zarr", alpha=10.0))
    answers = [model.predict(ROWS) for model in (old, new)]
    exchange = stores._rename if exchanges else lambda *_: False
    steps = 0
    found = answers[0]
    while True:
        if not np.array_equal(found, answers[0]):
            old.save("model.zarr", overwrite=True)
        steps += 1
        left = [steps]

        def step(function: Callable[..., Any], left: list[int] = left) -> Callable[..., Any]:
            def stepped(*arguments: Any, **options: Any) -> Any:
                left[0] -= 1
                if left[0] <= 0:
                    raise CrashError
                return function(*arguments, **options)

            return stepped

        with monkeypatch.context() as patch:
            patch.setattr("dkrr.store.files._rename", step(exchange))
            for name in ("os.replace", "os.rename", "os.unlink", "shutil.rmtree"):
                patch.setattr(name, step(getattr(os if name.startswith("os") else shutil, name.partition(".")[2])))
            try:
                new.save("model.zarr", overwrite=True)
            except CrashError:
                crashed = True
            else:
                crashed = False
        for lock in place.glob("model.zarr.lock"):  # of a process that is gone
            held = stores.read_json(place, lock.name)
            stores.write_json(place, lock.name, held | {"owner": held["owner"] | {"pid": 2**30}})
        # what a crash left is old, and the garbage collector comes by before anybody has looked
        run("gc", "store", "--older-than", -1, "--yes")
        found = dkrr.load_model("model.zarr").predict(ROWS)
        assert any(np.array_equal(found, answer) for answer in answers)
        if not crashed:
            break
    assert steps > 8
    np.testing.assert_array_equal(found, answers[1])
    assert {path.name for path in place.glob("model.zarr*")} == {"model.zarr"}


@pytest.mark.parametrize("steps", [True, False], ids=["in one step", "renames"])
@pytest.mark.parametrize("what", ["model", "model, overwrite", *ENDINGS])
def test_what_came_while_an_output_was_made_stays(
    place: Path, what: str, steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = place / f"out{'.zarr' if what.startswith('model') else what}"
    put_in_place = stores.put_in_place

    def meanwhile(new: Path, path: Path, check: Any) -> None:
        if new.is_dir():
            (path / "deep").mkdir(parents=True)
        (path / "deep" / "notes.txt" if new.is_dir() else path).write_text("three days of work")
        put_in_place(new, path, check)

    for module in ("jobs.predict", "models.model"):
        monkeypatch.setattr(f"dkrr.{module}.put_in_place", meanwhile)
    if not steps:
        monkeypatch.setattr("dkrr.store.files._rename", lambda *_: False)
    if what.startswith("model"):
        model = dkrr.load_model("model.zarr")
        with pytest.raises(StoreError, match="came while the model was written"):
            model.save(output, overwrite=what.endswith("overwrite"))
    else:
        run("predict", "model.zarr", "rows.csv", "-o", output, exits=4, said="came while the predictions were made")
    assert contents(place).keys() >= {f"{output.name}/deep/notes.txt" if output.is_dir() else output.name}
    assert not list(place.glob("out*partial")) + list(place.glob("out*replaced"))
    if output.is_file():
        assert output.read_text() == "three days of work"


@pytest.mark.parametrize("steps", [True, False], ids=["in one step", "renames"])
def test_a_process_that_stood_still_before_the_last_step_takes_nothing_away(
    place: Path, steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock was taken over meanwhile, and another model saved."""
    rename, asked = stores._rename, list[Path]()

    def stands_still(new: Path, path: Path, how: int) -> bool:
        if path.name == "model.zarr" and how == stores.EXCHANGE and not asked:
            asked.append(path)
            lock = place / "model.zarr.lock"
            lock.write_text(json.dumps({**json.loads(lock.read_text()), "crc32c": None, "token": "another's"}))
            shutil.rmtree(path)
            shutil.copytree(other, path)
        return rename(new, path, how) if steps else False

    first, other = dkrr.load_model("model.zarr"), make_model(place / "other.zarr", alpha=10.0)
    monkeypatch.setattr(stores, "_rename", stands_still)
    with pytest.raises(LockedError):
        first.save("model.zarr", overwrite=True)
    assert asked
    assert dkrr.load_model("model.zarr").provenance["alpha"] == [10.0]


# --- other commands ---------------------------------------------------------------------------------------------------


def test_rows_are_not_ingested_into_where_they_come_from(place: Path) -> None:
    for source, dest, *options in (
        ("deep/rows.npy", "deep"),
        ("rows.csv", "rows.csv"),
        ("data.zarr", "data.zarr", "--append"),
        ("data.zarr/X", "data.zarr"),
        ("data.zarr/X", "data.zarr", "--append"),
        ("data.zarr", "data.zarr/X"),
        ("data.zarr", "data.zarr/more.zarr"),
        ("data.zarr", link("data.zarr", "same.zarr"), "--append"),
    ):
        with unchanged(place):
            run("ingest", source, dest, *options, exits=4)


def test_an_unfinished_data_set_is_not_cleared_for_rows_that_lie_in_it(place: Path) -> None:
    shutil.copytree("data.zarr", "half.zarr")
    document = json.loads(Path("half.zarr/zarr.json").read_text())
    document["attributes"] = {"dkrr_format": "dataset", "format_version": 1, "complete": False}
    Path("half.zarr/zarr.json").write_text(json.dumps(document))
    with unchanged(place):
        run("ingest", "half.zarr/X", "half.zarr", exits=4)


def test_what_appears_while_a_search_runs_is_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    (place / "job.toml").write_text(
        '[data]\npath = "rows.csv"\ntarget = "c"\n[model]\nkernel = "rbf"\n[tune]\nrows = 30\nsearch_rows = [30]\n'
    )
    with hold_lock("best.toml"):
        run("tune", "job.toml", "-o", "best.toml", "--no-picture", exits=8)
    search = dkrr.jobs.tune.tune

    def searched(*arguments: Any, **options: Any) -> Any:
        found = search(*arguments, **options)
        Path("best.toml").write_text("mine")
        return found

    monkeypatch.setattr("dkrr.jobs.tune.tune", searched)
    run("tune", "job.toml", "-o", "best.toml", "--no-picture", exits=2, said="best.toml exists")
    assert Path("best.toml").read_text() == "mine"


@pytest.mark.parametrize(
    "theirs", ["status.json", "driver.json", "job.json", "drivers/ford.txt", "draft.partial", "report.html"]
)
def test_a_folder_of_the_users_is_not_taken_for_a_run(place: Path, theirs: str) -> None:
    (place / "web/drivers").mkdir(parents=True)
    (place / "web" / theirs).write_text('{"my": "service status"}')
    (place / "job.toml").write_text(
        '[data]\npath = "rows.csv"\ntarget = "c"\n[model]\nkernel = "rbf"\n[output]\ndirectory = "web"\n'
    )
    with unchanged(place):
        for command in ("fit", "submit"):
            run(command, "job.toml", exits=4, said="web exists and is not a run of dkrr")


@pytest.mark.parametrize("theirs", ["thesis.txt", "drivers/ford.txt"])
def test_a_run_that_comes_to_nothing_takes_nothing_of_the_users_with_it(place: Path, theirs: str) -> None:
    record = '{"host": "elsewhere", "pid": 1, "epoch": 1, "token": "0", "counter": 0, "released": true}'
    (place / "web/drivers").mkdir(parents=True)
    for name in ("driver.json", "drivers/000001.json"):  # all that a driver wrote that was killed as it began
        (place / "web" / name).write_text(record)
    (place / f"web/status.json.{'0' * 32}.partial").write_text("{")
    (place / "job.toml").write_text('[data]\npath = "nowhere.csv"\n[output]\ndirectory = "web"\n')
    (place / "web" / theirs).write_text("years of work")
    with unchanged(place):
        run("fit", "job.toml", exits=4)
    (place / "web" / theirs).unlink()
    run("fit", "job.toml", exits=4, said="nowhere.csv")
    assert not (place / "web").exists()


@pytest.mark.parametrize("theirs", ["job.json", "status.json", "thesis.txt"])
def test_a_folder_of_the_users_is_not_taken_for_the_records_of_retraining(theirs: str, tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    project.deliver("n1", seed=1)
    folder = project.folder / "models" / "demo" / "retrain"
    folder.mkdir(parents=True)
    (folder / theirs).write_text('{"state": "CA", "version": 3}')
    said = r"retrain exists and is not the records of a retrain job"
    with unchanged(folder), pytest.raises(StoreError, match=said):
        project.run()


def test_a_fit_and_a_retrain_job_share_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    project = Project(tmp_path / "p")
    rows = project.deliver("n1", seed=1)
    assert project.run().outcome == "promoted"
    job = tmp_path / "job.toml"
    job.write_text(f'[data]\npath = "{rows}"\ntarget = "y"\n[output]\ndirectory = "p/models/demo/retrain"\n')
    run("fit", job, exits=4, said="retrain exists and is not a run of dkrr")
    assert project.run().outcome == "nothing new"
    project.document["retrain"]["name"] = "other"
    job.write_text(job.read_text().replace("/demo/", "/other/"))
    run("fit", job)
    with pytest.raises(StoreError, match=r"retrain exists and is not the records of a retrain job"):
        project.run()


def test_what_says_that_a_folder_is_a_run_says_it_to_every_command(place: Path) -> None:
    (place / "web").mkdir()
    (place / "web" / "job.json").write_text('{"name": "web", "version": 3}')
    run("info", "web", exits=4, said="web is not a data set, model, Gram matrix, factor or run")
    (place / "web" / "report.html").write_text("my figures")
    with unchanged(place):
        for command in ("report", "status", "cancel", "resume"):
            run(command, "web", exits=4, said="no run 'web'")


def test_a_submission_that_was_cut_off_is_made_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "job.toml").write_text(f'[data]\npath = "{place}/a.npy"\ntarget = -1\n[output]\ndirectory = "web"\n')
    np.save(place / "a.npy", ROWS)
    monkeypatch.setattr("dkrr.jobs.driver.start_driver", lambda run: {"kind": "here", **process_record()})
    write = stores.write_key
    for number in (1, 3):  # the second takes a lock over first
        written: list[str] = []

        def cut_off(location: str, key: str, *parts: Any, **options: Any) -> None:
            if len(written) == number:  # noqa: B023
                raise OSError("cut off")
            written.append(key)  # noqa: B023
            write(location, key, *parts, **options)

        with monkeypatch.context() as patch:
            patch.setattr(stores, "write_key", cut_off)
            patch.setattr("dkrr.jobs.run_directory.write_key", cut_off)
            run("submit", "job.toml", exits=None)
        assert written
    run("submit", "job.toml")


def test_a_job_file_is_never_replaced(place: Path) -> None:
    users_file("job.toml")
    os.symlink("nowhere.toml", "link.toml")
    with unchanged(place):
        for name in ("job.toml", "link.toml", "rows.csv"):
            run("init", "rows.csv", "-o", name, exits=2)


def test_a_search_replaces_none_of_the_users_files(place: Path) -> None:
    data = place / "rows.csv"
    (place / "job.toml").write_text(f'[data]\npath = "{data}"\ntarget = [-1]\n[model]\nkernel = "rbf"\ngamma = 1.0\n')
    users_file("best.search.json")
    users_file("other.trials.jsonl")
    users_file("third.search.png")
    users_file("fourth.search.png")  # beside what a search left that drew none
    Path("fourth.search.json").write_text('{"format": 1, "num_rows": 9, "feature_names": ["a"], "picture": false}')
    with unchanged(place):
        for name in ("best.toml", "other.toml", "third.toml", "fourth.toml", "job.toml"):
            run(
                "tune",
                "job.toml",
                "-o",
                name,
                "--picture" if name in ("third.toml", "fourth.toml") else "--no-picture",
                exits=2,
                said="exists",
            )


def test_a_report_replaces_a_report_and_nothing_else(place: Path) -> None:
    (place / "job.toml").write_text(
        '[data]\npath = "rows.csv"\ntarget = [-1]\n[model]\nkernel = "rbf"\ngamma = 1.0\n[solver]\ntile_size = 40\n'
        '[cluster]\nworkers = 0\n[output]\ndirectory = "runs/a"\n'
    )
    from dkrr.jobs.run_directory import RunDirectory, Status, write_status

    write_status(RunDirectory("runs/a"), Status(state="failed"))
    for name in ("notes.html", "rows.csv"):
        if name == "notes.html":
            users_file(name)
        with unchanged(place):
            run("report", "runs/a", "-o", name, exits=4)
    for _ in range(2):
        run("report", "runs/a", "-o", "report.html")


@pytest.mark.parametrize("inside", ["other.zarr", "other.zarr/X_fit", "data.zarr", "version", "by_link"])
def test_nothing_is_written_into_a_model_a_version_or_a_data_set(place: Path, inside: str) -> None:
    make_model(place / "other.zarr", alpha=10.0)
    folder, version = place / inside, promoted()
    if inside == "version":
        folder = Path(version.resolve().model_path).parent
    elif inside == "by_link":
        os.symlink("other.zarr", folder)
    (place / "job.toml").write_text(
        f'[data]\npath = "rows.csv"\ntarget = "c"\n[model]\nkernel = "rbf"\n[output]\ndirectory = "{folder}/run"\n'
    )
    with unchanged(place):
        for command in (
            ("predict", "model.zarr", "rows.csv", "-o", folder / "p.csv"),
            ("predict", "model.zarr", "rows.csv", "-o", folder / "p.csv", "--overwrite"),
            ("ingest", "rows.csv", folder / "in.zarr"),
            ("ingest", "rows.csv", folder / "X-3"),
            ("fit", "job.toml"),
            ("submit", "job.toml"),
        ):
            run(*command, exits=4)
        with pytest.raises(dkrr.StoreError):
            dkrr.load_model("model.zarr").save(folder / "new.zarr")


def test_from_inside_a_model_one_writes_outside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "rows.zarr").mkdir()
    monkeypatch.chdir("model.zarr")
    run("predict", "../model.zarr", "../rows.csv", "-o", "../p.csv")
    run("ingest", "../rows.csv", "../rows.zarr")
    run("predict", "../model.zarr", "../rows.csv", "-o", "p.csv", exits=4)
    dkrr.load_model(".").save(place / "model.zarr", overwrite=True)


@pytest.mark.parametrize("link", ["of the data set", "of its folder"])
def test_a_data_set_has_one_writer_by_whatever_path(link: str, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    there, other = tmp_path / "disk" / "data.zarr", tmp_path / "data.zarr"
    if link == "of its folder":
        (tmp_path / "link").symlink_to("disk")
        other = tmp_path / "link" / "data.zarr"
    else:
        other.symlink_to("disk/data.zarr")
    before = dkrr.ingest(ROWS, there).num_rows
    refused = []

    def second(block: Any) -> Any:
        """Rows of the first writer, read while it writes."""
        if block.size:
            with pytest.raises(LockedError) as caught:
                dkrr.ingest(ROWS + 1.0, there, append=True)
            refused.append(caught.value)
        return block

    rows = da.from_array(ROWS, chunks=(20, 3)).map_blocks(second, dtype=float, meta=np.empty((0, 0)))
    dkrr.ingest(rows, other, append=True)
    assert refused
    dataset = dkrr.open_dataset(other)
    assert dataset.num_rows == before + len(ROWS)
    dataset.verify()


def test_a_model_with_files_of_somebody_is_refused_before_the_work_and_keeps_its_figures(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    (place / "job.toml").write_text('[data]\npath = "rows.csv"\ntarget = [-1]\n[model]\nkernel = "rbf"\n')
    run("fit", "job.toml")
    (place / "runs/job/model.zarr/notes.txt").write_text("mine")
    with open("rows.csv", "a") as file:
        file.write("1,2,3\n")
    with unchanged(place / "runs/job/model.zarr"):
        run("fit", "job.toml", exits=4, said="holds something else")
    assert (place / "runs/job/result.json").exists()


def test_what_somebody_keeps_among_the_runs_of_retraining_outlives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    project = Project(tmp_path / "p")
    first = Path(project.nights(1).fit["run"])
    for folder in (first, first.with_name("plots"), (staged := first.parents[1] / "staged") / "my.zarr"):
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "notes.txt").write_text("mine")
    project.nights(2)
    assert contents(first) == contents(first.with_name("plots")) == {"notes.txt": b"mine"}
    assert contents(staged) == {"my.zarr/notes.txt": b"mine"}


@pytest.mark.parametrize("asked", ["leave_one_out = true", "intervals = 0.9"])
def test_what_somebody_keeps_beside_leave_one_out_errors_stays(
    asked: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    (place / "job.toml").write_text(
        f'[data]\npath = "rows.csv"\ntarget = [-1]\n[evaluate]\n{asked}\n[model]\nkernel = "rbf"\ngamma = 1.0\n'
    )
    run("fit", "job.toml")
    folder = place / "runs/job/leave_one_out.zarr"
    assert folder.exists() == ("leave_one_out" in asked)
    folder.mkdir(exist_ok=True)
    (folder / "notes.txt").write_text("mine")
    os.utime("rows.csv")
    run("fit", "job.toml")
    assert (folder / "notes.txt").read_text() == "mine"


def test_what_somebody_keeps_in_the_folder_of_a_version_outlives_it(place: Path) -> None:
    model = promoted()
    note = Path(model.resolve("production").location)
    for name in ("notes.txt", "model.zarr/notes.txt"):
        (note / name).write_text("mine")
    make_model(place / "other.zarr", alpha=0.2)
    model.promote(model.add("other.zarr").id)
    model.change(lambda aliases: aliases.moved(previous=None), why="test")
    run("models", "prune", "demo", "--keep", "0", "--grace", "0", said="deleted")
    assert contents(note) == {"notes.txt": b"mine", "model.zarr/notes.txt": b"mine"}


def test_an_output_at_an_address_is_not_written_by_who_has_lost_its_lock(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    X = np.random.default_rng(0).random((5000, 2))
    dkrr.KernelRidge(kernel="rbf").fit(X[:50], X[:50, 0]).save(tmp_path / "model.zarr")
    np.save(tmp_path / "x.npy", X)
    monkeypatch.setattr("dkrr.jobs.predict.BLOCK_ROWS", 1000)
    put, count = put_file, list[Any]()

    def then_taken_over(*given: Any) -> Any:
        put(*given)
        count.append(given)
        if len(count) == 2:
            (lock,) = (key for key in stores.list_keys(bucket.url("")) if key == "out.zarr.work.lock")
            stores.delete_key(bucket.url(""), lock)

    monkeypatch.setattr("dkrr.jobs.predict.put_file", then_taken_over)
    run("predict", tmp_path / "model.zarr", tmp_path / "x.npy", "-o", bucket.url("out.zarr"), exits=8)
    assert len(count) == 2
    assert "zarr.json" not in stores.list_keys(bucket.url("out.zarr"))
