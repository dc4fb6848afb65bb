"""Fence: who writes asks first whether the run is still his.

A driver that was stopped (a laptop asleep, a process with SIGSTOP) may wake up when another driver has taken over its
run, or its lock. ``with fenced(check)`` names the question for the code inside, and whatever writes something that is
not a tile calls :func:`check_fence` right before the write becomes visible. Tiles need none: two drivers write the same
bytes.

Outside such a block, and in worker processes, nothing is asked. Cost of a check: 0.1 us, and what ``check()`` costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

__all__ = ["check_fence", "fence_holder", "fenced"]


@dataclass(frozen=True)
class _Fence:
    check: Callable[[], None]
    holder: Mapping[str, Any]


_fence: ContextVar[_Fence | None] = ContextVar("dkrr_fence", default=None)


@contextmanager
def fenced(check: Callable[[], None], *, holder: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Have :func:`check_fence` call ``check()`` in this thread while the block runs, after that of the fence around it.

    Parameters
    ----------
    check
        Raises :class:`~dkrr.errors.LockedError` when somebody else owns by now what is written here.
    holder
        ``run`` and ``epoch`` of the owner, for locks: those of an earlier epoch of the same run are void.
    """
    outer = _fence.get()

    def both() -> None:
        if outer is not None:
            outer.check()
        check()

    token = _fence.set(_Fence(both, dict(holder or {})))
    try:
        yield
    finally:
        _fence.reset(token)


def check_fence() -> None:
    """Ask, where there is somebody to ask, whether this thread may still write.

    Raises
    ------
    LockedError
        It may not.
    """
    fence = _fence.get()
    if fence is not None:
        fence.check()


def fence_holder() -> dict[str, Any]:
    """``run`` and ``epoch`` of the owner behind the fence; empty without one."""
    fence = _fence.get()
    return {} if fence is None else dict(fence.holder)
