"""Is a new model good enough to be served? Its score beside that of the model in production, and what must hold.

Both models predict the same held-out rows, each with its own scaling, and are compared in the target's units. Neither
has seen those rows, in any fit. A gate does not trust: every check says what was seen and what was allowed, and all of
them must pass.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from dkrr.jobs.retrain.drift import Finding
from dkrr.jobs.retrain.spec import GateSpec
from dkrr.models.prediction import LOWER_IS_BETTER, Score


class Check(NamedTuple):
    """One thing that must hold: whether it does, and a sentence with what was seen and allowed."""

    name: str
    passed: bool
    sentence: str


def judge(
    gate: GateSpec, fit: dict[str, Any], scores: dict[str, Any], production: str | None, drift: list[Finding]
) -> list[Check]:
    """The checks of a gate.

    Parameters
    ----------
    fit
        ``relative_residual``, or ``gap`` of another loss than the square, per target, and ``converged``.
    scores
        ``num_rows`` of the held-out rows, and scores of the ``candidate`` and of what is in ``production``, or None.
    production
        The version that is compared with.
    drift
        What is beyond its limit in the statistics of the whole data set.
    """
    num_rows, candidate = int(scores["num_rows"]), score_of(scores["candidate"])
    figure, values = ("duality gap", fit["gap"]) if fit.get("gap") else ("relative residual", fit["relative_residual"])
    worst = max((_number(value, math.inf) for value in values), default=math.inf)
    metric = gate.metric or ("log_loss" if candidate.log_loss is not None else candidate.metric)
    columns = ", ".join(sorted({finding.column for finding in drift}))
    checks = [
        enough_rows(gate, num_rows),
        Check(
            "residual",
            bool(fit["converged"]) and worst <= gate.max_residual,
            f"{figure} {worst:.2g}, at most {gate.max_residual:.2g} allowed"
            + ("" if fit["converged"] else "; the solver did not converge"),
        ),
        _against_constant(gate, metric, candidate),
    ]
    if scores["production"] is not None:
        new, old = candidate.value(metric), score_of(scores["production"]).value(metric)
        is_lower = metric in LOWER_IS_BETTER
        bar = old * (1 + gate.tolerance) if is_lower else old - gate.tolerance
        sentence = (
            f"{metric} {new:.6g} on {candidate.num_rows:,} held-out rows, {old:.6g} of {production} in production, "
            f"at {'most' if is_lower else 'least'} {bar:.6g} allowed"
        )
        checks.append(Check("score", new <= bar if is_lower else new >= bar, sentence))
    sentence = f"the data set has drifted in {columns}: " + "; ".join(finding.sentence for finding in drift[:3])
    checks.append(Check("drift", not drift, sentence if drift else "the data set is like the frozen one"))
    return checks


def enough_rows(gate: GateSpec, num_rows: int) -> Check:
    """Whether there are enough held-out rows to judge by."""
    sentence = f"{num_rows:,} held-out rows, at least {gate.min_rows:,} needed to judge"
    return Check("held-out rows", num_rows >= gate.min_rows, sentence)


def _against_constant(gate: GateSpec, metric: str, candidate: Score) -> Check:
    """Whether something was learnt: r2, or the same of another metric, by which the best constant has 0."""
    constant = (candidate.of_constant or {}).get(metric)
    if constant is not None:
        best = 0.0 if metric in LOWER_IS_BETTER else 1.0
        gained = 1.0 - (best - candidate.value(metric)) / (best - constant) if constant != best else -math.inf
        return Check(
            "better than a constant",
            gained > gate.min_r2,
            f"{metric} {candidate.value(metric):.4g} on held-out rows, {constant:.4g} of the best constant: "
            f"{gained:.4g} of what is between it and {best:g} is gained, more than {gate.min_r2:g} needed",
        )
    # a class that no held-out row has tells nothing
    values = [candidate.value("r2")] if metric.endswith("accuracy") else candidate.r2
    r2 = min(_number(value, -math.inf) for value in values)
    return Check(
        "better than the mean",
        r2 > gate.min_r2,
        f"r2 {r2:.4g} on held-out rows, more than {gate.min_r2:g} needed"
        + ("" if r2 > 0 else "; the mean of the targets predicts them as well: nothing was learnt that holds"),
    )


def score_of(record: dict[str, Any]) -> Score:
    """A score as a record has it: what was not finite became None."""
    lists = {name: value for name, value in record.items() if isinstance(value, list)}
    return Score(**record | {name: [_number(item, math.nan) for item in value] for name, value in lists.items()})


def _number(value: Any, otherwise: float) -> float:
    """A figure of a record, where what is not finite became None."""
    return otherwise if value is None or not math.isfinite(value) else float(value)
