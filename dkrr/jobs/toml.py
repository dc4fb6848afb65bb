"""Writing TOML, which the standard library only reads: tables of one level with plain and inline values.

You need it to save a job file that a program made. Costs nothing.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

__all__ = ["dumps", "inline"]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


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
