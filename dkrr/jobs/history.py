"""What was decided about rows, once and for good: which batches came in, and which of their rows are held out.

The decision about a generation of the data set is one document, ``holdout/000001.json``, created when its rows are
first seen and never replaced, with a hash of each row beside it. From these alone follows

- which batches are in the data set: the label of a generation has the name of a file and the beginning of its hash;
- which rows are held out. Rows are meant by their numbers, counted over all that the data set ever had
  (:class:`~dkrr.dataset.Generation`), so they keep their answers when a window slides. Rows that were dropped for
  missing values have numbers, and answers, too;
- which rows come again, in whatever bytes and order: those that the data set has, or had until its window left them
  behind, are refused. Rows of a generation that was dropped by hand may come again, and stay what they were: a row that
  a fit has seen is never held out, and a held-out row never enters a fit;
- that a data set was lost, set back or made anew: it must have had these generations, and of these rows.

``batches.json`` holds what is not worth a document of its own, and is made again where it was lost: the bytes that each
file had, what was refused and by which rules, and which generations are gone.

And how far rows are from those a lineage began with, column by column.

The reference is taken once and frozen: means and standard deviations of all rows, the distribution function of each
column and the correlations of features with targets on a sample of about 20,000 rows. New rows are compared with it by
four statistics, each with a limit that is widened by what chance does to a batch of m rows:

    shift        |mean - mean_ref| / std_ref                      + 4 c
    scale        max(std / std_ref, std_ref / std)                * (1 + 4 c)
    distance     sup |F - F_ref|  (Kolmogorov-Smirnov)            + 2 / sqrt(m)
    correlation  |corr(x, y) - corr_ref(x, y)|                    + 4 / sqrt(m)

    c = 1 / sqrt(m) + sqrt((1 - p) / (m p)),   p = share of the frozen rows that have not the most common value

The second term of c is the relative error of a count of such rows. It is nothing for a column of numbers that are all
different, and much for a flag that is rare: a hundred rows have it once or not at all. Where p is 0, the column was
constant: it had no unit to measure by, so its distribution alone is compared, that is the share of rows with another
value. So it is where a column of new rows is constant, unless p is beyond the limit of the distance itself.

A column that was exchanged for another one differs in distribution, or, where all columns are alike, in what it has to
do with the target. Cost: one pass over the rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dkrr.dataset import Dataset, Floats, Generation, ingest, open_dataset, read_mask, row_hash_fraction
from dkrr.dataset.dataset import pack, unpack
from dkrr.dataset.rows import decode_floats
from dkrr.dataset.sources import open_table
from dkrr.dataset.table import column_number, is_place
from dkrr.dataset.writer import is_finished, remove_dataset
from dkrr.errors import (
    DamagedChunkError,
    DataError,
    InterruptedRunError,
    ParameterError,
    StoreError,
    StoreMismatchError,
)
from dkrr.jobs.prepare import check_columns
from dkrr.jobs.retrain_spec import Delivery, DriftSpec, RetrainSpec
from dkrr.jobs.run_directory import RunDirectory, utc_now
from dkrr.store.documents import plain
from dkrr.store.files import children, delete_key, is_below, is_url, join, json_bytes, parse_json, place

logger = logging.getLogger("dkrr.retrain")

INITIAL, MARKED, HELD_OUT = "initial", "marked", "held-out"
BATCHES, LAST = "batches.json", "last.json"
PREFIX = 12  # characters of the hash of a batch that are in the label of its generation
_LABEL = re.compile(rf"(.+) ([0-9a-f]{{{PREFIX}}})", re.DOTALL)
_DECISION = re.compile(r"([0-9]{6,})\.json")  # which rows of a generation are held out
_DRAFT = re.compile(rf"(?:[0-9a-f]{{{PREFIX}}}|{INITIAL}|{MARKED}|{HELD_OUT})\.zarr(\.lock)?")
# rows come again if more than this share of them is known, beyond what comes again by chance
MOST_AGAIN = 0.1
# different rows that have to be held out on average before rows alike are held out together
MIN_ALIKE = 10

Mask = NDArray[np.bool_]
Hashes = NDArray[np.uint64]
Rules = tuple[str, list[int]]


@dataclass(frozen=True)
class KnownRows:
    """The rows of a generation: a hash of each, and which are held out, both (m,)."""

    number: int
    label: str | None
    hashes: Hashes
    held_out: Mask


def hash_of(*parts: Any) -> str:
    """SHA-256 of plain data, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def open_rows(spec: RetrainSpec) -> Dataset | None:
    """The data set as it is now; None before it is made. Reads metadata only.

    Raises
    ------
    JobFileError
        ``[data]`` names other columns.
    """
    if not is_finished(spec.retrain.data):
        return None
    dataset = open_dataset(spec.retrain.data)
    check_columns(spec.data, dataset, has_numbers=False)  # numbers are those of columns of the files
    return dataset


