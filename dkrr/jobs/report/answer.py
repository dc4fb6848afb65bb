"""The answer and how good it is: convergence, residuals, held-out rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dkrr.jobs.report.axes import number, short_number
from dkrr.jobs.report.blocks import Chart, Facts, Section, Table, Text, cut
from dkrr.jobs.report.charts import Series, histogram, line_chart, scatter
from dkrr.jobs.report.findings import Findings
from dkrr.jobs.report.words import listed, loss_words

__all__ = ["convergence_section", "held_out_section", "residual_section"]

MOST_TARGETS = 40
MOST_TABLE_ROWS = 24
MOST_CONFUSION = 10
_EPS = {"float64": 2.220446049250313e-16, "float32": 1.1920928955078125e-07, "mixed": 2.220446049250313e-16}


def convergence_section(found: Findings) -> Section:
    """Residuals of conjugate gradients, or the gap of another loss than the square, against the iteration."""
    what = "conjugate gradients" if not found.plan.get("loss") else f"{found.plan.get('solver')}: duality gap"
    section = Section("convergence", f"Convergence of {cut(what, 60)}")
    traces = [trace for trace in found.part("convergence") or [] if trace.get("iterations")]
    solver = found.result.get("solver") or found.plan.get("solver") or "unknown"
    precision = found.plan.get("precision")
    if not traces:
        direct = solver == "cholesky" and precision != "mixed"
        if direct or solver == "primal":
            way = "a Cholesky factor" if direct else "explicit features"
            return section.missing(f"There were no iterations: the system was solved by {way}, directly.")
        of = "gaps" if found.plan.get("loss") else "residuals"
        return section.missing(f"There is no history of {of}: {found.before('the iteration began')}.")
    for k, trace in enumerate(traces):
        section.blocks.append(_convergence_chart(found, k, trace))
    return section


def _convergence_chart(found: Findings, k: int, trace: dict[str, Any]) -> Chart:
    iterations, rows = trace["iterations"], trace["relative_residual"]
    last, tol = max(rows[-1]), trace["tol"]
    alpha = f", alpha {listed(trace['alpha'], '.4g', 4)}" if trace.get("alpha") else ""
    of = "duality gap" if found.plan.get("loss") else "residual"
    reached = f"the largest {of} was {last:.2g} after {iterations[-1]:,} iterations"
    goal = f"{tol:.2g} was asked for" + ("" if last <= tol else ", which was not reached")
    if not trace.get("is_over"):
        goal += f"; {found.before('the iteration ended')}"
    targets = trace.get("num_targets", len(rows[0]))
    sentence = f"{cut(trace['name'], 160)}{alpha}: {reached}, {goal}."
    if targets > len(trace["curves"]):
        sentence += f" Of {targets:,} targets the largest, median and smallest {of} are drawn."
    names = [cut(name, 40) for name in trace["curves"]]
    series = [Series(name, iterations, [row[column] or None for row in rows]) for column, name in enumerate(names)]
    shown = "duality gap" if found.plan.get("loss") else "relative residual"
    svg = line_chart(
        f"cg-{k}", f"{shown.capitalize()} against the iteration", sentence, series,
        x_label="iteration", y_label=shown, log=True, lines=[(tol, f"tol {tol:.2g}")],
    )  # fmt: skip
    step = -(-len(iterations) // MOST_TABLE_ROWS)
    picked = sorted({*range(0, len(iterations), step), len(iterations) - 1})
    table = Table(
        ("iteration", *names),
        [(f"{iterations[i]:,}", *(f"{value:.2e}" for value in rows[i])) for i in picked],
        f"{shown.capitalize()}s",
        folded=True,
    )
    return Chart(svg, sentence, table)


def residual_section(found: Findings) -> Section:
    """Relative residual and backward error of every target, beside the bar that they have to pass."""
    if found.plan.get("loss"):
        return _gap_section(found)
    section = Section("residuals", "Residuals")
    relative, backward = found.result.get("relative_residual") or [], found.result.get("backward_error") or []
    if not relative:
        return section.missing(f"There is no answer whose residual could be known: {found.before('it was solved')}.")
    n, precision = found.plan.get("num_rows", 0), str(found.result.get("precision", "float64"))
    bar = 30 * n * _EPS.get(precision, _EPS["float64"])
    names = found.part("data", "target_names") or []
    verdict = "converged" if found.result.get("converged") else "did NOT converge, which was allowed"
    section.blocks.append(Text(f"{cut(found.result.get('message', ''))}. The solve {verdict}."))
    section.blocks.append(
        Facts(
            [
                ("largest relative residual", f"{max(relative):.3e}"),
                ("largest backward error", f"{max(backward):.3e}" if backward else "unknown"),
                ("30 n eps", f"{bar:.3e} ({precision}); a direct solve with a larger backward error fails"),
            ],
            "Of all targets",
        )
    )
    rows = [
        (cut(names[k] if k < len(names) else f"target {k}", 60), f"{value:.3e}", f"{error:.3e}")
        for k, (value, error) in enumerate(zip(relative, backward, strict=False))
    ]
    left = len(rows) - MOST_TARGETS
    section.blocks.append(
        Table(
            ("target", "relative residual", "backward error"),
            rows[:MOST_TARGETS],
            f"Evaluated in float64 from the kernel and the rows{f' ({left:,} more targets)' if left > 0 else ''}",
            folded=len(rows) > 12,
        )
    )
    left_out = found.result.get("leave_one_out")
    if left_out:
        section.blocks.append(
            Facts(
                [
                    ("root mean squared error", listed(left_out.get("rmse") or [])),
                    ("degrees of freedom", listed(left_out.get("degrees_of_freedom") or [], ",.1f")),
                ],
                "Leave-one-out",
            )
        )
    return section


def _gap_section(found: Findings) -> Section:
    """Both objectives, gap, violation and support vectors of every target of another loss than the square."""
    section = Section("residuals", "Duality gaps")
    certificates = found.result.get("certificates") or []
    if not certificates:
        return section.missing(f"There is no answer whose gap could be known: {found.before('it was solved')}.")
    support, n = number(found.result.get("num_support")), number(found.plan.get("num_rows"))
    verdict = "converged" if found.result.get("converged") else "did NOT converge, which was allowed"
    section.blocks.append(Text(f"{cut(found.result.get('message', ''))}. The solve {verdict}."))
    section.blocks.append(
        Facts(
            [
                ("loss", loss_words(found.result.get("loss") or found.plan["loss"])),
                ("largest gap", f"{max(item['gap'] for item in certificates):.3e}"),
                ("largest KKT violation", f"{max(item['kkt'] for item in certificates):.3e}"),
                (
                    "support vectors",
                    f"{support} of {n} rows",
                ),
            ],
            "Of all targets",
        )
    )
    path = found.result.get("path") or []
    if path:
        section.blocks.append(
            Table(
                ("C", "alpha", cut(path[0]["metric"], 40), "support vectors", "gap", ""),
                [
                    (
                        f"{point['C']:g}",
                        listed(point["alpha"], "g"),
                        number(point["score"]),
                        number(point["num_support"]),
                        f"{point['gap']:.1e}",
                        "chosen" if point["chosen"] else "",
                    )
                    for point in path
                ],
                "Path over C: what each is worth on the held-out rows",
            )
        )
    names = found.result.get("target_names") or []
    columns = ("primal", "dual", "gap", "kkt")
    rows = [
        (
            cut(names[k] if k < len(names) else f"target {k}", 60),
            *(f"{item[column]:.6g}" for column in columns),
            number(item["num_support"]),
        )
        for k, item in enumerate(certificates)
    ]
    left = len(rows) - MOST_TARGETS
    section.blocks.append(
        Table(
            ("target", "primal objective", "dual objective", "gap", "KKT violation", "support vectors"),
            rows[:MOST_TARGETS],
            f"Evaluated in float64 from the kernel and the rows{f' ({left:,} more targets)' if left > 0 else ''}",
            folded=len(rows) > 12,
        )
    )
    return section


def held_out_section(found: Findings) -> Section:
    """Scores on rows that the fit has not seen; predictions beside the truth, or classes taken for others."""
    section = Section("held-out", "Predicted against true on held-out rows")
    score = found.result.get("score")
    if not score:
        if found.job and not _holds_out(found.job.get("evaluate")):
            return section.missing(
                "No rows were held out: the job has no [evaluate] with a path, a mask or a fraction."
            )
        return section.missing(f"No held-out row was predicted: {found.before('it came to that')}.")
    section.blocks.append(Facts(list(_scores(found, score)), "Scores on held-out rows"))
    held_out = found.part("held_out") or {}
    names = found.result.get("target_names") or found.part("data", "target_names") or []
    if held_out.get("confusion"):
        section.blocks.append(_confusion(held_out["confusion"], found.part("data", "classes") or []))
        return section
    pairs = held_out.get("pairs") or []
    if not pairs:
        section.missing("No pairs of truth and prediction were kept.")
    for k, points in enumerate(pairs):
        known = [point for point in points if None not in point]
        if known:
            section.blocks += _target_charts(k, cut(names[k] if k < len(names) else f"target {k}", 60), known, score)
    if len(pairs) < len(score.get("rmse") or []):
        section.blocks.append(Text(f"{len(score['rmse']) - len(pairs):,} more targets are not drawn."))
    return section


def _holds_out(evaluate: Any) -> bool:
    return isinstance(evaluate, dict) and any(evaluate.get(name) is not None for name in ("path", "mask", "fraction"))


def _scores(found: Findings, score: dict[str, Any]) -> Any:
    yield "rows", number(score.get("num_rows"))
    if score.get("accuracy") is not None:
        yield "accuracy", f"{score['accuracy']:.2%}"
    for key, shown in (("balanced_accuracy", "{:.2%}"), ("log_loss", "{:.5g}")):
        if score.get(key) is not None:
            yield key.replace("_", " "), shown.format(score[key])
    if score.get("rmse"):
        yield "rmse", listed(score["rmse"])
        yield "R²", listed(score.get("r2") or [])
    if score.get("pinball"):
        yield "pinball loss", listed(score["pinball"])
    if score.get("rmse_whitened"):
        yield "rmse / standard deviation of the training targets", listed(score["rmse_whitened"])
    if score.get("coverage") and score.get("intervals"):
        inside = ", ".join(f"{share:.1%}" for share in score["coverage"][:8])
        how = "between the outer quantiles" if score.get("pinball") else "inside (jackknife)"
        yield f"{100 * score['intervals']:g} % intervals", f"{inside} of these rows are {how}"
    if found.result.get("metric"):
        yield "metric of the job", cut(found.result["metric"])


def _target_charts(k: int, name: str, points: Sequence[Sequence[float]], score: dict[str, Any]) -> list[Chart]:
    total = score.get("num_rows") or len(points)
    whole = len(points) == total
    shown = f"all {total:,} held-out rows" if whole else f"{len(points):,} of {total:,} held-out rows, evenly spaced"
    rmse = score["rmse"][k] if k < len(score.get("rmse") or []) else None
    fit = f"root mean squared error {number(rmse)}"
    sentence = f"Predicted against true {name} for {shown}; {fit}. On the line both are equal."
    order = sorted((float(truth), float(value)) for truth, value in points)
    step = -(-len(order) // MOST_TABLE_ROWS)
    rows = [(short_number(truth), short_number(value), short_number(value - truth)) for truth, value in order[::step]]
    plot = scatter(
        f"predicted-{k}", f"Predicted against true {name}", sentence, points,
        x_label=f"true {name}", y_label="predicted", diagonal=True,
    )  # fmt: skip
    first = Chart(plot, sentence, Table(("true", "predicted", "error"), rows, f"Some rows of {name}", folded=True))
    errors = [value - truth for truth, value in points]
    low, high = min(errors), max(errors)
    if not high > low or not math.isfinite(high - low):
        return [first]
    edges = [low + (high - low) * i / 30 for i in range(31)]
    counts = [0] * 30
    for error in errors:
        counts[min(29, int(30 * (error - low) / (high - low)))] += 1
    mean = sum(errors) / len(errors)
    about = f"Errors (predicted less true) of {name}: from {low:.4g} to {high:.4g}, mean {mean:.3g}."
    bars = histogram(f"errors-{k}", f"Errors of {name}", about, edges, counts, x_label=f"error of {name}")
    bins = [(f"{edges[i]:.4g} to {edges[i + 1]:.4g}", f"{count:,}") for i, count in enumerate(counts)]
    return [first, Chart(bars, about, Table(("error between", "rows"), bins, f"Errors of {name}", folded=True))]


def _confusion(counts: list[list[int]], classes: list[str]) -> Table:
    """The whole table for a few classes; for many, the pairs that are mistaken most often."""
    names = [cut(classes[k] if k < len(classes) else f"class {k}", 24) for k in range(len(counts))]
    if len(counts) <= MOST_CONFUSION:
        rows = [(name, *(f"{count:,}" for count in row)) for name, row in zip(names, counts, strict=True)]
        return Table(("true \\ predicted", *names), rows, "Held-out rows of each class, and what they were taken for")
    wrong = [(row[j], i, j) for i, row in enumerate(counts) for j in range(len(row)) if i != j and row[j]]
    rows = [(names[i], names[j], f"{count:,}") for count, i, j in sorted(wrong, reverse=True)[:20]]
    return Table(("true class", "taken for", "rows"), rows, "What was mistaken most often")
