"""The manifests against the schemas of Kubernetes and of the Dask operator, and what their containers run, run here."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.containers import Container, Engine, engine
from tests.cluster.manifests import Pod, documents, pods, problem
from tests.cluster.programs import make_certificates
from tests.faults import chunk_files, wait_until

SERVICE = "dkrr-scheduler"
CORE = {"ConfigMap", "PersistentVolumeClaim", "Service", "Deployment", "NetworkPolicy", "Job", "CronJob"}
FIELDS = {"DASK_WORKER_NAME": "a-name", "metadata.labels['batch.kubernetes.io/job-name']": "dkrr-nightly-1"}


def test_every_object_is_valid() -> None:
    kinds = set()
    for _, document in documents():
        assert problem(document) == ""
        kinds.add(document["kind"])
    assert kinds == CORE | {"DaskCluster", "DaskJob"}


CONTAINER = ("Deployment", "spec", "template", "spec", "containers", 0)


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("cluster.yaml", ["Deployment", "spec", "replicas"], "two"),
        ("cluster.yaml", [*CONTAINER, "securityContext", "readOnlyRootFileSystem"], True),
        ("daskcluster.yaml", ["DaskCluster", "spec", "workers"], {}),
        ("daskjob.yaml", ["DaskJob", "spec", "cluster", "spec", "scheduler", "spec"], None),
    ],
)
def test_a_wrong_field_is_found(file: str, path: list[Any], value: Any) -> None:
    kind, *parents, last = path
    found = next(document for name, document in documents() if (name, document["kind"]) == (file, kind))
    wrong = copy.deepcopy(found)
    table = wrong
    for key in parents:
        table = table[key]
    table[last] = value
    said = problem(wrong)
    assert str(last) in said or repr(value) in said, said


def test_every_pod_has_no_rights_and_every_server_speaks_tls() -> None:
    for pod in pods():
        (container,) = pod.spec["containers"]
        rights = {**pod.spec["securityContext"], **container["securityContext"]}
        assert rights["runAsNonRoot"] is True
        assert rights["readOnlyRootFilesystem"] is True
        assert rights["allowPrivilegeEscalation"] is False
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert pod.spec["automountServiceAccountToken"] is False
        words = [*container["args"], *(entry.get("value", "") for entry in container["env"])]
        assert not [word for word in words if word.startswith("tcp://")]
        assert {"scheduler", "worker", "client"} & {entry["value"].rpartition("/")[2] for entry in container["env"][:1]}
        limit = container["resources"]["limits"]["memory"]
        if pod.name == "worker":  # the nanny ends a worker before the kernel does
            assert (limit, container["args"][container["args"].index("--memory-limit") + 1]) == ("4608Mi", "4GiB")


def test_names_that_objects_call_each_other_by() -> None:
    every = [document for _, document in documents()]
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


# --- what the containers run ------------------------------------------------------------------------------------------


@pytest.fixture
def storage(tmp_path: Path) -> dict[str, Path]:
    """Secrets, the config map with a smaller job, and the claim, as folders."""
    tls = make_certificates(tmp_path / "tls", "-p", "/etc/dkrr")
    for path in [tls, *tls.rglob("*")]:  # fsGroup: a pod's group may read its secrets
        os.chown(path, 0, 10001)
        path.chmod(0o750 if path.is_dir() else 0o640)
    (config,) = [document for _, document in documents() if document["kind"] == "ConfigMap"]
    text = config["data"]["job.toml"]
    assert text.count("n=20480") == 1
    job = tmp_path / "job"
    job.mkdir()
    (job / "job.toml").write_text(text.replace("n=20480", "n=1024"))
    data = tmp_path / "data"
    data.mkdir()
    os.chown(data, 10001, 10001)
    roles = {f"dkrr-tls-{role}": tls / role for role in ("scheduler", "worker", "client")}
    return {**roles, "dkrr-job": job, "dkrr-data": data}


def started(containers: Engine, file: str, storage: dict[str, Path]) -> None:
    """The scheduler and two workers of a manifest; each worker has said that it is registered."""
    found = {pod.name: pod for pod in pods() if pod.file == file}
    processes = [containers.start(found["scheduler"].container(storage, {}))]
    for number in range(2):
        fields = {**FIELDS, "DASK_WORKER_NAME": f"worker-{number}"}
        processes.append(containers.start(found["worker"].container(storage, fields)))
    for process in processes:
        wait_until(lambda process=process: "tls://" in containers.log(process) or process.poll() is not None, 60)
        assert process.poll() is None, containers.logs()


def fitted(containers: Engine, pod: Pod, run: str, storage: dict[str, Path]) -> None:
    ended = containers.run(pod.container(storage, FIELDS))
    assert ended.code == 0, containers.logs()
    model = storage["dkrr-data"] / "runs" / run / "model.zarr"
    assert chunk_files(model)
    assert {path.stat().st_uid for path in model.rglob("*")} == {10001}


@pytest.mark.system
@pytest.mark.short
@pytest.mark.timeout(300)
def test_the_containers_of_the_plain_cluster(tmp_path: Path, storage: dict[str, Path]) -> None:
    with engine(tmp_path / "engine", SERVICE) as containers:
        started(containers, "cluster.yaml", storage)
        (driver,) = [pod for pod in pods() if pod.file == "driver.yaml"]
        fitted(containers, driver, "train", storage)


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("cluster", "driver", "run"),
    [("daskcluster.yaml", "cronjob.yaml", "dkrr-nightly-1"), ("daskjob.yaml", "daskjob.yaml", "train")],
)
def test_the_other_containers(tmp_path: Path, storage: dict[str, Path], cluster: str, driver: str, run: str) -> None:
    with engine(tmp_path / "engine", SERVICE) as containers:
        started(containers, cluster, storage)
        (pod,) = [pod for pod in pods() if (pod.file, pod.name) == (driver, "driver")]
        fitted(containers, pod, run, storage)
        containers.running[0].kill()  # the scheduler: what its workers do is what the manifests rest on
        for worker in containers.running[1:3]:
            assert worker.wait(60) is not None


@pytest.mark.system
@pytest.mark.timeout(120)
def test_a_container_may_do_what_its_manifest_says_and_no_more(tmp_path: Path) -> None:
    with engine(tmp_path / "engine", SERVICE) as containers:
        (tmp_path / "data").mkdir()
        os.chown(tmp_path / "data", 10001, 10001)
        tries = "id -u; for d in / /etc /opt /usr /tmp /data; do if touch $d/x 2>/dev/null; then echo $d; fi; done"
        mounts = [("/data", tmp_path / "data", False)]
        ended = containers.run(Container(["sh", "-c", tries], mounts=mounts, tmpfs=["/tmp"]))
        assert (ended.code, ended.out.split()) == (0, ["10001", "/tmp", "/data"]), ended.err