def digests(dataset: Dataset) -> list[Any]:
    """What a data set holds, in four values, and what its columns and classes are called."""
    names = [dataset.feature_names, dataset.target_names, dataset.classes]
    return [dataset.num_rows, dataset.digest, dataset.digest_y, dataset.digest_weight, plain(names)]


class History:
    """The decisions about the rows of a retrain job, as its directory has them.

    Parameters
    ----------
    scratch
        A folder for drafts, where nothing else may be written: that of a dry run.
    """

    def __init__(self, spec: RetrainSpec, scratch: str | None = None) -> None:
        self.spec, self.is_dry = spec, scratch is not None
        self.directory = RunDirectory(spec.directory)
        self.scratch = scratch or join(spec.directory, "staged")
        document = {"files": {}, "refused": {}, "gone": None, "labels": {}} | (self.directory.read(BATCHES) or {})
        self.files: dict[str, Any] = document["files"]
        self.refused: dict[str, Any] = document["refused"]
        self.gone: list[int] | None = document["gone"]
        found = self.directory.read("reference.json")
        self.reference = None if found is None else Reference(found)
        self.batches: dict[str, tuple[str, int]] = {}  # name and generation, by the beginning of the hash
        self.labels: dict[int, str | None] = {}
        self._known: dict[int, KnownRows] = {}
        self._foreseen: list[KnownRows] = []  # what a dry run would have appended
        known = {int(number): label for number, label in document["labels"].items()}
        decided = filter(None, (_DECISION.fullmatch(name) for name in children(join(spec.directory, "holdout"))))
        for number in [int(name[1]) for name in decided]:
            self._note(number, known[number] if number in known else self._decision(number)["label"])
        for number in known.keys() - self.labels.keys():
            self._kept(number, ".json")

    def _note(self, number: int, label: str | None) -> None:
        self.labels[number] = label
        self._note_batch(number, label)

    def _note_batch(self, number: int, label: str | None) -> None:
        if named := _LABEL.fullmatch(label or ""):
            self.batches[named[2]] = named[1], number

    def write(self) -> None:
        """Replace ``batches.json``, at the end of a stage."""
        if not self.is_dry:
            document = {"files": self.files, "refused": self.refused, "gone": self.gone, "labels": self.labels}
            self.directory.write(BATCHES, plain(document))

    def _path(self, number: int, suffix: str) -> str:
        return f"holdout/{number:06d}{suffix}"

    def _kept(self, number: int, suffix: str) -> bytes:
        data = self.directory.read_bytes(name := self._path(number, suffix))
        if data is None:
            raise StoreError(f"{name} of {self.directory.location} is gone: it tells rows again", hint="restore it")
        return data

    def _decision(self, number: int) -> dict[str, Any]:
        found = self._kept(number, ".json")
        return dict(parse_json(found, self.directory.location, self._path(number, ".json")))

    def known_rows(self, dataset: Dataset | None = None) -> list[KnownRows]:
        """The rows of every generation that was decided about, and those of a data set; 8 bytes a row are read.

        Raises
        ------
        StoreError
            The hashes of a generation are gone, or damaged.
        """
        for number in self.labels.keys() - self._known.keys():
            document, octets = self._decision(number), self._kept(number, ".npy")
            if document.get("hashes") not in (None, f"{crc32c(octets):08x}"):
                name = self._path(number, ".npy")
                raise StoreError(
                    f"{name} of {self.directory.location} is damaged: it tells rows again", hint="restore it"
                )
            hashes = np.load(io.BytesIO(octets))
            held_out, kept = (unpack(document[key], document["num_rows"]) for key in ("held_out", "kept"))
            self._known[number] = KnownRows(number, document["label"], hashes, held_out[kept])
        found = [self._known[number] for number in sorted(self._known)]
        if dataset is not None:
            for item in (item for item in dataset.generations if item.number not in self.labels):
                hashes = _row_hashes(dataset, item.start, item.n)
                found.append(KnownRows(item.number, item.label, hashes, np.zeros(len(hashes), dtype=bool)))
        return found

    def freeze_reference(self, dataset: Dataset) -> Reference:
        """What new rows are compared with: the statistics of the first that the data set had.

        Of rows that a person dropped, since they were wrong, nothing is left.
        """
        made_of = set(() if self.reference is None else self.reference.document.get("generations", ()))
        if dropped := made_of - self._not_again(dataset):
            numbers = ", ".join(map(str, sorted(dropped)))
            logger.warning("generation %s was dropped: rows are compared with those that are there now", numbers)
        if self.reference is None or dropped:
            self.reference = Reference.of(dataset)
            self.reference.document["generations"] = sorted(_numbers(dataset))
            if not self.is_dry:
                self.directory.write("reference.json", self.reference.document)
        return self.reference

    # --- held-out rows ------------------------------------------------------------------------------------------------

    @property
    def has_mask_file(self) -> bool:
        """Whether a file marks the rows that are held out: of all batches that come together at once."""
        return self.spec.holdout.mask is not None and self.spec.holdout.mask_is_file

    def held_out(self, dataset: Dataset, *, decides: bool = True) -> Mask:
        """Which rows of a data set are held out (n,); generations that are new are decided about now.

        Where it does not decide yet, nothing of them is held out.

        Raises
        ------
        StoreError
            The data set was made anew.
        DataError
            What says which rows are held out does not say it of all.
        """
        parts, before = list[Mask](), list[list[int]]()
        for generation in dataset.generations:
            if generation.number not in self.labels and not decides:
                self._note_batch(generation.number, generation.label)
                parts.append(np.zeros(generation.num_rows, dtype=bool))
                continue
            if generation.number not in self.labels:
                self._decide(dataset, generation, before)
            found = self._decision(generation.number)
            whole, kept = unpack(found["held_out"], found["num_rows"]), generation.kept
            skipped = generation.first_row - found["first_row"]  # a window may have cut rows off at the beginning
            # a digest is that of all rows up to the last of the generation: of the first one of its rows alone
            known = found.get("before", [] if generation.number == 1 else None) == before and skipped == 0
            others = known and found["digest"] != generation.digest
            if others or found["label"] != generation.label or skipped < 0 or skipped + len(kept) != len(whole):
                raise StoreError(
                    f"generation {generation.number} of {dataset.path} ({generation.label or 'no label'}) has "
                    f"{len(kept):,} rows from {generation.first_row:,} on{', others' if others else ''}; "
                    f"{self._path(generation.number, '.json')} of {self.directory.location} "
                    f"({found['label'] or 'no label'}) knows {len(whole):,} from {found['first_row']:,} on",
                    hint="the data set was made anew: restore it, or remove it and start again while its files are "
                    "there; to begin a new one, give the model another name, or remove its folder retrain",
                )
            parts.append(whole[skipped:][kept])
            before.append([generation.number, generation.first_row, generation.n])
        return np.concatenate(parts)

    def _decide(self, dataset: Dataset, generation: Generation, before: list[list[int]]) -> None:
        holdout, first, kept = self.spec.holdout, generation.first_row, generation.kept
        mask = np.zeros(m := len(kept), dtype=bool)
        if holdout.fraction is not None:
            mask = row_hash_fraction(first, first + m, holdout.fraction)
        elif self.has_mask_file:
            try:
                mask = read_mask(str(holdout.mask), dataset.next_row)[first : first + m]
            except DataError as exc:
                raise DataError(
                    f"{exc.message}: one value for each row that the data set ever had",
                    hint="extend the mask, or leave out what is no row of it",
                ) from exc
        elif holdout.mask is not None:
            mask = self._marked(dataset, generation)
        hashes, earlier = _row_hashes(dataset, generation.start, generation.n), self.known_rows()
        mask = np.array(mask)
        if holdout.fraction is not None:
            # rows alike are held out together, where they are not so few that chance rules
            values, first_of, of = np.unique(hashes, return_index=True, return_inverse=True)
            if len(values) * holdout.fraction >= MIN_ALIKE:
                mask[kept] = mask[kept][first_of][of]
        known = np.concatenate([np.zeros(0, np.uint64), *(item.hashes for item in earlier)])
        seen = np.concatenate([np.zeros(0, np.uint64), *(item.hashes[~item.held_out] for item in earlier)])
        # no fit sees a row that was held out; one that a fit may have seen judges none, unless it is there by chance
        stays = np.isin(hashes, known) & ~np.isin(hashes, seen)
        mask[kept] |= stays
        # rows of a generation that was dropped and delivered again are alike, and not by chance
        if _come_again(hashes, earlier, most=0.0, present=_numbers(dataset)):
            mask[kept] &= stays | ~np.isin(hashes, seen)
        np.save(buffer := io.BytesIO(), hashes)
        octets = buffer.getvalue()
        self.directory.write_bytes(self._path(generation.number, ".npy"), octets)
        document = {
            "generation": generation.number,
            "label": generation.label,
            "first_row": first,
            "num_rows": m,
            "digest": generation.digest,
            "before": before,
            "held_out": pack(mask),
            "kept": pack(kept),
            "hashes": f"{crc32c(octets):08x}",
        }
        self.directory.create(self._path(generation.number, ".json"), json_bytes(document))
        self._note(generation.number, generation.label)

    def _marked(self, dataset: Dataset, generation: Generation) -> Mask:
        """The column of the file whose rows a generation has; that of its label is tried first.

        Raises
        ------
        DataError
            No file has these rows: which of them are held out is not known.
        """
        m, hashes = len(generation.kept), _row_hashes(dataset, generation.start, generation.n)
        label, found = generation.label or "", self.spec.deliveries()
        if self.spec.initial is not None:
            found.insert(0, Delivery(INITIAL, self.spec.initial, None))
        for delivery in sorted(found, key=lambda item: item.name not in (label, label.rpartition(" ")[0])):
            try:
                staged = self.read(delivery.location, MARKED, dataset)
            except (DataError, ParameterError):
                continue
            kept = staged.kept
            if np.array_equal(_row_hashes(staged)[-len(hashes) :], hashes) and np.array_equal(
                kept[-m:], generation.kept
            ):
                return self._mask_column(delivery.location, len(kept))[-m:]
        raise DataError(
            f"[holdout] mask: no file of {self.spec.retrain.incoming} has the {generation.num_rows:,} rows of "
            f"generation {generation.number} of {dataset.path} ({generation.label or 'no label'}), so which of them "
            f"are held out (column {self.spec.holdout.mask!r}) is not known",
            hint="drop the generation (`dkrr ingest --drop-generation`) and deliver its file, or give a mask file",
        )

    def _mask_column(self, location: str, num_rows: int) -> Mask:
        options, column = self.spec.data.text_options(), self.spec.holdout.mask
        table = open_table(location, **options, named=[column])
        is_number = is_place(column, table.names)
        if table.is_named and is_number:  # another file may have another column there
            name = table.names[column_number(table, column, "mask")]
            raise DataError(
                f"[holdout] mask = {column!r} is a number, and the columns of {location} have names, this one {name!r}",
                hint=f"set mask = {name!r}: in another file it may stand elsewhere",
            )
        if not (table.is_named or is_number):
            raise DataError(
                f"[holdout] mask = {column!r} is a name, and the columns of {location} have none",
                hint="give the number of the column, or deliver files with names",
            )
        return read_mask(location, num_rows, column=column, **options)

    def held_out_again(self, like: Dataset, known: list[KnownRows]) -> str:
        """Which of the held-out rows of a file of their own are known as rows to train on, in words; "" for none.

        Cost: the held-out rows are read.
        """
        if self.spec.holdout.path is None:
            return ""
        mine = _row_hashes(self.read(self.spec.holdout.path, HELD_OUT, like))
        again = _come_again(mine, known, to_train_on=True, most=0.0, present=_numbers(like) | {0})
        return f"{again:,} of the {len(mine):,} held-out rows of {self.spec.holdout.path}" if again else ""

    # --- batches ------------------------------------------------------------------------------------------------------

    def rules(self, dataset: Dataset | None) -> Rules:
        """What a verdict depends on, besides the batch: a hash, and the generations that were dropped by hand.

        With another hash, or where one more was dropped, refused batches are judged again.
        """
        spec = self.spec
        found = hash_of(
            spec.drift.model_dump(),
            spec.data.options(),
            spec.data.one_hot,
            spec.holdout.mask if spec.holdout.path is None else spec.held_out_bytes(),
            None if self.reference is None else self.reference.document,
        )
        return found, sorted(self.labels.keys() - self._not_again(dataset))

    def _not_again(self, dataset: Dataset | None) -> set[int]:
        """Generations whose rows must not come again: all but those that were dropped by hand.

        What is older than everything that is there counts as left behind by the window, where there is one.
        """
        present = _numbers(dataset)
        oldest = min(present) if present and self.spec.window is not None else 0
        return present | {number for number in self.labels if number < oldest}

    def is_due(self, delivery: Delivery, rules: Rules) -> bool:
        """Whether something is left to do with a delivery; without reading it."""
        key = self._known_key(delivery)
        if key is not None and key[:PREFIX] in self.batches:
            return False
        refused = self.refused.get(key or "")
        if refused is None or refused["judged_by"] is None:
            return refused is None
        for_its_name = refused["stage"] == "stage" and refused["name"] != delivery.name
        judged, dropped = refused["judged_by"]
        return for_its_name or judged != rules[0] or not {*rules[1]} <= {*dropped}

    def _known_key(self, delivery: Delivery) -> str | None:
        known = self.files.get(delivery.name)
        return None if known is None or known["state"] != delivery.state else str(known["key"])

    def stage(self, delivery: Delivery) -> str:
        """The hash of a delivery, which is read unless it is known and has not changed."""
        key = self._known_key(delivery)
        if key is None:
            key = delivery.content_hash()
            self.files[delivery.name] = {"key": key, "state": delivery.state}
            self.write()
        return key

    def validate(self, delivery: Delivery, key: str, dataset: Dataset | None, rules: Rules) -> Dataset | None:
        """The rows of a batch that is accepted, as a data set of their own; None for others, which are noted."""
        spec, staged, stage = self.spec, None, "validate"
        reasons: list[str] | None = []
        # one file that is written anew each night is another batch each night; in a folder a name is a batch
        named = [number for name, number in self.batches.values() if name == delivery.name]
        named += [1 for item in self.refused.values() if item["judged_by"] is None and item["name"] == delivery.name]
        if named and delivery.location != spec.retrain.incoming:
            stage = "stage"
            reasons = [
                f"{delivery.name} is in the data set with other bytes, or from another place (generation {named[0]}); "
                "deliver corrected rows under another name, after `dkrr ingest --drop-generation`"
            ]
        else:
            try:
                staged = self.read(delivery.location, key, dataset)
                if spec.holdout.mask is not None and not spec.holdout.mask_is_file:
                    self._mask_column(delivery.location, len(staged.kept))
                reasons = self._doubled(staged, dataset)
                if reasons == [] and self.reference is not None:
                    reasons = [finding.sentence for finding in compare_rows(self.reference, staged, spec.drift)]
            except (DataError, ParameterError) as exc:
                reasons = [exc.message]
            except StoreError as exc:
                if not self._is_unreadable(delivery.location, exc):
                    raise
                reasons = [exc.message]
            if delivery.content_hash() != key:
                self.forget(key)
                raise InterruptedRunError(f"{delivery.location} was changed while it was read", hint="start again")
        self.refused.pop(key, None)
        if reasons != []:
            self.refused[key] = {
                "name": delivery.name,
                "judged_by": None if reasons is None else rules,
                "stage": stage,
                "num_rows": None if staged is None else staged.num_rows,
                "reasons": reasons or [],
                "told": reasons is None,
                "at": utc_now(),
            }
            self.forget(key)
        self.write()
        return staged if reasons == [] else None

    def _is_unreadable(self, location: str, error: StoreError) -> bool:
        """Whether an error is one of a delivery, and not of the place where its rows go; at an address it may pass."""
        if isinstance(error, DamagedChunkError):
            return is_below(error.path, location)
        with contextlib.suppress(DataError, ParameterError):
            try:
                open_table(location, **self.spec.data.text_options())
            except StoreError:
                return not is_url(location)
        return False

    def _doubled(self, staged: Dataset, dataset: Dataset | None) -> list[str] | None:
        """Why rows must not come again; None for the first rows, delivered as well, which is no news."""
        mine, data, m = _row_hashes(staged), self.spec.retrain.data, f"{staged.num_rows:,}"
        twice = "a second time they would be held out and trained on"
        present, not_again = _numbers(dataset), self._not_again(dataset)
        known = [item for item in self.known_rows(dataset) if item.number in not_again] + self._foreseen
        present |= {item.number for item in self._foreseen}
        for item in known:
            if np.array_equal(item.hashes, mine):
                if item.label == INITIAL:
                    return None
                label = f" ({item.label})" if item.label else ""
                has = "has" if item.number in present else "had, and its window has left behind"
                remedy = "take the file away" + (", or drop the generation" if item.number in present else "")
                reason = f"its {m} rows are those of generation {item.number}{label}, which {data} {has}"
                return [f"{reason}: {twice}; {remedy}"]
        if again := _come_again(mine, known):
            were = ", or were until its window left them behind" if not_again - present else ""
            return [f"{again:,} of its {m} rows are in {data} already{were}: {twice}; deliver those that are new"]
        seen = self.held_out_again(staged, [KnownRows(0, None, mine, np.zeros(len(mine), dtype=bool))])
        return [f"it has {seen}, which are never added; deliver it without them"] if seen else []

    def append(self, name: str, key: str, rows: Dataset, dataset: Dataset | None) -> Dataset:
        """Add a draft to the data set as one generation, decide about it; done once, whatever is interrupted."""
        key = key[:PREFIX]
        if self.is_dry:
            self.batches[key] = name, 0
            if dataset is None:
                return rows
            number, hashes = dataset.next_generation + len(self._foreseen), _row_hashes(rows)
            self._foreseen.append(KnownRows(number, f"{name} {key}", hashes, np.zeros(len(hashes), dtype=bool)))
            return dataset
        label = INITIAL if name == INITIAL else f"{name} {key}"
        dataset = ingest(rows, self.spec.retrain.data, append=True, label=label)
        self.held_out(dataset, decides=not self.has_mask_file)
        self.write()
        self.forget(key)
        return dataset

    def note_gone(self, dataset: Dataset) -> None:
        """Remember which generations the data set had and has no longer: made again, they would be dropped again."""
        gone = sorted(set(range(1, dataset.next_generation)) - _numbers(dataset))
        if gone != self.gone:
            self.gone = gone
            self.write()

    def lost(self, dataset: Dataset | None) -> list[int]:
        """Numbers of the generations that were decided about and that the data set, as it is now, never had."""
        return [number for number in self.labels if dataset is None or number >= dataset.next_generation]

    def replacements(self, dataset: Dataset | None) -> tuple[list[tuple[str, str, str]], list[str]]:
        """The files that the lost generations were made of, in their order, and what no file has; reads all files.

        Returns
        -------
        found : list of (name, key, location)
            :data:`INITIAL` names the first rows.
        missing : list of str
        """
        lost = self.lost(dataset)
        there = {found.content_hash()[:PREFIX]: found.location for found in (self.spec.deliveries() if lost else [])}
        found, missing = [], []
        for number in lost:
            document, label = self._decision(number), self.labels[number] or ""
            name, _, key = label.rpartition(" ")
            if key in there:
                found.append((name, key, there[key]))
            elif label == INITIAL and self.spec.initial is not None and self._are_first_rows(number):
                found.append((INITIAL, INITIAL, self.spec.initial))
            else:
                what = f"made of {self.spec.initial}" if label == INITIAL else label or "no label"
                missing.append(f"generation {number} ({what}, {document['num_rows']:,} rows)")
        return found, missing

    def _are_first_rows(self, number: int) -> bool:
        """Whether the rows of a generation, targets included, are those of the first file still."""
        with contextlib.suppress(DataError, StoreError):
            hashes = next(item.hashes for item in self.known_rows() if item.number == number)
            return np.array_equal(_row_hashes(self.read(str(self.spec.initial), INITIAL, None)), hashes)
        return False

    # --- drafts -------------------------------------------------------------------------------------------------------

    def read(self, source: str, key: str, like: Dataset | None) -> Dataset:
        """A file as a data set of its own, a draft."""
        data, location = self.spec.data, place(self.scratch, f"{key[:PREFIX]}.zarr")
        options = data.options() | ({"one_hot": data.one_hot} if like is None else {"like": like})
        label = INITIAL if key == INITIAL else None
        try:
            return ingest(source, location, label=label, **options)
        except StoreMismatchError:  # read by other rules before, or other bytes
            remove_dataset(location)
            return ingest(source, location, label=label, **options)

    def forget(self, key: str) -> None:
        """Remove the draft of a batch."""
        remove_dataset(join(self.scratch, f"{key[:PREFIX]}.zarr"))

    def forget_all(self) -> None:
        """Remove all drafts; what others put beside them stays."""
        for draft in filter(None, map(_DRAFT.fullmatch, children(self.scratch))):
            if draft[1]:
                delete_key(self.scratch, draft[0])
            else:  # what a kill leaves of one is made anew, not refused
                remove_dataset(join(self.scratch, draft[0]))
        with contextlib.suppress(OSError):
            os.rmdir(self.scratch)


