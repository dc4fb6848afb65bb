"""The image, step by step in a container without an engine; compose.yaml by docker-compose; the lock; what they run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.cluster.containers import Container, Engine, engine
from tests.cluster.programs import CLUSTER, make_certificates
from tests.faults import chunk_files, wait_until

ROOT = CLUSTER.parent
FOLDER = CLUSTER / "docker"
LOCKS = {name: FOLDER / name for name in ("requirements.lock", "build.lock")}
RECOMPILE = (
    "uv pip compile pyproject.toml --extra s3 --python-version 3.11 --python-platform linux --generate-hashes "
    "--no-emit-index-url --no-header --no-annotate -o cluster/docker/requirements.lock"
)


def entries(lock: Path) -> dict[str, tuple[Version, list[str]]]:
    """Version and hashes of every package of a lock."""
    found = {}
    for entry in re.split(r"\n(?=\S)", lock.read_text().replace("\\\n", " ")):
        match = re.match(r"([a-z0-9._-]+)==(\S+)\s+(.*)", entry.strip(), re.S)
        assert match, entry
        found[match[1]] = Version(match[2]), re.findall(r"--hash=sha256:([0-9a-f]{64})", match[3])
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# --- the lock ---------------------------------------------------------------------------------------------------------


def test_the_locks_are_pinned_by_hash_and_name_no_index() -> None:
    for lock in LOCKS.values():
        assert all(hashes for _, hashes in entries(lock).values())
        assert not re.search(r"://|--index|--find|--trusted", lock.read_text())


def test_the_lock_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["s3"]]
    for lock, lines in (("requirements.lock", wanted), ("build.lock", project["build-system"]["requires"])):
        locked = entries(LOCKS[lock])
        for requirement in map(Requirement, lines):
            version, _ = locked.get(canonical(requirement.name), (None, []))
            assert version is not None, f"{requirement} is not in {lock}: {RECOMPILE}"
            assert requirement.specifier.contains(version), f"{requirement}: {version} in {lock}: {RECOMPILE}"


# --- compose.yaml -----------------------------------------------------------------------------------------------------


def compose_command() -> list[str]:
    for command in (["docker-compose"], ["docker", "compose"]):
        if shutil.which(command[0]):
            done = subprocess.run([*command, "version"], capture_output=True, timeout=60, check=False)
            if done.returncode == 0:
                return command
    pytest.skip("docker-compose not found: apt-get install docker-compose")


def resolved(file: Path, **environment: str) -> dict[str, Any]:
    """compose.yaml as docker-compose understands it."""
    import yaml

    command = [*compose_command(), "-f", str(file), "--profile", "driver", "config"]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise ValueError(done.stderr)
    found: dict[str, Any] = yaml.safe_load(done.stdout)
    return found["services"]


@pytest.mark.system
@pytest.mark.short
def test_compose_accepts_its_file_and_no_wrong_one(tmp_path: Path) -> None:
    services = resolved(FOLDER / "compose.yaml")
    assert set(services) == {"scheduler", "worker", "driver"}
    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["user"] == "10001:10001"
        assert "ports" not in service  # nobody outside of the network reaches any of them
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((FOLDER / "compose.yaml").read_text().replace("read_only:", "readonly:"))
    with pytest.raises(ValueError, match="readonly"):
        resolved(wrong)


def container_of(service: dict[str, Any], folders: dict[str, Path]) -> Container:
    """A service as the image runs it: entry point, and what compose.yaml says."""
    command = service["command"]
    words = shlex.split(command) if isinstance(command, str) else list(command)
    mounts = []
    for volume in service["volumes"]:
        parts = [volume["source"], volume["target"]] if isinstance(volume, dict) else volume.split(":")
        read_only = volume.get("read_only", False) if isinstance(volume, dict) else parts[2:] == ["ro"]
        mounts.append((parts[1], folders[parts[1]], read_only))
    return Container(
        ["with-environment", *words],
        {"HOME": "/tmp", "NUMBA_CACHE_DIR": "/tmp/numba", "PYTHONDONTWRITEBYTECODE": "1", **service["environment"]},
        mounts,
        ["/tmp"],
        user=service["user"],
        workdir="/data",
    )


def small_job(folder: Path) -> Path:
    """A folder that the containers' user may write, with a small job that names no cluster."""
    folder.mkdir()
    text = (CLUSTER / "job.toml").read_text()
    text = re.sub(r"^\[cluster\]\n(.+\n)+", "", text, flags=re.M).replace("n=4096", "n=1024")
    (folder / "job.toml").write_text(text)
    for path in (folder, folder / "job.toml"):
        os.chown(path, 10001, 10001)
    return folder


def given_to_the_user(folder: Path) -> Path:
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, 10001, 10001)
    return folder


