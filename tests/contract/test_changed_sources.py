"""Files that are others than at the fit: what is said about a fit is about its rows, or is refused."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

import dkrr
from dkrr.dataset import read_mask, sources
from dkrr.dataset.sources import open_table
from dkrr.errors import DamagedChunkError, DataError, DkrrError
from dkrr.jobs.prepare import prepare
from dkrr.jobs.spec import JobSpec
from dkrr.selection.tuning import TuneSettings, tune
from dkrr.store.chunks import ChunkArray
from dkrr.store.files import file_state, read_key, write_key, zarr_store
from dkrr.store.lease import process_record
from tests.contract.helpers import run
from tests.faults import swap
from tests.jobs.retrain.project import Project, in_process
from tests.s3 import Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]

N = 40

Parts = tuple[Any, Any, Any]


@pytest.fixture
def parts() -> Parts:
    """X (n, 3), y (n,) and weights (n,)."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((N, 3)), rng.standard_normal(N), rng.uniform(0.5, 2.0, N)


def _file(path: Path, values: Any) -> str:
    np.save(path, values)
    return str(path)


@pytest.mark.parametrize("changed", ["X", "y", "weight"])
@pytest.mark.parametrize(
    "options",
    [
        {"kernel": "rbf"},
        {"kernel": "rbf", "solver": "cg"},
        {"kernel": "rbf", "solver": "nystrom", "solver_params": {"num_centers": 10}},
        {"kernel": "linear", "solver": "primal"},
        {"kernel": "precomputed"},
        {"kernel": "precomputed", "solver": "cg"},
    ],
    ids=str,
)
def test_leave_one_out_is_of_the_rows_of_the_fit(
    options: dict[str, Any], changed: str, parts: Parts, tmp_path: Path
) -> None:
    X, y, w = parts
    values = {"X": X @ X.T + np.eye(N) if options["kernel"] == "precomputed" else X, "y": y, "weight": w}
    paths = [_file(tmp_path / f"{name}.npy", part) for name, part in values.items()]
    estimator = dkrr.KernelRidge(tile_size=16, **options).fit(*paths)
    wanted = estimator.leave_one_out().residuals
    other = values[changed] + (np.eye(N) if values[changed].shape == (N, N) else 1.0)
    np.save(tmp_path / f"{changed}.npy", other)
    with pytest.raises(DkrrError, match=f"^{changed} has changed since the fit"):
        estimator.leave_one_out()
    np.save(tmp_path / f"{changed}.npy", values[changed])
    np.testing.assert_allclose(estimator.leave_one_out().residuals, wanted, rtol=1e-9)


def test_targets_and_weights_beside_a_file_are_copied(parts: Parts, tmp_path: Path) -> None:
    X, y, w = parts
    path = _file(tmp_path / "X.npy", X)
    wanted = dkrr.KernelRidge(kernel="rbf", tile_size=16).fit(path, y.copy(), w.copy()).leave_one_out()
    estimator = dkrr.KernelRidge(kernel="rbf", tile_size=16).fit(path, y, w)
    y += 1.0
    w *= 3.0
    np.testing.assert_allclose(estimator.leave_one_out().residuals, wanted.residuals, rtol=1e-9)


def test_standard_deviations_after_mixed_precision_are_of_the_rows_of_the_fit(parts: Parts, tmp_path: Path) -> None:
    X, y, _ = parts
    options = {"kernel": "rbf", "tile_size": 16, "precision": "mixed", "solver": "cholesky", "store": tmp_path / "s"}
    path = _file(tmp_path / "X.npy", X)
    estimator = dkrr.KernelRidge(**options).fit(path, y)  # type: ignore[arg-type]
    wanted = dkrr.KernelRidge(kernel="rbf").fit(X, y).predict(X, return_std=True)[1]
    np.save(path, X + 1.0)
    np.testing.assert_allclose(estimator.predict(X, return_std=True)[1], wanted, rtol=1e-6)


