"""The page of a run: sections into the template, one file without a reference to anything outside of it.

``report.html`` is made when a run ends, however it ends, and whenever somebody asks for it. It holds no script, asks
nobody for anything (its own policy forbids it), and stays below 2 MB: every part of it is bounded.

Cost: reads a dozen small documents of the run; some 20 ms, and 0.1 s once to load the template engine.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from dkrr import __version__
from dkrr.errors import StoreError
from dkrr.jobs import sections
from dkrr.jobs.charts import Block, Text
from dkrr.jobs.facts import Findings, progress_words, result_facts
from dkrr.jobs.run_directory import RunDirectory, utc_now
from dkrr.jobs.status import Status, look_once
from dkrr.markup import cut, known, number, rate, seconds
from dkrr.store.files import write_file

if TYPE_CHECKING:
    from jinja2 import Template


logger = logging.getLogger("dkrr.jobs.report")

MOST_BYTES = 2_000_000
_MADE = b'<meta name="generator" content="dkrr '
# what HTML and XML cannot hold, and characters that turn the direction of text around
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
# key, title, what makes it, and what must have happened for there to be something in it
_SECTIONS: tuple[tuple[str, str, Callable[[Findings], Iterator[Block]], str], ...] = (
    ("asked", "What was asked, and what “auto” chose", sections.asked_section, "the job was written down"),
    ("data", "The data", sections.data_section, "figures of the data were taken"),
    ("time", "Time per phase", sections.time_section, "the first phase was over"),
    ("memory", "Memory per worker over time", sections.memory_section, "samples were taken"),
    ("rate", "Rate", sections.rate_section, "a phase was over"),
    ("convergence", "Convergence of {solver}", sections.convergence_section, "the iteration began"),
    ("residuals", "{exactness}", sections.residual_section, "it was solved"),
    ("held-out", "Predicted against true on held-out rows", sections.held_out_section, "held-out rows were predicted"),
    ("plan", "Plan against reality", sections.plan_section, "the job was planned"),
    ("reuse", "What was resumed or reused", sections.reuse_section, "anything was looked for"),
    ("versions", "Versions and BLAS", sections.versions_section, "the workers were checked"),
    ("events", "What happened", sections.events_section, "anything happened"),
)


def render_report(directory: RunDirectory, status: Status | None = None) -> str:
    """The page of a run as text, for a run in any state.

    Parameters
    ----------
    status
        How the run stands, for whoever knows it already; by default it is looked at.
    """
    found = Findings(directory, look_once(directory) if status is None else status)
    is_square = not found.plan.get("loss")
    words = {
        "solver": "conjugate gradients" if is_square else f"{cut(found.plan.get('solver'), 40)}: duality gap",
        "exactness": "Residuals" if is_square else "Duality gaps",
    }
    text = _template().render(
        name=cut(found.name, 120),
        location=cut(found.location),
        state=found.state,
        verdict=_verdict(found),
        hint=cut((found.status.error or {}).get("hint", "")) if not found.is_finished else "",
        figures=_figures(found),
        sections=[(key, title.format(**words), _made(key, make, found, then)) for key, title, make, then in _SECTIONS],
        version=__version__,
        made=sections.clock(utc_now()),
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
    if len(data) >= MOST_BYTES:  # every part is bounded; a report that nobody can open helps nobody
        raise StoreError(f"the report of {directory.shown} has {len(data):,} bytes", hint="this is a defect of dkrr")
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
        sentence = f"This section could not be made: what the run recorded is damaged or of another version ({exc!r})."
        return [Text(cut(sentence), missing=True)]


def _verdict(found: Findings) -> str:
    """How the run stands, in a sentence or two."""
    message = cut((found.status.error or {}).get("message", "")).rstrip(".")
    if found.is_finished:
        return f"The run finished. {cut(found.result.get('message', '')).rstrip('.')}."
    if found.goes_on:
        phase = f" in the phase {cut(found.status.phase)}" if found.status.phase else ""
        return f"The run was {found.state}{phase} when this page was made; `dkrr report {found.shown}` makes it again."
    how = {
        "lost": f"was lost: {cut(found.status.lost_because)}",
        "failed": f"failed: {message or 'no reason is recorded'}",
    }.get(found.state, f"was {found.state}{f': {message}' if message else ''}")
    earlier = " An earlier attempt finished; its result and model are still there." if found.has_earlier_result else ""
    return f"The run {how}. `dkrr resume {found.shown}` continues it with what is finished.{earlier}"


def _figures(found: Findings) -> list[tuple[str, str]]:
    """A few figures for the top of the page."""
    result, status = found.result, found.status
    flops = result.get("flops_per_second")
    return [(cut(name, 40), cut(value, 60)) for name, value in result_facts(found.plan, result)] + known(
        ("time", not result.get("seconds") and seconds(status.elapsed_seconds)),
        ("factorisation", flops and rate(flops)),
        ("phase", not found.is_finished and status.phase and cut(progress_words(status), 80)),
        ("attempt", number(status.epoch)),
        ("began", sections.clock(status.started_at)),
    )


@lru_cache(maxsize=1)
def _template() -> Template:
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
