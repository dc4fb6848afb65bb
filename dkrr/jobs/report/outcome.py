"""What came of the plan, what was found and not computed, on which software, and what happened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dkrr.jobs.report.axes import number
from dkrr.jobs.report.blocks import DASH, Chart, Facts, Section, Table, Text, cut
from dkrr.jobs.report.charts import bar_chart
from dkrr.jobs.report.findings import Findings
from dkrr.jobs.report.words import clock, listed, ratio, seconds, size
from dkrr.jobs.report.work import phase_seconds
from dkrr.jobs.tables import reused_rows

__all__ = ["events_section", "plan_section", "reuse_section", "versions_section"]

MOST_PHASES = 14
MOST_SHOWN_EVENTS = 120
MOST_MACHINES = 8


def plan_section(found: Findings) -> Section:
    """What the plan expected beside what was."""
    section = Section("plan", "Plan against reality")
    plan = found.plan
    if not plan:
        return section.missing(f"There is nothing to compare with: {found.before('the job was planned')}.")
    expected: dict[str, float] = plan.get("estimated_seconds") or {}
    spent = phase_seconds(found)
    if not found.is_finished:
        section.missing(f"The run did not come to its end ({found.state}): what it spent is that of its last attempt.")
    names = list(dict.fromkeys([*spent, *expected]))[:MOST_PHASES]
    both = [name for name in names if name in spent and name in expected]
    whole = plan.get("total_seconds") or sum(expected.values())
    total = found.result.get("seconds", {}).get("total")
    low = plan.get("estimated_low_seconds") or whole
    rows = [
        (
            cut(name, 60),
            _planned(expected.get(name)),
            _planned(spent.get(name)),
            ratio(spent.get(name), expected.get(name)),
        )
        for name in names
    ]
    planned = seconds(whole) if abs(low - whole) < 0.05 * whole else f"{seconds(low)} to {seconds(whole)}"
    rows.append(("total", planned, _planned(total), ratio(total, whole)))
    if both:
        sentence = "Expected and actual seconds of every phase that the plan knew: " + ", ".join(
            f"{name} {seconds(expected[name])} expected, {seconds(spent[name])} taken" for name in both
        )
        svg = bar_chart(
            "expected", "Expected and actual time", sentence, both,
            [[round(expected[name], 3) for name in both], [round(spent[name], 3) for name in both]],
            labels=("expected", "actual"), x_label="seconds",
        )  # fmt: skip
        section.blocks.append(Chart(svg, "Expected and actual time of every phase that the plan knew."))
    section.blocks.append(Table(("time", "expected", "actual", "actual / expected"), rows, "Time"))
    section.blocks.append(Table(("", "expected", "actual"), list(_others(found)), "Everything else"))
    return section


def _planned(value: float | None) -> str:
    return DASH if value is None else seconds(value)


def _others(found: Findings) -> Iterator[tuple[str, str, str]]:
    plan, result = found.plan, found.result
    peaks = result.get("peak_rss_bytes") or {}
    yield "peak memory of a worker", size(plan.get("task_bytes")), size(max(peaks.values())) if peaks else DASH
    client = result.get("client_peak_rss_bytes")
    yield "peak memory of the driver", size(plan.get("client_bytes")), size(client) if client else DASH
    disk = plan.get("disk_bytes") or {}
    kept = sum((result.get("kept") or {}).values())
    yield "on disk", size(sum(disk.values())), f"{size(kept)} of matrices kept" if result else DASH
    if plan.get("iterations"):
        low, high = (round(value) for value in plan["iterations"])
        actual = number(result["num_iterations"]) if "num_iterations" in result else DASH
        yield "iterations", f"{low:,} to {high:,}" if low != high else f"{low:,}", actual
    work = found.part("phases", "factorise")
    if plan.get("expected_efficiency") and work and work.get("seconds") and work.get("num_computed"):
        busy = work["busy_seconds"] / (work["seconds"] * max(1, found.status.num_threads))
        yield "workers busy in the factorisation", f"{plan['expected_efficiency']:.0%}", f"{min(1.0, busy):.0%}"
    yield "workers", number(plan.get("workers")), number(found.status.num_workers) if found.status.num_workers else DASH


def reuse_section(found: Findings) -> Section:
    """What an attempt found that an earlier one, or another run, had computed."""
    section = Section("reuse", "What was resumed or reused")
    result, status = found.result, found.status
    rows, num_found = [], 0
    if result.get("tiles_total"):
        total, computed = result["tiles_total"], result["tiles_computed"]
        num_found += total - computed
        words = f"{total:,}, {computed:,} computed, {total - computed:,} found valid"
        rows.append(("tiles of the factor", words))
    for name, work in (found.part("phases") or {}).items():
        if work.get("num_tasks", 0) > work.get("num_computed", 0) and not (name == "factorise" and rows):
            valid = work["num_tasks"] - work["num_computed"]
            num_found += valid
            rows.append((f"tasks of {cut(name, 40)}", f"{work['num_tasks']:,}, {valid:,} had nothing to compute"))
    present = found.part("present_bytes")
    if present:
        rows.append(("valid tiles before this attempt", size(present)))
    saved = reused_rows(result.get("reused") or status.reused)
    num_found += sum(name == "reused" for name, _ in saved)
    rows += [(name, cut(text)) for name, text in saved[:20]]
    for location, num_bytes in list((result.get("kept") or {}).items())[:8]:
        rows.append(("kept for later", f"{size(num_bytes)} in {cut(location, 200)}"))
    if rows:
        section.blocks.append(Facts(rows, "Found and kept"))
    if status.epoch <= 1 and not num_found:
        section.missing("Nothing was resumed: this is the first attempt of the run, and what it needed was computed.")
    elif status.epoch <= 1:
        section.blocks.append(
            Text("This is the first attempt of the run; what is valid in the store is used by all runs.")
        )
    else:
        section.blocks.append(Text(f"This is attempt {status.epoch}: it went on with what earlier ones had finished."))
    attempts = _attempts(found)
    if attempts:
        section.blocks.append(Table(("attempt", "began", "ended", "how"), attempts, "Attempts"))
    return section


def _attempts(found: Findings) -> list[tuple[str, str, str, str]]:
    """One row for each driver, from the events."""
    rows: dict[int, list[str]] = {}
    for event in found.events:
        epoch = event.get("epoch")
        if event.get("kind") != "state" or not isinstance(epoch, int):
            continue
        message = str(event.get("message", ""))
        if message.endswith("started"):
            where = f"{event.get('driver', '')} on {event.get('host', 'unknown')}"
            rows[epoch] = [f"{epoch}, {cut(where, 80)}", clock(event.get("time")), DASH, "no last word: lost"]
        elif epoch in rows:
            rows[epoch][2:] = [clock(event.get("time")), cut(message, 200)]
    last = rows.get(found.status.epoch)
    if last is not None and found.state in ("starting", "running", "cancelling"):
        last[3] = found.state
    return [(row[0], row[1], row[2], row[3]) for _, row in sorted(rows.items())][-20:]


def versions_section(found: Findings) -> Section:
    """Versions, processors and BLAS of the driver and of the workers."""
    section = Section("versions", "Versions and BLAS")
    environment = found.part("environment")
    if not environment:
        return section.missing(f"Nothing is recorded: {found.before('the workers were checked')}.")
    driver = environment["driver"]
    section.blocks.append(
        Facts(
            [
                ("host", cut(driver.get("host", "unknown"))),
                ("system", cut(driver.get("system", "unknown"))),
                ("processor", f"{cut(driver.get('cpu', 'unknown'))}, {driver.get('num_cpus')} usable"),
                ("memory", size(driver.get("memory_bytes"))),
                ("versions", ", ".join(f"{name} {cut(v, 40)}" for name, v in driver.get("versions", {}).items())),
                ("BLAS", _libraries(driver.get("blas"))),
            ],
            "The driver",
        )
    )
    for group in environment.get("workers", [])[:MOST_MACHINES]:
        names = ("python", "numpy", "scipy", "zarr", "dask", "distributed", "dkrr", "crc32c")
        count = group.get("num_workers", 1)
        section.blocks.append(
            Facts(
                [
                    ("host", cut(group.get("host", "unknown"))),
                    ("addresses", listed(group.get("addresses", []))),
                    ("threads", f"{number(group.get('threads'))} each"),
                    ("memory limit", size(group["memory_limit_bytes"]) if group.get("memory_limit_bytes") else "none"),
                    ("versions", ", ".join(f"{name} {cut(group.get(name, '?'), 40)}" for name in names)),
                    ("BLAS kernel", cut(group.get("blas_kernel", "unknown"))),
                    ("BLAS", _libraries(group.get("blas"))),
                ],
                f"{count:,} worker{'s that are alike' if count != 1 else ''}",
            )
        )
    if not environment.get("workers"):
        section.blocks.append(Text("There were no workers: the tasks ran in the driver's process."))
    return section


def _libraries(libraries: Any) -> str:
    names = ("internal_api", "version", "architecture")
    shown = [
        f"{' '.join(str(item.get(name)) for name in names)}, threads {item.get('num_threads')}"
        for item in libraries or []
    ]
    return cut("; ".join(shown) or "unknown")


def events_section(found: Findings) -> Section:
    """What happened, as `dkrr logs` prints it."""
    section = Section("events", "What happened")
    if not found.events:
        return section.missing("There are no events.")
    chosen = found.events if len(found.events) <= MOST_SHOWN_EVENTS else [
        *found.events[: MOST_SHOWN_EVENTS // 2], *found.events[-MOST_SHOWN_EVENTS // 2 :]
    ]  # fmt: skip
    left = found.num_events - len(chosen)
    rows = [(clock(item.get("time")), cut(item.get("kind", ""), 20), cut(item.get("message", ""))) for item in chosen]
    section.blocks.append(
        Table(
            ("time", "kind", "message"),
            rows,
            f"Events{f' ({left:,} in the middle are left out)' if left > 0 else ''}",
            folded=len(rows) > 20,
        )
    )
    return section