@pytest.mark.parametrize("begin", [40, 200])
def test_a_data_set_that_was_made_anew_is_not_the_one_that_was_opened(begin: int, tmp_path: Path) -> None:
    X, y = np.random.default_rng(0).random((700, 3)), np.arange(700.0)
    path, options = tmp_path / "data.zarr", {"kernel": "rbf", "tile_size": 128, "store": tmp_path / "store"}
    for rows in (slice(0, begin), slice(begin, 700)):
        dataset = dkrr.ingest(X[rows], path, y=y[rows], append=True)
    estimator = dkrr.KernelRidge(**options).fit(dataset)  # type: ignore[arg-type]
    shutil.rmtree(path)
    dkrr.ingest(X + 1.0, path, y=2.0 * y)  # in chunks of another size
    for use in (
        estimator.leave_one_out,
        lambda: estimator.predict(X),
        lambda: estimator.predict(X, return_std=True),
        lambda: estimator.predict_interval(X),
        lambda: estimator.save(tmp_path / "model.zarr"),
        estimator.X_fit_.compute,
        lambda: pickle.loads(pickle.dumps(estimator)).predict(X),
        lambda: dkrr.KernelRidge(**options).fit(dataset),  # type: ignore[arg-type]
    ):
        with pytest.raises(DkrrError, match=r"data\.zarr holds other rows than when it was opened"):
            use()
    assert not (tmp_path / "model.zarr").exists()
    for use, said in ((lambda: dataset.X.read(0, 700), "open it again"), (lambda: estimator.predict(X), "")):
        with pytest.raises(DkrrError) as caught:
            use()
        assert "delete" not in str(caught.value)
        assert said in str(caught.value)
        shutil.rmtree(path, ignore_errors=True)


def test_a_data_set_that_has_grown_is_still_the_one_that_was_opened(parts: Parts, tmp_path: Path) -> None:
    X, y, _ = parts
    dataset = dkrr.ingest(X, tmp_path / "data.zarr", y=y)
    estimator = dkrr.KernelRidge(kernel="rbf", tile_size=16, store=tmp_path / "store").fit(dataset)
    wanted = estimator.predict(X), estimator.leave_one_out().residuals
    dkrr.ingest(X[:5], tmp_path / "data.zarr", y=y[:5], append=True)
    found = estimator.predict(X), estimator.leave_one_out().residuals
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-9)


_length = 1.0


def of_a_length(A: Any, B: Any) -> Any:
    """A kernel whose values are others when the module is."""
    return np.exp(-np.square(A[:, None] - B[None]).sum(axis=-1) / _length)


