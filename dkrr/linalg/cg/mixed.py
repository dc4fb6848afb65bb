"""Mixed precision: a float32 tile Cholesky factor with float64 conjugate gradients around it.

    P = L L^T = A + shift I    in float32, shift 0 unless that breaks down
    A u = S Y                  by conjugate gradients with P^-1, products and residuals in float64

Half the disk and about half the time of a float64 factor, for the float64 answer: what the true residual says does not
depend on the factor. Where A + alpha I is too ill-conditioned for a float32 factor, a shift is added *to the
preconditioner only*, which costs iterations; that is logged, stands in the solution's message, and is remembered in the
store (``breakdowns/<key>.json``) so that a fit that is continued does not break down again.

Cost
----
n^3 / 3 flops in float32, then for each iteration n^2 / 2 kernel entries and one reading of n^2 float32 elements.

References
----------
Higham and Mary, Mixed precision algorithms in numerical linear algebra, Acta Numerica 31 (2022), section 7; Higham and
Pranesh, Exploiting lower precision arithmetic in solving symmetric positive definite linear systems and least squares
problems, SIAM J. Sci. Comput. 43 (2021), for the shift.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from dkrr.errors import ConvergenceError, LockedError, NotPositiveDefiniteError
from dkrr.linalg.blocks import BlockColumns, FloatMatrix
from dkrr.linalg.catalogue import ancestors, factor_fields, key_of
from dkrr.linalg.cg.factor_precondition import FactorPreconditioner
from dkrr.linalg.cg.iteration import conjugate_gradients
from dkrr.linalg.cg.solver import CGSolver, PreparedCG
from dkrr.linalg.factor.direct import CholeskyFactor, CholeskySolver, factor_location
from dkrr.linalg.matmul import OperatorProduct
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.solution import IterativeSettings, Solution
from dkrr.linalg.workspace import Workspace
from dkrr.store.files import place, read_json, remove_array, write_json
from dkrr.store.lease import hold_lock
from dkrr.tiles import TileMatrix

logger = logging.getLogger("dkrr.linalg")


# In parts of eps32 times the trace, which bounds how far rounding moves an eigenvalue. On matern kernels of condition
# 1e9 a tenth was enough for 1,500 and 4,000 rows, and iterations grow with the root of the shift.
FIRST_SHIFT = 0.1
SHIFT_GROWTH = 10.0
MAX_SHIFTS = 4
# A pivot further below zero than this is no rounding of the matrix, and a shift that mends it is no small one.
NOT_ROUNDING = 10.0
# Iterations that look for a direction without curvature: duplicated rows and matrices of low rank showed one within 10.
NUM_CURVATURES = 16
EPS32 = float(np.finfo(np.float32).eps)


@dataclass(frozen=True, kw_only=True)
class MixedSolver:
    """Parameters of the mixed solver.

    Parameters
    ----------
    settings
        ``tol``, ``max_iter`` and ``allow_unconverged`` of the conjugate gradients.
    """

    settings: IterativeSettings

    def prepare(
        self,
        operator: RidgeOperator,
        workspace: Workspace,
        *,
        weight_digest: str | None = None,
        source_digest: str = "",
        at_once: bool = True,
        ready: Callable[[], object] = lambda: None,
    ) -> MixedFactor:
        """Factorise A in float32, continuing a factor with the same key where it was left. n^3 / 3 flops.

        Not ``at_once``, the factor is made when a solve first needs it: never, where its start is good already.
        ``ready`` is called before a stored Gram matrix of the operator is read.

        Where the float32 factor breaks down, A + shift I is factorised, the shift ten times as large each time, and
        sixteen iterations look for a direction along which float64 would break down, too.

        Raises
        ------
        NotPositiveDefiniteError
            Four shifts were not enough, or a pivot is further below zero than rounding explains; or A is not positive
            definite beyond the rounding of float64.
        """
        digests = {"weight_digest": weight_digest, "source_digest": source_digest}
        prepared = MixedFactor(solver=self, operator=operator, workspace=workspace, digests=digests, ready=ready)
        if at_once:
            _ = prepared.made
        return prepared

    def factorise(self, operator: RidgeOperator, workspace: Workspace, digests: dict[str, Any]) -> MadeFactor:
        """The factor, see :meth:`prepare`."""
        fields = factor_fields(operator, "float32", digests["weight_digest"], workspace.blas, digests["source_digest"])
        records, name = place(workspace.store, "breakdowns"), f"{key_of(fields)}.json"
        record = _known_breakdown(operator, fields, workspace.store)
        for _ in range(MAX_SHIFTS + 1):
            shifted = _shifted(operator, record)
            try:
                factor = CholeskySolver(precision="float32").prepare(shifted, workspace, **digests)
                factor.make_durable()
                break
            except NotPositiveDefiniteError as exc:
                error = exc
                record = _next_shift(operator, shifted, error, record)
                # first the record, then what it makes useless
                write_json(records, name, record)
                useless = factor_location(workspace.store, fields | {"alpha": shifted.alpha})
                with contextlib.suppress(LockedError), hold_lock(useless):  # who is at it finds the same
                    remove_array(useless)
        else:
            raise _beyond_shifts(operator, shifted, error) from error
        made = MadeFactor(factor, record)
        if record is not None:
            self._check_curvature(operator, made, record["row"])
        return made

    def _check_curvature(self, operator: RidgeOperator, made: MadeFactor, row: int) -> None:
        """Whether a float64 factor would exist where float32 breaks down at ``row``: a few iterations for random signs.

        P^-1 with P = A + shift I makes the directions along which A has no curvature the largest ones.

        Raises
        ------
        NotPositiveDefiniteError
            A has none beyond the rounding of float64.
        """
        workspace = made.factored.workspace
        scratch = place(workspace.store, "scratch")
        product = OperatorProduct(operator, workspace, scratch, phase="precondition", quiet=True)
        try:
            conjugate_gradients(
                product.exact,
                _signs(operator.grid.n),
                np.array([operator.alpha]),
                made.open(workspace, scratch),
                replace(self.settings, max_iter=NUM_CURVATURES, allow_unconverged=True),
                norm=product.norm,
            )
        except NotPositiveDefiniteError as exc:
            raise NotPositiveDefiniteError(
                f"the float32 factor breaks down at row {row:,}, and beyond rounding A is singular in float64, too "
                f"(random signs in the place of a target: {exc.message})",
                hint=exc.hint,
                **exc.details | {"row": row},
            ) from exc


def _signs(n: int) -> FloatMatrix:
    """Independent random signs (n, 1); sign i does not depend on n."""
    words = np.random.Philox(key=np.array([0, 0], dtype=np.uint64)).random_raw(-(-n // 64))
    bits = np.unpackbits(np.asarray(words, dtype="<u8").view(np.uint8), bitorder="little")
    return np.asarray(2.0 * bits[:n, None] - 1.0, dtype=np.float64)


def _shifted(operator: RidgeOperator, record: dict[str, Any] | None) -> RidgeOperator:
    """A + shift I as a breakdown demands it."""
    return operator.with_alpha(operator.alpha + (record["shift"] if record else 0.0))


def _known_breakdown(operator: RidgeOperator, fields: dict[str, Any], store: Any) -> dict[str, Any] | None:
    """What is remembered of the factor with these fields, or of one that it continues."""
    found = read_json(place(store, "breakdowns"), f"{key_of(fields)}.json")
    return found or _earlier_breakdown(operator, fields, store)


def _earlier_breakdown(operator: RidgeOperator, fields: dict[str, Any], store: Any) -> dict[str, Any] | None:
    """What is remembered of a factor of the first of these rows: with its shift that can be extended."""
    if operator.kernel is None or operator.rows is None:
        return None
    dataset = operator.rows.open()
    for ancestor in ancestors(store, dataset, fields["kernel"], kinds=["factors"]):
        if ancestor.differs_in(fields) <= {"alpha"}:
            unshifted = {**ancestor.fields, "alpha": operator.alpha}
            record = read_json(place(store, "breakdowns"), f"{key_of(unshifted)}.json")
            if record is not None:
                return dict(record)
    return None


def _next_shift(
    operator: RidgeOperator, shifted: RidgeOperator, error: NotPositiveDefiniteError, record: dict[str, Any] | None
) -> dict[str, Any]:
    """What is remembered of a breakdown, with the shift to try next; raises when no shift is the answer."""
    trace = float(operator.diagonal_from(0).sum()) + operator.grid.n * operator.alpha
    if trace <= 0:
        raise error  # in every precision
    if -float(error.pivot) > NOT_ROUNDING * EPS32 * trace:
        # A may be definite all the same: errors of the factor of a nearly singular one grow from column to column
        raise _beyond_shifts(operator, shifted, error) from error
    if record is None:
        record = {"row": int(error.row), "pivot": float(error.pivot), "shift": FIRST_SHIFT * EPS32 * trace}
    else:
        record = record | {"shift": SHIFT_GROWTH * float(record["shift"])}
    logger.warning(
        "the float32 factor of %s rows breaks down at row %s (pivot %.2g, alpha %.3g): "
        "preconditioning with a factor of A + %.2g I",
        f"{operator.grid.n:,}",
        f"{error.row:,}",
        error.pivot,
        shifted.alpha,
        record["shift"],
    )
    return record


def _beyond_shifts(
    operator: RidgeOperator, shifted: RidgeOperator, error: NotPositiveDefiniteError
) -> NotPositiveDefiniteError:
    """The error of a float32 factor that no shift helps; what it says of A is said in float32."""
    shift = shifted.alpha - operator.alpha
    matrix, too = (f"A + {shift:.2g} I", ", too") if shift else ("A", "")
    return NotPositiveDefiniteError(
        f"a float32 factor of {matrix} breaks down{too} ({error.message})",
        hint=error.hint,
        **error.details | {"precision": "float32"},
    )


@dataclass(frozen=True)
class MadeFactor:
    """The float32 factor of A, or of A + shift I.

    ``breakdown`` is None, or ``row`` and ``pivot`` where the factor of A broke down, and ``shift``.
    """

    factored: CholeskyFactor
    breakdown: dict[str, Any] | None

    @property
    def description(self) -> str:
        """A few words for messages."""
        grid = self.factored.factor.grid
        text = f"float32 Cholesky factor of {grid.n:,} rows in {grid.num_lower:,} tiles"
        if self.breakdown is None:
            return text
        return (
            f"{text}, of A + {self.breakdown['shift']:.2g} I because float32 broke down at row "
            f"{self.breakdown['row']:,} (pivot {self.breakdown['pivot']:.2g})"
        )

    def open(self, workspace: Workspace, scratch: Any) -> FactorPreconditioner:
        """Ready to be applied."""
        return FactorPreconditioner(
            self.factored.factor,
            workspace,
            scratch,
            operator=self.factored.operator,
            description=self.description,
        )


@dataclass(frozen=True, kw_only=True)
class MixedFactor:
    """A float32 factor: solves for any number of right-hand sides in float64.

    Parameters
    ----------
    operator
        A, in float64.
    digests
        ``weight_digest`` and ``source_digest``.
    """

    solver: MixedSolver
    operator: RidgeOperator
    workspace: Workspace
    digests: dict[str, Any]
    ready: Callable[[], object]

    @cached_property
    def made(self) -> MadeFactor:
        """The factor, made now if it was not needed before."""
        self.ready()
        return self.solver.factorise(self.operator, self.workspace, self.digests)

    @property
    def _is_made(self) -> bool:
        return "made" in vars(self)

    @property
    def factored(self) -> CholeskyFactor:
        """The factor that was made."""
        return self.made.factored

    @property
    def breakdown(self) -> dict[str, Any] | None:
        """Of the factor that was made."""
        return self.made.breakdown

    @property
    def factor(self) -> TileMatrix:
        """Its tiles."""
        return self.factored.factor

    @property
    def fields(self) -> dict[str, Any]:
        """What decides the tiles. A shift is known when they are made, and no other one is found when they are there:
        iterates that were kept belong to the same factor."""
        work, digests = self.workspace, self.digests
        return factor_fields(self.operator, "float32", digests["weight_digest"], work.blas, digests["source_digest"])

    def location(self) -> str | None:
        """Where the whole factor is, None where there is none: it was not needed, nor made before."""
        if self._is_made:
            return str(self.factor.location)
        work = self.workspace
        shifted = _shifted(self.operator, _known_breakdown(self.operator, self.fields, work.store))
        location = factor_location(work.store, self.fields | {"alpha": shifted.alpha})
        if read_json(location, "zarr.json") is None or TileMatrix.open(location).missing():
            return None
        return str(location)

    def solve(
        self, rhs: BlockColumns, start: FloatMatrix | None = None, *, in_plane: bool = False
    ) -> tuple[BlockColumns, Solution]:
        """Solve A u = rhs for all columns to a true relative residual of ``tol``, or to what float64 allows.

        A column whose true residual no restart halves any more has reached the limit of float64. It is accepted when
        :func:`~dkrr.linalg.solution.is_limit` says so, and the message says so, too.

        Parameters
        ----------
        rhs : BlockColumns (n, t)
            S Y. The state of an interrupted solve, and u, are kept beside it.
        start : (n, t), optional
            A guess of u.
        in_plane
            With an intercept, see :mod:`dkrr.linalg.cg.precondition`.

        Raises
        ------
        ConvergenceError
            A column is above ``tol`` and did not stagnate, or has a backward error above the bar; unless that is
            allowed.
        NotPositiveDefiniteError, PreconditionerError
            See :func:`dkrr.linalg.cg.iteration.conjugate_gradients`.
        """
        prepared = PreparedCG(
            solver=CGSolver(settings=self.solver.settings, accept_limit=True),
            operator=self.operator,
            workspace=self.workspace,
            make=lambda scratch: self.made.open(self.workspace, scratch),
            inexact=True,
            ready=self.ready,
            fields=self.fields | {"mixed": None},
        )
        try:
            u, found = prepared.solve(rhs, np.full(rhs.num_columns, self.operator.alpha), start, in_plane=in_plane)
        except ConvergenceError as exc:
            if not exc.stagnated:
                raise
            raise ConvergenceError(
                f"{exc.message}: float32 is no preconditioner at this condition",
                hint='set precision = "float64", whose factor needs no iterations, or raise alpha',
                **exc.details,
            ) from exc
        return u, replace(found, solver="cholesky", precision="mixed")
