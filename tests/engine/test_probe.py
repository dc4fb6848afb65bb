"""A store that a worker cannot use is found by the worker, which says what it cannot do; nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dkrr.engine import workers
from dkrr.engine.workers import answer_challenge, challenge


def test_a_store_that_can_be_used(tmp_path: Path) -> None:
    with challenge(str(tmp_path / "new" / "store")) as asked:
        assert asked is not None
        assert answer_challenge(asked) == ""
    assert list((tmp_path / "new" / "store").iterdir()) == []


def test_the_same_path_on_another_disk(tmp_path: Path) -> None:
    with challenge(str(tmp_path / "here")) as asked:
        assert asked is not None
        elsewhere = {**asked, "store": str(tmp_path / "there")}
        assert "not the same place" in answer_challenge(elsewhere)
        assert "not the same place" in answer_challenge({**asked, "token": "another"})
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(("name", "step"), [("write_json", "write"), ("delete_key", "delete")])
def test_what_cannot_be_done_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, step: str) -> None:
    def denied(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with challenge(str(tmp_path)) as asked, monkeypatch.context() as patch:
        patch.setattr(workers, name, denied)
        problem = answer_challenge(asked)
    assert problem.startswith(f"cannot {step} (PermissionError")
