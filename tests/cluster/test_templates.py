"""The templates: accepted by shell, systemd and Kubernetes, on TLS, locked to what the project asks for.

``cluster/local.sh`` starts what dkrr needs, runs a command against it, and ends all of it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests.cluster.helpers import CLUSTER, free_port, need, programs

FILES = [path for path in sorted(CLUSTER.rglob("*")) if path.is_file()]
SCRIPTS = [path for path in FILES if path.read_bytes().startswith(b"#!")]
TEMPLATES = [path for path in FILES if path.name not in ("README.md", "local.sh")]


def ended(*command: object, timeout: float = 60.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command that came to its end."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False, **options)


def unthreaded() -> dict[str, str]:
    """What the templates have to set themselves does not come from the tests' own environment."""
    return {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_one(script: Path) -> None:
    shell = script.read_text().splitlines()[0].rpartition("/")[2].rpartition(" ")[2]
    assert shell in ("bash", "sh")
    assert os.access(script, os.X_OK)
    done = ended(shell, "-n", script)
    assert (done.returncode, done.stderr) == (0, "")


def test_all_are_on_tls() -> None:
    for path in TEMPLATES:
        lines = [line for line in path.read_text().splitlines() if "tcp://" in line and "127.0.0.1" not in line]
        assert all(line.lstrip().startswith("#") for line in lines), path


def test_with_environment(tmp_path: Path) -> None:
    variables = unthreaded() | {"PATH": f"{programs(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}"}

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return ended(CLUSTER / "with-environment", *arguments, env=variables | more)

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
        return ended("systemd-analyze", "verify", "--man=no", *(tmp_path / unit for unit in UNITS)).stderr

    assert verify("", "") == ""
    assert "restart specifier" in verify("Restart=always", "Restart=allways")
    assert "Unknown key" in verify("ProtectSystem=", "ProtectSytem=")


# --- the manifests against the schemas of Kubernetes, and what every pod may do ---------------------------------------

SERVICE = "dkrr-scheduler"
CORE = {"ConfigMap", "PersistentVolumeClaim", "Service", "Deployment", "NetworkPolicy", "Job", "CronJob"}
# of Kubernetes, whose schemas core objects are checked against
VERSION = "1.31"


def documents() -> list[dict[str, Any]]:
    """Every object of the folder."""
    paths = sorted((CLUSTER / "kubernetes").glob("*.yaml"))
    return [document for path in paths for document in yaml.safe_load_all(path.read_text())]


def problem(document: dict[str, Any]) -> str:
    """What Kubernetes would not accept in an object, unknown fields included; "" for nothing."""
    import kubernetes_validate

    try:
        kubernetes_validate.validate(document, VERSION, strict=True)
    except kubernetes_validate.ValidationError as exc:
        return str(exc.message)
    return ""


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """Every specification of a pod below a value."""
    if isinstance(value, dict) and "containers" in value:
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from pods(item)


def test_every_object_is_valid() -> None:
    core = [document for document in documents() if document["kind"] in CORE]
    assert [problem(document) for document in core] == [""] * len(core)
    assert {document["kind"] for document in documents()} == CORE | {"DaskCluster", "DaskJob"}
    wrong = next(document for document in core if document["kind"] == "Deployment")
    wrong["spec"]["replicas"] = "two"
    assert "two" in problem(wrong)


def test_every_pod_has_no_rights_and_every_server_speaks_tls() -> None:
    for pod in pods(documents()):
        (container,) = pod["containers"]
        rights = {**pod["securityContext"], **container["securityContext"]}
        assert rights["runAsNonRoot"] is True
        assert rights["readOnlyRootFilesystem"] is True
        assert rights["allowPrivilegeEscalation"] is False
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert pod["automountServiceAccountToken"] is False
        assert "command" not in container, "the entry point of the image sets the BLAS environment"
        words = [*container["args"], *(entry.get("value", "") for entry in container["env"])]
        assert not [word for word in words if word.startswith("tcp://")]
        assert {"scheduler", "worker", "client"} & {entry["value"].rpartition("/")[2] for entry in container["env"][:1]}
        limit = container["resources"]["limits"]["memory"]
        if container["name"] == "worker":  # the nanny ends a worker before the kernel does
            assert (limit, container["args"][container["args"].index("--memory-limit") + 1]) == ("4608Mi", "4GiB")


def test_names_that_objects_call_each_other_by() -> None:
    every = documents()
    (service,) = [document for document in every if document["kind"] == "Service"]
    assert service["metadata"]["name"] == SERVICE
    labels = [d["spec"]["template"]["metadata"]["labels"] for d in every if d["kind"] == "Deployment"]
    assert sum(service["spec"]["selector"].items() <= found.items() for found in labels) == 1
    (policy,) = [document for document in every if document["kind"] == "NetworkPolicy"]
    drivers = [d["spec"].get("jobTemplate", d)["spec"]["template"] for d in every if d["kind"] in ("Job", "CronJob")]
    for found in (*labels, *(driver["metadata"]["labels"] for driver in drivers)):
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= found.items()
    # the operator's service has the name of the cluster
    assert {d["metadata"]["name"] + "-scheduler" for d in every if d["kind"].startswith("Dask")} == {SERVICE}


# --- a cluster on this machine ----------------------------------------------------------------------------------------


def local(*arguments: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = unthreaded() | {"PYTHON": sys.executable, "PYTHONPATH": str(CLUSTER.parent)} | variables
    return ended(CLUSTER / "local.sh", *arguments, timeout=120, cwd=cwd, env=environment)


def servers(port: int) -> list[dict[str, Any]]:
    """Processes of a scheduler or of workers at the port."""
    every = (process.info for process in psutil.process_iter(["cmdline", "pid"]))
    return [info for info in every if "dask" in (line := " ".join(info["cmdline"] or [])) and str(port) in line]


@pytest.mark.system
@pytest.mark.short
def test_a_fit_on_it_uses_both_workers_and_all_of_it_ends(tmp_path: Path) -> None:
    port = free_port()
    text = (CLUSTER / "job.toml").read_text()
    assert text.count("127.0.0.1:8786") == 1
    assert text.count("n=4096") == 1
    job = tmp_path / "job.toml"
    job.write_text(text.replace("127.0.0.1:8786", f"127.0.0.1:{port}").replace("n=4096", "n=2048"))
    done = local("-p", port, sys.executable, "-m", "dkrr.cli", "fit", job, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert len(summary["peak_rss_bytes"]) == 2
    assert summary["score"]["rmse"][0] < 1.3
    assert servers(port) == []
    assert done.stderr.startswith(f"scheduler at tcp://127.0.0.1:{port}, 2 workers of 2GiB\n")


@pytest.mark.system
def test_workers_get_what_doctor_prints_and_do_not_spill(tmp_path: Path) -> None:
    port = free_port()
    python = tmp_path / "python"  # adds a line to what `dkrr doctor --env` prints, to be found again in the workers
    python.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *"doctor --env") "{sys.executable}" "$@" && echo "export FROM_DOCTOR=yes";; '
        f'*) exec "{sys.executable}" "$@";; esac\n'
    )
    python.chmod(0o755)
    script = tmp_path / "ask.py"
    script.write_text(
        "import json, os, dask\n"
        "from distributed import Client\n"
        f"client = Client('tcp://127.0.0.1:{port}')\n"
        "client.wait_for_workers(3, timeout=60)\n"
        "def ask():\n"
        "    memory = dask.config.get('distributed.worker.memory')\n"
        "    settings = [memory[key] for key in ('target', 'spill', 'pause')]\n"
        "    return [os.environ.get(name) for name in ('FROM_DOCTOR', 'OPENBLAS_NUM_THREADS')], settings\n"
        "limits = [w['memory_limit'] for w in client.scheduler_info(n_workers=-1)['workers'].values()]\n"
        "print(json.dumps([sorted(client.run(ask).values()), limits, list(client.nthreads().values())]))\n"
    )
    done = local("-n", 3, "-m", "700MiB", "-p", port, sys.executable, script, cwd=tmp_path, PYTHON=str(python))
    assert done.returncode == 0, done.stderr
    answers, limits, threads = json.loads(done.stdout)
    assert answers == [[["yes", "1"], [False, False, False]]] * 3
    assert limits == [700 * 2**20] * 3
    assert threads == [1, 1, 1]
    assert servers(port) == []
