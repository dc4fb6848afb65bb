"""Two at one place: one writes, the other is told who does, and what stands there in the end is whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import psutil
import pytest
from click.testing import Result
from sklearn.base import clone

import dkrr
import dkrr.models.model
from dkrr.errors import LockedError
from dkrr.jobs.driver import submit_job
from dkrr.jobs.run import fit_job
from dkrr.jobs.run_directory import RunDirectory
from dkrr.jobs.spec import JobSpec
from dkrr.store.lease import is_gone, process_record
from tests.contract.helpers import run
from tests.jobs.retrain.project import in_process

ROWS = np.random.default_rng(5).standard_normal((40, 4))
OTHERS = ROWS[::-1] * 2


def rows_that(meanwhile: Callable[[], object], rows: np.ndarray = ROWS) -> Any:
    """Rows (n, 4) in two blocks; ``meanwhile`` is called before the second one is read."""
    parts = np.array_split(rows, 2)

    def block(number: int) -> np.ndarray:
        if number:
            meanwhile()
        return parts[number]

    return da.concatenate([da.from_delayed(dask.delayed(block)(k), parts[k].shape, float) for k in range(2)])


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """Other rows, as a file."""
    path = tmp_path / "others.npy"
    np.save(path, OTHERS)
    return path


@pytest.fixture
def beside() -> Iterator[None]:
    """Blocks of rows are read in the calling thread."""
    with dask.config.set(scheduler="synchronous"):
        yield


def stored(path: Path) -> np.ndarray:
    dataset = dkrr.open_dataset(path)
    dataset.verify()
    return np.asarray(dataset.X.read(0, dataset.num_rows))


# --- a data set -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("options", [(), ("--append",)], ids=["ingest", "append"])
def test_the_second_of_two_ingests_is_told_who_writes(tmp_path: Path, others: Path, options: tuple[str, ...]) -> None:
    dest, seen = tmp_path / "data.zarr", list[Result]()
    dkrr.ingest(rows_that(lambda: seen.append(run("ingest", others, dest, *options, exits=8))), dest)
    assert len(seen) == 1
    assert f"data.zarr is being written by process {os.getpid()} on " in seen[0].stderr
    np.testing.assert_array_equal(stored(dest), ROWS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.zarr", "others.npy"]


@pytest.mark.usefixtures("beside")
def test_an_ingest_that_waits_finds_what_the_other_has_written(tmp_path: Path) -> None:
    dest, found = tmp_path / "data.zarr", list[Any]()
    second = threading.Thread(target=lambda: found.append(dkrr.ingest(ROWS, dest, wait=True)))
    dkrr.ingest(rows_that(second.start), dest)
    second.join()
    assert found[0].digest == dkrr.open_dataset(dest).digest
    np.testing.assert_array_equal(stored(dest), ROWS)


def taken_over(lock: Path, then: Callable[[], object]) -> Callable[[], None]:
    """Another process finds the lock stale, takes it, does something under it and releases it."""

    def act() -> None:
        owner = {"host": "elsewhere", "pid": 1, "started": 0.0}
        if lock.exists():  # nobody had one before ingests were locked
            lock.write_text(json.dumps({"token": "other", "epoch": 2, "counter": 0, "owner": owner}))
        held = lock.with_name("held")
        if lock.exists():
            lock.rename(held)
        other = threading.Thread(target=then)  # it does not stand behind this thread's lock
        other.start()
        other.join()
        if held.exists():
            held.rename(lock)

    return act


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("append", [False, True], ids=["ingest", "append"])
def test_an_ingest_that_slept_through_a_takeover_changes_nothing(tmp_path: Path, append: bool) -> None:
    dest = tmp_path / "data.zarr"
    if append:
        dkrr.ingest(ROWS, dest, rows_per_chunk=8)
    other = taken_over(
        tmp_path / "data.zarr.lock", lambda: dkrr.ingest(OTHERS, dest, append=append, rows_per_chunk=None)
    )
    with pytest.raises(dkrr.LockedError, match=r"the lock of .*data\.zarr was lost"):
        dkrr.ingest(rows_that(other), dest, append=append)
    np.testing.assert_array_equal(stored(dest), np.concatenate([ROWS, OTHERS]) if append else OTHERS)


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("what", ["moved away", "removed", "replaced"])
@pytest.mark.parametrize("append", [False, True], ids=["ingest", "append"])
def test_rows_are_not_written_into_a_data_set_that_has_taken_the_place(tmp_path: Path, append: bool, what: str) -> None:
    dest, old, new = (tmp_path / f"{name}.zarr" for name in ("data", "old", "new"))
    dkrr.ingest(OTHERS, new, rows_per_chunk=8)
    if append:
        dkrr.ingest(ROWS, dest, rows_per_chunk=8)

    def meanwhile() -> None:
        dest.rename(old)
        if what == "replaced":
            new.rename(dest)
        elif what == "removed":
            shutil.rmtree(old)

    with pytest.raises(LockedError, match=r"data\.zarr was moved, removed or replaced"):
        dkrr.ingest(rows_that(meanwhile, np.vstack([ROWS, ROWS])), dest, append=append, rows_per_chunk=8)
    if what == "replaced":
        np.testing.assert_array_equal(stored(dest), OTHERS)
    else:
        assert not dest.exists()
    if append and what != "removed":
        np.testing.assert_array_equal(stored(old), ROWS)


@pytest.mark.usefixtures("beside")
def test_what_a_person_puts_beside_unfinished_rows_stays(tmp_path: Path) -> None:
    dest, broken = tmp_path / "data.zarr", ROWS.copy()
    broken[-1, 0] = np.nan
    with pytest.raises(dkrr.DataError):
        dkrr.ingest(rows_that(lambda: (dest / "notes.txt").write_text("mine"), broken), dest)
    assert [path.name for path in dest.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("empty", [False, True], ids=["absent", "an empty folder"])
def test_a_place_that_somebody_fills_in_between_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: bool
) -> None:
    from dkrr.dataset import writer

    dest = tmp_path / "data.zarr"
    if empty:
        dest.mkdir()
    check_space = writer.check_space

    def meanwhile(*arguments: Any) -> None:
        dest.mkdir(exist_ok=True)
        (dest / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {"mine": true}}')
        check_space(*arguments)

    monkeypatch.setattr(writer, "check_space", meanwhile)
    with pytest.raises(dkrr.StoreError, match=r"exists and is not|was made by somebody else"):
        dkrr.ingest(ROWS, dest)
    assert json.loads((dest / "zarr.json").read_text())["attributes"] == {"mine": True}
    assert [path.name for path in dest.iterdir()] == ["zarr.json"]


# --- one run ----------------------------------------------------------------------------------------------------------


def job_of(tmp_path: Path, alpha: float) -> JobSpec:
    np.save(tmp_path / "rows.npy", np.column_stack([ROWS, np.sin(ROWS[:, 0])]))
    document = {
        "data": {"path": "rows.npy", "target": -1},
        "model": {"alpha": alpha},
        "output": {"directory": "runs/job"},
    }
    return JobSpec.from_dict(document, base=tmp_path)


def test_another_job_is_refused_while_the_first_has_no_plan_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dkrr.jobs.driver.start_driver", lambda _: {"kind": "here", **process_record()})
    one, other = job_of(tmp_path, 1.0), job_of(tmp_path, 2.0)
    assert submit_job(one, b"").started is not None
    with pytest.raises(dkrr.StoreMismatchError, match=r"holds another job \(\[model\] alpha"):
        submit_job(other, b"")
    assert submit_job(one, b"").started is None, "it is on its way"
    (tmp_path / "runs/job/job.json").unlink()  # as a command in the foreground that reads its rows
    with pytest.raises(LockedError, match="has not said yet what it fits"):
        submit_job(one, b"")


def test_of_two_jobs_that_are_submitted_at_once_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, check, started = threading.Barrier(2), JobSpec.check_claim, []

    def checked(job: JobSpec, *arguments: Any, **options: Any) -> None:
        check(job, *arguments, **options)
        with contextlib.suppress(threading.BrokenBarrierError):  # both have seen that nothing is there
            both.wait(1)

    def start(directory: RunDirectory) -> dict[str, Any]:
        started.append(JobSpec.from_dict(directory.read("job.json") or {}).model.alpha)
        return {"kind": "here", **process_record()}

    monkeypatch.setattr(JobSpec, "check_claim", checked)
    monkeypatch.setattr("dkrr.jobs.driver.start_driver", start)
    jobs = [job_of(tmp_path, alpha) for alpha in (1.0, 2.0)]
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(submit_job, job, b"") for job in jobs]
    errors = [item.exception() for item in found]
    (refused,) = (error for error in errors if error is not None)
    assert isinstance(refused, dkrr.StoreMismatchError)
    assert started == [job.model.alpha for job, error in zip(jobs, errors, strict=True) if error is None]


@pytest.mark.parametrize("ends", [KeyboardInterrupt, dkrr.DataError("bad rows")], ids=["Ctrl-C", "refused"])
def test_a_run_that_came_to_nothing_leaves_what_came_into_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: BaseException
) -> None:
    in_process(monkeypatch)
    job, directory = job_of(tmp_path, 1.0), tmp_path / "runs/job"

    def prepare(*_: Any) -> None:
        dkrr.ingest(ROWS, directory / "rows.zarr")
        (directory / "notes.txt").write_text("three days of work")
        raise ends

    with monkeypatch.context() as patch:
        patch.setattr("dkrr.jobs.run.prepare", prepare)
        with pytest.raises((KeyboardInterrupt, dkrr.DataError)):
            fit_job(job)
    assert {path.name for path in directory.iterdir()} == {"rows.zarr", "notes.txt"}
    np.testing.assert_array_equal(stored(directory / "rows.zarr"), ROWS)
    with pytest.raises(dkrr.StoreError, match="is not a run of dkrr"):
        fit_job(job)


# --- jobs that share a store ------------------------------------------------------------------------------------------


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``fit("a", alpha=...)`` fits a job in the run ``a``; all of them share a store, and run in this process."""
    in_process(monkeypatch)
    np.save(tmp_path / "rows.npy", np.column_stack([ROWS, np.sin(ROWS[:, 0])]))

    def fitted(name: str, alpha: float = 0.1, **output: Any) -> Any:
        document = {
            "data": {"path": "rows.npy", "target": -1, "standardize": True},
            "model": {"kernel": "rbf", "gamma": 0.3, "alpha": alpha},
            "solver": {"name": "cholesky", "tile_size": 16, "gram": "stored", "precision": "float64"},
            "evaluate": {"fraction": 0.2},
            "output": {"directory": f"runs/{name}", "store": "store", **output},
        }
        return fit_job(JobSpec.from_dict(document, base=tmp_path))

    return fitted


