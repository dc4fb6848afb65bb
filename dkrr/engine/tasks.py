"""Run a graph of idempotent tasks, here or on the workers of a Dask client: order, retries, progress, a watchdog.

A task is ``function(payload, *key)``: it reads finished chunks, writes one chunk atomically and returns a few numbers.
Nothing that must survive is kept in the scheduler's or a worker's memory, so any task may run twice, and a graph that
was interrupted is simply run again: tasks whose chunk is valid return at once.

The client sends what has nothing left to wait for, in the order of the list, to whichever worker is free; the scheduler
knows a few messages for every thread and no dependencies. (It would keep a task for the worker that ran what that waits
for, and short tasks that wait for the same one would run one after the other.) A message and its receipt cost client,
scheduler and worker 2 to 4 ms together, so tasks that are ready at the same time share one: about 2e9 flops, a tenth
of a second, and at most the (2 threads)-th part of all that is ready. The first messages are long and the last ones
short, so that workers end together. A task remains what it was: it writes its own chunk, with the same bytes, whatever
travels beside it.

Dask forgets a cancelled task, and a thread that is inside it goes on to the end: minutes with large tiles, in which it
would write into a store that another run may own by then. Every graph therefore has a name, :func:`stop_here` puts it
on the list of stopped ones in each worker process, and :func:`dkrr.store.interruption.check_cancelled` compares, before
every tile that is read: 0.3 us. (A file of the store costs 4 us a look on a local disk and a request elsewhere.)

References
----------
Polychronopoulos and Kuck, Guided self-scheduling, IEEE Trans. Comput. C-36 (1987).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import itertools
import logging
import queue
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dkrr.engine.configuration import timeout_seconds
from dkrr.engine.machine import peak_rss_bytes
from dkrr.errors import (
    CancelledError,
    ClusterError,
    DkrrError,
    MemoryBudgetError,
    StorageFullError,
    StoreError,
    WorkerLostError,
)
from dkrr.store.chunks import release
from dkrr.store.interruption import cancellable, check_cancelled

if TYPE_CHECKING:
    from dkrr.engine.workers import Admission, WorkerInfo

logger = logging.getLogger("dkrr.engine")
BUNDLE_FLOPS = 2e9
# a message names every one of its tasks, and stays small
BUNDLE_TASKS = 256
# messages that the scheduler knows, for each thread: one that runs, and the next ones
WINDOW = 3
GATHER_TOGETHER = 64
IO_ATTEMPTS = 3
ANSWER_SECONDS = 20.0
STOP_SECONDS = 5.0  # a driver interrupts what has not left by itself 8 s after a request
POLL_SECONDS = 0.2
_GO_ON = "start the same job again; every finished tile is kept"

Key = tuple[int, ...]
Progress = Callable[[str, int, int, float, float], None]
"""``progress(phase, done, total, flops_done, flops_total)``."""
TaskFunction = Callable[..., "tuple[bool, dict[str, Any]] | bool"]


@dataclass(frozen=True, slots=True)
class Node:
    """One task: its key, the keys it waits for (all earlier in the list), and its flops.

    ``shares``: it may travel in one message with others that are ready, if its flops say how long it takes.
    """

    key: Key
    dependencies: tuple[Key, ...] = ()
    flops: float = 0.0
    shares: bool = True


Bundle = tuple[Node, ...]


@dataclass
class RunSummary:
    """What a graph, some of its tasks, or one task did; the receipt of a message is one, too.

    ``busy_seconds`` are those of tasks that computed something, ``peak_rss_bytes`` are by worker, ``values`` by task.
    """

    seconds: float = 0.0
    num_tasks: int = 0
    num_computed: int = 0
    flops_computed: float = 0.0
    busy_seconds: float = 0.0
    peak_rss_bytes: dict[str, int] = field(default_factory=dict)
    values: dict[Key, dict[str, Any]] = field(default_factory=dict)

    def merge(self, other: RunSummary) -> None:
        """Add the figures of other tasks of the same or another graph."""
        for name in ("seconds", "num_tasks", "num_computed", "flops_computed", "busy_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for worker, peak in other.peak_rss_bytes.items():
            self.peak_rss_bytes[worker] = max(self.peak_rss_bytes.get(worker, 0), peak)
        self.values.update(other.values)


class Reporter:
    """Counts finished tasks and flops, and tells ``progress``."""

    def __init__(self, phase: str, nodes: Sequence[Node], progress: Progress | None) -> None:
        self.phase, self.progress, self.done, self.flops_done = phase, progress, 0, 0.0
        self.total, self.flops_total = len(nodes), sum(node.flops for node in nodes)
        self.report()

    def finished(self, node: Node) -> None:
        self.done += 1
        self.flops_done += node.flops
        self.report()

    def report(self) -> None:
        if self.progress is not None:
            self.progress(self.phase, self.done, self.total, self.flops_done, self.flops_total)


class Queue:
    """Nodes that have nothing left to wait for, the first of the list first, and those that still wait."""

    def __init__(self, nodes: Sequence[Node], num_threads: int) -> None:
        self.nodes, self.num_threads = nodes, num_threads
        self.rank = {node.key: rank for rank, node in enumerate(nodes)}
        self._waits, self._ready, self._flops = [0] * len(nodes), list[int](), 0.0
        self._followers: dict[Key, list[int]] = defaultdict(list)
        for rank, node in enumerate(nodes):
            before = set(node.dependencies)
            self._waits[rank] = len(before)
            for key in before:
                self._followers[key].append(rank)
            if not before:
                self._push(rank)

    def _push(self, rank: int) -> None:
        heapq.heappush(self._ready, rank)
        self._flops += self.nodes[rank].flops

    def take(self) -> Bundle:
        """What goes into the next message; nothing where all that is left waits."""
        most = min(BUNDLE_FLOPS, self._flops / (2 * self.num_threads))
        bundle: list[Node] = []
        flops = 0.0
        while self._ready and len(bundle) < BUNDLE_TASKS:
            node = self.nodes[self._ready[0]]
            alone = not all(other.shares and other.flops > 0 for other in (node, *bundle[:1]))
            if bundle and (alone or flops + node.flops > most):
                break
            heapq.heappop(self._ready)
            bundle.append(node)
            flops += node.flops
        self._flops -= flops
        return tuple(bundle)

    def finished(self, bundle: Bundle) -> None:
        """Its tasks have run: what waited for them alone is ready."""
        for node in bundle:
            for rank in self._followers.pop(node.key, ()):
                self._waits[rank] -= 1
                if not self._waits[rank]:
                    self._push(rank)

    def put_back(self, bundle: Bundle) -> None:
        """It has to be sent once more."""
        for node in bundle:
            self._push(self.rank[node.key])


# --- where a task runs ------------------------------------------------------------------------------------------------


def run_task(function: TaskFunction, payload: Any, key: Key, flops: float = 0.0) -> RunSummary:
    """Run one task where it is: retry input and output errors, translate memory errors, say what it did."""
    started = time.perf_counter()
    for attempt in itertools.count(1):
        try:
            outcome = function(payload, *key)
            break
        except DkrrError:
            raise
        except OSError as exc:
            if attempt < IO_ATTEMPTS:
                logger.warning("task %s: %s; attempt %d of %d", key, exc, attempt + 1, IO_ATTEMPTS)
                time.sleep(0.05 * 4**attempt)
                continue
            kind: type[DkrrError] = StoreError
            text, hint = f"task {key} cannot use its storage ({exc})", "check the device"
            if exc.errno == errno.ENOSPC:
                remaining = getattr(payload, "remaining_bytes", None)
                left = f"(about {remaining():,} bytes are still to be written)" if callable(remaining) else "its chunk"
                kind, hint = StorageFullError, "free that much"
                text = f"no space left on device while task {key} wrote {left}"
            raise kind(text, hint=f"{hint} and start again; everything finished so far is kept") from exc
        except MemoryError as exc:
            tile_size = int(getattr(getattr(payload, "grid", None), "tile_size", 0))
            raise MemoryBudgetError(
                f"task {key} ran out of memory with tiles of {tile_size}",
                hint=f"set tile_size = {max(1, tile_size // 2)} or raise memory_limit",
                tile_size=tile_size,
            ) from exc
    done, values = outcome if isinstance(outcome, tuple) else (outcome, {})
    try:
        from distributed import get_worker

        worker = str(get_worker().address)
    except (ImportError, ValueError):
        worker = "this process"
    busy, peak = done * (time.perf_counter() - started), {worker: peak_rss_bytes()}
    return RunSummary(0.0, 1, int(done), done * flops, busy, peak, {key: values} if values else {})


_lock = threading.Lock()
_stopped: set[str] = set()  # names of graphs; a process sees a few thousand
_running: Counter[str] = Counter()


def run_tasks(function: TaskFunction, payload: Any, tasks: Sequence[tuple[Key, float]], graph: str) -> RunSummary:
    """Run the tasks of a message, keys and flops, one by one; what they have written stays when a later one fails.

    Raises
    ------
    CancelledError
        The graph is stopped, or was before.
    """
    summary = RunSummary()
    with _lock:
        _running[graph] += 1
    try:
        with cancellable(lambda: graph in _stopped):
            for key, flops in tasks:
                check_cancelled()
                summary.merge(run_task(function, payload, key, flops))
    finally:
        with _lock:
            _running.subtract([graph])
    return summary


async def stop_here(graph: str, seconds: float = 0.0) -> int:
    """Stop the tasks of a graph in this process; the number of them that are still running after so many seconds."""
    deadline = time.monotonic() + seconds
    _stopped.add(graph)
    while _running[graph] and time.monotonic() + POLL_SECONDS < deadline:
        await asyncio.sleep(POLL_SECONDS)
    return _running[graph]


# --- who has them run -------------------------------------------------------------------------------------------------


class InProcessExecutor:
    """Runs the tasks of a graph one after the other in this process.

    ``cancelled()`` is asked between tasks, about once a second; when it says yes, the graph that runs ends with
    :class:`~dkrr.errors.CancelledError`, and so does every later one. None: nobody can ask.
    """

    num_threads = 1
    workers: Sequence[WorkerInfo] = ()
    cancelled: Callable[[], bool] | None = None

    def run(
        self,
        phase: str,
        function: TaskFunction,
        payload: Any,
        nodes: Sequence[Node],
        progress: Progress | None = None,
    ) -> RunSummary:
        summary, reporter, started = RunSummary(), Reporter(phase, nodes, progress), time.perf_counter()

        def one(node: Node) -> RunSummary:
            check_cancelled()
            return run_task(function, payload, node.key, node.flops)

        with cancellable(self.cancelled), contextlib.closing(self._receipts(one, nodes)) as receipts:
            for node, receipt in zip(nodes, receipts, strict=True):
                summary.merge(receipt)
                reporter.finished(node)
        summary.seconds = time.perf_counter() - started
        return summary

    def _receipts(self, one: Callable[[Node], RunSummary], nodes: Sequence[Node]) -> Generator[RunSummary]:
        yield from map(one, nodes)


class ThreadExecutor(InProcessExecutor):
    """Runs tasks that wait for no others on so many threads of this process; tells of them in the order of the list."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads

    def _receipts(self, one: Callable[[Node], RunSummary], nodes: Sequence[Node]) -> Generator[RunSummary]:
        contexts = [copy_context() for _ in nodes]  # which know who may cancel
        with ThreadPoolExecutor(self.num_threads) as pool:
            yield from pool.map(lambda context, node: context.run(one, node), contexts, nodes)


