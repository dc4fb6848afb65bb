"""What makes one tick of a retrain job another one: its rows, and the rules for what becomes of them.

Apart from the tick itself, for a job that finds nothing new needs no more than this.
"""

from __future__ import annotations

from typing import Any

from dkrr.dataset import Dataset
from dkrr.jobs.retrain.incoming import content_hash, deliveries
from dkrr.jobs.retrain.records import hash_of
from dkrr.jobs.retrain.spec import RetrainSpec

__all__ = ["WHITENING", "digests", "held_out_files", "held_out_rows", "tick_key"]

# what of [data] is about the rows of a data set, and not about files
WHITENING = ("standardize",)


def digests(dataset: Dataset) -> list[Any]:
    """What a data set holds, in four values."""
    return [dataset.num_rows, dataset.digest, dataset.digest_y, dataset.digest_weight]


def held_out_rows(spec: RetrainSpec) -> Any:
    """What tells held-out rows in a file or object of their own from others: the bytes of a file, which are read."""
    path = spec.holdout.path
    if path is None or path.startswith(("sklearn:", "generate:")):
        return path
    return [path, held_out_files(spec)]


def held_out_files(spec: RetrainSpec) -> list[list[str]]:
    """Names and content hashes of the files of held-out rows."""
    path = spec.holdout.path
    if path is None or path.startswith(("sklearn:", "generate:")):
        return []
    return [[found.name, content_hash(found)] for found in deliveries(path)]


def tick_key(spec: RetrainSpec, dataset: Dataset) -> str:
    """Hash of the rows and of everything that says what shall become of them."""
    job = spec.job.to_dict()
    what = {name: job[name] for name in ("model", "solver") if name in job}
    parts = (spec.holdout, spec.gate, spec.drift, spec.window)
    whitening = {name: job["data"].get(name) for name in WHITENING}
    rules = [None if part is None else part.model_dump(mode="json") for part in parts]
    return hash_of("tick", digests(dataset), held_out_rows(spec), what, whitening, rules)
