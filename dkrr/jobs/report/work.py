"""What the run did while it ran: time per phase, memory per worker, rate."""

from __future__ import annotations

from typing import Any

from dkrr.jobs.report.axes import bytes_unit
from dkrr.jobs.report.blocks import DASH, Chart, Section, Table, Text, cut
from dkrr.jobs.report.charts import Series, bar_chart, line_chart
from dkrr.jobs.report.findings import Findings
from dkrr.jobs.report.words import rate, seconds, size

__all__ = ["memory_section", "rate_section", "time_section"]

MOST_TABLE_ROWS = 24
MOST_PHASES = 20
MOST_WORKERS = 32
USUAL = (
    "prepare", "plan", "start", "gram", "precondition", "factorise", "multiply", "cg", "decomposition", "newton",
    "apply", "solve", "solve forward", "solve backward", "residual", "leave-one-out", "evaluate", "end",
)  # fmt: skip
TOO_FEW = "There is no curve: fewer than two samples were taken, one every two seconds while a run goes on."


def time_section(found: Findings) -> Section:
    """Wall time of every phase of the last attempt, and of the attempts before it."""
    section = Section("time", "Time per phase")
    spent = phase_seconds(found)
    if not spent:
        return section.missing(f"No phase is over: {found.before('the first one ended')}.")
    total = sum(spent.values())
    longest = max(spent, key=lambda name: spent[name])
    sentence = (
        f"{seconds(total)} in {len(spent)} phases; {cut(longest, 40)} took most of it, {seconds(spent[longest])} "
        f"({spent[longest] / total:.0%})." if total else "Every phase was over at once."
    )  # fmt: skip
    names = list(spent)[:MOST_PHASES]
    svg = bar_chart(
        "phases", "Time per phase", sentence, names, [[round(spent[name], 3) for name in names]], x_label="seconds"
    )
    work = found.part("phases") or {}
    threads = max(1, found.status.num_threads)
    rows = [
        (cut(name, 60), seconds(value), *_phase_cells(found, work.get(name), name, threads))
        for name, value in spent.items()
    ]
    section.blocks.append(Chart(svg, sentence))
    section.blocks.append(
        Table(("phase", "time", "tasks", "computed", "rate", "busy"), rows[:MOST_PHASES], "Phases of the last attempt")
    )
    section.blocks.append(
        Text("Busy is the share of the workers' time that went into tasks which computed something; a dash: no tasks.")
    )
    return section


def phase_seconds(found: Findings) -> dict[str, float]:
    """Seconds by phase in the order in which they came."""
    status = found.status
    if found.result.get("seconds"):
        values = {name: value for name, value in found.result["seconds"].items() if name != "total"}
    else:
        values = dict(status.seconds)
    # the record has no order of its own, and a solver's phases have other names than those of the status
    number = {name: item.get("number", 50) for name, item in status.phases.items()}

    def place(name: str) -> tuple[int, int, str]:
        known = USUAL.index(name) if name in USUAL else USUAL.index("residual")
        return known, number.get(name, 50), name

    return dict(sorted(values.items(), key=lambda item: place(item[0])))


def _phase_cells(found: Findings, work: dict[str, Any] | None, name: str, threads: int) -> tuple[str, str, str, str]:
    if work is None:
        last = found.status.phases.get(name)
        return (f"{last['tasks']:,}" if last and last.get("tasks") else DASH), DASH, DASH, DASH
    took = work.get("seconds") or 0.0
    computed = f"{work['num_computed']:,}" if work.get("num_tasks") else DASH
    busy = f"{min(1.0, work['busy_seconds'] / (took * threads)):.0%}" if took and work.get("num_computed") else DASH
    return f"{work.get('num_tasks', 0):,}", computed, rate(work["flops"] / took if took else 0.0), busy


def memory_section(found: Findings) -> Section:
    """Resident memory of the workers over time, their peaks, and what they were allowed to have."""
    section = Section("memory", "Memory per worker over time")
    attempt, limit = found.attempt, found.plan.get("memory_limit_bytes")
    times, columns = attempt.get("seconds") or [], attempt.get("memory_bytes") or {}
    peaks: dict[str, int] = found.result.get("peak_rss_bytes") or {}
    workers = sorted(name for name in columns if name != "driver")
    if workers and len(times) > 1:
        section.blocks.append(_memory_chart(found, times, columns, workers, limit))
    elif len(times) > 1:
        there = found.status.num_workers
        why = "the run was over too soon, or the scheduler did not answer" if there else "the tasks ran in the driver"
        section.missing(f"No memory of workers was sampled: {why}. The curve is that of the driver.")
        section.blocks.append(_memory_chart(found, times, columns, ["driver"], None))
    else:
        section.missing(TOO_FEW)
    rows = [(cut(name, 80), size(peak), _share(peak, limit)) for name, peak in sorted(peaks.items())[:MOST_WORKERS]]
    if found.result.get("client_peak_rss_bytes"):
        rows.append(("driver", size(found.result["client_peak_rss_bytes"]), DASH))
    if rows:
        left = len(peaks) - MOST_WORKERS
        section.blocks.append(
            Table(
                ("process", "peak", "of its limit"),
                rows,
                f"Largest resident memory{f' ({left:,} more workers are not listed)' if left > 0 else ''}",
            )
        )
    elif not found.is_finished:
        section.missing(f"Peaks are not known: {found.before('it finished')}.")
    return section


