"""Which workers may get tasks: those that passed the start-up check, and those that join later and are equal to them.

The scheduler hands tasks to whoever is there, so on a scheduler that dkrr did not start every task names the workers
that may run it. A worker that joins late (or was restarted by its nanny, which gives it another address) is described
as at the start: an equal one takes part from then on, another one is named in ``refused`` and gets no task.

A task names at most 64 workers, another 64 every time: with a choice among so many the shortest queue is as short as
among all (Mitzenmacher), and the message stays below 2 kB on any number of workers.

Cost: one small message a second to the scheduler, which also tells that the scheduler is alive; nothing waits for it.

References
----------
Mitzenmacher, The power of two choices in randomized load balancing, IEEE Trans. Parallel Distrib. Syst. 12 (2001).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

from dkrr.engine.checks import WorkerInfo, describe_workers, difference
from dkrr.engine.configuration import timeout_seconds
from dkrr.engine.probe import challenge
from dkrr.errors import ClusterError, DkrrError

__all__ = ["Admission"]

logger = logging.getLogger("dkrr.engine.admission")

SURVEY_SECONDS = 1.0
SILENT_SECONDS = 20.0
AWAY_SECONDS = 5.0
ANSWER_SECONDS = 30.0
ASK_AGAIN_SECONDS = 60.0
MOST_NAMED = 64


class Admission:
    """The workers of a scheduler that others run, as far as a fit may use them.

    Parameters
    ----------
    client
        A synchronous ``distributed.Client``.
    workers
        Those that passed the start-up check; none of them means that there is nothing to compare with, an error.
    store
        Where late workers must be able to read and write, as in :func:`dkrr.engine.checks.check_workers`.

    Attributes
    ----------
    workers : list of WorkerInfo
        Admitted; also those that have left since, as the last survey may be a second old.
    refused : list of dict
        ``{"address", "name", "reason"}`` of workers that are there and get no task.
    """

    def __init__(self, client: Any, workers: Sequence[WorkerInfo], *, store: Any = None) -> None:
        if not workers:
            raise ClusterError("no worker has been checked", hint="start some first")
        self.client, self.store = client, store
        self.workers: list[WorkerInfo] = list(workers)
        self.refused: list[dict[str, str]] = []
        self._reference = workers[0]
        self._needed_bytes = 0
        self._empty_seconds = timeout_seconds("no-workers")
        self._there: dict[str, int] = {worker.address: worker.threads for worker in workers}
        self._allowed = sorted(self._there)
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._ask_again: dict[str, float] = {}
        self._survey: concurrent.futures.Future[None] | None = None
        self._surveyed = self._answered = self._looked = self._last_worker = time.monotonic()
        self._random = random.Random(0)  # noqa: S311  (spreads load)

    @property
    def num_threads(self) -> int:
        """Tasks that the admitted workers run at once, as of the last survey; at least 1."""
        return max(1, sum(self._there.get(address, 0) for address in self._allowed))

    def require_memory(self, bytes_per_thread: int) -> None:
        """Refuse workers that could not hold a task: they would be killed again and again.

        Raises
        ------
        ClusterError
            One of the present workers is too small.
        """
        self._needed_bytes = bytes_per_thread
        for worker in self.workers:
            if reason := self._too_small(worker):
                raise ClusterError(
                    f"worker {worker.address}: {reason}",
                    hint="start workers with more memory, or set [cluster] memory_limit or [solver] tile_size",
                )

    def choose(self) -> list[str]:
        """Addresses that the next task may run on."""
        if len(self._allowed) <= MOST_NAMED:
            return self._allowed
        return self._random.sample(self._allowed, MOST_NAMED)

    def can_run(self, addresses: Iterable[str]) -> bool:
        """Whether a task that names ``addresses`` can still be run, as of the last survey."""
        return any(address in self._there for address in addresses)

    @property
    def present(self) -> list[str]:
        """Addresses of the admitted workers that are there, as of the last survey."""
        return [address for address in self._allowed if address in self._there]

    @property
    def is_empty(self) -> bool:
        """Whether no admitted worker is there."""
        return not self.can_run(self._allowed)

    def look(self) -> None:
        """Keep up with who is there; never waits. To be called now and then while tasks run.

        Raises
        ------
        ClusterError
            The scheduler has not answered for 20 s, or no worker that may be used has been there for as long as
            ``dkrr.timeouts.no-workers`` says, a minute where it says nothing.
        """
        now = time.monotonic()
        if now - self._looked > AWAY_SECONDS:  # this process was busy elsewhere, or stopped: that is no silence
            self._answered = self._last_worker = now
        self._looked = now
        if not self.is_empty:
            self._last_worker = now
        elif now - self._last_worker > self._empty_seconds:
            refused = "; ".join(f"{entry['address']}: {entry['reason']}" for entry in self.refused)
            raise ClusterError(
                f"no worker that may be used has been there for {self._empty_seconds:.0f} s"
                + (f" (refused: {refused})" if refused else ""),
                hint="start workers, then start the same job again; every finished tile is kept",
            )
        if self._survey is None or self._survey.done():
            if now - self._surveyed >= SURVEY_SECONDS:
                self._surveyed = now
                self._survey = asyncio.run_coroutine_threadsafe(self._look(), self.client.loop.asyncio_loop)
        elif now - self._answered > SILENT_SECONDS:
            raise ClusterError(
                f"the scheduler {self.client.scheduler.address} has not answered for {now - self._answered:.0f} s",
                hint="look at its process and the network; start the same job again, every finished tile is kept",
            )

    async def _look(self) -> None:
        there: dict[str, int] = await self.client.nthreads(asynchronous=True)
        self._answered, self._there = time.monotonic(), there
        known = {worker.address for worker in self.workers}
        if not known <= there.keys():  # a worker that comes back is another process, even at its old address
            self._admit(worker for worker in self.workers if worker.address in there)
        self.refused = [entry for entry in self.refused if entry["address"] in there]
        settled = known | {entry["address"] for entry in self.refused} | self._asking.keys()
        again = {address for address, due in self._ask_again.items() if due < self._answered and address in there}
        for address in (there.keys() - settled) | (again - self._asking.keys()):
            self._ask_again.pop(address, None)
            self._asking[address] = asyncio.ensure_future(self._ask(address))

    async def _ask(self, address: str) -> None:
        try:
            name, reason = "", ""
            try:
                worker = await self._describe(address)
            except DkrrError as exc:
                reason = exc.message
                self._ask_again[address] = time.monotonic() + ASK_AGAIN_SECONDS
            else:
                name = worker.name
                reason = difference(self._reference, worker) or self._too_small(worker)
            self.refused = [entry for entry in self.refused if entry["address"] != address]
            if reason:
                self._refuse(address, name, reason)
            elif address in self._there:
                logger.info("worker %s takes part", address)
                self._admit([*self.workers, worker])
        except OSError as exc:  # the scheduler is gone: the next survey says so
            logger.debug("worker %s could not be asked (%s)", address, exc)
        finally:
            self._asking.pop(address, None)

    async def _describe(self, address: str) -> WorkerInfo:
        # the object for the worker to find is written in a thread: a slow store must not hold up this client
        context = challenge(self.store)
        asked = await asyncio.to_thread(context.__enter__)
        try:
            (worker,) = await describe_workers(self.client, [address], ANSWER_SECONDS, asked)
        finally:
            await asyncio.to_thread(context.__exit__, None, None, None)
        return worker

    def _too_small(self, worker: WorkerInfo) -> str:
        limit = worker.memory_limit_bytes
        if not limit or not self._needed_bytes or limit // max(1, worker.threads) >= self._needed_bytes:
            return ""
        return f"it may use {limit // max(1, worker.threads):,} bytes a thread, a task needs {self._needed_bytes:,}"

    def _admit(self, workers: Iterable[WorkerInfo]) -> None:
        self.workers = list(workers)
        self._allowed = sorted(worker.address for worker in self.workers)

    def _refuse(self, address: str, name: str, reason: str) -> None:
        logger.warning("worker %s (%s) gets no task: %s", address, name, reason)
        self.refused = [*self.refused, {"address": address, "name": name, "reason": reason}]
