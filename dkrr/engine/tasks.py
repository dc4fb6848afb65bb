"""Run a graph of idempotent tasks: a bounded window of submitted tasks, priorities, retries, progress, a watchdog.

A task is ``function(payload, *key) -> Receipt``: it reads finished chunks, writes one chunk atomically and returns a
few numbers. Nothing that must survive is kept in the scheduler's or a worker's memory, so any task may run twice, and a
graph that was interrupted is simply run again: tasks whose chunk is valid return at once.
"""

from __future__ import annotations

import itertools
import logging
import queue
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from dkrr.engine.bundles import Bundle, Outbox, window_of
from dkrr.engine.memory import peak_rss_bytes
from dkrr.engine.receipts import Key, Node, Progress, Receipt, RunSummary
from dkrr.errors import ClusterError, DkrrError, MemoryBudgetError, StorageFullError, StoreError, WorkerLostError

__all__ = ["DaskExecutor", "Executor", "InProcessExecutor", "Node", "Progress", "Receipt", "RunSummary"]

logger = logging.getLogger("dkrr.engine")

ENOSPC = 28
IO_ATTEMPTS = 3
GATHER_TOGETHER = 64


TaskFunction = Callable[..., "tuple[bool, dict[str, Any]] | bool"]


class Executor(Protocol):
    """Runs graphs. ``num_threads`` is the number of tasks that can run at once."""

    @property
    def num_threads(self) -> int: ...

    def run(
        self,
        phase: str,
        function: TaskFunction,
        payload: Any,
        nodes: Sequence[Node],
        progress: Progress | None = None,
    ) -> RunSummary: ...


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


def run_tasks(function: TaskFunction, payload: Any, keys: Sequence[Key], *_waited_for: Any) -> list[Receipt]:
    """Run the tasks of a bundle one after the other; what they have written stays when a later one fails."""
    return [run_task(function, payload, key) for key in keys]


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


class InProcessExecutor:
    """Runs the tasks of a graph one after the other in this process."""

    num_threads = 1

    def run(
        self,
        phase: str,
        function: TaskFunction,
        payload: Any,
        nodes: Sequence[Node],
        progress: Progress | None = None,
    ) -> RunSummary:
        summary = RunSummary()
        reporter = _Reporter(phase, nodes, progress)
        started = time.perf_counter()
        for node in nodes:
            receipt = run_task(function, payload, node.key)
            summary.add(receipt, node)
            reporter.finished(node)
        summary.seconds = time.perf_counter() - started
        return summary


class _Reporter:
    def __init__(self, phase: str, nodes: Iterable[Node], progress: Progress | None) -> None:
        self.phase, self.progress = phase, progress
        self.total, self.done = 0, 0
        self.flops_total, self.flops_done = 0.0, 0.0
        for node in nodes:
            self.total += 1
            self.flops_total += node.flops
        self.report()

    def finished(self, node: Node) -> None:
        self.done += 1
        self.flops_done += node.flops
        self.report()

    def report(self) -> None:
        if self.progress is not None:
            self.progress(self.phase, self.done, self.total, self.flops_done, self.flops_total)


