"""Data sets, models and predictions at s3:// addresses, on a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dkrr
from dkrr.dataset import ingest, open_dataset, read_mask
from dkrr.errors import DamagedChunkError, DataError, StoreError, StoreMismatchError
from dkrr.jobs.export import export_predictions
from dkrr.jobs.garbage import delete_garbage, find_garbage
from dkrr.jobs.inspection import describe, verify
from dkrr.models.model import load_model
from dkrr.store.files import delete_key, list_keys, read_key, write_json, write_key
from dkrr.store.lease import hold_lock
from tests.s3 import Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]


@pytest.fixture
def rows() -> tuple[Any, Any]:
    draws = np.random.default_rng(0)
    X = draws.standard_normal((300, 4))
    return X, np.sin(X[:, 0]) + X[:, 1]


def test_a_data_set_is_the_same_as_in_a_folder(bucket: Bucket, tmp_path: Path, rows: tuple[Any, Any]) -> None:
    X, y = rows
    here = ingest(X[:200], str(tmp_path / "d.zarr"), y=y[:200], rows_per_chunk=64)
    there = ingest(X[:200], bucket.url("data/d.zarr"), y=y[:200], rows_per_chunk=64)
    assert (there.digest, there.digest_y) == (here.digest, here.digest_y)
    ingest(X[200:], str(tmp_path / "d.zarr"), y=y[200:], append=True)
    ingest(X[200:], bucket.url("data/d.zarr"), y=y[200:], append=True)
    keys = bucket.listing("data/d.zarr")
    assert keys == list_keys(str(tmp_path / "d.zarr"))
    for key in keys:
        assert read_key(bucket.url("data/d.zarr"), key) == (tmp_path / "d.zarr" / key).read_bytes(), key
    found = open_dataset(bucket.url("data/d.zarr"))
    found.verify()
    assert found.prefix_digest(200) == here.digest
    with pytest.raises(StoreMismatchError):
        ingest(X, bucket.url("data/d.zarr"), y=-y)
    with pytest.raises(DataError):
        ingest(np.full((70, 4), np.nan), bucket.url("data/bad.zarr"), y=y[:70])
    assert bucket.listing("data/bad.zarr") == []
    write_key(bucket.url("data/foreign"), "x", b"1")
    with pytest.raises(StoreError, match="not a data set of dkrr"):
        ingest(X, bucket.url("data/foreign"), y=y)
    delete_key(bucket.url("data/d.zarr"), "X/c/1/0")
    with pytest.raises(DamagedChunkError, match="missing"):
        found.verify()


def test_an_ingest_that_was_interrupted_is_done_again(bucket: Bucket, rows: tuple[Any, Any]) -> None:
    X, y = rows
    location = bucket.url("d.zarr")
    whole = ingest(X, bucket.url("e.zarr"), y=y, rows_per_chunk=64)
    bucket.server.fail({"method": "PUT", "path": "d.zarr/X/c/2", "times": 1, "status": 403})
    with pytest.raises(StoreError):
        ingest(X, location, y=y, rows_per_chunk=64)
    assert bucket.listing("d.zarr") == []
    write_json(location, "zarr.json", {"zarr_format": 3, "attributes": {"dkrr_format": "dataset", "complete": False}})
    write_key(location, "X/c/9/0", b"left")
    assert ingest(X, location, y=y, rows_per_chunk=64).digest == whole.digest
    assert bucket.listing("d.zarr") == bucket.listing("e.zarr")


def test_files_at_an_address_are_read(bucket: Bucket, tmp_path: Path, rows: tuple[Any, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    X, y = rows
    table = np.column_stack([X, y])
    np.savetxt(tmp_path / "t.csv", table, delimiter=",", header="a,b,c,d,y", comments="", fmt="%.17g")
    np.save(tmp_path / "t.npy", table)
    for part in range(2):
        columns = {name: table[150 * part : 150 * part + 150, j] for j, name in enumerate("abcdy")}
        pq.write_table(pa.table(columns), tmp_path / f"{part}.parquet")
        write_key(bucket.url("parts"), f"in {part}/1.parquet", (tmp_path / f"{part}.parquet").read_bytes())
    for name in ("_SUCCESS", "_old/1.parquet", "in 0/.1.parquet.crc"):  # what a folder hides
        write_key(bucket.url("parts"), name, b"")
    for name in ("t.csv", "t.npy"):
        write_key(bucket.url("in"), name, (tmp_path / name).read_bytes())
    expected = ingest(X, str(tmp_path / "d.zarr"), y=y).digest
    for number, source in enumerate((bucket.url("in/t.csv"), bucket.url("in/t.npy"), bucket.url("parts"))):
        found = ingest(source, bucket.url(f"{number}.zarr"), target=-1)
        assert (found.digest, found.num_targets) == (expected, 1), source
    with pytest.raises(StoreError, match="does not exist"):
        ingest(bucket.url("in/none.csv"), bucket.url("n.zarr"))
    np.save(tmp_path / "m.npy", y > 0)
    write_key(bucket.url("in"), "m.npy", (tmp_path / "m.npy").read_bytes())
    np.testing.assert_array_equal(read_mask(bucket.url("in/m.npy"), 300), y > 0)


@pytest.fixture
def fitted(rows: tuple[Any, Any]) -> Any:
    return dkrr.KernelRidge(kernel="rbf", gamma=0.3, alpha=0.1).fit(*rows)


def test_a_model_is_saved_loaded_and_checked(bucket: Bucket, fitted: Any, rows: tuple[Any, Any]) -> None:
    location = bucket.url("models/m.zarr")
    fitted.save(location)
    np.testing.assert_array_equal(load_model(location).predict(rows[0]), fitted.predict(rows[0]))
    assert describe(location).facts["rows"] == 300
    assert verify(location) == []
    with pytest.raises(StoreError, match="exists"):
        fitted.save(location)
    fitted.save(location, overwrite=True)
    assert verify(location) == []
    whole = {key: read_key(location, key) for key in bucket.listing("models/m.zarr")}
    for key in ("dual_coef/c/0/0", "X_fit/zarr.json"):
        delete_key(location, key)
        with pytest.raises(StoreError, match=f"{key} of .* is missing"):
            load_model(location)
        data = whole[key]
        assert data is not None
        write_key(location, key, data[:-1])
        with pytest.raises(StoreError, match=f"{key} of .* is damaged"):
            load_model(location)
        write_key(location, key, data)
    write_key(location, "more", b"1")
    with pytest.raises(StoreError, match=r"more of .* is not in its manifest"):
        load_model(location)
    with pytest.raises(StoreError, match="holds something else"):
        fitted.save(location, overwrite=True)


def test_a_model_that_was_not_saved_to_the_end_is_none(bucket: Bucket, fitted: Any, rows: tuple[Any, Any]) -> None:
    location = bucket.url("m.zarr")
    bucket.server.fail({"method": "PUT", "path": "manifest", "times": 1, "status": 403})
    with pytest.raises(StoreError):
        fitted.save(location)
    with pytest.raises(StoreError, match="no manifest"):
        load_model(location)
    fitted.save(location, overwrite=True)
    assert verify(location) == []


@pytest.mark.parametrize("ending", [".zarr", ".npy", ".csv", ".parquet"])
def test_predictions_are_written_to_an_address(
    bucket: Bucket, tmp_path: Path, ending: str, rows: tuple[Any, Any]
) -> None:
    predictions = ingest(rows[0], bucket.url("work/data.zarr"), rows_per_chunk=64).X
    export_predictions(predictions, str(tmp_path / f"p{ending}"), list("abcd"), y_is_1d=False)
    for _ in range(2):  # the second time something is there
        export_predictions(predictions, bucket.url(f"out/p{ending}"), list("abcd"), y_is_1d=False)
    keys = bucket.listing("out/p.zarr") if ending == ".zarr" else [f"p{ending}"]
    folder = tmp_path / "p.zarr" if ending == ".zarr" else tmp_path
    where = bucket.url("out/p.zarr") if ending == ".zarr" else bucket.url("out")
    assert keys == (list_keys(str(folder)) if ending == ".zarr" else keys)
    for key in keys:
        assert read_key(where, key) == (folder / key).read_bytes()


def test_a_fit_leaves_the_same_tiles_as_in_a_folder(bucket: Bucket, tmp_path: Path, rows: tuple[Any, Any]) -> None:
    X, y = rows
    options: dict[str, Any] = {"kernel": "rbf", "gamma": 0.3, "alpha": 0.1, "solver": "cholesky", "tile_size": 64}
    here = dkrr.KernelRidge(**options, store=str(tmp_path / "store")).fit(X, y)
    there = dkrr.KernelRidge(**options, store=bucket.url("store")).fit(X, y)
    np.testing.assert_array_equal(there.dual_coef_, here.dual_coef_)
    np.testing.assert_array_equal(there.predict(X), here.predict(X))
    tiles = [key for key in bucket.listing("store") if "factors" in key and "/c/" in key]
    assert len(tiles) == 15
    for key in tiles:
        assert read_key(bucket.url("store"), key) == (tmp_path / "store" / key).read_bytes()
    factor = bucket.url("store/factors", tiles[0].split("/")[1])
    assert verify(factor) == []
    # a second fit finds them, and what is missing or short is made again
    delete_key(factor, "c/2/1")
    short = read_key(factor, "c/3/2")
    assert short is not None
    write_key(factor, "c/3/2", short[:100])
    assert len(verify(factor)) == 2
    before = len(bucket.puts())
    again = dkrr.KernelRidge(**options, store=bucket.url("store")).fit(X, y)
    np.testing.assert_array_equal(again.dual_coef_, here.dual_coef_)
    written = [key for key in bucket.puts()[before:] if "factors" in key and "/c/" in key]
    assert sorted(key[-3:] for key in written) == ["2/1", "3/2"]


def test_conjugate_gradients_keep_their_state_there(bucket: Bucket, tmp_path: Path, rows: tuple[Any, Any]) -> None:
    X, y = rows
    options: dict[str, Any] = {"kernel": "rbf", "gamma": 0.3, "alpha": 0.1, "solver": "cg", "tile_size": 64}
    here = dkrr.KernelRidge(**options, store=str(tmp_path / "store")).fit(X, y)
    there = dkrr.KernelRidge(**options, store=bucket.url("store")).fit(X, y)
    np.testing.assert_array_equal(there.dual_coef_, here.dual_coef_)
    held = dkrr.KernelRidge(**options, store=bucket.url("store"))
    with hold_lock(bucket.url("store/other")):
        held.fit(X, y)


def test_the_checkpoint_of_an_iteration(bucket: Bucket) -> None:
    from dkrr.linalg.cg.checkpoint import StoredCheckpoint
    from dkrr.linalg.cg.iteration import CGState

    draws = np.random.default_rng(0)
    x, r, p = draws.standard_normal((3, 50, 2))
    state = CGState(
        x=x, r=r, p=p, iteration=7, history=[np.ones(2)],
        live=np.arange(2), rz=np.ones(2), aim=np.ones(2), reference=np.ones(2), failed=np.zeros(2),
        stalls=np.zeros(2, np.int64), frozen=np.zeros(2, bool), relative=np.ones(2), largest=np.ones(2),
        iterations=np.full(2, 7), converged=np.zeros(2, bool),
    )  # fmt: skip
    location = bucket.url("state")
    checkpoint = StoredCheckpoint(location, "print")
    checkpoint.save(state)
    checkpoint.save(state)
    write_key(location, "0/p/c/0/0", b"torn")
    found = StoredCheckpoint(location, "print").load()
    assert found is not None
    np.testing.assert_array_equal(found.p, p)
    write_key(location, "1/p/c/0/0", b"torn")
    assert StoredCheckpoint(location, "print").load() is None
    assert bucket.listing("state") == []


def test_garbage_at_an_address(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    key, other = "a" * 40, "b" * 40
    for name in (key, other):
        write_key(bucket.url("runs/store/factors", f"{name}.zarr"), "c/0/0", bytes(100))
        write_json(bucket.url("runs/store/factors", f"{name}.zarr"), "zarr.json", {"attributes": {}})
    write_json(bucket.url("runs/demo"), "result.json", {"kept": {f"store/factors/{key}.zarr": 100}})
    with hold_lock(bucket.url("runs/store/factors", f"{other}.zarr")):
        pass
    assert find_garbage(bucket.url("runs/store")) == []
    items = find_garbage(bucket.url("runs/store"), kept_seconds=-60)
    assert [item.location for item in items] == [
        bucket.url("runs/store/factors", f"{other}.zarr"), bucket.url("runs/store/factors", f"{other}.zarr.lock")
    ]  # fmt: skip
    assert items[0].num_bytes == 100 + len(json.dumps({"attributes": {}}, indent=1))
    whole = [f"factors/{key}.zarr/c/0/0", f"factors/{key}.zarr/zarr.json"]
    for left in ([f"factors/{other}.zarr.lock"], []):  # which was held meanwhile, and goes the next time
        assert delete_garbage(items, lambda: find_garbage(bucket.url("runs/store"), kept_seconds=-60))[1] == []
        assert bucket.listing("runs/store") == sorted([*whole, *left])
        items = find_garbage(bucket.url("runs/store"), kept_seconds=-60)
    with pytest.raises(StoreError, match="not a store"):
        find_garbage(bucket.url("elsewhere"))


def test_predictions_that_were_interrupted_at_an_address_are_written_again(
    bucket: Bucket, rows: tuple[Any, Any]
) -> None:
    predictions = ingest(rows[0], bucket.url("work/data.zarr"), rows_per_chunk=64).X
    output = bucket.url("out/p.zarr")
    for _ in range(2):  # the second time something is there
        bucket.server.fail({"method": "PUT", "path": "p.zarr/c/1", "times": 1, "status": 403})
        with pytest.raises(StoreError):
            export_predictions(predictions, output, list("abcd"), y_is_1d=False)
        export_predictions(predictions, output, list("abcd"), y_is_1d=False)
    write_key(output, "notes.txt", b"mine")
    with pytest.raises(StoreError, match="--overwrite"):
        export_predictions(predictions, output, list("abcd"), y_is_1d=False)
    assert read_key(output, "notes.txt") == b"mine"
