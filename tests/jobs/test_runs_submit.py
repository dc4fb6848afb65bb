"""The driver of a submitted run: a detached process on this machine."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

import dkrr
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.submit import start_driver
from dkrr.store.lease import is_gone
from tests.faults import wait_until


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
    record = start_driver(RunDirectory(run))
    try:
        lines = wait_until(lambda: len(found := (run / "driver.log").read_text().splitlines()) == 2 and found)
        facts = json.loads(lines[0])
        assert facts["arguments"] == ["-P", "-m", "dkrr.jobs.runs.driver", str(run)]
        assert facts["session"] == facts["pid"] == record["pid"]
        assert facts["stdin"] == os.devnull
        assert str(Path(dkrr.__file__).parents[1]) in facts["path"].split(os.pathsep)
        assert lines[1] == "an error"
        assert (record["kind"], record["log"]) == ("here", str(run / "driver.log"))
        assert not is_gone(record)
    finally:
        process = psutil.Process(record["pid"])
        process.kill()
        process.wait(10)
    assert is_gone(record)
