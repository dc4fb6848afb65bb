"""What a retrain job did, as it is printed, kept as ``report.json`` and ``report.txt``, and read by schedulers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dkrr.jobs.facts import reused_rows

DRY_RUN = "dry run"


@dataclass(kw_only=True)
class RetrainSummary:
    """One tick of a retrain job.

    Parameters
    ----------
    outcome
        "promoted"; "refused" (a batch, the model, or both); "kept" (a batch was added, and the data set is what it was
        judged as before); "nothing new"; "dry run" (nothing was done, and what is said of batches would be).
    production
        The version that is served now.
    version
        The one that was fitted, if one was.
    batches
        Name, outcome ("appended", "refused" or, in a dry run, "missing"), rows and reasons of each batch that was new.
    checks
        What the gate found.
    reasons
        Why something was refused.
    """

    name: str
    outcome: str = "nothing new"
    production: str | None = None
    version: str | None = None
    num_rows: int | None = None
    batches: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    fit: dict[str, Any] = field(default_factory=dict)
    searched: bool = False
    seconds: float = 0.0
    report: str = ""

    def add_batch(
        self, name: str, outcome: str, stage: str | None, num_rows: int | None, reasons: list[str] | None = None
    ) -> None:
        """What became of a batch."""
        found = {"name": name, "outcome": outcome, "stage": stage, "num_rows": num_rows, "reasons": reasons or []}
        self.batches.append(found)
        if outcome == "refused":
            self.reasons.extend(f"{name}: {reason}" for reason in reasons or [])

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dict(vars(self))

    def lines(self) -> list[tuple[str, str]]:
        """Names and values for people."""
        found = [("model", self.name), ("outcome", self.outcome), ("production", self.production or "none")]
        for batch in self.batches:
            rows = "" if batch["num_rows"] is None else f", {batch['num_rows']:,} rows"
            at = f" at {batch['stage']}" if batch["outcome"] == "refused" else ""
            would = "would be " if self.outcome == DRY_RUN and batch["outcome"] != "missing" else ""
            found.append(("batch", f"{batch['name']}: {would}{batch['outcome']}{at}{rows}"))
        if self.version is not None:
            rows = "" if self.num_rows is None else f", {self.num_rows:,} training rows"
            found.append(("version", f"{self.version}{rows}{', hyperparameters searched' if self.searched else ''}"))
        found.extend(reused_rows(self.fit.get("reused") or {}))
        for check in self.checks:
            found.append((check["name"], f"{'passed' if check['passed'] else 'REFUSED'}: {check['sentence']}"))
        found.extend(("reason", reason) for reason in self.reasons)
        return [*found, ("seconds", f"{self.seconds:.1f}")]

    def text(self) -> str:
        """The report as text."""
        width = max(len(name) for name, _ in self.lines())
        return "".join(f"{name:<{width}}  {value}\n" for name, value in self.lines())
