"""Leave-one-out of an estimator: the rows it was fitted on once more, and its factor where it left one.

A fit in memory is factorised again, n <= 6,000. A fit through tiles finds its factor in its store; without a store of
its own it makes one for the time being. What is done with the rows is in :mod:`dkrr.left_out`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from crc32c import crc32c

from dkrr.dataset import Dataset
from dkrr.engine.session import blas_of
from dkrr.errors import DataError, check_whole
from dkrr.fitting import FitSettings
from dkrr.given import given_rows, store_given_matrix
from dkrr.left_out import factor_settings, leave_one_out_rows, resolve_method, solver_of
from dkrr.linalg.factor.dense import dense_diagonals
from dkrr.linalg.inference.leave_one_out import LeaveOneOut, loo_from_diagonal, unscaled
from dkrr.linalg.primal.choose import array_source, primal_leave_one_out
from dkrr.linalg.settings import IterativeSettings
from dkrr.linalg.workspace import Workspace
from dkrr.model import Model
from dkrr.resources import find_executor, nothing_new, rows_on_disk
from dkrr.stores import full_disk, remove_array
from dkrr.temporary import TemporaryStore
from dkrr.threads import single_blas_thread
from dkrr.tiles import TileMatrix

__all__ = ["Training", "check_unchanged", "leave_one_out"]

# where a fit in memory goes through tiles after all, for a stochastic estimate
IN_MEMORY_TILE = 512


@dataclass(frozen=True, kw_only=True)
class Training:
    """What an estimator was fitted on: copies of arrays, and all else as it was given.

    Parameters
    ----------
    X, y, weight
        As ``fit`` took them; y and weight None where a data set has its own.
    checksum
        crc32c of an X that is the caller's, which may have changed since; None for a copy, and for what is on disk.
    tile_size
        As it was asked for; None for "auto".
    tiled
        Whether the fit went through tiles.
    max_in_process_rows
        Up to so many rows the tasks run in this process when there is no client.
    store
        Where the fit left its factors, whatever the current folder is by now; None for a temporary store.
    """

    X: Any
    y: Any
    weight: Any
    tiled: bool
    tile_size: int | None = None
    max_in_process_rows: int = 0
    checksum: int | None = None
    store: str | None = None


def leave_one_out(
    model: Model, training: Training, store: Any, *, method: str = "auto", num_probes: int = 32, seed: int = 0
) -> LeaveOneOut:
    """Leave-one-out of an estimator's model, in the units of y.

    Parameters
    ----------
    model, training
        Of the fit.
    store
        Where the fit left its factors; None for a temporary store.
    method, num_probes, seed
        See :meth:`dkrr.KernelRidge.leave_one_out`.

    Raises
    ------
    DataError
        The rows, targets or weights are not those of the fit any more.
    """
    method = resolve_method(method, solver_of(model))
    check_whole("num_probes", num_probes)
    check_whole("seed", seed, 0)
    if training.checksum is not None and crc32c(training.X) != training.checksum:
        raise _changed("X")
    if solver_of(model) == "primal":
        return _in_feature_space(model, training, store, method)
    if method == "exact" and not training.tiled:
        return _in_memory(model, training)
    holder = TemporaryStore(_store_bytes(model, method, num_probes)) if store is None else None
    try:
        root = store if holder is None else holder.path
        with (
            full_disk(root),
            single_blas_thread(),
            _fitted_rows(model, training, root) as (dataset, given, digest, workspace),
        ):
            settings = _settings(model)
            if method == "exact":
                settings = factor_settings(settings, dataset, workspace, model, training.tile_size)
            return leave_one_out_rows(
                dataset,
                settings,
                workspace,
                model,
                method=method,
                num_probes=num_probes,
                seed=seed,
                given=given,
                source_digest=digest,
            )
    finally:
        if holder is not None:
            holder.close()


def check_unchanged(model: Model, dataset: Dataset, digest: str = "") -> None:
    """Compare rows that were read once more with those of the fit, as far as it has digests: one in memory has none.

    Parameters
    ----------
    digest
        Of a given matrix, which is no rows.

    Raises
    ------
    DataError
        X, y or weight has changed.
    """
    found = {"rows": digest or dataset.digest, "targets": dataset.digest_y, "weight": dataset.digest_weight}
    for part, (name, value) in zip(("X", "y", "weight"), found.items(), strict=True):
        if model.provenance.get(f"{name}_digest", value) != value:
            raise _changed(part)


def _changed(part: str) -> DataError:
    return DataError(f"{part} has changed since the fit", hint="fit again, or bring back what was there")


def _in_feature_space(model: Model, training: Training, store: Any, method: str) -> LeaveOneOut:
    """From the rows, in one pass more than the fit."""
    if method == "exact" and not training.tiled:
        y = np.asarray(training.y, dtype=np.float64).reshape(len(training.X), -1)
        source = array_source(np.asarray(training.X, dtype=np.float64), y, model.kernel, training.weight)
        return primal_leave_one_out(source, model.provenance["alpha"], fit_intercept=model.intercept is not None)
    holder = TemporaryStore(0) if store is None else None
    try:
        root = store if holder is None else holder.path
        with _fitted_rows(model, training, root) as (dataset, _, _, workspace):
            return leave_one_out_rows(dataset, _settings(model), workspace, model, method=method)
    finally:
        if holder is not None:
            holder.close()


def _in_memory(model: Model, training: Training) -> LeaveOneOut:
    """From a factor that is made again in this process."""
    x = np.asarray(training.X, dtype=np.float64)
    y = np.asarray(training.y, dtype=np.float64).reshape(len(x), -1)
    n, t = y.shape
    alphas = np.broadcast_to(np.asarray(model.provenance["alpha"], dtype=np.float64), (t,))
    root = None if training.weight is None else np.sqrt(np.asarray(training.weight, dtype=np.float64))
    rows = x if model.center is None else x - model.center
    coefficients = model.dual_coef.read(0, n)
    with single_blas_thread():
        diagonal, ones = dense_diagonals(
            model.kernel, rows, alphas, root, model.solution.precision, fit_intercept=model.intercept is not None
        )
        unseen = np.zeros(n, np.bool_) if root is None else root == 0
        return loo_from_diagonal(
            y=y,
            u=unscaled(coefficients, root),
            inverse_diagonal=diagonal,
            alpha=alphas,
            root=root,
            ones=ones,
            predictions=model.predict_rows(x[unseen]) if unseen.any() else None,
        )


def _store_bytes(model: Model, method: str, num_probes: int) -> int:
    """What a temporary store will hold."""
    n, d = model.num_rows, model.num_features
    if solver_of(model) == "nystrom":
        return 8 * n * 64
    if method != "exact":  # rows or a matrix, a preconditioner, columns of probes and the state of an iteration
        columns = (num_probes + 1) * len(set(model.provenance["alpha"])) + 4 * 64
        return 8 * n * (columns + min(2000, n // 4) + (d if model.kernel is not None else n // 2))
    return 8 * n * n // 2 * len(set(model.provenance["alpha"])) + 8 * n * (d if model.kernel is not None else n // 2)


@contextmanager
def _fitted_rows(
    model: Model, training: Training, root: Any
) -> Iterator[tuple[Dataset, TileMatrix | None, str, Workspace]]:
    """The rows on disk as the fit had them, a given matrix in tiles, and somebody to run tasks."""
    if model.kernel is not None:
        with (
            rows_on_disk(training.X, training.y, training.weight, root) as dataset,
            find_executor(dataset.num_rows, training.max_in_process_rows) as executor,
        ):
            check_unchanged(model, dataset)
            yield dataset, None, "", Workspace(store=root, executor=executor, blas=blas_of(executor))
        return
    n = given_rows(training.X)
    with find_executor(n, training.max_in_process_rows) as executor:
        tile_size = model.provenance.get("tile_size", "auto")
        with nothing_new(root):
            dataset, given, digest = store_given_matrix(training.X, training.y, training.weight, root, tile_size)
        try:
            check_unchanged(model, dataset, digest)
            yield dataset, given, digest, Workspace(store=root, executor=executor, blas=blas_of(executor))
        finally:
            remove_array(dataset.path)
            remove_array(given.location)


def _settings(model: Model) -> FitSettings:
    """Of the fit, as far as leave-one-out needs them; a fit in memory has none that a factor on disk would share."""
    facts, solver = model.provenance, solver_of(model)
    names = ("preconditioner", "rank", "seed", "tol") if solver == "cg" else ()
    known = {name: facts[name] for name in names if name in facts}
    return FitSettings(
        kernel=model.kernel,
        alpha=tuple(facts["alpha"]),
        tile_size=facts.get("tile_size", IN_MEMORY_TILE),
        precision=facts.get("precision", "float64"),
        gram=facts.get("gram", "on_the_fly"),
        solver="cg" if solver == "cg" else "cholesky",
        iterative=IterativeSettings(**known, allow_unconverged=bool(facts.get("allow_unconverged"))),
        fit_intercept=model.intercept is not None,
    )
