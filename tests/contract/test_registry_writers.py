"""A registry that two write to at once, and that loses its power: what was said to be published and promoted is."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import dkrr
from dkrr.cli.app import main
from dkrr.jobs import registry
from dkrr.jobs.run_directory import RunDirectory
from dkrr.store.lease import Lease
from tests.contract.helpers import run as command
from tests.jobs.registry.helpers import make_model
from tests.jobs.report.runs import fit_here
from tests.jobs.retrain.project import Project


def models(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["models", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def model(tmp_path: Path) -> Callable[[float], str]:
    """A saved model; another alpha makes another one."""
    return lambda alpha: make_model(tmp_path / f"{alpha}.zarr", alpha)


def two_versions(folder: Path, model: Callable[[float], str]) -> Path:
    """A registry of two versions, of alpha 1 and 2, whose second is in production."""
    root = folder / "models"
    for number in (1, 2):
        models("add", "demo", model(float(number)), "--registry", root)
    models("promote", "demo", 2, "--registry", root)
    return root


def numbers(root: Path) -> list[tuple[int, float]]:
    """Number of each version, and the alpha of its model."""
    found = []
    for path in sorted((root / "demo/versions").iterdir()):
        document = json.loads((path / "version.json").read_text())
        assert CliRunner().invoke(main, ["info", "--verify", str(path / "model.zarr")]).exit_code == 0
        found.append((document["number"], dkrr.load_model(path / "model.zarr").provenance["alpha"]))
    return found


def test_of_two_publishers_each_has_its_own_number(
    tmp_path: Path, model: Callable[[float], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second publishes while the first copies its model."""
    root, first, second = tmp_path / "models", model(1.0), model(2.0)
    copy, once = registry._copy, [True]

    def copies(*arguments: Any) -> None:
        if once:
            once.clear()
            models("add", "demo", second, "--registry", root)
        copy(*arguments)

    monkeypatch.setattr(registry, "_copy", copies)
    models("add", "demo", first, "--registry", root)
    assert sorted(number for number, _ in numbers(root)) == [1, 2]
    assert len({json.dumps(alpha) for _, alpha in numbers(root)}) == 2
    # published again, each is found, and the next one has the next number
    for path in (first, second, model(3.0)):
        models("add", "demo", path, "--registry", root)
    assert sorted(number for number, _ in numbers(root)) == [1, 2, 3]


