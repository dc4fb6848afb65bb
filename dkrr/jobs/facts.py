"""What is said of plans, fits and runs, in names and values: once, for terminals, notebooks and the page of a run.

You need it to show one of them: who shows it only lays it out. Everything comes from the plain data of a plan, a
``result.json`` and a status. Costs the reading of two small documents (of a dozen for the page), and nothing of NumPy
or Dask.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from dkrr.errors import DkrrError
from dkrr.jobs.run_directory import RunDirectory, Status, read_events
from dkrr.markup import (
    DASH,
    Facts,
    clock_text,
    cut,
    facts_html,
    facts_text,
    known,
    listed,
    loss_words,
    number,
    seconds,
    size,
)
from dkrr.store.lease import described

MOST_CANDIDATES = 12
MOST_JOB_LETTERS = 60_000
_EPS = {"float32": 1.1920928955078125e-07}
REMOVED = "[removed]"
_NAMES = re.compile(r"secret|passw|token|credential|access_?key|private_?key|api_?key|authori[sz]ation", re.IGNORECASE)
_PATTERNS = (
    (re.compile(r"(:/{1,2})[^/\s@'\"]+:[^/\s@'\"]*(?=@)"), rf"\1{REMOVED}"),  # user:password@ in an address
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), REMOVED),  # numbers of Amazon's keys
    # a name of a secret, and what is given to it: in a query, an assignment, a header
    (
        re.compile(
            r"(?i)(?<![A-Za-z0-9])((?:[a-z0-9_-]*(?:secret|passw(?:or)?d|token|credential|signature|api[_-]?key)"
            r"[a-z0-9_-]*|authorization))(\s*[=:]\s*|=)(?:bearer\s+|basic\s+)?[^\s&;,'\"<>]{4,}"
        ),
        rf"\1\2{REMOVED}",
    ),
)

# phases that count iterations; what follows a comma in a phase's name is a fact of the moment, e.g. a residual
ITERATIVE = ("cg", "refine", "nystrom")


class Shown:
    """What is shown as names and values: as two columns in terminals, as a table in notebooks."""

    def facts(self) -> Facts:
        """Names and values."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return facts_text(self.facts())

    def _repr_html_(self) -> str:
        """For notebooks."""
        return facts_html(type(self).__name__.removesuffix("Summary").lower(), self.facts())


# --- plans and fits ---------------------------------------------------------------------------------------------------


def between(low: float = 0.0, high: float = 0.0) -> str:
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
            between(**item.get("iterations") or {}) or DASH,
            size(item.get("memory_bytes")),
            size(sum((item.get("disk_bytes") or {}).values())),
            cut(f"not possible: {item['infeasible']}" if item.get("infeasible") else "possible"),
        )
        for item in cheapest[: MOST_CANDIDATES * (len(ways) > 1)]
    ]


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
    low = plan.get("seconds_low") or whole
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
        ("iterations", between(**plan.get("iterations") or {}), DASH if took is None else number(took)),
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
            allowed = "" if found["limit"] is None else f", limit {found['limit']:g}"
            rows.append((name, f"{frozen if found[key] == 'frozen' else anew}; {drift}{allowed}"))
    if (start := reused.get("start")) is not None:
        rows.append(("start", f"coefficients of {start['rows']:,} rows, from {start['source']}"))
    return rows


def of_whitened(is_whitened: bool) -> str:
    """What to say of a number that is in the units of the solver."""
    return " (of the whitened target)" if is_whitened else ""


# --- runs -------------------------------------------------------------------------------------------------------------


def run_facts(directory: RunDirectory, status: Status) -> Facts:
    """Everything that is known about a run; reads two small documents."""
    result = _document(directory, "result.json") if status.state == "finished" else {}
    plan = result.get("plan") or _plan_of(directory, status)
    live = live_facts(status)
    return [
        *live[:1],
        *result_facts(plan, result),
        *live[1:],
        *known(("model", status.model or result.get("model_path"))),
        *known(("report", directory.has("report.html") and directory.path("report.html"))),
    ]


