"""Work that stops on request, between two tile products: what is finished is kept, what is begun is not written.

``with cancellable(cancelled):`` says for the code inside who knows of a request, and :func:`check_cancelled` asks. It
is called before every read of a chunk, so everything that works on tiles comes by it before every product, and code
that reads nothing for seconds may call it as well. Outside such a block nothing is ever cancelled.

Cost of a check: 0.2 us, and what ``cancelled()`` costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dkrr.errors import CancelledError

__all__ = ["cancellable", "check_cancelled"]

_request: ContextVar[Callable[[], bool] | None] = ContextVar("dkrr_cancelled", default=None)


@contextmanager
def cancellable(cancelled: Callable[[], bool] | None) -> Iterator[None]:
    """Have :func:`check_cancelled` ask ``cancelled()`` in this thread while the block runs; None changes nothing."""
    if cancelled is None:
        yield
        return
    token = _request.set(cancelled)
    try:
        yield
    finally:
        _request.reset(token)


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
