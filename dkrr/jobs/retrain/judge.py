"""Is a new model good enough to be served? Its score beside that of the model in production, and what must hold.

Both models predict the same held-out rows, each with its own scaling, and are compared in the target's units. Neither
has seen those rows, in any fit. A gate does not trust: every check says what was seen and what was allowed, and all of
them must pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from dkrr.dataset import Dataset
from dkrr.engine.tasks import Executor, InProcessExecutor, Progress
from dkrr.errors import StoreError
from dkrr.jobs.prepare import prepare
from dkrr.jobs.registry import NamedModel
from dkrr.jobs.retrain.drift import Finding
from dkrr.jobs.retrain.spec import GateSpec
from dkrr.jobs.spec import JobSpec
from dkrr.models.large_predictions import MAX_IN_PROCESS_ENTRIES
from dkrr.models.model import Model, load_model
from dkrr.models.prediction import LOWER_IS_BETTER, Score, score_dataset
from dkrr.threads import single_blas_thread

__all__ = ["Check", "evaluate", "judge", "score_of"]


@dataclass(frozen=True)
class Check:
    """One thing that must hold: whether it does, and a sentence with what was seen and allowed."""

    name: str
    passed: bool
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def evaluate(
    job: JobSpec,
    store: str,
    dataset: Dataset,
    named: NamedModel,
    candidate: str,
    production: str | None,
    *,
    score: dict[str, Any] | None,
    start: Callable[[], AbstractContextManager[Executor]],
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Scores of two versions on the held-out rows of a job.

    Parameters
    ----------
    dataset
        What the candidate was fitted on: by now there may be other rows in their places.
    candidate, production
        Ids of versions; None where nothing is in production.
    score
        What the run of the candidate found on these very rows; None to predict them.
    start
        Makes an executor, where there is too much to predict for this process.
    """
    test = prepare(job, store, dataset).test
    if test is None:
        raise StoreError("the fit has no held-out rows", hint="say which in [holdout]")
    found: dict[str, Any] = {"num_rows": test.num_rows, "candidate": score, "production": None}
    wanted = {} if score is not None else {"candidate": candidate}
    if production is not None:
        wanted["production"] = production
    for role, version in wanted.items():
        model = load_model(named.resolve(version).model_path)
        found[role] = asdict(_scored(model, test, start, progress))
    return found


def _scored(model: Model, test: Any, start: Any, progress: Progress | None) -> Score:
    if test.num_rows * model.num_rows <= MAX_IN_PROCESS_ENTRIES:
        with single_blas_thread():
            return score_dataset(model, test, InProcessExecutor(), progress)[0]
    with start() as executor:
        return score_dataset(model, test, executor, progress)[0]


def judge(
    gate: GateSpec, fit: dict[str, Any], scores: dict[str, Any], production: str | None, drift: list[Finding]
) -> list[Check]:
    """The checks of a gate.

    Parameters
    ----------
    fit
        ``relative_residual``, or ``gap`` of another loss than the square, per target, and ``converged``.
    scores
        What :func:`evaluate` found.
    production
        The version that is compared with.
    drift
        What is beyond its limit in the statistics of the whole data set.
    """
    num_rows = int(scores["num_rows"])
    checks = [
        Check(
            "held-out rows",
            num_rows >= gate.min_rows,
            f"{num_rows:,} held-out rows, at least {gate.min_rows:,} needed to judge",
        )
    ]
    figure, values = ("duality gap", fit["gap"]) if fit.get("gap") else ("relative residual", fit["relative_residual"])
    worst = max((_number(value) for value in values), default=math.inf)
    checks.append(
        Check(
            "residual",
            bool(fit["converged"]) and worst <= gate.max_residual,
            f"{figure} {worst:.2g}, at most {gate.max_residual:.2g} allowed"
            + ("" if fit["converged"] else "; the solver did not converge"),
        )
    )
    candidate = score_of(scores["candidate"])
    metric = gate.metric or ("log_loss" if candidate.log_loss is not None else candidate.metric)
    checks.append(_against_constant(gate, metric, candidate))
    if scores["production"] is not None:
        checks.append(_against(gate, metric, candidate, score_of(scores["production"]), production))
    names = ", ".join(sorted({finding.column for finding in drift}))
    sentence = "; ".join(finding.sentence for finding in drift[:3])
    checks.append(
        Check(
            "drift",
            not drift,
            f"the data set has drifted in {names}: {sentence}" if drift else "the data set is like the frozen one",
        )
    )
    return checks


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
    if metric.endswith("accuracy"):  # a class that no held-out row has tells nothing
        r2 = _number(candidate.value("r2"), -math.inf)
    else:
        r2 = min(_number(value, -math.inf) for value in candidate.r2)
    return Check(
        "better than the mean",
        r2 > gate.min_r2,
        f"r2 {r2:.4g} on held-out rows, more than {gate.min_r2:g} needed"
        + ("" if r2 > 0 else "; the mean of the targets predicts them as well: nothing was learnt that holds"),
    )


def _against(gate: GateSpec, metric: str, candidate: Score, production: Score, version: str | None) -> Check:
    new, old = candidate.value(metric), production.value(metric)
    if metric in LOWER_IS_BETTER:
        bar = old * (1 + gate.tolerance)
        passed = new <= bar
        allowed = f"at most {bar:.6g}"
    else:
        bar = old - gate.tolerance
        passed = new >= bar
        allowed = f"at least {bar:.6g}"
    return Check(
        "score",
        passed,
        f"{metric} {new:.6g} on {candidate.num_rows:,} held-out rows, {old:.6g} of {version} in production, "
        f"{allowed} allowed",
    )


def score_of(record: dict[str, Any]) -> Score:
    """A score as a record has it: what was not finite became None."""
    lists = ("rmse", "r2", "rmse_whitened", "coverage", "pinball")
    values: dict[str, Any] = dict(record)
    for name in lists:
        if values.get(name):
            values[name] = [math.nan if item is None else item for item in values[name]]
    return Score(**values)


def _number(value: Any, otherwise: float = math.inf) -> float:
    """A figure of a record, where what is not finite became None."""
    return otherwise if value is None or not math.isfinite(value) else float(value)
