"""One BLAS thread while dkrr's own products run in the caller's process.

Threaded OpenBLAS is slower per core on tiles, has returned wrong numbers when called from several Python threads, and
crashes in potrf of large matrices on some kernels; dkrr's parallelism comes from tile tasks instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from threadpoolctl import ThreadpoolController

__all__ = ["single_blas_thread"]


@lru_cache(maxsize=1)
def _controller() -> Any:
    # finding the loaded libraries costs milliseconds; NumPy and SciPy are loaded by the time of the first call
    return ThreadpoolController()


@contextmanager
def single_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread inside the block; restores the caller's setting."""
    with _controller().limit(limits=1, user_api="blas"):
        yield
