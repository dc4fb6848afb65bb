"""The page itself: sections into the template, one file without a reference to anything outside of it.

``report.html`` is made when a run ends, however it ends, and whenever somebody asks for it. It holds no script, asks
nobody for anything (its own policy forbids it), and stays below 2 MB: every part of it is bounded.

Cost: reads a dozen small documents of the run; some 20 ms, and 0.1 s once to load the template engine.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dkrr._version import __version__
from dkrr.errors import StoreError
from dkrr.jobs.report.answer import convergence_section, held_out_section, residual_section
from dkrr.jobs.report.asked import asked_section, data_section
from dkrr.jobs.report.axes import number
from dkrr.jobs.report.blocks import Section, cut
from dkrr.jobs.report.findings import Findings, gather
from dkrr.jobs.report.outcome import events_section, plan_section, reuse_section, versions_section
from dkrr.jobs.report.words import clock, rate, seconds
from dkrr.jobs.report.work import memory_section, rate_section, time_section
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.events import utc_now
from dkrr.jobs.runs.facts import progress_words, result_facts
from dkrr.jobs.runs.status import View, look_once
from dkrr.store.files import write_file

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["NAME", "render_report", "write_report"]

logger = logging.getLogger("dkrr.jobs.report")

NAME = "report.html"
MOST_BYTES = 2_000_000
_MADE = b'<meta name="generator" content="dkrr '
# what HTML and XML cannot hold, and characters that turn the direction of text around
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_SECTIONS: tuple[tuple[str, str, Callable[[Findings], Section]], ...] = (
    ("asked", "What was asked, and what “auto” chose", asked_section),
    ("data", "The data", data_section),
    ("time", "Time per phase", time_section),
    ("memory", "Memory per worker over time", memory_section),
    ("rate", "Rate", rate_section),
    ("convergence", "Convergence of conjugate gradients", convergence_section),
    ("residuals", "Residuals", residual_section),
    ("held-out", "Predicted against true on held-out rows", held_out_section),
    ("plan", "Plan against reality", plan_section),
    ("reuse", "What was resumed or reused", reuse_section),
    ("versions", "Versions and BLAS", versions_section),
    ("events", "What happened", events_section),
)


def render_report(directory: RunDirectory, view: View | None = None) -> str:
    """The page of a run as text, for a run in any state.

    Parameters
    ----------
    view
        How the run stands, for whoever knows it already; by default it is looked at.
    """
    found = gather(directory, look_once(directory) if view is None else view)
    sections = [_made(key, title, make, found) for key, title, make in _SECTIONS]
    text = _environment().get_template("report.html.jinja").render(
        name=cut(found.name, 120),
        location=cut(found.location),
        state=found.state,
        verdict=_verdict(found),
        hint=cut((found.status.error or {}).get("hint", "")) if not found.is_finished else "",
        figures=_figures(found),
        sections=sections,
        version=__version__,
        made=clock(utc_now()),
    )  # fmt: skip
    return _UNPRINTABLE.sub("\ufffd", text)


def write_report(directory: RunDirectory, output: str | Path | None = None, *, view: View | None = None) -> str:
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
    data = render_report(directory, view).encode()
    if len(data) >= MOST_BYTES:  # every part is bounded; a report that nobody can open helps nobody
        raise StoreError(f"the report of {directory.shown} has {len(data):,} bytes", hint="this is a defect of dkrr")
    if output is None:
        directory.write_bytes(NAME, data)
        return directory.path(NAME)
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file() or _MADE not in path.read_bytes()[:4096]):
        raise StoreError(f"{path} exists and is not a report of dkrr", hint="choose another name or remove it")
    write_file(path, data)
    return str(path)


def _made(key: str, title: str, make: Callable[[Findings], Section], found: Findings) -> Section:
    """A section; where a document of the run is not what it should be, a sentence that says so."""
    try:
        return make(found)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError) as exc:
        logger.warning("section %r of the report of %s could not be made (%r)", key, found.name, exc)
        sentence = f"This section could not be made: what the run recorded is damaged or of another version ({exc!r})."
        return Section(key, title).missing(cut(sentence))


def _verdict(found: Findings) -> str:
    """How the run stands, in a sentence or two."""
    error = found.status.error or {}
    message = cut(error.get("message", "")).rstrip(".")
    earlier = " An earlier attempt finished; its result and model are still there." if found.has_earlier_result else ""
    again = f"`dkrr resume {found.shown}` continues it with what is finished.{earlier}"
    if found.is_finished:
        return f"The run finished. {cut(found.result.get('message', '')).rstrip('.')}."
    if found.state == "lost":
        return f"The run was lost: {cut(found.reason)}. {again}"
    if found.state in ("starting", "running", "cancelling"):
        phase = f" in the phase {cut(found.status.phase)}" if found.status.phase else ""
        return f"The run was {found.state}{phase} when this page was made; `dkrr report {found.shown}` makes it again."
    if found.state == "failed":
        return f"The run failed: {message or 'no reason is recorded'}. {again}"
    return f"The run was {found.state}{f': {message}' if message else ''}. {again}"


def _figures(found: Findings) -> list[tuple[str, str]]:
    """A few figures for the top of the page."""
    result, status = found.result, found.status
    rows = [(cut(name, 40), cut(value, 60)) for name, value in result_facts(found.plan, result)]
    if not result.get("seconds"):
        rows.append(("time", seconds(status.elapsed_seconds)))
    if result.get("flops_per_second"):
        rows.append(("factorisation", rate(result["flops_per_second"])))
    if not found.is_finished and status.phase:
        rows.append(("phase", cut(progress_words(status), 80)))
    rows.append(("attempt", number(status.epoch)))
    rows.append(("began", clock(status.started_at)))
    return rows


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["style"] = _style(folder / "report.css")
    return environment


def _style(path: Path) -> Any:
    from markupsafe import Markup

    return Markup(path.read_text(encoding="utf-8"))  # noqa: S704  (a file of ours)
