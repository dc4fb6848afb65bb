"""Plans and summaries as names and values for people, which terminals and notebooks show in their ways."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dkrr.markup import Facts, facts_html, kernel_words, known, loss_words, reasons_of, size
from dkrr.store.files import join

if TYPE_CHECKING:
    from dkrr.jobs.plan import Plan
    from dkrr.jobs.run import FitSummary
    from dkrr.jobs.tune import TuneSummary
    from dkrr.models.prediction import Score


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
    table.add_column()
    for name, text in facts:
        told = "bold" if name.startswith(("held-out", "leave-one-out")) else ""
        table.add_row(Text(name, "red" if name in ("refused", "not converged") else "cyan"), Text(text, told))
    return table


def plan_facts(plan: Plan) -> Facts:
    """What the job needs and what there is."""
    side, has_factor = plan.num_tiles_per_side, plan.solver == "cholesky"
    tasks = f"{plan.num_tasks:,} tasks, " if has_factor else ""
    parts = ", ".join(f"{name} {size(value)}" for name, value in plan.disk_bytes.items() if value)
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in plan.estimated_seconds.items())
    return known(
        ("training rows", _rows(plan) + (f"; {plan.num_test_rows:,} held out" if plan.num_test_rows else "")),
        ("model", _model(plan)),
        ("solver", _solver(plan)),
        *((f"  {name}", text) for name, text in reasons_of(plan.to_dict())),
        ("tiles", f"{plan.tile_size} rows; {side} a side, {side * (side + 1) // 2:,} in all" if has_factor else ""),
        ("work", f"{tasks}{plan.flops:.3g} flops"),
        ("schedule", _schedule(plan) if has_factor and plan.expected_efficiency else ""),
        ("workers", f"{plan.workers}, memory limit {size(plan.memory_limit_bytes)} each"),
        ("memory", f"projected peak {size(plan.task_bytes)} a worker, {size(plan.client_bytes)} this process"),
        ("disk", f"{size(plan.disk_needed_bytes)} to write ({parts}); {size(plan.disk_free_bytes)} free"),
        ("iterations", "" if plan.iterations is None else _between(*plan.iterations)),
        ("estimated", f"{_between(plan.estimated_low_seconds, plan.total_seconds)} s ({seconds})"),
        *_candidates(plan),
        *(("note", note) for note in plan.notes),
        ("refused", plan.refusal + (f": {plan.hint}" if plan.hint else "")),
    )


def _rows(plan: Plan) -> str:
    targets = f"{plan.num_targets} target{'s' * (plan.num_targets != 1)}"
    return f"{plan.num_rows:,} x {plan.num_features:,}, {targets}"


def _model(plan: Plan) -> str:
    loss = f"{loss_words(plan.loss)}, " if plan.loss else ""
    return f"{kernel_words(plan.kernel)}, {loss}alpha {', '.join(f'{value:g}' for value in plan.alpha)}"


def _schedule(plan: Plan) -> str:
    """How busy the workers will be, and which sums are split for it."""
    count, split = plan.workers * plan.threads_per_worker, plan.split or {}
    text = f"{count:,} worker{'s' * (count > 1)} busy {plan.expected_efficiency:.0%} of the factorisation, simulated"
    if not split.get("num_columns"):
        return text + "; no sum is split"
    last, terms = min(split["num_columns"], plan.num_tiles_per_side), split["num_last"]
    where = "all columns" if last == plan.num_tiles_per_side else f"the last {last} columns"
    return f"{text}; sums of {where} are split before the last {terms} term{'s' * (terms > 1)}"


def _solver(plan: Plan) -> str:
    how = f"Gram matrix {plan.gram.replace('_', ' ')}"
    if plan.nystrom is not None:
        how = f"{plan.nystrom['num_centers']:,} centres: an approximation"
    elif plan.solver == "cg":
        how = f"{f'preconditioner of rank {plan.rank:,}' if plan.rank else 'no preconditioner'}, {how}"
    parts = f"{plan.solver if plan.nystrom is None else 'nystrom'}, {plan.precision}"
    if plan.solver == "primal":
        return f"{parts}: explicit features, no Gram matrix"
    if plan.loss is not None:
        return f"{parts}: rows in this process, columns of the Gram matrix made when needed"
    return f"{parts}, {how}"


def _between(low: float, high: float) -> str:
    """Two numbers, one where they are the same, or the lower one is not known."""
    first, last = f"{low:,.0f}", f"{high:,.0f}"
    return last if not low or first == last else f"{first} to {last}"


def _candidates(plan: Plan) -> Facts:
    """The cheapest candidate of each solver and precision: seconds, iterations, memory of a worker, disk."""
    if len(plan.candidates) < 2:
        return []
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for item in sorted(plan.candidates, key=lambda item: (bool(item["infeasible"]), item["total_seconds"])):
        best.setdefault((item["solver"], item["precision"]), item)
    rows = [("candidates", f"{len(plan.candidates)} in all; the cheapest of each kind:")]
    for item in best.values():
        iterations = item["iterations"]
        facts = [
            f"{_between(item['seconds_low'], item['total_seconds'])} s",
            f"{_between(iterations['low'], iterations['high'])} iterations" if iterations else "",
            f"{size(item['memory_bytes'])} a worker",
            f"{size(sum(item['disk_bytes'].values()))} on disk",
            f"not possible: {item['infeasible']}" if item["infeasible"] else "",
        ]
        rows.append((f"  {item['name']}", ", ".join(filter(None, facts))))
    return rows


def fit_facts(summary: FitSummary) -> Facts:
    """What the fit did, in the order in which it did it."""
    plan = summary.plan
    tiles = f"{summary.tiles_total:,} of {plan.tile_size} x {plan.tile_size}, {summary.tiles_computed:,} computed"
    found = summary.tiles_total - summary.tiles_computed
    tiles += f", {found:,} found valid" if found else ""
    iterates = summary.num_iterations or plan.solver != "cholesky"
    guess = "" if plan.iterations is None or summary.given_up else f" ({_between(*plan.iterations)} expected)"
    matrices = sum(plan.disk_bytes.get(name, 0) for name in ("factor", "gram", "preconditioner", "centres"))
    return known(
        ("rows", _rows(plan)),
        ("model", _model(plan)),
        ("solver", _solver(plan)),
        *(("went on", item["sentence"]) for item in summary.given_up),
        ("tiles", tiles if summary.tiles_total else ""),
        *reused_rows(summary.reused),
        ("iterations", f"{summary.num_iterations:,}{guess}" if iterates else ""),
        *((f"  {phase}", _phase(summary, phase)) for phase in summary.seconds),
        ("matrices on disk", size(matrices) if plan.loss is None else ""),
        ("peak memory", _peaks(summary) if summary.peak_rss_bytes else ""),
        *_exactness(summary),
        ("not converged", "" if summary.converged else summary.message),
        ("intercept", ", ".join(f"{value:.5g}" for value in summary.intercept or [])),
        ("leave-one-out", "" if summary.leave_one_out is None else _leave_one_out(summary.leave_one_out)),
        *((f"  C {point['C']:g}", _point(point)) for point in summary.path),
        *([] if summary.score is None else _score(summary.score, summary.metric)),
        ("model in", summary.model_path),
        ("report in", join(summary.run_directory, "report.html")),
        *(("kept", f"{size(num_bytes)} in {location}") for location, num_bytes in summary.kept.items()),
    )


def _phase(summary: FitSummary, phase: str) -> str:
    """Seconds and rate of a phase, and what was expected of it."""
    known = phase == "factorise" and summary.flops_per_second
    rate = f", {summary.flops_per_second / 1e9:.0f} GF/s" if known else ""
    expected, text = summary.estimated_seconds.get(phase), f"{summary.seconds[phase]:.2f} s{rate}"
    if expected is None:
        return text
    low = summary.plan.estimated_low_seconds
    return f"{text} ({_between(low, expected) if phase == 'total' else f'{expected:.1f}'} expected)"


def _peaks(summary: FitSummary) -> str:
    plan, peak = summary.plan, max(summary.peak_rss_bytes.values())
    limit = f" of {size(plan.memory_limit_bytes)}" if plan.memory_limit_bytes else ""
    client = f"client {size(summary.client_peak_rss_bytes)} ({size(plan.client_bytes)} expected)"
    return f"worker {size(peak)}{limit} ({size(plan.task_bytes)} expected), {client}"


def _exactness(summary: FitSummary) -> Facts:
    """How near the answer is to the exact one, for the least exact target."""
    if not summary.certificates:
        residual, error = max(summary.relative_residual), max(summary.backward_error)
        return [("residual", f"relative {residual:.1e}, backward error {error:.1e}")]
    gap, kkt = (max(getattr(found, name) for found in summary.certificates) for name in ("gap", "kkt"))
    return [
        ("duality gap", f"{gap:.1e}, largest KKT violation {kkt:.1e}"),
        ("support vectors", f"{summary.num_support:,} of {summary.plan.num_rows:,} rows"),
    ]


def _leave_one_out(figures: dict[str, Any]) -> str:
    """The error, its generalised estimate and the degrees of freedom of every target."""

    def listed(values: list[float], form: str) -> str:
        return ", ".join(format(value, form) for value in values)

    root = [value**0.5 for value in figures["gcv"]]
    return (
        f"rmse {listed(figures['rmse'], '.5g')}, by generalised cross validation {listed(root, '.5g')}, "
        f"degrees of freedom {listed(figures['degrees_of_freedom'], ',.1f')}"
    )


def _point(point: dict[str, Any]) -> str:
    mark = ", chosen" if point["chosen"] else ""
    return f"held-out {point['metric']} {point['score']:.5g}, {point['num_support']:,} support vectors{mark}"


def _score(score: Score, metric: str) -> Facts:
    """The score that is looked at, and the rows inside of intervals."""
    value = score.value(metric)
    text = f"{100 * value:.2f} %" if metric.endswith("accuracy") else f"{value:.5g}"
    more = f"; R2 {score.value('r2'):.4f}, where the mean of the target has 0" if metric == "rmse" else ""
    inside = ", ".join(f"{share:.1%}" for share in score.coverage or [])
    how = "jackknife" if score.pinball is None else "between the outer quantiles"
    return known(
        (f"held-out {metric}", f"{text} on {score.num_rows:,} rows{more}"),
        (f"{100 * (score.intervals or 0):g} % intervals", f"{how}: {inside} of these rows are inside" * bool(inside)),
    )


def reused_rows(reused: dict[str, Any]) -> Facts:
    """What earlier fits in the store saved (``reused`` of a summary or a status), in words."""
    rows = []
    for name in ("factor", "gram"):
        if (found := reused.get(name)) is not None:
            text = f"{found['rows']:,} of {found['of_rows']:,} rows of the {name}, {found['share']:.1%} of its work"
            seconds = f", about {found['seconds']:,.1f} s" if found.get("seconds") else ""
            rows.append(("reused", text + seconds))
    rows += [("not reused", reason) for reason in reused.get("not_continued", {}).values()]
    scaling, center, start = (reused.get(name) for name in ("scaling", "center", "start"))
    if scaling is not None and (scaling["scaling"] != "frozen" or scaling["drift"]["rows"]):
        state = "that of earlier rows" if scaling["scaling"] == "frozen" else "of all rows, anew"
        rows.append(("scaling", f"{state}; {_drift(scaling)}"))
    if center is not None:
        state = "the mean of earlier rows" if center["center"] == "frozen" else "that of all rows, anew"
        rows.append(("centre", f"{state}; {_drift(center)}"))
    if start is not None:
        rows.append(("start", f"coefficients of {start['rows']:,} rows, from {start['source']}"))
    return rows


def _drift(found: dict[str, Any]) -> str:
    """How far newer rows lie from what is frozen."""
    drift = found["drift"]
    return f"{drift['rows']:,} newer rows drift by {drift['value']:.2g}, limit {found['limit']:g}"


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
        ("picture", summary.picture_path or ""),
    )
    return Group(finalists, facts_table("", facts))


def _cost_and_saving(summary: TuneSummary) -> Facts:
    """What it costs to fit what was chosen instead of the smallest error, and what it saves."""
    best, least, seconds = summary.result.best, summary.result.least_error, summary.foreseen_seconds
    foreseen = f"about {seconds['best']:.0f} s" if "best" in seconds else ""
    if best is least:
        said = "nothing: the smallest error" + (" is the best conditioned of those as good" if best.condition else "")
        return known(("cost", said), ("fit", foreseen))
    cost = best.loo_rmse / least.loo_rmse - 1.0 if least.loo_rmse else 0.0
    saved = f"condition {best.condition:.1e} instead of {least.condition:.1e}"
    if "least_error" in seconds and foreseen:
        saved += f", a fit of {foreseen} instead of {seconds['least_error']:.0f} s"
    return [("cost", f"error +{100 * cost:.2f} %, as good as the smallest"), ("saved", saved)]
