"""Models on disk: what a round trip keeps, and what is refused before anything is computed with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import zarr

import dkrr.models.model
from dkrr import KernelRidge, Model, load_model
from dkrr.dataset import Scaling
from dkrr.errors import DamagedChunkError, DataError, ParameterError, StoreError
from dkrr.store.documents import write_manifest
from dkrr.store.files import read_json
from tests.reference import reference_kernel

RNG = np.random.default_rng(5)
X = RNG.standard_normal((120, 4))
Y = np.stack([np.sin(X[:, 0]), X[:, 1] ** 2], axis=1)
Z = RNG.standard_normal((33, 4))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A saved model of one target."""
    KernelRidge(kernel="rbf", alpha=0.1, gamma=0.3).fit(X, Y[:, 0]).save(tmp_path / "model.zarr")
    return tmp_path / "model.zarr"


@pytest.fixture
def not_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is larger than what is read at load."""
    monkeypatch.setattr(dkrr.models.model, "IN_MEMORY_BYTES", 0)


def whitened() -> tuple[Model, np.ndarray]:
    """A model with scaling, names and classes, and its predictions from the formula."""
    fit = KernelRidge(kernel="laplacian", gamma=0.2).fit(X, Y)
    scaling = Scaling(x_mean=X.mean(0), x_std=X.std(0), y_mean=np.array([3.0, -1.0]), y_std=np.array([2.0, 0.5]))
    model = replace(
        fit._model,
        scaling=scaling,
        feature_names=["ä", "b/c", "../d", ""],
        target_names=["up", "down"],
        classes=["up", 1],
        provenance={"alpha": [1.0], "note": "x"},
    )
    rows = (Z - X.mean(0)) / X.std(0)
    values = reference_kernel({"kernel": "laplacian", "gamma": 0.2}, rows, X) @ fit.dual_coef_
    return model, values * [2.0, 0.5] + [3.0, -1.0]


def test_a_round_trip_keeps_everything(tmp_path: Path) -> None:
    model, expected = whitened()
    model.save(tmp_path / "model.zarr")
    loaded = load_model(tmp_path / "model.zarr")
    for name in ("kernel", "scaling", "feature_names", "target_names", "classes", "provenance", "solution", "y_is_1d"):
        assert getattr(loaded, name) == getattr(model, name), name
    assert np.array_equal(loaded.center, model.center)
    assert loaded.location == str(tmp_path / "model.zarr")
    np.testing.assert_allclose(loaded.predict(Z), expected, rtol=1e-12)
    assert np.array_equal(loaded.predict(Z), model.predict(Z))


BAD_ROWS: dict[str, tuple[Any, str]] = {
    "features": (Z[:, :3], r"\(33, 3\); \(m, 4\) expected"),
    "1-D": (Z[0], r"\(4,\); \(m, 4\) expected"),
    "dask features": (da.from_array(Z[:, :3], chunks=10), r"\(33, 3\); \(m, 4\) expected"),
    "text": (Z.astype(str), "dtype <U"),
    "complex": (Z.astype(complex), "dtype complex128"),
    "dates": (Z.astype("datetime64[s]"), "dtype datetime64"),
    "objects": (np.full((2, 4), "a", dtype=object), "dtype object with str 'a' at row 0, column 0"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_rows_that_cannot_be_predicted(case: str, path: Path) -> None:
    rows, message = BAD_ROWS[case]
    with pytest.raises(DataError, match=message):
        load_model(path).predict(rows)


# --- what is refused -------------------------------------------------------------------------------------------------


def edit(key: str, *, signed: bool = True, **changes: Any) -> Callable[[Path], Any]:
    """Change a JSON document of a model; ``signed`` writes a manifest that fits, as a forger would."""

    def change(path: Path) -> None:
        document = read_json(path, key)
        (document["attributes"] if key == "zarr.json" else document).update(changes)
        (path / key).write_text(json.dumps(document))
        if signed:
            write_manifest(str(path))

    return change


def damage_chunk(path: Path) -> None:
    octets = bytearray((path / CHUNK).read_bytes())
    octets[40] ^= 1
    (path / CHUNK).write_bytes(octets)


def link(key: str) -> Callable[[Path], Any]:
    return lambda path: (path / key).symlink_to(shutil.move(path / key, path.parent / "elsewhere"))


def format_2(path: Path) -> None:
    shutil.rmtree(path)
    zarr.open_group(str(path), mode="w", zarr_format=2).create_array("X_fit", data=X)


def other_length(path: Path) -> None:
    shutil.rmtree(path / "dual_coef")
    KernelRidge().fit(X[:60], Y[:60, 0]).save(path.parent / "short.zarr")
    shutil.copytree(path.parent / "short.zarr/dual_coef", path / "dual_coef")
    write_manifest(str(path))


CHUNK = "X_fit/c/0/0"
METADATA: dict[str, tuple[Callable[[Path], Any], str]] = {
    "newer": (edit("zarr.json", format_version=2), r"model format version 2; this dkrr reads version 1"),
    "foreign": (edit("zarr.json", format="keras"), r"not a model of dkrr \(format 'keras'\)"),
    "link to a chunk": (link(CHUNK), r"X_fit/c/0/0 is a symbolic link"),
    "link to metadata": (link("zarr.json"), r"zarr\.json is a symbolic link"),
    "format 2": (format_2, "is not a model of dkrr"),
    "objects": (
        edit("X_fit/zarr.json", data_type="object"),
        r"X_fit has data type 'object'; float64 or float32 expected",
    ),
    "pickles": (
        edit("X_fit/zarr.json", codecs=[{"name": "numcodecs.pickle"}]),
        r"X_fit has codecs \[\{'name': 'numcodecs\.pickle'\}\]",
    ),
}
CONTENT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "damaged": (
        damage_chunk,
        rf"{CHUNK} of .*model\.zarr is damaged \(SHA-256 \w{{12}}, \w{{12}} expected\)",
    ),
    "missing": (lambda path: (path / CHUNK).unlink(), rf"{CHUNK} of .* is missing"),
    "more": (lambda path: (path / "X_fit/c/0/1").write_bytes(b"rows"), r"X_fit/c/0/1 of .* is not in its manifest"),
    "changed": (edit("zarr.json", signed=False, y_is_1d=False), r"zarr\.json of .* is damaged"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), r"has no manifest\.json"),
    "no JSON": (lambda path: (path / "manifest.json").write_text("{"), r"manifest\.json of .* is not valid JSON"),
    "a way out": (edit("manifest.json", signed=False, **{"../../secret": "00"}), r"\.\./\.\./secret of .* is missing"),
    "nothing": (shutil.rmtree, "is not a model of dkrr"),
    "kernel": (
        edit("zarr.json", kernel={"kernel": "rfb"}),
        r"unreadable metadata \(kernel = 'rfb' in a dictionary: did you mean 'rbf'",
    ),
    "centre": (edit("zarr.json", center=[0.0]), r"center has shape \(1,\), \(4,\) expected"),
    "length": (other_length, "120 training rows or features, 60 coefficients"),
}


@pytest.mark.parametrize("case", METADATA | CONTENT)
@pytest.mark.parametrize("verify", [True, False])
def test_a_spoiled_model_is_refused(case: str, verify: bool, path: Path) -> None:
    spoil, message = (METADATA | CONTENT)[case]
    spoil(path)
    if case in CONTENT and not verify:
        return
    with pytest.raises(StoreError, match=message) as error:
        load_model(path, verify=verify)
    assert error.value.exit_code == 4
    assert error.value.hint


@pytest.mark.usefixtures("not_in_memory")
@pytest.mark.parametrize("early", [True, False], ids=["before load", "after load"])
def test_a_damaged_chunk_is_found_at_predict(early: bool, path: Path) -> None:
    if early:
        damage_chunk(path)
    model = load_model(path, verify=False)
    if not early:
        damage_chunk(path)
    with pytest.raises(DamagedChunkError, match=r"chunk \(0, 0\) of .*X_fit is damaged"):
        model.predict(Z)


@pytest.mark.usefixtures("not_in_memory")
@pytest.mark.parametrize("part", ["X_fit", "dual_coef", "zarr.json", "touched"])
def test_another_model_is_copied_over_one_that_is_open(part: str, path: Path, tmp_path: Path) -> None:
    """As far as a copy has come: the manifest is the last of the names."""
    KernelRidge(kernel="rbf", gamma=0.2, alpha=3.0).fit(X + 1.0, Y[:, 1]).save(tmp_path / "other")
    model = load_model(path)
    expected = model.predict(Z)
    if part == "touched":  # the same bytes
        for file in path.rglob("*"):
            file.touch()
        np.testing.assert_array_equal(model.predict(Z), expected)
        return
    source = tmp_path / "other" / part
    for file in source.rglob("*") if source.is_dir() else [source]:
        if file.is_file():
            shutil.copyfile(file, path / file.relative_to(tmp_path / "other"))
    with pytest.raises(StoreError, match=rf"{part}.* (was |is damaged \()changed since it was opened"):
        model.predict(Z)


def test_out_is_for_rows_in_memory(tmp_path: Path) -> None:
    X = np.random.default_rng(0).random((20, 2))
    KernelRidge().fit(X, X[:, 0]).save(tmp_path / "m.zarr")
    model = load_model(tmp_path / "m.zarr")
    with pytest.raises(ParameterError, match="dask"):
        model.predict(da.from_array(X, chunks=10), out=np.zeros(20))