def live_facts(status: Status) -> Facts:
    """What the status of a run says: state, progress, who works on it where, and what went wrong."""
    age, goes_on, factor = status.age_seconds, not status.is_ended, status.reused.get("factor")
    insecure = " (insecure = true)" if status.insecure else ""
    work = clock_text(status.elapsed_seconds)
    return known(
        ("state", status.state + (f" ({status.lost_because})" if status.lost_because else "")),
        ("phase", goes_on and status.phase and progress_words(status)),
        ("seconds", ", ".join(f"{name} {value:.1f}" for name, value in status.seconds.items())),
        ("reused", factor and f"{factor['rows']:,} of {factor['of_rows']:,} rows of the factor"),
        *(("went on", item.get("sentence")) for item in status.given_up),
        ("driver", status.driver and f"{described(status.driver)}, attempt {status.epoch}"),
        ("scheduler", status.scheduler and status.scheduler + insecure),
        ("workers", status.num_workers and f"{status.num_workers:,}, {status.num_threads:,} threads"),
        ("memory", status.memory_bytes and f"{size(status.memory_bytes)}, largest worker"),
        *(("refused worker", f"{item.get('address')}: {item.get('reason')}") for item in status.refused_workers),
        ("started", status.started_at and f"{status.started_at}, {work} of work"),
        ("heartbeat", goes_on and age is not None and f"{age:.0f} s ago"),
        ("error", (status.error or {}).get("message")),
    )


def result_facts(plan: Mapping[str, Any], result: Mapping[str, Any]) -> Facts:
    """What was fitted, how exact the answer is and how good, as far as a plan and a ``result.json`` say it."""
    took = result if result.get("solver") else plan
    metric = str(result.get("metric") or "")
    score = (result.get("score") or {}).get(metric)
    gaps = [certificate.get("gap") for certificate in result.get("certificates") or []]
    exact = [value for value in gaps or result.get("relative_residual") or [] if value is not None]
    total, support = (result.get("seconds") or {}).get("total"), result.get("num_support")
    percent = score is not None and metric.endswith("accuracy")
    return known(
        ("rows", plan.get("num_rows") and f"{number(plan['num_rows'])} of {number(plan.get('num_features'))} features"),
        ("solver", took.get("solver") and f"{took['solver']}, {took.get('precision')}"),
        (f"held-out {metric}", score is not None and (f"{score:.2%}" if percent else listed(score, ".5g", 2))),
        ("duality gap" if gaps else "relative residual", exact and f"{max(exact):.1e}"),  # of the least exact target
        ("support vectors", support is not None and number(support)),
        ("time", total and seconds(total)),
    )


def sentence(status: Status) -> str:
    """``running, factorise: 120 of 210 tasks, 163.2 GF/s, 0:41 left``; ``failed: why``."""
    if status.is_over:
        reason = status.lost_because or (status.error or {}).get("message")
        return f"{status.state}: {reason}" if reason else status.state
    return f"{status.state}, {progress_words(status)}" if status.phase else status.state


def progress_words(status: Status) -> str:
    """``factorise: 120 of 210 tasks, 163.2 GF/s, 0:41 left``; ``cg: iteration 12 of about 40, 1:30 left``."""
    name, _, moment = status.phase.partition(", ")
    parts, done, total = name, f"{status.tasks_done:,}", f"{status.tasks_total:,}"
    if name in ITERATIVE:
        parts = f"{name}: iteration {done}" + (f" of about {total}" if status.tasks_total else "")
    elif status.tasks_total:
        parts = f"{name}: {done} of {total} {_unit(name)}"
    has_rate, left = status.flops_per_second > 0 and name not in ITERATIVE, status.phase_seconds_left
    more = (
        moment,
        f"{status.flops_per_second / 1e9:.1f} GF/s" if has_rate else "",
        "" if left is None else f"{clock_text(left)} left",
    )
    return ", ".join(filter(None, [parts, *more]))


def phase_words(name: str, phase: Mapping[str, Any]) -> str:
    """Of a phase that is over: ``factorise: 210 tasks in 12.3 s, 163.2 GF/s``; ``prepare: 0.8 s``."""
    took, count, flops = (float(phase.get(key, 0)) for key in ("seconds", "tasks", "flops_per_second"))
    spent = f"{took:.1f} s" if took < 120 else clock_text(took)
    if not count:
        return f"{name}: {spent}"
    has_rate = flops >= 5e7 and name not in ITERATIVE
    unit = _unit(name) if count != 1 else _unit(name).removesuffix("s")
    return f"{name}: {count:,.0f} {unit} in {spent}" + (f", {flops / 1e9:.1f} GF/s" if has_rate else "")


