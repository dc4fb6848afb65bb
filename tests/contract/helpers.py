"""What contract tests share: a command with how it has to end and what it has to say, and a folder that stays."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dkrr.cli import main


def run(*arguments: object, exits: int | None = 0, said: str | Sequence[str] = ()) -> Result:
    """``dkrr ARGUMENTS``, which ends with the exit code ``exits`` (None: any but 0) and says each text of ``said``."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    ended = bool(result.exit_code) if exits is None else result.exit_code == exits
    assert ended, f"dkrr {arguments}: {result.exit_code}\n{result.output}\n{result.exception!r}"
    text = result.output if exits == 0 else result.stderr
    for words in [said] if isinstance(said, str) else said:
        assert words in text, f"{words!r} is not in\n{text}"
    return result


def contents(folder: Path) -> dict[str, bytes | str]:
    """Every file below a folder, and where its links point."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = os.readlink(path)
        elif path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """What is below a folder, which holds something, is afterwards what it was before."""
    before = contents(folder)
    assert before
    yield
    assert contents(folder) == before


@contextmanager
def killed_while_removing(folder: Path, count: int) -> Iterator[None]:
    """Whoever removes the ``count``-th file or folder below ``folder``, drafts and locks aside, is killed."""
    calls = 0

    def until_killed(remove: Any) -> Any:
        def removed(path: Any, *, dir_fd: int | None = None) -> None:
            nonlocal calls
            whole = (
                os.path.abspath(path) if dir_fd is None else os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
            )
            is_meant = f"{whole}/".startswith(f"{folder}/") and not whole.endswith((".partial", ".lock"))
            calls += is_meant
            if is_meant and calls >= count:
                raise KeyboardInterrupt
            remove(path, dir_fd=dir_fd)

        return removed

    with pytest.MonkeyPatch.context() as patch:
        for name in ("unlink", "remove", "rmdir"):
            patch.setattr(os, name, until_killed(getattr(os, name)))
        yield
    assert calls >= count, "nobody came that far"


@contextmanager
def without_permission(folder: Path, mode: int) -> Iterator[None]:
    """The block is run by somebody who is not the owner of a folder, and to whom it is open as far as ``mode`` says."""
    changed = {folder: mode, **{parent: 0o755 for parent in folder.parents if parent.stat().st_uid == os.getuid()}}
    before = {path: path.stat().st_mode for path in changed if path != Path(path.anchor)}
    is_root = os.geteuid() == 0  # to whom all is open
    try:
        for path in before:
            path.chmod(changed[path] | (before[path] & 0o7000))
        if is_root:
            os.seteuid(65534)
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for path, earlier in before.items():
            path.chmod(earlier & 0o7777)
