"""Which files are batches, and what tells one from another."""

from __future__ import annotations

from pathlib import Path

import pytest

from dkrr.errors import InterruptedRunError, StoreError
from dkrr.jobs.retrain.deliveries import content_hash, deliveries


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
    for missing in ("incomming", "incomming/*.csv", "incomming/a.csv"):
        with pytest.raises(StoreError, match="cannot be listed"):
            names(folder / missing)


def test_a_file_that_is_still_being_written_is_left_for_later(folder: Path) -> None:
    (delivery,) = deliveries(str(folder / "b.csv"))
    (folder / "b.csv").write_text("b.csv and more")
    with pytest.raises(InterruptedRunError, match="was changed while it was read") as caught:
        content_hash(delivery)
    assert caught.value.exit_code == 75
    (folder / "b.csv").unlink()
    with pytest.raises(InterruptedRunError):
        content_hash(delivery)
