"""``workflows/retrain/crontab`` under Debian's cron itself, which sees this table and none of the machine's."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults import wait_until
from tests.jobs.retrain.project import Project
from tests.workflows.test_retrain import FOLDER, HERE, PROGRAM

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
SECONDS = 300.0  # cron's clock has minutes; the rest is the command on a busy machine

# Namespaces of its own: tables and lock that no other cron reads, and processes that all end with the first
DAEMON = """
set -e
mount -t tmpfs tmpfs /run
mount --bind {folder}/nothing /etc/cron.d
mount --bind {folder}/empty /etc/crontab
mount --bind {folder}/tables /var/spool/cron/crontabs
exec cron -f -L 15
"""
NAMESPACES = ["unshare", "--mount", "--mount-proc", "--pid", "--fork", "--kill-child"]


@pytest.fixture(autouse=True)
def needs() -> None:
    """Cron, root, and namespaces."""
    missing = [name for name in ("cron", "unshare", "setpriv") if shutil.which(name, path=PATH) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (apt-get install --no-install-recommends cron util-linux)")
    if os.geteuid() != 0:
        pytest.skip("cron is run as root, in namespaces of its own")
    done = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"no namespaces here: {done.stderr.strip()}")


@contextmanager
def cron(folder: Path, table: str) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon with root's table; it and all it has started end with the block, or with the tests."""
    for name in ("nothing", "tables"):
        (folder / name).mkdir()
    (folder / "empty").touch()
    (folder / "tables/root").touch(0o600)
    (folder / "tables/root").write_text(table)
    command = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        *NAMESPACES,
        "sh",
        "-c",
        DAEMON.format(folder=shlex.quote(str(folder))),
    ]
    with open(folder / "cron.log", "wb") as log:
        process = subprocess.Popen(
            command, env={"PATH": PATH}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def every_minute(project: Project, program: Path) -> str:
    """The table with the two paths edited; its first entry is due every minute, and nothing is mailed."""
    text = (FOLDER / "crontab").read_text().replace(PROGRAM, str(program)).replace(HERE, str(project.folder))
    text, edits = re.subn(r"^15 2 \* \* \*  (?=cd )", "* * * * *  ", text, flags=re.M)
    text, mails = re.subn(r"^MAILTO=.*$", 'MAILTO=""', text, flags=re.M)
    assert (edits, mails) == (1, 1)
    return text


def test_cron_retrains_twice(project: Project, program: Path, tmp_path: Path) -> None:
    """Nothing but delivered rows and cron's clock."""
    log = project.folder / "retrain.log"

    def promoted() -> list[str]:
        """The versions that the command has told of, which stand in its log once it has ended."""
        return re.findall(r"^ *outcome +promoted\n *production +(\S+)$", log.read_text() if log.exists() else "", re.M)

    with cron(tmp_path, every_minute(project, program)) as daemon:
        for number in (1, 2):
            wait_until(lambda n=number: daemon.poll() is not None or len(promoted()) == n, SECONDS)  # type: ignore[misc]
            assert daemon.poll() is None, (tmp_path / "cron.log").read_text()
            if number == 1:
                project.deliver("n2", seed=2)
    assert [version.id for version in project.model.versions()] == promoted()
    assert len(set(promoted())) == 2
    assert project.production == promoted()[-1]
