"""Solution: what a solve found and how well, independent of the solver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from dkrr.markup import facts_html, lines_text, named

__all__ = ["BACKWARD_ERROR_FACTOR", "Solution", "backward_error_bar", "limit_bar"]

# LAPACK's test suite calls a solve good when its ratio, which divides by n eps, is below 30.
BACKWARD_ERROR_FACTOR = 30.0
_EPS = {"float64": 2.220446049250313e-16, "float32": 1.1920928955078125e-07}


def limit_bar(n: int) -> float:
    """Of an iteration that gets no further: 30 n eps, and at most 100 eps, 100 times what rounding A moves it by."""
    return min(100 * _EPS["float64"], backward_error_bar(n, "float64"))


def backward_error_bar(n: int, precision: str) -> float:
    """30 n eps of the answer's precision."""
    return BACKWARD_ERROR_FACTOR * n * _EPS[precision]


@dataclass(frozen=True, kw_only=True, repr=False)
class Solution:
    """Facts about a solve of A u = S Y.

    Parameters
    ----------
    solver, precision
        What computed the answer.
    relative_residual
        |R| / |Y| per target, R = S Y - A u in float64 from the kernel and the rows, 2-norms; 0 for a zero target.
    backward_error
        |R| / (|A| |u| + |S Y|) per target in the infinity norm.
    num_iterations
        0 for a direct solve.
    seconds
        Wall time of each phase.
    message
        One sentence.
    reused
        What was there from earlier fits, see :meth:`dkrr.linalg.workspace.Workspace.record_reuse`: "factor", "gram",
        "start" where an iteration began with earlier coefficients, and "center" where newer rows met a frozen one.
        Empty where all was computed.
    given_up
        Ways that were tried before this one and did not lead to an answer: "way", "next", "because", "iterations" and
        a "sentence" each.
    """

    solver: str
    precision: str
    converged: bool
    num_iterations: int
    relative_residual: list[float]
    backward_error: list[float]
    seconds: dict[str, float] = field(default_factory=dict)
    message: str = ""
    reused: dict[str, Any] = field(default_factory=dict)
    given_up: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def __repr__(self) -> str:
        facts = dict(self._facts())
        state = "converged" if self.converged else "NOT converged"
        del facts["precision"], facts["converged"], facts["targets"]
        return lines_text(
            f"Solution: {self.solver}, {self.precision}, {state}",
            "; ".join([named(len(self.relative_residual), "target"), *(f"{name} {facts[name]}" for name in facts)]),
            self.message,
        )

    def _repr_html_(self) -> str:
        """For notebooks."""
        return facts_html(f"{self.solver} solution", self._facts(), self.message)

    def _facts(self) -> Iterator[tuple[str, str]]:
        worst = max(range(len(self.relative_residual)), key=self.relative_residual.__getitem__, default=None)
        yield "precision", self.precision
        yield "converged", "yes" if self.converged else "NO"
        if self.num_iterations:
            yield "iterations", f"{self.num_iterations:,}"
        yield "targets", f"{len(self.relative_residual):,}"
        if worst is not None:
            where = f" (target {worst})" if len(self.relative_residual) > 1 else ""
            yield "largest relative residual", f"{self.relative_residual[worst]:.2e}{where}"
            yield "largest backward error", f"{max(self.backward_error, default=0.0):.2e}"
        if self.seconds:
            yield "seconds", ", ".join(f"{name} {value:.2f}" for name, value in self.seconds.items())

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Solution:
        """Inverse of :meth:`to_dict`."""
        return cls(**values)
