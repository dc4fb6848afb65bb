"""Jobs of tests: one document, of which each test changes a few keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dkrr.jobs.spec import JobSpec

Make = Callable[..., JobSpec]


def job_maker(document: dict[str, Any], folder: Path) -> Make:
    """``make(solver={...})`` is the job of a document with these keys of its tables changed."""

    def make(**tables: Any) -> JobSpec:
        changed = {name: document.get(name, {}) | keys for name, keys in tables.items()}
        return JobSpec.from_dict(document | changed, base=folder)

    return make
