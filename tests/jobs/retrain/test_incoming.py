"""Which files are batches, and what tells one from another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dkrr.errors import InterruptedRunError, StoreError
from dkrr.jobs.retrain.incoming import content_hash, deliveries
from dkrr.jobs.retrain.ledger import Ledger
from dkrr.jobs.runs.directory import RunDirectory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.csv", "a.csv.gz", "c.npy", "notes.txt", ".hidden.csv", "d.csv.partial"):
        (tmp_path / name).write_text(name)
    (tmp_path / "e.parquet").mkdir()
    (tmp_path / "e.parquet/1").write_text("1")
    return tmp_path


def names(incoming: Path) -> list[str]:
    return [found.name for found in deliveries(str(incoming))]


def test_a_folder_a_pattern_and_a_file(folder: Path) -> None:
    assert names(folder) == ["a.csv.gz", "b.csv", "c.npy", "e.parquet"]
    assert names(folder / "*.csv*") == ["a.csv.gz", "b.csv", "d.csv.partial"]
    assert names(folder / "b.csv") == ["b.csv"]
    assert names(folder / "e.parquet") == ["e.parquet"], "a folder of Parquet is one batch"
    assert names(folder / "tomorrow.csv") == []
    assert names(folder / "*.zarr") == []


@pytest.mark.parametrize("missing", ["incomming", "incomming/*.csv", "incomming/a.csv"])
def test_a_mistyped_folder_is_no_silence(missing: str, folder: Path) -> None:
    with pytest.raises(StoreError, match=r"does not exist|cannot be listed"):
        deliveries(str(folder / missing))


def test_batches_are_known_by_their_bytes(folder: Path) -> None:
    ledger = Ledger(RunDirectory(folder / "state"))
    (first, _), *_ = ledger.stage(deliveries(str(folder / "b.csv")))
    (folder / "copy.csv").write_text("b.csv")
    (again, _), *_ = ledger.stage(deliveries(str(folder / "copy.csv")))
    assert again is first
    assert Ledger.read(ledger.directory).batches.keys() == {first.key}
    os.utime(folder / "b.csv", (1, 1))  # the time alone makes no other batch
    assert ledger.known(deliveries(str(folder / "b.csv"))[0]) is None
    assert ledger.stage(deliveries(str(folder / "b.csv")))[0][0] is first
    (folder / "b.csv").write_text("B.csv")
    assert ledger.stage(deliveries(str(folder / "b.csv")))[0][0].key != first.key
    before = content_hash(deliveries(str(folder / "e.parquet"))[0])
    (folder / "e.parquet/1").rename(folder / "e.parquet/2")
    assert content_hash(deliveries(str(folder / "e.parquet"))[0]) != before


def test_a_file_that_is_still_being_written_is_left_for_later(folder: Path) -> None:
    (delivery,) = deliveries(str(folder / "b.csv"))
    (folder / "b.csv").write_text("b.csv and more")
    with pytest.raises(InterruptedRunError, match="was changed while it was read") as caught:
        content_hash(delivery)
    assert caught.value.exit_code == 75
    (folder / "b.csv").unlink()
    with pytest.raises(InterruptedRunError):
        content_hash(delivery)
