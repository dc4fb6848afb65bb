"""Short tasks that wait for nothing, several in one message.

A message to a worker and its receipt cost the client, the scheduler and the worker 2 to 4 ms together, on the cores
that should compute. Tasks without dependencies are therefore sent in bundles of about 1e9 flops (a tenth of a second),
and of at most the (2 threads)-th part of what remains: the first bundles are large, the last ones small, so that
workers end together. A task remains what it was: it writes its own chunk, with the same bytes in whatever bundle.

References
----------
Polychronopoulos and Kuck, Guided self-scheduling, IEEE Trans. Comput. C-36 (1987).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dkrr.engine.receipts import Node

__all__ = ["Bundle", "bundles"]

BUNDLE_FLOPS = 1e9

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
