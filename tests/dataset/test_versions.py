"""Generations with numbers and labels, a lock, and new versions of a data set with fewer rows."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

import dkrr
from dkrr.cli.app import main
from dkrr.dataset import Dataset, append, destination, drop_generations, ingest, keep_last, open_dataset
from dkrr.errors import (
    DamagedChunkError,
    DataError,
    DkrrError,
    LockedError,
    ParameterError,
    StoreError,
    StoreMismatchError,
)
from dkrr.store import failpoints
from dkrr.store.lease import hold_lock

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


def test_generations_have_numbers_labels_and_proofs(tmp_path: Path) -> None:
    made = grown(tmp_path / "a.zarr")
    assert [(g.number, g.n, g.num_rows, g.first_row, g.label) for g in made.generations] == [
        (1, 500, 500, 0, "night-1"),
        (2, 640, 140, 500, "night-2"),
        (3, 1300, 660, 640, "night-3"),
        (4, 1400, 100, 1300, "night-4"),
    ]
    assert all(g.digest == made.prefix_digest(g.n) for g in made.generations)
    assert dkrr.open_dataset(tmp_path / "a.zarr").generations == made.generations
    assert not (tmp_path / "a.zarr.lock").exists()


def test_data_sets_from_before_generations_had_numbers_are_read(tmp_path: Path) -> None:
    made = grown(tmp_path / "a.zarr")
    document = json.loads((tmp_path / "a.zarr/zarr.json").read_text())
    attributes = document["attributes"]
    attributes["generations"] = [[g["n"], g["digest"]] for g in attributes["generations"]]
    del attributes["next"], attributes["version"]
    (tmp_path / "a.zarr/zarr.json").write_text(json.dumps(document))
    found = open_dataset(tmp_path / "a.zarr")
    assert [(g.number, g.n, g.first_row) for g in found.generations] == [
        (g.number, g.n, g.first_row) for g in made.generations
    ]
    assert (
        append(X[1400:1410], tmp_path / "a.zarr", y=Y[1400:1410], sample_weight=W[1400:1410]).generations[-1].number
        == 5
    )


def test_an_append_is_done_once_under_its_label(tmp_path: Path) -> None:
    made = grown(tmp_path / "a.zarr")
    again = append(X[500:640], tmp_path / "a.zarr", y=Y[500:640], sample_weight=W[500:640], label="night-2")
    assert again.generations == made.generations
    for rows in (slice(500, 639), slice(500, 641), slice(501, 641)):
        with pytest.raises(
            StoreMismatchError, match=r"generation 2 of .* is called 'night-2' and holds 140 other rows"
        ):
            append(X[rows], tmp_path / "a.zarr", y=Y[rows], sample_weight=W[rows], label="night-2")
    changed = Y[500:640].copy()
    changed[7] += 1e-9
    with pytest.raises(StoreMismatchError):
        append(X[500:640], tmp_path / "a.zarr", y=changed, sample_weight=W[500:640], label="night-2")
    assert open_dataset(tmp_path / "a.zarr").generations == made.generations
    with pytest.raises(ParameterError, match="label is ''"):
        append(X[:5], tmp_path / "a.zarr", y=Y[:5], sample_weight=W[:5], label="")


def test_a_label_goes_with_its_generation(tmp_path: Path) -> None:
    def again(number: int) -> Dataset:
        rows = slice(ENDS[number - 1], ENDS[number])
        return append(X[rows], tmp_path / "a.zarr", y=Y[rows], sample_weight=W[rows], label=f"night-{number}")

    grown(tmp_path / "a.zarr")
    drop_generations(tmp_path / "a.zarr", [4])
    keep_last(tmp_path / "a.zarr", rows=700)
    # the first one slid out of the window, the second was cut, the third is whole, the last was dropped
    with pytest.raises(StoreMismatchError, match=r"'night-2' and holds 40 other rows"):
        again(2)
    assert again(3).num_rows == 700
    assert (again(1).num_rows, again(4).num_rows, again(4).num_rows) == (1200, 1300, 1300)
    labels = [(found.number, found.label) for found in open_dataset(tmp_path / "a.zarr").generations]
    assert labels == [(2, "night-2"), (3, "night-3"), (5, "night-1"), (6, "night-4")]


def test_one_append_at_a_time(tmp_path: Path) -> None:
    made = grown(tmp_path / "a.zarr")
    with hold_lock(tmp_path / "a.zarr"):
        with pytest.raises(LockedError, match="being written by process"):
            append(X[:5], tmp_path / "a.zarr", y=Y[:5], sample_weight=W[:5])
        with pytest.raises(LockedError, match="being written by process"):
            drop_generations(tmp_path / "a.zarr", [2])
        assert open_dataset(tmp_path / "a.zarr").digest == made.digest
    # what is not ours gets no lock beside it
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("x")
    with pytest.raises(DkrrError, match="not a data set"):
        append(X, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zarr", "other"]


def test_readers_see_all_new_rows_or_none(tmp_path: Path) -> None:
    ingest(X[:10], tmp_path / "a.zarr", y=Y[:10], rows_per_chunk=64)
    ends, stop, wrong = {10}, threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            found = open_dataset(tmp_path / "a.zarr")
            n = found.num_rows
            assert found.y is not None
            if n not in ends or found.read(0, n).tobytes() != X[:n].tobytes():
                wrong.append(n)
            if found.y.read(0, n).tobytes() != Y[:n].tobytes():
                wrong.append(n)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for start in range(10, 1000, 45):
            ends.add(start + 45)
            append(X[start : start + 45], tmp_path / "a.zarr", y=Y[start : start + 45])
    finally:
        stop.set()
        thread.join()
    assert wrong == []


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


def test_versions_that_cannot_be_made_change_nothing(tmp_path: Path) -> None:
    made = grown(tmp_path / "a.zarr")
    with pytest.raises(DataError, match="never had a generation 7; it has 1, 2, 3, 4"):
        drop_generations(tmp_path / "a.zarr", [7])
    with pytest.raises(DataError, match="none of 1,400 rows"):
        drop_generations(tmp_path / "a.zarr", [1, 2, 3, 4])
    with pytest.raises(DkrrError, match="not a finished data set"):
        drop_generations(tmp_path / "nothing.zarr", [1])
    chunk = tmp_path / "a.zarr/X/c/1/0"
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(DamagedChunkError):
        drop_generations(tmp_path / "a.zarr", [4])
    assert open_dataset(tmp_path / "a.zarr").digest == made.digest
    assert not (tmp_path / "a.zarr/X-2").exists()


@pytest.mark.parametrize("site", ["chunk.mid_write", "dataset.before_pointer"])
def test_a_fault_leaves_the_old_version_and_the_next_write_cleans_up(
    site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = grown(tmp_path / "a.zarr")
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "_active", failpoints.Failpoints(f"{site}:1:enospc"))
        with pytest.raises(DkrrError):
            drop_generations(tmp_path / "a.zarr", [2])
    assert open_dataset(tmp_path / "a.zarr").digest == made.digest
    assert not (tmp_path / "a.zarr/X-2").exists()
    # what a kill leaves: arrays of the version that did not come to be, and a half-written file
    (tmp_path / "a.zarr/X-2/c/0").mkdir(parents=True)
    (tmp_path / "a.zarr/X-2/c/0/0").write_text("half")
    (tmp_path / "a.zarr/X/c/0/0.00000000000000000000000000000000.partial").write_text("half")
    append(X[:5], tmp_path / "a.zarr", y=Y[:5], sample_weight=W[:5])
    assert not (tmp_path / "a.zarr/X-2").exists()
    assert not list((tmp_path / "a.zarr").rglob("*.partial"))


def test_a_replaced_version_is_removed_after_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grown(tmp_path / "a.zarr")
    drop_generations(tmp_path / "a.zarr", [4])
    append(X[:5], tmp_path / "a.zarr", y=Y[:5], sample_weight=W[:5])
    assert (tmp_path / "a.zarr/X").exists()
    monkeypatch.setattr(destination, "KEPT_SECONDS", -1.0)
    made = append(X[:5], tmp_path / "a.zarr", y=Y[:5], sample_weight=W[:5])
    assert sorted(path.name for path in (tmp_path / "a.zarr").iterdir()) == ["X-2", "weight-2", "y-2", "zarr.json"]
    made.verify()


def test_every_version_stays_for_its_own_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1_000_000.0]
    monkeypatch.setattr(destination, "time", SimpleNamespace(time=lambda: clock[0]))

    def arrays() -> list[str]:
        return sorted(path.name for path in (tmp_path / "a.zarr").iterdir() if path.name.startswith("X"))

    readers = [grown(tmp_path / "a.zarr")]
    spans = [[(0, 1400)], [(0, 500), (640, 1400)], [(640, 1400)], [(1300, 1400)]]
    for number in (2, 1, 3):
        clock[0] += 1200
        readers.append(drop_generations(tmp_path / "a.zarr", [number]))
    # the first was replaced 2,400 s ago, the second 1,200 s, the third just now
    for version, (reader, kept) in enumerate(zip(readers, spans, strict=True), start=1):
        assert rows_of(reader) == taken(*kept)
        again = open_dataset(tmp_path / "a.zarr", version=version)
        assert (again.version, again.digest, again.generations) == (version, reader.digest, reader.generations)
        assert rows_of(again) == taken(*kept)
    clock[0] += 1300
    append(X[:5], tmp_path / "a.zarr", y=Y[:5], sample_weight=W[:5])
    assert arrays() == ["X-2", "X-3", "X-4"]
    with pytest.raises(StoreError, match=r"version 1 of .* is gone"):
        open_dataset(tmp_path / "a.zarr", version=1)
    assert rows_of(readers[1]) == taken(*spans[1])
    clock[0] += 1200
    append(X[5:10], tmp_path / "a.zarr", y=Y[5:10], sample_weight=W[5:10])
    assert arrays() == ["X-3", "X-4"]
    clock[0] += 3600
    append(X[10:15], tmp_path / "a.zarr", y=Y[10:15], sample_weight=W[10:15])
    assert arrays() == ["X-4"]
    open_dataset(tmp_path / "a.zarr").verify()


def test_a_version_that_an_older_dkrr_replaced_stays_for_its_hour(tmp_path: Path) -> None:
    grown(tmp_path / "a.zarr")
    drop_generations(tmp_path / "a.zarr", [4])
    document = json.loads((tmp_path / "a.zarr/zarr.json").read_text())
    document["attributes"]["replaced_at"] = document["attributes"].pop("earlier")[0]["replaced_at"]
    (tmp_path / "a.zarr/zarr.json").write_text(json.dumps(document))
    drop_generations(tmp_path / "a.zarr", [3])
    assert {"X", "X-2", "X-3"} <= {path.name for path in (tmp_path / "a.zarr").iterdir()}


def test_command_line(tmp_path: Path) -> None:
    frame = np.column_stack([X, Y])
    for name, rows in (("1.csv", slice(0, 500)), ("2.csv", slice(500, 640)), ("3.csv", slice(640, 700))):
        np.savetxt(tmp_path / name, frame[rows], delimiter=",", fmt="%.17g")

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(main, ["ingest", *arguments])
        assert done.exit_code == 0, done.output
        return done.output

    dest = str(tmp_path / "a.zarr")
    run(str(tmp_path / "1.csv"), dest, "--target", "-1")
    assert "640" in run(str(tmp_path / "2.csv"), dest, "--append", "--label", "second")
    made = run(str(tmp_path / "3.csv"), dest, "--append", "--keep-generations", "2")
    assert "200" in made
    assert open_dataset(dest).read(0, 200).tobytes() == X[500:700].tobytes()
    run(dest, "--drop-generation", "3")
    assert open_dataset(dest).read(0, 140).tobytes() == X[500:640].tobytes()
    for wrong in ([dest], [dest, dest, "--keep-rows", "5"], [dest, "--keep-rows", "5", "--keep-generations", "1"]):
        done = CliRunner().invoke(main, ["ingest", *wrong])
        assert done.exit_code == 2, done.output
