"""``cluster/ssh/cluster.sh`` over an sshd of our own with keys of the test: two hosts, and all ends with the script."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.cluster.helpers import ByHandJob, byte_for_byte
from tests.cluster.programs import CLUSTER, need, programs
from tests.faults import wait_until
from tests.servers import free_port, listening_ports

SCRIPT = CLUSTER / "ssh/cluster.sh"


@dataclass
class Hosts:
    """``one`` and ``two``, both this machine, for an ssh with these options."""

    folder: Path
    port: int
    bin: Path

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DASK_")}
        return {**kept, "SSH": f"-F {self.folder / 'config'}", "HOME": str(self.folder)}

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        options = ["-n", "1", "-m", "1GiB", "-p", str(free_port()), "-t", str(self.folder / "tls"), "-b", str(self.bin)]
        return subprocess.Popen(
            [str(SCRIPT), *options, "one", "two", *arguments],
            env={**self.environment, **environment}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def servers(self) -> list[psutil.Process]:
        """Schedulers and workers that came by this sshd."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SSH_CONNECTION", "").endswith(f" {self.port}"):
                    found.append(process)
            except psutil.Error:
                continue
        return found


@contextmanager
def hosts_with_ssh(folder: Path) -> Iterator[Hosts]:
    need("sshd", "ssh", "ssh-keygen", package="openssh-server")
    folder.mkdir(mode=0o700)
    for key in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True, timeout=30)
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    port = free_port()
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder / 'host'}\nAuthorizedKeysFile {folder / 'authorized'}\n"
        f"PidFile {folder / 'pid'}\nUsePAM no\nStrictModes no\nPermitRootLogin prohibit-password\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\n"
    )
    (folder / "config").write_text(
        f"Host one two\n  HostName 127.0.0.1\n  Port {port}\n  User root\n  IdentityFile {folder / 'user'}\n"
        f"  IdentitiesOnly yes\n  UserKnownHostsFile {folder / 'known'}\n  StrictHostKeyChecking accept-new\n"
        "  LogLevel ERROR\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it, and its package makes it when a service is started
    sshd = subprocess.Popen(
        ["/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config")], stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    hosts = Hosts(folder, port, programs(folder / "bin"))
    try:
        wait_until(lambda: sshd.poll() is not None or port in listening_ports(sshd.pid), 30)
        assert sshd.poll() is None
        yield hosts
    finally:
        sshd.terminate()
        sshd.wait(10)
        for process in hosts.servers():
            with suppress(psutil.NoSuchProcess):  # it ended with the one before
                process.kill()


@pytest.mark.system
@pytest.mark.short
@pytest.mark.timeout(300)
def test_a_fit_on_two_hosts_and_nothing_is_left_there(tmp_path: Path) -> None:
    with hosts_with_ssh(tmp_path / "ssh") as hosts:
        job = ByHandJob(tmp_path / "job", "", n=700)
        process = hosts.start("--", sys.executable, "-m", "dkrr.cli", "fit", str(job.file))
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert len(job.tiles()) == 28
        assert err.startswith("certificates for")
        assert "scheduler at tls://" in err
        wait_until(lambda: not hosts.servers(), 30)


@pytest.mark.system
@pytest.mark.timeout(600)
def test_the_script_is_killed_and_what_it_started_ends(tmp_path: Path) -> None:
    local = ByHandJob(tmp_path / "local", n=700)
    local.fit()
    with hosts_with_ssh(tmp_path / "ssh") as hosts:
        script = hosts.start()
        assert script.stderr is not None
        lines = iter(script.stderr)
        said = next(line for line in lines if line.startswith("export "))
        variables = dict(word.split("=", 1) for word in said.split()[1:])
        job = ByHandJob(tmp_path / "job", "", n=700, environment=variables)
        job.fit()
        byte_for_byte(local, job)
        assert len(hosts.servers()) >= 5
        script.kill()
        script.wait(10)  # until then its number is taken, and tail --pid waits for it
        wait_until(lambda: not hosts.servers(), 60)
        script.communicate()


@pytest.mark.system
@pytest.mark.timeout(300)
def test_a_signal_ends_it_and_the_status_of_the_command_is_its_own(tmp_path: Path) -> None:
    with hosts_with_ssh(tmp_path / "ssh") as hosts:
        process = hosts.start("--", "sh", "-c", "exit 5")
        process.communicate(timeout=120)
        assert process.returncode == 5
        process = hosts.start()
        assert process.stderr is not None
        next(line for line in process.stderr if line.startswith("export "))
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 143
        wait_until(lambda: not hosts.servers(), 30)


@pytest.mark.system
@pytest.mark.timeout(120)
def test_a_host_that_nobody_reaches(tmp_path: Path) -> None:
    with hosts_with_ssh(tmp_path / "ssh") as hosts:
        (hosts.folder / "authorized").write_text("")
        process = hosts.start("--", "true")
        _, err = process.communicate(timeout=60)
        assert process.returncode == 6
        assert "one cannot be reached" in err


@pytest.mark.parametrize("arguments", [(), ("-n", "two", "host"), ("-n", "0", "host"), ("-z",), ("--", "true")])
def test_wrong_options(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [str(SCRIPT), "-t", str(tmp_path / "tls"), *arguments], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert done.stderr
    assert not (tmp_path / "tls").exists()
