"""What a fit did, as it is printed and as ``result.json`` keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dkrr.engine.tasks import RunSummary
from dkrr.jobs.planned import Plan
from dkrr.linalg.solution import Solution
from dkrr.linalg.workspace import Workspace
from dkrr.models.prediction import Score

__all__ = ["FitSummary", "peaks", "summary_of"]


@dataclass
class FitSummary:
    """What a fit did: sizes, seconds per phase, rates, memory, residual, score. Sizes in bytes, times in seconds.

    ``reused`` is what earlier fits saved (:class:`~dkrr.linalg.solution.Solution`, and "scaling"), ``data`` names the
    rows of the job's data set, ``training_rows`` where they are as the kernel saw them: a later fit takes the scaling
    from there, so `dkrr gc` leaves them. ``given_up`` are the ways that led to no answer before this one.

    With another ``loss`` than the square there are ``certificates`` instead of residuals, and ``num_support`` rows are
    in the model; ``history`` has [iteration, gap, violation] of some iterations of each of ``target_names``. Of several
    C ``path`` has a dict for each, in increasing order, with its model and its score on the held-out rows, by which one
    was chosen; the rest is that of the chosen one.
    """

    run_directory: str
    model_path: str
    plan: Plan
    seconds: dict[str, float]
    tiles_computed: int
    tiles_total: int
    flops_per_second: float
    solver: str
    precision: str
    converged: bool
    num_iterations: int
    peak_rss_bytes: dict[str, int]
    client_peak_rss_bytes: int
    relative_residual: list[float]
    backward_error: list[float]
    message: str
    intercept: list[float] | None = None
    leave_one_out: dict[str, Any] | None = None
    score: Score | None = None
    metric: str = ""
    kept: dict[str, int] = field(default_factory=dict)
    reused: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    training_rows: str = ""
    estimated_seconds: dict[str, float] = field(default_factory=dict)
    given_up: list[dict[str, Any]] = field(default_factory=list)
    loss: dict[str, Any] | None = None
    num_support: int | None = None
    target_names: list[str] = field(default_factory=list)
    certificates: list[dict[str, Any]] = field(default_factory=list)
    history: list[list[list[float]]] = field(default_factory=list)
    path: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        from dataclasses import asdict

        return asdict(self) | {"plan": self.plan.to_dict()}

    def table(self) -> Any:
        """The summary as a rich table."""
        from dkrr.jobs.tables import facts_table, fit_facts

        return facts_table("fit", fit_facts(self))

    def _repr_html_(self) -> str:
        """For notebooks."""
        from dkrr.jobs.tables import fit_facts
        from dkrr.markup import facts_html

        return facts_html("fit", fit_facts(self))


def summary_of(
    plan: Plan, workspace: Workspace, directory: str, model_path: str, solution: Solution, intercept: Any
) -> FitSummary:
    """The figures of a solve; seconds, memory and score are added at the end of the run."""
    factor = workspace.phases.get("factorise", RunSummary())
    return FitSummary(
        run_directory=directory,
        model_path=model_path,
        plan=plan,
        seconds={},
        tiles_computed=factor.num_computed,
        tiles_total=0,
        flops_per_second=factor.flops_computed / factor.seconds if factor.num_computed else 0.0,
        solver=solution.solver,
        precision=solution.precision,
        converged=solution.converged,
        num_iterations=solution.num_iterations,
        peak_rss_bytes={},
        client_peak_rss_bytes=0,
        relative_residual=solution.relative_residual,
        backward_error=solution.backward_error,
        message=solution.message,
        intercept=None if intercept is None else intercept.tolist(),
        reused=_reused(plan, solution),
        given_up=solution.given_up,
        loss=plan.loss,
        certificates=[certificate.to_dict() for certificate in solution.certificates],
    )


def _reused(plan: Plan, solution: Solution) -> dict[str, Any]:
    """What was there from earlier fits and what that saved: seconds as measured, else as the plan expected."""
    found: dict[str, Any] = {name: dict(values) for name, values in solution.reused.items()}
    if "scaling" in plan.reused:
        found["scaling"] = plan.reused["scaling"]
    factor = found.get("factor")
    if factor is not None and factor["seconds"] is None:
        factor["seconds"] = plan.reused.get("factor", {}).get("seconds")
    return found


def peaks(workspace: Workspace) -> dict[str, int]:
    """Peak resident bytes of every worker over all phases."""
    found: dict[str, int] = {}
    for summary in workspace.phases.values():
        for worker, peak in summary.peak_rss_bytes.items():
            found[worker] = max(found.get(worker, 0), peak)
    return found
