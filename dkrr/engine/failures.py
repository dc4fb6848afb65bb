"""What went wrong on a cluster, in words: a lost scheduler, dead workers, dropped tasks, a graph that stands still."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from dkrr.engine.receipts import Node
from dkrr.errors import ClusterError, WorkerLostError

__all__ = ["check_alive", "lost_scheduler", "never_ready", "raise_if_failed"]


def lost_scheduler(client: Any, reason: str = "") -> ClusterError:
    """The error of a scheduler that is gone."""
    address = client.scheduler.address if client.scheduler else ""
    return ClusterError(
        " ".join(filter(None, ["lost the scheduler", address, reason])),
        hint="start the same job again; every finished tile is kept",
    )


def never_ready(phase: str, nodes: Sequence[Node]) -> ClusterError:
    """The error of a graph in which nothing runs and tasks are left."""
    first = nodes[0]
    return ClusterError(
        f"{phase}: nothing runs, and {len(nodes):,} tasks wait for others that are not in the graph; the first is "
        f"{first.key}, which waits for {', '.join(map(str, first.dependencies))}",
        hint="start the same job again; every finished tile is kept",
    )


def raise_if_failed(client: Any, node: Node, future: Any) -> None:
    """Raise what a task raised, or what became of it.

    Raises
    ------
    WorkerLostError
        Workers died on it again and again.
    ClusterError
        The scheduler has dropped it, or is lost.
    """
    from distributed import KilledWorker

    # lost: a worker died with the receipt; the scheduler runs the task again, and gathering waits for it
    if future.status in ("finished", "lost"):
        return
    if future.status == "cancelled":
        if client.status != "running":
            raise lost_scheduler(client)
        raise ClusterError(
            f"the scheduler dropped task {node.key} ({future.status})",
            hint="start the same job again; every finished tile is kept",
        )
    error = future.exception()
    if isinstance(error, KilledWorker):
        raise WorkerLostError(
            f"task {node.key} was running on workers that died {_attempts(error)} times",
            hint="usually memory: lower tile_size or raise memory_limit; finished tiles are kept",
            key=node.key,
        ) from error
    raise error


def check_alive(client: Any, phase: str, last_progress: float, stall_seconds: float, num_submitted: int) -> None:
    """The watchdog: name what runs when no task has finished since ``last_progress`` (of the monotonic clock).

    Raises
    ------
    ClusterError
        The scheduler is lost, or nothing has finished for ``stall_seconds``.
    """
    if client.status != "running":
        raise lost_scheduler(client, f"in {phase}")
    stalled = time.monotonic() - last_progress
    if stalled > stall_seconds:
        processing = client.processing()
        names = {worker: [str(key) for key in keys][:3] for worker, keys in processing.items() if keys}
        raise ClusterError(
            f"no task of {phase} finished for {stalled:.0f} s; running: {names or 'nothing'}, "
            f"{num_submitted} submitted, {len(processing)} workers",
            hint="look at the workers' logs; start the same job again to continue",
        )


def _attempts(error: Any) -> int:
    return int(getattr(error, "allowed_failures", 3)) + 1
