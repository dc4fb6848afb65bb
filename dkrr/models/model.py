"""Model: kernel, training rows, dual coefficients and scaling, saved without pickle and checked at load; and how
uncertain its predictions are.

    predict(Z) = y_mean + y_std * (k((Z - x_mean) / x_std, X_fit) @ dual_coef + intercept)

    std(z) = y_std (sigma^2 (var f(z) / sigma^2 + alpha [noise]))^1/2

with the variance of :mod:`dkrr.linalg.leave_one_out`, which needs a float64 Cholesky factor for each alpha. One
that the fit left in its store is found again, and compared with the kernel before it is used. Where there is none, at
most 6,000 rows are factorised in memory (8 n^2 bytes, n^3 / 3 flops) when a variance is first asked for. Intervals need
the quantiles of leave-one-out residuals that a model keeps; those of constant width need no factor at all.

On disk it is a Zarr group of one to three arrays and attributes, with a manifest of SHA-256 over every key. Nothing is
pickled, and metadata is checked before any array is read.

Cost: every byte of the arrays is written once, and read once where it is verified.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from scipy.special import ndtri

from dkrr.dataset import (
    Fitted,
    Floats,
    RowArray,
    Scaling,
    check_outside,
    matched_columns,
    to_floats,
    with_mask,
    write_rows,
)
from dkrr.engine.machine import single_blas_thread
from dkrr.errors import DataError, DkrrError, NumericalError, ParameterError, StoreError
from dkrr.kernels import Kernel, kernel_from_dict
from dkrr.kernels.features import FeatureMap, feature_map
from dkrr.linalg.catalogue import open_factor
from dkrr.linalg.dense import DenseFactor
from dkrr.linalg.leave_one_out import (
    IntervalMethod,
    LeaveOneOut,
    Quantiles,
    VarianceSystem,
    check_coverage,
    check_method,
)
from dkrr.linalg.products import ArrayRows, RowSource, predict_block
from dkrr.linalg.solution import Solution
from dkrr.markup import facts_html, lines_text, named
from dkrr.store.documents import (
    MANIFEST,
    check_manifest,
    check_unchanged,
    file_states,
    manifest_digest,
    refuse_links,
    write_manifest,
)
from dkrr.store.files import (
    check_place,
    is_below,
    is_url,
    list_keys,
    local_root,
    note_user,
    put_back,
    put_in_place,
    read_json,
    read_key,
    remove_array,
    storage_errors,
    write_json,
)
from dkrr.store.lease import hold_lock
from dkrr.tiles import TileMatrix

logger = logging.getLogger("dkrr.models")

FORMAT = "dkrr-model"

FORMAT_VERSION = 1

ROWS_PER_CHUNK = 4096

ARRAYS = ("X_fit", "dual_coef", "sample_weight")


def check_replaceable(path: Any) -> None:
    """Refuse a place where :meth:`Model.write` with ``overwrite`` would refuse to write.

    Raises
    ------
    StoreError
        What is there is no model, or holds files of somebody else.
    """
    _refuse_what_is_there(path, overwrite=True)


def _refuse_what_is_there(path: Any, *, overwrite: bool) -> None:
    """Refuse to write where something is, unless it is a model that may be replaced, without files of somebody else."""
    root = local_root(path)
    if root is not None:
        put_back(root)
    if read_json(path, "zarr.json") is not None or (root is not None and os.path.lexists(root)):
        if not overwrite:
            raise StoreError(f"{path} exists", hint="choose another path, or overwrite=True to replace a model")
        if root is not None and root.is_symlink():
            raise StoreError(f"{path} is a symbolic link", hint="give the path that it points to")
        refuse_links(path)
        _require_model(path)
    elif root is not None:
        return
    written = read_json(path, MANIFEST) or {}  # a save to an address that was interrupted has none
    known = {"zarr.json", MANIFEST, *ARRAYS}
    for key in list_keys(path):
        if key not in written and (written or key.partition("/")[0] not in known) and key != MANIFEST:
            raise StoreError(f"{path} holds something else ({key})", hint="choose another path")


def _require_model(path: Any) -> dict[str, Any]:
    document = read_json(path, "zarr.json")
    is_group = isinstance(document, dict) and document.get("node_type") == "group"
    attributes = document.get("attributes") if is_group and document is not None else None
    if not isinstance(attributes, dict) or attributes.get("format") != FORMAT:
        found = f" (format {attributes.get('format')!r})" if isinstance(attributes, dict) else ""
        raise StoreError(f"{path} is not a model of dkrr{found}", hint="check the path")
    if attributes.get("format_version") != FORMAT_VERSION:
        raise StoreError(
            f"{path} has model format version {attributes.get('format_version')}; this dkrr reads version "
            f"{FORMAT_VERSION}",
            hint="install a newer dkrr, or save the model again",
        )
    return attributes


# parts of a model that are plain data, arrays of a few numbers, and have a dictionary of their own
PLAIN = ("y_is_1d", "feature_names", "target_names", "made_up", "classes", "provenance")
VECTORS = {"center": "num_features", "intercept": "num_targets", "sigma2": "num_targets"}
RECORDS = {"scaling": Scaling, "quantiles": Quantiles, "solution": Solution}
# which models of the first releases lack where they have none
OPTIONAL = ("intercept", "sigma2", "quantiles", "num_inputs", "weighted")
BLOCK_ROWS = 4096

TINY = float(np.finfo(np.float64).tiny)

# times targets, which are 1e-140 at least, they may be less than float64 holds
SMALL_COEFFICIENTS = 1e-160

# A factor of so many rows takes 288 MB and about two seconds.
MAX_DENSE_ROWS = 6_000

# solvers whose coefficients are not those of the training rows
OTHER_SOLVERS = ("nystrom", "primal")

IN_MEMORY_BYTES = 64 * 2**20


def quantile_names(target: str, quantiles: Sequence[float]) -> list[str]:
    """What the columns of the quantiles of a target are called: ``target q0.05``."""
    return [f"{target} q{float(quantile)!r}" for quantile in quantiles]


@dataclass(frozen=True, kw_only=True, repr=False)
class Model(Fitted):
    """A fitted kernel ridge regression, or the same f of another loss (``provenance["loss"]``).

    Parameters
    ----------
    kernel
        Resolved kernel, None when it was fitted on a precomputed matrix.
    x_fit
        Training rows (n, d) as the kernel saw them (scaled), of another loss than the square those with a coefficient
        other than 0; None for a precomputed matrix, and with ``features``.
    dual_coef
        (n, t); the coefficients (D, t) of the features where there are ``features``.
    features
        Explicit features F of the kernel: predictions are F(Z) @ dual_coef, and need no training rows.
    center
        Subtracted from rows before a translation-invariant kernel is evaluated (d,), or None.
    scaling
        Whitening of X and y, or None.
    intercept
        Added to k(Z, X) @ dual_coef, in the scale of the whitened targets (t,); None for a fit without one.
    y_is_1d
        Whether predictions are (m,) and not (m, 1).
    made_up
        Which of "feature_names" and "target_names" somebody did not give; such names tell no columns apart.
    sample_weight
        Of the training rows (n, 1), None for a fit without; standard deviations need it.
    sigma2
        The maximum likelihood scale of the Gaussian process, in the scale of the whitened targets (t,).
    quantiles
        Of leave-one-out residuals, for prediction intervals; None until they were computed.
    location, digest
        Where it was opened, and the SHA-256 of its manifest; None of a model that was not.
    """

    kernel: Kernel | None
    x_fit: RowSource | None
    dual_coef: RowSource
    solution: Solution
    center: Floats | None = None
    features: FeatureMap | None = None
    scaling: Scaling | None = None
    intercept: Floats | None = None
    y_is_1d: bool = False
    feature_names: list[str] = field(default_factory=list)
    target_names: list[str] = field(default_factory=list)
    made_up: tuple[str, ...] = ()
    classes: list[Any] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    location: str | None = None
    digest: str | None = None
    sample_weight: RowSource | None = None
    sigma2: Floats | None = None
    quantiles: Quantiles | None = None

    @property
    def num_rows(self) -> int:
        """n, the number of training rows; D with features."""
        return self.dual_coef.num_rows

    @property
    def num_features(self) -> int:
        """d, or n for a precomputed matrix."""
        if self.features is not None:
            return self.features.num_inputs
        return self.num_rows if self.x_fit is None else self.x_fit.num_columns

    @property
    def num_targets(self) -> int:
        """t."""
        return self.dual_coef.num_columns

    @property
    def whitens_targets(self) -> bool:
        """Whether it was fitted to targets in units of their own; those of a loss for labels are classes."""
        return self.scaling is not None and bool(self.scaling.y_mean.any() or (self.scaling.y_std != 1).any())

    @property
    def places(self) -> list[list[int]]:
        """Where features, targets and weights stood in the source; [] where nobody knows."""
        return list(self.provenance.get("places", ()))

    @property
    def levels(self) -> list[float]:
        """The quantile that each column of a sequence of them predicts, or the one of all targets; [] for another loss.

        Not to be mixed up with ``quantiles``, those of leave-one-out residuals.
        """
        return np.atleast_1d(self.provenance["quantile"]).tolist() if self.provenance.get("loss") == "pinball" else []

    @property
    def observed(self) -> Fitted:
        """The columns that the data of this model has: one target for a sequence of its quantiles."""
        if not self.levels or not isinstance(self.provenance["quantile"], Iterable):
            return self
        names = tuple(name.removesuffix(quantile_names("", self.levels)[0]) for name in self.target_names[:1])
        return cast(
            Fitted,
            SimpleNamespace(
                names=self.names,
                named_targets=() if "target_names" in self.made_up else names,
                target_names=names,
                places=self.places,
                classes=None,
                num_features=self.num_features,
                num_targets=1,
            ),
        )

    def __repr__(self) -> str:
        loss = f"{self.provenance['loss']} loss, " if "loss" in self.provenance else ""
        rows = named(self.num_rows, "row" if self.features is None else "coefficient")
        targets = named(self.num_targets, "target", self.target_names)
        return lines_text(
            f"Model: {self.kernel or 'precomputed'}, {loss}alpha {self._alpha}; {rows} of "
            f"{named(self.num_features, 'feature')}, {targets}",
            self._solved,
            self.location or "in memory",
        )

    def _repr_html_(self) -> str:
        """For notebooks."""
        loss = self.provenance.get("loss")
        rows = [
            ("kernel", self.kernel or "precomputed"),
            *([("loss", loss)] if loss else []),
            ("alpha", self._alpha),
            ("rows" if self.features is None else "explicit features", f"{self.num_rows:,}"),
            ("features", f"{self.num_features:,}: {', '.join(self.feature_names[:8])}".rstrip(": ")),
            ("targets", f"{self.num_targets:,}: {', '.join(self.target_names[:8])}".rstrip(": ")),
            ("whitened", "no" if self.scaling is None else "yes"),
            ("solver", self._solved),
            ("where", self.location or "in memory"),
        ]
        return facts_html("kernel machine" if loss else "kernel ridge regression", rows, self.solution.message)

    @property
    def _alpha(self) -> str:
        alpha = self.provenance.get("alpha")
        return "unknown" if alpha is None else ", ".join(f"{value:g}" for value in np.atleast_1d(alpha))

    @property
    def _solved(self) -> str:
        name, value = self.solution.worst
        return f"{self.solution.solver}, {self.solution.precision}, {name} {value:.1e}"

    def predict(self, X: Any, out: Any = None) -> Any:
        """Predictions for rows X (m, d), in row blocks; for a precomputed matrix X is k(Z, X_fit) (m, n).

        Parameters
        ----------
        X
            NumPy array, sparse matrix or anything array-like; a dask array or frame gives a lazy one. Columns of a
            frame are found by the names of the fit, where it had names: order does not matter, others are left aside.
        out : ndarray (m, t) of floats, optional
            Written to, also a memory map, so that predictions need not fit into memory.

        Returns
        -------
        (m,) when the model was fitted on a 1-d target, else (m, t).

        Raises
        ------
        DataError
            A name that is missing, or the wrong number of features; a value that is not finite.
        ParameterError
            ``out`` is no writable array of floats, has another shape, or is where X or the model's own rows are.

        Cost
        ----
        m n kernel entries, 2 m n t flops.
        """
        X = self.matched(X)
        if type(X).__module__.startswith("dask."):
            if out is not None:
                raise ParameterError(
                    "out is for rows in memory, X is a dask array", hint="compute X, or store the result"
                )
            return self._predict_dask(X)
        shape = (self._checked_shape(X)[0], self.num_targets)
        if out is not None:
            _check_out(out, (shape, shape[:1]) if self.num_targets == 1 else (shape,))
        own = [getattr(rows, "array", None) for rows in self._arrays().values()]
        if any(_share(out, given) for given in (X, *own)):
            raise ParameterError(
                "out shares memory, or its file, with X or with the rows of the model", hint="give an array of its own"
            )
        result = self.compute(X, Model.predict_rows, out)
        return result[:, 0] if out is None and self.y_is_1d else result

    def _checked_shape(self, X: Any) -> tuple[int, ...]:
        shape = np.shape(X) if not hasattr(X, "shape") else tuple(X.shape)
        if len(shape) != 2 or shape[1] != self.num_features:
            raise DataError(
                f"X has shape {shape}; (m, {self.num_features}) expected",
                hint="give the features the model was fitted with",
            )
        return shape

    def compute(self, X: Any, function: Callable[[Model, Floats, int], Floats], out: Any = None) -> Any:
        """What ``function`` makes (m, t) of a block of rows (in float64, as given) and the number of its first one."""
        X = with_mask(X)
        rows = X.tocsr() if hasattr(X, "tocsr") else X if hasattr(X, "shape") else np.asarray(X)
        result = np.empty((self._checked_shape(rows)[0], self.num_targets)) if out is None else out
        for start in range(0, rows.shape[0], BLOCK_ROWS):
            block = rows[start : start + BLOCK_ROWS]
            block = block.toarray() if hasattr(block, "toarray") else block
            values = function(self, np.ascontiguousarray(to_floats(block, "X", start)), start)
            try:
                with np.errstate(over="raise"):
                    result[start : start + BLOCK_ROWS] = values.reshape(len(values), *np.shape(result)[1:])
            except FloatingPointError:
                raise ParameterError(
                    f"predictions are beyond the range of out, {result.dtype}", hint="float64"
                ) from None
        return result

    def variance(self, X: Any) -> Floats:
        """var f(z) / sigma^2 (m, t) for rows X (m, d) as :meth:`predict` takes them, in blocks."""
        return np.asarray(self.compute(self.matched(X), Model.variance_rows))

    def matched(self, X: Any) -> Any:
        """The model's columns of a frame, by name and in their order; of what has no names all columns."""
        X = matched_columns(X, self.names, "X")
        return X.to_dask_array() if hasattr(type(X), "to_dask_array") else X

    def predict_rows(self, block: Floats, first_row: int = 0) -> Floats:
        """Predictions (m, t) for one block of rows in memory."""
        block = self.prepared_rows(block, first_row)
        if self.features is not None:
            values = self.features.apply(block, self.dual_coef.read(0, self.num_rows))
        elif self.kernel is None or self.x_fit is None:
            values = np.zeros((len(block), self.num_targets))
            for start in range(0, self.num_rows, BLOCK_ROWS):
                stop = min(start + BLOCK_ROWS, self.num_rows)
                values += block[:, start:stop] @ self.dual_coef.read(start, stop)
        else:
            values = predict_block(self.kernel, block, self.x_fit, self.dual_coef, self.center)
        if self.intercept is not None:
            values += self.intercept
        return values if self.scaling is None else self.scaling.invert_y(values)

    def variance_rows(self, block: Floats, first_row: int = 0) -> Floats:
        """var f(z) / sigma^2 (m, t) for one block of rows in memory."""
        rows = self.prepared_rows(block, first_row)
        found = {alpha: system.variance(rows) for alpha, system in self.variance_systems.items()}
        return np.stack([found[alpha] for alpha in self.alphas.tolist()], axis=1)

    def prepared_rows(self, block: Floats, first_row: int = 0) -> Floats:
        """A block of rows as the kernel sees them: finite, and whitened where the model whitens."""
        finite = np.isfinite(block)
        if not finite.all():
            row, column = np.argwhere(~finite)[0]
            raise DataError(
                f"X has NaN or infinity: {block[row, column]} in row {first_row + row:,}, column {column}",
                hint="predictions need finite features",
                row=int(first_row + row),
                column=int(column),
            )
        return block if self.scaling is None or self.kernel is None else self.scaling.apply_x(block)

    def _predict_dask(self, X: Any) -> Any:
        self._checked_shape(X)
        X = X.rechunk({1: -1})
        shape: dict[str, Any] = {"chunks": (X.chunks[0], (self.num_targets,)), "meta": np.empty((0, 0))}
        shape = {"drop_axis": 1, "meta": np.empty(0)} if self.y_is_1d else shape
        return X.map_blocks(_predict_part, self, dtype=np.float64, **shape)

    def save(self, path: Any, *, overwrite: bool = False) -> None:
        """Write the model to ``path`` (a folder, or an address).

        In a folder it appears whole or not at all. Objects cannot be renamed: at an address the manifest comes last,
        and while a model is replaced there is none for the moment. A reader never sees parts of two: a large model,
        which is read when it predicts, raises when it was replaced since it was opened.

        Raises
        ------
        StoreError
            Something is there already (``overwrite=True`` replaces a model).
        LockedError
            Another process writes there.
        ParameterError
            The kernel is a function that has no importable name.
        """
        self.write(path, overwrite=overwrite)
        note_user(self.provenance.get("store"), path)

    def write(self, path: Any, *, overwrite: bool = False, before: Callable[[], object] = lambda: None) -> None:
        """:meth:`save` for a short while, or for a run: the store of the model's factors is not told of it.

        ``before`` is called when all is written, and only has to take the place of what is there.
        """
        check_place("path", path)
        root, arrays = local_root(path), self._arrays()
        check_outside(path)
        _refuse_what_is_there(path, overwrite=overwrite)
        num_bytes = sum(8 * rows.num_rows * rows.num_columns for rows in arrays.values())

        def check(there: Path) -> None:
            try:
                _refuse_what_is_there(there, overwrite=overwrite)
            except StoreError as exc:
                raise StoreError(f"{path} came while the model was written", hint="choose another path") from exc

        with storage_errors(path, num_bytes), hold_lock(path):
            _refuse_what_is_there(path, overwrite=overwrite)  # by now
            if root is not None:
                beside = root.with_name(f"{root.name}.{uuid.uuid4().hex}.partial")
                try:
                    self._write(str(beside))
                    before()
                    put_in_place(beside, root, check)
                finally:
                    shutil.rmtree(beside, ignore_errors=True)
            else:
                if any(
                    isinstance(rows, RowArray) and rows.check is not None and is_below(rows.array.store, path)
                    for rows in arrays.values()
                ):
                    raise StoreError(f"the rows of this model are read from {path}", hint="save it at another address")
                before()
                remove_array(path)  # the metadata first; also what a save that was interrupted left
                self._write(path)

    def _write(self, store: Any) -> None:
        for name, rows in self._arrays().items():
            write_rows(store, name, rows, ROWS_PER_CHUNK)
        attributes = {"format": FORMAT, "format_version": FORMAT_VERSION} | self._attributes()
        write_json(store, "zarr.json", {"zarr_format": 3, "node_type": "group", "attributes": attributes})
        write_manifest(store)

    def _attributes(self) -> dict[str, Any]:
        return {
            "kernel": {"kernel": "precomputed"} if self.kernel is None else self.kernel.to_dict(),
            "num_inputs": None if self.features is None else self.features.num_inputs,
            "weighted": self.sample_weight is not None,
            **{name: getattr(self, name) for name in PLAIN},
            **{name: None if (found := getattr(self, name)) is None else found.tolist() for name in VECTORS},
            **{name: None if (found := getattr(self, name)) is None else found.to_dict() for name in RECORDS},
        }

    def _arrays(self) -> dict[str, RowSource]:
        named = dict(zip(ARRAYS, (self.x_fit, self.dual_coef, self.sample_weight), strict=True))
        return {name: rows for name, rows in named.items() if rows is not None}

    def in_memory(self) -> Model:
        """The same model with its rows read into memory when they are small (64 MiB)."""
        arrays = self._arrays()
        if sum(8 * rows.num_rows * rows.num_columns for rows in arrays.values()) > IN_MEMORY_BYTES:
            return self
        held = {name.lower(): ArrayRows(rows.read(0, rows.num_rows)) for name, rows in arrays.items()}
        return replace(self, **held)  # type: ignore[arg-type]

    # --- how uncertain predictions are ------------------------------------------------------------------------------

    @property
    def alphas(self) -> Floats:
        """The ridge of each target (t,)."""
        return np.broadcast_to(np.asarray(self.provenance["alpha"], dtype=np.float64), (self.num_targets,))

    @cached_property
    def variance_systems(self) -> dict[float, VarianceSystem]:
        """For each distinct alpha the factor that variances rest on, found or made when they are first asked for.

        Raises
        ------
        ParameterError
            The model has no variance of this kind: a given matrix, an approximation, or another loss than the square.
        StoreError
            There is no finished float64 factor, and there are more than 6,000 rows.

        Cost
        ----
        For each factor that is found n^2 kernel entries and two readings, see
        :meth:`~dkrr.linalg.leave_one_out.VarianceSystem.misfit`; n^3 / 3 flops and 8 n^2 bytes where one is made (at
        most 6,000 rows).
        """
        kernel, x = self.kernel, self.x_fit
        if "loss" in self.provenance:
            raise ParameterError(
                "standard deviations are those of the square loss, and this model has the "
                f"{self.provenance['loss']} loss",
                hint="fit dkrr.KernelRidge",
            )
        solver = self.provenance.get("solver", "cholesky")
        if kernel is None or (x is None and solver not in OTHER_SOLVERS):
            raise ParameterError(
                "a model of a precomputed matrix has no standard deviation: k(z, z) is not known",
                hint="fit with a kernel and rows",
            )
        if x is None or x.num_rows != self.num_rows or solver in OTHER_SOLVERS:
            raise ParameterError(
                f"standard deviations of solver {solver!r} are not available", hint="fit with solver='cholesky'"
            )
        weight = self.sample_weight
        root = None if weight is None else np.sqrt(weight.read(0, weight.num_rows)[:, 0])

        def system(alpha: float, factor: TileMatrix | DenseFactor) -> VarianceSystem:
            return VarianceSystem(
                factor=factor,
                kernel=kernel,
                x=x,
                alpha=alpha,
                center=self.center,
                root=root,
                intercept=self.intercept is not None,
            )

        def found(alpha: float) -> VarianceSystem:
            """With the stored factor, or one that is made in memory where the rows are few enough."""
            facts, n = self.provenance, self.num_rows
            try:
                fields = dict(
                    kernel=kernel.to_dict(),
                    center=None if self.center is None else self.center.tolist(),
                    n=n,
                    alpha=alpha,
                    rows_digest=facts.get("rows_digest", ""),
                    weight_digest=facts.get("weight_digest"),
                )
                places, store = facts.get("factors", []), facts.get("store")
                return system(alpha, open_factor(fields, places, store, lambda factor: system(alpha, factor).misfit()))
            except (ParameterError, StoreError) as exc:  # a function without a name has no factor in a store
                if n > MAX_DENSE_ROWS:
                    raise StoreError(
                        f"a standard deviation needs a float64 Cholesky factor, and this model ({solver}, "
                        f"{facts.get('precision', 'float64')}) has none: {exc.message}",
                        hint="fit with solver='cholesky', precision='float64' and store= (a job: keep = 'factor'); it "
                        f"takes {n**3 / 3:.1e} flops and {4 * n * n:,} bytes",
                    ) from exc
                logger.info("making a factor of %d rows in memory (%s)", n, exc.message)
            rows = x.read(0, n)
            rows = rows if self.center is None else rows - self.center
            return system(alpha, DenseFactor.of(kernel, rows, root, alpha))

        return {alpha: found(alpha) for alpha in dict.fromkeys(self.alphas.tolist())}

    def deviations(self, variance: Floats, *, noise: bool = False, sigma2: Any = None) -> Floats:
        """Standard deviations (m,) or (m, t) in the units of y, from var f / sigma^2 (m, t)."""
        # not the root of the product: sigma^2 of small targets is small where the variance of a large kernel is large
        values: Floats = np.sqrt(self._sigma2(sigma2)) * np.sqrt(variance + (self.alphas if noise else 0.0))
        values = values[:, 0] if self.y_is_1d else values
        if self.scaling is None:
            return values
        return values * (self.scaling.y_std[0] if self.y_is_1d else self.scaling.y_std)

    def _sigma2(self, given: Any) -> Floats:
        if given is None:
            if self.sigma2 is None:
                why = "" if self.solution.converged else ", its fit did not converge"
                raise ParameterError(f"this model does not know sigma2{why}", hint="give sigma2=, or fit again")
            sigma2 = self.sigma2
            # an estimate that left the range of float64 is refused; 0 where the fit leaves nothing
            for target in np.flatnonzero(~((sigma2 >= TINY) & (sigma2 < np.inf))):
                largest = float(np.abs(self.dual_coef.read(0, self.num_rows)[:, target]).max(initial=0.0))
                if not 0 <= sigma2[target] < np.inf or 0 < largest < SMALL_COEFFICIENTS:
                    raise NumericalError(
                        f"sigma2 of target {target} is y^T dual_coef / n with coefficients of at most {largest:.3g}, "
                        "which is beyond float64",
                        hint="scale the targets or the rows (standardize = true does both), or give sigma2=",
                    )
            return sigma2
        raw = np.asanyarray(given)
        values = to_floats(raw, "sigma2") if raw.dtype.kind in "iuf" else np.full(1, np.nan)
        if not np.isfinite(values).all() or (values < 0).any() or values.shape not in ((), (self.num_targets,)):
            raise ParameterError(
                f"sigma2 is {given!r}; a number of at least 0 expected, or one for each of {self.num_targets} targets"
            )
        return np.broadcast_to(values, (self.num_targets,))

    def half_widths(self, coverage: float, method: IntervalMethod, noisy_variance: Floats | None) -> Floats:
        """Half widths of prediction intervals in the units of y, (m, t), or (t,) for "jackknife".

        Parameters
        ----------
        noisy_variance
            var f / sigma^2 + alpha (m, t); not needed for "jackknife".

        Raises
        ------
        ParameterError
            The model has no quantiles, or too few rows for this coverage.
        """
        check_method(method)
        check_coverage(coverage)
        if method == "gaussian":
            width: Floats = ndtri((1 + coverage) / 2) * np.sqrt(self._sigma2(None))
        elif self.quantiles is None:
            raise ParameterError(
                f"this model holds no leave-one-out quantiles, which {method!r} intervals rest on",
                hint="predict_interval of the fitted estimator makes them, [evaluate] intervals = 0.9 in a job does",
            )
        else:
            width = self.quantiles.half_width(coverage, method)
        if noisy_variance is not None and method != "jackknife":
            width = width * np.sqrt(noisy_variance)
        return width if self.scaling is None else width * self.scaling.y_std

    def interval(
        self, values: Floats, coverage: float, method: IntervalMethod, variance: Floats | None
    ) -> tuple[Floats, Floats]:
        """Lower and upper ends around predictions (m,) or (m, t); ``variance`` is var f / sigma^2 (m, t)."""
        noisy = None if variance is None else variance + self.alphas
        width = self.half_widths(coverage, method, noisy)
        width = width[..., 0] if self.y_is_1d else width
        return values - width, values + width

    def with_quantiles(self, found: LeaveOneOut) -> Model:
        """The same model with what intervals need of leave-one-out residuals, which are in the units of y.

        Rows of weight 0 do not count. What is no Gaussian process, because its coefficients are not those of the rows,
        has no deviations to divide by.
        """
        seen = slice(None) if found.seen is None else found.seen
        scale = 1.0 if self.scaling is None else self.scaling.y_std
        precisions = None
        if self.provenance.get("solver") not in OTHER_SOLVERS:
            n, alphas = self.num_rows, self.alphas.tolist()
            distinct = list(dict.fromkeys(alphas))
            diagonal = found.inverse_diagonal[:, [distinct.index(alpha) for alpha in alphas]]
            weight = np.ones((n, 1)) if self.sample_weight is None else self.sample_weight.read(0, n)
            precisions = (weight * diagonal)[seen]
        model = replace(self, quantiles=Quantiles.of(found.residuals[seen] / scale, precisions))
        # it keeps factors that it has
        vars(model).update({name: value for name, value in vars(self).items() if name == "variance_systems"})
        return model

    def predict_std(self, X: Any, *, noise: bool = False, sigma2: Any = None) -> Floats:
        """Standard deviations (m,) or (m, t) of f at rows X (m, d), in the units of y.

        Parameters
        ----------
        noise
            Those of new observations of weight 1: sigma^2 alpha is added to the variance.
        sigma2
            None: the estimate of the fit, per target. A number fixes it, in the units in which the system was solved;
            1.0 gives the standard deviations of scikit-learn's ``GaussianProcessRegressor(optimizer=None)``.

        Raises
        ------
        ParameterError, StoreError
            See :attr:`variance_systems`.

        Cost
        ----
        n^2 flops and n kernel entries a row; the factor is read once every 1,024 rows (fewer beyond n = 32,768). Before
        it is first used, a stored factor is compared with the kernel: n^2 / 2 entries and two readings.
        """
        with single_blas_thread():
            return self.deviations(self.variance(X), noise=noise, sigma2=sigma2)

    def predict_interval(
        self, X: Any, coverage: float = 0.9, method: IntervalMethod = "jackknife"
    ) -> tuple[Floats, Floats]:
        """Lower and upper ends, (m,) or (m, t), of intervals that shall hold a new y with probability ``coverage``.

        Parameters
        ----------
        method
            "jackknife": of constant width, from leave-one-out residuals; needs no factor. "normalised": from the same
            residuals over their standard deviations, wider where f is uncertain. "gaussian": what the Gaussian process
            says, calibrated on nothing but sigma^2.

        Raises
        ------
        ParameterError
            The model holds no quantiles of leave-one-out residuals, or of too few rows.
        """
        check_method(method)
        with single_blas_thread():
            variance = None if method == "jackknife" else self.variance(X)
            return self.interval(self.predict(X), coverage, method, variance)

    def __getstate__(self) -> dict[str, Any]:
        """A copy finds its factors itself: the one in memory may be large."""
        return {name: value for name, value in self.__dict__.items() if name != "variance_systems"}


