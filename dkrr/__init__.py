"""Exact kernel ridge regression, out of core, on Dask and Zarr.

The public names are imported when they are first used: every worker process imports ``dkrr``, and a worker needs
neither scikit-learn nor the job machinery to compute a tile.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dkrr.dataset import Dataset, ingest, open_dataset
    from dkrr.engine.cluster import local_cluster
    from dkrr.errors import (
        CancelledError,
        ClusterError,
        ConvergenceError,
        DamagedChunkError,
        DataError,
        DkrrError,
        InterruptedRunError,
        JobFileError,
        LockedError,
        MemoryBudgetError,
        NotPositiveDefiniteError,
        NumericalError,
        ParameterError,
        PlanRefusedError,
        PreconditionerError,
        RefusedError,
        ResidualError,
        StorageFullError,
        StoreError,
        StoreMismatchError,
        WorkerLostError,
    )
    from dkrr.jobs.plan import plan
    from dkrr.kernels import make_kernel
    from dkrr.linalg.gram import gram_matrix
    from dkrr.models.estimator import KernelRidge
    from dkrr.models.machines import (
        KernelHuberRegressor,
        KernelLogisticRegression,
        KernelQuantileRegressor,
        KernelSVC,
        KernelSVR,
    )
    from dkrr.models.model import Model, load_model
    from dkrr.selection.cv import KernelRidgeCV

__all__ = [
    "CancelledError",
    "ClusterError",
    "ConvergenceError",
    "DamagedChunkError",
    "DataError",
    "Dataset",
    "DkrrError",
    "InterruptedRunError",
    "JobFileError",
    "KernelHuberRegressor",
    "KernelLogisticRegression",
    "KernelQuantileRegressor",
    "KernelRidge",
    "KernelRidgeCV",
    "KernelSVC",
    "KernelSVR",
    "LockedError",
    "MemoryBudgetError",
    "Model",
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
    "__version__",
    "gram_matrix",
    "ingest",
    "load_model",
    "local_cluster",
    "make_kernel",
    "open_dataset",
    "plan",
]

_HOMES = {
    "Dataset": "dkrr.dataset",
    "KernelHuberRegressor": "dkrr.models.machines",
    "KernelLogisticRegression": "dkrr.models.machines",
    "KernelQuantileRegressor": "dkrr.models.machines",
    "KernelRidge": "dkrr.models.estimator",
    "KernelRidgeCV": "dkrr.selection.cv",
    "KernelSVC": "dkrr.models.machines",
    "KernelSVR": "dkrr.models.machines",
    "Model": "dkrr.models.model",
    "gram_matrix": "dkrr.linalg.gram",
    "ingest": "dkrr.dataset",
    "load_model": "dkrr.models.model",
    "local_cluster": "dkrr.engine.cluster",
    "make_kernel": "dkrr.kernels",
    "open_dataset": "dkrr.dataset",
    "plan": "dkrr.jobs.plan",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dkrr' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "dkrr.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
