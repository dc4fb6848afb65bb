"""What contract tests share: a command in this process, with how it has to end and what it has to say."""

from __future__ import annotations

from collections.abc import Sequence

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
