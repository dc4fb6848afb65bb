"""Data set, incoming batches, registry and store of a retrain job on an object store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dkrr import load_model
from dkrr.errors import RefusedError, StoreError
from dkrr.jobs.predict import predict_job
from dkrr.jobs.registry import ModelRegistry, Reference
from dkrr.jobs.retrain_spec import deliveries
from dkrr.store.objects import put_file
from tests.jobs.retrain.project import Project, in_process, rows_of
from tests.s3 import Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]

pytestmark = [pytest.mark.system, pytest.mark.timeout(280)]


def test_two_nights_at_addresses(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    places = {
        "data": bucket.plain("rows.zarr"),
        "incoming": bucket.plain("incoming") + "/n*.csv",
        "registry": bucket.plain("models"),
    }
    project = Project(tmp_path / "p", retrain=places, storage=bucket.storage())

    def deliver(name: str, seed: int, **options: object) -> None:
        path = project.deliver(name, seed, 80, **options)  # type: ignore[arg-type]
        put_file(bucket.url("incoming"), f"{name}.csv", path)

    deliver("other", 9)
    deliver("n1", 1)
    assert [found.name for found in deliveries(project.spec.retrain.incoming)] == ["n1.csv"]
    first = project.run().version
    model = ModelRegistry(bucket.url("models")).open("demo")
    assert model.aliases().targets == {"production": first}
    assert project.run().outcome == "nothing new"
    deliver("n2", 2, change=lambda rows: rows * 100)
    with pytest.raises(RefusedError, match=r"n2.csv: "):
        project.run()
    assert project.run().outcome == "nothing new"
    deliver("n3", 3)
    for document in ("retrain/batches.json", "version.json", "aliases.json"):
        bucket.server.fail({"method": "PUT", "path": document, "status": 403})
        with pytest.raises(StoreError, match="cannot be written"):
            project.run()
        assert model.resolve().id
    second = project.run().production
    assert second != first
    assert model.aliases().targets == {"production": second, "previous": first}
    rows = rows_of(50, 20)[:, :3]
    np.save(tmp_path / "x.npy", rows)
    done = predict_job(
        Reference("demo", "production"),
        str(tmp_path / "x.npy"),
        str(tmp_path / "out.npy"),
        registry=bucket.url("models"),
    )
    expected = load_model(model.resolve().model_path).predict(rows)
    assert done.version.id == second
    assert np.array_equal(np.load(tmp_path / "out.npy"), expected)
