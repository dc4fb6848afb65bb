"""Plans and summaries as names and values for people, which terminals and notebooks show in their ways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from dkrr.markup import kernel_words, loss_words, reasons_of, size
from dkrr.store.files import join

if TYPE_CHECKING:
    from dkrr.jobs.planned import Plan
    from dkrr.jobs.run import FitSummary
    from dkrr.jobs.tune import TuneSummary

__all__ = ["facts_table", "fit_facts", "plan_facts", "reused_rows", "tune_table"]


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


def _rows(plan: Plan) -> str:
    targets = f"{plan.num_targets} target{'s' * (plan.num_targets != 1)}"
    return f"{plan.num_rows:,} x {plan.num_features:,}, {targets}"


def _model(plan: Plan) -> str:
    loss = f"{loss_words(plan.loss)}, " if plan.loss else ""
    return f"{kernel_words(plan.kernel)}, {loss}alpha {', '.join(f'{value:g}' for value in plan.alpha)}"


def plan_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """What the job needs and what there is."""
    yield "training rows", _rows(plan) + (f"; {plan.num_test_rows:,} held out" if plan.num_test_rows else "")
    yield "model", _model(plan)
    yield "solver", _solver(plan)
    for name, text in reasons_of(plan.to_dict()):
        yield f"  {name}", text
    side = plan.num_tiles_per_side
    count = side * (side + 1) // 2
    if plan.solver == "cholesky":
        yield "tiles", f"{plan.tile_size} rows; {side} a side, {count:,} in all"
        yield "work", f"{plan.num_tasks:,} tasks, {plan.flops:.3g} flops"
        if plan.expected_efficiency:
            yield "schedule", _schedule(plan)
    else:
        yield "work", f"{plan.flops:.3g} flops"
    yield "workers", f"{plan.workers}, memory limit {size(plan.memory_limit_bytes)} each"
    yield "memory", f"projected peak {size(plan.task_bytes)} a worker, {size(plan.client_bytes)} this process"
    parts = ", ".join(f"{name} {size(value)}" for name, value in plan.disk_bytes.items() if value)
    yield "disk", f"{size(plan.disk_needed_bytes)} to write ({parts}); {size(plan.disk_free_bytes)} free"
    if plan.iterations is not None:
        yield "iterations", _iterations(plan.iterations)
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in plan.estimated_seconds.items())
    yield "estimated", f"{_range(plan.estimated_low_seconds, plan.total_seconds)} s ({seconds})"
    yield from _candidates(plan)
    for note in plan.notes:
        yield "note", note
    if plan.refusal:
        yield "refused", plan.refusal + (f": {plan.hint}" if plan.hint else "")


def _schedule(plan: Plan) -> str:
    """How busy the workers will be, and which sums are split for it."""
    count = plan.workers * plan.threads_per_worker
    text = f"{count:,} worker{'s' * (count > 1)} busy {plan.expected_efficiency:.0%} of the factorisation, simulated"
    split = plan.split or {}
    if not split.get("num_columns"):
        return text + "; no sum is split"
    last, terms = min(split["num_columns"], plan.num_tiles_per_side), split["num_last"]
    where = "all columns" if last == plan.num_tiles_per_side else f"the last {last} columns"
    return f"{text}; sums of {where} are split before the last {terms} term{'s' * (terms > 1)}"


def _solver(plan: Plan) -> str:
    if plan.nystrom is not None:
        return f"nystrom, {plan.precision}, {plan.nystrom['num_centers']:,} centres: an approximation"
    if plan.solver == "primal":
        return f"primal, {plan.precision}: explicit features, no Gram matrix"
    if plan.loss is not None:
        return f"{plan.solver}, {plan.precision}: rows in this process, columns of the Gram matrix made when needed"
    gram = f"Gram matrix {plan.gram.replace('_', ' ')}"
    if plan.solver == "cg":
        how = f"preconditioner of rank {plan.rank:,}" if plan.rank else "no preconditioner"
        return f"cg, {plan.precision}, {how}, {gram}"
    return f"{plan.solver}, {plan.precision}, {gram}"


def _range(low: float, high: float) -> str:
    """Two numbers of seconds, one where they are the same."""
    first, last = f"{low:,.0f}", f"{high:,.0f}"
    return last if not low or first == last else f"{first} to {last}"


def _iterations(iterations: list[float]) -> str:
    low, high = (round(value) for value in iterations)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _candidates(plan: Plan) -> list[tuple[str, str]]:
    """The cheapest candidate of each solver and precision: seconds, iterations, memory of a worker, disk."""
    if len(plan.candidates) < 2:
        return []
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for item in sorted(plan.candidates, key=lambda item: (bool(item["infeasible"]), item["total_seconds"])):
        best.setdefault((item["solver"], item["precision"]), item)
    rows = []
    for item in best.values():
        facts = [f"{_range(item['seconds_low'], item['total_seconds'])} s"]
        if item["iterations"] is not None:
            low, high = (round(item["iterations"][end]) for end in ("low", "high"))
            facts.append(f"{low:,} to {high:,} iterations" if low != high else f"{low:,} iterations")
        facts.append(f"{size(item['memory_bytes'])} a worker")
        facts.append(f"{size(sum(item['disk_bytes'].values()))} on disk")
        if item["infeasible"]:
            facts.append(f"not possible: {item['infeasible']}")
        rows.append((f"  {item['name']}", ", ".join(facts)))
    return [("candidates", f"{len(plan.candidates)} in all; the cheapest of each kind:"), *rows]


def _leave_one_out(figures: dict[str, Any]) -> str:
    """The error, its generalised estimate and the degrees of freedom of every target."""

    def listed(values: list[float], form: str) -> str:
        return ", ".join(format(value, form) for value in values)

    root = [value**0.5 for value in figures["gcv"]]
    return (
        f"[bold]rmse {listed(figures['rmse'], '.5g')}[/bold], by generalised cross validation {listed(root, '.5g')}, "
        f"degrees of freedom {listed(figures['degrees_of_freedom'], ',.1f')}"
    )


def fit_facts(summary: FitSummary) -> Iterator[tuple[str, str]]:
    """What the fit did, in the order in which it did it."""
    plan = summary.plan
    yield "rows", _rows(plan)
    yield "model", _model(plan)
    yield "solver", _solver(plan)
    for item in summary.given_up:
        yield "went on", item["sentence"]
    if summary.tiles_total:
        reused = summary.tiles_total - summary.tiles_computed
        tiles = f"{summary.tiles_total:,} of {plan.tile_size} x {plan.tile_size}, {summary.tiles_computed:,} computed"
        yield "tiles", tiles + (f", {reused:,} found valid" if reused else "")
    yield from reused_rows(summary.reused)
    if summary.num_iterations or plan.solver != "cholesky":
        guess = "" if plan.iterations is None or summary.given_up else f" ({_iterations(plan.iterations)} expected)"
        yield "iterations", f"{summary.num_iterations:,}{guess}"
    for phase, seconds in summary.seconds.items():
        known = phase == "factorise" and summary.flops_per_second
        rate = f", {summary.flops_per_second / 1e9:.0f} GF/s" if known else ""
        expected = summary.estimated_seconds.get(phase)
        text = "" if expected is None or phase == "total" else f" ({expected:.1f} expected)"
        if phase == "total" and expected is not None:
            text = f" ({_range(plan.estimated_low_seconds, expected)} expected)"
        yield f"  {phase}", f"{seconds:.2f} s{rate}{text}"
    matrices = sum(plan.disk_bytes.get(name, 0) for name in ("factor", "gram", "preconditioner", "centres"))
    if plan.loss is None:
        yield "matrices on disk", size(matrices)
    if summary.peak_rss_bytes:
        peak = max(summary.peak_rss_bytes.values())
        limit = f" of {size(plan.memory_limit_bytes)}" if plan.memory_limit_bytes else ""
        worker = f"worker {size(peak)}{limit} ({size(plan.task_bytes)} expected)"
        client = f"client {size(summary.client_peak_rss_bytes)} ({size(plan.client_bytes)} expected)"
        yield "peak memory", f"{worker}, {client}"
    if summary.certificates:
        gap, kkt = (max(certificate[name] for certificate in summary.certificates) for name in ("gap", "kkt"))
        yield "duality gap", f"{gap:.1e}, largest KKT violation {kkt:.1e}"
        yield "support vectors", f"{summary.num_support:,} of {plan.num_rows:,} rows"
    else:
        residual, error = max(summary.relative_residual), max(summary.backward_error)
        yield "residual", f"relative {residual:.1e}, backward error {error:.1e}"
    if not summary.converged:
        yield "not converged", summary.message
    if summary.intercept is not None:
        yield "intercept", ", ".join(f"{value:.5g}" for value in summary.intercept)
    if summary.leave_one_out is not None:
        yield "leave-one-out", _leave_one_out(summary.leave_one_out)
    for point in summary.path:
        mark = ", [bold]chosen[/bold]" if point["chosen"] else ""
        found = f"held-out {point['metric']} {point['score']:.5g}, {point['num_support']:,} support vectors{mark}"
        yield f"  C {point['C']:g}", found
    score = summary.score
    if score is not None:
        value = score.value(summary.metric)
        text = f"{100 * value:.2f} %" if summary.metric.endswith("accuracy") else f"{value:.5g}"
        text = f"{text} on {score.num_rows:,} rows"
        if summary.metric == "rmse":
            text += f"; R2 {score.value('r2'):.4f}, where the mean of the target has 0"
        yield f"held-out {summary.metric}", text
        if score.coverage is not None and score.intervals is not None:
            inside = ", ".join(f"{share:.1%}" for share in score.coverage)
            how = "jackknife" if score.pinball is None else "between the outer quantiles"
            yield f"{100 * score.intervals:g} % intervals", f"{how}: {inside} of these rows are inside"
    yield "model in", summary.model_path
    yield "report in", join(summary.run_directory, "report.html")
    for location, num_bytes in summary.kept.items():
        yield "kept", f"{size(num_bytes)} in {location}"


def reused_rows(reused: dict[str, Any]) -> list[tuple[str, str]]:
    """What earlier fits in the store saved (``reused`` of a summary or a status), in words."""
    rows = []
    for name in ("factor", "gram"):
        found = reused.get(name)
        if found is not None:
            text = f"{found['rows']:,} of {found['of_rows']:,} rows of the {name}, {found['share']:.1%} of its work"
            seconds = f", about {found['seconds']:,.1f} s" if found.get("seconds") else ""
            rows.append(("reused", text + seconds))
    rows += [("not reused", reason) for reason in reused.get("not_continued", {}).values()]
    scaling = reused.get("scaling")
    if scaling is not None and (scaling["scaling"] != "frozen" or scaling["drift"]["rows"]):
        state = "that of earlier rows" if scaling["scaling"] == "frozen" else "of all rows, anew"
        rows.append(("scaling", f"{state}; {_drift(scaling)}"))
    center = reused.get("center")
    if center is not None:
        state = "the mean of earlier rows" if center["center"] == "frozen" else "that of all rows, anew"
        rows.append(("centre", f"{state}; {_drift(center)}"))
    start = reused.get("start")
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
        per_feature = candidate.kind == "per_feature"
        origin = candidate.origin + (f" x {candidate.factor:.2g}" if candidate.factor != 1.0 else "")
        finalists.add_row(
            candidate.family,
            "per feature" if per_feature else f"{candidate.widths[0]:.4g}",
            origin,
            f"{candidate.alpha if loss is None else 0.5 / candidate.alpha:.3g}",
            f"{candidate.loo_rmse:.4f}",
            "" if candidate.excess_error is None else f"{candidate.excess_error:.4f}",
            "" if candidate.condition is None else f"{candidate.condition:.1e}",
            f"{candidate.num_rows:,}",
            f"[bold]{result.mark(candidate)}[/bold]",
        )
    return Group(finalists, facts_table("", _search_facts(summary)))


def _search_facts(summary: TuneSummary) -> Iterator[tuple[str, str]]:
    result, loss = summary.result, summary.settings.fold_loss
    error = "leave-one-out, in standard deviations of the target"
    if loss is not None:
        error = f"{loss.words} of {loss.num_folds} folds, less is better"
    yield "error", f"{error}; s.e.: of its difference to the smallest"
    yield from _cost_and_saving(summary)
    yield "trials", f"{len(result.records)}, {result.seconds:.0f} s"
    for note in result.notes:
        yield "note", note
    yield "job", summary.path
    yield "trials in", summary.trials_path
    yield "search in", summary.search_path
    if summary.picture_path is not None:
        yield "picture", summary.picture_path


def _cost_and_saving(summary: TuneSummary) -> list[tuple[str, str]]:
    """What it costs to fit what was chosen instead of the smallest error, and what it saves."""
    best, least, seconds = summary.result.best, summary.result.least_error, summary.foreseen_seconds
    foreseen = f"about {seconds['best']:.0f} s" if "best" in seconds else ""
    if best is least:
        said = "nothing: the smallest error" + (" is the best conditioned of those as good" if best.condition else "")
        return [("cost", said)] + ([("fit", foreseen)] if foreseen else [])
    cost = best.loo_rmse / least.loo_rmse - 1.0 if least.loo_rmse else 0.0
    saved = [f"condition {best.condition:.1e} instead of {least.condition:.1e}"]
    if "least_error" in seconds and foreseen:
        saved.append(f"a fit of {foreseen} instead of {seconds['least_error']:.0f} s")
    return [("cost", f"error +{100 * cost:.2f} %, as good as the smallest"), ("saved", ", ".join(saved))]