def _numbers(dataset: Dataset | None) -> set[int]:
    return set() if dataset is None else {item.number for item in dataset.generations}


def _row_hashes(dataset: Dataset, start: int = 0, stop: int | None = None) -> Hashes:
    """A number for each row that tells its features and targets from others (m,)."""
    parts = [np.zeros(0, dtype=np.uint64)]
    for _, rows in rows_of(dataset, start, stop):
        total = np.zeros(len(rows), dtype=np.uint64)
        for column in (rows + 0.0).view(np.uint64).T:  # 0.0 and -0.0 are the same number
            total = (total ^ (column >> np.uint64(29)) ^ column) * np.uint64(0x9E3779B97F4A7C15)
            total ^= total >> np.uint64(32)
        parts.append(total)
    return np.concatenate(parts)


def _come_again(
    mine: Hashes,
    known: list[KnownRows],
    *,
    to_train_on: bool = False,
    most: float = MOST_AGAIN,
    present: set[int] | None = None,
) -> int:
    """How many rows are known, or known as such ``to_train_on``; 0 where no more are than come again by chance.

    A new row is there by chance as often as the known rows (those of generations ``present``) are alike among
    themselves; ``most`` is the share that is allowed beyond that. The rows of a whole generation do not come again by
    chance.
    """
    pools = {item.number: item.hashes[~item.held_out if to_train_on else slice(None)] for item in known}
    none = np.zeros(0, dtype=np.uint64)
    values = np.unique(np.concatenate([none, *pools.values()]))
    there = [pool for number, pool in pools.items() if present is None or number in present]
    counts = np.unique(np.concatenate([none, *there]), return_counts=True)[1]
    alike = counts[counts > 1].sum() / max(1, counts.sum())
    again = int(np.count_nonzero(np.isin(mine, values)))
    is_whole = any(np.array_equal(item.hashes, mine) for item in known)
    return again if is_whole or again > (most + alike) * len(mine) else 0


