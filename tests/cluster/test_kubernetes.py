"""The manifests against the schemas of Kubernetes, and what every pod may do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from tests.cluster.helpers import CLUSTER

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