@dataclass(frozen=True)
class _Message:
    """Tasks that were sent together, what will tell of them, and the workers that may run them, if not all."""

    bundle: Bundle
    future: Any
    allowed: Sequence[str]


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

        Raises
        ------
        CancelledError
            ``cancelled()`` said so. Tasks stop at their next look, between two tile products; a product may take
            seconds, and is waited for.
        ClusterError
            The scheduler is lost or silent, no worker that may be used is there, or nothing has moved for a long time.
        """
        self._look()
        summary, reporter = RunSummary(), Reporter(phase, nodes, progress)
        num_threads, graph = self.num_threads, f"{phase}-{uuid.uuid4().hex}"
        waiting, numbers = Queue(nodes, num_threads), itertools.count()
        answers: queue.SimpleQueue[int] = queue.SimpleQueue()
        sent: dict[int, _Message] = {}
        ungathered: list[_Message] = []

        def again(bundle: Bundle) -> _Message:  # before all others: nothing waits for it but its receipts
            return self._send(bundle, graph, next(numbers), len(nodes), function, payload)

        started = last_progress = time.monotonic()
        try:
            while True:
                while len(sent) < WINDOW * num_threads and (bundle := waiting.take()):
                    number = next(numbers)
                    sent[number] = self._send(bundle, graph, number, -waiting.rank[bundle[0].key], function, payload)
                    sent[number].future.add_done_callback(lambda _, number=number: answers.put(number))
                if not sent:
                    break
                self._look()
                try:
                    message = sent.pop(answers.get(timeout=1.0), None)
                except queue.Empty:
                    self._check_alive(phase, last_progress, len(sent))
                    for number in [number for number, message in sent.items() if self._is_stranded(message)]:
                        self.client.cancel([sent[number].future], force=True)
                        waiting.put_back(sent.pop(number).bundle)
                    continue
                if message is None:  # it was sent once more, to others
                    continue
                last_progress = time.monotonic()
                ungathered.append(message)
                self._raise_if_failed(message)
                waiting.finished(message.bundle)
                for node in message.bundle:
                    reporter.finished(node)
                if len(ungathered) == GATHER_TOGETHER:
                    self._gather(ungathered, summary, again)
            self._gather(ungathered, summary, again)
        except BaseException as error:
            futures = [message.future for message in (*sent.values(), *ungathered)]
            self._abandon(graph, futures, wait=isinstance(error, CancelledError))
            raise
        if reporter.done < len(nodes):
            raise ClusterError(f"{phase}: {len(nodes) - reporter.done:,} tasks wait for others that are not there")
        summary.seconds = time.monotonic() - started
        return summary

    def _send(
        self, bundle: Bundle, graph: str, number: int, priority: int, function: TaskFunction, payload: Any
    ) -> _Message:
        allowed = [] if self.admission is None else self.admission.choose()
        future = self.client.submit(
            run_tasks,
            function,
            payload,
            [(node.key, node.flops) for node in bundle],
            graph,
            key=(graph, number, *bundle[0].key),
            priority=priority,
            pure=False,
            workers=allowed or None,
            allow_other_workers=False,
        )
        return _Message(bundle, future, allowed)

    def _is_stranded(self, message: _Message) -> bool:
        """Whether it is for workers that are all gone, where others have taken their place."""
        admission = self.admission
        return admission is not None and bool(admission.present) and not admission.can_run(message.allowed)

    def _abandon(self, graph: str, running: list[Any], *, wait: bool) -> None:
        """End a graph on the workers as well: its threads would go on writing for as long as a task takes."""
        if self.client.status == "running":
            self.client.cancel(running, force=True)
            left = self._on_workers(stop_here, graph, STOP_SECONDS if wait else 0.0)
            if wait and sum(left.values()):
                logger.warning("%d tasks of %s are still inside a product", sum(left.values()), graph)

    def _on_workers(self, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """Run something on the event loop of every worker; what those that are there say within some seconds."""
        present = None if self.admission is None else self.admission.present
        with contextlib.suppress(Exception):  # a scheduler or worker that is gone runs and keeps nothing
            if self.client.status == "running":
                return dict(
                    self.client.run(
                        function, *arguments, workers=present, on_error="ignore", callback_timeout=STOP_SECONDS + 2.0
                    )
                )
        return {}

    def release(self) -> None:
        """Let the workers give back the memory that they keep for tasks to come; waits for at most some seconds."""
        self._on_workers(release)

    def _look(self) -> None:
        """Keep up with requests to end, and with the workers."""
        if self.cancelled is not None and self.cancelled():
            raise CancelledError("cancelled on request", hint="resume it: it continues with what is finished")
        if self.admission is not None:
            self.admission.look()

    def _gather(self, finished: list[_Message], summary: RunSummary, again: Callable[[Bundle], _Message]) -> None:
        """Fetch receipts, many in one message: one at a time they cost the client more than all else.

        Those that went with the last worker that might have run their tasks are made ``again``, by others.
        """
        gathered = None
        while gathered is None:
            for k, message in enumerate(finished):
                if self._is_stranded(message):
                    self.client.cancel([message.future], force=True)
                    finished[k] = again(message.bundle)
            futures = [message.future for message in finished]
            answer: Coroutine[Any, Any, Any] = self.client.gather(futures, errors="skip", asynchronous=True)
            gathered = self._wait_for(answer, lambda: any(map(self._is_stranded, finished)))
        if len(gathered) != len(finished):  # a worker died with its receipts, and the task that ran again failed
            for message in finished:
                self._raise_if_failed(message)
            raise ClusterError("receipts of finished tasks were lost", hint="start the same job again")
        for receipt in gathered:
            summary.merge(receipt)
        finished.clear()

    def _wait_for(self, answer: Coroutine[Any, Any, Any], is_vain: Callable[[], bool]) -> Any:
        """The answer to a request, or None; a scheduler that is silent or gone does not hold us up for ever."""
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
                self._look()
                if is_vain():
                    return None
        finally:
            future.cancel()

    # --- what goes wrong, in words ------------------------------------------------------------------------------------

    def _lost(self, reason: str = "") -> ClusterError:
        address = self.client.scheduler.address if self.client.scheduler else ""
        return ClusterError(" ".join(filter(None, ["lost the scheduler", address, reason])), hint=_GO_ON)

    def _raise_if_failed(self, message: _Message) -> None:
        """Raise what a task raised, or what became of it."""
        from distributed import KilledWorker

        key, future = message.bundle[0].key, message.future
        # lost: a worker died with the receipt; the scheduler runs the task again, and gathering waits for it
        if future.status in ("finished", "lost"):
            return
        if future.status == "cancelled":
            if self.client.status != "running":
                raise self._lost()
            raise ClusterError(f"the scheduler dropped task {key} ({future.status})", hint=_GO_ON)
        error = future.exception()
        if isinstance(error, KilledWorker):
            attempts = int(getattr(error, "allowed_failures", 3)) + 1
            raise WorkerLostError(
                f"task {key} was running on workers that died {attempts} times",
                hint="usually memory: lower tile_size or raise memory_limit; finished tiles are kept",
                key=key,
            ) from error
        raise error

    def _check_alive(self, phase: str, last_progress: float, num_sent: int) -> None:
        """The watchdog: name what runs when nothing has finished for too long."""
        if self.client.status != "running":
            raise self._lost(f"in {phase}")
        stalled = time.monotonic() - last_progress
        if stalled > self.stall_seconds:
            processing = self.client.processing()
            names = {worker: [str(key) for key in keys][:3] for worker, keys in processing.items() if keys}
            raise ClusterError(
                f"no task of {phase} finished for {stalled:.0f} s; running: {names or 'nothing'}, "
                f"{num_sent} submitted, {len(processing)} workers",
                hint="look at the workers' logs; start the same job again to continue",
            )


Executor = InProcessExecutor | DaskExecutor
"""Runs graphs. ``num_threads`` is the number of tasks that can run at once."""