SAMPLE_ROWS = 20_000
NUM_QUANTILES = 101
# with fewer rows the spread of a column and its correlations say nothing
LEAST_ROWS = 8


class Finding(NamedTuple):
    """One statistic of one column that is beyond its limit, and a sentence that says so."""

    column: str
    statistic: str
    sentence: str


class Reference:
    """What new rows are compared with.

    Attributes
    ----------
    document
        All of it as plain data.
    names
        Of the features, then of the targets.
    mean, std : (d + t,)
        Of all rows; 1 stands for the standard deviation of a constant column.
    values, shares
        For each column some of its values, ascending from the least, and the share of rows that is not above each.
    correlation : (d, t)
    moving : (d + t,)
        p, the share of rows that have not the most common value of a column; 0 where it was constant.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.num_rows, self.num_features = int(document["num_rows"]), int(document["num_features"])
        self.names: list[str] = document["names"]
        self.mean, self.std = np.array(document["mean"]), np.array(document["std"])
        self.values, self.shares = ([np.array(column) for column in document[key]] for key in ("values", "shares"))
        self.correlation = np.array(document["correlation"]).reshape(self.num_features, -1)
        self.moving: Floats = np.array([1.0 - np.diff(column, prepend=0.0).max() for column in self.shares])

    @classmethod
    def of(cls, dataset: Dataset) -> Reference:
        """The statistics of a data set as it is now."""
        rows = _sample(dataset)
        values = [np.unique(np.quantile(column, np.linspace(0, 1, NUM_QUANTILES))) for column in rows.T]
        return cls(
            {
                "num_rows": dataset.num_rows,
                "names": [*dataset.feature_names, *dataset.target_names],
                "num_features": dataset.num_features,
                "mean": [*dataset.x_mean.tolist(), *dataset.y_mean.tolist()],
                "std": [*dataset.x_std.tolist(), *dataset.y_std.tolist()],
                "values": [column.tolist() for column in values],
                "shares": [_shares(column, at).tolist() for column, at in zip(rows.T, values, strict=True)],
                "correlation": _correlation(rows, dataset.num_features).tolist(),
            }
        )

    def finding(self, j: int | np.integer[Any], statistic: str, sentence: str) -> Finding:
        kind, name = "feature" if j < self.num_features else "target", self.names[int(j)]
        return Finding(name, statistic, f"{kind} {name}: {sentence}")

    def chance(self, num_rows: int) -> Floats:
        """Relative error of the count of rows that have not the most common value of a column, among m (d + t,)."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.sqrt((1 - self.moving) / (num_rows * self.moving)))

    def distance(self, column: Floats, j: int) -> float:
        """sup |F - F_ref| between some values and column j."""
        values = self.values[j]
        inside = np.abs(_shares(column, values) - self.shares[j])
        return float(max(np.max(inside), np.mean(column < values[0])))  # nothing was below the least value


