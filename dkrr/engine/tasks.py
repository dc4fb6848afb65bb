"""Run a graph of idempotent tasks: a bounded window of submitted tasks, priorities, retries, progress, a watchdog.

A task is ``function(payload, *key) -> Receipt``: it reads finished chunks, writes one chunk atomically and returns a
few numbers. Nothing that must survive is kept in the scheduler's or a worker's memory, so any task may run twice, and a
graph that was interrupted is simply run again: tasks whose chunk is valid return at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from dkrr.engine.bundles import Bundle, Outbox, window_of
from dkrr.engine.configuration import timeout_seconds
from dkrr.engine.failures import check_alive, lost_scheduler, never_ready, raise_if_failed
from dkrr.engine.receipts import Key, Node, Progress, Receipt, Reporter, RunSummary
from dkrr.engine.running import TaskFunction, run_task, run_tasks
from dkrr.engine.stopping import stop_graph
from dkrr.errors import CancelledError, ClusterError
from dkrr.store.chunks import release
from dkrr.store.interruption import cancellable, check_cancelled

if TYPE_CHECKING:
    from dkrr.engine.admission import Admission
    from dkrr.engine.checks import WorkerInfo

__all__ = ["DaskExecutor", "Executor", "InProcessExecutor", "Node", "Progress", "Receipt", "RunSummary", "run_task"]

logger = logging.getLogger("dkrr.engine")

GATHER_TOGETHER = 64
WINDOW_OF_INDEPENDENT = 3
ANSWER_SECONDS = 20.0
STOP_SECONDS = 5.0  # a driver interrupts what has not left by itself 8 s after a request


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
        reporter = Reporter(phase, nodes, progress)
        started = time.perf_counter()
        with cancellable(self.cancelled):
            for node in nodes:
                check_cancelled()
                receipt = run_task(function, payload, node.key)
                summary.add(receipt, node)
                reporter.finished(node)
        summary.seconds = time.perf_counter() - started
        return summary


class _StrandedError(Exception):
    """Tasks were submitted for workers that are all gone, and others have taken their place."""


class DaskExecutor:
    """Runs graphs on the workers of a Dask client.

    Parameters
    ----------
    client
        A connected ``distributed.Client``; never closed here.
    stall_seconds
        The watchdog: when no task finishes for this long, the tasks that run are named in a ``ClusterError``. None
        means what ``dkrr.timeouts.stall`` says, 600 s where it says nothing.
    admission
        Which workers may get tasks; None means all, for a cluster that dkrr started itself.
    workers
        What the start-up check found, where there is no admission.
    """

    def __init__(
        self,
        client: Any,
        *,
        stall_seconds: float | None = None,
        admission: Admission | None = None,
        workers: Sequence[WorkerInfo] = (),
    ) -> None:
        self.client = client
        self.stall_seconds = timeout_seconds("stall") if stall_seconds is None else stall_seconds
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
            raise lost_scheduler(self.client, f"({exc or 'no answer'})") from exc

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
        reporter = Reporter(phase, nodes, progress)
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
        reporter: Reporter,
        done: set[Key],
    ) -> None:
        num_threads = self.num_threads
        window = window_of(num_threads)
        if self.admission is not None and not any(node.dependencies for node in nodes):
            # the scheduler hands a task that names its workers out at once, and keeps none back for who is free first
            window = WINDOW_OF_INDEPENDENT * num_threads
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
                    if not outbox.is_empty:
                        raise never_ready(phase, outbox.held_back)
                    break
                self._check_cancelled()
                try:
                    bundle, future = finished.get(timeout=1.0)
                except queue.Empty:
                    check_alive(self.client, phase, last_progress, self.stall_seconds, len(running))
                    self._check_workers(allowed.values())
                    continue
                self._check_workers(())
                last_progress = time.monotonic()
                first = bundle[0]
                raise_if_failed(self.client, first, future)
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

    def release(self) -> None:
        """Let the workers give back the memory that they keep for tasks to come; waits for at most some seconds."""
        with contextlib.suppress(Exception):  # a scheduler or worker that is gone keeps nothing
            if self.client.status == "running":
                workers = None if self.admission is None else self.admission.present
                self.client.run(release, workers=workers, on_error="ignore", callback_timeout=STOP_SECONDS)

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
                raise_if_failed(self.client, bundle[0], future)
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
                    raise lost_scheduler(self.client)
                self._check_cancelled()
                self._check_workers(())
        finally:
            future.cancel()
