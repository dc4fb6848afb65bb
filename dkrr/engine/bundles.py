"""What is sent next, and what goes together: short tasks that wait for nothing, several in one message.

A message to a worker and its receipt cost the client, the scheduler and the worker 2 to 4 ms together, on the cores
that should compute. Tasks without dependencies are therefore sent in bundles of about 2e9 flops (a tenth of a second),
and of at most the (2 threads)-th part of what remains: the first bundles are large, the last ones small, so that
workers end together. A task remains what it was: it writes its own chunk, with the same bytes in whatever bundle.

References
----------
Polychronopoulos and Kuck, Guided self-scheduling, IEEE Trans. Comput. C-36 (1987).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dkrr.engine.receipts import Node

__all__ = ["Bundle", "Outbox", "bundles"]

BUNDLE_FLOPS = 2e9

Bundle = tuple[Node, ...]


def bundles(nodes: Sequence[Node], num_threads: int) -> Iterator[Bundle]:
    """The nodes in their order: one by one in a graph with dependencies or of unknown flops, else in bundles."""
    if any(node.dependencies or node.flops <= 0 for node in nodes):
        yield from ((node,) for node in nodes)
        return
    remaining = sum(node.flops for node in nodes)
    bundle: list[Node] = []
    flops = 0.0
    for node in nodes:
        most = min(BUNDLE_FLOPS, remaining / (2 * num_threads))
        if bundle and flops + node.flops > most:
            yield tuple(bundle)
            remaining -= flops
            bundle, flops = [], 0.0
        bundle.append(node)
        flops += node.flops
    if bundle:
        yield tuple(bundle)


class Outbox:
    """Bundles in the order of their list, except that one that is held back lets others pass until it can be sent."""

    def __init__(self, nodes: Sequence[Node], num_threads: int) -> None:
        self._remaining = enumerate(bundles(nodes, num_threads))
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

    def finished(self, bundle: Bundle) -> None:
        """The tasks of a bundle have run."""
        self._unfinished.difference_update(node.key for node in bundle)

    def _is_ready(self, bundle: Bundle) -> bool:
        first = bundle[0]
        return not first.held_back or self._unfinished.isdisjoint(first.dependencies)
