"""The error tree: what was seen, what was expected, what to do.

Every error that dkrr raises on purpose is a :class:`DkrrError`. It carries one line (``str(error)``), an optional
hint, and the exit code the command line ends with. Errors cross process borders, so each one pickles whole.
"""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable
from functools import partial
from typing import Any

__all__ = [
    "CancelledError",
    "ClusterError",
    "ConvergenceError",
    "DamagedChunkError",
    "DataError",
    "DkrrError",
    "InterruptedRunError",
    "JobFileError",
    "LockedError",
    "MemoryBudgetError",
    "NotPositiveDefiniteError",
    "NumericalError",
    "ParameterError",
    "PlanRefusedError",
    "PreconditionerError",
    "RefusedError",
    "ResidualError",
    "StorageFullError",
    "StoreError",
    "StoreMismatchError",
    "WorkerLostError",
]


class DkrrError(Exception):
    """Base of all errors of dkrr.

    Parameters
    ----------
    message
        One line: what was seen and what was expected, with values.
    hint
        One line: what to do about it.
    **details
        Facts for programs (row numbers, paths, byte counts); they become attributes.
    """

    exit_code: int = 1

    def __init__(self, message: str, *, hint: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details

    def __getattr__(self, name: str) -> Any:
        details = self.__dict__.get("details", {})
        if name in details:
            return details[name]
        raise AttributeError(name)

    def __str__(self) -> str:
        return f"{self.message}: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self.message, hint=self.hint, **self.details), ()


def told(error: BaseException) -> DkrrError:
    """What is said of any error where people read it: itself if it is one of ours, else one line and an exit code."""
    if isinstance(error, DkrrError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return InterruptedRunError(
            "interrupted", hint="start the same command again; it continues with what is finished"
        )
    if isinstance(error, OSError) and error.strerror:
        if not error.filename:
            return DkrrError(error.strerror)
        hint = "check the path, and who may read and write there"
        return StoreError(f"{error.strerror} ({error.filename})", hint=hint)
    line = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".rstrip(": ")
    return DkrrError(line, hint="this is a defect of dkrr; --verbose shows the traceback")


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "") -> str:
    """The hint of an error of a name that is unknown: the nearest right one, if there is one."""
    lowered = {item.lower(): item for item in names}
    near = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
    return f"did you mean {lowered[near[0]]!r}?" if near else otherwise


class ParameterError(DkrrError, ValueError):
    """Raised when a parameter has a value that is not allowed."""

    exit_code = 2


def check_whole(name: str, value: Any, least: int = 1, most: int | None = None, *, hint: str = "") -> int:
    """A whole number of at least ``least``, and at most ``most``.

    Raises
    ------
    ParameterError
        ``value`` is none; one that only counts as a number, like True, neither.
    """
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        wanted = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        raise ParameterError(f"{name} is {value!r}; a whole number {wanted} expected", hint=hint)
    return int(value)


class JobFileError(DkrrError, ValueError):
    """Raised when a job file cannot be read or holds an unknown or wrong key."""

    exit_code = 2


class PlanRefusedError(DkrrError):
    """Raised when a job cannot fit into the memory or onto the disk it was given."""

    exit_code = 3


class StorageFullError(PlanRefusedError, OSError):
    """Raised when a device is full; names the bytes needed and the bytes free."""


class MemoryBudgetError(PlanRefusedError, MemoryError):
    """Raised when a task ran out of memory; names the tile size and a smaller one."""


class DataError(DkrrError, ValueError):
    """Raised when rows, targets or weights cannot be used; names file, row and column."""

    exit_code = 4


class StoreError(DkrrError):
    """Raised when something on disk is missing, foreign, or cannot be read."""

    exit_code = 4


class DamagedChunkError(StoreError):
    """Raised when one chunk (tile or row chunk) is missing, has a wrong size, or fails its checksum.

    Attributes: ``path`` (of the array), ``index`` (of the chunk), ``reason``.
    """


class StoreMismatchError(StoreError):
    """Raised when an array exists with other parameters; lists the differing fields."""


class RefusedError(DkrrError):
    """Raised when a retrain job refuses a batch of rows or a model; what was in production stays there.

    Attributes: ``reasons`` (list of sentences), ``report`` (path or address of the report).
    """

    exit_code = 7


class LockedError(DkrrError):
    """Raised when another process owns what this one wants to write."""

    exit_code = 8


class NumericalError(DkrrError, ArithmeticError):
    """Base of errors of the numerics."""

    exit_code = 5


class NotPositiveDefiniteError(NumericalError, ValueError):
    """Raised when K + alpha I is not positive definite.

    Attributes: ``row`` (global), ``pivot``, ``alpha``, ``suggested_alpha``.
    """


class ResidualError(NumericalError):
    """Raised when a solve ended with a backward error above the bar."""


class ConvergenceError(NumericalError):
    """Raised when an iterative solver did not converge; carries the residual history.

    Attributes: ``history`` (list of (t,) arrays), ``relative_residual`` (t,), ``converged`` (t,), ``num_iterations``,
    ``stagnated`` (more iterations would not help).
    """


class PreconditionerError(NumericalError):
    """Raised when a preconditioner is not positive definite.

    Attributes: ``iteration``, ``target``.
    """


class ClusterError(DkrrError, RuntimeError):
    """Raised when scheduler or workers cannot be used."""

    exit_code = 6


class WorkerLostError(ClusterError):
    """Raised when workers died again and again on one task."""


class InterruptedRunError(DkrrError):
    """Raised when a run was interrupted; starting it again continues it."""

    exit_code = 75


class CancelledError(InterruptedRunError):
    """Raised when somebody asked a run to stop; resuming it continues it."""