def test_jobs_that_begin_on_an_empty_store_at_the_same_time_end_well(tmp_path: Path, fit: Callable[..., Any]) -> None:
    """One writes the data and the training rows that all need; the others wait for them, and clear nothing away."""
    names = iter("abc")
    assert all(result.converged for result in at_once(3, lambda: fit(next(names))))
    for name in "abc":
        run("info", "--verify", tmp_path / "runs" / name / "model.zarr")
    assert not list(tmp_path.rglob("*.lock"))


def test_a_job_that_keeps_no_factor_leaves_that_of_another(tmp_path: Path, fit: Callable[..., Any]) -> None:
    fit("a", keep="all")
    before = sorted(path.name for kind in ("grams", "factors") for path in (tmp_path / "store" / kind).iterdir())
    assert len(before) == 2
    fit("b", keep="model")
    fit("c", alpha=0.3, keep="model")  # its own it removes
    after = sorted(path.name for kind in ("grams", "factors") for path in (tmp_path / "store" / kind).iterdir())
    assert after == before


def test_a_choice_of_alpha_leaves_a_factor_that_another_fit_has_used_meanwhile(tmp_path: Path) -> None:
    X, y = ROWS, np.sin(ROWS[:, 0])
    common: dict[str, Any] = {"kernel": "rbf", "gamma": 0.3, "tile_size": 16, "store": tmp_path, "solver": "cholesky"}
    found: list[dkrr.KernelRidge] = []

    def score(*_: Any) -> float:
        if not found:  # the first alpha has a factor; another fit asks for the same
            found.append(dkrr.KernelRidge(alpha=0.01, **common).fit(X, y))
            return -1.0
        return 1.0

    chosen = dkrr.KernelRidgeCV([0.01, 1.0, 100.0], scoring=score, **common).fit(X, y)
    assert chosen.alpha_ > 0.01
    _, deviation = found[0].predict(X[:3], return_std=True)
    assert np.isfinite(deviation).all()
    factors = [path for path in tmp_path.glob("factors/*.zarr") if path.is_dir()]
    assert len(factors) == 2