def _check_out(out: Any, shapes: Sequence[tuple[int, ...]]) -> None:
    """Refuse what would not take every prediction as it is, up to the rounding of its floats."""
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise ParameterError(f"out is of type {type(out).__name__}; a NumPy array expected")
    if out.dtype.kind != "f" or out.itemsize < 4:
        raise ParameterError(f"out has dtype {out.dtype}, which changes predictions; float64 or float32 expected")
    if out.shape not in shapes:
        raise ParameterError(f"out has shape {out.shape}; {shapes[0]} expected")
    if not out.flags.writeable:
        raise ParameterError("out is read-only; a writable array expected", hint='open a map with mode "r+" or "w+"')
    reach = sum((length - 1) * abs(stride) for length, stride in zip(out.shape, out.strides, strict=True))
    if out.size > 1 and reach + out.itemsize < out.nbytes:
        raise ParameterError(
            f"out has {out.size} entries and uses memory more than once, strides {out.strides}; "
            "a place for each prediction expected"
        )


def _share(out: Any, given: Any) -> bool:
    """Whether writing to ``out`` changes ``given``, or may: they share memory, or are two maps of one file."""
    if isinstance(out, np.ndarray) and isinstance(given, np.ndarray) and np.shares_memory(out, given):
        return True
    if not isinstance(out, np.memmap) or not isinstance(given, np.memmap) or out._mmap is given._mmap:  # type: ignore[attr-defined]
        return False
    one, other = out.filename, given.filename
    return one is not None and other is not None and os.path.exists(one) and os.path.samefile(one, other)