def run_services(containers: Engine, services: dict[str, Any], folders: dict[str, Path], image: Path | None) -> None:
    """Scheduler, two workers and the driver; the driver has made a model."""

    def start(name: str) -> Any:
        container = container_of(services[name], folders)
        container.image = image
        return containers.start(container)

    servers = [start("scheduler"), start("worker"), start("worker")]
    for server in servers:
        wait_until(lambda server=server: "tls://" in containers.log(server) or server.poll() is not None, 60)
        assert server.poll() is None, containers.logs()
    driver = start("driver")
    assert driver.wait(120) == 0, containers.logs()
    assert chunk_files(folders["/data"] / "runs/cluster/model.zarr")


def folders_of(tmp_path: Path) -> dict[str, Path]:
    tls = given_to_the_user(make_certificates(tmp_path / "tls", "-p", "/etc/dkrr"))
    roles = {f"/etc/dkrr/{role}": tls / role for role in ("scheduler", "worker", "client")}
    return {**roles, "/data": small_job(tmp_path / "data")}


@pytest.mark.system
@pytest.mark.timeout(300)
def test_what_compose_runs(tmp_path: Path) -> None:
    services = resolved(FOLDER / "compose.yaml", DKRR_WORKERS="2")
    with engine(tmp_path / "engine", "scheduler") as containers:
        run_services(containers, services, folders_of(tmp_path), None)


# --- Dockerfile -------------------------------------------------------------------------------------------------------


def steps() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with what follows them."""
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def test_the_dockerfile_ends_as_a_user_without_rights() -> None:
    last = dict(steps())
    assert last["USER"] == "10001:10001"
    assert json.loads(last["ENTRYPOINT"]) == ["with-environment"]
    installs = [text for kind, text in steps() if kind == "RUN" and "pip install" in text]
    assert len(installs) == 3
    for text in installs:
        assert "--require-hashes" in text or "--no-index" in text
    copied = {word for kind, text in steps() if kind == "COPY" and "--from" not in text for word in text.split()[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    # what the context leaves out cannot be copied
    kept = re.findall(r"^!(.+)$", (FOLDER / "Dockerfile.dockerignore").read_text(), re.M)
    assert all(any(Path(name).match(pattern) for pattern in kept) for name in copied)


def copy_in(text: str, source: Path, target: Path) -> None:
    *names, last = text.split()
    for name in names:
        where = target / last.lstrip("/")
        if (source / name.lstrip("/")).is_dir():
            shutil.copytree(source / name.lstrip("/"), where, symlinks=True, dirs_exist_ok=True)
            continue
        where = where / Path(name).name if last.endswith("/") else where
        where.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, where)


@pytest.mark.system
@pytest.mark.timeout(900)
def test_the_steps_of_the_dockerfile_and_what_its_image_runs(tmp_path: Path) -> None:
    """Its RUN lines in a container with this interpreter for ``python``: the locks are installed afresh."""
    built, image = tmp_path / "built", tmp_path / "image"
    for folder in ("opt", "src"):
        (built / folder).mkdir(parents=True)
    image.mkdir()
    bin_of_python = str(Path(sys.base_prefix) / "bin")
    with engine(tmp_path / "engine") as containers:
        stage = 0
        for kind, text in steps():
            if kind == "FROM":
                stage += 1
            elif kind == "RUN":
                assert stage == 1  # what runs has no tools to install with
                container = Container(
                    ["sh", "-ec", text.replace("python -m venv", f"{bin_of_python}/python3 -m venv")],
                    {"PATH": f"{bin_of_python}:/usr/bin:/bin", "HOME": "/tmp", **of_the_installer()},
                    [("/src", built / "src", False)], ["/tmp"], user="0:0", read_only=False, image=built / "opt",
                    host_network=True,
                )  # fmt: skip
                assert containers.run(container, 600).code == 0, containers.logs()
            elif kind == "COPY" and text.startswith("--from=build"):
                source, target = text.split()[1:]
                assert source == target == "/opt/dkrr"
                copy_in("/opt/dkrr /dkrr", built, image)
            elif kind == "COPY":
                copy_in(text, ROOT, built if stage == 1 else image.parent / "image-root")
    entry = image.parent / "image-root/opt/dkrr/bin/with-environment"
    shutil.copy2(entry, image / "dkrr/bin/with-environment")
    services = resolved(FOLDER / "compose.yaml", DKRR_WORKERS="2")
    with engine(tmp_path / "engine-2", "scheduler") as containers:
        container = Container(["python", "-c", "import dkrr; print(dkrr.__file__)"], image=image, tmpfs=["/tmp"])
        said = containers.run(container)
        assert (said.code, said.out.startswith("/opt/dkrr/lib/")) == (0, True), said
        run_services(containers, services, folders_of(tmp_path), image)
    for folder in (built, image):  # half a gigabyte
        shutil.rmtree(folder)


def of_the_installer() -> dict[str, str]:
    """The variables by which this machine's package installer finds its index."""
    return {name: value for name, value in os.environ.items() if "PIP_" in name or "proxy" in name.lower()}