def _unit(name: str) -> str:
    if name in ITERATIVE:
        return "iterations"
    return "tiles" if name == "gram" else "trials" if name.startswith("tune ") else "tasks"


# --- everything about a run, for its page -----------------------------------------------------------------------------


class Findings:
    """Everything that a run's directory says about it, read once, of any state.

    Documents may be missing or damaged: what cannot be read is not there, and the section that needed it says so.
    ``result`` is empty unless the last attempt finished: what an earlier one found is not what the page is about.
    """

    def __init__(self, directory: RunDirectory, status: Status) -> None:
        self.name, self.location, self.shown = (
            scrub(text) for text in (directory.name, directory.location, directory.shown)
        )
        self.goes_on_by = _tolerant(lambda: directory.goes_on_by, f"`dkrr resume {self.shown}`")
        self.status = Status.from_dict(scrub(asdict(status)))
        self.state, self.is_finished, self.goes_on = status.state, status.state == "finished", not status.is_over
        result, job, figures = (_document(directory, f"{name}.json") for name in ("result", "job", "figures"))
        has_begun = status.driver is not None  # else figures, samples and the epoch are those of the attempt before
        self.status.epoch += not has_begun
        self.result: dict[str, Any] = result if self.is_finished else {}
        self.has_earlier_result = bool(result) and not self.is_finished
        self.job, self.figures = job, figures if has_begun else {}
        self.plan: dict[str, Any] = _plan_of(directory, status) or self.result.get("plan") or {}
        source = _tolerant(lambda: (directory.read_bytes("job.toml") or b"").decode(errors="replace"), "")
        self.job_text = cut(source or (json.dumps(job, indent=1, sort_keys=True) if job else ""), MOST_JOB_LETTERS)
        found = _tolerant(lambda: [event for _, event in read_events(directory) if isinstance(event, dict)], [])
        self.events = found
        samples = _document(directory, "samples.json")
        self.attempt = samples if samples.get("epoch") == self.status.epoch else {}

    def before(self, event: str) -> str:
        """Why something is not there that comes when "it was solved", say."""
        if self.goes_on:
            return f"the run is {self.state}"
        if self.is_finished:
            return "this run did not record it"
        return f"the run {'' if self.state == 'failed' else 'was '}{self.state} before {event}"

    def part(self, *names: str) -> Any:
        """Something of ``figures.json``, e.g. ``part("data", "num_rows")``; None where it is not."""
        found: Any = self.figures
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found


def _tolerant(read: Callable[[], Any], default: Any) -> Any:
    try:
        return scrub(read())
    except (OSError, DkrrError, ValueError):
        return default


def _plan_of(directory: RunDirectory, status: Status) -> dict[str, Any]:
    """The plan of an attempt that came as far: until then the one that is there may be of other rows."""
    return (
        {}
        if "plan" not in status.seconds and status.phase_name in ("", "prepare", "plan")
        else _document(directory, "plan.json")
    )


def _document(directory: RunDirectory, name: str) -> dict[str, Any]:
    found: dict[str, Any] = _tolerant(lambda: directory.read(name) or {}, {})
    return found


def secret_values() -> list[str]:
    """Values of this process' environment whose names say that they are secret; the longest first."""
    found = (
        value
        for name, value in os.environ.items()
        if _NAMES.search(name) and len(value) >= 8 and not name.endswith(("_FILE", "_PATH", "_DIR"))
    )
    return sorted(found, key=len, reverse=True)


def scrub(value: Any, secrets: list[str] | None = None) -> Any:
    """The same nested values, their texts without what may be a credential.

    Runs hold none: job files with one in them are refused, and so are addresses. This is the last line: messages of
    other programs end up in events, and a report is a file that people send around.
    """
    known = secret_values() if secrets is None else secrets
    if isinstance(value, dict):
        return {scrub(key, known): scrub(item, known) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrub(item, known) for item in value]
    if not isinstance(value, str):
        return value
    for secret in known:
        value = value.replace(secret, REMOVED)
    for pattern, put in _PATTERNS:
        value = pattern.sub(put, value)
    return value