def test_stored_tiles_of_a_function_that_changed_are_computed_again(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    X = parts[0]
    for length in (1.0, 3.0):
        monkeypatch.setattr(f"{__name__}._length", length)
        K = dkrr.gram_matrix(X, of_a_length, store=tmp_path, tile_size=16).compute(scheduler="synchronous")
        np.testing.assert_allclose(K, of_a_length(X, X), rtol=1e-12)


def test_exchanged_tiles_of_a_gram_matrix_are_computed_again(parts: Parts, tmp_path: Path) -> None:
    X = parts[0]
    wanted = dkrr.gram_matrix(X, gamma=0.5, store=tmp_path, tile_size=16).compute(scheduler="synchronous")
    (one,), (other,) = (list(tmp_path.glob(f"grams/*.zarr/c/{i}/0")) for i in (1, 2))
    one.write_bytes(other.read_bytes())
    found = dkrr.gram_matrix(X, gamma=0.5, store=tmp_path, tile_size=16).compute(scheduler="synchronous")
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_a_data_set_that_was_replaced_since_it_was_opened_is_refused(parts: Parts, tmp_path: Path) -> None:
    X, y, _ = parts
    dataset = dkrr.ingest(X, tmp_path / "data.zarr", y=y)
    estimator = dkrr.KernelRidge(kernel="rbf").fit(X, y)
    K = dkrr.gram_matrix(dataset, "rbf", store=tmp_path, tile_size=16)
    np.asarray(K[:16, :16])
    shutil.rmtree(tmp_path / "data.zarr")
    dkrr.ingest(X[::-1], tmp_path / "data.zarr", y=y)
    for action in (
        lambda: K.compute(scheduler="synchronous"),
        lambda: dkrr.ingest(dataset, tmp_path / "copy.zarr"),
        lambda: estimator.predict(dataset),
    ):
        with pytest.raises(DataError, match="holds other rows than when it was opened"):
            action()


@pytest.mark.parametrize("n", [40, 2100])
@pytest.mark.parametrize("name", ["X", "y", "weight"])
def test_exchanged_rows_are_still_found_when_rows_are_appended(name: str, n: int, tmp_path: Path) -> None:
    table = np.random.default_rng(0).random((n + 5, 4))
    path = tmp_path / "data.zarr"
    dkrr.ingest(table[:n], path, target=2, weight=3, rows_per_chunk=16)
    swap(path / name / "c/0/0", path / name / "c/1/0")
    with contextlib.suppress(DamagedChunkError):
        dkrr.ingest(table[n:], path, append=True)
    with pytest.raises(DamagedChunkError):
        dkrr.open_dataset(path).verify()
    with pytest.raises(DamagedChunkError):
        dkrr.KernelRidge(kernel="rbf", store=tmp_path / "store").fit(path)


@pytest.mark.parametrize("text", ['"mean": [', '"num_rows": ', '"feature_names": ["', '"digest": "'])
def test_a_bit_that_flips_in_what_a_data_set_says_of_its_rows_is_found(text: str, tmp_path: Path) -> None:
    frame = pa.table({"a1": [0.5, 1.5, 2.5, 3.5], "b": [1.0, 2.0, 4.0, 3.0]})
    path = dkrr.ingest(frame, tmp_path / "data.zarr", target="b").path
    dkrr.ingest(frame, path, append=True)
    document = tmp_path / "data.zarr/zarr.json"
    plain = json.dumps(json.loads(document.read_text())).encode()
    octets = bytearray(plain)
    octets[octets.index(text.encode()) + len(text)] ^= 1
    document.write_bytes(octets)
    run("info", path, "--verify", exits=4, said="is damaged")
    document.write_bytes(plain)
    run("info", path, "--verify")


@pytest.mark.parametrize("name", ["X", "y"])
def test_exchanged_rows_are_not_copied_or_predicted(name: str, tmp_path: Path) -> None:
    X, y = np.random.default_rng(0).random((60, 3)), np.arange(60.0)
    path, grown = tmp_path / "data.zarr", tmp_path / "grown.zarr"
    estimator = dkrr.KernelRidge(kernel="rbf").fit(X, y)
    dkrr.ingest(X, path, y=y, rows_per_chunk=16)
    dkrr.ingest(X, grown, y=y)
    swap(path / name / "c/0/0", path / name / "c/1/0")
    for action in (
        lambda: dkrr.ingest(path, tmp_path / "copy.zarr"),
        lambda: dkrr.ingest(dkrr.open_dataset(path), grown, append=True),
        lambda: estimator.predict(path),
        lambda: tune(path, settings=TuneSettings(budget_seconds=1.0)),
        lambda: dkrr.KernelRidge(kernel="linear", solver="primal").fit(path),
        lambda: dkrr.gram_matrix(path, "rbf", store=tmp_path),
    ):
        with pytest.raises(DamagedChunkError):
            action()
    assert not (tmp_path / "copy.zarr").exists()
    assert dkrr.open_dataset(grown).num_rows == 60


@pytest.mark.parametrize("kind", ["data set", "array on disk"])
def test_rows_that_are_exchanged_behind_an_estimator_are_found(kind: str, tmp_path: Path) -> None:
    X, y = np.random.default_rng(0).random((600, 1100)), np.arange(600.0)
    np.save(tmp_path / "x.npy", X)
    dataset = dkrr.ingest(X, tmp_path / "data.zarr", y=y, rows_per_chunk=256)
    source = (dataset,) if kind == "data set" else (np.load(tmp_path / "x.npy", mmap_mode="r"), y)
    estimator = dkrr.KernelRidge(kernel="rbf", gamma=0.01, tile_size=256, store=tmp_path / "store").fit(*source)
    wanted, left_out = estimator.predict(X[:3]), estimator.leave_one_out().residuals
    rows = tmp_path / "data.zarr" if kind == "data set" else next((tmp_path / "store/rows").iterdir())
    os.utime(rows / "X/c/0/0")  # written again, and the same
    np.testing.assert_array_equal(estimator.predict(X[:3]), wanted)
    last = sorted((rows / "X/c").iterdir())[-1] / "0"
    whole = last.read_bytes()
    dkrr.ingest(X[::-1], tmp_path / "other.zarr", rows_per_chunk=dkrr.open_dataset(rows).X.rows_per_chunk)
    last.write_bytes((tmp_path / "other.zarr/X/c" / last.parent.name / "0").read_bytes())
    with pytest.raises(DamagedChunkError):
        estimator.predict(X[:3])
    last.write_bytes(whole)
    np.testing.assert_array_equal(estimator.predict(X[:3]), wanted)
    swap(rows / "X/c/0/0", rows / "X/c/1/0")
    for action in (
        lambda: estimator.predict(X[:3]),
        lambda: estimator.predict(X[:3], return_std=True),
        lambda: estimator.save(tmp_path / "m"),
    ):
        with pytest.raises(DamagedChunkError):
            action()
    if kind == "data set":
        with pytest.raises(DamagedChunkError):
            estimator.leave_one_out()
    else:  # the array is read again, and its copy made anew
        np.testing.assert_array_equal(estimator.leave_one_out().residuals, left_out)
        np.testing.assert_array_equal(estimator.predict(X[:3]), wanted)


def test_chunks_that_changed_places_at_an_address_are_found(bucket: Bucket) -> None:
    X = np.random.default_rng(0).random((200, 3))
    dataset = dkrr.ingest(X, bucket.url("rows.zarr"), y=X[:, 0], rows_per_chunk=64)
    estimator = dkrr.KernelRidge(kernel="rbf", tile_size=64).fit(dataset)
    first, second = (bytes(read_key(dataset.path, f"X/c/{i}/0") or b"") for i in (0, 1))
    write_key(dataset.path, "X/c/0/0", second)
    write_key(dataset.path, "X/c/1/0", first)
    for action in (lambda: estimator.fit(dataset), lambda: dkrr.KernelRidge(tile_size=64).fit(dataset)):
        with pytest.raises(DamagedChunkError):
            action()


def test_exchanged_chunks_of_the_inverse_are_computed_again(parts: Parts, tmp_path: Path) -> None:
    X, y, _ = parts
    estimator = dkrr.KernelRidge(kernel="rbf", gamma=0.5, tile_size=4, store=tmp_path).fit(X, y)
    wanted = estimator.leave_one_out().residuals
    (factor,) = tmp_path.glob("factors/*.zarr")
    chunks = factor / "inverse_diagonal/c"
    swap(chunks / "1/0", chunks / "2/0")
    shown = run("info", factor, "--verify", exits=4)
    assert "chunks of inverse_diagonal were exchanged" in shown.output
    np.testing.assert_allclose(estimator.leave_one_out().residuals, wanted, rtol=1e-12)
    run("info", factor, "--verify")


def rewrite(path: Path, old: str, new: str) -> None:
    """Other bytes in the same file, of the same size and with its time of last change."""
    before = path.stat()
    text = path.read_text()
    assert old in text
    assert len(old) == len(new)
    with open(path, "r+") as file:
        file.write(text.replace(old, new))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)


