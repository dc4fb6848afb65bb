"""What a graph of tasks consists of, and what is known of it when it has run: plain data, for every executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Key", "Node", "Progress", "Receipt", "Reporter", "RunSummary"]

Key = tuple[int, ...]
Progress = Callable[[str, int, int, float, float], None]
"""``progress(phase, done, total, flops_done, flops_total)``."""


@dataclass(frozen=True, slots=True)
class Node:
    """One task: its key, the keys it waits for (all earlier in the list), and its flops.

    ``shares``: it may travel in one message with others beside it in the list, if they do not wait for each other and
    are short. Its flops then have to say how long it takes. (Graphs in which nothing waits need no such word.)

    ``held_back``: it is sent when everything it waits for has finished, to whichever worker is free. The scheduler
    would keep it for the worker that ran what it waits for, and short tasks that wait for the same one would then run
    one after the other. Costs a few milliseconds, in which nothing is in the worker's queue.
    """

    key: Key
    dependencies: tuple[Key, ...] = ()
    flops: float = 0.0
    held_back: bool = False
    shares: bool = False


@dataclass(frozen=True)
class Receipt:
    """What a task returns: whether it computed anything, its seconds, a few numbers, its process' peak memory."""

    key: Key
    computed: bool
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)
    worker: str = ""
    peak_rss_bytes: int = 0


@dataclass
class RunSummary:
    """What a graph run did."""

    seconds: float = 0.0
    num_tasks: int = 0
    num_computed: int = 0
    flops_computed: float = 0.0
    busy_seconds: float = 0.0
    peak_rss_bytes: dict[str, int] = field(default_factory=dict)
    values: dict[Key, dict[str, Any]] = field(default_factory=dict)

    def add(self, receipt: Receipt, node: Node) -> None:
        self.num_tasks += 1
        if receipt.computed:
            self.num_computed += 1
            self.flops_computed += node.flops
            self.busy_seconds += receipt.seconds
        peak = self.peak_rss_bytes.get(receipt.worker, 0)
        self.peak_rss_bytes[receipt.worker] = max(peak, receipt.peak_rss_bytes)
        if receipt.values:
            self.values[receipt.key] = receipt.values

    def merge(self, other: RunSummary) -> None:
        """Add the figures of another run of the same or another graph."""
        self.seconds += other.seconds
        self.num_tasks += other.num_tasks
        self.num_computed += other.num_computed
        self.flops_computed += other.flops_computed
        self.busy_seconds += other.busy_seconds
        for worker, peak in other.peak_rss_bytes.items():
            self.peak_rss_bytes[worker] = max(self.peak_rss_bytes.get(worker, 0), peak)
        self.values.update(other.values)


class Reporter:
    """Counts finished tasks and flops, and tells ``progress``."""

    def __init__(self, phase: str, nodes: Sequence[Node], progress: Progress | None) -> None:
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
