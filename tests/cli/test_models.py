"""``models`` on the command line, and models by name elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dkrr.cli import main
from dkrr.jobs.registry import ModelRegistry
from tests.jobs.registry.helpers import make_model


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DKRR_MODELS", str(tmp_path / "models"))
    for name, alpha in (("a", 0.1), ("b", 1.0)):
        make_model(tmp_path / f"{name}.zarr", alpha)
    return tmp_path


def test_from_publishing_to_pruning(registry: Path) -> None:
    assert "no models in" in run("models", "list").stderr
    first = run("models", "add", "demo", registry / "a.zarr", "--promote").stdout.strip()
    second = run("models", "add", "demo", registry / "b.zarr").stdout.strip()
    assert run("models", "list").stdout.split() == [
        "demo", "production", f"{first},", "candidate", second
    ]  # fmt: skip
    listed = run("models", "list", "demo").stdout.splitlines()
    assert [line.split()[0] for line in listed] == [first, second]
    assert "40 rows  production" in listed[0]
    promoted = run("models", "promote", "demo")
    assert promoted.exit_code == 0
    assert promoted.stdout.split() == ["demo", "production", second, "previous", first]
    shown = run("models", "show", "demo").stdout
    assert second in shown.splitlines()[0]
    assert f"production: {first} -> {second}" in shown
    assert json.loads(run("models", "show", "demo", "1", "--json").stdout)["aliases"] == ["previous"]
    assert run("models", "rollback", "demo").stdout.split() == ["demo", "production", first, "previous", second]
    assert run("models", "prune", "demo", "--keep", 0, "--grace", 0).stdout == "nothing to delete\n"
    third = make_model(registry / "c.zarr", 5.0)
    run("models", "add", "demo", third)
    run("models", "add", "demo", make_model(registry / "d.zarr", 6.0))
    assert run("models", "prune", "demo", "--keep", -1).exit_code == 2
    dry = run("models", "prune", "demo", "--keep", 0, "--grace", 0, "--dry-run").stdout
    assert dry.startswith("would delete 0003-")
    assert run("models", "prune", "demo", "--keep", 0, "--grace", 0).stdout == dry.replace("would delete", "deleted")
    assert len(ModelRegistry().open("demo").versions()) == 3


def test_mistakes_end_with_their_exit_code(registry: Path) -> None:
    for arguments, code, message in (
        (("rollback", "demo"), 4, "no previous version"),
        (("promote", "demo"), 4, "has no versions"),
        (("show", "Demo"), 2, "not the name of a model"),
        (("add", "demo", registry), 4, "not a model"),
    ):
        done = run("models", *arguments)
        assert done.exit_code == code, arguments
        assert message in done.stderr
        assert "hint: " in done.stderr
