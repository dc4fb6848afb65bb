"""Chunks: what is written is read back, by us and by any Zarr reader, and nothing damaged is ever read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zarr

from dkrr.errors import DamagedChunkError, StoreError, StoreMismatchError
from dkrr.store.chunks import ChunkArray
from dkrr.store.files import write_key
from tests.faults import DAMAGES, FaultyStore, objects_in_memory

__all__ = ["objects_in_memory"]


def filled(store: object, n: int = 10, dtype: str = "float64") -> tuple[ChunkArray, np.ndarray]:
    array = ChunkArray.create(store, "x", shape=(n, 7), chunks=(4, 7), dtype=dtype)
    values = np.random.default_rng(0).standard_normal((n, 7)).astype(dtype)
    for i in range(array.num_chunks[0]):
        block = np.full((4, 7), np.nan, dtype)
        part = values[4 * i : 4 * i + 4]
        block[: len(part)] = part
        array.write((i, 0), block)
    return array, values


def test_we_read_what_zarr_writes(tmp_path: Path) -> None:
    values = np.arange(24.0).reshape(6, 4)
    written = zarr.create_array(
        str(tmp_path), name="x", shape=(6, 4), chunks=(3, 4), dtype="float64", fill_value=np.nan,
        compressors=[zarr.codecs.Crc32cCodec()], config={"write_empty_chunks": True},
    )  # fmt: skip
    written[:] = values
    np.testing.assert_array_equal(ChunkArray.open(str(tmp_path), "x").read((1, 0)), values[3:])


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["path", "by key"])
def test_damage_is_found(tmp_path: Path, kind: str, damage: str, objects_in_memory: None) -> None:
    array, _ = filled(str(tmp_path))
    DAMAGES[damage](tmp_path / "x/c/1/0")
    assert array.is_valid((1, 0)) == (damage in ("flipped", "zeroed"))
    if kind == "by key":
        store = FaultyStore().address
        for path in tmp_path.rglob("*"):
            if path.is_file():
                write_key(store, str(path.relative_to(tmp_path)), path.read_bytes())
        array = ChunkArray.open(store, "x")
    with pytest.raises(DamagedChunkError, match=r"chunk \(1, 0\) of .*x is damaged") as caught:
        array.read((1, 0))
    assert caught.value.index == (1, 0)
    array.read((0, 0))


def test_existing_array_with_other_parameters(tmp_path: Path) -> None:
    create = ChunkArray.create
    create(str(tmp_path), "", shape=(4, 4), chunks=(2, 2), attributes={"alpha": 1.0, "n": 4})
    create(str(tmp_path), "", shape=(4, 4), chunks=(2, 2), attributes={"alpha": 1.0, "n": 4})
    with pytest.raises(
        StoreMismatchError, match=r"alpha: 1.0 there, 2.0 wanted; chunks: \(2, 2\) there, \(4, 4\) wanted"
    ) as caught:
        create(str(tmp_path), "", shape=(4, 4), chunks=(4, 4), attributes={"alpha": 2.0, "n": 4})
    assert len(caught.value.fields) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zarr_format": 2}, "not a Zarr format 3 array"),
        ({"data_type": "object"}, "data type 'object'"),
        ({"data_type": "int64"}, "data type 'int64'"),
        ({"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]}, "codecs"),
        ({"codecs": [{"name": "pickle"}]}, "codecs"),
        ({"fill_value": 0.0}, "fill_value"),
        ({"chunk_key_encoding": {"name": "v2"}}, "chunk_key_encoding"),
        ({"storage_transformers": [{"name": "x"}]}, "storage_transformers"),
        ({"shape": ["a"]}, "unreadable metadata"),
    ],
)
def test_foreign_metadata_is_refused_before_any_chunk(tmp_path: Path, change: dict, message: str) -> None:
    filled(str(tmp_path))
    path = tmp_path / "x/zarr.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StoreError, match=message):
        ChunkArray.open(str(tmp_path), "x")
