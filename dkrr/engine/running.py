"""Run one task where it is: input and output errors are tried again, memory errors translated, a receipt is made.

What the scheduler sends to a worker is :func:`run_tasks` with the keys of a bundle; in this process the same
:func:`run_task` is called directly.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from dkrr.engine.memory import peak_rss_bytes
from dkrr.engine.receipts import Key, Receipt
from dkrr.engine.stopping import task_of
from dkrr.errors import DkrrError, MemoryBudgetError, StorageFullError, StoreError
from dkrr.store.interruption import check_cancelled

__all__ = ["TaskFunction", "run_task", "run_tasks"]

logger = logging.getLogger("dkrr.engine")

ENOSPC = 28
IO_ATTEMPTS = 3

TaskFunction = Callable[..., "tuple[bool, dict[str, Any]] | bool"]


def run_task(function: TaskFunction, payload: Any, key: Key) -> Receipt:
    """Run one task where it is: retry input and output errors, translate memory errors, fill in the receipt."""
    started = time.perf_counter()
    for attempt in itertools.count(1):
        try:
            outcome = function(payload, *key)
            break
        except DkrrError:
            raise
        except OSError as exc:
            if attempt == IO_ATTEMPTS:
                if exc.errno == ENOSPC:
                    raise StorageFullError(
                        f"no space left on device while task {key} wrote {_needed(payload)}",
                        hint="free that much and start again; everything finished so far is kept",
                    ) from exc
                raise StoreError(
                    f"task {key} cannot use its storage ({exc})",
                    hint="check the device and start again; everything finished so far is kept",
                ) from exc
            logger.warning("task %s: %s; attempt %d of %d", key, exc, attempt + 1, IO_ATTEMPTS)
            time.sleep(0.05 * 4**attempt)
        except MemoryError as exc:
            tile_size = _tile_size(payload)
            smaller = max(1, tile_size // 2)
            raise MemoryBudgetError(
                f"task {key} ran out of memory with tiles of {tile_size}",
                hint=f"set tile_size = {smaller} or raise memory_limit",
                tile_size=tile_size,
            ) from exc
    computed, values = outcome if isinstance(outcome, tuple) else (outcome, {})
    return Receipt(
        key=key,
        computed=computed,
        seconds=time.perf_counter() - started,
        values=values,
        worker=_worker_name(),
        peak_rss_bytes=peak_rss_bytes(),
    )


def run_tasks(
    function: TaskFunction, payload: Any, keys: Sequence[Key], graph: str, *_waited_for: Any
) -> list[Receipt]:
    """Run the tasks of a bundle one after the other; what they have written stays when a later one fails."""
    receipts = []
    with task_of(graph):
        for key in keys:
            check_cancelled()
            receipts.append(run_task(function, payload, key))
    return receipts


def _tile_size(payload: Any) -> int:
    grid = getattr(payload, "grid", None)
    return int(getattr(grid, "tile_size", 0))


def _needed(payload: Any) -> str:
    remaining = getattr(payload, "remaining_bytes", None)
    return f"(about {remaining():,} bytes are still to be written)" if callable(remaining) else "its chunk"


def _worker_name() -> str:
    try:
        from distributed import get_worker

        return str(get_worker().address)
    except (ImportError, ValueError):
        return "this process"
