"""Large tables of cases: the fast tier runs a sample of each, ``pytest -m thorough`` what it leaves out.

A table is a test function with more than :data:`MAX_CASES` parametrised cases in one file. The sample is the same on
every machine and in every run: those cases whose names have the smallest digests. Tables that are promised case by
case, or are cheap, are marked ``whole`` and stay whole.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

MAX_CASES = 3


def digest(name: str) -> str:
    """What orders the cases of a table: the same everywhere, and unrelated to their meaning."""
    return hashlib.sha256(name.encode()).hexdigest()


def one_of(count: int, name: str) -> bool:
    """Whether a case belongs to the sample of one in ``count``."""
    return int(digest(name)[:8], 16) % count == 0


def mark_large_tables(items: Iterable[pytest.Item]) -> None:
    """Mark the cases outside the samples ``thorough``."""
    tables: dict[tuple[Any, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not any(item.get_closest_marker(name) for name in ("whole", "system")):
            tables[item.path, getattr(item, "cls", None), getattr(item, "originalname", "")].append(item)
    for cases in tables.values():
        for item in sorted(cases, key=lambda item: digest(item.name))[MAX_CASES:]:
            item.add_marker("thorough")
