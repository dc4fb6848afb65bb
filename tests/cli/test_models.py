"""``models``, ``retrain`` and ``gc`` on the command line, and models by name elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dkrr.jobs import toml
from dkrr.jobs.registry import ModelRegistry
from dkrr.store.files import write_key
from tests.contract.helpers import run
from tests.jobs.registry.helpers import make_model
from tests.jobs.retrain.project import Project, in_process
from tests.s3 import CANARY_KEY, CANARY_SECRET, Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DKRR_MODELS", str(tmp_path / "models"))
    return tmp_path


def test_from_publishing_to_pruning(registry: Path) -> None:
    assert "no models in" in run("models", "list").stderr
    models = [make_model(registry / f"{alpha}.zarr", alpha) for alpha in (0.1, 1.0, 5.0, 6.0)]
    first = run("models", "add", "demo", models[0], "--promote").stdout.strip()
    second = run("models", "add", "demo", models[1]).stdout.strip()
    assert run("models", "list").stdout.split() == [
        "demo", "production", f"{first},", "candidate", second
    ]  # fmt: skip
    listed = run("models", "list", "demo").stdout.splitlines()
    assert [line.split()[0] for line in listed] == [first, second]
    assert "40 rows  production" in listed[0]
    assert run("models", "promote", "demo").stdout.split() == ["demo", "production", second, "previous", first]
    shown = run("models", "show", "demo", said=f"production: {first} -> {second}").stdout
    assert second in shown.splitlines()[0]
    assert json.loads(run("models", "show", "demo", "1", "--json").stdout)["aliases"] == ["previous"]
    assert run("models", "rollback", "demo").stdout.split() == ["demo", "production", first, "previous", second]
    assert run("models", "prune", "demo", "--keep", 0, "--grace", 0).stdout == "nothing to delete\n"
    for path in models[2:]:
        run("models", "add", "demo", path)
    run("models", "prune", "demo", "--keep", -1, exits=2)
    dry = run("models", "prune", "demo", "--keep", 0, "--grace", 0, "--dry-run").stdout
    assert dry.startswith("would delete 0003-")
    assert run("models", "prune", "demo", "--keep", 0, "--grace", 0).stdout == dry.replace("would delete", "deleted")
    assert len(ModelRegistry().open("demo").versions()) == 3


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("rollback", "demo"), 4, "no previous version"),
        (("promote", "demo"), 4, "has no versions"),
        (("show", "Demo"), 2, "not the name of a model"),
        (("add", "demo", "."), 4, "not a model"),
    ],
)
def test_mistakes_end_with_their_exit_code(registry: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    run("models", *arguments, exits=code, said=(message, "hint: "))


def test_retraining_from_the_first_batch_to_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    project = Project(tmp_path / "p")
    path = project.folder / "RETRAIN.toml"
    path.write_text(toml.dumps(project.document))
    run("retrain", path, said="outcome     nothing new")
    project.deliver("n1", seed=1)
    run("retrain", path, said="outcome               promoted")
    again = json.loads(run("retrain", path, "--json").stdout)
    assert (again["outcome"], again["production"]) == ("nothing new", project.production)
    project.deliver("n2", seed=2, change=lambda rows: rows * 100)
    refused = run("retrain", path, exits=7, said=("\nerror: demo: ", "hint: demo@production is 0001-"))
    assert "n2.csv: refused at validate" in refused.stdout
    for command, said in (("list", "rmse 0."), ("show", "retrain  candidate: ")):
        run("models", command, "demo", "--registry", tmp_path / "p/models", said=said)


def test_garbage_at_addresses(bucket: Bucket, tmp_path: Path) -> None:
    key = "a" * 40
    write_key(bucket.url("runs/store/factors", f"{key}.zarr"), "c/0/0", bytes(2048))
    job = tmp_path / "job.toml"
    output = {"directory": bucket.plain("runs/a")}
    job.write_text(toml.dumps({"data": {"path": "x.npy"}, "output": output, "storage": bucket.storage()}))
    said = [run("gc", place, "--older-than", -60, said="2 KiB can be deleted").output
            for place in (bucket.url("runs"), bucket.url("runs/store"), job)]  # fmt: skip
    assert run("gc", bucket.url("runs")).stdout == "nothing to delete\n"
    said.append(run("gc", bucket.url("runs"), "--older-than", -60, "--yes", said="deleted 2 KiB").output)
    # the released lock of what was removed goes with the next collection: an object has no conditional removal
    assert [name for name in bucket.listing() if not name.endswith(f"{key}.zarr.lock")] == []
    said.append(run("gc", bucket.url("runs"), "--older-than", -60, "--yes").output)
    assert bucket.listing() == []
    assert not [secret for secret in (CANARY_KEY, CANARY_SECRET) if secret in "".join(said)]