def test_a_model_that_is_replaced_while_it_is_copied_is_not_published(
    tmp_path: Path, model: Callable[[float], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other, copy, once = model(1.0), dkrr.load_model(model(2.0)), registry._copy, [True]

    def replaced(*arguments: Any) -> None:
        if once:
            once.clear()
            other.save(path, overwrite=True)
        copy(*arguments)

    monkeypatch.setattr(registry, "_copy", replaced)
    words = ["models", "add", "demo", path, "--registry", str(tmp_path / "models")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 4, result.output
    assert "was replaced during the copy" in result.output
    models(*words[1:])
    (version,) = registry.ModelRegistry(str(tmp_path / "models")).open("demo").versions()
    assert dkrr.load_model(version.model_path).provenance["alpha"] == [2.0]


def test_a_copy_that_was_killed_is_made_again(
    tmp_path: Path, model: Callable[[float], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, path = tmp_path / "models", model(1.0)

    def killed(target: str, key: str, data: bytes, **_: Any) -> None:
        draft = Path(target, f"{key}.{'0' * 32}.partial")
        draft.parent.mkdir(parents=True)
        draft.write_bytes(data[:5])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(registry, "write_key", killed)
        command("models", "add", "demo", path, "--registry", root, exits=75)
    models("add", "demo", path, "--registry", root)
    assert numbers(root) == [(1, [1.0])]


def test_a_version_that_is_being_removed_is_published_anew(
    tmp_path: Path, model: Callable[[float], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = two_versions(tmp_path, model)
    with monkeypatch.context() as patch:
        patch.setattr(registry, "delete_key", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        command("models", "prune", "demo", "--keep", 0, "--grace", 0, "--registry", root, exits=75)
    models("add", "demo", tmp_path / "1.0.zarr", "--registry", root)
    models("prune", "demo", "--keep", 1, "--grace", 0, "--registry", root)
    assert numbers(root) == [(2, [2.0]), (3, [1.0])]


def test_what_could_not_be_removed_is_removed_the_next_time(
    tmp_path: Path, model: Callable[[float], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = two_versions(tmp_path, model)
    prune = "models", "prune", "demo", "--keep", 0, "--grace", 0, "--registry", root
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)  # a file that may not be unlinked
        assert "nothing to delete" in command(*prune).output
    command(*prune)
    assert [path.name[:4] for path in (root / "demo/versions").iterdir()] == ["0002"]


def test_a_version_that_was_pruned_meanwhile_is_not_promoted(
    tmp_path: Path, model: Callable[[float], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole deletion happens between a promotion's look at the aliases and its write."""
    root = tmp_path / "models"
    for number in (1, 2, 3):
        models("add", "demo", model(float(number)), "--registry", root)
        models("promote", "demo", number, "--registry", root)
    swap, once = registry.swap_json, [True]

    def swaps(*arguments: Any, **options: Any) -> Any:
        if once:
            once.clear()
            models("prune", "demo", "--keep", 0, "--grace", 0, "--registry", root)
        return swap(*arguments, **options)

    monkeypatch.setattr(registry, "swap_json", swaps)
    promoted = CliRunner().invoke(main, ["models", "promote", "demo", "1", "--registry", str(root)])
    assert (promoted.exit_code, "was removed" in promoted.output) == (4, True), promoted.output
    aliases = json.loads((root / "demo/aliases.json").read_text())["aliases"]
    assert aliases["production"][:5] == "0003-"
    assert all((root / "demo/versions" / name / "version.json").exists() for name in aliases.values())


def test_a_promotion_is_on_the_disk_when_it_is_said(
    tmp_path: Path, model: Callable[[float], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes come before its name, its name before the end; the folders of a version are there, too."""
    steps: list[tuple[str, str]] = []
    fsync, link, replace, rename = os.fsync, os.link, os.replace, os.rename

    def synced(descriptor: int) -> None:
        steps.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def named(act: Callable[..., None]) -> Callable[..., None]:
        def step(source: Any, target: Any) -> None:
            act(source, target)
            steps.append((str(source), str(target)))

        return step

    monkeypatch.setattr(os, "fsync", synced)
    for name, act in (("link", link), ("replace", replace), ("rename", rename)):
        monkeypatch.setattr(os, name, named(act))
    root = tmp_path / "models"
    for number, alpha in enumerate((1.0, 2.0), start=1):
        path = model(alpha)
        steps.clear()
        models("add", "demo", path, "--registry", root)
        version = next(
            target for _, target in steps if f"/versions/{number:04d}-" in target and target[-8:] != ".partial"
        )
        assert ("sync", str(Path(version).parent)) in steps[[target for _, target in steps].index(version) :]
        steps.clear()
        models("promote", "demo", number, "--registry", root)
        draft = next(source for source, target in steps if target == str(root / "demo/aliases.json"))
        at = steps.index((draft, str(root / "demo/aliases.json")))
        assert ("sync", draft) in steps[:at]
        assert ("sync", str(root / "demo")) in steps[at:]


def test_a_retrain_job_writes_nothing_under_the_lease_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DKRR_STALE_SECONDS", "0.5")
    project = Project(tmp_path / "p")
    project.deliver("n1", seed=1)
    directory = RunDirectory(project.spec.directory)
    with Lease(directory.location, "driver.json", directory.location, kind="retrain").held():
        directory.write("job.json", job := project.spec.to_dict())
        before = sorted(str(path) for path in tmp_path.rglob("*"))
        with pytest.raises(dkrr.LockedError, match="is driven by process"):
            project.run()
    assert directory.read("job.json") == job
    assert sorted(str(path) for path in tmp_path.rglob("*") if not path.name.endswith(".partial")) == before


def test_a_retrain_job_that_fails_on_its_first_night_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the job's own document used to say that something was there already."""
    project = Project(tmp_path / "p")
    project.deliver("n1", seed=1)
    monkeypatch.setattr("dkrr.jobs.gate.improve", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        project.run()
    assert (Path(project.spec.directory) / "job.json").exists()
    assert project.dataset.num_rows == 120


@pytest.mark.parametrize(
    ("model", "solver"),
    [
        ({"kernel": "poly"}, {"name": "primal", "tile_size": "auto"}),
        ({"kernel": "rbf"}, {"name": "nystrom", "num_centers": 20}),
        ({"kernel": "rbf", "loss": "epsilon_insensitive", "epsilon": 0.5}, None),
        ({"kernel": "rbf"}, {"name": "cholesky"}),
    ],
    ids=str,
)
def test_the_rows_of_a_version_are_those_that_it_was_fitted_to(
    model: dict[str, Any], solver: dict[str, Any] | None, tmp_path: Path
) -> None:
    run = fit_here(tmp_path, evaluate=None, model=model, solver=solver)
    registry = ("--registry", tmp_path / "models")
    models("add", "demo", run.location, *registry)
    assert "400 rows" in models("list", "demo", *registry)
    assert re.search(r"rows +400\b", models("show", "demo", "1", *registry))
    assert re.search(r"rows +400\b", command("info", run.path("model.zarr")).output)
