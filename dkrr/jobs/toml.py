"""Files in TOML: reading one that a person wrote, writing tables of one level with plain and inline values.

You need it for job files, those that a program made included; the standard library reads TOML and does not write it.
Costs nothing.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

from dkrr.errors import JobFileError

__all__ = ["dumps", "inline", "read_toml"]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def read_toml(path: Path, *, not_text: str, unreadable: str) -> tuple[str, dict[str, Any]]:
    """The text of a file and what it holds; ``not_text`` and ``unreadable`` are the hints of two of the errors.

    Raises
    ------
    JobFileError
        The file cannot be read, is not UTF-8, or is not TOML.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except UnicodeDecodeError as exc:
        raise JobFileError(f"{path} is not UTF-8 text (byte {exc.start})", hint=not_text) from None
    except OSError as exc:
        raise JobFileError(f"{path} cannot be read ({exc.strerror})", hint=unreadable) from None
    except tomllib.TOMLDecodeError as exc:
        raise JobFileError(
            f"{path} is not valid TOML: {exc}", hint="strings stand in quotes" if path.suffix == ".toml" else not_text
        ) from None


def dumps(document: dict[str, dict[str, Any]]) -> str:
    """The TOML text of ``{"table": {"key": value}}``; None values are left out, nested tables are written inline."""
    lines = []
    for table, values in document.items():
        lines.append(f"[{_key(table)}]")
        lines.extend(f"{_key(name)} = {inline(value)}" for name, value in values.items() if value is not None)
        lines.append("")
    return "\n".join(lines)


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    # JSON's escapes are TOML's, except that TOML wants DEL escaped as well
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def inline(value: Any) -> str:
    """One value as it stands behind the equals sign."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(inline(item) for item in value)}]"
    if isinstance(value, dict):
        pairs = (f"{_key(name)} = {inline(item)}" for name, item in value.items() if item is not None)
        return f"{{{', '.join(pairs)}}}"
    raise TypeError(f"{type(value).__name__} has no TOML form")