class DaskExecutor:
    """Runs graphs on the workers of a Dask client.

    Parameters
    ----------
    client
        A connected ``distributed.Client``; never closed here.
    stall_seconds
        The watchdog: when no task finishes for this long, the tasks that run are named in a ``ClusterError``.
    """

    def __init__(self, client: Any, *, stall_seconds: float = 600.0) -> None:
        self.client = client
        self.stall_seconds = stall_seconds
        self.workers: list[Any] = []

    @property
    def num_threads(self) -> int:
        try:
            return max(1, int(sum(self.client.nthreads().values())))
        except OSError as exc:  # a scheduler that went away between two graphs; not an error of the storage
            raise ClusterError(
                f"lost the scheduler ({exc})", hint="start the same job again; everything finished so far is kept"
            ) from exc

    def run(
        self,
        phase: str,
        function: TaskFunction,
        payload: Any,
        nodes: Sequence[Node],
        progress: Progress | None = None,
    ) -> RunSummary:
        """Run ``function(payload, *key)`` for every node, dependencies first, in list order of priority.

        At most :func:`~dkrr.engine.bundles.window_of` messages are known to the scheduler at once, a task or a bundle
        of short ones each.
        """
        num_threads = self.num_threads
        window = window_of(num_threads)
        token = uuid.uuid4().hex
        summary = RunSummary()
        reporter = _Reporter(phase, nodes, progress)
        finished: queue.SimpleQueue[tuple[Bundle, Any]] = queue.SimpleQueue()
        held: dict[Key, Any] = {}
        running: dict[Key, Any] = {}
        ungathered: list[tuple[Bundle, Any]] = []
        outbox = Outbox(nodes, num_threads)
        waiting_for = Counter(key for bundle in outbox.bundles for key in outbox.waits_for(bundle))
        started = time.perf_counter()
        last_progress = time.monotonic()
        try:
            while running or not outbox.is_empty:
                while len(running) < window:
                    entry = outbox.next()
                    if entry is None:
                        break
                    rank, bundle = entry
                    first, waits_for = bundle[0], outbox.waits_for(bundle)
                    future = self.client.submit(
                        run_tasks,
                        function,
                        payload,
                        [node.key for node in bundle],
                        *(held[key] for key in waits_for if not first.held_back),
                        key=(f"{phase}-{token}", *first.key),
                        priority=-rank,
                        pure=False,
                    )
                    for key in waits_for:
                        waiting_for[key] -= 1
                        if not waiting_for[key] and key not in running:
                            del held[key]
                    held[first.key] = running[first.key] = future
                    future.add_done_callback(lambda future, bundle=bundle: finished.put((bundle, future)))
                if not running:
                    break
                try:
                    bundle, future = finished.get(timeout=1.0)
                except queue.Empty:
                    self._check_alive(phase, last_progress, running)
                    continue
                last_progress = time.monotonic()
                first = bundle[0]
                self._raise_if_failed(first, future)
                ungathered.append((bundle, future))
                for node in bundle:
                    reporter.finished(node)
                outbox.finished(bundle)
                del running[first.key]
                if not waiting_for[first.key]:
                    held.pop(first.key, None)
                if len(ungathered) == GATHER_TOGETHER:
                    self._gather(ungathered, summary)
            self._gather(ungathered, summary)
        except BaseException:
            self.client.cancel(list(running.values()), force=True)
            raise
        summary.seconds = time.perf_counter() - started
        return summary

    def _gather(self, finished: list[tuple[Bundle, Any]], summary: RunSummary) -> None:
        """Fetch receipts, many in one message: one at a time they cost the client more than all else."""
        gathered = self.client.gather([future for _, future in finished], errors="skip")
        if len(gathered) != len(finished):  # a worker died with its receipts, and the task that ran again failed
            for bundle, future in finished:
                self._raise_if_failed(bundle[0], future)
            raise ClusterError("receipts of finished tasks were lost", hint="start the same job again")
        for (bundle, _), receipts in zip(finished, gathered, strict=True):
            for node, receipt in zip(bundle, receipts, strict=True):
                summary.add(receipt, node)
        finished.clear()

    def _raise_if_failed(self, node: Node, future: Any) -> None:
        from distributed import KilledWorker

        # lost: a worker died with the receipt; the scheduler runs the task again, and gathering waits for it
        if future.status in ("finished", "lost"):
            return
        if future.status == "cancelled":
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

    def _check_alive(self, phase: str, last_progress: float, running: dict[Key, Any]) -> None:
        if self.client.status != "running":
            raise ClusterError(
                f"lost the scheduler {self.client.scheduler.address if self.client.scheduler else ''} in {phase}",
                hint="start the same job again; every finished tile is kept",
            )
        stalled = time.monotonic() - last_progress
        if stalled > self.stall_seconds:
            processing = self.client.processing()
            names = {worker: [str(key) for key in keys][:3] for worker, keys in processing.items() if keys}
            raise ClusterError(
                f"no task of {phase} finished for {stalled:.0f} s; running: {names or 'nothing'}, "
                f"{len(running)} submitted, {len(processing)} workers",
                hint="look at the workers' logs; start the same job again to continue",
            )


def _attempts(error: Any) -> int:
    return int(getattr(error, "allowed_failures", 3)) + 1
