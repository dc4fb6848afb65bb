"""The group of commands: exit codes, errors in one line, and the same commands below ``dask krr``.

``init``, ``doctor``, ``models``, ``retrain`` and ``gc``, and models by name elsewhere.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from dkrr import errors
from dkrr.cli import main
from dkrr.cli.app import CommandGroup
from dkrr.engine import machine
from dkrr.jobs import toml
from dkrr.jobs.init import median_gamma
from dkrr.jobs.registry import ModelRegistry
from dkrr.jobs.retrain_spec import RetrainSpec
from dkrr.jobs.spec import JobSpec
from dkrr.store.files import write_key
from tests.contract.helpers import run
from tests.jobs.registry.helpers import make_model
from tests.jobs.retrain.project import Project, in_process
from tests.s3 import CANARY_KEY, CANARY_SECRET, Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]

COMMANDS = {
    "cancel", "doctor", "evaluate", "fit", "gc", "help", "info", "ingest", "init", "list", "logs", "models", "plan",
    "predict", "report", "resume", "retrain", "status", "submit", "tune", "wait",
}  # fmt: skip


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_command_is_there_and_has_help() -> None:
    assert set(main.commands) == COMMANDS
    assert run("help").stdout == run("--help").stdout
    for name, command in main.commands.items():
        assert run(name, "--help").stdout.startswith("Usage: ")
        assert command.help


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (errors.DataError("row 3 is bad", hint="remove it"), 4, "error: row 3 is bad\nhint: remove it\n"),
        (errors.PlanRefusedError("too large"), 3, "error: too large\n"),
        (KeyError("x"), 1, "error: KeyError: 'x'\nhint: this is a defect of dkrr; --verbose shows the traceback\n"),
        (PermissionError(13, "Permission denied", "/x"), 4, "error: Permission denied (/x)\nhint: check the path, "),
        (OSError(12, "Cannot allocate memory"), 1, "error: Cannot allocate memory\n"),
        (KeyboardInterrupt(), 75, "error: interrupted\nhint: start the same command again"),
    ],
)
@pytest.mark.parametrize("arguments", [["go"], ["-v", "go"], ["go", "--verbose"]])
def test_an_error_is_a_line_and_a_hint_and_its_exit_code(
    error: BaseException, code: int, said: str, arguments: list[str]
) -> None:
    group = CommandGroup("group")

    @group.command("go")
    def go() -> None:
        raise error

    result = CliRunner().invoke(group, arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert ("Traceback" in result.stderr) == (len(arguments) == 2)
    assert said in result.stderr
    assert result.stderr.startswith("Traceback" if len(arguments) == 2 else "error: ")


def test_dask_krr_has_the_same_commands() -> None:
    # what `dask` does with an entry point, without the need for an installed distribution
    code = (
        "import sys, types\n"
        "from dask import cli\n"
        "from dkrr.cli import main\n"
        "cli._register_command_ep(cli.cli, types.SimpleNamespace(name='krr', load=lambda: main))\n"
        "cli.cli(sys.argv[1:], prog_name='dask')\n"
    )
    shown = python(code, "krr", "--help")
    assert (shown.returncode, "Usage: dask krr" in shown.stdout) == (0, True)
    assert all(f"  {name} " in shown.stdout for name in COMMANDS)
    failed = python(code, "krr", "plan", "none.toml")
    assert (failed.returncode, "error: none.toml cannot be read (No such" in failed.stderr) == (2, True)


@pytest.mark.parametrize("name", ["click", "dkrr.store.files", "numpy"])
def test_ctrl_c_while_a_command_is_loaded_ends_as_any_interruption_does(name: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3,4\n")
    code = "\n".join([
        "import sys",
        "class CtrlC:",
        "    def find_spec(self, name, *rest):",
        f"        if name == {name!r}:",
        "            raise KeyboardInterrupt",
        "sys.meta_path.insert(0, CtrlC())",
        f"sys.argv = ['dkrr', 'ingest', {str(tmp_path / 't.csv')!r}, {str(tmp_path / 'd.zarr')!r}]",
        "from dkrr.cli import main",
        "sys.exit(main())",
    ])  # fmt: skip
    done = python(code)
    assert (done.returncode, done.stdout) == (75, ""), done.stderr
    assert done.stderr.startswith("error: interrupted\nhint: start the same command again")


@pytest.mark.parametrize("spec", [JobSpec, RetrainSpec])
def test_help_lists_every_key_of_a_file_with_a_line_each(spec: type[JobSpec] | type[RetrainSpec]) -> None:
    result = run("help", "job" if spec is JobSpec else "retrain")
    for name, table in spec.tables().items():
        if spec is RetrainSpec and name in JobSpec.model_fields:
            continue  # `dkrr help job` lists them
        shown = result.stdout.partition(f"[{name}]")[2]
        for key, values, _, means in table.described_keys():
            assert len(means) > 10, f"[{name}] {key} has no line in the section Parameters of {table.__name__}"
            assert values not in ("", "value")
            assert re.search(rf"^ *{key} ", shown, re.MULTILINE), f"[{name}] {key}"


def test_help_lists_every_exit_code() -> None:
    listed = re.findall(r"^ +(\d+) +(\w+Error)? +(\w.*)$", run("help", "exit-codes").stdout, re.MULTILINE)
    kinds = [getattr(errors, name) for name in errors.__all__]
    assert {int(code) for code, _, _ in listed} == {0, *(kind.exit_code for kind in kinds)}
    assert {name for _, name, _ in listed if name} == {kind.__name__ for kind in kinds} - {"DkrrError"}


def test_gamma_is_one_over_the_median_squared_distance() -> None:
    rows = np.array([[0.0, 5.0], [1.0, 5.0], [3.0, 5.0]])  # the constant column adds nothing
    scale = np.var([0.0, 1.0, 3.0])
    assert median_gamma(rows) == pytest.approx(1 / (4 / scale), rel=1e-14)  # distances 1, 4, 9


def test_init_writes_a_job_whose_gamma_is_one_over_the_median_squared_distance(tmp_path: Path) -> None:
    table, job = tmp_path / "train.csv", tmp_path / "job.toml"
    table.write_text("a,b,y\n0,5,1\n1,5,2\n3,5,4\n")  # the constant column adds nothing
    assert run("init", table, "--target", -1, "-o", job).stdout == ""
    spec = JobSpec.load(job)
    assert (spec.data.target, spec.data.path) == ([-1], str(table))
    assert spec.model.gamma == float(f"{np.var([0.0, 1.0, 3.0]) / 4:.4g}")  # distances 1, 4, 9
    run("init", table, "-o", job, exits=2, said=f"error: {job} exists")


def test_doctor_prints_what_workers_get(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = run("doctor", "--env").stdout + "env\n"
    shown = subprocess.run(
        ["bash", "-c", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60, check=True
    )
    exported = dict(line.split("=", 1) for line in shown.stdout.splitlines() if "=" in line)
    assert machine.worker_environment().items() <= exported.items()
    # a BLAS that computes wrong numbers
    broken = machine.machine_report(tmp_path) | {"self_test_failures": ["gemm is off by 3"]}
    monkeypatch.setattr(machine, "machine_report", lambda folder: broken)
    assert "FAILED" in run("doctor", exits=5, said="gemm is off by 3").stdout


# --- models, retrain and gc -------------------------------------------------------------------------------------------


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
