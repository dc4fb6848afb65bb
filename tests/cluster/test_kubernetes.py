"""The manifests against the schemas of Kubernetes and of the Dask operator, and what every pod may do."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.programs import CLUSTER

SERVICE = "dkrr-scheduler"
CORE = {"ConfigMap", "PersistentVolumeClaim", "Service", "Deployment", "NetworkPolicy", "Job", "CronJob"}
# of Kubernetes, whose schemas core objects are checked against
VERSION = "1.31"
_CRDS = "operator/deployment/helm/dask-kubernetes-operator/crds"


def documents() -> list[dict[str, Any]]:
    """Every object of the folder."""
    paths = sorted((CLUSTER / "kubernetes").glob("*.yaml"))
    return [document for path in paths for document in yaml.safe_load_all(path.read_text())]


def problem(document: dict[str, Any]) -> str:
    """What Kubernetes, or the Dask operator, would not accept in an object, unknown fields included; "" for nothing."""
    import kubernetes_validate
    from jsonschema.exceptions import best_match

    if document["apiVersion"].startswith("kubernetes.dask.org/"):
        error = best_match(_custom_resource(document["kind"]).iter_errors(document))
        return "" if error is None else str(error.message)
    try:
        kubernetes_validate.validate(document, VERSION, strict=True)
    except kubernetes_validate.ValidationError as exc:
        return str(exc.message)
    return ""


@cache
def _custom_resource(kind: str) -> Any:
    """A validator by the schema in the operator's package, of which nothing is imported."""
    import jsonschema

    specification = importlib.util.find_spec("dask_kubernetes")
    assert specification is not None, "dask-kubernetes is not installed: pip install -e '.[test]'"
    assert specification.submodule_search_locations is not None
    text = (Path(specification.submodule_search_locations[0]) / _CRDS / f"{kind.lower()}.yaml").read_text()
    definition = yaml.load(text, yaml.CSafeLoader)  # half a megabyte
    assert definition["spec"]["names"]["kind"] == kind
    (version,) = definition["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    schema["properties"] |= {name: {"type": "string"} for name in ("apiVersion", "kind")}
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return jsonschema.Draft202012Validator(_strict(schema))


def _strict(schema: Any) -> Any:
    """The same in JSON schema, with what the API server would prune in silence refused."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
        if not open_ended:
            found["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        found["anyOf"] = [{"type": "integer"}, {"type": "string"}]
        found.pop("type", None)
    return found


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """Every specification of a pod below a value."""
    if isinstance(value, dict) and "containers" in value:
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from pods(item)


def test_every_object_is_valid() -> None:
    for document in documents():
        assert problem(document) == ""
    assert {document["kind"] for document in documents()} == CORE | {"DaskCluster", "DaskJob"}
    wrong = next(document for document in documents() if document["kind"] == "DaskCluster")
    wrong["spec"]["workers"] = {}
    assert "workers" in problem(wrong)


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
