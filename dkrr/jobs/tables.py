"""What plans, fits and searches say in names and values: for terminals, notebooks and the page of a run.

Costs nothing of NumPy or Dask: everything comes from the plain data of a plan and of a ``result.json``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dkrr.markup import (
    DASH,
    Facts,
    cut,
    facts_html,
    kernel_words,
    known,
    listed,
    loss_words,
    number,
    reasons_of,
    seconds,
    size,
)
from dkrr.store.files import join

if TYPE_CHECKING:
    from dkrr.jobs.plan import Plan
    from dkrr.jobs.run import FitSummary
    from dkrr.jobs.tune import TuneSummary

MOST_CANDIDATES = 12
_EPS = {"float32": 1.1920928955078125e-07}


class Shown:
    """What is shown as names and values: as a table in terminals, another in notebooks."""

    def facts(self) -> Facts:
        """Names and values."""
        raise NotImplementedError

    def table(self) -> Any:
        """A rich table."""
        return facts_table(type(self).__name__.removesuffix("Summary").lower(), self.facts())

    def __rich__(self) -> Any:
        return self.table()

    def _repr_html_(self) -> str:
        """For notebooks."""
        return facts_html(type(self).__name__.removesuffix("Summary").lower(), self.facts())


def facts_table(title: str, facts: Iterable[tuple[str, str]]) -> Any:
    """Names and values as a rich table."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a path is wrapped, and never cut
    for name, text in facts:
        style = "bold" if name.startswith(("held-out", "leave-one-out")) else ""
        table.add_row(Text(name, "red" if name in ("refused", "not converged") else "cyan"), Text(text, style))
    return table


# --- plans ------------------------------------------------------------------------------------------------------------


def plan_facts(plan: Plan) -> Facts:
    """What the job needs and what there is."""
    document, side, has_factor = plan.to_dict(), plan.num_tiles_per_side, plan.solver == "cholesky"
    tasks = f"{plan.num_tasks:,} tasks, " if has_factor else ""
    parts = ", ".join(f"{name} {size(value)}" for name, value in plan.disk_bytes.items() if value)
    phases = ", ".join(f"{name} {value:.1f}" for name, value in plan.estimated_seconds.items())
    ways = candidate_rows(document)
    return known(
        *_what(plan, f"; {plan.num_test_rows:,} held out" if plan.num_test_rows else ""),
        *((f"  {name}", text) for name, text in reasons_of(document)),
        ("tiles", has_factor and f"{plan.tile_size} rows; {side} a side, {side * (side + 1) // 2:,} in all"),
        ("work", f"{tasks}{plan.flops:.3g} flops"),
        ("schedule", has_factor and plan.expected_efficiency and _schedule(plan)),
        ("workers", f"{plan.workers}, memory limit {size(plan.memory_limit_bytes)} each"),
        ("memory", f"projected peak {size(plan.task_bytes)} a worker, {size(plan.client_bytes)} this process"),
        ("disk", f"{size(plan.disk_needed_bytes)} to write ({parts}); {size(plan.disk_free_bytes)} free"),
        ("iterations", _between(*plan.iterations or (0, 0))),
        ("estimated", f"{_between(plan.estimated_low_seconds, plan.total_seconds)} s ({phases})"),
        ("candidates", ways and f"{len(plan.candidates)} in all: time, iterations, memory of a worker, on disk"),
        *((f"  {name}", ", ".join(rest)) for name, *rest in ways),
        *(("note", note) for note in plan.notes),
        ("refused", plan.refusal + (f": {plan.hint}" if plan.hint else "")),
    )


def _what(plan: Plan, held_out: str = "") -> Facts:
    """Rows, model and solver of a plan."""
    targets = f"{plan.num_targets} target{'s' * (plan.num_targets != 1)}"
    loss = f"{loss_words(plan.loss)}, " if plan.loss else ""
    how = f", Gram matrix {plan.gram.replace('_', ' ')}"
    if plan.solver == "primal":
        how = ": explicit features, no Gram matrix"
    elif plan.loss is not None:
        how = ": rows in this process, columns of the Gram matrix made when needed"
    elif plan.nystrom is not None:
        how = f", {plan.nystrom['num_centers']:,} centres: an approximation"
    elif plan.solver == "cg":
        how = f", {f'preconditioner of rank {plan.rank:,}' if plan.rank else 'no preconditioner'}{how}"
    return [
        ("training rows", f"{plan.num_rows:,} x {plan.num_features:,}, {targets}{held_out}"),
        ("model", f"{kernel_words(plan.kernel)}, {loss}alpha {', '.join(f'{value:g}' for value in plan.alpha)}"),
        ("solver", f"{plan.solver if plan.nystrom is None else 'nystrom'}, {plan.precision}{how}"),
    ]


