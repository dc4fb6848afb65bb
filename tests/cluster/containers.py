"""A process in what a container engine would give it: a read-only root of its own, mounts, a user without rights.

It has this machine's /usr and interpreter in place of an image, and mount and network namespaces from util-linux and
iproute2 in place of an engine; it needs root.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import dkrr
from tests.cluster.namespaces import Network, ip, network_of
from tests.cluster.programs import CLUSTER, need, programs
from tests.faults import Run, descendants, finish

__all__ = ["Container", "Engine", "engine"]

# what an image would bring: libraries, and the certificates that package installers look for
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib64", "lib32", "libx32", "etc/ssl", "etc/alternatives")
_FILES = ("etc/ld.so.cache", "etc/nsswitch.conf", "etc/localtime", "etc/passwd", "etc/group")
BIN = "/opt/dkrr/bin"


@dataclass
class Container:
    """``arguments`` in a container; the rest is named as Kubernetes and Compose name it.

    ``mounts`` are (path inside, path here, read-only). ``image`` is what stands at /opt, by default the commands
    ``dkrr`` and ``dask`` of the code under test, and ``with-environment``. With ``host_network`` it is on the network
    of this machine.
    """

    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    mounts: list[tuple[str, Path, bool]] = field(default_factory=list)
    tmpfs: list[str] = field(default_factory=list)
    user: str = "10001:10001"
    read_only: bool = True
    workdir: str = "/"
    image: Path | None = None
    host_network: bool = False


@dataclass
class Engine:
    """Starts containers on one network, where names lead to addresses; all of them end with it."""

    folder: Path
    network: Network
    names: dict[str, str] = field(default_factory=dict)
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, container: Container) -> subprocess.Popen[str]:
        number = len(self.running)
        root = self.folder / f"root-{number}"
        root.mkdir()
        inside = ["unshare", "--mount", "--propagation", "private", "bash", "-euc", self._script(container, root)]
        if not container.host_network:
            inside = [*self.network.on("host"), *inside]
        with open(self.folder / f"log-{number}", "w") as log:
            process = subprocess.Popen(
                [*inside, "container", *container.arguments],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        self.running.append(process)
        return process

    def run(self, container: Container, seconds: float = 120.0) -> Run:
        """Start it and wait for its end."""
        process = self.start(container)
        ended = finish(process, seconds)
        return Run(ended.code, ended.out, self.log(process))

    def log(self, process: subprocess.Popen[str]) -> str:
        return (self.folder / f"log-{self.running.index(process)}").read_text()

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("log-*")))

    def close(self) -> None:
        children = [child for process in self.running for child in descendants(process.pid)]
        for process in self.running:
            process.kill()
            process.communicate()
        for child in children:
            if child.is_running():
                child.kill()

    def _image(self) -> Path:
        """/opt of an image that has the code under test."""
        folder = self.folder / "image"
        if not folder.exists():
            command = programs(folder / "dkrr/bin") / "with-environment"
            command.write_bytes((CLUSTER / "with-environment").read_bytes())
            command.chmod(0o755)
        return folder

    def _script(self, container: Container, root: Path) -> str:
        image = self._image() if container.image is None else container.image
        mounts = [*((path, Path(path), True) for path in _interpreter()), ("/opt", image, container.read_only)]
        mounts += container.mounts
        hosts = "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **self.names}.items())
        lines = [
            f"cd {shlex.quote(str(root))}",
            "mount -t tmpfs -o mode=755 tmpfs .",
            f"cd {shlex.quote(str(root))}",
            "mkdir -p proc dev sys etc tmp var/tmp",
            "mount --rbind /proc proc; mount --rbind /dev dev; mount --rbind /sys sys",
            f"for name in {' '.join(_SYSTEM)}; do",
            "    if [ -L /$name ]; then cp -a /$name $name",
            "    elif [ -d /$name ]; then",
            "        mkdir -p $name; mount --bind /$name $name; mount -o remount,bind,ro $name",
            "    fi",
            "done",
            f"for name in {' '.join(_FILES)}; do if [ -e /$name ]; then cp -L /$name $name; fi; done",
        ]
        if container.host_network:
            lines.append("cp -L /etc/hosts /etc/resolv.conf etc/")
        else:
            lines.append(f"printf %s {shlex.quote(hosts)} > etc/hosts; touch etc/resolv.conf")
        # before the others: the interpreter may be installed below one of them
        lines += [f"mkdir -p .{path}; mount -t tmpfs -o mode=1777 tmpfs .{path}" for path in container.tmpfs]
        for inside, here, read_only in sorted(mounts):
            target = shlex.quote("." + inside)
            if here.is_file():
                lines.append(f"mkdir -p $(dirname {target}); touch {target}")
            else:
                lines.append(f"mkdir -p {target}")
            lines.append(f"mount --bind {shlex.quote(str(here))} {target}")
            if read_only:
                lines.append(f"mount -o remount,bind,ro {target}")
        lines.append(f"mkdir -p {shlex.quote('.' + container.workdir)}")
        if container.read_only:
            lines.append("mount -o remount,ro .")
        variables = {"PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin", **container.environment}
        assigned = " ".join(shlex.quote(f"{name}={value}") for name, value in variables.items())
        enter = shlex.quote(f'cd {shlex.quote(container.workdir)} && exec "$@"')
        lines.append(
            f"exec chroot --userspec={container.user} --groups= . /usr/bin/env -i {assigned} "
            f'/bin/sh -c {enter} container "$@"'
        )
        return "\n".join(lines)


def _interpreter() -> list[str]:
    """Folders that this interpreter and the code under test need, wherever they are installed."""
    folders = {sys.base_prefix, sys.prefix, str(Path(dkrr.__file__).parent.parent)}
    return sorted(folder for folder in map(os.path.realpath, folders) if not folder.startswith("/usr/"))


@contextmanager
def engine(folder: Path, *names: str) -> Iterator[Engine]:
    """Containers on one host of a network, which ``names`` lead to."""
    need("ip", "unshare", "chroot", package="iproute2 util-linux coreutils")
    folder.mkdir(parents=True, exist_ok=True)
    with network_of("host") as network:
        # by which programs find out their own address; names come from /etc/hosts alone
        ip("-n", network.namespace("host"), "route", "add", "default", "dev", "eth0")
        found = Engine(folder, network, dict.fromkeys(names, network.address("host")))
        try:
            yield found
        finally:
            found.close()
