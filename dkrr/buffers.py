"""Memory for chunks on their way from a store, used again and again.

A fresh buffer of 32 MiB costs eight thousand page faults; a factorisation reads thousands of tiles of one size. A
buffer goes back when nobody refers to it any more, so its content may be handed out as an array and forgotten.

What a process keeps between tasks, here and elsewhere, it gives back when it is told to (:func:`release`): workers that
others run are told at the end of a fit.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["lend", "on_release", "release"]

KEPT_BUFFERS = 4

# appends and pops of a deque are atomic, and a buffer may come back in the middle of any statement of any thread
_free: deque[Any] = deque(maxlen=KEPT_BUFFERS)
_kept_elsewhere: list[Callable[[], object]] = []


def on_release(forget: Callable[[], object]) -> None:
    """Call ``forget`` when this process shall give back memory that it keeps; a task that uses some goes on with it."""
    _kept_elsewhere.append(forget)


def release() -> None:
    """Give back all memory that this process keeps for tasks to come."""
    _free.clear()
    for forget in _kept_elsewhere:
        forget()


def lend(num_bytes: int) -> Any:
    """A writable object of ``num_bytes`` with the buffer interface; its memory is used again when it is gone.

    Views of it (``memoryview``, ``numpy.frombuffer``) keep it alive.
    """
    storage = None
    for _ in range(len(_free)):
        try:
            candidate = _free.popleft()
        except IndexError:  # another thread was first
            break
        if candidate.size == num_bytes:
            storage = candidate
            break
        _free.append(candidate)
    if storage is None:
        storage = np.empty(num_bytes, dtype=np.uint8)
    buffer: Any = storage
    lent = (ctypes.c_char * num_bytes).from_buffer(buffer)
    weakref.finalize(lent, _free.append, storage).atexit = False
    return lent
