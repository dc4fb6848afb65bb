"""What sbatch is told, what is made of its answers, and a job that runs, waits, or does not see the run's directory.

The commands of Slurm are stand-ins: ``sbatch`` starts the script in the background, ``squeue`` tells its state.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dkrr.errors import ClusterError
from dkrr.jobs import placement_slurm
from dkrr.jobs.placement_slurm import batch_options, batch_script, start_with_sbatch
from dkrr.jobs.spec import JobSpec
from tests.faults import wait_until

SBATCH = """#!/bin/bash
printf '%s\\n' "$@" > "$SLURM/arguments"
cat > "$SLURM/script"
for argument in "$@"; do case $argument in --output=*) log=${argument#--output=} ;; esac; done
log=$(printf %s "$log" | sed 's/%%/%/g')   # what Slurm makes of it
echo "$ANSWER"
[ -z "$START" ] || setsid bash "$SLURM/script" >> "$log" 2>&1 < /dev/null &
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", '#!/bin/bash\necho "$STATE"\n')):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    for name, value in {"SLURM": str(folder), "ANSWER": "4711", "START": "yes", "STATE": "RUNNING"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(placement_slurm, "DRIVER_MODULE", "tests.jobs.fake_driver")
    monkeypatch.setattr(placement_slurm, "QUEUED_SECONDS", 0.5)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "my run 100%j"
    folder.mkdir()
    return folder


def job(**cluster: Any) -> JobSpec:
    return JobSpec.from_dict({"data": {"path": "sklearn:digits"}, "cluster": cluster})


def test_a_job_that_runs(slurm: Path, run: Path) -> None:
    record = start_with_sbatch(str(run), job(workers=2))
    assert record == {"kind": "slurm", "slurm_job": "4711", "checked": True}
    note = json.loads(wait_until(lambda: (run / "ran.json").exists() and (run / "ran.json").read_text()))
    assert note["cwd"] != ""
    assert "the driver was here" in (run / "driver.log").read_text()
    assert (slurm / "arguments").read_text().splitlines() == ["--parsable", *batch_options(str(run), job(workers=2))]
    assert not list(run.glob("probe-*"))


def test_the_script_is_one_that_bash_accepts_and_ends_in_the_driver() -> None:
    script = batch_script("/shared/my run's", "probe-1")
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert checked.stderr == ""
    last = script.splitlines()[-1]
    module = "dkrr.jobs.runs.driver"
    assert shlex.split(last) == ["exec", sys.executable, "-P", "-m", module, "/shared/my run's", "--kind", "slurm"]
    assert script.startswith("#!/bin/bash\n")
    assert "probe" not in batch_script("/shared/run")


def test_resources_of_a_local_cluster_are_asked_for() -> None:
    options = batch_options("/shared/runs/demo", job(workers=4, threads_per_worker=2, memory_limit="3GiB"))
    assert {"--cpus-per-task=8", f"--mem={4 * 3072 + 2048}M", "--job-name=dkrr-demo"} <= set(options)
    assert "--output=/shared/runs/demo/driver.log" in options
    assert not any(option.startswith("--mem") for option in batch_options("/r", job(workers=4)))
    remote = batch_options("/r", job(workers=4, memory_limit="3GiB", scheduler="tcp://127.0.0.1:1"))
    assert not any(option.startswith(("--mem", "--cpus")) for option in remote)
    assert not any(option.startswith("--output") for option in batch_options("s3://bucket/run", job()))


@pytest.mark.parametrize("answer", ["4711", "4711;west", "Submitted batch job 4711", "hello\n4711"])
def test_answers_of_sbatch(slurm: Path, run: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setenv("ANSWER", answer)
    assert start_with_sbatch(str(run), job())["slurm_job"] == "4711"


def test_an_answer_without_a_number(slurm: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANSWER", "welcome")
    monkeypatch.setenv("START", "")
    with pytest.raises(ClusterError, match="answered 'welcome'"):
        start_with_sbatch(str(run), job())
    assert list(run.iterdir()) == []


def test_a_job_that_waits_in_the_queue(slurm: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("START", "")
    monkeypatch.setenv("STATE", "PENDING")
    assert start_with_sbatch(str(run), job())["checked"] is False
    assert list(run.iterdir()) == []
    # started later, it still looks, and says when it is on a node without the directory
    script = (slurm / "script").read_text()
    run.rmdir()
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, check=False)
    assert (done.returncode, "does not see" in done.stderr) == (6, True)


def test_a_node_that_does_not_see_the_directory(slurm: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("START", "")
    monkeypatch.setenv("STATE", "")
    with pytest.raises(ClusterError, match=r"job 4711 ended without an answer") as caught:
        start_with_sbatch(str(run), job())
    assert "driver.log" in caught.value.hint
    assert list(run.iterdir()) == []


def test_sbatch_refuses(slurm: Path, run: Path) -> None:
    (slurm / "sbatch").write_text("#!/bin/bash\necho 'sbatch: error: invalid account' >&2; exit 1\n")
    with pytest.raises(ClusterError, match="refused the job: sbatch: error: invalid account") as caught:
        start_with_sbatch(str(run), job())
    assert "SBATCH_" in caught.value.hint


def test_no_slurm_here(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClusterError, match="sbatch is not on the PATH"):
        start_with_sbatch(str(run), job())
