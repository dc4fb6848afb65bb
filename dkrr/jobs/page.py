"""The page of a run: what was asked, the data, the work, the answer, what came of the plan, in one file.

Each section is a function of what was found to the blocks that the template lays out; of one without any the page says
why. ``report.html`` is made when a run ends, however it ends, and whenever somebody asks for it. It has no reference to
anything outside, holds no script, asks nobody for anything (its own policy forbids it), and stays below 2 MB: every
part of it is bounded.

Cost: reads a dozen small documents of the run; some 20 ms, and 0.1 s once to load the template engine.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from dkrr import __version__
from dkrr.errors import StoreError
from dkrr.jobs.charts import Bar, Block, Chart, Code, Table, Text
from dkrr.jobs.facts import (
    Findings,
    candidate_rows,
    exactness_facts,
    leave_one_out_facts,
    path_rows,
    progress_words,
    result_facts,
    reuse_facts,
    reused_rows,
    score_facts,
    sentence,
    size_rows,
    time_rows,
)
from dkrr.jobs.run_directory import RunDirectory, Status, look_once, utc_now
from dkrr.markup import (
    DASH,
    bytes_unit,
    cut,
    kernel_words,
    known,
    listed,
    loss_words,
    number,
    rate,
    reasons_of,
    seconds,
    size,
)
from dkrr.store.files import write_file

logger = logging.getLogger("dkrr.jobs.report")

_MADE = b'<meta name="generator" content="dkrr '
# what HTML and XML cannot hold, and characters that turn the direction of text around
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
MOST_CONFUSION = 10
MOST_FEATURES = 30
MOST_MACHINES = 8
MOST_PHASES = 20
MOST_SHOWN_EVENTS = 120
MOST_TARGETS = 40
TOO_FEW = (
    "There is no curve of memory or GF/s: fewer than two samples were taken, one every two seconds while a run goes on."
)
MOST_WORKERS = 32
NUM_BINS = 30
# the record of a run has no order of its own, and a solver's phases have other names than those of the status
USUAL = (
    "prepare", "plan", "start", "gram", "precondition", "factorise", "multiply", "cg", "decomposition", "newton",
    "apply", "solve", "solve forward", "solve backward", "residual", "leave-one-out", "evaluate", "end",
)  # fmt: skip
# label, table and key of the job, and what it is where the job is silent
_CHOICES = (
    ("data", "data", "path", DASH),
    ("kernel", "model", "kernel", "linear"),
    ("loss", "model", "loss", "square"),
    ("alpha", "model", "alpha", DASH),
    ("solver", "solver", "name", "auto"),
    ("precision", "solver", "precision", "auto"),
    ("Gram matrix", "solver", "gram", "auto"),
    ("rows of a tile", "solver", "tile_size", "auto"),
    ("rank of the preconditioner", "solver", "rank", "auto"),
    ("centres", "solver", "num_centers", "auto"),
    ("tolerance", "solver", "tol", "auto"),
    ("workers", "cluster", "workers", "auto"),
    ("memory limit of a worker", "cluster", "memory_limit", "auto"),
    ("scheduler", "cluster", "scheduler", "local"),
    ("insecure", "cluster", "insecure", "true"),
)


def clock(text: Any) -> str:
    """A time of ours without the letter in its middle."""
    return str(text)[:19].replace("T", " ") + " UTC" if text else "unknown"


def _left(count: int, words: str) -> str:
    return f" ({count:,} more {words})" if count > 0 else ""


# --- what was asked, and of which data --------------------------------------------------------------------------------


def asked_section(found: Findings) -> Iterator[Block]:
    """The job beside the plan: every choice, who made it, and what else was possible."""
    plan = found.plan
    if found.job:
        yield Table(("", "asked", "became"), _choices(found), "Choices of this run")
    yield from (Text(f"{name.capitalize()}: {cut(text)}.") for name, text in reasons_of(plan))
    yield from (Text(f"Note: {cut(note)}.") for note in plan.get("notes") or [])
    if plan.get("refusal"):
        yield Text(f"The plan refused the job: {cut(plan['refusal'])}. {cut(plan.get('hint', ''))}")
    for item in found.result.get("given_up") or found.status.given_up:
        yield Text(f"Went on: {cut(item['sentence'])}.")
    if ways := candidate_rows(plan):
        head = ("way", "time", "iterations", "memory of a worker", "on disk", "")
        yield Table(head, ways, f"What was possible ({len(plan['candidates'])} ways, the cheapest first)")
    if found.job_text:
        yield Code("The job file", found.job_text)


def _choices(found: Findings) -> list[tuple[str, str, str]]:
    """What stands in the job beside what it became, as far as there is such a thing."""
    job, plan, model = found.job, found.plan, found.job.get("model") or {}
    kernel = model.get("kernel", "linear")
    if not isinstance(kernel, dict):
        kernel = {"kernel": kernel, **(model.get("kernel_params") or {})}
        kernel |= {name: model[name] for name in ("gamma", "degree", "coef0") if model.get(name) is not None}
    loss_keys = {name: model[name] for name in ("loss", "C", "quantile", "epsilon") if model.get(name) is not None}
    has_tiles, limit = not plan.get("loss"), plan.get("memory_limit_bytes")
    became = {
        "kernel": plan.get("kernel") and kernel_words(plan["kernel"]),
        "loss": loss_words(plan.get("loss")),
        "gram": has_tiles and str(plan.get("gram", "")).replace("_", " "),
        "tile_size": has_tiles and plan.get("tile_size"),
        "rank": plan.get("solver") == "cg" and plan.get("rank"),
        "num_centers": (plan.get("nystrom") or {}).get("num_centers"),
        "memory_limit": limit and size(limit),
        "scheduler": cut(found.status.scheduler),
        "insecure": "neither encryption nor authentication" if found.status.insecure else "",
        "name": plan.get("solver"),
    } | {key: plan.get(key) for key in ("alpha", "precision", "workers")}
    words = {"kernel": kernel_words(kernel), "loss": loss_words(loss_keys)}
    rows = []
    for label, table, key, default in _CHOICES:
        asked = words.get(key) or (job.get(table) or {}).get(key, default)
        if became.get(key) or key in ("path", "kernel", "alpha", "name", "precision", "tol"):
            asked = size(asked) if key == "memory_limit" and isinstance(asked, int) else listed(asked)
            rows.append((label, asked, listed(became.get(key) or DASH)))
    return rows


def data_section(found: Findings) -> Iterator[Block]:
    """Rows, features, targets: how many, what they are called, how they are spread."""
    data = found.part("data")
    if not data:
        return
    generations, features, first = data.get("generations") or [], data.get("features") or [], data.get("scaling_rows")
    whose = "training rows" + (f" among the first {number(first)} rows, as in the fit before" if first else "")
    rows = known(
        ("training rows", number(data["num_rows"])),
        ("held-out rows", number(data["num_test_rows"]) if data["num_test_rows"] else "none"),
        ("features", number(data["num_features"])),
        ("targets", number(data["num_targets"])),
        ("whitened", f"yes, by the statistics of the {whose}" if data["standardized"] else "no"),
        ("weights", cut(data.get("weight") or "none")),
        ("digest of the rows", cut(data["digest"], 80)),
        ("rows after each append", listed(generations) if len(generations) > 1 else ""),
    )
    yield Table((), rows, "The rows of this run")
    counts, targets = data.get("class_counts"), data.get("targets") or []
    if counts:
        classes = [(cut(n, 40), Bar(f"{k:,}", k / max(counts))) for n, k in zip(data["classes"], counts, strict=False)]
        yield Table(("class", "rows"), classes, "Training rows of each class", folded=len(classes) > 20)
    for target in targets:
        name, edges, counts = cut(target["name"], 60), target["edges"], target["counts"]
        low, high, mean, std = (number(target[key]) for key in ("min", "max", "mean", "std"))
        spread = f"Target {name}: from {low} to {high}, mean {mean}, standard deviation {std}."
        peak = counts.index(max(counts))
        most = f" Most rows, {counts[peak]:,}, are between {edges[peak]:.4g} and {edges[peak + 1]:.4g}."
        yield Chart(
            mark="histogram", title=f"Histogram of target {name}", sentence=spread, more=most, x=edges,
            columns={"rows": counts}, x_label=name, y_label="rows",
        )  # fmt: skip
    if features:
        yield Table(
            ("feature", "mean", "standard deviation"),
            [(cut(item["name"], 80), number(item["mean"]), number(item["std"])) for item in features[:MOST_FEATURES]],
            f"Features of the training rows{_left(data['num_features'] - MOST_FEATURES, 'are not listed')}",
            folded=len(features) > 12,
        )


# --- what the run did while it ran ------------------------------------------------------------------------------------


def phase_seconds(found: Findings) -> dict[str, float]:
    """Seconds by phase in the order in which they came."""
    values = dict(found.result.get("seconds") or found.status.seconds)
    values.pop("total", None)
    order = {name: place for place, name in enumerate(USUAL)}
    return {name: values[name] for name in sorted(values, key=lambda name: (order.get(name, order["residual"]), name))}


def time_section(found: Findings) -> Iterator[Block]:
    """Wall time of every phase of the last attempt."""
    spent = phase_seconds(found)
    if not spent:
        return
    longest, head = max(spent.values()) or 1, ("phase", "time", "tasks", "computed", "rate", "busy")
    rows = [
        (cut(name, 60), Bar(seconds(value), value / longest), *_phase_cells(found.part("phases", name) or {}, found))
        for name, value in [*spent.items()][:MOST_PHASES]
    ]
    yield Table(head, rows, "Phases of the last attempt")
    yield Text("Busy is the share of the workers' time in tasks that computed something; a dash: no tasks.")


def _phase_cells(work: dict[str, Any], found: Findings) -> tuple[str, str, str, str]:
    took, tasks, computed = work.get("seconds"), work.get("num_tasks"), work.get("num_computed", 0)
    return (
        number(tasks) if tasks else DASH,
        number(computed) if tasks else DASH,
        rate(work["flops"] / took if took else 0.0),
        f"{_busy(found, work):.0%}" if took and computed else DASH,
    )


def _busy(found: Findings, work: dict[str, Any]) -> float:
    share = work["busy_seconds"] / (work["seconds"] * max(1, found.status.num_threads))
    return min(1.0, float(share))


def memory_section(found: Findings) -> Iterator[Block]:
    """Resident memory of the workers over time, their peaks, and what they were allowed to have."""
    limit, peaks = found.plan.get("memory_limit_bytes"), found.result.get("peak_rss_bytes") or {}
    times, columns = found.attempt.get("seconds") or [], found.attempt.get("memory_bytes") or {}
    if len(times) < 2:
        yield Text(TOO_FEW, missing=True)
    else:
        highest = {k: max((v for v in values if v is not None), default=0) for k, values in columns.items()}
        largest, worker = max(highest.values()), max((v for k, v in highest.items() if k != "driver"), default=0)
        unit, unit_name = bytes_unit(largest)
        marks = (("projected", found.plan.get("task_bytes")), ("limit", limit))
        share = f" in {seconds(times[-1])}"
        share += f"; a worker had {worker / limit:.0%} of its limit at most" if limit and worker else ""
        yield Chart(
            mark="line", title="Memory per worker over time", x=times,
            sentence=f"Resident memory: {size(largest)} at most, {len(times)} samples{share}.",
            columns={cut(k, 40): [None if v is None else v / unit for v in values] for k, values in columns.items()},
            x_label="seconds since the attempt began", y_label=unit_name,
            levels=[(mark / unit, f"{what} {size(mark)}") for what, mark in marks if mark and mark <= 3 * largest],
        )  # fmt: skip
    driver = found.result.get("client_peak_rss_bytes")
    rows = [
        (cut(name, 80), size(peak), f"{peak / limit:.0%}" if limit else DASH)
        for name, peak in sorted(peaks.items())[:MOST_WORKERS]
    ] + [("driver", size(driver), DASH)] * bool(driver)
    left = _left(len(peaks) - MOST_WORKERS, "workers are not listed")
    if rows:
        yield Table(("process", "peak", "of its limit"), rows, f"Largest resident memory{left}")


def rate_section(found: Findings) -> Iterator[Block]:
    """Floating-point operations per second over time."""
    times, rates = found.attempt.get("seconds") or [], found.attempt.get("flops_per_second") or []
    if len(times) > 1 and max(rates, default=0) > 0:
        again = " Tiles that were found valid count as well, so a continued run begins with a peak."
        largest = f"GF/s between one heartbeat and the next: {max(rates) / 1e9:.4g} at most."
        yield Chart(
            mark="line", title="GF/s over time", sentence=largest + again * (found.status.epoch > 1), x=times,
            columns={"GF/s": [value / 1e9 for value in rates]},
            x_label="seconds since the attempt began", y_label="GF/s",
        )  # fmt: skip
    else:
        yield Text(TOO_FEW, missing=True)


# --- the answer, and how good it is -----------------------------------------------------------------------------------


def _name(names: Sequence[str] | None, k: int) -> str:
    return cut(names[k] if names and k < len(names) else f"target {k}", 60)


def convergence_section(found: Findings) -> Iterator[Block]:
    """Residuals of conjugate gradients, or the gap of another loss than the square, against the iteration."""
    traces = [trace for trace in found.part("convergence") or [] if trace.get("iterations")]
    solver = found.result.get("solver") or found.plan.get("solver")
    direct = solver == "cholesky" and found.plan.get("precision") != "mixed"
    what, certificates = "duality gap" if found.plan.get("loss") else "residual", found.result.get("certificates") or []
    for trace in traces:
        iterations, rows, tol = trace["iterations"], trace["relative_residual"], trace["tol"]
        last, targets, names = max(rows[-1]), trace.get("num_targets", len(rows[0])), trace["curves"]
        alphas = trace.get("alpha") or []
        more = trace.get("num_alphas", len(alphas)) - 4
        alpha = f", alpha {listed(alphas[:4], '.4g')}{f' and {more} more' if more > 0 else ''}" if alphas else ""
        together = " of all columns together" if what == "duality gap" and len(certificates) > 1 else ""
        parts = [
            f"{cut(trace['name'], 160)}{alpha}: the largest {what} was {last:.2g} ",
            f"after {iterations[-1]:,} iterations{together}, {tol:.2g} was asked for",
            "" if last <= tol else ", which was not reached",
            "" if trace.get("is_over") else f"; {found.before('the iteration ended')}",
            f". Of {targets:,} targets the largest, median and smallest {what} are drawn."
            if targets > len(names)
            else ".",
        ]
        label = what if what == "duality gap" else "relative residual"
        yield Chart(
            mark="line", title=f"{label.capitalize()} against the iteration", sentence="".join(parts), x=iterations,
            columns={cut(name, 40): [row[k] or None for row in rows] for k, name in enumerate(names)},
            x_label="iteration", y_label=label, log=True, levels=[(tol, f"tol {tol:.2g}")],
        )  # fmt: skip
    is_solved = found.result or {"residual", "primal"} & set(found.part("phases") or {})
    if not traces and is_solved and (direct or solver == "primal"):
        way = "a Cholesky factor" if direct else "explicit features"
        yield Text(f"There were no iterations: the system was solved by {way}, directly.", missing=True)


def residual_section(found: Findings) -> Iterator[Block]:
    """How exact the answer is for every target: residual and backward error, or gap and violation of another loss."""
    result, plan = found.result, found.plan
    certificates, relative = result.get("certificates") or [], result.get("relative_residual") or []
    if not (certificates or relative):
        return
    verdict = "converged" if result.get("converged") else "did NOT converge, which was allowed"
    yield Text(f"{cut(result.get('message', ''))}. The solve {verdict}.")
    yield Table((), exactness_facts(plan, result), "Of all targets")
    if path := path_rows(result):
        columns = ("C", "alpha", "score", "support vectors", "gap", "")
        yield Table(columns, path, "Path over C: what each is worth on the held-out rows")
    names = result.get("target_names") or found.part("data", "target_names")
    head: tuple[str, ...] = ("target", "relative residual", "backward error")
    if certificates:
        head = ("target", "primal objective", "dual objective", "gap", "KKT violation", "support vectors")
        cells = [
            (*(f"{item[name]:.6g}" for name in ("primal", "dual", "gap", "kkt")), number(item["num_support"]))
            for item in certificates
        ]
    else:
        both = zip(relative, result.get("backward_error") or [], strict=False)
        cells = [(f"{value:.3e}", f"{error:.3e}") for value, error in both]
    rows = [(_name(names, k), *values) for k, values in enumerate(cells[:MOST_TARGETS])]
    is_given = (plan.get("kernel") or {}).get("kernel") == "precomputed"
    source = "the given matrix" if is_given else "the kernel and the rows"
    caption = f"Evaluated in float64 from {source}{_left(len(cells) - MOST_TARGETS, 'targets')}"
    yield Table(head, rows, caption, folded=len(rows) > 12)
    if left_out := leave_one_out_facts(result):
        yield Table((), left_out, "Leave-one-out")


def held_out_section(found: Findings) -> Iterator[Block]:
    """Scores on rows that the fit has not seen; predictions beside the truth, or classes taken for others."""
    score, evaluate, held_out = found.result.get("score"), found.job.get("evaluate"), found.part("held_out") or {}
    if not score:
        if found.job and not any((evaluate or {}).get(name) is not None for name in ("path", "mask", "fraction")):
            words = "No rows were held out: the job has no [evaluate] with a path, a mask or a fraction."
            yield Text(words, missing=True)
        return
    yield Table((), score_facts(found.result), "Scores on held-out rows")
    if counts := held_out.get("confusion"):
        classes = found.part("data", "classes") or []
        if len(counts) <= MOST_CONFUSION and len(classes) == len(counts):
            rows = [(cut(name, 24), *map(number, row)) for name, row in zip(classes, counts, strict=True)]
            head = ("true \\ predicted", *(name for name, *_ in rows))
            yield Table(head, rows, "Held-out rows of each class, and what they were taken for")
        return
    names = found.result.get("target_names") or found.part("data", "target_names")
    for k, points in enumerate(held_out.get("pairs") or []):
        pairs = sorted(tuple(point) for point in points if None not in point)
        total, rmse = score.get("num_rows") or len(points), dict(enumerate(score.get("rmse") or [])).get(k)
        some = f"{len(points):,} of {total:,} held-out rows, evenly spaced"
        shown = f"all {total:,} held-out rows" if len(points) == total else some
        title = f"Predicted against true {_name(names, k)}"
        fit = f"root mean squared error {number(rmse)}"
        yield Chart(
            mark="point", title=title, sentence=f"{title} for {shown}; {fit}. On the line both are equal.",
            x=[true for true, _ in pairs], columns={"predicted": [predicted for _, predicted in pairs]},
            x_label=f"true {_name(names, k)}", y_label="predicted",
        )  # fmt: skip


# --- what came of it --------------------------------------------------------------------------------------------------


def plan_section(found: Findings) -> Iterator[Block]:
    """What the plan expected beside what was."""
    plan, result = found.plan, found.result
    if not plan:
        return
    if not found.is_finished:
        words = f"The run did not come to its end ({found.state}): what it spent is that of its last attempt."
        yield Text(words, missing=True)
    spent = phase_seconds(found) | {"total": (result.get("seconds") or {}).get("total")}
    times = time_rows(plan, spent)[-MOST_PHASES:]
    yield Table(("time", "expected", "actual", "actual / expected"), times, "Time")
    work, workers = found.part("phases", "factorise") or {}, found.status.num_workers
    others = [*size_rows(plan, result), ("workers", number(plan.get("workers")), number(workers) if workers else DASH)]
    busy = plan.get("efficiency")
    if busy and work.get("seconds") and work.get("num_computed"):
        others.append(("workers busy in the factorisation", f"{busy:.0%}", f"{_busy(found, work):.0%}"))
    yield Table(("", "expected", "actual"), others, "Everything else")


def reuse_section(found: Findings) -> Iterator[Block]:
    """What an attempt found that an earlier one, or another run, had computed."""
    result, status, present = found.result, found.status, found.part("present_bytes")
    reused = result.get("reused") or status.reused
    tasks = {
        name: (work["num_tasks"], work["num_tasks"] - work["num_computed"])
        for name, work in (found.part("phases") or {}).items()
        if work.get("num_tasks", 0) > work.get("num_computed", 0) and not (name == "factorise" and result)
    }
    rows = reuse_facts(result, reused) + known(
        *((f"tasks of {cut(k, 40)}", f"{n:,}, {valid:,} had nothing to compute") for k, (n, valid) in tasks.items()),
        ("valid tiles before this attempt", present and size(present)),
    )
    if rows:
        yield Table((), rows, "Found and kept")
    is_new = result.get("tiles_total") == result.get("tiles_computed") and not tasks
    said = f"This is attempt {status.epoch}: what earlier ones finished, and what is valid in the store, is used."
    if status.epoch < 2 and is_new and not reused_rows(reused):
        said = "Nothing was resumed: this is the first attempt of the run, and what it needed was computed."
    yield Text(said)


def versions_section(found: Findings) -> Iterator[Block]:
    """Versions, processors and BLAS of the driver and of the workers."""
    environment = found.part("environment") or {}
    driver, workers = environment.get("driver"), environment.get("workers", [])[:MOST_MACHINES]
    if not driver:
        return
    rows = [
        ("host", cut(driver.get("host", "unknown"))),
        ("system", cut(driver.get("system", "unknown"))),
        ("processor", f"{cut(driver.get('cpu', 'unknown'))}, {driver.get('num_cpus')} usable"),
        ("memory", size(driver.get("memory_bytes"))),
        ("versions", ", ".join(f"{name} {cut(v, 40)}" for name, v in driver.get("versions", {}).items())),
        ("BLAS", _libraries(driver.get("blas"))),
    ]
    yield Table((), rows, "The driver")
    names = ("python", "numpy", "scipy", "zarr", "dask", "distributed", "dkrr", "crc32c")
    for group in workers:
        count, limit = group.get("num_workers", 1), group.get("memory_limit_bytes")
        rows = [
            ("host", cut(group.get("host", "unknown"))),
            ("addresses", listed(group.get("addresses", []))),
            ("threads", f"{number(group.get('threads'))} each"),
            ("memory limit", size(limit) if limit else "none"),
            ("versions", ", ".join(f"{name} {cut(group.get(name, '?'), 40)}" for name in names)),
            ("BLAS kernel", cut(group.get("blas_kernel", "unknown"))),
            ("BLAS", _libraries(group.get("blas"))),
        ]
        yield Table((), rows, f"{count:,} worker{'s that are alike' if count != 1 else ''}")
    if not workers:
        yield Text("There were no workers: the tasks ran in the driver's process.")


def _libraries(libraries: Any) -> str:
    names = ("internal_api", "version", "architecture")
    kinds = [(" ".join(str(item.get(name)) for name in names), item.get("num_threads")) for item in libraries or []]
    return cut("; ".join(f"{kind}, threads {threads}" for kind, threads in kinds) or "unknown")


def events_section(found: Findings) -> Iterator[Block]:
    """What happened, as `dkrr logs` prints it."""
    events, half = found.events, MOST_SHOWN_EVENTS // 2
    if not events:
        return
    chosen = events if len(events) <= 2 * half else [*events[:half], *events[-half:]]
    left = len(events) - len(chosen)
    rows = [(clock(item.get("time")), cut(item.get("kind", ""), 20), cut(item.get("message", ""))) for item in chosen]
    caption = f"Events{f' ({left:,} in the middle are left out)' if left else ''}"
    yield Table(("time", "kind", "message"), rows, caption, folded=len(rows) > 20)


# --- the whole page ---------------------------------------------------------------------------------------------------


# key, title, what makes it, and what must have happened for there to be something in it
_SECTIONS: tuple[tuple[str, str, Callable[[Findings], Iterator[Block]], str], ...] = (
    ("asked", "What was asked, and what “auto” chose", asked_section, "the job was written down"),
    ("data", "The data", data_section, "figures of the data were taken"),
    ("time", "Time per phase", time_section, "the first phase was over"),
    ("memory", "Memory per worker over time", memory_section, "samples were taken"),
    ("rate", "Rate", rate_section, "a phase was over"),
    ("convergence", "Convergence of {solver}", convergence_section, "the iteration began"),
    ("residuals", "{exactness}", residual_section, "it was solved"),
    ("held-out", "Predicted against true on held-out rows", held_out_section, "held-out rows were predicted"),
    ("plan", "Plan against reality", plan_section, "the job was planned"),
    ("reuse", "What was resumed or reused", reuse_section, "anything was looked for"),
    ("versions", "Versions and BLAS", versions_section, "the workers were checked"),
    ("events", "What happened", events_section, "anything happened"),
)


def render_report(directory: RunDirectory, status: Status | None = None) -> str:
    """The page of a run as text, for a run in any state.

    Parameters
    ----------
    status
        How the run stands, for whoever knows it already; by default it is looked at.
    """
    found = Findings(directory, status or look_once(directory))
    is_square = not found.plan.get("loss")
    words = {
        "solver": "conjugate gradients" if is_square else f"{cut(found.plan.get('solver'), 40)}: duality gap",
        "exactness": "Residuals" if is_square else "Duality gaps",
    }
    result, status = found.result, found.status
    flops = result.get("flops_per_second")
    figures = [(cut(name, 40), cut(value, 60)) for name, value in result_facts(found.plan, result)] + known(
        ("time", not result.get("seconds") and seconds(status.elapsed_seconds)),
        ("factorisation", flops and rate(flops)),
        ("phase", not found.is_finished and status.phase and cut(progress_words(status), 80)),
        ("attempt", number(status.epoch)),
        ("began", clock(status.started_at)),
    )
    text = _template().render(
        name=cut(found.name, 120),
        location=cut(found.location),
        state=found.state,
        verdict=_verdict(found),
        hint=cut((found.status.error or {}).get("hint", "")) if not found.is_finished else "",
        figures=figures,
        sections=[(key, title.format(**words), _made(key, make, found, then)) for key, title, make, then in _SECTIONS],
        version=__version__,
        made=clock(utc_now()),
    )
    return _UNPRINTABLE.sub("\ufffd", text)


def write_report(directory: RunDirectory, output: str | Path | None = None, *, status: Status | None = None) -> str:
    """Make the page of a run, and write it into the run, or to the file ``output``.

    Returns
    -------
    path : str
        Where it is.

    Raises
    ------
    OSError, StoreError
        It cannot be written, or ``output`` is something else than an earlier report.
    """
    data = render_report(directory, status).encode()
    if output is None:
        directory.write_bytes("report.html", data)
        return directory.path("report.html")
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file() or _MADE not in path.read_bytes()[:4096]):
        raise StoreError(f"{path} exists and is not a report of dkrr", hint="choose another name or remove it")
    write_file(path, data)
    return str(path)


def _made(key: str, make: Callable[[Findings], Iterator[Block]], found: Findings, event: str) -> list[Block]:
    """A section; a sentence where there is nothing in it, or a document of the run is not what it should be."""
    nothing = Text(f"There is nothing to show here: {found.before(event)}.", missing=True)
    try:
        return list(make(found)) or [nothing]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as exc:
        logger.warning("section %r of the report of %s could not be made (%r)", key, found.name, exc)
        why = f"This section could not be made: what the run recorded is damaged or of another version ({exc!r})."
        return [Text(cut(why), missing=True)]


def _verdict(found: Findings) -> str:
    """How the run stands, in a sentence or two."""
    if found.is_finished:
        return f"The run finished. {cut(found.result.get('message', '')).rstrip('.')}."
    if found.goes_on:
        phase = f" in the phase {cut(found.status.phase)}" if found.status.phase else ""
        return f"The run was {found.state}{phase} when this page was made; `dkrr report {found.shown}` makes it again."
    how = cut(f"{'' if found.state == 'failed' else 'was '}{sentence(found.status)}").rstrip(".")
    earlier = " An earlier attempt finished; its result and model are still there." if found.has_earlier_result else ""
    return f"The run {how}. {found.goes_on_by} continues it with what is finished.{earlier}"


@lru_cache(maxsize=1)
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    folder = Path(__file__).parent
    loader = FileSystemLoader(folder)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style = (folder / "report.css").read_text(encoding="utf-8")
    environment.globals["style"] = Markup(style)  # noqa: S704  (a file of ours)
    return environment.get_template("report.html.jinja")
