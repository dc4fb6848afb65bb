"""Appending, proofs of prefixes, and what a fault at any moment leaves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from dkrr.dataset import Dataset, append, ingest, open_dataset
from dkrr.errors import DamagedChunkError, DataError, DkrrError, ParameterError, StoreError
from dkrr.store import failpoints

RANDOM = np.random.default_rng(11)
X = RANDOM.standard_normal((3000, 2))
Y = RANDOM.standard_normal((3000, 2))
W = RANDOM.random(3000)


def tree(path: Path) -> dict[str, bytes]:
    """Every file below ``path``, byte for byte."""
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def facts(dataset: Dataset) -> list[Any]:
    statistics = [dataset.x_mean, dataset.x_std, dataset.y_mean, dataset.y_std]
    digests = [dataset.digest, dataset.digest_y, dataset.digest_weight]
    return [dataset.num_rows, *digests, *[values.tobytes() for values in statistics]]


@settings(max_examples=15, deadline=None)
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
    assert made.y is not None
    assert made.weight is not None
    assert made.X.read(0, n).tobytes() == X[:n].tobytes()
    assert made.y.read(0, n).tobytes() == Y[:n].tobytes()
    made.verify()
    group = zarr.open_group(folder / "a.zarr", mode="r")
    assert np.array_equal(group["weight"][:, 0], W[:n])


def test_a_prefix_is_proved_and_a_changed_one_is_not(tmp_path: Path) -> None:
    long = ingest(X, tmp_path / "a.zarr", rows_per_chunk=300)
    changed = X.copy()
    changed[1500, 1] += 1e-12
    other = ingest(changed, tmp_path / "b.zarr")
    for n in (1, 1023, 1024, 1500):
        assert long.prefix_digest(n) == other.prefix_digest(n) == ingest(X[:n], tmp_path / f"{n}.zarr").digest
    assert long.prefix_digest(1501) != other.prefix_digest(1501)
    with pytest.raises(IndexError, match="first 3001 rows"):
        long.prefix_digest(3001)


def test_append_looks_up_its_columns_by_name(tmp_path: Path) -> None:
    table = np.column_stack([X, Y[:, 0], W])
    frame = pd.DataFrame(table, columns=["a", "b", "y", "w"])
    ingest(frame[:1000], tmp_path / "a.zarr", target="y", weight="w")
    made = ingest(frame[1000:][["w", "y", "b", "a"]], tmp_path / "a.zarr", append=True)
    assert np.array_equal(made.read(0, 3000), X)
    assert (made.y_is_1d, made.feature_names, made.target_names) == (True, ("a", "b"), ("y",))
    # a file without a header
    np.savetxt(tmp_path / "1.csv", table[:10], delimiter=",", fmt="%.17g")
    np.savetxt(tmp_path / "2.csv", table[10:20], delimiter=",", fmt="%.17g")
    ingest(tmp_path / "1.csv", tmp_path / "b.zarr", target=2, weight=3)
    made = ingest(tmp_path / "2.csv", tmp_path / "b.zarr", append=True)
    assert np.array_equal(made.read(0, 20), X[:20])
    # an array has no names
    made = ingest(X[20:30], tmp_path / "b.zarr", y=Y[20:30, 0], sample_weight=W[20:30], append=True)
    assert made.num_rows == 30


def test_append_of_classes(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("x,k\n1,9\n2,10\n")
    (tmp_path / "2.csv").write_text("x,k\n3,10\n")
    (tmp_path / "3.csv").write_text("x,k\n3,10\n4,11\n")
    ingest(tmp_path / "1.csv", tmp_path / "a.zarr", target="k", one_hot=True)
    made = ingest(tmp_path / "2.csv", tmp_path / "a.zarr", append=True)
    assert made.y is not None
    assert made.y.read(0, 3).tolist() == [[1, 0], [0, 1], [0, 1]]
    before = tree(tmp_path / "a.zarr")
    with pytest.raises(DataError, match=r"row 1 of .* has class '11'; the data set has 9, 10"):
        ingest(tmp_path / "3.csv", tmp_path / "a.zarr", append=True)
    assert tree(tmp_path / "a.zarr") == before


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (X[:5, :1], {"y": Y[:5]}, "features: 2"),
        (X[:5], {"y": Y[:5, 0]}, "targets: 2"),
        (X[:5], {}, "targets: 2"),
        (X[:5], {"y": Y[:5], "sample_weight": W[:5]}, "without weights there, with given"),
        (pd.DataFrame(X[:5], columns=["u", "v"]), {"y": Y[:5]}, r"x0, x1\) there, 2 \(u, v\) given"),
        (np.full((700, 2), np.nan), {"y": Y[:700]}, "1,400 values"),
    ],
)
def test_appends_that_do_not_fit_change_nothing(source: Any, options: dict[str, Any], message: str, tmp_path: Path):
    ingest(X[:700], tmp_path / "a.zarr", y=Y[:700], rows_per_chunk=300)
    before = tree(tmp_path / "a.zarr")
    with pytest.raises(DataError, match=message):
        ingest(source, tmp_path / "a.zarr", append=True, **options)
    assert tree(tmp_path / "a.zarr") == before


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (["a", "b", "z", "q", "w"], {"target": ["z", "q"], "weight": "w"}, r"targets: 2 (y, z) there, 2 (z, q) given"),
        (["a", "b", "y", "z", "w"], {"target": ["z", "y"]}, r"targets: 2 (y, z) there, 2 (z, y) given"),
        (["a", "b", "y", "z", "v"], {"weight": "v"}, r"weights: w there, v given"),
    ],
)
@pytest.mark.parametrize("kind", ["frame", "csv"])
def test_an_append_of_other_targets_or_weights_changes_nothing(
    columns: list[str], options: dict[str, Any], message: str, kind: str, tmp_path: Path
) -> None:
    table = np.column_stack([X, Y, W])
    made = ingest(
        pd.DataFrame(table[:700], columns=["a", "b", "y", "z", "w"]), tmp_path / "a.zarr", target=["y", "z"], weight="w"
    )
    before = tree(tmp_path / "a.zarr")
    source: Any = pd.DataFrame(table[700:710], columns=columns)
    if kind == "csv":
        source.to_csv(tmp_path / "new.csv", index=False)
        source = tmp_path / "new.csv"
    for write in (
        lambda: append(source, tmp_path / "a.zarr", features=["a", "b"], **options),
        lambda: ingest(source, tmp_path / "staged.zarr", like=made, features=["a", "b"], **options),
    ):
        with pytest.raises(DataError, match=re.escape(f"does not fit {tmp_path}/a.zarr ({message})")):
            write()
    with pytest.raises(ParameterError, match="append and like are given"):
        ingest(source, tmp_path / "a.zarr", like=made, append=True)
    assert tree(tmp_path / "a.zarr") == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".csv") == ["a.zarr"]


def test_what_has_no_name_is_appended_by_its_place(tmp_path: Path) -> None:
    frame = pd.DataFrame(np.column_stack([X, Y[:, 0], W]), columns=["a", "b", "y", "w"])
    ingest(frame[:20], tmp_path / "a.zarr", target="y", weight="w")
    made = append(frame[20:30][["a", "b"]], tmp_path / "a.zarr", y=Y[20:30, 0], sample_weight=W[20:30])
    unnamed = pd.Series(Y[30:40, 0])
    made = append(frame[30:40][["a", "b"]], tmp_path / "a.zarr", y=unnamed, sample_weight=pd.Series(W[30:40]))
    assert (made.num_rows, made.target_names, made.weight_name) == (40, ("y",), "w")
    with pytest.raises(DataError, match=r"targets: 1 \(y\) there, 1 \(price\) given"):
        append(frame[40:50][["a", "b"]], tmp_path / "a.zarr", y=unnamed.rename("price"), sample_weight=W[40:50])


def test_late_error_in_an_append_takes_back_its_chunks(tmp_path: Path) -> None:
    ingest(X[:700], tmp_path / "a.zarr", rows_per_chunk=300)
    before = tree(tmp_path / "a.zarr")
    late = X[700:].copy()
    late[-1, 0] = np.inf
    with pytest.raises(DataError, match="inf at row 2299, column 0"):
        ingest(late, tmp_path / "a.zarr", append=True)
    assert tree(tmp_path / "a.zarr") == before


def work(folder: Path, kind: str) -> Dataset:
    """A fresh ingest of 1,500 rows, or an append of 800 to 700."""
    if kind == "ingest":
        return ingest(X[:1500], folder / "a.zarr", y=Y[:1500], rows_per_chunk=300)
    if not (folder / "a.zarr").exists():
        ingest(X[:700], folder / "a.zarr", y=Y[:700], rows_per_chunk=300)
    return ingest(X[700:1500], folder / "a.zarr", y=Y[700:1500], append=True)


SITES = [
    "chunk.before_write",
    "chunk.mid_write",
    "chunk.after_write",
    "dataset.before_pointer",
    "dataset.after_pointer",
]


@pytest.mark.parametrize("kind", ["ingest", "append"])
@pytest.mark.parametrize("action", ["enospc", "eio", "memoryerror"])
@pytest.mark.parametrize("site", SITES)
def test_fault_at_every_write(kind: str, action: str, site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "whole").mkdir()
    work(tmp_path / "whole", kind)
    wanted = tree(tmp_path / "whole/a.zarr")
    for visit in range(1, 100):
        folder = tmp_path / str(visit)
        folder.mkdir()
        if kind == "append":
            ingest(X[:700], folder / "a.zarr", y=Y[:700], rows_per_chunk=300)
        before = tree(folder)
        with monkeypatch.context() as patch:
            patch.setattr(failpoints, "_active", failpoints.Failpoints(f"{site}:@{visit}:{action}"))
            # what the operating system says becomes a typed error; after the pointer there is nothing left to fail
            is_typed = action != "memoryerror" and site != "dataset.after_pointer"
            errors = (DkrrError,) if is_typed else (MemoryError, OSError)
            try:
                work(folder, kind)
                break
            except errors:
                pass
        if site == "dataset.after_pointer":  # published: the error comes too late to undo anything
            assert tree(folder / "a.zarr") == wanted
            continue
        assert tree(folder) == before
        assert kind == "append" or not (folder / "a.zarr").exists()
        work(folder, kind)
        assert tree(folder / "a.zarr") == wanted
    assert visit > 1, "the fault never happened"


KILLED = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
import numpy as np
from dkrr.dataset import ingest
X, Y = np.load({folder!r} + "/X.npy"), np.load({folder!r} + "/Y.npy")
ingest(X, {folder!r} + "/a.zarr", y=Y, append={append}, rows_per_chunk={rows})
"""


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("fault", ["chunk.after_write:@2", "chunk.mid_write:@6", "dataset.before_pointer:@1"])
def test_killed_process(append: bool, fault: str, tmp_path: Path) -> None:
    start = 700 if append else 0
    np.save(tmp_path / "X.npy", X[start:1500])
    np.save(tmp_path / "Y.npy", Y[start:1500])
    if append:
        ingest(X[:700], tmp_path / "a.zarr", y=Y[:700], rows_per_chunk=300)
    rows = None if append else 300
    script = KILLED.format(path=sys.path, folder=str(tmp_path), append=append, rows=rows)
    environment = {**os.environ, "DKRR_FAILPOINTS": f"{fault}:sigkill"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    if append:
        old = open_dataset(tmp_path / "a.zarr")
        old.verify()
        assert np.array_equal(old.read(0, old.num_rows), X[:700])
    else:
        with pytest.raises(StoreError, match="unfinished"):
            open_dataset(tmp_path / "a.zarr")
    environment.pop("DKRR_FAILPOINTS")
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)
    made = open_dataset(tmp_path / "a.zarr")
    made.verify()
    whole = ingest(X[:1500], tmp_path / "whole.zarr", y=Y[:1500], rows_per_chunk=300)
    assert facts(made) == facts(whole)