def compare_rows(reference: Reference, dataset: Dataset, limits: DriftSpec) -> list[Finding]:
    """What is beyond its limit in the rows of a data set with the same columns; none means that they are alike."""
    m, d = dataset.num_rows, reference.num_features
    noise = 1.0 / np.sqrt(m)
    findings = _moments(reference, dataset, limits, noise, noise + reference.chance(m))
    rows = _sample(dataset)
    distances = [reference.distance(column, j) for j, column in enumerate(rows.T)]
    bar = limits.distance + 2 * noise
    for j in np.flatnonzero(np.array(distances) > bar):
        sentence = f"its distribution function differs by {distances[j]:.2f} from before ({bar:.2f} allowed)"
        others = [reference.distance(rows[:, j], i) for i in range(d)] if j < d else [np.inf]
        near = int(np.argmin(others))
        if near != j and others[near] < min(distances[j] / 2, 0.2):
            sentence += f"; its values look like those of {reference.names[near]}"
        findings.append(reference.finding(j, "distance", sentence))
    if m < LEAST_ROWS:
        return findings
    difference = np.abs(_correlation(rows, d) - reference.correlation)
    # where a column is constant, nothing is known of what it has to do with a target
    difference[((reference.moving == 0) | (np.ptp(rows, axis=0) == 0))[:d]] = 0.0
    bar = limits.correlation + 4 * noise
    return findings + [
        reference.finding(
            j,
            "correlation",
            f"its correlation with {reference.names[d + k]} differs by {difference[j, k]:.2f} from "
            f"{reference.correlation[j, k]:.2f} ({bar:.2f} allowed)",
        )
        for j, k in np.argwhere(difference > bar)
    ]


