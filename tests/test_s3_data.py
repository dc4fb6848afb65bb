"""Data sets, models and predictions at s3:// addresses, on a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dkrr
from dkrr.dataset import ingest, open_dataset, read_mask
from dkrr.errors import DamagedChunkError, DataError, StoreError, StoreMismatchError
from dkrr.jobs.inspection import describe, verify
from dkrr.jobs.predict import Predictions, export_predictions
from dkrr.models.model import load_model
from dkrr.store.files import delete_key, list_keys, read_key, write_json, write_key
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
    assert describe(location)[1]["rows"] == 300
    assert verify(location) == []
    with pytest.raises(StoreError, match="exists"):
        fitted.save(location)
    fitted.save(location, overwrite=True)
    assert verify(location) == []
    bucket.server.fail({"method": "PUT", "path": "manifest", "times": 1, "status": 403})
    with pytest.raises(StoreError):
        fitted.save(location, overwrite=True)
    with pytest.raises(StoreError, match="no manifest"):
        load_model(location)
    fitted.save(location, overwrite=True)
    delete_key(location, "dual_coef/c/0/0")
    with pytest.raises(StoreError, match=r"dual_coef/c/0/0 of .* is missing"):
        load_model(location)
    write_key(location, "more", b"1")
    with pytest.raises(StoreError, match="holds something else"):
        fitted.save(location, overwrite=True)


@pytest.mark.parametrize("ending", [".zarr", ".npy", ".csv", ".parquet"])
def test_predictions_are_written_to_an_address(
    bucket: Bucket, tmp_path: Path, ending: str, rows: tuple[Any, Any]
) -> None:
    X = ingest(rows[0], bucket.url("work/data.zarr"), rows_per_chunk=64).X
    predictions = Predictions(num_rows=X.num_rows, names=list("abcd"), read=X.read)
    (tmp_path / "out").mkdir()
    export_predictions(predictions, str(tmp_path / f"out/p{ending}"))
    for _ in range(2):  # the second time something is there
        export_predictions(predictions, bucket.url(f"out/p{ending}"))
    keys = [key for key in bucket.listing("out") if not key.startswith(f"p{ending}.")]
    assert keys == [key for key in list_keys(str(tmp_path / "out")) if not key.startswith(f"p{ending}.")]
    for key in keys:
        assert read_key(bucket.url("out"), key) == (tmp_path / "out" / key).read_bytes()


def test_predictions_that_were_interrupted_at_an_address_are_written_again(
    bucket: Bucket, tmp_path: Path, rows: tuple[Any, Any]
) -> None:
    X = ingest(rows[0], bucket.url("work/data.zarr"), rows_per_chunk=64).X
    predictions = Predictions(num_rows=X.num_rows, names=list("abcd"), read=X.read)
    output = bucket.url("out/p.zarr")
    export_predictions(predictions, str(tmp_path / "p.zarr"))
    for _ in range(2):  # the second time something is there
        bucket.server.fail({"method": "PUT", "path": "p.zarr/c/0", "times": 1, "status": 403})
        with pytest.raises(StoreError):
            export_predictions(predictions, output)
        export_predictions(predictions, output)
    bucket.server.fail({"method": "PUT", "path": "p.zarr/c/0", "times": 1, "status": 403})
    with pytest.raises(StoreError):
        export_predictions(predictions, output)
    metadata = read_key(str(tmp_path / "p.zarr"), "zarr.json") or b""
    for key, mine in (("notes.txt", b"mine"), ("zarr.json", metadata)):  # somebody else's since, of the same shape
        write_key(output, key, mine)
        with pytest.raises(StoreError, match="--overwrite"):
            export_predictions(predictions, output)
        assert read_key(output, key) == mine
        delete_key(output, key)
    export_predictions(predictions, output)
    export_predictions(predictions, bucket.url("out/p.csv"))
    write_key(bucket.url("out"), "p.csv", b"mine")
    with pytest.raises(StoreError, match="--overwrite"):
        export_predictions(predictions, bucket.url("out/p.csv"))
    assert read_key(bucket.url("out"), "p.csv") == b"mine"
    write_key(output, "notes.txt", b"mine")
    with pytest.raises(StoreError, match="--overwrite"):
        export_predictions(predictions, output)
    assert read_key(output, "notes.txt") == b"mine"
