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
from dkrr import KernelRidge, Model, load_model, make_kernel
from dkrr.dataset import Scaling
from dkrr.errors import DamagedChunkError, DataError, ParameterError, StorageFullError, StoreError
from dkrr.linalg.predict import ArrayRows
from dkrr.store.documents import manifest_digest, write_manifest
from tests.reference import dense_predict, reference_kernel

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
    values = dense_predict(reference_kernel({"kernel": "laplacian", "gamma": 0.2}, rows, X), fit.dual_coef_)
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


def test_any_zarr_reader_opens_it(path: Path) -> None:
    group = zarr.open_group(str(path), mode="r", zarr_format=3)
    assert np.array_equal(group["X_fit"][:], X)
    assert group["dual_coef"].shape == (120, 1)
    assert group.attrs["format"] == "dkrr-model"


@pytest.mark.usefixtures("not_in_memory")
def test_predictions_read_rows_from_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(path)
    assert not isinstance(model.x_fit, ArrayRows)
    monkeypatch.setattr(dkrr.models.model, "IN_MEMORY_BYTES", 10**6)
    assert np.array_equal(model.predict(Z), load_model(path).predict(Z))


@pytest.mark.parametrize("block_rows", [1, 7, 32, 33, 34])
def test_blocks_of_predictions_do_not_matter(block_rows: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(path)
    expected = model.predict(Z)
    monkeypatch.setattr(dkrr.models.model, "BLOCK_ROWS", block_rows)
    np.testing.assert_allclose(model.predict(Z), expected, rtol=1e-12, atol=1e-14)


def test_predict_into_out(tmp_path: Path) -> None:
    model, expected = whitened()
    out = np.lib.format.open_memmap(tmp_path / "p.npy", mode="w+", dtype=np.float64, shape=(33, 2))
    assert model.predict(Z, out=out) is out
    np.testing.assert_allclose(np.load(tmp_path / "p.npy"), expected, rtol=1e-12)
    single = np.empty((33, 2), np.float32)
    np.testing.assert_allclose(model.predict(Z, out=single), expected, rtol=1e-5)
    with pytest.raises(ParameterError, match=r"out has shape \(33,\); \(33, 2\) expected"):
        model.predict(Z, out=np.empty(33))


def test_predict_into_out_of_one_target(path: Path) -> None:
    model = load_model(path)
    for shape in ((33,), (33, 1)):
        out = np.empty(shape)
        model.predict(Z, out=out)
        assert np.array_equal(out.ravel(), model.predict(Z))
    with pytest.raises(ParameterError, match=r"out has shape \(34, 1\)"):
        model.predict(Z, out=np.empty((34, 1)))


def test_predict_dask(path: Path) -> None:
    model = load_model(path)
    lazy = model.predict(da.from_array(Z, chunks=(10, 3)))
    assert lazy.shape == (33,)
    np.testing.assert_allclose(lazy.compute(scheduler="synchronous"), model.predict(Z), rtol=1e-12, atol=1e-14)


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


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_named_by_its_global_row(value: float, path: Path) -> None:
    model = load_model(path)
    rows = np.zeros((9000, 4))
    rows[8765, 2] = value
    for form in (rows, da.from_array(rows, chunks=1000)):
        with pytest.raises(DataError, match=rf"{value} in row 8,765, column 2") as error:
            np.asarray(model.predict(form))
        assert (error.value.row, error.value.column) == (8765, 2)


def test_saving_never_replaces_what_is_not_a_model(path: Path, tmp_path: Path) -> None:
    model = load_model(path)
    with pytest.raises(StoreError, match="exists"):
        model.save(path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for name in ("folder", "file"):
        for overwrite in (False, True):
            with pytest.raises(StoreError, match=r"exists|is not a model"):
                model.save(tmp_path / name, overwrite=overwrite)
    assert (tmp_path / "folder" / "thesis.txt").read_text() == "years of work"
    assert (tmp_path / "file").read_text() == "x"


def test_saving_is_all_or_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(path)
    before = manifest_digest(str(path))

    def fail(site: str, array: Any = None) -> None:
        if site == "model.before_pointer":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(dkrr.models.model, "failpoint", fail)
    other = replace(model, provenance={"another": 1})
    with pytest.raises(StorageFullError, match="is full"):
        other.save(path, overwrite=True)
    with pytest.raises(StorageFullError, match="is full"):
        other.save(path.with_name("new.zarr"))
    monkeypatch.undo()
    assert manifest_digest(str(path)) == before
    assert [entry.name for entry in path.parent.iterdir()] == ["model.zarr"]
    other.save(path, overwrite=True)
    assert load_model(path).provenance == {"another": 1}


def test_a_function_without_a_name_cannot_be_saved(tmp_path: Path) -> None:
    fit = KernelRidge(kernel=lambda a, b: a @ b.T).fit(X, Y)
    with pytest.raises(ParameterError, match="cannot be stored by name"):
        fit.save(tmp_path / "model.zarr")
    assert list(tmp_path.iterdir()) == []


# --- what is refused -------------------------------------------------------------------------------------------------


def edit(path: Path, key: str, change: Callable[[dict[str, Any]], None], *, signed: bool) -> None:
    """Change a JSON document of a model; ``signed`` writes a manifest that fits, as a forger would."""
    document = json.loads((path / key).read_text())
    change(document)
    (path / key).write_text(json.dumps(document))
    if signed:
        write_manifest(str(path))


def flip(path: Path, position: int = 40) -> None:
    octets = bytearray(path.read_bytes())
    octets[position] ^= 1
    path.write_bytes(octets)


CHUNK = "X_fit/c/0/0"


def damage_chunk(path: Path) -> None:
    flip(path / CHUNK)


def drop_chunk(path: Path) -> None:
    (path / CHUNK).unlink()


def cut_chunk(path: Path) -> None:
    (path / CHUNK).write_bytes((path / CHUNK).read_bytes()[:100])


def drop_metadata(path: Path) -> None:
    (path / "dual_coef/zarr.json").unlink()


def add_file(path: Path) -> None:
    (path / "X_fit/c/1").mkdir()
    (path / "X_fit/c/1/0").write_bytes(b"more rows")


def add_partial(path: Path) -> None:
    (path / "X_fit/c/0/0.abc.partial").write_bytes(b"")


def change_attribute(path: Path) -> None:
    edit(path, "zarr.json", lambda d: d["attributes"]["kernel"].update(gamma=0.4), signed=False)


def drop_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def break_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("{")


def escape_in_manifest(path: Path) -> None:
    edit(path, "manifest.json", lambda d: d.update({"../../secret": "00"}), signed=False)


def swap_arrays(path: Path) -> None:
    (path / "X_fit").rename(path / "x")
    (path / "dual_coef").rename(path / "X_fit")
    (path / "x").rename(path / "dual_coef")


def newer(path: Path) -> None:
    edit(path, "zarr.json", lambda d: d["attributes"].update(format_version=2), signed=True)


def foreign(path: Path) -> None:
    edit(path, "zarr.json", lambda d: d["attributes"].update(format="keras"), signed=True)


def attributes_are_a_list(path: Path) -> None:
    edit(path, "zarr.json", lambda d: d.update(attributes=[1]), signed=True)


def link_chunk(path: Path) -> None:
    shutil.move(path / CHUNK, path.parent / "elsewhere")
    (path / CHUNK).symlink_to(path.parent / "elsewhere")


def link_metadata(path: Path) -> None:
    shutil.move(path / "zarr.json", path.parent / "elsewhere.json")
    (path / "zarr.json").symlink_to(path.parent / "elsewhere.json")


def link_folder(path: Path) -> None:
    shutil.move(path / "X_fit", path.parent / "X_fit")
    (path / "X_fit").symlink_to(path.parent / "X_fit")


def format_2(path: Path) -> None:
    shutil.rmtree(path)
    zarr.open_group(str(path), mode="w", zarr_format=2).create_array("X_fit", data=X)


def is_array(path: Path) -> None:
    shutil.rmtree(path)
    zarr.create_array(str(path), data=X)


def is_nothing(path: Path) -> None:
    shutil.rmtree(path)


def object_dtype(path: Path) -> None:
    edit(path, "X_fit/zarr.json", lambda d: d.update(data_type="object"), signed=True)


def pickle_codec(path: Path) -> None:
    edit(path, "X_fit/zarr.json", lambda d: d.update(codecs=[{"name": "numcodecs.pickle"}]), signed=True)


def transformer(path: Path) -> None:
    edit(path, "X_fit/zarr.json", lambda d: d.update(storage_transformers=[{"name": "x"}]), signed=True)


def unknown_kernel(path: Path) -> None:
    edit(path, "zarr.json", lambda d: d["attributes"].update(kernel={"kernel": "rfb"}), signed=True)


def missing_attribute(path: Path) -> None:
    edit(path, "zarr.json", lambda d: d["attributes"].pop("center"), signed=True)


def short_center(path: Path) -> None:
    edit(path, "zarr.json", lambda d: d["attributes"].update(center=[0.0]), signed=True)


def other_length(path: Path) -> None:
    shutil.rmtree(path / "dual_coef")
    KernelRidge().fit(X[:60], Y[:60, 0]).save(path.parent / "short.zarr")
    shutil.copytree(path.parent / "short.zarr/dual_coef", path / "dual_coef")
    write_manifest(str(path))


REFUSED: dict[Callable[[Path], None], str] = {
    damage_chunk: rf"{CHUNK} of .*model\.zarr is damaged \(SHA-256 [0-9a-f]{{12}}, [0-9a-f]{{12}} expected\)",
    drop_chunk: rf"{CHUNK} of .* is missing",
    cut_chunk: rf"{CHUNK} of .* is damaged",
    drop_metadata: r"dual_coef/zarr\.json of .* is missing",
    add_file: r"X_fit/c/1/0 of .* is not in its manifest",
    add_partial: r"X_fit/c/0/0\.abc\.partial of .* is not in its manifest",
    change_attribute: r"zarr\.json of .* is damaged",
    swap_arrays: r"(X_fit|dual_coef)/.* is damaged",
    drop_manifest: r"has no manifest\.json",
    break_manifest: r"manifest\.json of .* is not valid JSON",
    escape_in_manifest: r"\.\./\.\./secret of .* is missing",
    newer: r"model format version 2; this dkrr reads version 1",
    foreign: r"not a model of dkrr \(format 'keras'\)",
    attributes_are_a_list: "not a model of dkrr",
    link_chunk: r"X_fit/c/0/0 is a symbolic link",
    link_metadata: r"zarr\.json is a symbolic link",
    link_folder: r"X_fit is a symbolic link",
    format_2: "is Zarr format 2; format 3 expected",
    is_array: "is not a model of dkrr",
    is_nothing: "is not a model of dkrr",
    object_dtype: r"X_fit has data type 'object'; float64 or float32 expected",
    pickle_codec: r"X_fit has codecs \[\{'name': 'numcodecs\.pickle'\}\]",
    transformer: "X_fit uses storage transformers",
    unknown_kernel: r"unreadable metadata \(kernel 'rfb': did you mean 'rbf'",
    missing_attribute: r"unreadable metadata \('center'\)",
    short_center: r"center has shape \(1,\), \(4,\) expected",
    other_length: "120 training rows, 60 coefficients",
}


@pytest.mark.whole
@pytest.mark.parametrize("spoil", REFUSED, ids=lambda function: function.__name__)
def test_a_spoiled_model_is_refused(spoil: Callable[[Path], None], path: Path) -> None:
    load_model(path)
    spoil(path)
    with pytest.raises(StoreError, match=REFUSED[spoil]) as error:
        load_model(path)
    assert error.value.exit_code == 4
    assert error.value.hint


METADATA = [newer, foreign, link_chunk, link_metadata, link_folder, format_2, object_dtype, pickle_codec, transformer]


@pytest.mark.parametrize("spoil", METADATA, ids=lambda function: function.__name__)
def test_metadata_is_checked_without_verification_too(spoil: Callable[[Path], None], path: Path) -> None:
    spoil(path)
    with pytest.raises(StoreError, match=REFUSED[spoil]):
        load_model(path, verify=False)


@pytest.mark.parametrize("spoil", [damage_chunk, drop_chunk, cut_chunk], ids=lambda function: function.__name__)
def test_a_damaged_chunk_is_found_without_verification(spoil: Callable[[Path], None], path: Path) -> None:
    spoil(path)
    with pytest.raises(DamagedChunkError, match=r"chunk \(0, 0\) of .*X_fit is damaged"):
        load_model(path, verify=False)  # a small model is read at once


@pytest.mark.usefixtures("not_in_memory")
@pytest.mark.parametrize("spoil", [damage_chunk, drop_chunk, cut_chunk], ids=lambda function: function.__name__)
@pytest.mark.parametrize("early", [True, False], ids=["before load", "after load"])
def test_a_damaged_chunk_is_found_at_predict(spoil: Callable[[Path], None], early: bool, path: Path) -> None:
    if early:
        spoil(path)
    model = load_model(path, verify=False)
    if not early:
        spoil(path)
    with pytest.raises(DamagedChunkError, match=r"chunk \(0, 0\) of .*X_fit is damaged"):
        model.predict(Z)


def test_the_folder_itself_may_be_a_link(path: Path) -> None:
    link = path.with_name("production")
    link.symlink_to(path)
    assert np.array_equal(load_model(link).predict(Z), load_model(path).predict(Z))


def test_a_name_never_leaves_the_model(path: Path, tmp_path: Path) -> None:
    # names of columns are data: they become no paths
    model = replace(load_model(path), feature_names=["../../a", "/etc/passwd", "..", "x"], target_names=["../t"])
    model.save(tmp_path / "names.zarr")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.zarr", "names.zarr"]
    assert load_model(tmp_path / "names.zarr").target_names == ["../t"]


def test_a_model_made_by_hand(tmp_path: Path, path: Path) -> None:
    kernel = make_kernel("poly", degree=2, gamma=1.0)
    model = Model(
        kernel=kernel,
        x_fit=ArrayRows(X),
        dual_coef=ArrayRows(np.ones((120, 2))),
        solution=load_model(path).solution,
    )
    model.save(tmp_path / "hand.zarr")
    np.testing.assert_allclose(load_model(tmp_path / "hand.zarr").predict(Z), kernel(Z, X) @ np.ones((120, 2)))
