"""What a path holds, and whether it is whole: data sets, models, Gram matrices, factors, runs and registered models.

You need it for ``dkrr info``. Describing reads metadata only; verifying reads every byte once, with memory for one
chunk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dkrr.errors import DkrrError, StoreError
from dkrr.jobs.registry import ALIASES, read_aliases
from dkrr.jobs.registry.versions import VERSIONS, check_version, list_versions
from dkrr.jobs.report.facts import result_facts
from dkrr.jobs.runs.directory import RunDirectory, run_kind
from dkrr.jobs.runs.status import look_once
from dkrr.store.files import arrays_below, is_url, join, list_keys, parent_of, read_json

__all__ = ["Description", "describe", "kind_of", "verify"]


@dataclass(frozen=True)
class Description:
    """The kind of thing at ``path`` and the facts about it, in the order in which people want them."""

    kind: str
    path: str
    facts: dict[str, Any]


def describe(path: str) -> Description:
    """Say what is at ``path``.

    Raises
    ------
    StoreError
        Nothing of dkrr is there.
    """
    kind = kind_of(path)
    return Description(kind, path, _KINDS[kind][0](path))


def verify(path: str) -> list[str]:
    """Read everything at ``path`` and return one sentence for each problem; none means that it is whole.

    Raises
    ------
    StoreError
        Nothing of dkrr is there, or its metadata cannot be read.
    """
    return list(_KINDS[kind_of(path)][1](path))


def kind_of(path: str) -> str:
    """What is at ``path``, in one or two words.

    Raises
    ------
    StoreError
        Nothing of dkrr is there.
    """
    document = read_json(path, "zarr.json")
    if document is None:
        if read_json(path, ALIASES) is not None:
            return "registered model"
        if run_kind(path) not in (None, "other"):
            return "run"
        if not is_url(path) and not os.path.lexists(path):
            raise StoreError(f"{path} does not exist", hint="check the path; `dkrr list` shows the runs that there are")
        raise StoreError(
            f"{path} is not a data set, model, Gram matrix, factor or run (no zarr.json)",
            hint="name one of those; `dkrr ingest TABLE DEST` makes a data set",
        )
    attributes = document.get("attributes") if isinstance(document, dict) else None
    if isinstance(attributes, dict):
        if attributes.get("dkrr_format") == "dataset":
            return "data set"
        if attributes.get("format") == "dkrr-model":
            return "model"
        if "tile_size" in attributes and "rows_digest" in attributes:
            return "factor" if "alpha" in attributes else "Gram matrix"
    raise StoreError(f"{path} was not written by dkrr", hint="`dkrr ingest` turns arrays into a data set")


def _describe_dataset(path: str) -> dict[str, Any]:
    from dkrr.dataset import open_dataset

    dataset = open_dataset(path)
    return {
        "rows": dataset.num_rows,
        "features": _count_and_names(dataset.feature_names),
        "targets": _count_and_names(dataset.target_names),
        "weights": dataset.weight_name or "none",
        "classes": "none" if dataset.classes is None else ", ".join(map(str, dataset.classes)),
        "chunks": f"{dataset.X.num_chunks} of {dataset.X.rows_per_chunk} rows",
        "generations": ", ".join(_generation(found) for found in dataset.generations),
        "digest": dataset.digest,
    }


def _generation(found: Any) -> str:
    name = "" if found.label is None else f" {found.label}"
    dropped = f", {found.num_dropped:,} dropped for missing values" if found.num_dropped else ""
    return f"{found.number}{name}: {found.num_rows:,} rows{dropped}"


def _count_and_names(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{len(names)} ({shown})" if names else "0"


def _verify_dataset(path: str) -> Iterator[str]:
    from dkrr.dataset import open_dataset

    try:
        open_dataset(path).verify()
    except DkrrError as exc:
        yield exc.message


def _describe_model(path: str) -> dict[str, Any]:
    from dkrr.models.model import load_model

    model = load_model(path, verify=False)
    solution = model.solution
    facts = {
        "rows": model.num_rows,
        "features": model.num_features,
        "targets": model.num_targets,
        "kernel": "precomputed" if model.kernel is None else model.kernel.to_dict(),
        "scaling": "none" if model.scaling is None else "X and y whitened" if _whitens_y(model) else "X whitened",
        "intercept": _intercept(model),
        "solver": f"{solution.solver}, {solution.precision}" + ("" if solution.converged else ", NOT CONVERGED"),
        "iterations": solution.num_iterations,
        solution.worst[0]: _worst(solution.worst[1]),
    }
    if solution.backward_error:
        facts["backward error"] = _worst(solution.backward_error)
    if not solution.converged or model.provenance.get("is_approximation"):
        facts["note"] = solution.message
    details = {str(name).replace("_", " "): value for name, value in model.provenance.items()}
    return facts | {name: value for name, value in details.items() if name not in facts}


def _whitens_y(model: Any) -> bool:
    """Whether targets are; classes of a loss for labels are not."""
    scaling = model.scaling
    return scaling is not None and bool(scaling.y_mean.any() or (scaling.y_std != 1).any())


def _intercept(model: Any) -> str:
    if model.intercept is None:
        return "none"
    shown = ", ".join(f"{value:.6g}" for value in model.intercept[:8]) + (", ..." if len(model.intercept) > 8 else "")
    return shown if not _whitens_y(model) else f"{shown} (of the whitened target)"


def _worst(values: Any) -> str:
    return f"{np.max(np.asarray(values)):.1e}"


def _verify_model(path: str) -> Iterator[str]:
    from dkrr.models.model import load_model

    try:
        model = load_model(path)  # compares every key with the manifest
        for rows in (model.x_fit, model.dual_coef):
            for start in range(0, rows.num_rows if rows is not None else 0, 4096):
                if rows is not None:
                    rows.read(start, min(start + 4096, rows.num_rows))
    except DkrrError as exc:
        yield exc.message


def _describe_tiles(path: str) -> dict[str, Any]:
    from dkrr.tiles import TileMatrix

    matrix = TileMatrix.open(path)
    total = matrix.grid.num_lower
    return {
        "rows": matrix.grid.n,
        "tiles": f"{total - len(matrix.missing())} of {total}, {matrix.grid.tile_size} rows each",
        "bytes": matrix.num_bytes,
        **{name.replace("_", " "): value for name, value in matrix.array.attributes.items() if name != "tile_size"},
    }


def _verify_tiles(path: str) -> Iterator[str]:
    """Every lower tile: there, its checksum right, finite, sampled entries as they must be; and no file besides."""
    from dkrr.linalg.verify import verify_factor, verify_gram
    from dkrr.tiles import TileMatrix

    matrix = TileMatrix.open(path)
    attributes = matrix.array.attributes
    verify_matrix = verify_factor if "alpha" in attributes else verify_gram
    yield from verify_matrix(matrix, _operator_of(path, attributes))


def _operator_of(path: str, attributes: dict[str, Any]) -> Any:
    """The operator that tiles were made from, when its kernel is known and its rows lie in the same store, or None."""
    from dkrr.dataset import open_dataset
    from dkrr.kernels import kernel_from_dict
    from dkrr.linalg.operators import RidgeOperator, Rows
    from dkrr.tiles import TileGrid

    if attributes["kernel"] == {"kernel": "precomputed"}:
        return None
    center = attributes["center"]
    for candidate in arrays_below(parent_of(parent_of(path)), "data", "rows"):
        try:
            dataset = open_dataset(candidate)
            if dataset.digest != attributes["rows_digest"]:
                continue
            kernel = kernel_from_dict(attributes["kernel"])
        except DkrrError:
            continue
        weight_digest = attributes.get("weight_digest")
        if weight_digest not in (None, dataset.digest_weight):
            continue
        return RidgeOperator(
            grid=TileGrid(attributes["n"], attributes["tile_size"]),
            alpha=attributes.get("alpha", 0.0),
            kernel=kernel,
            rows=Rows.of(dataset, None if center is None else tuple(center)),
            weighted=weight_digest is not None,
        )
    return None


def _describe_run(path: str) -> dict[str, Any]:
    run = RunDirectory(path)
    job, plan, result = run.read("job.json") or {}, run.read("plan.json") or {}, run.read("result.json")
    facts = {
        "data": job.get("data", {}).get("path"),
        "kernel": plan.get("kernel") or job.get("model", {}).get("kernel"),
        "state": (state := look_once(run, beat_seconds=0.0).state),
    }
    if result is None:
        return facts
    if state != "finished":  # its figures are those of a fit that came before
        return facts | {
            "earlier fit": f"{result['plan']['num_rows']:,} rows, finished; {result['model_path']} is its model"
        }
    kept = ", ".join(result["kept"]) or "only the model"
    return facts | {"model": result["model_path"], **dict(result_facts(plan, result)), "kept": kept}


def _verify_run(path: str) -> Iterator[str]:
    """The model, what the run keeps in the store, its documents; and nothing left by an interrupted write."""
    for name in ("job.json", "plan.json", "result.json"):
        try:
            if read_json(path, name) is None:
                yield f"{name} is missing"
        except DkrrError as exc:
            yield exc.message
    model = join(path, "model.zarr")
    try:
        parts = [model, *(RunDirectory(path).read("result.json") or {}).get("kept", {})]
        for part in parts:
            yield from (problem if part == model else f"{part}: {problem}" for problem in verify(part))
    except DkrrError as exc:
        yield exc.message
    for key in list_keys(path):
        if ".partial" in key:
            yield f"{key} is left by an interrupted write"


def _describe_registered(path: str) -> dict[str, Any]:
    aliases, versions = read_aliases(path), list_versions(path)
    return {
        "aliases": ", ".join(f"{name} {version}" for name, version in sorted(aliases.targets.items())) or "none",
        "versions": ", ".join(version.id for version in versions) or "none",
        "changes": aliases.epoch,
    }


def _verify_registered(path: str) -> Iterator[str]:
    versions = {version.id: version for version in list_versions(path)}
    for name, target in sorted(read_aliases(path).targets.items()):
        if target not in versions:
            yield f"{name} is version {target}, which is missing or not complete"
    for version in versions.values():
        try:
            check_version(version)
        except DkrrError as exc:
            yield exc.message
    for key in list_keys(join(path, VERSIONS)):
        if ".partial" in key:
            yield f"{VERSIONS}/{key} is left by an interrupted write"


_KINDS: dict[str, tuple[Callable[[str], dict[str, Any]], Callable[[str], Iterator[str]]]] = {
    "data set": (_describe_dataset, _verify_dataset),
    "model": (_describe_model, _verify_model),
    "Gram matrix": (_describe_tiles, _verify_tiles),
    "factor": (_describe_tiles, _verify_tiles),
    "run": (_describe_run, _verify_run),
    "registered model": (_describe_registered, _verify_registered),
}
