"""What was asked and what "auto" chose; the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dkrr.jobs.report.axes import number
from dkrr.jobs.report.blocks import DASH, Chart, Code, Facts, Section, Table, Text, cut
from dkrr.jobs.report.charts import bar_chart, histogram
from dkrr.jobs.report.findings import Findings
from dkrr.jobs.report.words import kernel_words, listed, loss_words, reasons_of, seconds, size

__all__ = ["asked_section", "data_section"]

MOST_CANDIDATES = 12
MOST_ROWS = 30


def asked_section(found: Findings) -> Section:
    """The job beside the plan: every choice, who made it, and what else was possible."""
    section = Section("asked", "What was asked, and what “auto” chose")
    plan = found.plan
    if not found.job:
        section.missing("job.json of this run cannot be read, so what was asked is not known.")
    elif not plan:
        section.missing(f"There is no plan: {found.before('the job was planned')}.")
    rows = list(_choices(found)) if found.job else []
    if rows:
        section.blocks.append(Table(("", "asked", "became"), rows, "Choices of this run"))
    for name, text in reasons_of(plan):
        section.blocks.append(Text(f"{name.capitalize()}: {cut(text)}."))
    for note in plan.get("notes") or []:
        section.blocks.append(Text(f"Note: {cut(note)}."))
    if plan.get("refusal"):
        section.blocks.append(Text(f"The plan refused the job: {cut(plan['refusal'])}. {cut(plan.get('hint', ''))}"))
    for item in found.result.get("given_up") or found.status.given_up:
        section.blocks.append(Text(f"Went on: {cut(item['sentence'])}."))
    candidates = plan.get("candidates") or []
    if len(candidates) > 1:
        section.blocks.append(_candidates(candidates))
    if found.job_text:
        section.blocks.append(Code("The job file", found.job_text))
    return section


def _choices(found: Findings) -> Iterator[tuple[str, str, str]]:
    job, plan = found.job, found.plan

    def asked(table: str, name: str, default: str = "auto") -> str:
        value = (job.get(table) or {}).get(name)
        return default if value is None else listed(value)

    def became(name: str) -> str:
        return listed(plan[name]) if plan.get(name) not in (None, "") else DASH

    yield "data", asked("data", "path", DASH), DASH
    model = job.get("model") or {}
    kernel = model.get("kernel", "linear")
    if not isinstance(kernel, dict):
        kernel = {"kernel": kernel, "gamma": model.get("gamma"), **(model.get("kernel_params") or {})}
    yield "kernel", kernel_words(kernel), kernel_words(plan["kernel"]) if plan.get("kernel") else DASH
    if plan.get("loss"):
        given = {name: model[name] for name in ("loss", "C", "quantile", "epsilon") if model.get(name) is not None}
        yield "loss", loss_words(given), loss_words(plan["loss"])
    yield "alpha", asked("model", "alpha", DASH if model.get("C") else "1"), became("alpha")
    has_tiles = not plan.get("loss")
    for name, key in (("solver", "name"), ("precision", "precision"), *([("gram", "gram")] if has_tiles else [])):
        yield name if name != "gram" else "Gram matrix", asked("solver", key), became(name).replace("_", " ")
    if has_tiles:
        yield "rows of a tile", asked("solver", "tile_size"), became("tile_size")
    if plan.get("solver") == "cg":
        yield "rank of the preconditioner", asked("solver", "rank"), became("rank")
    if plan.get("nystrom"):
        yield "centres", asked("solver", "num_centers"), listed(plan["nystrom"].get("num_centers"))
    yield "tolerance", asked("solver", "tol"), DASH
    yield "workers", asked("cluster", "workers"), became("workers")
    limit = plan.get("memory_limit_bytes")
    yield "memory limit of a worker", _limit(asked("cluster", "memory_limit")), size(limit) if limit else DASH
    yield "scheduler", asked("cluster", "scheduler", "local"), cut(found.status.scheduler) or DASH
    if found.status.insecure:
        yield "insecure", "true", "the scheduler was reached without encryption or authentication"


def _limit(text: str) -> str:
    return size(int(text.replace(",", ""))) if text.replace(",", "").isdigit() else text


def _candidates(candidates: list[dict[str, Any]]) -> Table:
    """The cheapest ways that were possible, and those that were not."""
    ordered = sorted(candidates, key=lambda item: (bool(item.get("infeasible")), item.get("total_seconds") or 0.0))
    rows = []
    for item in ordered[:MOST_CANDIDATES]:
        iterations = item.get("iterations")
        rows.append(
            (
                cut(item.get("name", "")),
                seconds(item.get("total_seconds")),
                DASH if not iterations else f"{round(iterations['low']):,} to {round(iterations['high']):,}",
                size(item.get("memory_bytes")),
                size(sum((item.get("disk_bytes") or {}).values())),
                cut(item.get("infeasible") or "possible"),
            )
        )
    left = len(candidates) - len(rows)
    return Table(
        ("way", "time", "iterations", "memory of a worker", "on disk", ""),
        rows,
        f"What was possible ({len(candidates)} ways, the cheapest first{f'; {left} more' if left else ''})",
    )


def data_section(found: Findings) -> Section:
    """Rows, features, targets: how many, what they are called, how they are spread."""
    section = Section("data", "The data")
    data = found.part("data")
    if not data:
        return section.missing(f"No figures of the data are kept: {found.before('they were taken')}.")
    rows = [
        ("training rows", number(data["num_rows"])),
        ("held-out rows", number(data["num_test_rows"]) if data["num_test_rows"] else "none"),
        ("features", number(data["num_features"])),
        ("targets", number(data["num_targets"])),
        ("whitened", "yes, by the statistics of the training rows" if data["standardized"] else "no"),
        ("weights", cut(data["weight"]) if data.get("weight") else "none"),
        ("digest of the rows", cut(data["digest"], 80)),
    ]
    if len(data.get("generations") or []) > 1:
        rows.append(("rows after each append", listed(data["generations"])))
    section.blocks.append(Facts(rows, "The rows of this run"))
    if data.get("class_counts"):
        section.blocks.append(_classes(data))
    for number_, target in enumerate(data.get("targets") or []):
        section.blocks.append(_target(number_, target))
    hidden = data["num_targets"] - len(data.get("targets") or [])
    if data.get("targets") and hidden:
        section.blocks.append(Text(f"{hidden:,} more targets are not drawn."))
    features = data.get("features") or []
    if features:
        left = data["num_features"] - len(features[:MOST_ROWS])
        section.blocks.append(
            Table(
                ("feature", "mean", "standard deviation"),
                [(cut(item["name"], 80), number(item["mean"]), number(item["std"])) for item in features[:MOST_ROWS]],
                f"Features of the training rows{f' ({left:,} more are not listed)' if left else ''}",
                folded=len(features) > 12,
            )
        )
    return section


def _target(k: int, target: dict[str, Any]) -> Chart:
    name, edges, counts = cut(target["name"], 60), target["edges"], target["counts"]
    low, high = number(target["min"]), number(target["max"])
    spread = f"mean {number(target['mean'])}, standard deviation {number(target['std'])}"
    sentence = f"Target {name}: from {low} to {high}, {spread}"
    peak = max(range(len(counts)), key=counts.__getitem__)
    description = f"{sentence}. Most rows, {counts[peak]:,}, are between {edges[peak]:.4g} and {edges[peak + 1]:.4g}."
    bins = [(f"{edges[i]:.4g} to {edges[i + 1]:.4g}", f"{count:,}") for i, count in enumerate(counts)]
    svg = histogram(f"target-{k}", f"Histogram of target {name}", description, edges, counts, x_label=name)
    return Chart(svg, f"{sentence}.", Table((f"{name} between", "rows"), bins, f"Histogram of {name}", folded=True))


def _classes(data: dict[str, Any]) -> Chart:
    counts = data["class_counts"]
    names = [cut(name, 40) for name in (data.get("classes") or [])][: len(counts)]
    description = "Training rows of each class: " + ", ".join(
        f"{name} {count:,}" for name, count in zip(names, counts, strict=False)
    )
    svg = bar_chart("classes", "Training rows of each class", description, names, [counts], x_label="rows")
    table = Table(
        ("class", "rows"), [(n, f"{c:,}") for n, c in zip(names, counts, strict=False)], "Classes", folded=True
    )
    return Chart(svg, "Training rows of each class.", table)
