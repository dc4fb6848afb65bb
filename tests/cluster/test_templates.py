"""The templates: they are found, accepted by shell and systemd, on TLS, and locked to what the project asks for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.cluster.helpers import CLUSTER, need, programs

FILES = [path for path in sorted(CLUSTER.rglob("*")) if path.is_file()]
SCRIPTS = [path for path in FILES if path.read_bytes().startswith(b"#!")]
TEMPLATES = [path for path in FILES if path.name not in ("README.md", "local.sh")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_one(script: Path) -> None:
    shell = script.read_text().splitlines()[0].rpartition("/")[2].rpartition(" ")[2]
    assert shell in ("bash", "sh")
    assert os.access(script, os.X_OK)
    done = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_all_are_on_tls() -> None:
    for path in TEMPLATES:
        lines = [line for line in path.read_text().splitlines() if "tcp://" in line and "127.0.0.1" not in line]
        assert all(line.lstrip().startswith("#") for line in lines), path


def test_with_environment(tmp_path: Path) -> None:
    script = str(CLUSTER / "with-environment")
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    variables["PATH"] = f"{programs(tmp_path / 'bin')}{os.pathsep}{variables['PATH']}"

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [script, *arguments], env={**variables, **more}, capture_output=True, text=True, timeout=60, check=False
        )

    done = run("sh", "-c", 'echo "$OPENBLAS_NUM_THREADS $1"; exit 5', "sh", "two words")
    assert (done.returncode, done.stdout) == (5, "1 two words\n"), done.stderr
    assert run().returncode == 2
    broken = run("echo", "it ran", DKRR="false")  # without the environment the command would compute other bits
    assert (broken.returncode, broken.stdout) == (1, "")


# --- the image --------------------------------------------------------------------------------------------------------


def locked(name: str) -> dict[str, Version]:
    """Versions of the packages of a lock, each of which is pinned by hash."""
    text = (CLUSTER / "docker" / name).read_text()
    assert not re.search(r"://|--index|--find|--trusted", text)
    entries = re.split(r"\n(?=\S)", text.replace("\\\n", " "))
    assert all("--hash=sha256:" in entry for entry in entries)
    return {name: Version(version) for name, version in (entry.split()[0].split("==") for entry in entries)}


def test_the_locks_are_those_of_the_project() -> None:
    project = tomllib.loads((CLUSTER.parent / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["s3"]]
    for lock, lines in (("requirements.lock", wanted), ("build.lock", project["build-system"]["requires"])):
        versions = locked(lock)
        for requirement in map(Requirement, lines):
            found = versions.get(re.sub(r"[-_.]+", "-", requirement.name).lower())
            assert found is not None, f"{requirement} is not in {lock}: see docker/README.md"
            assert requirement.specifier.contains(found), f"{requirement}: {found} in {lock}: see docker/README.md"


def test_the_dockerfile_ends_as_a_user_without_rights() -> None:
    text = (CLUSTER / "docker/Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split(None, 1) for line in text.splitlines() if line and not line.startswith("#")]
    last = dict(steps)
    assert last["USER"] == "10001:10001"
    assert json.loads(last["ENTRYPOINT"]) == ["with-environment"]
    installs = [text for kind, text in steps if kind == "RUN" and "pip install" in text]
    assert all("--require-hashes" in text or "--no-index" in text for text in installs)
    copied = {word for kind, text in steps if kind == "COPY" and "--from" not in text for word in text.split()[:-1]}
    # what the context leaves out cannot be copied
    kept = re.findall(r"^!(.+)$", (CLUSTER / "docker/Dockerfile.dockerignore").read_text(), re.M)
    assert all((CLUSTER.parent / name).exists() for name in copied)
    assert all(any(Path(name).match(pattern) for pattern in kept) for name in copied)


# --- the units --------------------------------------------------------------------------------------------------------

UNITS = ("dkrr-scheduler.service", "dkrr-worker.service", "dkrr-driver@.service")


def test_no_unit_has_rights() -> None:
    for unit in UNITS:
        lines = (CLUSTER / "systemd" / unit).read_text().splitlines()
        assert {"User=dkrr", "NoNewPrivileges=true", "ProtectSystem=strict"} <= {*lines}
        assert any("DASK_CONFIG=/etc/dkrr/" in line for line in lines)
    assert "RestartPreventExitStatus=1 2 3 4 5 8" in lines  # 6 and 75 are tried again


@pytest.mark.system
@pytest.mark.short
def test_systemd_accepts_the_units_and_no_wrong_one(tmp_path: Path) -> None:
    need("systemd-analyze", package="systemd")
    commands = programs(tmp_path / "bin")
    (commands / "with-environment").symlink_to(CLUSTER / "with-environment")

    def verify(old: str, new: str) -> str:
        for unit in UNITS:
            text = (CLUSTER / "systemd" / unit).read_text().replace("User=dkrr", "User=root").replace(old, new)
            (tmp_path / unit).write_text(text.replace("/opt/dkrr/bin", str(commands)))
        files = [tmp_path / unit for unit in UNITS]
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True, timeout=60, check=False
        )
        return done.stderr

    assert verify("", "") == ""
    assert "restart specifier" in verify("Restart=always", "Restart=allways")
    assert "Unknown key" in verify("ProtectSystem=", "ProtectSytem=")
