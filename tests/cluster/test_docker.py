"""The image, step by step in a container without an engine; its locks; what it runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.cluster.containers import Container, engine
from tests.cluster.programs import CLUSTER
from tests.faults import chunk_files

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


# --- Dockerfile -------------------------------------------------------------------------------------------------------


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
    data = small_job(tmp_path / "data")
    with engine(tmp_path / "engine-2") as containers:
        container = Container(["python", "-c", "import dkrr; print(dkrr.__file__)"], image=image, tmpfs=["/tmp"])
        said = containers.run(container)
        assert (said.code, said.out.startswith("/opt/dkrr/lib/")) == (0, True), said
        fit = Container(
            ["with-environment", "dkrr", "fit", "/data/job.toml"],
            {"HOME": "/tmp", "NUMBA_CACHE_DIR": "/tmp/numba", "PYTHONDONTWRITEBYTECODE": "1"},
            [("/data", data, False)], ["/tmp"], user="10001:10001", workdir="/data", image=image,
        )  # fmt: skip
        assert containers.run(fit, 180).code == 0, containers.logs()
        assert chunk_files(data / "runs/cluster/model.zarr")
    for folder in (built, image):  # half a gigabyte
        shutil.rmtree(folder)


def of_the_installer() -> dict[str, str]:
    """The variables by which this machine's package installer finds its index."""
    return {name: value for name, value in os.environ.items() if "PIP_" in name or "proxy" in name.lower()}
