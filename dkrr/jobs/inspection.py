"""What a path holds, and whether it is whole: data sets, models, Gram matrices, factors, runs and registered models.

You need it for ``dkrr info``. Describing reads metadata only; verifying reads every byte once, with memory for one
chunk.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dkrr.dataset import open_dataset
from dkrr.errors import DkrrError, StoreError
from dkrr.jobs.facts import result_facts
from dkrr.jobs.registry import ALIASES, VERSIONS, NamedModel, check_version
from dkrr.jobs.run_directory import RunDirectory, run_kind
from dkrr.jobs.status import look_once
from dkrr.kernels import kernel_from_dict
from dkrr.linalg.gram import verify_tiles
from dkrr.linalg.operators import RidgeOperator, Rows
from dkrr.markup import listed
from dkrr.models.model import BLOCK_ROWS, load_model
from dkrr.store.files import arrays_below, is_url, join, list_keys, parent_of, read_json
from dkrr.tiles import TileGrid, TileMatrix


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
        Nothing of dkrr is there.
    """
    kind, problems = kind_of(path), list[str]()
    try:
        problems.extend(_KINDS[kind][1](path) or ())
    except DkrrError as exc:
        problems.append(exc.message)
    return problems


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
    dataset = open_dataset(path)
    generations = []
    for found in dataset.generations:
        name = "" if found.label is None else f" {found.label}"
        dropped = f", {found.num_dropped:,} dropped for missing values" if found.num_dropped else ""
        generations.append(f"{found.number}{name}: {found.num_rows:,} rows{dropped}")
    return {
        "rows": dataset.num_rows,
        "features": f"{dataset.num_features} ({listed(dataset.feature_names)})",
        "targets": f"{dataset.num_targets} ({listed(dataset.target_names)})" if dataset.num_targets else "0",
        "weights": dataset.weight_name or "none",
        "classes": "none" if dataset.classes is None else ", ".join(map(str, dataset.classes)),
        "chunks": f"{dataset.X.num_chunks} of {dataset.X.rows_per_chunk} rows",
        "generations": ", ".join(generations),
        "digest": dataset.digest,
    }


def _describe_model(path: str) -> dict[str, Any]:
    model = load_model(path, verify=False)
    solution, scaling, intercept = model.solution, model.scaling, model.intercept
    # targets of a loss for labels are classes, and not whitened
    whitens_y = scaling is not None and bool(scaling.y_mean.any() or (scaling.y_std != 1).any())
    of_what, (worst, exact) = " (of the whitened target)" if whitens_y else "", solution.worst
    facts = {
        "rows": model.num_rows,
        "features": model.num_features,
        "targets": model.num_targets,
        "kernel": "precomputed" if model.kernel is None else model.kernel.to_dict(),
        "scaling": "none" if scaling is None else "X and y whitened" if whitens_y else "X whitened",
        "intercept": "none" if intercept is None else listed(intercept.tolist(), ".6g") + of_what,
        "solver": f"{solution.solver}, {solution.precision}" + ("" if solution.converged else ", NOT CONVERGED"),
        "iterations": solution.num_iterations,
        worst: f"{exact:.1e}",
    }
    if solution.backward_error:
        facts["backward error"] = f"{max(solution.backward_error):.1e}"
    if not solution.converged or model.provenance.get("is_approximation"):
        facts["note"] = solution.message
    details = {str(name).replace("_", " "): value for name, value in model.provenance.items()}
    return facts | {name: value for name, value in details.items() if name not in facts}


def _verify_model(path: str) -> None:
    model = load_model(path)  # compares every key with the manifest
    for rows in (part for part in (model.x_fit, model.dual_coef) if part is not None):
        for start in range(0, rows.num_rows, BLOCK_ROWS):
            rows.read(start, min(start + BLOCK_ROWS, rows.num_rows))


def _describe_tiles(path: str) -> dict[str, Any]:
    matrix = TileMatrix.open(path)
    total = matrix.grid.num_lower
    return {
        "rows": matrix.grid.n,
        "tiles": f"{total - len(matrix.missing())} of {total}, {matrix.grid.tile_size} rows each",
        "bytes": matrix.num_bytes,
        **{name.replace("_", " "): value for name, value in matrix.array.attributes.items() if name != "tile_size"},
    }


def _verify_tiles(path: str) -> Iterable[str]:
    """Every lower tile: there, its checksum right, finite, sampled entries as they must be; and no file besides."""
    matrix = TileMatrix.open(path)
    attributes = matrix.array.attributes
    return verify_tiles(matrix, _operator_of(path, attributes), is_factor="alpha" in attributes)


def _operator_of(path: str, attributes: dict[str, Any]) -> Any:
    """The operator that tiles were made from, when its kernel is known and its rows lie in the same store, or None."""
    center, weight_digest = attributes["center"], attributes.get("weight_digest")
    is_given = attributes["kernel"] == {"kernel": "precomputed"}
    for candidate in () if is_given else arrays_below(parent_of(parent_of(path)), "data", "rows"):
        with contextlib.suppress(DkrrError):
            dataset, kernel = open_dataset(candidate), kernel_from_dict(attributes["kernel"])
            if dataset.digest == attributes["rows_digest"] and weight_digest in (None, dataset.digest_weight):
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
    kept: Iterable[str] = ()  # of result.json, which is the last
    for name in ("job.json", "plan.json", "result.json"):
        try:
            document = RunDirectory(path).read(name)
        except DkrrError as exc:
            yield exc.message
            continue
        kept = (document or {}).get("kept", ())
        if document is None:
            yield f"{name} is missing"
    yield from verify(join(path, "model.zarr"))
    for location in kept:
        yield from (f"{location}: {problem}" for problem in verify(location))
    yield from _partial(path)


def _partial(path: str, below: str = "") -> Iterator[str]:
    yield from (f"{below}{key} is left by an interrupted write" for key in list_keys(path) if ".partial" in key)


def _describe_registered(path: str) -> dict[str, Any]:
    model = NamedModel(path)
    aliases = model.aliases()
    return {
        "aliases": ", ".join(f"{name} {version}" for name, version in sorted(aliases.targets.items())) or "none",
        "versions": ", ".join(version.id for version in model.versions()) or "none",
        "changes": aliases.epoch,
    }


def _verify_registered(path: str) -> Iterator[str]:
    versions = {version.id: version for version in NamedModel(path).versions()}
    for name, target in sorted(NamedModel(path).aliases().targets.items()):
        if target not in versions:
            yield f"{name} is version {target}, which is missing or not complete"
    for version in versions.values():
        try:
            check_version(version)
        except DkrrError as exc:
            yield exc.message
    yield from _partial(join(path, VERSIONS), f"{VERSIONS}/")


_KINDS: dict[str, tuple[Callable[[str], dict[str, Any]], Callable[[str], Iterable[str] | None]]] = {
    "data set": (_describe_dataset, lambda path: open_dataset(path).verify()),
    "model": (_describe_model, _verify_model),
    "Gram matrix": (_describe_tiles, _verify_tiles),
    "factor": (_describe_tiles, _verify_tiles),
    "run": (_describe_run, _verify_run),
    "registered model": (_describe_registered, _verify_registered),
}
