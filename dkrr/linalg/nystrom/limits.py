"""What a Nystrom regression may be asked for, and the memory that it takes."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from dkrr.dataset import Dataset
from dkrr.engine.session import memory_limit_of
from dkrr.errors import ParameterError, PlanRefusedError
from dkrr.kernels import Kernel
from dkrr.linalg.nystrom.pass_task import can_compile, pass_task_bytes
from dkrr.linalg.nystrom.sample import preconditioner_bytes, sample_size
from dkrr.linalg.settings import NystromSettings
from dkrr.linalg.sizes import BARE_BYTES, BASELINE_BYTES
from dkrr.linalg.workspace import Workspace

__all__ = ["MAX_CENTERS", "NystromFit", "checked_problem", "nystrom_baseline", "nystrom_bytes"]

MAX_CENTERS = 10_000


class NystromFit(Protocol):
    """What is needed of the settings of a fit."""

    @property
    def kernel(self) -> Kernel | None: ...
    @property
    def alpha(self) -> tuple[float, ...]: ...
    @property
    def precision(self) -> Literal["float64", "float32", "mixed"]: ...
    @property
    def fit_intercept(self) -> bool: ...


def nystrom_bytes(n: int, m: int, num_features: int, num_targets: int) -> tuple[int, int]:
    """Peak memory besides the interpreter's of a task, and of the driver.

    A task makes a part of the preconditioner, 16 m^2 + 16,384 m bytes, or a pass, see
    :func:`~dkrr.linalg.nystrom.pass_task.pass_task_bytes`. The driver holds 24 m^2, the sample of at most (q + 1) m
    rows twice, about ten (m, t) arrays of conjugate gradients, and 24 n bytes while the rows are chosen.
    """
    task = max(preconditioner_bytes(m), pass_task_bytes(m, num_features, num_targets))
    sample = 16 * (sample_size(n, m) + m) * (num_features + 1)
    return task, 24 * m * m + sample + 80 * m * num_targets + 24 * n


def nystrom_baseline(kernel: Kernel | None, m: int, num_targets: int) -> int:
    """What a worker has before a task: with Numba where passes go through compiled code."""
    return BASELINE_BYTES if kernel is not None and can_compile(kernel, m, num_targets) else BARE_BYTES


def checked_problem(
    dataset: Dataset, settings: NystromFit, nystrom: NystromSettings, workspace: Workspace
) -> tuple[Kernel, tuple[float, ...]]:
    """The kernel and an alpha for each target, or why this cannot be done."""
    t, m = dataset.num_targets, nystrom.num_centers
    if dataset.y is None:
        raise ParameterError(f"{dataset.path} has no target", hint="name one with target=")
    if settings.kernel is None:
        raise ParameterError("Nystrom regression of a precomputed matrix", hint="give the rows and a kernel")
    if settings.precision not in ("float64", "mixed"):
        raise ParameterError(f"precision = {settings.precision!r} with Nystrom", hint='"float64" or "mixed" expected')
    if len(settings.alpha) not in (1, t):
        raise ParameterError(f"{len(settings.alpha)} values of alpha for {t} targets; 1 or {t} expected")
    if min(settings.alpha) < 0 or not np.isfinite(settings.alpha).all():
        raise ParameterError(f"alpha = {min(settings.alpha)}", hint="give a number that is at least 0")
    if m > MAX_CENTERS:
        raise ParameterError(
            f"{m:,} centres; at most {MAX_CENTERS:,} are factored in one process",
            hint=f"set num_centers to at most {MAX_CENTERS:,}",
        )
    task, _ = nystrom_bytes(dataset.num_rows, min(m, dataset.num_rows), dataset.num_features, t)
    limit, needed = memory_limit_of(workspace.executor), nystrom_baseline(settings.kernel, m, t) + task
    if limit is not None and needed > limit:
        raise PlanRefusedError(
            f"a task with {m:,} centres and {t} targets takes {needed:,} bytes; a worker has {limit:,}",
            hint="raise memory_limit, or lower num_centers",
            needed=needed,
            limit=limit,
        )
    return settings.kernel, settings.alpha * (t if len(settings.alpha) == 1 else 1)