def _predict_part(block: Any, model: Model, block_info: Any = None) -> Floats:
    if block.size == 0:
        return np.empty((0,) if model.y_is_1d else (0, model.num_targets))
    start = block_info[0]["array-location"][0][0] if block_info else 0
    first_row = 0 if np.isnan(start) else int(start)  # chunks of unknown size
    values = model.predict_rows(np.ascontiguousarray(to_floats(block, "X", first_row)), first_row=first_row)
    return values[:, 0] if model.y_is_1d else values


def load_model(path: Any, *, verify: bool = True) -> Model:
    """Open a saved model. Nothing is unpickled; metadata is checked before any array is read.

    Parameters
    ----------
    path
        Folder or URL.
    verify
        Compare every key with the manifest (SHA-256, about a second a gigabyte). Chunks carry their own crc32c in
        any case.

    Raises
    ------
    StoreError
        Not a model, another format version, or a key that is missing, extra, or not what the manifest says.
    """
    check_place("path", path)
    path = str(path) if isinstance(path, Path) else path
    while True:
        manifest = read_key(path, MANIFEST)
        try:
            model = _opened(path, verify)
        except (DkrrError, OSError):
            if read_key(path, MANIFEST) == manifest:
                raise
        else:
            if read_key(path, MANIFEST) == manifest:
                return model

        # another model took its place meanwhile, and perhaps the place of a part of what was read


