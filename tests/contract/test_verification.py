"""What `dkrr info --verify` says of what dkrr wrote: nothing while it is whole, and every byte of it that changed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dkrr
from dkrr.kernels import Kernel
from tests.contract.helpers import run
from tests.faults import failing_at, flip
from tests.jobs.report.runs import fit_here
from tests.jobs.retrain.project import Project, in_process

X = np.random.default_rng(0).standard_normal((150, 3))


@pytest.fixture
def factor(tmp_path: Path) -> Path:
    """A factor that leave-one-out has left the diagonal of its inverse in; its last row block is ragged."""
    est = dkrr.KernelRidge(
        alpha=0.1, kernel="rbf", gamma=0.5, solver="cholesky", tile_size=64, store=tmp_path / "store"
    )
    est.fit(X, np.sin(X[:, 0])).leave_one_out()
    (found,) = (tmp_path / "store" / "factors").glob("*.zarr")
    assert (found / "inverse_diagonal" / "c" / "1" / "0").exists()
    return found


def test_what_leave_one_out_keeps_in_a_factor_is_known(factor: Path) -> None:
    run("info", factor, "--verify")
    (factor / "inverse_diagonal" / "c" / "2" / "0").unlink()  # as an interrupted computation leaves it
    run("info", factor, "--verify")


def test_what_is_wrong_in_it_is_named(factor: Path) -> None:
    flip(factor / "inverse_diagonal" / "c" / "1" / "0")
    (factor / "inverse_diagonal" / "notes.txt").write_text("mine")
    (factor / "other.txt").write_text("mine")
    output = run("info", factor, "--verify", exits=4).output
    for words in (
        "chunk (1, 0) of inverse_diagonal is damaged",
        "inverse_diagonal/notes.txt is of unknown origin",
        "other.txt is of unknown origin",
        "3 problems",
    ):
        assert words in output


def test_a_run_that_goes_on_removes_what_killed_writes_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    in_process(monkeypatch)
    job = '[data]\npath = "generate:friedman?n=200&d=5"\n[model]\nkernel = "rbf"\ngamma = 0.5\nalpha = 0.1\n'
    Path("job.toml").write_text(job + '[solver]\nname = "cholesky"\ntile_size = 64\n')
    with failing_at("draft*/factors/*/c/3/1:1:eio"):
        run("fit", "job.toml", exits=4)
    (factor,) = (path for path in Path("runs/store/factors").glob("*.zarr") if "-sums" not in path.name)
    (factor / f"c/3/1.{'0a' * 16}.partial").write_text("some of a tile")
    mine = factor / "c/3/1.partial"
    mine.write_text("mine")
    Path(f"runs/job/status.json.{'0a' * 16}.partial").write_text("{")
    run("fit", "job.toml")
    assert "1 problem" in run("info", "runs/job", "--verify", exits=4).output
    mine.unlink()
    run("info", "runs/job", "--verify")


@pytest.fixture(scope="module")
def with_outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: one with leave-one-out errors, one with the models of a path."""
    folder = tmp_path_factory.mktemp("outputs")
    job = '[data]\npath = "generate:friedman?n=200&d=5"\n[evaluate]\n{}\n[model]\nkernel = "rbf"\ngamma = 0.5\n{}\n'
    (folder / "loo.toml").write_text(job.format("leave_one_out = true", "alpha = 0.1"))
    (folder / "path.toml").write_text(job.format("fraction = 0.3", 'loss = "pinball"\nC = [0.1, 1.0]'))
    with pytest.MonkeyPatch.context() as patch:
        in_process(patch)
        for name in ("loo", "path"):
            run("fit", folder / f"{name}.toml")
            run("info", folder / "runs" / name, "--verify")
    return folder


def changed_figures(path: Path) -> None:
    text = re.sub(r'("mean_squared_error": *\[\s*)', r"\g<1>1", path.read_text())
    assert text != path.read_text()
    path.write_text(text)


@pytest.mark.parametrize("change", [flip, Path.unlink, changed_figures], ids=["flip", "gone", "figures"])
@pytest.mark.parametrize(
    "file",
    [
        "loo/leave_one_out.zarr/residuals/c/0/0", "loo/leave_one_out.zarr/inverse_diagonal/c/0/0",
        "loo/leave_one_out.zarr/zarr.json", "path/path-000.zarr/dual_coef/c/0/0", "path/path-000.zarr/zarr.json",
    ],
)  # fmt: skip
def test_everything_that_a_run_leaves_is_verified(
    file: str, change: Callable[[Path], None], with_outputs: Path, tmp_path: Path
) -> None:
    if change is changed_figures and file != "loo/leave_one_out.zarr/zarr.json":
        return
    shutil.copytree(with_outputs, tmp_path / "copy")
    change(tmp_path / "copy/runs" / file)
    assert "1 problem" in run("info", tmp_path / "copy/runs" / file.partition("/")[0], "--verify", exits=4).output


@pytest.mark.parametrize("options", [{}, {"tile_size": 64}])
def test_the_sampled_training_rows_are_evaluated_once(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As predictions are; how large their terms may be is known without the entries."""
    sampled, block = list[int](), Kernel.block

    def counted(self: Kernel, A: Any, B: Any, *arguments: Any, **others: Any) -> Any:
        sampled.append(len(A))
        return block(self, A, B, *arguments, **others)

    monkeypatch.setattr(Kernel, "block", counted)
    X = np.random.default_rng(0).standard_normal((200, 3))
    dkrr.KernelRidge(kernel="rbf", **options).fit(X, X[:, 0])
    assert sampled.count(16) == 1


@pytest.mark.parametrize("name", ["figures.json", "samples.json", "events/000000.jsonl", "status.json"])
def test_a_document_of_a_run_that_was_changed_is_named(name: str, tmp_path: Path) -> None:
    path = Path(fit_here(tmp_path).location)
    run("info", path, "--verify")
    text = (path / name).read_text()
    (path / name).write_text(text.replace("0", "1", 1))
    assert name in run("info", path, "--verify", "--json", exits=4).output


@pytest.mark.parametrize("kind", ["masks/*.npy", "records/fit/*.json", "report.json"])
def test_a_record_of_retraining_that_was_changed_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    project = Project(tmp_path / "p")
    project.nights(1)
    run("info", project.spec.directory, "--verify")
    (path,) = Path(project.spec.directory).glob(kind)
    octets = path.read_bytes()
    path.write_bytes(octets[:-9] + bytes([octets[-9] ^ 1]) + octets[-8:])
    assert path.name in run("info", project.spec.directory, "--verify", "--json", exits=4).output
