"""Which rows are held out, decided once for every row and then for good.

The decision about a generation is one document, created when its rows are first seen and never replaced: a row that a
fit has seen cannot become a held-out one by another setting, and a held-out row never enters a fit. Rows are meant by
their numbers, counted over all rows that the data set ever had (:class:`~dkrr.dataset.Generation`), so they keep their
answers when a window slides. Rows that were dropped for missing values have numbers, and answers, too.

The documents are also what tells that a data set was lost, set back or made anew: it must have had the generations that
were decided about, under these numbers and labels, and of these rows.
"""

from __future__ import annotations

import hashlib
import io
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset, Generation, read_mask, row_hash_fraction
from dkrr.dataset.generations import pack, unpack
from dkrr.errors import DataError, StoreError
from dkrr.jobs.retrain.spec import HoldoutSpec
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.store.files import children, join, json_bytes

__all__ = ["decided_mask", "decisions", "document_of", "lost_generations", "pack", "save_mask", "unpack"]

Mask = NDArray[np.bool_]
_NAME = re.compile(r"\d{6}\.json")


def document_of(number: int) -> str:
    """Where the decision about a generation is."""
    return f"holdout/{number:06d}.json"


def lost_generations(directory: RunDirectory, dataset: Dataset | None) -> list[int]:
    """Numbers of the generations that were decided about and that the data set, as it is now, never had."""
    return [
        number for number in _decided_numbers(directory) if dataset is None or number >= dataset.counters.generation
    ]


def decisions(directory: RunDirectory) -> list[dict[str, Any]]:
    """The documents about all generations that were decided about, in their order."""
    found = (directory.read(document_of(number)) for number in _decided_numbers(directory))
    return [document for document in found if document is not None]


def _decided_numbers(directory: RunDirectory) -> list[int]:
    names = children(join(directory.location, "holdout"))
    return sorted(int(name[:6]) for name in names if _NAME.fullmatch(name))


def decided_mask(
    directory: RunDirectory, dataset: Dataset, holdout: HoldoutSpec, given: dict[int, str] | None = None
) -> Mask:
    """True for the held-out rows of a data set (n,); decides about generations that nobody has decided about.

    Parameters
    ----------
    given
        Packed masks by the number of their generation, for a mask that is a column of the batches.

    Raises
    ------
    DataError
        A mask file that is too short.
    """
    parts = [_decided(directory, dataset, generation, holdout, given or {}) for generation in dataset.generations]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=bool)


def _decided(
    directory: RunDirectory, dataset: Dataset, generation: Generation, holdout: HoldoutSpec, given: dict[int, str]
) -> Mask:
    name = document_of(generation.number)
    found = directory.read(name)
    if found is None:
        mask = _decide(dataset, generation, holdout, given)
        document: dict[str, Any] = {
            "generation": generation.number,
            "label": generation.label,
            "first_row": generation.first_row,
            "num_rows": len(generation.kept),
            "digest": generation.digest,
            "held_out": pack(mask),
        }
        if directory.create(name, json_bytes(document)):
            return mask[generation.kept]
        found = directory.read(name) or document
    # a window may have cut rows off at the beginning
    whole = unpack(found["held_out"], int(found["num_rows"]))
    skipped = generation.first_row - int(found["first_row"])
    # of the first generation the digest is that of its rows alone; older documents have none
    others = generation.number == 1 and skipped == 0 and found.get("digest", generation.digest) != generation.digest
    is_known = skipped >= 0 and skipped + len(generation.kept) == len(whole) and found["label"] == generation.label
    if others or not is_known:
        raise StoreError(
            f"generation {generation.number} of {dataset.path} ({generation.label or 'no label'}) has "
            f"{len(generation.kept):,} rows from {generation.first_row:,} on{', others' if others else ''}; {name} of "
            f"{directory.location} ({found['label'] or 'no label'}) knows {len(whole):,} from "
            f"{int(found['first_row']):,} on",
            hint="the data set was made anew: restore it, or remove it and start again while its files are there; to "
            "begin a new one, give the model another name, or remove its folder retrain",
        )
    return whole[skipped:][generation.kept]


def _decide(dataset: Dataset, generation: Generation, holdout: HoldoutSpec, given: dict[int, str]) -> Mask:
    first, m = generation.first_row, len(generation.kept)
    if holdout.fraction is not None:
        return row_hash_fraction(first, first + m, holdout.fraction)
    if holdout.mask is not None and holdout.mask_is_file:
        needed = dataset.counters.row
        try:
            return read_mask(str(holdout.mask), needed)[first : first + m]
        except DataError as exc:
            raise DataError(
                f"{exc.message}: one value for each row that the data set ever had", hint="extend the mask first"
            ) from exc
    if holdout.mask is not None:
        return unpack(given[generation.number], m)
    return np.zeros(m, dtype=bool)


def save_mask(directory: RunDirectory, held_out: Mask, kept: Mask) -> tuple[str, str]:
    """Write a mask of the rows that were ``kept`` as the file that a job names; its path or address, and its digest."""
    mask = np.zeros(len(kept), dtype=bool)
    mask[kept] = held_out
    digest = hashlib.sha256(np.packbits(mask).tobytes() + len(mask).to_bytes(8, "little")).hexdigest()
    name = f"masks/{digest[:32]}.npy"
    if not directory.has(name):
        buffer = io.BytesIO()
        np.save(buffer, mask)
        directory.write_bytes(name, buffer.getvalue())
    return directory.path(name), digest