# --- who is alive -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pid_namespace", "boot", "host"])
def test_an_owner_in_another_container_lives_while_its_heart_beats(
    tmp_path: Path, others: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its process number means nothing here: there is no such process, or it is another one."""
    monkeypatch.setenv("DKRR_STALE_SECONDS", "0.5")
    lock, stop = tmp_path / "data.zarr.lock", threading.Event()
    dkrr.ingest(ROWS, tmp_path / "data.zarr")
    owner = {**process_record(), "pid": 2**22 + 1, name: "another"}

    def beat() -> None:
        counter = 0
        while True:
            counter += 1
            draft = tmp_path / "draft"
            draft.write_text(json.dumps({"token": "other", "epoch": 1, "counter": counter, "owner": owner}))
            draft.replace(lock)
            if stop.wait(0.02):
                return

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        while not lock.exists():
            pass
        run("ingest", others, tmp_path / "data.zarr", "--append", exits=8)
    finally:
        stop.set()
        thread.join()
    # its heart stands still: the lock is taken over
    run("ingest", others, tmp_path / "data.zarr", "--append")


# --- file systems that lack something ---------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_locked_is_named(tmp_path: Path, others: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    run(
        "ingest",
        others,
        tmp_path / "data.zarr",
        exits=4,
        said=(f"{tmp_path} cannot be locked (No locks available)", "hint: mount it with locks"),
    )
    assert [path.name for path in tmp_path.iterdir()] == ["others.npy"]


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV])
def test_without_hard_links_there_is_one_writer_too(
    tmp_path: Path, others: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    dest, seen = tmp_path / "data.zarr", list[Result]()
    dkrr.ingest(rows_that(lambda: seen.append(run("ingest", others, dest, exits=8))), dest)
    assert len(seen) == 1
    np.testing.assert_array_equal(stored(dest), ROWS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.zarr", "others.npy"]


def test_a_factor_is_continued_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", link)
    y = np.sin(ROWS[:, 0])
    common: dict[str, Any] = {"kernel": "linear", "tile_size": 8, "store": tmp_path / "store", "solver": "cholesky"}
    dkrr.ingest(ROWS[:24], tmp_path / "data.zarr", y=y[:24])
    dkrr.KernelRidge(**common).fit(tmp_path / "data.zarr")
    dataset = dkrr.ingest(ROWS[24:], tmp_path / "data.zarr", y=y[24:], append=True)
    model = dkrr.KernelRidge(**common).fit(dataset)
    assert model.solution_.reused["factor"]["rows"] == 24
    np.testing.assert_allclose(
        model.predict(ROWS), dkrr.KernelRidge(kernel="linear").fit(ROWS, y).predict(ROWS), rtol=1e-10, atol=1e-12
    )


# --- a model ----------------------------------------------------------------------------------------------------------


def a_model(alpha: float, num_rows: int = 40) -> dkrr.KernelRidge:
    return dkrr.KernelRidge(kernel="rbf", alpha=alpha).fit(ROWS[:num_rows, 1:], ROWS[:num_rows, 0])


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Act once when a save is about to put a model in its place."""
    todo = [act]

    put_in_place = dkrr.models.model.put_in_place

    def reached(*arguments: Any) -> None:
        if todo:
            todo.pop()()
        put_in_place(*arguments)

    monkeypatch.setattr(dkrr.models.model, "put_in_place", reached)


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "replaced"])
def test_the_second_of_two_saves_is_told_who_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    path, first, seen = tmp_path / "model.zarr", a_model(0.1), list[Any]()
    if overwrite:
        a_model(1.0).save(path)

    def second() -> None:
        try:
            a_model(10.0).save(path, overwrite=True)
        except dkrr.DkrrError as exc:
            seen.append(exc)

    meanwhile(monkeypatch, second)
    first.save(path, overwrite=overwrite)
    assert [type(exc) for exc in seen] == [LockedError]
    assert f"model.zarr is being written by process {os.getpid()} on " in str(seen[0])
    np.testing.assert_array_equal(dkrr.load_model(path).predict(ROWS[:, 1:]), first.predict(ROWS[:, 1:]))
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.zarr"]


