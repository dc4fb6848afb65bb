"""``dkrr gc`` takes nothing that a finished run, a model, an alias or another user of the store needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import dkrr
from dkrr.cli import main
from dkrr.jobs.inspection import delete_garbage, find_garbage
from dkrr.store.files import json_bytes, note_user, read_json, users_of
from dkrr.store.lease import hold_lock
from tests.contract.helpers import without_permission
from tests.faults import failing_at
from tests.jobs.retrain.project import in_process, rows_of
from tests.s3 import Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


def is_stopped(*arguments: object, by: str) -> None:
    """The collection ends, because something cannot be known."""
    result = CliRunner().invoke(main, ["gc", *map(str, arguments), "--yes"])
    assert result.exit_code == 4, result.output
    assert by in result.stderr


def job(folder: Path, directory: object, store: object, alpha: float = 0.1) -> Path:
    """A job file that fits a few rows."""
    folder.mkdir(exist_ok=True, parents=True)
    np.savetxt(folder / "rows.csv", rows_of(0, 150), delimiter=",", header="a,b,c,y", comments="")
    path = folder / "job.toml"
    path.write_text(
        f'[data]\npath = "rows.csv"\ntarget = "y"\nstandardize = true\n'
        f'[model]\nkernel = "rbf"\ngamma = 0.2\nalpha = {alpha}\n'
        f'[solver]\nname = "cholesky"\ntile_size = 64\n'
        f'[output]\ndirectory = "{directory}"\nstore = "{store}"\n'
    )
    return path


def make_old(*folders: Path) -> None:
    """As if nothing had changed for two hours."""
    then = time.time() - 7200
    for folder in folders:
        for parent, names, files in os.walk(folder):
            for name in [".", *names, *files]:
                os.utime(Path(parent) / name, (then, then))


def arrays(store: Path) -> set[str]:
    return {path.name for path in [*store.glob("factors/*.zarr"), *store.glob("rows/*.zarr")]}


@pytest.mark.parametrize("named_by", ["job file", "store"])
def test_what_a_run_elsewhere_needs_is_kept(named_by: str, tmp_path: Path) -> None:
    store = tmp_path / "shared/store"
    path = job(tmp_path / "project", tmp_path / "results/{id}", store)
    run("fit", path)
    needed = arrays(store)
    make_old(tmp_path)
    if named_by == "job file":  # a run of before there were notes
        shutil.rmtree(store / "users", ignore_errors=True)
    run("gc", path if named_by == "job file" else store, "--yes")
    assert arrays(store) == needed

    if named_by == "store":
        (tmp_path / "results").rename(tmp_path / "not mounted")
        is_stopped(store, by=str(tmp_path / "results"))
        (tmp_path / "not mounted").rename(tmp_path / "results")

    # moved together they find each other
    shutil.move(tmp_path / "shared", tmp_path / "moved/shared")
    shutil.move(tmp_path / "results", tmp_path / "moved/results")
    if named_by == "store":
        run("gc", tmp_path / "moved/shared/store", "--yes")
        assert arrays(tmp_path / "moved/shared/store") == needed

    # of a run that was removed nothing is needed, nor is the note of it
    run_directory = next(path for path in (tmp_path / "moved/results").iterdir() if path.is_dir())
    shutil.rmtree(run_directory)
    (tmp_path / "results").mkdir()
    run("gc", tmp_path / "moved/shared/store", "--yes")
    assert not arrays(tmp_path / "moved/shared/store")
    assert not list(tmp_path.glob("moved/shared/store/users/*"))


@pytest.mark.parametrize("linked", ["run", "run, moved later", "store", "store, moved later"])
def test_what_a_run_needs_behind_a_link_is_kept(linked: str, tmp_path: Path) -> None:
    place, disk = tmp_path / "place", tmp_path / "disk/deep"
    disk.mkdir(parents=True)
    path = job(place, "runs/demo", "runs/store")
    is_store, is_moved = linked.startswith("store"), linked.endswith("later")
    link = place / ("runs/store" if is_store else "runs/demo")
    link.parent.mkdir()
    if not is_moved:
        link.symlink_to(disk)
    run("fit", path)
    if is_moved:
        disk.rmdir()
        shutil.move(link, disk)
        link.symlink_to(disk)
    store = disk if is_store else place / "runs/store"
    needed = arrays(store)
    make_old(tmp_path)
    for name in {store, place / "runs", path}:
        run("gc", name, "--yes")
        assert arrays(store) == needed
    if not is_store:
        (tmp_path / "disk").rename(tmp_path / "not mounted")
        is_stopped(store, by="cannot be looked at")
        (tmp_path / "not mounted").rename(tmp_path / "disk")
    shutil.rmtree(place / "runs/demo" if is_store else disk)
    run("gc", place / "runs", "--yes")
    assert not arrays(store)


def test_what_an_interrupted_run_goes_on_with_is_kept_whatever_the_times_of_its_files_are(tmp_path: Path) -> None:
    """A copy has others: the result of the fit before may be the newest file."""
    path = job(tmp_path, "runs/demo", "runs/store")
    run("fit", path)
    rows = (tmp_path / "rows.csv").read_text()
    (tmp_path / "rows.csv").write_text(rows + rows.split("\n", 1)[1])
    with failing_at("draft*/factors/*/c/3/1:1:eio"):
        CliRunner().invoke(main, ["fit", str(path)])
    begun = {item for item in arrays(tmp_path / "runs/store") if (tmp_path / "runs/store/factors" / item).exists()}
    assert len(begun) == 3  # sums that were begun, too
    make_old(tmp_path)
    (then, later) = (time.time() - seconds for seconds in (7200, 7100))
    os.utime(tmp_path / "runs/demo/result.json", (then, later))
    run("gc", tmp_path / "runs/store", "--yes")
    assert begun <= arrays(tmp_path / "runs/store")


def test_the_factor_of_leave_one_out_may_have_other_tiles_than_the_plan(tmp_path: Path) -> None:
    path = job(tmp_path, "runs/demo", "runs/store")
    run("fit", path)
    plan = tmp_path / "runs/demo/plan.json"
    plan.write_bytes(json_bytes(read_json(plan.parent, plan.name) | {"tile_size": 8}))
    status = read_json(plan.parent, "status.json")
    (plan.parent / "status.json").write_bytes(json_bytes(status | {"state": "interrupted"}))
    there = arrays(tmp_path / "runs/store")
    make_old(tmp_path)
    for name in ("model.zarr", "result.json"):  # which name it
        path = plan.parent / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    run("gc", tmp_path / "runs/store", "--yes")
    assert there
    assert arrays(tmp_path / "runs/store") == there


def test_trials_of_an_interrupted_search_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = job(tmp_path, "runs/demo", "runs/store")
    path.write_text(path.read_text() + '[tune]\nkernels = ["rbf"]\nsearch_rows = [60]\nrows = 100\n')
    with monkeypatch.context() as patch:
        patch.setattr("dkrr.selection.tuning.Tuner._slice", lambda *_: 1 / 0)
        CliRunner().invoke(main, ["tune", str(tmp_path / "job.toml"), "-o", str(tmp_path / "best.toml")])
    assert (trials := list(tmp_path.glob("runs/store/tune/*/trials/*.json")))
    make_old(tmp_path)
    run("gc", tmp_path / "runs/store", "--yes")
    assert all(path.exists() for path in trials)
    run("tune", tmp_path / "job.toml", "-o", tmp_path / "best.toml", "--no-picture")
    make_old(tmp_path)
    run("gc", tmp_path / "runs/store", "--yes")
    assert not list(tmp_path.glob("runs/store/tune/*"))


def test_another_search_that_ends_leaves_the_trials_of_an_interrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job(tmp_path, "runs/demo", "runs/store")
    path.write_text(path.read_text() + '[tune]\nkernels = ["rbf"]\nsearch_rows = [60]\nrows = 100\n')
    with monkeypatch.context() as patch:
        patch.setattr("dkrr.selection.tuning.Tuner._slice", lambda *_: 1 / 0)
        CliRunner().invoke(main, ["tune", str(path), "-o", str(tmp_path / "best.toml")])
    trials = list(tmp_path.glob("runs/store/tune/*/trials/*.json"))
    path.write_text(path.read_text().replace("rbf", "laplacian"))
    run("tune", path, "-o", tmp_path / "other.toml", "--no-picture")
    make_old(tmp_path)
    run("gc", tmp_path / "runs/store", "--yes")
    assert trials
    assert all(trial.exists() for trial in trials)


def test_bytes_that_another_factor_shares_do_not_become_free(tmp_path: Path) -> None:
    path = job(tmp_path, "runs/demo", "runs/store")
    run("fit", path)
    rows = (tmp_path / "rows.csv").read_text()
    (tmp_path / "rows.csv").write_text(rows + rows.splitlines()[-1] + "\n")
    run("fit", path)
    make_old(tmp_path)

    def used() -> int:
        files = [item for item in (tmp_path / "runs/store").rglob("*") if item.is_file()]
        return sum({item.stat().st_ino: item.stat().st_size for item in files}.values())

    before, garbage = used(), find_garbage(tmp_path / "runs/store")
    freed, _ = delete_garbage(garbage, lambda: garbage)
    assert freed == before - used()
    assert freed < sum(item.num_bytes for item in garbage)


@pytest.mark.parametrize("theirs", ["[1, 2]", "no JSON", '{"terraform_version": "1.9"}'])
def test_a_plan_of_another_program_is_none(theirs: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    dkrr.KernelRidge(tile_size=64, store=store).fit(np.arange(40.0)[:, None], np.arange(40.0))
    (tmp_path / "infra").mkdir()
    (tmp_path / "infra/plan.json").write_text(theirs)
    make_old(store)
    assert arrays(store)
    run("gc", store, "--yes")
    assert not arrays(store)


def test_a_folder_that_cannot_be_read_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("fit", job(tmp_path, "runs/demo", "runs/store"))
    needed = arrays(tmp_path / "runs/store")
    make_old(tmp_path)
    (tmp_path / "runs/lost+found").mkdir()  # of the file system: not even its owner keeps a run there
    scandir = os.scandir

    def refused(path: Any = ".") -> Any:
        if str(path).endswith(("runs/demo", "lost+found")):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr("os.scandir", refused)
    is_stopped(tmp_path / "runs", by="runs/demo cannot be looked at (Permission denied)")
    assert arrays(tmp_path / "runs/store") == needed


@pytest.mark.parametrize("folder", ["c", "c/deep/c", "store/runs"])
def test_a_run_is_found_whatever_its_folder_is_called(folder: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    run("fit", job(tmp_path, tmp_path / folder / "demo", store))
    needed = arrays(store)
    make_old(tmp_path)
    run("gc", store, "--yes")
    assert arrays(store) == needed


def test_a_saved_estimator_and_a_registered_model_keep_their_factor(tmp_path: Path) -> None:
    rows = rows_of(0, 150)
    store = tmp_path / "shared/store"
    est = dkrr.KernelRidge(kernel="rbf", gamma=0.2, alpha=0.1, solver="cholesky", tile_size=64, store=store)
    est.fit(rows[:, :3], rows[:, 3])
    est.save(tmp_path / "elsewhere.zarr")
    run("models", "add", "demo", tmp_path / "elsewhere.zarr", "--promote", "--registry", tmp_path / "registry/models")
    needed = {path.name for path in store.glob("factors/*.zarr")}
    assert needed
    for owner in ("elsewhere.zarr", "registry/models"):
        make_old(tmp_path)
        run("gc", store, "--yes")
        assert {path.name for path in store.glob("factors/*.zarr")} == needed
        shutil.rmtree(tmp_path / owner)
    run("gc", store, "--yes")
    assert not list(store.glob("factors/*.zarr"))


def change(store: Path) -> Callable[[], Any]:
    return lambda: next(store.glob("factors/*.zarr")).joinpath("c/0/0").write_bytes(b"a fit has begun to write it")


def need(store: Path) -> Callable[[], Any]:
    def write() -> None:
        (store.parent / "new").mkdir()
        key = next(store.glob("factors/*.zarr")).name
        (store.parent / "new/result.json").write_text(f'{{"kept": "{key}"}}')

    return write


@pytest.mark.parametrize("meanwhile", [change, need], ids=["changed", "needed"])
def test_what_changed_after_the_question_is_kept_and_named(
    meanwhile: Callable[[Path], Callable[[], Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "runs/store"
    run("fit", job(tmp_path, tmp_path / "runs/demo", store))
    shutil.rmtree(tmp_path / "runs/demo")
    make_old(tmp_path)
    (factor,) = store.glob("factors/*.zarr")

    def answer(*_: Any, **__: Any) -> bool:
        meanwhile(store)()
        return True

    monkeypatch.setattr("click.confirm", answer)
    monkeypatch.setattr("dkrr.cli.models.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    result = run("gc", store)
    assert f"kept  {factor}  (it has changed since it was listed, or is needed by now)" in result.stdout
    assert (factor / "zarr.json").exists()
    assert not list(store.glob("rows/*.zarr")), "the rest went"


def test_what_somebody_is_at_work_on_is_kept_and_named(tmp_path: Path) -> None:
    store = tmp_path / "runs/store"
    run("fit", job(tmp_path, tmp_path / "runs/demo", store))
    shutil.rmtree(tmp_path / "runs/demo")
    make_old(tmp_path)
    (factor,) = store.glob("factors/*.zarr")
    with hold_lock(factor):
        result = run("gc", store, "--yes")
    assert f"kept  {factor}  ({factor} is being written by process {os.getpid()}" in result.stdout
    assert (factor / "c/0/0").exists()
    run("gc", store, "--yes")
    assert not factor.exists()


def test_what_an_alias_names_or_a_reader_may_hold_is_neither_pruned_nor_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, store, registry = rows_of(0, 150), tmp_path / "shared/store", tmp_path / "models"
    factors: list[str] = []
    for number, alpha in enumerate((0.1, 0.2, 0.3), start=1):
        est = dkrr.KernelRidge(kernel="rbf", gamma=0.2, alpha=alpha, solver="cholesky", tile_size=64, store=store)
        est.fit(rows[:, :3], rows[:, 3]).save(tmp_path / "m.zarr")
        run("models", "add", "demo", tmp_path / "m.zarr", "--promote", "--registry", registry)
        shutil.rmtree(tmp_path / "m.zarr")
        factors += [path.name for path in store.glob("factors/*.zarr") if path.name not in factors]
        assert len(factors) == number

    def left() -> list[str]:
        return [name for name in factors if (store / "factors" / name).exists()]

    # the first version lost its last alias a moment ago: who reads it may go on for a day
    make_old(tmp_path)
    run("gc", store, "--yes")
    assert left() == factors
    assert "nothing to delete" in run("models", "prune", "demo", "--keep", "0", "--registry", registry).stdout

    # a day later it is garbage, unless somebody puts it into production after the question
    monkeypatch.setattr("dkrr.jobs.inspection.GRACE_SECONDS", 0.0)
    listed = run("gc", store).stdout
    assert [name for name in factors if name in listed] == factors[:1]

    def answer(*_: Any, **__: Any) -> bool:
        run("models", "promote", "demo", "1", "--registry", registry)
        return True

    monkeypatch.setattr("click.confirm", answer)
    monkeypatch.setattr("dkrr.cli.models.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    assert f"kept  {store / 'factors' / factors[0]}" in run("gc", store).stdout
    assert left() == factors
    run("models", "prune", "demo", "--keep", "0", "--grace", "0", "--registry", registry)
    make_old(tmp_path)
    run("gc", store, "--yes")
    assert left() == [factors[0], factors[2]]  # production and previous


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_data_sets_in_folders_called_like_those_of_a_store_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    path = job(place, "runs/demo", ".")
    monkeypatch.chdir(place)
    names = ("data/train.zarr", "data/0cc175b9c0f1b6a831c399e269772661.zarr", "rows/other.zarr")
    for name in names:
        (place / name).parent.mkdir(exist_ok=True)
        run("ingest", "rows.csv", name, "--target", "y")
    make_old(place)
    before = contents(place)
    is_stopped(".", by="is not a store")

    # where the folder is a store, too, only what dkrr gave a name is looked at, and a run may be anywhere in it
    path.write_text(path.read_text().replace('"rows.csv"\ntarget = "y"', '"data/train.zarr"').replace("runs/", "data/"))
    run("fit", path)
    for theirs, text in (("users/alice.json", '{"location": "/nowhere"}'), ("factors/mine.zarr/zarr.json", "{}")):
        (place / theirs).parent.mkdir(exist_ok=True)
        (place / theirs).write_text(text)
        before.add(theirs)
    make_old(place)
    whole = contents(place)
    run("gc", path, "--yes")
    assert contents(place) == whole
    shutil.rmtree("data/demo")
    run("gc", ".", "--yes")
    assert {path.split("/")[0] for path in contents(place) - before} <= {"job.toml"}


def test_of_interrupted_writes_only_those_of_dkrr_are_garbage(tmp_path: Path) -> None:
    run("fit", job(tmp_path, tmp_path / "runs/demo", tmp_path / "runs/store"))
    run("ingest", tmp_path / "rows.csv", tmp_path / "runs/data.zarr", "--target", "y")
    shutil.copytree(tmp_path / "runs/demo/model.zarr", tmp_path / "runs/model.zarr")
    (factor,) = (tmp_path / "runs/store/factors").glob("*.zarr")
    shutil.rmtree(tmp_path / "runs/store/data")
    drawn = "0f" * 16
    ours = {
        f"demo/result.json.{drawn}.partial",
        f"demo/model.zarr.{drawn}.partial/X_fit/c/0/0",
        f"model.zarr.{drawn}.partial/X_fit/c/0/0",
        f"model.zarr.{drawn}.replaced/zarr.json",
        f"data.zarr/X/c/0/0.{drawn}.partial",
        f"store/factors/{factor.name}/c/0/0.{drawn}.partial",
        f"store/factors/{factor.name}.lock.{drawn}.partial",
    }
    theirs = {
        "movie.mkv.partial",
        "movie.mkv.1a2b3c4d.partial",
        "draft.partial/thesis.tex",
        "notes/today.txt",
        "notes.old.replaced",
        f"notes.{drawn}.replaced",
        f"report.pdf.{drawn}.partial",
        f"theirs.zarr/c/0/0.{drawn}.partial",  # as other programs write Zarr arrays, too
        "demo/movie.mkv.partial",
        "store/movie.mkv.partial",
        "store/factors/movie.partial/one.mkv",
        f"store/{drawn}.partial",
    }
    for name in [*ours, *theirs]:
        (tmp_path / "runs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / name).write_text("something")
    (tmp_path / "runs/theirs.zarr/zarr.json").write_text('{"zarr_format": 3, "node_type": "array", "attributes": {}}')
    make_old(tmp_path)
    before = contents(tmp_path / "runs")
    run("gc", tmp_path / "runs", "--yes")
    assert before - contents(tmp_path / "runs") == ours


@pytest.mark.parametrize("count", range(1, 12))
def test_a_collection_that_was_killed_leaves_nothing_that_a_fit_refuses(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, rmtree, calls = tmp_path / "store", shutil.rmtree, 0
    path = job(tmp_path, "run", "store")
    run("fit", path)
    shutil.rmtree(tmp_path / "run")
    make_old(tmp_path)

    def killed(folder: Any, **options: Any) -> None:
        nonlocal calls
        calls += str(folder).startswith(str(store))
        if calls == count:
            raise KeyboardInterrupt
        rmtree(folder, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        CliRunner().invoke(main, ["gc", str(store), "--yes"])
    run("fit", path)


# --- estimators -------------------------------------------------------------------------------------------------------

MEANWHILE: list[Callable[[], object]] = []


def collecting(A: Any, B: Any) -> Any:
    """A kernel with which something happens in the middle of a fit."""
    while MEANWHILE:
        MEANWHILE.pop()()
    return np.exp(-0.1 * ((A[:, None, :] - B[None]) ** 2).sum(-1))


@pytest.mark.parametrize("older", [0, 3600])
@pytest.mark.parametrize("kind", ["array", "path", "data set", "precomputed"])
def test_nothing_goes_while_an_estimator_is_fitted(kind: str, older: int, tmp_path: Path) -> None:
    """A fit may take longer than what changed a while ago is kept."""
    X, y, store = rows_of(0, 150)[:, :3], rows_of(0, 150)[:, 3], tmp_path / "p/store"
    locks: list[dict[str, Any]] = []

    def collect() -> None:
        (lock,) = store.glob("fit-*.lock")
        locks.append(json.loads(lock.read_text()))
        make_old(store)
        run("gc", store, "--yes", "--older-than", older)

    np.save(tmp_path / "x.npy", X)
    given: Any = {
        "path": str(tmp_path / "x.npy"),
        "data set": dkrr.ingest(X, tmp_path / "x.zarr"),
        "precomputed": collecting(X, X),
    }.get(kind, X)
    options: dict[str, Any] = {"kernel": "precomputed"} if kind == "precomputed" else {"kernel": collecting}
    estimator = dkrr.KernelRidge(alpha=0.1, **options, solver="cholesky", tile_size=64, store=str(store))
    with pytest.MonkeyPatch.context() as patch:
        if kind == "precomputed":
            solve = dkrr.fit.fitting.FitResult.run
            patch.setattr("dkrr.fit.fitting.FitResult.run", lambda *given: collect() or solve(*given))
        else:
            MEANWHILE.append(collect)
        estimator.fit(given, y)
    assert locks
    wanted = np.linalg.solve(collecting(X, X) + 0.1 * np.eye(150), y)
    np.testing.assert_allclose(estimator.dual_coef_, wanted, rtol=1e-9, atol=1e-12)
    assert not list(store.glob("fit-*"))

    with subprocess.Popen(["true"]) as killed:  # what is left of a fit that was killed
        killed.wait()
    locks[0]["owner"]["pid"] = killed.pid
    del locks[0]["crc32c"]
    (store / f"fit-{'0' * 32}.lock").write_bytes(json_bytes(locks[0]))
    make_old(store)
    run("gc", store, "--yes")
    assert not [path for path in store.rglob("*") if path.is_file()]


def test_a_user_that_cannot_be_looked_at_is_no_user_that_was_removed(tmp_path: Path) -> None:
    X, store = rows_of(0, 150), tmp_path / "shared/store"
    estimator = dkrr.KernelRidge(alpha=0.1, kernel="rbf", solver="cholesky", tile_size=64, store=str(store))
    (tmp_path / "bob").mkdir()
    estimator.fit(X[:, :3], X[:, 3]).save(tmp_path / "bob/model.zarr")
    assert not find_garbage(store, kept_seconds=0)
    with without_permission(tmp_path / "bob", 0o700):
        is_stopped(store, "--older-than", 0, by="cannot be looked at (Permission denied)")
    assert not find_garbage(store, kept_seconds=0)


def test_a_run_that_was_renamed_keeps_what_it_needs_elsewhere(tmp_path: Path) -> None:
    store = tmp_path / "shared/store"
    run("fit", job(tmp_path / "project", tmp_path / "results/{id}", store))
    (result,) = (tmp_path / "results").iterdir()
    result.rename(tmp_path / "results/renamed")
    make_old(tmp_path)
    before = arrays(store)
    run("gc", store, "--yes")
    assert arrays(store) == before


def test_what_may_not_be_looked_at_is_not_said_to_be_empty(tmp_path: Path) -> None:
    run("fit", job(tmp_path / "bob", "runs/a", "runs/store"))
    with without_permission(tmp_path / "bob", 0o700):
        for command in (["list", tmp_path / "bob/runs"], ["models", "list", "--registry", tmp_path / "bob/models"]):
            result = CliRunner().invoke(main, [str(argument) for argument in command])
            assert result.exit_code == 4, result.output
            assert "Permission denied" in result.stderr


def test_a_model_whose_store_may_only_be_read_is_saved_and_added(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run("fit", job(tmp_path / "bob", "runs/a", "runs/store"))
    (tmp_path / "alice").mkdir()
    (tmp_path / "alice").chmod(0o777)
    with without_permission(tmp_path / "bob/runs/store", 0o755):
        registry = tmp_path / "alice/models"
        run("models", "add", "demo", tmp_path / "bob/runs/a", "--promote", "--registry", registry)
        dkrr.load_model(tmp_path / "bob/runs/a/model.zarr").save(tmp_path / "alice/model.zarr")
    assert "production" in run("models", "list", "demo", "--registry", registry).output
    assert "cannot be told of" in caplog.text
    assert dkrr.load_model(tmp_path / "alice/model.zarr").num_rows == 150


ENDED = "a lock of a fit that ended"


# --- stores at an address ---------------------------------------------------------------------------------------------


def test_a_lock_that_was_given_back_at_an_address_is_of_no_fit_at_work(bucket: Bucket) -> None:
    store, X = bucket.url("x/store"), rows_of(0, 150)
    estimator = dkrr.KernelRidge(alpha=0.1, kernel="rbf", solver="cholesky", tile_size=64, store=store)
    estimator.fit(X[:, :3], X[:, 3])
    assert "no run or model refers to it" in {item.reason for item in find_garbage(store, kept_seconds=-60)}


def test_a_user_at_another_endpoint_is_another_place(bucket: Bucket) -> None:
    store = bucket.url("runs/store")
    note_user(store, bucket.url("runs/models"))
    assert not users_of(store)
    elsewhere = bucket.url("runs/models").replace("127.0.0.1", "localhost")
    note_user(store, elsewhere)
    assert list(users_of(store).values()) == [[elsewhere]]


def test_a_user_on_another_machine_is_not_taken_for_removed(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, X = bucket.url("x/store"), rows_of(0, 150)
    estimator = dkrr.KernelRidge(alpha=0.1, kernel="rbf", solver="cholesky", tile_size=64, store=store)
    estimator.fit(X[:, :3], X[:, 3]).save(tmp_path / "model.zarr")
    assert "no run or model refers to it" not in {item.reason for item in find_garbage(store, kept_seconds=-60)}
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert {item.reason for item in find_garbage(store, kept_seconds=-60)} <= {"a lock that was released", ENDED}
    (tmp_path / "model.zarr").rename(tmp_path / "not-here.zarr")
    is_stopped(store, "--older-than", 0, by="is on another machine")


def test_a_model_of_a_bucket_that_may_only_be_read_is_saved(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    X = rows_of(0, 150)
    options: dict[str, Any] = {"kernel": "rbf", "solver": "cholesky", "tile_size": 64, "store": bucket.url("x/store")}
    dkrr.KernelRidge(alpha=0.1, **options).fit(X[:, :3], X[:, 3]).save(bucket.url("x/model.zarr"))
    model = dkrr.load_model(bucket.url("x/model.zarr"))
    bucket.server.fail({"method": "PUT|POST|DELETE", "path": f"^/{bucket.name}/", "status": 403, "times": 10**6})
    try:
        model.save(tmp_path / "model.zarr")
    finally:
        bucket.server.fail()
    assert "cannot be told of" in caplog.text
    assert dkrr.load_model(tmp_path / "model.zarr").num_rows == 150
