"""Eight processes predict through an alias while it moves: every answer is exactly one version's."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest

from dkrr import load_model
from dkrr.jobs.registry import ModelRegistry, Reference
from tests.jobs.registry.helpers import ROWS, make_model

pytestmark = [pytest.mark.system, pytest.mark.timeout(290)]


def predict(folder: str, number: int, ready: object, stop: object) -> None:
    """Predict again and again; what was answered, by which version, and every error, goes to a file."""
    from dkrr.jobs.predict import predict_job

    found: list[dict[str, object]] = []
    errors: list[str] = []
    output = str(Path(folder) / f"out-{number}.npy")
    while not stop.is_set() or len(found) < 3:  # type: ignore[attr-defined]
        try:
            done = predict_job(
                Reference("demo", "production"), f"{folder}/rows.npy", output, registry=f"{folder}/models"
            )
            stamp = json.loads(Path(f"{output}.json").read_text())
            found.append(
                {"version": done.version.id, "stamp": stamp["version"], "answer": np.load(output).tobytes().hex()}
            )
        except Exception as exc:
            errors.append(repr(exc))
        if len(found) == 1:
            ready.release()  # type: ignore[attr-defined]
    Path(folder, f"found-{number}.json").write_text(json.dumps({"found": found, "errors": errors}))


@pytest.mark.parametrize("cycles", [pytest.param(5, marks=pytest.mark.short), 30])
def test_predictions_while_the_alias_moves(cycles: int, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", ROWS)
    model = ModelRegistry(str(tmp_path / "models")).open("demo")
    versions = [model.add(make_model(tmp_path / f"{alpha}.zarr", alpha)) for alpha in (0.01, 0.1, 1.0, 10.0)]
    answers = {found.id: load_model(found.model_path).predict(ROWS).tobytes().hex() for found in versions}
    assert len(set(answers.values())) == 4
    model.promote(versions[0].id)
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Semaphore(0), context.Event()
    processes = [context.Process(target=predict, args=(str(tmp_path), number, ready, stop)) for number in range(8)]
    for process in processes:
        process.start()
    try:
        for _ in processes:
            assert ready.acquire(timeout=120)
        for cycle in range(cycles):
            others = [found.id for found in versions if found.id != model.aliases().targets["production"]]
            model.promote(others[cycle % 3])  # to promote what is in production changes nothing
            time.sleep(0.1)
            model.rollback()
            time.sleep(0.1)
        stop.set()
        for process in processes:
            process.join(120)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
    seen = set()
    for number in range(8):
        document = json.loads((tmp_path / f"found-{number}.json").read_text())
        assert document["errors"] == []
        for item in document["found"]:
            assert item["version"] == item["stamp"]
            assert item["answer"] == answers[item["version"]]
            seen.add(item["version"])
    assert len(seen) >= 2, "the alias did not move while anybody looked"
    assert model.aliases().epoch >= 2 * cycles
