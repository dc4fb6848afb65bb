"""``dkrr gc`` lists first, and deletes only when it is told to."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from dkrr.cli import main

KEY = "a" * 40


@pytest.fixture
def store(tmp_path: Path) -> Path:
    array = tmp_path / "runs" / "store" / "factors" / f"{KEY}.zarr"
    (array / "c").mkdir(parents=True)
    (array / "c" / "0").write_bytes(bytes(2048))
    return tmp_path / "runs" / "store"


def test_without_yes_it_only_lists(store: Path) -> None:
    result = CliRunner().invoke(main, ["gc", str(store), "--older-than", "-1"])
    assert result.exit_code == 0
    assert "2 KiB" in result.stdout
    assert KEY in result.stdout
    assert "2 KiB can be deleted with --yes" in result.stdout
    assert (store / "factors" / f"{KEY}.zarr").exists()


def test_with_yes_it_deletes(store: Path) -> None:
    result = CliRunner().invoke(main, ["gc", str(store.parent), "--older-than", "-1", "--yes"])
    assert result.exit_code == 0
    assert "deleted 2 KiB" in result.stdout
    assert not (store / "factors" / f"{KEY}.zarr").exists()