def _share(peak: int, limit: Any) -> str:
    return f"{peak / limit:.0%}" if limit else DASH


def _memory_chart(
    found: Findings, times: list[float], columns: dict[str, list[Any]], names: list[str], limit: Any
) -> Chart:
    known = [value for name in names for value in columns[name] if value is not None]
    largest = max(known, default=0)
    unit, unit_name = bytes_unit(largest)
    shown = {name: f"{name} worker" if name in ("largest", "median", "smallest") else name for name in names}
    series = [
        Series(shown[name], times, [None if value is None else value / unit for value in columns[name]])
        for name in names
    ]
    projected = found.plan.get("task_bytes")
    lines = []
    if names != ["driver"] and projected and projected <= 3 * largest:
        lines.append((projected / unit, f"projected {size(projected)}"))
    if limit and limit <= 3 * largest:
        lines.append((limit / unit, f"limit {size(limit)}"))
    workers = found.attempt.get("num_workers") or len(names)
    who = "the driver" if names == ["driver"] else f"{workers:,} worker{'s' * (workers != 1)}"
    sentence = f"Resident memory of {who}: {size(largest)} at most in {len(times)} samples over {seconds(times[-1])}"
    if limit and names != ["driver"]:
        sentence += f", {largest / limit:.0%} of the limit of {size(limit)} each"
    svg = line_chart(
        "memory", "Memory per worker over time", f"{sentence}.", series,
        x_label="seconds since the attempt began", y_label=unit_name, lines=lines,
    )  # fmt: skip
    picked = _picked(len(times))
    rows = [
        (f"{times[k]:.0f}", *(DASH if columns[n][k] is None else size(columns[n][k]) for n in names[:6]))
        for k in picked
    ]
    table = Table(("seconds", *(cut(shown[n], 40) for n in names[:6])), rows, "Memory over time", folded=True)
    return Chart(svg, f"{sentence}.", table)


def _picked(count: int) -> list[int]:
    """Evenly spaced numbers below ``count``, at most 24, the last one among them."""
    step = -(-count // MOST_TABLE_ROWS)
    return sorted({*range(0, count, max(1, step)), count - 1})


def rate_section(found: Findings) -> Section:
    """Floating-point operations per second over time, and of every phase."""
    section = Section("rate", "Rate")
    attempt = found.attempt
    times, rates = attempt.get("seconds") or [], attempt.get("flops_per_second") or []
    phases = {
        name: work for name, work in (found.part("phases") or {}).items() if work.get("flops") and work.get("seconds")
    }
    if phases:
        best = max(phases, key=lambda name: phases[name]["flops"])
        whole = phases[best]
        threads, took = max(1, found.status.num_threads), whole["seconds"]
        how = f"{rate(whole['flops'] / took)} on {threads} thread{'s' * (threads > 1)}"
        what = f"{whole['flops']:.4g} flops in {seconds(took)}"
        section.blocks.append(Text(f"{cut(best, 40)}: {how}, {what}{_against_gemm(found, best, whole)}."))
    if len(times) > 1 and max(rates, default=0) > 0:
        peak = max(rates)
        sentence = f"GF/s between one heartbeat and the next: {peak / 1e9:.4g} at most."
        if found.status.epoch > 1:
            sentence += " Tiles that were found valid count as well, so a continued run begins with a peak."
        svg = line_chart(
            "rate", "GF/s over time", sentence, [Series("GF/s", times, [value / 1e9 for value in rates])],
            x_label="seconds since the attempt began", y_label="GF/s",
        )  # fmt: skip
        rows = [(f"{times[k]:.0f}", f"{rates[k] / 1e9:.4g}") for k in _picked(len(times))]
        section.blocks.append(Chart(svg, sentence, Table(("seconds", "GF/s"), rows, "GF/s over time", folded=True)))
    elif not phases:
        section.missing(f"No rate is known, for no task computed anything, or {found.before('a phase was over')}.")
    else:
        section.missing(TOO_FEW)
    return section


def _against_gemm(found: Findings, name: str, work: dict[str, Any]) -> str:
    """How much of what matrix products alone reach, as measured when the job was planned."""
    machine, plan = found.plan.get("calibration") or {}, found.plan
    if name != "factorise":
        return ""
    peak = machine.get("gemm_float64" if plan.get("precision") == "float64" else "gemm_float32")
    return f", {work['flops'] / work['seconds'] / peak:.0%} of what matrix products alone reached here" if peak else ""