def fitted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[float]]:
    """Fit the job in a folder: the digests of its rows, and its dual coefficients."""
    fsync = os.fsync
    in_process(monkeypatch)
    monkeypatch.setattr(os, "fsync", fsync)
    run("fit", folder / "job.toml")
    facts = json.loads((folder / "runs/job/result.json").read_text())
    model = dkrr.load_model(folder / "runs/job/model.zarr")
    return facts["data"]["digests"], model.dual_coef.read(0, model.num_rows)[:, 0].tolist()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with rows as text and the job of a fit."""
    lines = [f"{i},{i * i % 7},{i % 3}" for i in range(10, 30)]
    (tmp_path / "rows.csv").write_text("\n".join(["a,b,y", *lines]) + "\n")
    (tmp_path / "job.toml").write_text('[data]\npath = "rows.csv"\ntarget = "y"\n[model]\nkernel = "rbf"\n')
    return tmp_path


def test_a_file_that_was_rewritten_in_place_is_read_again(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fitted(job, monkeypatch)
    rewrite(job / "rows.csv", "11,2,2", "11,2,9")
    after = fitted(job, monkeypatch)
    assert after[0][0] == before[0][0]  # X
    assert after[0][1] != before[0][1]  # y
    assert after[1] != before[1]


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_file_that_was_rewritten_through_a_memory_map_is_read_again(
    in_memory: bool, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second write to a page that is not on disk yet, or never gets there, leaves the times of its file alone."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if in_memory else job) as folder:
        path = Path(folder) / "rows.npy"
        np.save(path, np.random.default_rng(0).random((20, 3)))
        text = (job / "job.toml").read_text().replace("rows.csv", str(path)).replace('"y"', "-1")
        (job / "job.toml").write_text(text)
        rows = np.load(path, mmap_mode="r+")
        rows[:, 2] += 1.0
        before, digests = path.stat(), fitted(job, monkeypatch)[0]
        rows[:, 2] += 1.0
        if in_memory:  # elsewhere the file was synced in between
            assert path.stat().st_ctime_ns == before.st_ctime_ns
        after = fitted(job, monkeypatch)[0]
        del rows
    assert after[0] == digests[0]
    assert after[1] != digests[1]


@pytest.mark.parametrize("way", ["restored", "touched"])
def test_a_file_of_the_same_bytes_is_the_same_data(way: str, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fitted(job, monkeypatch)
    path = job / "rows.csv"
    if way == "restored":
        shutil.copy2(path, job / "backup.csv")
        path.unlink()
        (job / "backup.csv").rename(path)
    else:
        path.touch()
    factors = {file: file.stat().st_mtime_ns for file in (job / "runs/store/factors").rglob("c/*/*")}
    assert fitted(job, monkeypatch) == before
    assert {file: file.stat().st_mtime_ns for file in factors} == factors


def test_more_held_out_rows_are_counted(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    with (job / "job.toml").open("a") as file:
        file.write('[evaluate]\npath = "test.csv"\n')
    for count in (20, 30):
        (job / "test.csv").write_text("a,b,y\n" + "0.5,0.5,0.5\n" * count)
        found = json.loads(run("fit", job / "job.toml", "--json").stdout)
        assert (found["plan"]["num_test_rows"], found["score"]["num_rows"]) == (count, count)
        assert json.loads((job / "runs/job/plan.json").read_text())["num_test_rows"] == count


def test_a_batch_that_was_rewritten_in_place_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    project = Project(tmp_path / "p")
    path = project.deliver("n1", seed=1, change=lambda rows: rows.round(6) * 100)
    project.run()
    assert project.run().outcome == "nothing new"
    line = path.read_text().splitlines()[3]
    rewrite(path, line, line.replace("1", "2"))
    with pytest.raises(dkrr.DkrrError, match=r"n1\.csv is in the data set with other bytes"):
        project.run()


def test_held_out_rows_are_known_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    project = Project(tmp_path / "p")
    path = project.deliver("held-out", seed=7).rename(tmp_path / "p/held-out.csv")
    project.document["holdout"] = {"path": str(path)}
    project.deliver("n1", seed=1)
    first = project.run()
    path.touch()
    assert project.run().outcome == "nothing new"
    line = path.read_text().splitlines()[3]
    rewrite(path, line, line.replace("1", "2"))
    again = project.run()
    assert again.outcome != "nothing new"
    assert again.fit["score"]["rmse"] != first.fit["score"]["rmse"]
    assert project.run().outcome == "nothing new"


def test_defaults_that_depend_on_the_features_are_those_of_the_present_ones(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted(job, monkeypatch)
    assert dkrr.load_model(job / "runs/job/model.zarr").kernel.to_dict()["gamma"] == 1 / 2
    lines = (job / "rows.csv").read_text().splitlines()
    (job / "rows.csv").write_text(
        "\n".join(["p,q," + lines[0], *(f"1.5,{i},{line}" for i, line in enumerate(lines[1:]))])
    )
    after = fitted(job, monkeypatch)
    assert dkrr.load_model(job / "runs/job/model.zarr").kernel.to_dict()["gamma"] == 1 / 4
    shutil.copytree(job, job / "anew", ignore=shutil.ignore_patterns("runs"))
    np.testing.assert_allclose(fitted(job / "anew", monkeypatch)[1], after[1], rtol=1e-9)
    plan = json.loads((job / "runs/job/plan.json").read_text())
    assert (plan["num_features"], plan["kernel"]["gamma"]) == (4, 1 / 4)


@pytest.mark.parametrize("num_rows", [12, 60])
@pytest.mark.parametrize("weighted", [False, True])
def test_automatic_centres_are_as_many_as_the_present_rows_allow(
    num_rows: int, weighted: bool, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solver = '[solver]\nname = "nystrom"\n'
    toml = (job / "job.toml").read_text() + solver
    (job / "job.toml").write_text(toml.replace("[model]", 'weight = "w"\n[model]') if weighted else toml)
    header, *_ = (job / "rows.csv").read_text().splitlines()

    def write(usable: int) -> None:
        # rows of no weight are no centres, and leave the number of rows as it is
        weights = [int(i < usable) for i in range(60 if weighted else usable)]
        rows = [f"{i}.5,{i % 7},{i % 3}" + f",{w}" * weighted for i, w in enumerate(weights)]
        (job / "rows.csv").write_text("\n".join([header + ",w" * weighted, *rows]) + "\n")

    for usable in (20, num_rows):
        write(usable)
        fitted(job, monkeypatch)
        plan = json.loads((job / "runs/job/plan.json").read_text())
        assert plan["nystrom"]["num_centers"] == usable
        model = dkrr.load_model(job / "runs/job/model.zarr")
        assert model.num_rows == usable


@pytest.mark.parametrize("form", ["C", "F", "classes"])
def test_an_array_file_that_is_replaced_while_it_is_read_is_refused(form: str, tmp_path: Path) -> None:
    values = 1 + np.random.default_rng(0).random((500, 6))
    values[:, -1] = np.arange(500) % 3
    path = tmp_path / "rows.npy"

    def save(path: Path, values: Any) -> None:
        np.save(path, np.asfortranarray(values) if form == "F" else values)

    save(path, values)
    save(tmp_path / "other.npy", values + (0 if form == "classes" else 10.0))
    table = open_table(path)
    os.replace(tmp_path / "other.npy", path)
    with pytest.raises(DataError, match="was changed while it was read"):
        dkrr.ingest(table, tmp_path / "data.zarr", target=5, one_hot=form == "classes")
    assert not (tmp_path / "data.zarr").exists()


@pytest.mark.parametrize("form", ["C", "F"])
def test_an_array_file_of_many_blocks_is_compared_once_a_pass(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in memory is read whole for that, which would cost the square of its size."""
    monkeypatch.setattr("dkrr.dataset.table.BLOCK_BYTES", 1 << 14)
    values = np.random.default_rng(0).random((3000, 8))
    np.save(tmp_path / "rows.npy", np.asfortranarray(values) if form == "F" else values)
    states: list[Any] = []
    monkeypatch.setattr("dkrr.dataset.table.file_state", lambda *of: states.append(of) or file_state(*of))
    dkrr.ingest(tmp_path / "rows.npy", tmp_path / "data.zarr")
    assert len(states) == 2
    blocks = open_table(tmp_path / "rows.npy").blocks(range(8))
    next(blocks)
    np.save(tmp_path / "rows.npy", np.asfortranarray(values + 1.0) if form == "F" else values + 1.0)
    with pytest.raises(DataError, match="was changed while it was read"):
        list(blocks)


