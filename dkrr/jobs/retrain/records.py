"""What a retrain job has done: one document for each stage and each set of inputs, written when the stage is done.

The key of a document is a hash of everything its stage depends on. So "has this been done?" is the question whether
the document exists, and a job that is started again after any interruption does what is missing and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

from dkrr.jobs.documents import plain
from dkrr.jobs.runs.directory import RunDirectory, utc_now
from dkrr.store.failpoints import failpoint

__all__ = ["LAST", "Records", "hash_of"]

LAST = "last.json"


def hash_of(*parts: Any) -> str:
    """SHA-256 of plain data, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


class Records:
    """The documents of the stages below the directory of a retrain job."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    def find(self, stage: str, key: str) -> dict[str, Any] | None:
        """What a stage found for these inputs; None when it has not been done."""
        found = self.directory.read(_name(stage, key))
        return None if found is None else dict(found["result"])

    def do(
        self,
        stage: str,
        key: str,
        inputs: dict[str, Any],
        work: Callable[[], dict[str, Any]],
        *,
        is_there: Callable[[dict[str, Any]], bool] | None = None,
    ) -> dict[str, Any]:
        """The result of a stage, which is done unless it has been; plain data.

        Parameters
        ----------
        is_there
            Of a stage that makes more than its result: whether that is there still. It is made again where not.
        """
        found = self.find(stage, key)
        if found is not None and (is_there is None or is_there(found)):
            return found
        failpoint(f"retrain.{stage}.before")
        began = time.perf_counter()
        result = plain(work())
        failpoint(f"retrain.{stage}.before_record")
        self.directory.write(
            _name(stage, key),
            {
                "stage": stage,
                "key": key,
                "inputs": plain(inputs),
                "result": result,
                "seconds": round(time.perf_counter() - began, 3),
                "at": utc_now(),
            },
        )
        failpoint(f"retrain.{stage}.after_record")
        return dict(result)

    def last(self) -> dict[str, Any]:
        """The latest tick that came to an end; empty before the first."""
        return dict(self.directory.read(LAST) or {})


def _name(stage: str, key: str) -> str:
    return f"records/{stage}/{key[:32]}.json"