@pytest.fixture
def from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is larger than what is read at once."""
    monkeypatch.setattr(dkrr.models.model, "IN_MEMORY_BYTES", 0)


@pytest.mark.usefixtures("from_disk")
@pytest.mark.parametrize("num_rows", [40, 20], ids=["as many rows", "fewer rows"])
def test_a_model_that_was_replaced_after_it_was_opened_says_so(tmp_path: Path, num_rows: int) -> None:
    path = tmp_path / "model.zarr"
    a_model(0.1).save(path)
    model = dkrr.load_model(path)
    a_model(10.0, num_rows).save(path, overwrite=True)
    with pytest.raises(dkrr.DkrrError, match=r"model\.zarr was replaced .*: load it again"):
        model.predict(ROWS[:, 1:])
    with pytest.raises(dkrr.DkrrError, match=r"model\.zarr was replaced"):
        model.save(tmp_path / "copy.zarr")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.zarr"]


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
@pytest.mark.parametrize("read", ["zarr.json", "X_fit/zarr.json", "dual_coef/zarr.json"])
def test_a_model_that_is_replaced_while_it_is_opened_is_the_one_or_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str, verify: bool
) -> None:
    path, before, after = tmp_path / "model.zarr", a_model(0.1), a_model(10.0, 20)
    before.save(path)
    replaced, of_path = list[str](), Path.read_bytes

    def bytes_of(self: Path) -> bytes:
        found = of_path(self)
        if self == path / read and not replaced:
            replaced.append(read)
            after.save(path, overwrite=True)
        return found

    monkeypatch.setattr(Path, "read_bytes", bytes_of)
    model = dkrr.load_model(path, verify=verify)
    assert replaced
    np.testing.assert_array_equal(model.predict(ROWS[:, 1:]), after.predict(ROWS[:, 1:]))


# --- threads of one process -------------------------------------------------------------------------------------------


def at_once(number: int, act: Callable[[], Any]) -> list[Any]:
    """What ``act`` answers to so many threads."""
    with ThreadPoolExecutor(number) as threads:
        return [future.result() for future in [threads.submit(act) for _ in range(number)]]


@pytest.mark.parametrize("options", [{"tile_size": 16}, {"solver": "cg"}, {"precision": "mixed", "tile_size": 16}])
def test_threads_that_want_the_same_wait_for_each_other(tmp_path: Path, options: dict[str, Any]) -> None:
    X, y = ROWS[:, 1:], ROWS[:, 0]
    estimator = dkrr.KernelRidge(kernel="rbf", store=str(tmp_path / "store"), **options)
    fitted = at_once(3, lambda: clone(estimator).fit(X, y))
    assert all(np.array_equal(other.dual_coef_, fitted[0].dual_coef_) for other in fitted)
    residuals = at_once(3, lambda: fitted[0].leave_one_out().residuals)
    assert all(np.array_equal(other, residuals[0]) for other in residuals)
    ends = at_once(3, lambda: fitted[0].predict_interval(X))
    assert all(np.array_equal(other, ends[0]) for other in ends)


@pytest.mark.parametrize("at", ["created", "start", "join", "removed"])
def test_an_interrupted_fit_can_be_repeated_in_the_same_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    X, y = ROWS[:, 1:], ROWS[:, 0]
    estimator = dkrr.KernelRidge(kernel="rbf", tile_size=16, store=str(tmp_path / "store"))

    def interrupted(function: Callable[..., Any], is_meant: Callable[[Any], bool]) -> Callable[..., Any]:
        def act(*arguments: Any, **options: Any) -> Any:
            if not is_meant(arguments[-1]):
                return function(*arguments, **options)
            if at == "created":
                function(*arguments, **options)
            raise KeyboardInterrupt

        return act

    def is_lock(path: Any) -> bool:
        return str(path).endswith(".lock")

    for number in range(2):  # of two locks, the first one or the second one
        seen = [number]

        def is_next(value: Any, seen: list[int] = seen) -> bool:
            if not (value.name == "dkrr-lock" if isinstance(value, threading.Thread) else is_lock(value)):
                return False
            seen[0] -= 1
            return seen[0] == -1

        with monkeypatch.context() as patch:
            if at == "created":
                patch.setattr(os, "link", interrupted(os.link, is_next))
            elif at == "removed":
                patch.setattr(Path, "unlink", interrupted(Path.unlink, is_next))
            else:
                patch.setattr(threading.Thread, at, interrupted(getattr(threading.Thread, at), is_next))
            with pytest.raises(KeyboardInterrupt):
                clone(estimator).fit(X, y)
        clone(estimator).fit(X, y)
        assert at == "removed" or not list(tmp_path.rglob("*.lock"))


@pytest.mark.parametrize("is_there", [True, False], ids=["lives", "ended"])
def test_a_process_that_the_system_hides_is_not_gone(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of another user, where /proc is mounted with hidepid=2."""
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            record = process_record(process.pid)

            def hidden(*_: object) -> None:
                raise psutil.NoSuchProcess(process.pid)

            def kill(*_: object) -> None:
                raise PermissionError if is_there else ProcessLookupError

            monkeypatch.setattr("psutil.Process", hidden)
            monkeypatch.setattr("os.kill", kill)
            assert is_gone(record) is not is_there
        finally:
            monkeypatch.undo()
            process.kill()
