"""The templates: accepted by shell, systemd and Kubernetes, on TLS, locked to what the project asks for.

Clusters whose certificates a script makes: nobody without one; a killed scheduler and another one. ``cluster/local.sh``
starts what dkrr needs, runs a command against it, and ends all of it. ``cluster/slurm/dkrr.sbatch`` under Slurm itself:
stopped by its time limit, requeued, finished to the same bytes.

Slurm runs on this machine for the test: munged, slurmctld and slurmd as processes of our own, with a slurm.conf of our
own. It needs root and Debian's slurm-wlm and munge, and neither systemd, nor control groups, nor an accounting
database.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from distributed.security import Security
from packaging.requirements import Requirement
from packaging.version import Version

from dkrr.engine.cluster import connect
from dkrr.errors import ClusterError
from tests.cluster.helpers import (
    CLUSTER,
    START_SECONDS,
    ByHandJob,
    by_hand,
    ended,
    free_port,
    is_identical,
    need,
    problem,
    programs,
    verified,
)  # fmt: skip
from tests.faults import finish, wait_until

FILES = [path for path in sorted(CLUSTER.rglob("*")) if path.is_file()]
SCRIPTS = [path for path in FILES if path.read_bytes().startswith(b"#!")]


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
    for path in (path for path in FILES if path.name not in ("README.md", "local.sh")):
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

    units = [CLUSTER / "systemd" / unit for unit in UNITS]
    common = {"User=dkrr": "User=root", "/opt/dkrr/bin": str(commands)}
    assert verified(tmp_path, units, common).stderr == ""
    for old, new, said in (
        ("Restart=always", "Restart=allways", "restart specifier"),
        ("ProtectSystem=", "ProtectSytem=", "Unknown key"),
    ):
        assert said in verified(tmp_path, units, common | {old: new}).stderr


# --- the manifests against the schemas of Kubernetes, and what every pod may do ---------------------------------------

SERVICE = "dkrr-scheduler"
CORE = {"ConfigMap", "PersistentVolumeClaim", "Service", "Deployment", "NetworkPolicy", "Job", "CronJob"}


def documents() -> list[dict[str, Any]]:
    """Every object of the folder."""
    paths = sorted((CLUSTER / "kubernetes").glob("*.yaml"))
    return [document for path in paths for document in yaml.safe_load_all(path.read_text())]


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
    return ended(CLUSTER / "local.sh", *arguments, cwd=cwd, env=environment)


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


# --- Slurm ------------------------------------------------------------------------------------------------------------

SCRIPT = CLUSTER / "slurm/dkrr.sbatch"

# Slurm lets a requeued job wait until the credentials of its first start have expired: 120 s, also where less than 5 is
# asked for
CONFIGURATION = """\
ClusterName=dkrr
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=10
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=16000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A controller and one node of four processors, of which this machine may have fewer."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[subprocess.Popen[bytes]]()
        path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
        foreign = ("SLURM_", "SBATCH_", "DASK_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        self.environment = {**kept, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start the daemons, and wait until the node is idle."""
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "plugstack.conf").touch()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                folder=self.folder,
                host=socket.gethostname().partition(".")[0],
                controller_port=free_port(),
                node_port=free_port(),
            )
        )
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "seed-file": "munge.seed"}
        options = [f"--{name}={self.folder / file}" for name, file in files.items()]
        self._start("munged", "--foreground", "--force", f"--log-file={self.folder / 'munge.log'}", *options)
        wait_until((self.folder / "munge.socket").exists, START_SECONDS)
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D")
        wait_until(lambda: "idle" in self.run("sinfo", "--noheader", "--format=%T"), START_SECONDS)

    def _start(self, *command: Any) -> None:
        with open(self.folder / f"{command[0]}.out", "wb") as log:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.processes.append(subprocess.Popen(command, env=self.environment, cwd=self.folder, **streams))

    def run(self, *command: str, cwd: Path | None = None, **environment: str) -> str:
        """The output of one of Slurm's commands."""
        variables = {**self.environment, **environment}
        done = subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows of a job: ``JobState``, ``Restarts``, ``ExitCode``, ..."""
        text = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(entry.split("=", 1) for entry in text.split() if "=" in entry)

    def close(self) -> None:
        """End jobs, then daemons, then whatever was started with our configuration and is still there."""
        with contextlib.suppress(subprocess.TimeoutExpired, FileNotFoundError):
            self.run("scancel", "--user=root")
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        for left in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if left.pid != os.getpid() and left.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    left.send_signal(signal.SIGKILL)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    need("slurmctld", "slurmd", "munged", "sbatch", package="slurm-wlm munge")
    found = Slurm(tmp_path / "slurm")
    try:
        found.start()
        yield found
    finally:
        found.close()


OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


@pytest.mark.system
@pytest.mark.short
@pytest.mark.timeout(300)
def test_told_to_stop_it_is_requeued_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    job = ByHandJob(tmp_path / "job", "", n=700)
    command = ["sbatch", "--parsable", "--mem-per-cpu=1100M", str(SCRIPT), job.file.name]
    options = {"DKRR_BIN": str(programs(tmp_path / "bin")), "DKRR_MEMORY": "1GiB"}
    slowly = "compute.cholesky.tile:1:sleep=0.1"
    number = slurm.run(*command, cwd=job.folder, DKRR_FAILPOINTS=slowly, **options)
    log = job.folder / f"dkrr-{number}.log"
    wait_until(lambda: len(job.tiles()) >= 5 or slurm.job(number).get("JobState") in OVER, 120)
    slurm.run("scancel", "--signal=USR1", "--batch", number)  # as Slurm does before the time limit
    wait_until(lambda: "driver ended with status 75" in log.read_text(), 60)
    written = job.fewer_than_all(5)
    wait_until(lambda: slurm.job(number).get("JobState") in OVER, 120)
    said, found = log.read_text(), slurm.job(number)
    assert (found["JobState"], found["Restarts"], found["ExitCode"]) == ("COMPLETED", "1", "0:0"), said
    assert written.items() <= job.tiles().items()  # no valid tile was written again
    assert re.findall(r"start \d|status \d+", said) == ["start 0", "status 75", "start 1", "status 0"]
    # a scheduler file for each start, and none is left; everything was on TLS
    starts, left = [f"{number}-{start}" for start in (0, 1)], {path.name for path in (job.folder / ".dkrr").iterdir()}
    logs = {f"{kind}-{start}{end}.log" for start in starts for kind, end in (("scheduler", ""), ("worker", "-1"))}
    assert left >= {*logs, "tls"}
    assert not [name for name in left if name.endswith(".json")]
    heard = (job.folder / f".dkrr/scheduler-{number}-1.log").read_text()
    assert "tls://" in heard
    assert "tcp://" not in heard
    local = ByHandJob(tmp_path / "local", n=700)
    local.fit()
    assert is_identical(local, job)


NO_FILE = "one job file that exists expected"
ELSEWHERE = "job.toml names a [cluster] scheduler"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], NO_FILE), (["missing.toml"], NO_FILE), (["a", "b"], NO_FILE), (["job/job.toml"], ELSEWHERE)],
)
def test_without_a_job_file_that_it_can_use_it_says_so(tmp_path: Path, arguments: list[str], said: str) -> None:
    ByHandJob(tmp_path / "job", "tcp://127.0.0.1:8786")
    done = ended(SCRIPT, *arguments, cwd=tmp_path)
    assert (done.returncode, said in done.stdout) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


# --- TLS --------------------------------------------------------------------------------------------------------------

CERTIFICATES = CLUSTER / "tls/make-certificates.sh"
ROLES = ("scheduler", "worker", "client")


def make(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(CERTIFICATES), *options, str(folder)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls") / "a folder"
    done = make(folder)
    assert done.returncode == 0, done.stderr
    return folder


def verify(folder: Path, role: str, purpose: str) -> int:
    command = ["openssl", "verify", "-x509_strict", "-CAfile", folder / "ca.pem", "-purpose", purpose]
    return subprocess.run([*command, folder / role / f"{role}.pem"], capture_output=True, check=False).returncode


def test_certificates_are_good_for_their_role_only(certificates: Path) -> None:
    for role in ROLES:
        assert verify(certificates, role, "sslclient") == 0
    assert [verify(certificates, role, "sslserver") == 0 for role in ROLES] == [True, True, False]
    for key in certificates.rglob("*-key.pem"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert len(list(certificates.rglob("*-key.pem"))) == 4
    assert not list(certificates.glob(".making*"))


def test_again_keeps_the_authority_and_renews_the_rest(certificates: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    shutil.copytree(certificates, folder)
    before = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.pem")}
    assert make(folder, "-d", "7").returncode == 0
    after = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.pem")}
    same = {str(path) for path in before if before[path] == after[path]}
    assert same == {"ca.pem", "ca-key.pem", *(f"{role}/ca.pem" for role in ROLES)}
    assert verify(folder, "worker", "sslserver") == 0


@pytest.mark.parametrize("options", [("-d", "0"), ("-p", "tls"), ("-d", "x"), ("-n", "a/b"), ("-z",), ("two",)])
def test_wrong_options(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = make(tmp_path / "folder", *options)
    assert done.returncode == 2
    assert done.stderr
    assert not (tmp_path / "folder").exists()


# --- a cluster --------------------------------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.short
@pytest.mark.timeout(600)
def test_a_fit_on_tls_goes_on_behind_a_killed_scheduler_and_equals_a_local_one(
    certificates: Path, tmp_path: Path
) -> None:
    local = ByHandJob(tmp_path / "local")
    local.fit()
    slowly = "compute.cholesky.tile:1:sleep=0.05"
    with by_hand(tmp_path / "servers", certificates, DKRR_FAILPOINTS=slowly) as cluster:
        job = ByHandJob(tmp_path / "job", cluster.address, environment={"DASK_CONFIG": str(certificates / "client")})
        process = job.start_until_tiles(20)
        cluster.scheduler.kill()
        done = finish(process, 30)
        assert done.code == 6, done.err
        assert "start the same job again" in done.err
        # Dask's behaviour: workers that lose their scheduler close, and so do their nannies; nothing of them reconnects
        wait_until(lambda: all(process.poll() is not None for process in cluster.processes), 60)
        written = job.fewer_than_all(20)
        cluster.start_scheduler()
        cluster.start_workers()
        job.fit()
        assert written.items() <= job.tiles().items()  # no valid tile was written again
        assert is_identical(local, job)

        # and so the command line says it
        bare = ByHandJob(tmp_path / "bare", cluster.address)
        done = bare.command().run(90)
        assert done.code == 6
        assert "needs TLS files" in done.err
        stranger = tmp_path / "stranger"
        assert make(stranger).returncode == 0
        for folder, address in ((stranger, cluster.address), (certificates, cluster.address.replace("tls", "tcp"))):
            security = Security(
                require_encryption=True,
                tls_ca_file=str(folder / "ca.pem"),
                tls_client_cert=str(folder / "client/client.pem"),
                tls_client_key=str(folder / "client/client-key.pem"),
            )
            with pytest.raises(ClusterError, match="no connection"):
                connect(address, timeout=10, security=security)
