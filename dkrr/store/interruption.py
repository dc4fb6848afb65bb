"""What ends work before it is done: a request to cancel it, another owner of what it writes, Ctrl-C and SIGTERM.

``with cancellable(cancelled):`` says for the code inside who knows of a request, and :func:`check_cancelled` asks. It
is called before every read of a chunk, so everything that works on tiles comes by it before every product, and code
that reads nothing for seconds may call it as well. What is finished is kept, what is begun is not written.

A driver that was stopped (a laptop asleep, a process with SIGSTOP) may wake up when another driver has taken over its
run, or its lock. ``with fenced(check):`` names the question whether what the code inside writes is still its own, and
whatever writes something that is not a tile calls :func:`check_fence` right before the write becomes visible. Tiles
need none: two drivers write the same bytes.

Outside such a block nothing is asked. Cost of a check: 0.2 us, and what ``cancelled()`` or ``check()`` costs.

:func:`resumable` turns signals into an error of dkrr, after which the same command continues.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from dkrr.errors import CancelledError, told

_request: ContextVar[Callable[[], bool] | None] = ContextVar("dkrr_cancelled", default=None)
# what is asked before a write becomes visible, from the outermost fence to the innermost, and who owns the latter
_checks: ContextVar[tuple[Callable[[], None], ...]] = ContextVar("dkrr_fence", default=())
_holder: ContextVar[Mapping[str, Any] | None] = ContextVar("dkrr_holder", default=None)

T = TypeVar("T")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def cancellable(cancelled: Callable[[], bool] | None) -> contextlib.AbstractContextManager[None]:
    """Have :func:`check_cancelled` ask ``cancelled()`` in this thread while the block runs; None changes nothing."""
    return _set(_request, cancelled or _request.get())


def check_cancelled() -> None:
    """Stop here when a cancellation was requested.

    Raises
    ------
    CancelledError
        It was.
    """
    cancelled = _request.get()
    if cancelled is not None and cancelled():
        raise CancelledError("cancelled on request", hint="resume it: it continues with what is finished")


@contextlib.contextmanager
def fenced(check: Callable[[], None], *, holder: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Have :func:`check_fence` call ``check()`` in this thread while the block runs, after that of the fence around it.

    Parameters
    ----------
    check
        Raises :class:`~dkrr.errors.LockedError` when somebody else owns by now what is written here.
    holder
        ``run`` and ``epoch`` of the owner, for locks: those of an earlier epoch of the same run are void. By default
        that of the fence around it.
    """
    with _set(_checks, (*_checks.get(), check)), _set(_holder, _holder.get() if holder is None else holder):
        yield


def check_fence() -> None:
    """Ask, where there is somebody to ask, whether this thread may still write.

    Raises
    ------
    LockedError
        It may not.
    """
    for check in _checks.get():
        check()


def fence_holder() -> dict[str, Any]:
    """``run`` and ``epoch`` of the owner behind the fence; empty without one."""
    return dict(_holder.get() or {})


def _interrupt(*_: Any) -> None:
    # the requests that are under way are abandoned, and asyncio would print a traceback for each
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    raise KeyboardInterrupt


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into :class:`~dkrr.errors.InterruptedRunError` (exit code 75), after the clean-up.

    Batch systems announce the end with SIGTERM, whose default would leave worker processes no time to be closed.
    """
    before: dict[int, Any] = {}
    try:
        for number in _SIGNALS:
            before[number] = signal.signal(number, _interrupt)
    except ValueError:  # not in the main thread, where a signal never arrives
        pass
    try:
        yield
    except KeyboardInterrupt:
        raise told(KeyboardInterrupt()) from None
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


def interrupt_main_thread() -> bool:
    """Interrupt the main thread, from another one, where :func:`resumable` is there to meet it; whether it was."""
    if signal.getsignal(signal.SIGINT) is not _interrupt:
        return False
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    return True
