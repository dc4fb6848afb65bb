"""The second demonstration predicts so well that nobody takes its error for a failure, and its table says so."""

from __future__ import annotations

import tomllib
from pathlib import Path

import dkrr

LARGE = Path(__file__).parents[2] / "workflows" / "large.toml"


def test_the_large_demonstration_predicts_far_better_than_the_mean(tmp_path: Path) -> None:
    job = tomllib.loads(LARGE.read_text())
    sources = (job["data"]["path"].replace("n=20480", "n=2500"), job["evaluate"]["path"].replace("n=2048", "n=500"))
    train, test = (dkrr.ingest(source, str(tmp_path / f"{i}.zarr")) for i, source in enumerate(sources))
    assert (train.num_rows, test.num_rows) == (2500, 500)
    assert train.y is not None
    assert test.y is not None
    x, z = ((rows.X.read(0, rows.num_rows) - train.x_mean) / train.x_std for rows in (train, test))
    y, expected = ((rows.y.read(0, rows.num_rows) - train.y_mean) / train.y_std for rows in (train, test))
    model = job["model"]
    est = dkrr.KernelRidge(kernel=model["kernel"], gamma=model["gamma"], alpha=model["alpha"]).fit(x, y)
    assert est.score(z, expected) > 0.99  # with an eighth of its rows