def test_shorter_append_after_a_killed_longer_one(tmp_path: Path) -> None:
    made = ingest(X[:700], tmp_path / "a.zarr", rows_per_chunk=300)
    clean = tree(tmp_path / "a.zarr")
    # what a kill before the pointer leaves: a fuller ragged chunk, chunks beyond the end, and a longer shape
    long = ingest(X[:2000], tmp_path / "b.zarr", rows_per_chunk=300)
    for key in ("c/2/0", "c/3/0", "c/4/0", "c/5/0", "c/6/0", "zarr.json"):
        (tmp_path / "a.zarr/X" / key).parent.mkdir(exist_ok=True)
        (tmp_path / "a.zarr/X" / key).write_bytes((tmp_path / "b.zarr/X" / key).read_bytes())
    found = open_dataset(tmp_path / "a.zarr")
    found.verify()
    assert found.digest == made.digest
    ingest(X[700:950], tmp_path / "a.zarr", append=True)
    open_dataset(tmp_path / "a.zarr").verify()
    ingest(X[:700], tmp_path / "c.zarr", rows_per_chunk=300)
    assert tree(tmp_path / "c.zarr") == clean
    ingest(X[700:950], tmp_path / "c.zarr", append=True)
    assert tree(tmp_path / "a.zarr") == tree(tmp_path / "c.zarr")
    assert long.num_rows == 2000


def swap(folder: Path, first: str, second: str) -> None:
    a, b = (folder / first).read_bytes(), (folder / second).read_bytes()
    (folder / first).write_bytes(b)
    (folder / second).write_bytes(a)


@pytest.mark.parametrize("rows_per_chunk", [256, 300, 1024, 2048])
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("X", lambda p: swap(p, "X/c/0/0", "X/c/1/0")),
        ("y", lambda p: swap(p, "y/c/0/0", "y/c/1/0")),
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


def test_bit_flipped_in_memory_before_it_is_written_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_active", failpoints.Failpoints("seed=3;chunk.before_write:@2:bitflip"))
    made = ingest(X, tmp_path / "a.zarr", rows_per_chunk=1000)
    with pytest.raises(DamagedChunkError):
        made.verify()
