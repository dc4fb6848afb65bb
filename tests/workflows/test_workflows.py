"""Job files that are shipped fit into what they ask for; the demonstration leaves nothing behind.

The recipes of workflows/retrain: each is what its scheduler accepts, and its command retrains a model.
"""

from __future__ import annotations

import ast
import configparser
import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from dkrr.jobs import toml
from dkrr.jobs.plan import plan
from dkrr.jobs.retrain_spec import RetrainSpec
from dkrr.jobs.spec import JobSpec
from tests.cluster.helpers import ByHandJob, ended, problem, programs, verified
from tests.faults import wait_until
from tests.jobs.retrain.project import Project

ROOT = Path(__file__).parent.parent.parent
JOBS = sorted([*ROOT.glob("workflows/*.toml"), *ROOT.glob("cluster/*.toml")])
FOLDER = ROOT / "workflows" / "retrain"
PROGRAM, HERE = "/opt/dkrr/bin/dkrr", "/srv/demo"


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_a_job_is_accepted_by_the_plan(job: Path, tmp_path: Path) -> None:
    result = plan(JobSpec.load(shutil.copy(job, tmp_path)))
    result.check()
    assert result.refusal == ""
    assert result.task_bytes <= 0.8 * result.memory_limit_bytes
    assert result.num_test_rows > 0


@pytest.mark.system
@pytest.mark.short
def test_ctrl_c_in_the_middle_of_a_real_fit(tmp_path: Path) -> None:
    job, folder = ByHandJob(tmp_path / "job", n=12_000, tile_size=256).file, tmp_path / "work"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "workflows" / "demo.py"), "--folder", str(folder), str(job)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        tiles = ".demo-*/runs/store/factors/*/c/*/*"
        wait_until(lambda: process.poll() is not None or any(folder.glob(tiles)), 60)
        assert process.poll() is None, process.communicate()
        children = psutil.Process(process.pid).children(recursive=True)
        assert children, "there are worker processes"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, ""), err
    assert err.endswith("interrupted; everything that was written is removed again\n")
    assert [*folder.iterdir()] == []
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []


# --- recipes ----------------------------------------------------------------------------------------------------------

Recipe = tuple[list[str], str]
"""A command, and the folder it runs in."""


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((FOLDER / "systemd" / name).read_text())
    return parser


def of_systemd() -> Recipe:
    service = unit("dkrr-retrain.service")["Service"]
    return shlex.split(service["ExecStart"]), service["WorkingDirectory"]


def of_cron() -> Recipe:
    lines = [line for line in (FOLDER / "crontab").read_text().splitlines() if line and not line.startswith("#")]
    *variables, nightly, _ = lines
    command = nightly.split(None, 5)[5].replace(">> retrain.log", "")
    for name, value in re.findall(r"^([A-Z_]+)=(.*)$", "\n".join(variables), re.MULTILINE):
        command = command.replace(f'"${name}"', value)
    return ["sh", "-c", command], HERE


def cron_job() -> dict[str, Any]:
    document: dict[str, Any] = pytest.importorskip("yaml").safe_load((FOLDER / "cronjob.yaml").read_text())
    return document


