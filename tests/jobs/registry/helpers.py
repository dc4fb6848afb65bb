"""Small models, and the registries that tests put them into."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dkrr import KernelRidge

ROWS = np.random.default_rng(3).standard_normal((40, 3))


def make_model(path: Path | str, alpha: float) -> str:
    """A saved model of 40 rows; another alpha makes another model."""
    KernelRidge(alpha=alpha, kernel="rbf", gamma=0.3).fit(ROWS, np.sin(ROWS[:, 0])).save(str(path))
    return str(path)
