"""Hosts of a network of their own on this machine: a network namespace each, joined by a bridge in one more.

They share the file system, as hosts with a network file system do, and nothing else. It needs root and iproute2. The
machine's own network is not touched: the bridge and both ends of every pair of interfaces are inside the namespaces.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.programs import need
from tests.faults import wait_until

__all__ = ["Network", "ip", "network_of", "there"]

_numbers = itertools.count()


@dataclass
class Network:
    """Hosts by name, with addresses 10.77.0.1, 10.77.0.2, ... in the order of their names."""

    names: tuple[str, ...]
    prefix: str = field(default_factory=lambda: f"dkrr-{os.getpid()}-{next(_numbers)}")

    def address(self, name: str) -> str:
        return f"10.77.0.{self.names.index(name) + 1}"

    def namespace(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    def on(self, name: str) -> list[str]:
        """What to put before a command that is to run on a host."""
        return ["ip", "netns", "exec", self.namespace(name)]

    def cut(self, name: str) -> None:
        """Take the link of a host down: nobody hears anything of it any more, and nobody is told."""
        ip("-n", self.namespace(name), "link", "set", "eth0", "down")

    def start(self) -> None:
        _remove_stale()
        hub = self.namespace("hub")
        ip("netns", "add", hub)
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for number, name in enumerate(self.names):
            host, port = self.namespace(name), f"port{number}"
            ip("netns", "add", host)
            ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
            ip("-n", hub, "link", "set", port, "master", "bridge", "up")
            ip("-n", host, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")
            ip("-n", host, "link", "set", "lo", "up")

    def close(self) -> None:
        """End everything that runs on the hosts, and remove them."""
        for namespace in there() & {self.namespace(name) for name in (*self.names, "hub")}:
            _remove(namespace)


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def there() -> set[str]:
    """The network namespaces of this machine that have a name."""
    return {line.split()[0] for line in ip("netns", "list").splitlines() if line}


def own() -> set[str]:
    """Those that this process made; tests in others may have theirs."""
    return {name for name in there() if name.startswith(f"dkrr-{os.getpid()}-")}


def _remove(namespace: str) -> None:
    wait_until(lambda: not _killed(namespace), 30)
    ip("netns", "delete", namespace)


def _remove_stale() -> None:
    """What is left of tests that were killed: the names begin with the process that made them."""
    for namespace in there():
        match = re.match(r"dkrr-(\d+)-", namespace)
        if match and not Path(f"/proc/{match[1]}").exists():
            _remove(namespace)


def _killed(namespace: str) -> list[int]:
    pids = [int(pid) for pid in ip("netns", "pids", namespace).split()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids


@contextmanager
def network_of(*names: str) -> Iterator[Network]:
    """Hosts with these names for as long as the block runs, however it ends."""
    need("ip", package="iproute2")
    network = Network(names)
    try:
        network.start()
        yield network
    finally:
        network.close()