def of_kubernetes() -> Recipe:
    (container,) = cron_job()["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    program, *arguments = container["args"]
    assert (program, container["workingDir"]) == ("dkrr", "/data")
    return [PROGRAM, *arguments], HERE


def of_slurm() -> Recipe:
    lines = (FOLDER / "scrontab").read_text().splitlines()
    (entry,) = [line for line in lines if line and not line.startswith("#")]
    (folder,) = [line.partition("=")[2] for line in lines if line.startswith("#SCRON --chdir=")]
    return shlex.split(entry.split(None, 5)[5]), folder


def constants(name: str) -> dict[str, Any]:
    """The literals that a recipe in Python assigns to names."""
    found: dict[str, Any] = {}
    for node in ast.parse((FOLDER / name).read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):
                found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def of_python(name: str) -> Recipe:
    found = constants(name)
    return found["COMMAND"], found["FOLDER"]


RECIPES: list[Callable[[], Recipe]] = [
    of_systemd, of_cron, of_kubernetes, of_slurm,
    partial(of_python, "airflow_dag.py"), partial(of_python, "dagster_asset.py"),
]  # fmt: skip


def test_the_example_is_accepted() -> None:
    spec = RetrainSpec.from_dict(tomllib.loads((FOLDER / "RETRAIN.toml").read_text()), base=HERE)
    assert spec.directory == f"{HERE}/models/demo/retrain"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_runs_the_same_command(recipe: Callable[[], Recipe]) -> None:
    command, folder = recipe()
    assert f"{PROGRAM} retrain RETRAIN.toml" in " ".join(command)
    assert folder == HERE


def test_only_what_another_attempt_can_mend_is_retried() -> None:
    for name in ("airflow_dag.py", "dagster_asset.py", "prefect_flow.py"):
        assert constants(name)["RETRIED"] == (6, 75)
    prevented = unit("dkrr-retrain.service")["Service"]["RestartPreventExitStatus"]
    assert {int(code) for code in prevented.split()} == {1, 2, 3, 4, 5, 7, 8}
    (fails, _) = cron_job()["spec"]["jobTemplate"]["spec"]["podFailurePolicy"]["rules"]
    assert fails["onExitCodes"]["operator"] == "NotIn"
    assert {6, 75} <= set(fails["onExitCodes"]["values"])
    assert not {1, 2, 3, 4, 5, 7, 8} & set(fails["onExitCodes"]["values"])


def test_telemetry_is_off_before_prefect_is_imported() -> None:
    before, _, _ = (FOLDER / "prefect_flow.py").read_text().partition("from prefect import")
    assert '("PREFECT_SERVER_ANALYTICS_ENABLED", "false")' in before
    assert '("DO_NOT_TRACK", "1")' in before


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """With the paths edited, as their reader is told to: a program that is there, and a folder."""
    units = [FOLDER / "systemd" / name for name in ("dkrr-retrain.service", "dkrr-retrain.timer")]
    done = verified(
        tmp_path, units, {PROGRAM: shutil.which("true") or "", HERE: str(tmp_path), "User=dkrr": "User=root"}
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if "dkrr-retrain" in line]
    assert (done.returncode, said) == (0, [])
    when = unit("dkrr-retrain.timer")["Timer"]["OnCalendar"]
    assert ended("systemd-analyze", "calendar", when).returncode == 0


def test_kubernetes_accepts_the_manifest() -> None:
    document = cron_job()
    assert problem(document) == ""
    document["spec"]["shedule"] = document["spec"].pop("schedule")
    assert "schedule" in problem(document)


# --- the commands, run ------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A batch was delivered, and nothing done yet."""
    project = Project(tmp_path / "p", cluster={"workers": 1, "memory_limit": "1GiB"})
    (project.folder / "RETRAIN.toml").write_text(toml.dumps(project.document))
    project.deliver("n1", seed=1)
    return project


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """What stands in a reader's environment as ``dkrr``."""
    return programs(tmp_path / "bin") / "dkrr"


@pytest.mark.system
@pytest.mark.parametrize("recipe", [pytest.param(of_systemd, marks=pytest.mark.short), *RECIPES[1:]])
def test_the_command_retrains(recipe: Callable[[], Recipe], project: Project, program: Path) -> None:
    command, _ = recipe()
    edited = [word.replace(PROGRAM, str(program)).replace(HERE, str(project.folder)) for word in command]
    done = ended(*edited, cwd=project.folder)
    assert done.returncode == 0, done.stderr
    assert "promoted" in done.stdout
    assert project.production is not None


@pytest.mark.system
@pytest.mark.timeout(2400)
def test_the_prefect_flow_runs_without_a_server(project: Project, program: Path, tmp_path: Path) -> None:
    """Interrupted at first, tried again, promoted; then a batch is refused, and the exit code is the command's."""
    python = os.environ.get("DKRR_PREFECT_PYTHON", sys.executable)
    if importlib.util.find_spec("prefect") is None and "DKRR_PREFECT_PYTHON" not in os.environ:
        pytest.skip("Prefect is not installed, nor named by DKRR_PREFECT_PYTHON")
    # where a reader would have copied it: its folder has no dkrr
    flow = str(shutil.copy(FOLDER / "prefect_flow.py", tmp_path))
    interrupted, calls = tmp_path / "dkrr", tmp_path / "calls"
    interrupted.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\n[ $(wc -l < {calls}) -gt 1 ] && exec {program} "$@"\n'
        "echo 'error: interrupted' >&2\nexit 75\n"
    )
    interrupted.chmod(0o755)
    # nothing of this machine's Prefect
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_") and k != "PYTHONPATH"}
    own = {"PREFECT_HOME": str(tmp_path / "home"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}

    def run(command: Path) -> tuple[int, str]:
        environment = {**kept, **own, "DKRR_RETRY_SECONDS": "1,1"}
        done = ended(python, flow, job, "--dkrr", command, cwd=tmp_path, env=environment, timeout=600)
        return done.returncode, done.stdout + done.stderr

    job = str(project.folder / "RETRAIN.toml")
    code, said = run(interrupted)
    assert code == 0, said
    assert len(calls.read_text().splitlines()) == 2
    first = project.production
    assert first is not None
    assert f"demo: promoted, production {first}" in said
    project.deliver("n2", seed=2, change=lambda rows: rows * 100)
    code, said = run(program)
    assert code == 7, said
    assert "dkrr retrain ended with 7: error: demo:" in said
    assert project.production == first