def compare_means(reference: Reference, dataset: Dataset, limits: DriftSpec) -> list[Finding]:
    """The same for means and standard deviations alone, which a data set knows without reading its rows.

    Of a column that was constant they tell the least share of rows that have another value now, by the inequality of
    Cauchy and Schwarz: delta^2 / (delta^2 + std^2), where delta is how far the mean has moved.
    """
    mean, std = _mean_and_std(dataset)
    square = np.square(mean - reference.mean)
    share = np.divide(square, square + np.square(std), out=np.zeros_like(square), where=square > 0)
    return _moments(reference, dataset, limits, 0.0, reference.chance(reference.num_rows)) + [
        reference.finding(
            j,
            "distance",
            f"it was constant, and has another value in at least {share[j]:.0%} of the rows "
            f"({limits.distance:.0%} allowed)",
        )
        for j in np.flatnonzero((reference.moving == 0) & (share > limits.distance))
    ]


def _moments(reference: Reference, dataset: Dataset, limits: DriftSpec, noise: float, chance: Floats) -> list[Finding]:
    mean, std = _mean_and_std(dataset)
    shift, most = np.abs(mean - reference.mean) / reference.std, limits.shift + 4 * chance
    findings = [
        reference.finding(
            j,
            "shift",
            f"its mean is {mean[j]:.6g}, {shift[j]:.3g} standard deviations from {reference.mean[j]:.6g} "
            f"({most[j]:.3g} allowed)",
        )
        for j in np.flatnonzero(~(shift <= most))
    ]
    if dataset.num_rows < LEAST_ROWS:
        return findings
    ratio, bar = std / reference.std, limits.scale * (1 + 4 * chance)
    may_stand_still = (std == 0) & (reference.moving <= limits.distance + 2 * noise)
    return findings + [
        reference.finding(
            j,
            "scale",
            f"its standard deviation is {std[j]:.6g}, {ratio[j]:.3g} times the {reference.std[j]:.6g} of before "
            f"({1 / bar[j]:.3g} to {bar[j]:.3g} allowed)",
        )
        for j in np.flatnonzero(~((ratio <= bar) & ((ratio >= 1 / bar) | may_stand_still)))
    ]