def _opened(path: Any, verify: bool) -> Model:
    root = local_root(path)
    if root is not None:
        put_back(root)
    refuse_links(path)
    known, attributes = file_states(path), _require_model(path)
    if verify:
        check_manifest(path)
    digest = manifest_digest(path)
    try:
        model = _from_attributes(path, attributes, digest, partial(check_unchanged, path, digest, known))
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise StoreError(f"{path} has unreadable metadata ({exc})", hint="restore it, or fit again") from exc
    return model.in_memory()


def _at_present(provenance: dict[str, Any], location: str) -> dict[str, Any]:
    """What a model of a run remembers, with the store beside that run where both were moved to another folder."""
    store = provenance.get("store")
    if not store or is_url(store) or is_url(location) or os.path.exists(store):
        return provenance
    beside = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(location))), os.path.basename(store))
    if not os.path.isdir(beside):
        return provenance
    factors = [beside + factor.removeprefix(store) for factor in provenance.get("factors", [])]
    return provenance | {"store": beside, "factors": factors}


def _from_attributes(path: Any, attributes: dict[str, Any], digest: str, check: Callable[[], None]) -> Model:
    """The model whose attributes these are, its arrays opened; raises whatever wrong attributes lead to."""
    attributes = dict.fromkeys(OPTIONAL) | attributes
    kernel_dict, inputs = attributes["kernel"], attributes["num_inputs"]

    def saved_rows(name: str) -> RowArray:
        rows = RowArray.open(path, name)
        return RowArray(rows.array, rows.num_rows, check, every_read=True)

    kernel = None if kernel_dict == {"kernel": "precomputed"} else kernel_from_dict(kernel_dict)
    found: dict[str, Any] = {name: attributes[name] for name in PLAIN}
    for name in VECTORS:
        found[name] = None if attributes[name] is None else np.asarray(attributes[name], dtype=np.float64)
    for name, kind in RECORDS.items():
        found[name] = None if attributes[name] is None else kind.from_dict(attributes[name])  # type: ignore[attr-defined]
    found |= {"made_up": tuple(found["made_up"]), "provenance": _at_present(found["provenance"], str(path))}
    model = Model(
        kernel=kernel,
        x_fit=None if kernel is None or inputs is not None else saved_rows("X_fit"),
        dual_coef=saved_rows("dual_coef"),
        features=None if inputs is None else feature_map(kernel, inputs),
        sample_weight=saved_rows("sample_weight") if attributes["weighted"] else None,
        location=str(path),
        digest=digest,
        **found,
    )
    basis = model.x_fit if model.features is None else model.features
    rows = getattr(basis, "num_rows", getattr(basis, "num_features", model.num_rows))
    if rows != model.num_rows:
        raise ValueError(f"{rows} training rows or features, {model.num_rows} coefficients")
    checked = {name: (found[name], getattr(model, count)) for name, count in VECTORS.items()}
    if model.scaling is not None:
        checked |= {
            "x_mean": (model.scaling.x_mean, model.num_features),
            "y_mean": (model.scaling.y_mean, model.num_targets),
        }
    for name, (values, count) in checked.items():
        if values is not None and values.shape != (count,):
            raise ValueError(f"{name} has shape {values.shape}, ({count},) expected")
    return model
