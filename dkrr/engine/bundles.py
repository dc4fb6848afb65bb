"""What is sent next, and what goes together: short tasks that do not wait for each other, several in one message.

A message to a worker and its receipt cost the client, the scheduler and the worker 2 to 4 ms together, on the cores
that should compute. Tasks without dependencies are therefore sent in bundles of about 2e9 flops (a tenth of a second),
and of at most the (2 threads)-th part of what remains: the first bundles are large, the last ones small, so that
workers end together. A task remains what it was: it writes its own chunk, with the same bytes in whatever bundle.

In a graph with dependencies the list is cut into runs, as long as no node of a run waits for another one of it; nodes
that may share messages are bundled within a run, in bundles of at most its (2 threads)-th part. Bundles are segments of
a list in which everything comes after what it waits for, so they cannot wait for each other in a circle.

References
----------
Polychronopoulos and Kuck, Guided self-scheduling, IEEE Trans. Comput. C-36 (1987).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dkrr.engine.receipts import Key, Node

__all__ = ["Bundle", "Outbox", "bundles", "window_of"]

BUNDLE_FLOPS = 2e9
# a message names every one of its tasks, and stays small
BUNDLE_TASKS = 256

Bundle = tuple[Node, ...]


def window_of(num_threads: int) -> int:
    """How many messages the scheduler knows at once: enough to look ahead of the critical path, few enough to be cheap.

    Simulated, a window without an end is faster by less than 1 % (2 to 400 workers).
    """
    return max(32, 4 * num_threads)


def bundles(nodes: Sequence[Node], num_threads: int) -> Iterator[Bundle]:
    """The nodes in their order, in bundles; one by one where flops are unknown or a node does not share its message."""
    if any(node.flops <= 0 for node in nodes):
        yield from ((node,) for node in nodes)
    elif not any(node.dependencies for node in nodes):
        yield from _guided(nodes, num_threads)
    else:
        for run in _runs(nodes):
            most = sum(node.flops for node in run) / (2 * num_threads)
            yield from _cut(run, most)


def _guided(nodes: Sequence[Node], num_threads: int) -> Iterator[Bundle]:
    remaining = sum(node.flops for node in nodes)
    bundle: list[Node] = []
    flops = 0.0
    for node in nodes:
        most = min(BUNDLE_FLOPS, remaining / (2 * num_threads))
        if bundle and (flops + node.flops > most or len(bundle) == BUNDLE_TASKS):
            yield tuple(bundle)
            remaining -= flops
            bundle, flops = [], 0.0
        bundle.append(node)
        flops += node.flops
    if bundle:
        yield tuple(bundle)


def _runs(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """Longest segments of nodes that share messages and do not wait for each other; others one by one."""
    run: list[Node] = []
    keys: set[Key] = set()
    for node in nodes:
        if run and not (node.shares and keys.isdisjoint(node.dependencies)):
            yield run
            run, keys = [], set()
        if not node.shares:
            yield [node]
            continue
        run.append(node)
        keys.add(node.key)
    if run:
        yield run


def _cut(run: Sequence[Node], most: float) -> Iterator[Bundle]:
    """Bundles of at most ``most`` flops, and of one node at least."""
    bundle: list[Node] = []
    flops = 0.0
    for node in run:
        if bundle and (flops + node.flops > min(most, BUNDLE_FLOPS) or len(bundle) == BUNDLE_TASKS):
            yield tuple(bundle)
            bundle, flops = [], 0.0
        bundle.append(node)
        flops += node.flops
    if bundle:
        yield tuple(bundle)


class Outbox:
    """Bundles in the order of their list, except that one that is held back lets others pass until it can be sent."""

    def __init__(self, nodes: Sequence[Node], num_threads: int) -> None:
        self.bundles = list(bundles(nodes, num_threads))
        self._remaining = iter(enumerate(self.bundles))
        self._sent_with = {node.key: bundle[0].key for bundle in self.bundles for node in bundle[1:]}
        self._held_back: list[tuple[int, Bundle]] = []
        self._unfinished = {key for node in nodes if node.held_back for key in node.dependencies}
        self.is_empty = False

    def next(self) -> tuple[int, Bundle] | None:
        """Place and bundle; None when there is none, or none that can be sent now."""
        for position, (_, bundle) in enumerate(self._held_back):
            if self._is_ready(bundle):
                return self._held_back.pop(position)
        for entry in self._remaining:
            if self._is_ready(entry[1]):
                return entry
            self._held_back.append(entry)
        self.is_empty = not self._held_back
        return None

    @property
    def held_back(self) -> list[Node]:
        """What is waiting for its turn."""
        return [node for _, bundle in self._held_back for node in bundle]

    def finished(self, bundle: Bundle) -> None:
        """The tasks of a bundle have run."""
        self._unfinished.difference_update(node.key for node in bundle)

    def waits_for(self, bundle: Bundle) -> tuple[Key, ...]:
        """The bundles, each by the key of its first task, in which the tasks are that this bundle waits for."""
        sent_with = self._sent_with
        return tuple(dict.fromkeys(sent_with.get(key, key) for node in bundle for key in node.dependencies))

    def _is_ready(self, bundle: Bundle) -> bool:
        first = bundle[0]
        return not first.held_back or self._unfinished.isdisjoint(first.dependencies)
