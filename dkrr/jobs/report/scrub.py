"""Remove what may be a credential from everything that goes into the page.

Runs hold none: job files with one in them are refused, and so are addresses. This is the last line: messages of other
programs end up in events, and a report is a file that people send around.
"""

from __future__ import annotations

import os
import re
from typing import Any

__all__ = ["REMOVED", "scrub", "secret_values"]

REMOVED = "[removed]"
_NAMES = re.compile(r"secret|passw|token|credential|access_?key|private_?key|api_?key|authori[sz]ation", re.IGNORECASE)
_SHORTEST = 8
_PATTERNS = (
    re.compile(r"(?<=://)[^/\s@'\"]+:[^/\s@'\"]*(?=@)"),  # user:password@ in an address
    re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),  # numbers of Amazon's keys
    # a name of a secret, and what is given to it: in a query, an assignment, a header
    re.compile(
        r"(?i)(?<![A-Za-z0-9])((?:[a-z0-9_-]*(?:secret|passw(?:or)?d|token|credential|signature|api[_-]?key)[a-z0-9_-]*"
        r"|authorization))(\s*[=:]\s*|=)(?:bearer\s+|basic\s+)?[^\s&;,'\"<>]{4,}"
    ),
)


def secret_values() -> list[str]:
    """Values of this process' environment whose names say that they are secret; the longest first."""
    found = {
        value
        for name, value in os.environ.items()
        if _NAMES.search(name) and len(value) >= _SHORTEST and not name.endswith(("_FILE", "_PATH", "_DIR"))
    }
    return sorted(found, key=len, reverse=True)


def scrub(value: Any, secrets: list[str] | None = None) -> Any:
    """The same nested values, their texts without what may be a secret."""
    known = secret_values() if secrets is None else secrets
    if isinstance(value, dict):
        return {scrub(key, known): scrub(item, known) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrub(item, known) for item in value]
    if not isinstance(value, str):
        return value
    for secret in known:
        value = value.replace(secret, REMOVED)
    for pattern in _PATTERNS[:2]:
        value = pattern.sub(REMOVED, value)
    return _PATTERNS[2].sub(lambda match: f"{match[1]}{match[2]}{REMOVED}", value)
