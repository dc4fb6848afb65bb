"""Generations with numbers and labels, a lock, and new versions of a data set with fewer rows."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dkrr.dataset import Dataset, append, drop_generations, ingest, keep_last, open_dataset, writer
from dkrr.errors import (
    DamagedChunkError,
    DataError,
    ParameterError,
    StorageFullError,
    StoreError,
    StoreMismatchError,
)
from tests.faults import failing_at, flip

RANDOM = np.random.default_rng(3)
X = RANDOM.standard_normal((2000, 3))
Y = RANDOM.standard_normal(2000)
W = RANDOM.random(2000)
ENDS = [0, 500, 640, 1300, 1400]


def grown(path: Path) -> Dataset:
    """Four generations, in chunks of 300 rows."""
    for number, (start, stop) in enumerate(pairwise(ENDS), start=1):
        made = ingest(
            X[start:stop],
            path,
            y=Y[start:stop],
            sample_weight=W[start:stop],
            append=True,
            label=f"night-{number}",
            rows_per_chunk=300 if number == 1 else None,
        )
    return made


def rows_of(dataset: Dataset) -> list[bytes]:
    return [array.read(0, dataset.num_rows).tobytes() for array in dataset.parts().values()]


def taken(*spans: tuple[int, int]) -> list[bytes]:
    keep = np.concatenate([np.arange(*span) for span in spans])
    return [X[keep].tobytes(), Y[keep, None].tobytes(), W[keep, None].tobytes()]


@pytest.mark.parametrize(
    ("numbers", "spans"),
    [
        ([4], [(0, 1300)]),
        ([2], [(0, 500), (640, 1400)]),
        ([1], [(500, 1400)]),
        ([2, 3], [(0, 500), (1300, 1400)]),
    ],
)
def test_a_version_without_generations(numbers: list[int], spans: list[tuple[int, int]], tmp_path: Path) -> None:
    before = grown(tmp_path / "a.zarr")
    made = drop_generations(tmp_path / "a.zarr", numbers)
    made.verify()
    assert rows_of(made) == taken(*spans)
    assert (made.version, [g.number for g in made.generations]) == (2, [k for k in (1, 2, 3, 4) if k not in numbers])
    keep = np.concatenate([np.arange(*span) for span in spans])
    fresh = ingest(X[keep], tmp_path / "b.zarr", y=Y[keep], sample_weight=W[keep])
    assert (made.digest, made.digest_y, made.digest_weight) == (fresh.digest, fresh.digest_y, fresh.digest_weight)
    # rows keep their numbers
    found = np.concatenate([g.first_row + np.flatnonzero(g.kept) for g in made.generations])
    assert np.array_equal(found, keep)
    # who has the version before open goes on reading it
    assert rows_of(before) == taken((0, 1400))
    # and a repeated drop changes nothing
    assert drop_generations(tmp_path / "a.zarr", numbers).version == 2
    # numbers are not used twice
    after = append(X[:5], tmp_path / "a.zarr", y=Y[:5], sample_weight=W[:5])
    assert (after.generations[-1].number, after.generations[-1].first_row) == (5, 1400)
    after.verify()


def test_windows_that_slide(tmp_path: Path) -> None:
    grown(tmp_path / "a.zarr")
    assert keep_last(tmp_path / "a.zarr", generations=9).version == 1
    assert keep_last(tmp_path / "a.zarr", rows=1400).version == 1
    made = keep_last(tmp_path / "a.zarr", generations=3)
    assert rows_of(made) == taken((500, 1400))
    made = keep_last(tmp_path / "a.zarr", rows=800)
    assert rows_of(made) == taken((600, 1400))
    assert [(g.number, g.num_rows, g.first_row) for g in made.generations] == [
        (2, 40, 600),
        (3, 660, 640),
        (4, 100, 1300),
    ]
    assert [(g.start, g.n) for g in made.generations] == [(0, 40), (40, 700), (700, 800)]
    assert made.kept.all()
    for options in ({}, {"rows": 5, "generations": 5}, {"rows": 0}, {"generations": -1}):
        with pytest.raises(ParameterError, match="one of them, at least 1, expected"):
            keep_last(tmp_path / "a.zarr", **options)


def test_an_append_is_done_once_under_its_label(tmp_path: Path) -> None:
    made = grown(tmp_path / "a.zarr")
    options = {"sample_weight": W[500:640], "label": "night-2"}
    assert append(X[500:640], tmp_path / "a.zarr", y=Y[500:640], **options).generations == made.generations
    with pytest.raises(StoreMismatchError, match=r"generation 2 of .* is called 'night-2' and holds 140 other rows"):
        append(X[500:640], tmp_path / "a.zarr", y=Y[500:640] + 1e-9, **options)
    assert open_dataset(tmp_path / "a.zarr").generations == made.generations


def test_readers_see_all_new_rows_or_none(tmp_path: Path) -> None:
    ingest(X[:10], tmp_path / "a.zarr", rows_per_chunk=64)
    ends, stop, wrong = {10}, threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            found = open_dataset(tmp_path / "a.zarr")
            if found.num_rows not in ends or found.read(0, found.num_rows).tobytes() != X[: found.num_rows].tobytes():
                wrong.append(found.num_rows)

    thread = threading.Thread(target=read)
    thread.start()
    for start in range(10, 550, 45):
        ends.add(start + 45)
        append(X[start : start + 45], tmp_path / "a.zarr")
    stop.set()
    thread.join()
    assert wrong == []


def test_versions_that_cannot_be_made_change_nothing(tmp_path: Path) -> None:
    made = grown(tmp_path / "a.zarr")
    for numbers, message in (
        ([7], "never had a generation 7; it has 1, 2, 3, 4"),
        ([1, 2, 3, 4], "none of 1,400 rows"),
    ):
        with pytest.raises(DataError, match=message):
            drop_generations(tmp_path / "a.zarr", numbers)
    for wrong in ([True], [1.0], ["1"]):
        with pytest.raises(ParameterError, match=r"generation .*; whole numbers expected"):
            drop_generations(tmp_path / "a.zarr", wrong)  # type: ignore[arg-type]
    with failing_at("write*/a.zarr/zarr.json:1:enospc"), pytest.raises(StorageFullError):
        drop_generations(tmp_path / "a.zarr", [4])
    assert not (tmp_path / "a.zarr/X-2").exists()
    # what a kill leaves: arrays of the version that did not come to be, and a half-written file
    for name in ("X-2/c/0/0", "X/c/0/0.00000000000000000000000000000000.partial"):
        (tmp_path / "a.zarr" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a.zarr" / name).write_text("half")
    flip(tmp_path / "a.zarr/X/c/1/0")
    with pytest.raises(DamagedChunkError):
        drop_generations(tmp_path / "a.zarr", [4])
    assert open_dataset(tmp_path / "a.zarr").digest == made.digest
    left = {path.name for path in (tmp_path / "a.zarr").rglob("*")}
    assert not {name for name in left if name == "X-2" or name.endswith(".partial")}


def test_every_version_stays_for_its_own_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1_000_000.0]
    monkeypatch.setattr(writer, "time", SimpleNamespace(time=lambda: clock[0]))
    readers = [grown(tmp_path / "a.zarr")]
    spans = [[(0, 1400)], [(0, 500), (640, 1400)], [(640, 1400)], [(1300, 1400)]]
    for number in (2, 1, 3):
        clock[0] += 1200
        readers.append(drop_generations(tmp_path / "a.zarr", [number]))
    # the first was replaced 2,400 s ago, the second 1,200 s, the third just now
    for version, kept in enumerate(spans, start=1):
        assert rows_of(readers[version - 1]) == taken(*kept)
        assert rows_of(open_dataset(tmp_path / "a.zarr", version=version)) == taken(*kept)
    clock[0] += 1300
    append(X[:5], tmp_path / "a.zarr", y=Y[:5], sample_weight=W[:5])
    with pytest.raises(StoreError, match=r"version 1 of .* is gone"):
        open_dataset(tmp_path / "a.zarr", version=1)
    assert rows_of(readers[1]) == taken(*spans[1])


def test_generations_may_be_named_one_by_one(tmp_path: Path) -> None:
    grown(tmp_path / "a.zarr")
    assert [item.number for item in drop_generations(tmp_path / "a.zarr", (k for k in (2, 3))).generations] == [1, 4]
