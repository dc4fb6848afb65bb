"""What the first releases wrote is read: models without keys for what they lack, runs without a job's defaults."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dkrr
from dkrr.store.documents import write_manifest
from tests.contract.helpers import run
from tests.jobs.retrain.project import in_process

X = np.random.default_rng(3).random((90, 2))
Y = np.sin(5 * X[:, 0]) + X[:, 1]


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    edit(document)
    document.pop("crc32c", None)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "options", [{"kernel": "rbf", "fit_intercept": True}, {"kernel": "poly", "degree": 2, "solver": "primal"}]
)
def test_a_model_without_keys_for_what_it_has_not(options: dict[str, Any], tmp_path: Path) -> None:
    est = dkrr.KernelRidge(**options, alpha=0.1).fit(X, Y)
    est.save(tmp_path / "model.zarr")

    def leave_out(document: dict[str, Any]) -> None:
        found = document["attributes"]
        for name in ("intercept", "sigma2", "quantiles", "num_inputs"):
            if found[name] is None:
                del found[name]
        if not found["weighted"]:
            del found["weighted"]

    change(tmp_path / "model.zarr/zarr.json", leave_out)
    write_manifest(str(tmp_path / "model.zarr"))
    np.testing.assert_array_equal(dkrr.load_model(tmp_path / "model.zarr").predict(X), est.predict(X))


def test_a_run_whose_job_left_defaults_out_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    np.savetxt(tmp_path / "rows.csv", np.column_stack([X, Y]), delimiter=",", header="a,b,y", comments="")
    job = tmp_path / "job.toml"
    job.write_text(
        '[data]\npath = "rows.csv"\ntarget = "y"\n[model]\nkernel = "rbf"\nalpha = 0.1\n[solver]\nname = "cholesky"\n'
        'tile_size = 64\n[cluster]\nworkers = 1\n[output]\ndirectory = "run"\n'
    )
    run("fit", job)
    tile = next((tmp_path / "store").rglob("factor*/**/c/0/0"), None) or next((tmp_path / "store").rglob("c/0/0"))
    written = tile.stat().st_mtime_ns
    change(tmp_path / "run/job.json", lambda found: found["model"].pop("fit_intercept"))

    def with_other_rates(found: dict[str, Any]) -> None:
        del found["digests"]
        found["calibration"] = {"potrf_share": 0.6}

    change(tmp_path / "run/plan.json", with_other_rates)
    result = json.loads(run("fit", job, "--json").stdout)
    assert max(result["relative_residual"]) < 1e-10
    assert tile.stat().st_mtime_ns == written