def _mean_and_std(dataset: Dataset) -> tuple[Floats, Floats]:
    """Means, and standard deviations as they are: 0 for a constant column (d + t,)."""
    stds = [decode_floats(dataset.records[name]["std"]) for name in ("X", "y") if name in dataset.records]
    return np.concatenate([dataset.x_mean, dataset.y_mean]), np.concatenate(stds)


def rows_of(dataset: Dataset, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Floats]]:
    """The rows from ``start`` to ``stop``, X and y side by side, in blocks: (first row, block)."""
    arrays = [array for array in (dataset.X, dataset.y) if array is not None]
    for first, last in dataset.X.blocks():
        low, high = max(first, start), min(last, dataset.num_rows if stop is None else stop)
        if low < high:
            yield low, np.column_stack([array.read(low, high) for array in arrays])


def _sample(dataset: Dataset) -> Floats:
    """About 20,000 rows of X and y side by side, the same ones each time."""
    share = min(1.0, SAMPLE_ROWS / dataset.num_rows)
    parts = [rows[row_hash_fraction(at, at + len(rows), share, seed=1)] for at, rows in rows_of(dataset)]
    return np.concatenate(parts)


def _shares(column: Floats, at: Floats) -> Floats:
    """The share of a column that is not above each of the values."""
    return np.searchsorted(np.sort(column), at, side="right") / len(column)


def _correlation(rows: Floats, num_features: int) -> Floats:
    """Correlation (d, t) of features with targets; 0 where a column is constant."""
    centred = rows - rows.mean(axis=0)
    norms = np.sqrt(np.square(centred).sum(axis=0))
    norms[norms == 0] = np.inf
    scaled: Floats = centred / norms
    return scaled[:, :num_features].T @ scaled[:, num_features:]