def _schedule(plan: Plan) -> str:
    """How busy the workers will be, and which sums are split for it."""
    count, split = plan.workers * plan.threads_per_worker, plan.split or {}
    text = f"{count:,} worker{'s' * (count > 1)} busy {plan.expected_efficiency:.0%} of the factorisation, simulated"
    if not split.get("num_columns"):
        return text + "; no sum is split"
    last, terms = min(split["num_columns"], plan.num_tiles_per_side), split["num_last"]
    where = "all columns" if last == plan.num_tiles_per_side else f"the last {last} columns"
    return f"{text}; sums of {where} are split before the last {terms} term{'s' * (terms > 1)}"


def _between(low: float, high: float) -> str:
    """Two numbers, one where they are the same, or the lower one is not known; "" where there is none."""
    first, last = f"{low:,.0f}", f"{high:,.0f}"
    return (last if not low or first == last else f"{first} to {last}") if high else ""


def candidate_rows(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The cheapest ways: name, time, iterations, memory of a worker, disk, what makes it impossible; of two or more."""
    ways = plan.get("candidates") or []
    cheapest = sorted(ways, key=lambda item: (bool(item.get("infeasible")), item.get("total_seconds") or 0.0))
    return [
        (
            cut(item.get("name", "")),
            seconds(item.get("total_seconds")),
            _between(span["low"], span["high"]) if (span := item.get("iterations")) else DASH,
            size(item.get("memory_bytes")),
            size(sum((item.get("disk_bytes") or {}).values())),
            cut(f"not possible: {item['infeasible']}" if item.get("infeasible") else "possible"),
        )
        for item in cheapest[: MOST_CANDIDATES * (len(ways) > 1)]
    ]


# --- fits -------------------------------------------------------------------------------------------------------------


def fit_facts(summary: FitSummary) -> Facts:
    """What the fit did, in the order in which it did it."""
    result, plan = summary.to_dict(), summary.plan.to_dict()
    compared = [(name, *rest) for name, *rest, _ in time_rows(plan, summary.seconds)] + size_rows(plan, result)
    return known(
        *_what(summary.plan),
        *(("went on", item["sentence"]) for item in summary.given_up),
        *reuse_facts(result, summary.reused),
        *(
            (name, actual + (f" ({expected} expected)" if expected != DASH else ""))
            for name, expected, actual in compared
            if actual != DASH
        ),
        *exactness_facts(plan, result),
        ("not converged", not summary.converged and summary.message),
        ("intercept", summary.intercept and listed(summary.intercept)),
        *leave_one_out_facts(result),
        *((f"  {name}", ", ".join(filter(None, rest))) for name, *rest in path_rows(result)),
        *((f"held-out {name}", text) for name, text in score_facts(result)),
        ("model in", summary.model_path),
        ("report in", join(summary.run_directory, "report.html")),
    )


def time_rows(plan: Mapping[str, Any], spent: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Expected and actual time of every phase, and of all of them; and how many times as much it took."""
    expected = plan.get("estimated_seconds") or {}
    whole = plan.get("total_seconds") or sum(expected.values())
    rows = []
    for name in [*dict.fromkeys(name for name in [*spent, *expected] if name != "total"), "total"]:
        first, second = (whole if name == "total" else expected.get(name)), spent.get(name)
        ratio = second / first if first and second else None
        words = DASH if ratio is None else "< 0.01 times" if ratio < 0.01 else f"{ratio:.2g} times"
        rows.append((cut(name, 60), *(DASH if t is None else seconds(t) for t in (first, second)), words))
    low = plan.get("estimated_low_seconds") or whole
    if abs(low - whole) >= 0.05 * whole:
        rows[-1] = ("total", f"{seconds(low)} to {seconds(whole)}", *rows[-1][2:])
    return rows


def size_rows(plan: Mapping[str, Any], result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Expected and actual memory, disk and iterations."""
    peak, client = max((result.get("peak_rss_bytes") or {}).values(), default=0), result.get("client_peak_rss_bytes")
    kept, took = f"{size(sum((result.get('kept') or {}).values()))} of matrices kept", result.get("num_iterations")
    rows = [
        ("peak memory of a worker", size(plan.get("task_bytes")), size(peak) if peak else DASH),
        ("peak memory of the driver", size(plan.get("client_bytes")), size(client) if client else DASH),
        ("on disk", size(sum((plan.get("disk_bytes") or {}).values())), kept if result else DASH),
        ("iterations", _between(*plan.get("iterations") or (0, 0)), DASH if took is None else number(took)),
    ]
    return [row for row in rows if row[1]]


def exactness_facts(plan: Mapping[str, Any], result: Mapping[str, Any]) -> Facts:
    """How near the answer is to the exact one, for the least exact target."""
    if certificates := result.get("certificates"):
        return [
            ("loss", loss_words(result.get("loss") or plan.get("loss"))),
            ("largest duality gap", f"{max(item['gap'] for item in certificates):.3e}"),
            ("largest KKT violation", f"{max(item['kkt'] for item in certificates):.3e}"),
            ("support vectors", f"{number(result.get('num_support'))} of {number(plan.get('num_rows'))} rows"),
        ]
    backward, precision = result.get("backward_error") or [], str(result.get("precision", "float64"))
    bar = f"{30 * plan.get('num_rows', 0) * _EPS.get(precision, 2.0**-52):.3e} ({precision})"
    return [
        ("largest relative residual", f"{max(result['relative_residual']):.3e}"),
        ("largest backward error", f"{max(backward):.3e}" if backward else "unknown"),
        ("30 n eps", f"{bar}; a direct solve with a larger backward error fails"),
    ]


def leave_one_out_facts(result: Mapping[str, Any]) -> Facts:
    """The error, its generalised estimate and the degrees of freedom of every target."""
    found = result.get("leave_one_out") or {}
    return known(
        ("leave-one-out rmse", listed(found.get("rmse") or [])),
        ("leave-one-out rmse, by generalised cross validation", listed([v**0.5 for v in found.get("gcv") or []])),
        ("degrees of freedom", listed(found.get("degrees_of_freedom") or [], ",.1f")),
    )


def path_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Several C: the value, its alpha, its score on the held-out rows, support vectors, gap, and which was chosen."""
    return [
        (
            f"C {point['C']:g}",
            f"alpha {listed(point['alpha'], 'g')}",
            f"{cut(point['metric'], 40)} {number(point['score'])}",
            f"{number(point['num_support'])} support vectors",
            f"gap {point['gap']:.1e}",
            "chosen" if point["chosen"] else "",
        )
        for point in result.get("path") or []
    ]


def score_facts(result: Mapping[str, Any]) -> Facts:
    """Scores on the held-out rows."""
    score: dict[str, Any] = result.get("score") or {}
    inside, coverage = ", ".join(f"{share:.1%}" for share in (score.get("coverage") or [])[:8]), score.get("intervals")
    how = "between the outer quantiles" if score.get("pinball") else "inside (jackknife)"
    shares = {name.replace("_", " "): score.get(name) for name in ("accuracy", "balanced_accuracy")}
    names = {"r2": "R²", "pinball": "pinball loss"}
    return known(
        ("rows", score and number(score.get("num_rows"))),
        *((name, value is not None and f"{value:.2%}") for name, value in shares.items()),
        ("log loss", score.get("log_loss") is not None and f"{score['log_loss']:.5g}"),
        *((names.get(k, k), score.get(k) and listed(score[k])) for k in ("rmse", "r2", "pinball")),
        ("rmse / std of targets", score.get("rmse_whitened") and listed(score["rmse_whitened"])),
        (f"{100 * (coverage or 0):g} % intervals", coverage and inside and f"{inside} of these rows are {how}"),
        ("metric of the job", score and cut(result.get("metric") or "")),
    )


def reuse_facts(result: Mapping[str, Any], reused: dict[str, Any]) -> Facts:
    """What was found, in an earlier attempt or of earlier fits, and what is kept for later ones."""
    total, computed = result.get("tiles_total") or 0, result.get("tiles_computed") or 0
    kept = list((result.get("kept") or {}).items())[:8]
    return known(
        ("tiles of the factor", total and f"{total:,}, {computed:,} computed, {total - computed:,} found valid"),
        *((name, cut(text)) for name, text in reused_rows(reused)[:20]),
        *(("kept for later", f"{size(num_bytes)} in {cut(place, 200)}") for place, num_bytes in kept),
    )


def reused_rows(reused: dict[str, Any]) -> Facts:
    """What earlier fits in the store saved (``reused`` of a summary or a status), in words."""
    rows = []
    for name in ("factor", "gram"):
        if (found := reused.get(name)) is not None:
            text = f"{found['rows']:,} of {found['of_rows']:,} rows of the {name}, {found['share']:.1%} of its work"
            rows.append(("reused", text + (f", about {found['seconds']:,.1f} s" if found.get("seconds") else "")))
    rows += [("not reused", reason) for reason in reused.get("not_continued", {}).values()]
    for name, key, frozen, anew in (
        ("scaling", "scaling", "that of earlier rows", "of all rows, anew"),
        ("centre", "center", "the mean of earlier rows", "that of all rows, anew"),
    ):
        found = reused.get(key)
        if found is not None and (found[key] != "frozen" or found["drift"]["rows"] or key == "center"):
            drift = f"{found['drift']['rows']:,} newer rows drift by {found['drift']['value']:.2g}"
            rows.append((name, f"{frozen if found[key] == 'frozen' else anew}; {drift}, limit {found['limit']:g}"))
    if (start := reused.get("start")) is not None:
        rows.append(("start", f"coefficients of {start['rows']:,} rows, from {start['source']}"))
    return rows


# --- searches ---------------------------------------------------------------------------------------------------------


def tune_table(summary: TuneSummary) -> Any:
    """The finalists of a search beside each other, and where everything is."""
    from rich.console import Group
    from rich.table import Table

    result, loss = summary.result, summary.settings.fold_loss
    finalists = Table(title="tune", title_justify="left", title_style="bold", box=None)
    penalty = "alpha" if loss is None else "C"
    for name in ("kernel", "widths", "from", penalty, "error", "s.e.", "condition", "rows", ""):
        finalists.add_column(name, justify="left" if name in ("kernel", "widths", "from", "") else "right")
    for candidate in result.candidates:
        finalists.add_row(
            candidate.family,
            "per feature" if candidate.kind == "per_feature" else f"{candidate.widths[0]:.4g}",
            candidate.origin + (f" x {candidate.factor:.2g}" if candidate.factor != 1.0 else ""),
            f"{candidate.alpha if loss is None else 0.5 / candidate.alpha:.3g}",
            f"{candidate.loo_rmse:.4f}",
            "" if candidate.excess_error is None else f"{candidate.excess_error:.4f}",
            "" if candidate.condition is None else f"{candidate.condition:.1e}",
            f"{candidate.num_rows:,}",
            f"[bold]{result.mark(candidate)}[/bold]",
        )
    error = "leave-one-out, in standard deviations of the target"
    if loss is not None:
        error = f"{loss.words} of {loss.num_folds} folds, less is better"
    facts = known(
        ("error", f"{error}; s.e.: of its difference to the smallest"),
        *_cost_and_saving(summary),
        ("trials", f"{len(result.records)}, {result.seconds:.0f} s"),
        *(("note", note) for note in result.notes),
        ("job", summary.path),
        ("trials in", summary.trials_path),
        ("search in", summary.search_path),
        ("picture", summary.picture_path),
    )
    return Group(finalists, facts_table("", facts))


def _cost_and_saving(summary: TuneSummary) -> Facts:
    """What it costs to fit what was chosen instead of the smallest error, and what it saves."""
    best, least, foreseen_seconds = summary.result.best, summary.result.least_error, summary.foreseen_seconds
    foreseen = f"about {foreseen_seconds['best']:.0f} s" if "best" in foreseen_seconds else ""
    if best is least:
        nothing = "nothing: the smallest error" + (" is the best conditioned of those as good" * bool(best.condition))
        return known(("cost", nothing), ("fit", foreseen))
    cost = best.loo_rmse / least.loo_rmse - 1.0 if least.loo_rmse else 0.0
    saved = f"condition {best.condition:.1e} instead of {least.condition:.1e}"
    if "least_error" in foreseen_seconds and foreseen:
        saved += f", a fit of {foreseen} instead of {foreseen_seconds['least_error']:.0f} s"
    return [("cost", f"error +{100 * cost:.2f} %, as good as the smallest"), ("saved", saved)]
