"""A fence stops every write that is not a tile, in the thread that stands behind it, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.errors import LockedError
from dkrr.store.chunks import ChunkArray
from dkrr.store.files import delete_key, place, read_json, remove_array, write_file, write_json
from dkrr.store.interruption import check_fence, fence_holder, fenced


def refuse() -> None:
    raise LockedError("taken over")


WRITES: dict[str, Callable[[Path], Any]] = {
    "a document": lambda folder: write_json(str(folder), "a.json", {}),
    "a file": lambda folder: write_file(folder / "a", b"1"),
    "a removal": lambda folder: remove_array(folder / "kept"),
    "a document less": lambda folder: delete_key(folder / "kept", "zarr.json"),
    "rows of the driver": lambda folder: ChunkArray.create(
        str(folder / "kept"), "", shape=(2, 2), chunks=(2, 2)
    ).write((0, 0), np.ones((2, 2))),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ChunkArray.create(str(tmp_path / "kept"), "", shape=(2, 2), chunks=(2, 2))
    return tmp_path


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", WRITES)
def test_nothing_is_written_behind_a_closed_fence(name: str, folder: Path) -> None:
    before = files(folder)
    with fenced(refuse), pytest.raises(LockedError, match="taken over"):
        WRITES[name](folder)
    assert files(folder) == before
    WRITES[name](folder)
    assert files(folder) != before


def test_an_open_fence_is_asked_each_time(folder: Path) -> None:
    asked: list[int] = []
    with fenced(lambda: asked.append(1), holder={"run": "r", "epoch": 3}):
        write_json(place(folder), "a.json", {"x": 1})
        write_json(place(folder), "a.json", {"x": 2})
        assert fence_holder() == {"run": "r", "epoch": 3}
    assert len(asked) == 2
    assert read_json(str(folder), "a.json") == {"x": 2}
    assert fence_holder() == {}


def test_other_threads_are_not_behind_it() -> None:
    errors: list[BaseException] = []

    def write() -> None:
        try:
            check_fence()
        except LockedError as exc:
            errors.append(exc)

    with fenced(refuse):
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    assert errors == []
    check_fence()
