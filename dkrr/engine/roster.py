"""Which workers a scheduler has, asked of the scheduler itself.

``Client.scheduler_info`` stores the answer in the client and returns what is stored there; a periodic task of the same
client stores an answer without workers into the same place every two seconds. Between the two, a cluster of any size
has been seen as one without workers.
"""

from __future__ import annotations

from typing import Any

__all__ = ["roster"]


def roster(client: Any) -> dict[str, dict[str, Any]]:
    """``{address: what the scheduler knows of the worker}``; one round trip.

    Raises
    ------
    OSError
        The scheduler does not answer.
    """
    identity = client.sync(client.scheduler.identity, n_workers=-1)
    workers: dict[str, dict[str, Any]] = identity["workers"]
    return workers
