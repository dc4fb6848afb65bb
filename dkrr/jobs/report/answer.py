"""Sections of the page about the answer and how good it is: convergence, residuals, held-out rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from dkrr.jobs.report.charts import Series, line_chart, scatter, short_number
from dkrr.jobs.report.facts import Block, Chart, Findings, Table, Text, known
from dkrr.jobs.report.sections import histogram_chart, picked
from dkrr.markup import cut, listed, loss_words, number

__all__ = ["convergence_section", "held_out_section", "residual_section"]

MOST_TARGETS = 40
MOST_CONFUSION = 10
NUM_BINS = 30
_EPS = {"float32": 1.1920928955078125e-07}


def _name(names: Sequence[str] | None, k: int) -> str:
    return cut(names[k] if names and k < len(names) else f"target {k}", 60)


def convergence_section(found: Findings) -> Iterator[Block]:
    """Residuals of conjugate gradients, or the gap of another loss than the square, against the iteration."""
    traces = [trace for trace in found.part("convergence") or [] if trace.get("iterations")]
    solver = found.result.get("solver") or found.plan.get("solver")
    direct = solver == "cholesky" and found.plan.get("precision") != "mixed"
    what = "duality gap" if found.plan.get("loss") else "residual"
    for k, trace in enumerate(traces):
        yield _convergence_chart(found, k, trace, what)
    if not traces and (direct or solver == "primal"):
        way = "a Cholesky factor" if direct else "explicit features"
        yield Text(f"There were no iterations: the system was solved by {way}, directly.", missing=True)
    elif not traces:
        yield found.missing(f"There is no history of {what}s", "the iteration began")


def _convergence_chart(found: Findings, k: int, trace: dict[str, Any], what: str) -> Chart:
    iterations, rows, tol = trace["iterations"], trace["relative_residual"], trace["tol"]
    last, targets, num_curves = max(rows[-1]), trace.get("num_targets", len(rows[0])), len(trace["curves"])
    alpha = f", alpha {listed(trace['alpha'], '.4g', 4)}" if trace.get("alpha") else ""
    parts = [
        f"{cut(trace['name'], 160)}{alpha}: the largest {what} was {last:.2g} after {iterations[-1]:,} iterations, ",
        f"{tol:.2g} was asked for",
        "" if last <= tol else ", which was not reached",
        "" if trace.get("is_over") else f"; {found.before('the iteration ended')}",
        f". Of {targets:,} targets the largest, median and smallest {what} are drawn." if targets > num_curves else ".",
    ]
    sentence, names = "".join(parts), [cut(name, 40) for name in trace["curves"]]
    series = [Series(name, iterations, [row[column] or None for row in rows]) for column, name in enumerate(names)]
    label = what if what == "duality gap" else "relative residual"
    svg = line_chart(
        f"cg-{k}", f"{label.capitalize()} against the iteration", sentence, series,
        x_label="iteration", y_label=label, log=True, lines=[(tol, f"tol {tol:.2g}")],
    )  # fmt: skip
    cells = [(f"{iterations[i]:,}", *(f"{value:.2e}" for value in rows[i])) for i in picked(len(iterations))]
    return Chart(svg, sentence, Table(("iteration", *names), cells, f"{label.capitalize()}s", folded=True))


def residual_section(found: Findings) -> Iterator[Block]:
    """How exact the answer is for every target: residual and backward error, or gap and violation of another loss."""
    result, plan = found.result, found.plan
    certificates, relative = result.get("certificates") or [], result.get("relative_residual") or []
    if not (certificates or relative):
        what = "gap" if plan.get("loss") else "residual"
        yield found.missing(f"There is no answer whose {what} could be known", "it was solved")
        return
    verdict = "converged" if result.get("converged") else "did NOT converge, which was allowed"
    yield Text(f"{cut(result.get('message', ''))}. The solve {verdict}.")
    if certificates:
        yield from _gaps(found, certificates)
    else:
        backward, precision = result.get("backward_error") or [], str(result.get("precision", "float64"))
        bar = f"{30 * plan.get('num_rows', 0) * _EPS.get(precision, 2.0**-52):.3e} ({precision})"
        rows = [
            ("largest relative residual", f"{max(relative):.3e}"),
            ("largest backward error", f"{max(backward):.3e}" if backward else "unknown"),
            ("30 n eps", f"{bar}; a direct solve with a larger backward error fails"),
        ]
        yield Table((), rows, "Of all targets")
        names, both = found.part("data", "target_names"), zip(relative, backward, strict=False)
        cells = [(_name(names, k), f"{value:.3e}", f"{error:.3e}") for k, (value, error) in enumerate(both)]
        yield _of_targets(("relative residual", "backward error"), cells)
    left_out = result.get("leave_one_out")
    if left_out:
        rows = [
            ("root mean squared error", listed(left_out.get("rmse") or [])),
            ("degrees of freedom", listed(left_out.get("degrees_of_freedom") or [], ",.1f")),
        ]
        yield Table((), rows, "Leave-one-out")


def _of_targets(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    left = len(rows) - MOST_TARGETS
    caption = f"Evaluated in float64 from the kernel and the rows{f' ({left:,} more targets)' if left > 0 else ''}"
    return Table(("target", *columns), rows[:MOST_TARGETS], caption, folded=len(rows) > 12)


def _gaps(found: Findings, certificates: list[dict[str, Any]]) -> Iterator[Block]:
    """Both objectives, gap, violation and support vectors of every target of another loss than the square."""
    result, path = found.result, found.result.get("path") or []
    gap, kkt = (f"{max(item[name] for item in certificates):.3e}" for name in ("gap", "kkt"))
    rows = [
        ("loss", loss_words(result.get("loss") or found.plan["loss"])),
        ("largest gap", gap),
        ("largest KKT violation", kkt),
        ("support vectors", f"{number(result.get('num_support'))} of {number(found.plan.get('num_rows'))} rows"),
    ]
    yield Table((), rows, "Of all targets")
    if path:
        points = [
            (
                f"{point['C']:g}",
                listed(point["alpha"], "g"),
                number(point["score"]),
                number(point["num_support"]),
                f"{point['gap']:.1e}",
                "chosen" if point["chosen"] else "",
            )
            for point in path
        ]
        columns = ("C", "alpha", cut(path[0]["metric"], 40), "support vectors", "gap", "")
        yield Table(columns, points, "Path over C: what each is worth on the held-out rows")
    cells = [
        (
            _name(result.get("target_names"), k),
            *(f"{item[name]:.6g}" for name in ("primal", "dual", "gap", "kkt")),
            number(item["num_support"]),
        )
        for k, item in enumerate(certificates)
    ]
    yield _of_targets(("primal objective", "dual objective", "gap", "KKT violation", "support vectors"), cells)


def held_out_section(found: Findings) -> Iterator[Block]:
    """Scores on rows that the fit has not seen; predictions beside the truth, or classes taken for others."""
    score, asked, held_out = found.result.get("score"), found.job.get("evaluate"), found.part("held_out") or {}
    if not score:
        if found.job and not any((asked or {}).get(name) is not None for name in ("path", "mask", "fraction")):
            words = "No rows were held out: the job has no [evaluate] with a path, a mask or a fraction."
            yield Text(words, missing=True)
        else:
            yield found.missing("No held-out row was predicted", "it came to that")
        return
    yield Table((), _scores(found, score), "Scores on held-out rows")
    names = found.result.get("target_names") or found.part("data", "target_names")
    pairs = held_out.get("pairs") or []
    if held_out.get("confusion"):
        yield _confusion(held_out["confusion"], found.part("data", "classes") or [])
        return
    if not pairs:
        yield Text("No pairs of truth and prediction were kept.", missing=True)
    for k, points in enumerate(pairs):
        pair = [point for point in points if None not in point]
        if pair:
            yield from _target_charts(k, _name(names, k), pair, score)
    if len(pairs) < len(score.get("rmse") or []):
        yield Text(f"{len(score['rmse']) - len(pairs):,} more targets are not drawn.")


def _scores(found: Findings, score: dict[str, Any]) -> Sequence[tuple[str, str]]:
    def percent(name: str) -> str:
        return f"{score[name]:.2%}" if score.get(name) is not None else ""

    def values(name: str) -> str:
        return listed(score[name]) if score.get(name) else ""

    inside, loss = ", ".join(f"{share:.1%}" for share in (score.get("coverage") or [])[:8]), score.get("log_loss")
    how = "between the outer quantiles" if score.get("pinball") else "inside (jackknife)"
    coverage = score.get("intervals") or 0.0
    return known(
        ("rows", number(score.get("num_rows"))),
        ("accuracy", percent("accuracy")),
        ("balanced accuracy", percent("balanced_accuracy")),
        ("log loss", loss is not None and f"{loss:.5g}"),
        ("rmse", values("rmse")),
        ("R²", values("r2")),
        ("pinball loss", values("pinball")),
        ("rmse / standard deviation of the training targets", values("rmse_whitened")),
        (f"{100 * coverage:g} % intervals", coverage and inside and f"{inside} of these rows are {how}"),
        ("metric of the job", cut(found.result.get("metric") or "")),
    )


def _target_charts(k: int, name: str, points: Sequence[Sequence[float]], score: dict[str, Any]) -> Iterator[Chart]:
    total, rmse = score.get("num_rows") or len(points), (score.get("rmse") or [])[k : k + 1]
    some = f"{len(points):,} of {total:,} held-out rows, evenly spaced"
    shown = f"all {total:,} held-out rows" if len(points) == total else some
    fit = f"root mean squared error {number(rmse[0] if rmse else None)}"
    sentence = f"Predicted against true {name} for {shown}; {fit}. On the line both are equal."
    order = sorted((float(truth), float(value)) for truth, value in points)
    cells = [(short_number(t), short_number(v), short_number(v - t)) for t, v in (order[i] for i in picked(len(order)))]
    title = f"Predicted against true {name}"
    plot = scatter(f"predicted-{k}", title, sentence, points, x_label=f"true {name}", y_label="predicted")
    yield Chart(plot, sentence, Table(("true", "predicted", "error"), cells, f"Some rows of {name}", folded=True))
    errors = [value - truth for truth, value in order]
    low, high = min(errors), max(errors)
    if not high > low or not math.isfinite(high - low):
        return
    edges = [low + (high - low) * i / NUM_BINS for i in range(NUM_BINS + 1)]
    counts = [0] * NUM_BINS
    for error in errors:
        counts[min(NUM_BINS - 1, int(NUM_BINS * (error - low) / (high - low)))] += 1
    mean = sum(errors) / len(errors)
    about = f"Errors (predicted less true) of {name}: from {low:.4g} to {high:.4g}, mean {mean:.3g}."
    yield histogram_chart(f"errors-{k}", f"Errors of {name}", about, edges, counts, f"error of {name}")


def _confusion(counts: list[list[int]], classes: list[str]) -> Table:
    """The whole table for a few classes; for many, the pairs that are mistaken most often."""
    names = [cut(classes[k] if k < len(classes) else f"class {k}", 24) for k in range(len(counts))]
    if len(counts) <= MOST_CONFUSION:
        rows = [(name, *(f"{count:,}" for count in row)) for name, row in zip(names, counts, strict=True)]
        return Table(("true \\ predicted", *names), rows, "Held-out rows of each class, and what they were taken for")
    wrong = [(count, i, j) for i, row in enumerate(counts) for j, count in enumerate(row) if i != j and count]
    pairs = [(names[i], names[j], f"{count:,}") for count, i, j in sorted(wrong, reverse=True)[:20]]
    return Table(("true class", "taken for", "rows"), pairs, "What was mistaken most often")
