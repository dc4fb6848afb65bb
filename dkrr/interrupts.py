"""Ctrl-C and SIGTERM as an error of dkrr: what is finished is kept, and the same command continues."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from typing import Any

from dkrr.errors import InterruptedRunError

__all__ = ["interrupt_main_thread", "interrupted_error", "resumable"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
        raise interrupted_error() from None
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


def interrupted_error() -> InterruptedRunError:
    """What a command ends with that was interrupted, wherever that found it."""
    return InterruptedRunError("interrupted", hint="start the same command again; it continues with what is finished")


def interrupt_main_thread() -> bool:
    """Interrupt the main thread, from another one, where :func:`resumable` is there to meet it; whether it was."""
    if signal.getsignal(signal.SIGINT) is not _interrupt:
        return False
    ident = threading.main_thread().ident
    if ident is None:
        return False
    signal.pthread_kill(ident, signal.SIGINT)
    return True
