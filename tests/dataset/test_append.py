"""Appending, proofs of prefixes, and what a fault at any moment leaves."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from dkrr.dataset import Dataset, ingest, open_dataset
from dkrr.errors import DamagedChunkError, DataError, StorageFullError, StoreMismatchError
from tests.faults import Command, failing_at, swap

RANDOM = np.random.default_rng(11)
X = RANDOM.standard_normal((3000, 2))
Y = RANDOM.standard_normal((3000, 2))
W = RANDOM.random(3000)
TABLE = pd.DataFrame(np.column_stack([X, Y])[:5], columns=["x0", "x1", "y0", "y1"])


def tree(path: Path) -> dict[str, bytes]:
    """Every file below ``path``, byte for byte."""
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def facts(dataset: Dataset) -> list[Any]:
    statistics = [dataset.x_mean, dataset.x_std, dataset.y_mean, dataset.y_std]
    digests = [dataset.digest, dataset.digest_y, dataset.digest_weight]
    return [dataset.num_rows, *digests, *[values.tobytes() for values in statistics]]


@settings(max_examples=8, deadline=None)
@given(
    ends=st.lists(st.integers(1, 3000), min_size=1, max_size=4, unique=True).map(sorted),
    rows_per_chunk=st.sampled_from([100, 256, 1000, 1024, 4096, None]),
    data=st.data(),
)
def test_appends_equal_one_ingest(ends: list[int], rows_per_chunk: int | None, data: st.DataObject, tmp_path_factory):
    folder = tmp_path_factory.mktemp("append")
    start = 0
    for stop in ends:
        made = ingest(
            X[start:stop],
            folder / "a.zarr",
            y=Y[start:stop],
            sample_weight=W[start:stop],
            append=True,
            rows_per_chunk=rows_per_chunk if start == 0 else None,
        )
        start = stop
    n = ends[-1]
    whole = ingest(X[:n], folder / "b.zarr", y=Y[:n], sample_weight=W[:n], rows_per_chunk=data.draw(st.just(777)))
    assert facts(made) == facts(whole)
    assert facts(open_dataset(folder / "a.zarr")) == facts(whole)
    assert [generation.n for generation in made.generations] == ends
    assert [generation.digest for generation in made.generations] == [whole.prefix_digest(m) for m in ends]
    assert [generation.number for generation in made.generations] == list(range(1, len(ends) + 1))
    assert made.X.read(0, n).tobytes() == X[:n].tobytes()
    assert made.y.read(0, n).tobytes() == Y[:n].tobytes()
    made.verify()
    group = zarr.open_group(folder / "a.zarr", mode="r")
    assert np.array_equal(group["weight"][:, 0], W[:n])


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (X[:5, :1], {"y": Y[:5]}, "features: 2"),
        (X[:5], {"y": Y[:5, 0]}, "targets: 2"),
        (X[:5], {}, "targets: 2"),
        (X[:5], {"y": Y[:5], "sample_weight": W[:5]}, "weights: 0 \\(\\) there, 1"),
        (pd.DataFrame(X[:5], columns=["u", "v"]), {"y": Y[:5]}, r"x0, x1\) there, 2 \(u, v\) given"),
        (TABLE[["x0", "y1", "y0", "x1"]], {"target": ["y1", "y0"]}, r"targets: 2 \(y0, y1\) there, 2 \(y1, y0\) given"),
        (np.full((700, 2), np.nan), {"y": Y[:700]}, "1,400 values"),
    ],
)
def test_appends_that_do_not_fit_change_nothing(source: Any, options: dict[str, Any], message: str, tmp_path: Path):
    first = pd.DataFrame(np.column_stack([X, Y])[:700], columns=TABLE.columns)
    ingest(first, tmp_path / "a.zarr", target=["y0", "y1"], rows_per_chunk=300)
    before = tree(tmp_path / "a.zarr")
    ways: list[dict[str, Any]] = [{"append": True}, {"like": open_dataset(tmp_path / "a.zarr")}]
    for name, way in zip(("a.zarr", "staged.zarr"), ways, strict=True):
        with pytest.raises(DataError, match=message):
            ingest(source, tmp_path / name, **way, **options)
    assert tree(tmp_path) == {f"a.zarr/{name}": content for name, content in before.items()}


def work(folder: Path, kind: str) -> Dataset:
    """A fresh ingest of 1,500 rows, or an append of 800 to 700."""
    if kind == "ingest":
        return ingest(X[:1500], folder / "a.zarr", y=Y[:1500], rows_per_chunk=300)
    if not (folder / "a.zarr").exists():
        ingest(X[:700], folder / "a.zarr", y=Y[:700], rows_per_chunk=300)
    return ingest(X[700:1500], folder / "a.zarr", y=Y[700:1500], append=True)


@pytest.mark.parametrize("rows_per_chunk", [300, 1024])
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("X", lambda p: swap(p / "X/c/0/0", p / "X/c/1/0")),
        ("y", lambda p: swap(p / "y/c/0/0", p / "y/c/1/0")),
        ("weight", lambda p: (p / "weight/c/1/0").unlink()),
        ("X", lambda p: (p / "X/c/1/0").write_bytes((p / "y/c/1/0").read_bytes())),
    ],
)
def test_verify_finds_what_checksums_do_not(name: str, damage: Any, rows_per_chunk: int, tmp_path: Path) -> None:
    made = ingest(X, tmp_path / "a.zarr", y=Y, sample_weight=W, rows_per_chunk=rows_per_chunk)
    made.verify()
    damage(tmp_path / "a.zarr")
    with pytest.raises(DamagedChunkError) as caught:
        made.verify()
    assert caught.value.path.endswith(f"a.zarr/{name}")


SITES = ["draft*/c/*", "write*", "written*/c/*", "write*/a.zarr/zarr.json"]


@pytest.mark.parametrize("kind", ["ingest", "append"])
@pytest.mark.parametrize("site", SITES)
def test_fault_at_every_write(kind: str, site: str, tmp_path: Path) -> None:
    work(tmp_path, kind)
    wanted = tree(tmp_path / "a.zarr")
    for visit in range(1, 100):
        folder = tmp_path / str(visit)
        folder.mkdir()
        if kind == "append":
            ingest(X[:700], folder / "a.zarr", y=Y[:700], rows_per_chunk=300)
        before = tree(folder)
        with failing_at(f"{site}:@{visit}:enospc") as points, contextlib.suppress(StorageFullError):
            work(folder, kind)
        if points.rules[0].visits < visit:
            break
        left = tree(folder)
        differing = [name for name in left.keys() | before.keys() if left.get(name) != before.get(name)]
        assert all(name.endswith("c/2/0") for name in differing), "only of the ragged chunk, and rows that do not count"
        if kind == "append":
            open_dataset(folder / "a.zarr").verify()
        work(folder, kind)
        assert tree(folder / "a.zarr") == wanted
    assert visit > 1, "the fault never happened"


def test_a_killed_append_leaves_the_rows_of_before(tmp_path: Path) -> None:
    before = ingest(X[:700], tmp_path / "a.zarr", y=Y[:700], rows_per_chunk=300)
    np.save(tmp_path / "more.npy", np.column_stack([X, Y])[700:1500])
    arguments = ["ingest", str(tmp_path / "more.npy"), str(tmp_path / "a.zarr"), "--append"]
    arguments += ["--target", "2", "--target", "3"]
    for visit in (2, 6):
        ended = Command(arguments, failpoints=f"write*:@{visit}:sigkill").run()
        assert ended.code == -signal.SIGKILL, ended.err
        found = open_dataset(tmp_path / "a.zarr")
        found.verify()
        assert found.digest == before.digest
    assert facts(work(tmp_path, "append")) == facts(ingest(X[:1500], tmp_path / "whole.zarr", y=Y[:1500]))


def test_existing_data_set(tmp_path: Path) -> None:
    first = ingest(X[:10], tmp_path / "a.zarr", y=Y[:10, 0])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert ingest(X[:10].tolist(), tmp_path / "a.zarr", y=Y[:10, 0]).digest == first.digest
    others: list[tuple[Any, Any, str]] = [
        (X[:10] + 1, Y[:10, 0], "X: other values"),
        (X[:9], Y[:9, 0], "rows: 10 there, 9 wanted"),
        (X[:10], Y[:10, 0] + 1, "y: other values"),
        (pd.DataFrame(X[:10], columns=list("ab")), Y[:10, 0], r"feature_names: \('x0'"),
        (X[:10], None, "target_names"),
    ]
    for x, y, message in others:
        with pytest.raises(StoreMismatchError, match=message):
            ingest(x, tmp_path / "a.zarr", y=y)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