@pytest.mark.parametrize("form", ["npy", "csv", "parquet", "zarr"])
def test_a_file_that_is_written_in_place_without_another_time_is_refused(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writes within a step of the clock, or one of which the reader sees the beginning."""
    path, other = tmp_path / f"rows.{form}", tmp_path / f"other.{form}"
    for k, place in enumerate((path, other)):
        frame = pd.DataFrame(np.full((500, 3), k + 1.0), columns=["a", "b", "c"])
        save = {
            "npy": lambda place, frame: np.save(place, frame.to_numpy()),
            "csv": lambda place, frame: frame.to_csv(place, index=False),
            "parquet": lambda place, frame: frame.to_parquet(place, compression=None),
            "zarr": lambda place, frame: zarr.create_array(place, data=frame.to_numpy(), compressors=None),
        }
        save[form](place, frame)
    monkeypatch.setattr(
        "dkrr.dataset.table.file_state", lambda path, *since: np.delete(file_state(path, *since), [1, 2]).tolist()
    )
    table = open_table(path)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    for file in files:
        file.write_bytes((other / file.relative_to(path) if form == "zarr" else other).read_bytes())
    with pytest.raises(DataError, match="was changed while it was read"):
        dkrr.ingest(table, tmp_path / "data.zarr")
    assert not (tmp_path / "data.zarr").exists()


# --- data sets that are exchanged while they are read -----------------------------------------------------------------


@contextlib.contextmanager
def exchanged(path: Path, other: Path, after: int, *, by_link: bool) -> Iterator[None]:
    """After so many chunks of the data set at ``path`` were read in the block, ``other`` is there."""
    read, count = ChunkArray.read, 0
    if by_link:
        path.rename(path.with_name("first.zarr"))
        path.symlink_to("first.zarr")

    def counted(self: ChunkArray, index: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += f"{os.path.abspath(self.location)}/".startswith(f"{path}/")
        if count == after + 1:
            count += 1
            if by_link:
                path.with_name("link").symlink_to(other.name)
                path.with_name("link").rename(path)
            else:
                path.rename(path.with_name("first.zarr"))
                other.rename(path)
        return read(self, index, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkArray, "read", counted)
        yield
    assert count > after


@pytest.mark.parametrize("by_link", [False, True], ids=["renamed", "linked"])
@pytest.mark.parametrize("after", [8, 9, 13], ids=str)
@pytest.mark.parametrize("what", ["ingest", "predict", "estimator", "evaluate", "standardize"])
def test_rows_of_two_data_sets_that_are_exchanged_are_never_mixed(
    what: str, after: int, by_link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has four chunks of X and of y; they are verified, and then read."""
    monkeypatch.chdir(tmp_path)
    in_process(monkeypatch)
    rows = np.random.default_rng(0).random((32, 4))
    sets = {"data.zarr": rows, "other.zarr": rows + 10.0}
    for name, values in sets.items():
        dkrr.ingest(values, name, target=3, rows_per_chunk=8)
    est = dkrr.KernelRidge(kernel="rbf", gamma=0.3, alpha=0.1).fit(rows[:, :3], rows[:, 3])
    est.save("model.zarr")
    (tmp_path / "job.toml").write_text(
        '[data]\npath = "data.zarr"\nstandardize = true\n[evaluate]\nfraction = 0.3\n[output]\nstore = "store"\n'
    )
    commands: dict[str, Any] = {
        "ingest": lambda: dkrr.ingest("data.zarr", "copy.zarr"),
        "predict": lambda: run("predict", "model.zarr", "data.zarr", "-o", "out.npy", exits=None),
        "evaluate": lambda: run("evaluate", "model.zarr", "data.zarr", exits=None),
        "estimator": lambda: est.predict("data.zarr"),
        "standardize": lambda: run("fit", "job.toml", exits=None),
    }
    said = ""
    with exchanged(tmp_path / "data.zarr", tmp_path / "other.zarr", after - 6 * (what == "estimator"), by_link=by_link):
        try:
            said = getattr(commands[what](), "stderr", "")
        except DkrrError as exc:
            said = str(exc)
    assert re.search("other rows than|was replaced by|holds other rows", said), said
    assert not {"copy.zarr", "out.npy"} & set(os.listdir())
    assert not list(tmp_path.glob("store/rows/*/X/c/*/*"))


def test_a_zarr_array_that_is_rewritten_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = zarr.create_array(tmp_path / "source.zarr", shape=(40, 3), chunks=(10, 3), dtype="f8")
    source[:] = 1.0
    read = zarr.Array.__getitem__

    def rewritten(self: zarr.Array, selection: Any) -> Any:
        found = read(self, selection)
        zarr.open_array(tmp_path / "source.zarr", mode="r+")[:] = 2.0
        return found

    monkeypatch.setattr(zarr.Array, "__getitem__", rewritten)
    with pytest.raises(DataError, match="was changed while it was read"):
        dkrr.ingest(tmp_path / "source.zarr", tmp_path / "data.zarr")
    assert not (tmp_path / "data.zarr").exists()


def test_objects_of_a_folder_that_are_replaced_while_they_are_fetched_are_refused(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(name: str, value: float) -> None:
        pq.write_table(pa.table({"a": np.full(5, value)}), tmp_path / name)
        write_key(bucket.url("rows"), name, (tmp_path / name).read_bytes())

    def fetch(*arguments: Any) -> Any:
        found = get_file(*arguments)
        for name in names:
            write(name, 2.0)
        return found

    names, get_file = ("a.parquet", "b.parquet"), sources.get_file
    for name in names:
        write(name, 1.0)
    assert dkrr.ingest(bucket.url("rows"), tmp_path / "data.zarr").num_rows == 10
    monkeypatch.setattr(sources, "get_file", fetch)
    with pytest.raises(DataError, match="was changed while it was read"):
        dkrr.ingest(bucket.url("rows"), tmp_path / "other.zarr")


# --- a finished job ---------------------------------------------------------------------------------------------------

JOB = """
[data]
path = "rows{ending}"
target = [-1]
[evaluate]
{evaluate}
[model]
kernel = "rbf"
alpha = 0.1
"""


def _write(name: str, seed: int) -> None:
    """A table of four columns, the last of which is a mask of 0 and 1."""
    rows = np.random.default_rng(seed).random((60, 3))
    if name.endswith(".npy"):
        np.save(name, rows)
    elif name.endswith(".parquet"):
        pq.write_table(pa.table({f"x{j}": rows[:, j] for j in range(3)}), name)
    elif name.endswith(".zarr"):
        shutil.rmtree(name, ignore_errors=True)
        dkrr.ingest(rows, name, target=[-1])
    else:
        np.savetxt(name, rows, delimiter=",", header="a,b,c", comments="")


def _write_mask(name: str, seed: int) -> None:
    np.save(name, np.random.default_rng(seed).random(60) < 0.3)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The drivers that a submission started, none of which runs; the current folder is an empty one."""
    monkeypatch.chdir(tmp_path)
    in_process(monkeypatch)
    found: list[str] = []

    def start(run: Any) -> dict[str, Any]:
        found.append(run.location)
        return {"kind": "here", **process_record()}

    monkeypatch.setattr("dkrr.jobs.driver.start_driver", start)
    return found


@pytest.mark.parametrize(
    ("ending", "evaluate", "changed", "write"),
    [
        (".csv", "fraction = 0.2", "rows.csv", _write),
        (".npy", "fraction = 0.2", "rows.npy", _write),
        (".parquet", "fraction = 0.2", "rows.parquet", _write),
        (".csv", 'path = "test.csv"', "test.csv", _write),
        (".zarr", 'path = "test.csv"', "test.csv", _write),
        (".zarr", 'path = "test.zarr"', "test.zarr", _write),
        (".csv", 'mask = "mask.npy"', "mask.npy", _write_mask),
        (".zarr", 'mask = "mask.npy"', "mask.npy", _write_mask),
    ],
)
def test_a_finished_job_is_submitted_again_when_a_file_that_it_reads_was_written_since(
    started: list[str], ending: str, evaluate: str, changed: str, write: Any
) -> None:
    Path("job.toml").write_text(JOB.format(ending=ending, evaluate=evaluate))
    _write(f"rows{ending}", 0)
    write(changed, 0) if changed != f"rows{ending}" else None
    run("fit", "job.toml")
    assert "is finished" in run("submit", "job.toml").stderr
    assert "since" not in run("resume", "job").stderr
    assert not started
    write(changed, 1)
    assert changed in run("resume", "job").stderr, "a finished run is told what changed, and stays"
    assert not started
    run("submit", "job.toml")
    assert len(started) == 1


# --- while they are read ----------------------------------------------------------------------------------------------


def test_the_mask_is_read_from_the_file_that_the_rows_are_from(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "".join(f"{i},{i % 3},{int(i < 5)}\n" for i in range(30))
    (job / "rows.csv").write_text(f"a,y,held\n{rows}")
    text = '[data]\npath = "rows.csv"\ntarget = "y"\n[model]\nkernel = "rbf"\n[evaluate]\nmask = "held"\n'
    (job / "job.toml").write_text(text)

    def late(*arguments: Any, **options: Any) -> Any:
        (job / "next.csv").write_text((job / "rows.csv").read_text().replace("29,2,0", "29,2,1"))
        os.replace(job / "next.csv", job / "rows.csv")
        return read_mask(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr("dkrr.jobs.prepare.read_mask", late)
        run("fit", job / "job.toml", exits=4, said="rows.csv was changed while it was read")


def test_an_object_that_was_another_one_for_a_moment_is_read_as_it_is(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(first: int) -> None:
        write_key(bucket.url("data"), "t.csv", "".join(["x,y\n", *(f"{i},{first + i}\n" for i in range(40))]).encode())

    def late(*arguments: Any, **options: Any) -> Any:
        put(1000)
        return dkrr.ingest(*arguments, **options)

    document = {
        "data": {"path": bucket.url("data/t.csv"), "target": "y"},
        "model": {"kernel": "rbf"},
        "output": {"directory": "runs/a"},
    }
    spec = JobSpec.from_dict(document, base=tmp_path)
    put(0)
    with monkeypatch.context() as patch:
        patch.setattr("dkrr.jobs.prepare.ingest", late)
        with pytest.raises(DataError, match=r"t\.csv.* was changed while it was read"):
            prepare(spec, spec.store)
    put(0)
    assert prepare(spec, spec.store).train.targets.read(0, 1)[0, 0] == 0


def test_an_array_at_an_address_that_is_written_while_it_is_read_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    def write(value: float) -> None:
        options: dict[str, Any] = {"shape": (3072, 1024), "chunks": (1024, 1024), "dtype": "float64", "zarr_format": 3}
        zarr.create_array(zarr_store(bucket.url("x.zarr")), **options, overwrite=True)[:] = value

    def slowly(*arguments: Any) -> Iterator[Any]:
        for number, block in enumerate(blocks(*arguments)):
            yield block
            if not number:
                write(2.0)

    write(1.0)
    table = open_table(bucket.url("x.zarr"))
    blocks, table.blocks = table.blocks, slowly  # type: ignore[method-assign]
    with pytest.raises(DataError, match=r"x\.zarr.* was changed while it was read"):
        dkrr.ingest(table, tmp_path / "rows.zarr")


def test_a_link_to_another_file_of_the_same_size_and_times_is_read_anew(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = job / "rows.csv"
    other = job / "other.csv"
    other.write_text(rows.read_text().replace("11,2,2", "11,2,9"))
    rows.rename(job / "first.csv")
    rows.symlink_to("first.csv")
    stat, times = os.stat, os.stat(other)

    def alike(path: Any, *given: Any, **options: Any) -> Any:
        found = stat(path, *given, **options)
        return times if os.path.basename(os.path.realpath(path)) in ("first.csv", "other.csv") else found

    monkeypatch.setattr("os.stat", alike)
    before = fitted(job, monkeypatch)
    rows.unlink()
    rows.symlink_to("other.csv")
    assert fitted(job, monkeypatch) != before
