"""Which rows are held out, decided once for every row and then for good.

The decision about a generation is one document, created when its rows are first seen and never replaced: a row that a
fit has seen cannot become a held-out one by another setting, and a held-out row never enters a fit. Rows are meant by
their numbers, counted over all rows that the data set ever had (:class:`~dkrr.dataset.Generation`), so they keep their
answers when a window slides. Rows that were dropped for missing values have numbers, and answers, too.

A row that comes again is known by its values, a hash of which is kept beside each decision (``holdout/000001.npy``),
also when a window has left it behind or its generation was dropped: it does not become a held-out row after a fit has
seen it, nor a training row after it was held out.

The documents are also what tells that a data set was lost, set back or made anew: it must have had the generations that
were decided about, under these numbers and labels, and of these rows.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.address import join
from dkrr.dataset import Dataset, Generation, read_mask, row_hash_fraction
from dkrr.dataset.generations import pack, unpack
from dkrr.errors import DataError, StoreError
from dkrr.jobs.retrain.spec import HoldoutSpec
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.stores import children, json_bytes

__all__ = [
    "KnownRows",
    "decided_mask",
    "decisions",
    "document_of",
    "known_rows",
    "lost_generations",
    "pack",
    "row_hashes",
    "rows_again",
    "save_mask",
    "unpack",
]

Mask = NDArray[np.bool_]
_NAME = re.compile(r"\d{6}\.json")
# rows come again if more than this share of them is known, beyond what comes again by chance
MOST_AGAIN = 0.1


@dataclass(frozen=True)
class KnownRows:
    """The rows of a generation that was decided about: a hash of each, and which are held out, both (m,)."""

    number: int
    label: str | None
    hashes: NDArray[np.uint64]
    held_out: Mask


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
    known = {item.number: item for item in known_rows(directory)} if _undecided(directory, dataset) else {}
    parts = [
        _decided(directory, dataset, generation, holdout, given or {}, known) for generation in dataset.generations
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=bool)


def _undecided(directory: RunDirectory, dataset: Dataset) -> set[int]:
    return {generation.number for generation in dataset.generations} - set(_decided_numbers(directory))


def known_rows(directory: RunDirectory, dataset: Dataset | None = None) -> list[KnownRows]:
    """The rows of every generation that was decided about, and those of a data set, by number.

    Raises
    ------
    StoreError
        The hashes of a generation are gone.

    Cost
    ----
    8 bytes a row are read; of generations of ``dataset`` that were not decided about their rows.
    """
    found = []
    for document in decisions(directory):
        name = document_of(number := int(document["generation"])).replace(".json", ".npy")
        data = directory.read_bytes(name)
        if data is None:
            raise StoreError(f"{directory.path(name)} is gone", hint="restore it: it tells which rows come again")
        held_out, kept = (unpack(document[key], int(document["num_rows"])) for key in ("held_out", "kept"))
        found.append(KnownRows(number, document["label"], np.load(io.BytesIO(data)), held_out[kept]))
    if dataset is not None:
        decided = {item.number for item in found}
        found += [
            KnownRows(item.number, item.label, row_hashes(dataset, item.start, item.n), np.zeros(item.num_rows, bool))
            for item in dataset.generations
            if item.number not in decided
        ]
    return found


def row_hashes(dataset: Dataset, start: int = 0, stop: int | None = None) -> NDArray[np.uint64]:
    """A number for each row that tells its features and targets from others (m,)."""
    stop = dataset.num_rows if stop is None else stop
    found = np.empty(stop - start, dtype=np.uint64)
    for first, last in dataset.X.blocks():
        low, high = max(first, start), min(last, stop)
        if low >= high:
            continue
        parts = [part.read(low, high) for part in (dataset.X, dataset.y) if part is not None]
        bits = np.ascontiguousarray(np.column_stack(parts) + 0.0).view(np.uint64)  # 0.0 and -0.0 are the same number
        total = np.zeros(len(bits), dtype=np.uint64)
        for column in bits.T:
            total = (total ^ (column >> np.uint64(29)) ^ column) * np.uint64(0x9E3779B97F4A7C15)
            total ^= total >> np.uint64(32)
        found[low - start : high - start] = total
    return found


def rows_again(known: NDArray[np.uint64], rows: NDArray[np.uint64]) -> int:
    """How many rows are among those that are known; 0 where no more are than come again by chance.

    A new row is there by chance as often as the known rows are alike among themselves.
    """
    values, counts = np.unique(known, return_counts=True)
    alike = counts[counts > 1].sum() / max(1, counts.sum())
    again = int(np.count_nonzero(np.isin(rows, values)))
    return again if again > (MOST_AGAIN + alike) * len(rows) else 0


def _as_before(known: Iterable[KnownRows], hashes: NDArray[np.uint64], mask: Mask) -> Mask:
    """Which rows are held out, where those that come again stay what they were: seen, if a fit ever had them."""
    before = list(known)
    if not before:
        return mask
    every = np.concatenate([item.hashes for item in before])
    if not rows_again(every, hashes):
        return mask
    seen = every[~np.concatenate([item.held_out for item in before])]
    return np.where(np.isin(hashes, every), ~np.isin(hashes, seen), mask)


def _decided(
    directory: RunDirectory,
    dataset: Dataset,
    generation: Generation,
    holdout: HoldoutSpec,
    given: dict[int, str],
    known: dict[int, KnownRows],
) -> Mask:
    name = document_of(generation.number)
    found = directory.read(name)
    if found is None:
        mask, hashes = _decide(dataset, generation, holdout, given), row_hashes(dataset, generation.start, generation.n)
        mask[generation.kept] = _as_before(known.values(), hashes, mask[generation.kept])
        known[generation.number] = KnownRows(generation.number, generation.label, hashes, mask[generation.kept])
        buffer = io.BytesIO()
        np.save(buffer, hashes)
        directory.write_bytes(name.replace(".json", ".npy"), buffer.getvalue())
        document: dict[str, Any] = {
            "generation": generation.number,
            "label": generation.label,
            "first_row": generation.first_row,
            "num_rows": len(generation.kept),
            "digest": generation.digest,
            "held_out": pack(mask),
            "kept": pack(generation.kept),
        }
        if directory.create(name, json_bytes(document)):
            return mask[generation.kept]
        found = directory.read(name) or document
    # a window may have cut rows off at the beginning
    whole = unpack(found["held_out"], int(found["num_rows"]))
    skipped = generation.first_row - int(found["first_row"])
    # of the first generation the digest is that of its rows alone
    others = generation.number == 1 and skipped == 0 and found["digest"] != generation.digest
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
