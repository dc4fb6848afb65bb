"""Kubernetes manifests: read, checked against schemas, and turned into containers that this machine can run."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.containers import Container
from tests.cluster.programs import CLUSTER

__all__ = ["FOLDER", "VERSION", "Pod", "documents", "pods", "problem"]

FOLDER = CLUSTER / "kubernetes"
VERSION = "1.31"
"""Of Kubernetes, whose schemas core objects are checked against."""

_CRDS = "operator/deployment/helm/dask-kubernetes-operator/crds"


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of the folder, with the name of its file."""
    for path in sorted(FOLDER.glob("*.yaml")):
        yield from ((path.name, document) for document in yaml.safe_load_all(path.read_text()))


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


@dataclass
class Pod:
    """A pod of a manifest, and the place where it stands."""

    file: str
    owner: str
    spec: dict[str, Any]

    @property
    def name(self) -> str:
        (container,) = self.spec["containers"]
        return str(container["name"])

    def container(self, storage: dict[str, Path], fields: dict[str, str]) -> Container:
        """Its one container, as this machine runs it.

        Parameters
        ----------
        storage
            Folders here by name of the secret, config map or claim.
        fields
            What ``fieldRef`` and the operator would fill in, by field path or variable.
        """
        (container,) = self.spec["containers"]
        assert "command" not in container, "the entry point of the image sets the BLAS environment"
        environment = {name: value for name, value in fields.items() if name.isupper()}
        for entry in container.get("env", []):
            environment[entry["name"]] = entry.get("value") or fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        arguments = [re.sub(r"\$\((\w+)\)", lambda m: environment[m[1]], word) for word in container["args"]]
        mounts, tmpfs = [], []
        sources = {volume["name"]: volume for volume in self.spec["volumes"]}
        for mount in container["volumeMounts"]:
            source = sources[mount["name"]]
            if "emptyDir" in source:
                tmpfs.append(mount["mountPath"])
                continue
            kinds = {"secret": "secretName", "configMap": "name", "persistentVolumeClaim": "claimName"}
            (name,) = (source[kind][key] for kind, key in kinds.items() if kind in source)
            mounts.append((mount["mountPath"], storage[name], mount.get("readOnly", False)))
        rights = {**self.spec["securityContext"], **container["securityContext"]}
        return Container(
            ["with-environment", *arguments],
            {"HOME": "/tmp", "NUMBA_CACHE_DIR": "/tmp/numba", "PYTHONDONTWRITEBYTECODE": "1", **environment},
            mounts,
            tmpfs,
            user=f"{rights['runAsUser']}:{rights['runAsGroup']}",
            read_only=rights["readOnlyRootFilesystem"],
            workdir="/data",
        )


def pods() -> Iterator[Pod]:
    """Every pod that the manifests lead to, in the order of their files."""
    for file, document in documents():
        yield from _pods(file, document["kind"], document)


def _pods(file: str, owner: str, value: Any) -> Iterator[Pod]:
    if isinstance(value, dict):
        if "containers" in value:
            yield Pod(file, owner, value)
        for item in value.values():
            yield from _pods(file, owner, item)
    elif isinstance(value, list):
        for item in value:
            yield from _pods(file, owner, item)
