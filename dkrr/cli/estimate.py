"""Rate and time left of a phase. Both count from its first reading, so that tiles finished before a resume make neither
look better.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ITERATIVE", "Estimate", "clock_text"]

# phases that count iterations; what follows a comma in a phase's name is a fact of the moment, e.g. a residual
ITERATIVE = ("cg", "refine", "nystrom")


@dataclass
class Estimate:
    """Rate and time left of one phase, from two readings of its work."""

    phase: str
    started: float
    done_at_start: int
    flops_at_start: float
    done: int = 0
    total: int = 0
    flops_done: float = 0.0
    flops_total: float = 0.0
    seconds: float = 0.0

    def update(self, now: float, done: int, total: int, flops_done: float, flops_total: float) -> None:
        """Take a new reading at the time ``now`` (seconds)."""
        self.done, self.total, self.flops_done, self.flops_total = done, total, flops_done, flops_total
        self.seconds = now - self.started

    @property
    def gflops(self) -> float:
        """Rate since the phase began, in GF/s; 0 when nothing was done yet."""
        return (self.flops_done - self.flops_at_start) / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end of the phase at the rate so far; None while there is no rate, or no end in sight."""
        by_flops = self.flops_total > 0
        work = self.flops_done - self.flops_at_start if by_flops else self.done - self.done_at_start
        left = self.flops_total - self.flops_done if by_flops else self.total - self.done
        return left * self.seconds / work if work > 0 and self.seconds > 0 and self.total > 0 else None

    def sentence(self) -> str:
        """``factorise: 120 of 210 tiles, 163.2 GF/s, 0:41 left``; ``cg: iteration 12 of about 40, 1:30 left``."""
        name, _, facts = self.phase.partition(", ")
        if name in ITERATIVE:
            about = f" of about {self.total}" if self.total else ""
            parts = [f"{name}: iteration {self.done}{about}", *([facts] if facts else [])]
        else:
            unit = "trials" if name.startswith("tune ") else "tiles"
            parts = [f"{self.phase}: {self.done} of {self.total} {unit}"]
        if self.gflops > 0 and name not in ITERATIVE:
            parts.append(f"{self.gflops:.1f} GF/s")
        if self.seconds_left is not None:
            parts.append(f"{clock_text(self.seconds_left)} left")
        return ", ".join(parts)


def clock_text(seconds: float) -> str:
    """``1:02:03``, or ``2:03`` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
