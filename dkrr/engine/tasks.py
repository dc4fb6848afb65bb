"""Run a graph of idempotent tasks: a bounded window of submitted tasks, priorities, retries, progress, a watchdog.

A task is ``function(payload, *key) -> Receipt``: it reads finished chunks, writes one chunk atomically and returns a
few numbers. Nothing that must survive is kept in the scheduler's or a worker's memory, so any task may run twice, and a
graph that was interrupted is simply run again: tasks whose chunk is valid return at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from dkrr.cancellation import cancellable, check_cancelled
from dkrr.engine.bundles import Bundle, Outbox
from dkrr.engine.memory import peak_rss_bytes
from dkrr.engine.receipts import Key, Node, Progress, Receipt, RunSummary
from dkrr.engine.stopping import stop_graph, task_of
from dkrr.errors import (
    CancelledError,
    ClusterError,
    DkrrError,
    MemoryBudgetError,
    StorageFullError,
    StoreError,
    WorkerLostError,
)

if TYPE_CHECKING:
    from dkrr.engine.admission import Admission
    from dkrr.engine.checks import WorkerInfo

__all__ = ["DaskExecutor", "Executor", "InProcessExecutor", "Node", "Progress", "Receipt", "RunSummary"]

logger = logging.getLogger("dkrr.engine")

ENOSPC = 28
IO_ATTEMPTS = 3
GATHER_TOGETHER = 64
ANSWER_SECONDS = 20.0
STOP_SECONDS = 3.5  # a driver interrupts what has not left by itself 8 s after a request


TaskFunction = Callable[..., "tuple[bool, dict[str, Any]] | bool"]


class Executor(Protocol):
    """Runs graphs. ``num_threads`` is the number of tasks that can run at once.

    ``cancelled()`` is asked between tasks, about once a second; when it says yes, the graph that runs ends with
    :class:`~dkrr.errors.CancelledError`, and so does every later one. None: nobody can ask.
    """

    cancelled: Callable[[], bool] | None

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


class InProcessExecutor:
    """Runs the tasks of a graph one after the other in this process."""

    num_threads = 1
    cancelled: Callable[[], bool] | None = None

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
        with cancellable(self.cancelled):
            for node in nodes:
                check_cancelled()
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
        self._finished: set[Key] = set()
        for node in nodes:
            self.total += 1
            self.flops_total += node.flops
        self.report()

    def finished(self, node: Node) -> None:
        if node.key in self._finished:  # a receipt was lost, and its task run again
            return
        self._finished.add(node.key)
        self.done += 1
        self.flops_done += node.flops
        self.report()

    def report(self) -> None:
        if self.progress is not None:
            self.progress(self.phase, self.done, self.total, self.flops_done, self.flops_total)


class _StrandedError(Exception):
    """Tasks were submitted for workers that are all gone, and others have taken their place."""


class DaskExecutor:
    """Runs graphs on the workers of a Dask client.

    Parameters
    ----------
    client
        A connected ``distributed.Client``; never closed here.
    stall_seconds
        The watchdog: when no task finishes for this long, the tasks that run are named in a ``ClusterError``.
    admission
        Which workers may get tasks; None means all, for a cluster that dkrr started itself.
    workers
        What the start-up check found, where there is no admission.
    """

    def __init__(
        self,
        client: Any,
        *,
        stall_seconds: float = 600.0,
        admission: Admission | None = None,
        workers: Sequence[WorkerInfo] = (),
    ) -> None:
        self.client = client
        self.stall_seconds = stall_seconds
        self.admission = admission
        self.cancelled: Callable[[], bool] | None = None
        self._workers: list[WorkerInfo] = list(workers)

    @property
    def workers(self) -> list[WorkerInfo]:
        """The workers that passed the start-up check, and those that joined since and are equal to them."""
        return self._workers if self.admission is None else self.admission.workers

    @property
    def refused(self) -> list[dict[str, str]]:
        """Workers that are there and get no task, as ``{"address", "name", "reason"}``."""
        return [] if self.admission is None else self.admission.refused

    @property
    def num_threads(self) -> int:
        if self.admission is not None:
            return self.admission.num_threads
        try:
            threads = self.client.nthreads(callback_timeout=ANSWER_SECONDS)
            return max(1, int(sum(threads.values())))
        except (OSError, TimeoutError) as exc:  # a scheduler that went away between two graphs
            raise self._lost(f"({exc or 'no answer'})") from exc

    def run(
        self,
        phase: str,
        function: TaskFunction,
        payload: Any,
        nodes: Sequence[Node],
        progress: Progress | None = None,
    ) -> RunSummary:
        """Run ``function(payload, *key)`` for every node, dependencies first, in list order of priority.

        At most ``max(32, 4 * num_threads)`` messages are known to the scheduler at once, a task or a bundle of short
        ones each.

        Raises
        ------
        CancelledError
            ``cancelled()`` said so. Tasks stop at their next look, between two tile products; a product may take
            seconds, and is waited for.
        ClusterError
            The scheduler is lost or silent, no worker that may be used is there, or nothing has moved for a long time.
        """
        self._check_cancelled()
        summary = RunSummary()
        reporter = _Reporter(phase, nodes, progress)
        done: set[Key] = set()
        started = time.perf_counter()
        while True:
            try:
                self._run(phase, function, payload, nodes, summary, reporter, done)
                break
            except _StrandedError:  # what is finished stays finished: a valid chunk is not computed again
                logger.warning("all workers of %s were replaced; what is left is submitted to the new ones", phase)
                nodes = [
                    replace(node, dependencies=tuple(key for key in node.dependencies if key not in done))
                    for node in nodes
                    if node.key not in done
                ]
        summary.seconds = time.perf_counter() - started
        return summary

    def _run(
        self,
        phase: str,
        function: TaskFunction,
        payload: Any,
        nodes: Sequence[Node],
        summary: RunSummary,
        reporter: _Reporter,
        done: set[Key],
    ) -> None:
        num_threads = self.num_threads
        window = max(32, 4 * num_threads)
        graph = f"{phase}-{uuid.uuid4().hex}"
        finished: queue.SimpleQueue[tuple[Bundle, Any]] = queue.SimpleQueue()
        held: dict[Key, Any] = {}
        running: dict[Key, Any] = {}
        ungathered: list[tuple[Bundle, Any]] = []
        outbox = Outbox(nodes, num_threads)
        waiting_for = Counter(key for bundle in outbox.bundles for key in outbox.waits_for(bundle))
        allowed: dict[Key, list[str]] = {}
        last_progress = time.monotonic()
        try:
            while running or not outbox.is_empty:
                while len(running) < window:
                    entry = outbox.next()
                    if entry is None:
                        break
                    rank, bundle = entry
                    first, waits_for = bundle[0], outbox.waits_for(bundle)
                    options = {}
                    if self.admission is not None:
                        allowed[first.key] = self.admission.choose()
                        options = {"workers": allowed[first.key], "allow_other_workers": False}
                    future = self.client.submit(
                        run_tasks,
                        function,
                        payload,
                        [node.key for node in bundle],
                        graph,
                        *(held[key] for key in waits_for if not first.held_back),
                        key=(graph, *first.key),
                        priority=-rank,
                        pure=False,
                        **options,
                    )
                    for key in waits_for:
                        waiting_for[key] -= 1
                        if not waiting_for[key] and key not in running:
                            del held[key]
                    held[first.key] = running[first.key] = future
                    future.add_done_callback(lambda future, bundle=bundle: finished.put((bundle, future)))
                if not running:
                    break
                self._check_cancelled()
                try:
                    bundle, future = finished.get(timeout=1.0)
                except queue.Empty:
                    self._check_alive(phase, last_progress, running)
                    self._check_workers(allowed.values())
                    continue
                self._check_workers(())
                last_progress = time.monotonic()
                first = bundle[0]
                self._raise_if_failed(first, future)
                ungathered.append((bundle, future))
                for node in bundle:
                    reporter.finished(node)
                outbox.finished(bundle)
                del running[first.key]
                allowed.pop(first.key, None)
                if not waiting_for[first.key]:
                    held.pop(first.key, None)
                if len(ungathered) == GATHER_TOGETHER:
                    self._gather(ungathered, summary, done)
            self._gather(ungathered, summary, done)
        except BaseException as error:
            self._abandon(graph, list(running.values()), wait=isinstance(error, CancelledError))
            raise

    def _abandon(self, graph: str, running: list[Any], *, wait: bool) -> None:
        """End a graph on the workers as well: its threads would go on writing for as long as a task takes."""
        if self.client.status == "running":
            self.client.cancel(running, force=True)
            workers = None if self.admission is None else self.admission.present
            left = stop_graph(self.client, graph, workers, STOP_SECONDS if wait else 0.0)
            if wait and left:
                logger.warning("%d tasks of %s are still inside a product", left, graph)

    def _check_cancelled(self) -> None:
        if self.cancelled is not None and self.cancelled():
            raise CancelledError("cancelled on request", hint="resume it: it continues with what is finished")

    def _check_workers(self, waiting: Iterable[list[str]]) -> None:
        """Keep up with the workers; submit once more when tasks wait for workers that are all gone."""
        if self.admission is None:
            return
        self.admission.look()
        if not self.admission.is_empty and not all(map(self.admission.can_run, waiting)):
            raise _StrandedError

    def _gather(self, finished: list[tuple[Bundle, Any]], summary: RunSummary, done: set[Key]) -> None:
        """Fetch receipts, many in one message: one at a time they cost the client more than all else."""
        gathered = self._wait_for(
            self.client.gather([future for _, future in finished], errors="skip", asynchronous=True)
        )
        if len(gathered) != len(finished):  # a worker died with its receipts, and the task that ran again failed
            for bundle, future in finished:
                self._raise_if_failed(bundle[0], future)
            raise ClusterError("receipts of finished tasks were lost", hint="start the same job again")
        for (bundle, _), receipts in zip(finished, gathered, strict=True):
            for node, receipt in zip(bundle, receipts, strict=True):
                summary.add(receipt, node)
                done.add(node.key)
        finished.clear()

    def _wait_for(self, answer: Coroutine[Any, Any, Any]) -> Any:
        """The answer to a request; a scheduler that is silent or gone does not hold us up for ever."""
        future = asyncio.run_coroutine_threadsafe(answer, self.client.loop.asyncio_loop)
        try:
            while True:
                try:
                    return future.result(timeout=1.0)
                except TimeoutError:
                    if future.done():
                        raise
                if self.client.status != "running":
                    raise self._lost()
                self._check_cancelled()
                self._check_workers(())
        finally:
            future.cancel()

    def _lost(self, reason: str = "") -> ClusterError:
        address = self.client.scheduler.address if self.client.scheduler else ""
        return ClusterError(
            " ".join(filter(None, ["lost the scheduler", address, reason])),
            hint="start the same job again; every finished tile is kept",
        )

    def _raise_if_failed(self, node: Node, future: Any) -> None:
        from distributed import KilledWorker

        # lost: a worker died with the receipt; the scheduler runs the task again, and gathering waits for it
        if future.status in ("finished", "lost"):
            return
        if future.status == "cancelled":
            if self.client.status != "running":
                raise self._lost()
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
            raise self._lost(f"in {phase}")
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
