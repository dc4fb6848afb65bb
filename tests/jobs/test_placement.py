"""Where drivers are started: the table of placements, and a detached process on this machine."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest

from dkrr.errors import ParameterError
from dkrr.jobs import placement
from dkrr.jobs.placement import driver_command, start_driver, start_here
from dkrr.jobs.spec import ClusterSpec, JobSpec
from dkrr.processes import is_gone
from tests.faults import wait_until


def job(**cluster: Any) -> JobSpec:
    return JobSpec.from_dict({"data": {"path": "x.npy"}, "cluster": cluster})


def test_every_placement_of_a_job_file_is_there() -> None:
    kinds = get_args(ClusterSpec.model_fields["driver"].annotation)
    assert set(kinds) == set(placement._PLACEMENTS)
    for target in placement._PLACEMENTS.values():
        module, _, name = target.partition(":")
        assert callable(getattr(import_module(module), name)), target


def test_the_job_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "start_here", lambda run, spec: {"kind": "here", "run": run})
    assert start_driver("runs/a", job()) == {"kind": "here", "run": "runs/a"}
    monkeypatch.setitem(placement._PLACEMENTS, "slurm", "dkrr.jobs.no_such_module:start")
    with pytest.raises(ParameterError, match=r"\[cluster\] driver = 'slurm' is not available"):
        start_driver("runs/a", job(driver="slurm"))


def test_a_driver_here_belongs_to_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Python says what it was started with, and waits."""
    python = tmp_path / "python"
    python.write_text(
        textwrap.dedent(f"""\
            #!{sys.executable}
            import json, os, sys, time
            facts = dict(arguments=sys.argv[1:], session=os.getsid(0), pid=os.getpid())
            facts["stdin"] = os.readlink("/proc/self/fd/0")
            facts["path"] = os.environ["PYTHONPATH"]
            print(json.dumps(facts), flush=True)
            print("an error", file=sys.stderr, flush=True)
            time.sleep(60)
        """)
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    run = tmp_path / "runs/a"
    record = start_here(str(run), job())
    try:
        lines = wait_until(lambda: len(found := (run / "driver.log").read_text().splitlines()) == 2 and found)
        facts = json.loads(lines[0])
        assert facts["arguments"] == ["-P", "-m", "dkrr.jobs.runs.driver", str(run), "--kind", "here"]
        assert driver_command(str(run), "here", "p")[0] == "p"
        assert facts["session"] == facts["pid"] == record["pid"]
        assert facts["stdin"] == os.devnull
        assert str(Path(placement.__file__).parents[2]) in facts["path"].split(os.pathsep)
        assert lines[1] == "an error"
        assert (record["kind"], record["log"]) == ("here", str(run / "driver.log"))
        assert not is_gone(record)
    finally:
        process = psutil.Process(record["pid"])
        process.kill()
        process.wait(10)
    assert is_gone(record)
