"""From a delivered file to rows of the data set: validated on the way, appended once, or refused with the reason.

Validation reads the batch into a data set of its own (``staged/``) with the columns of the one that grows, which finds
another schema and values that are not finite, and compares its statistics with the frozen ones (drift). What is
appended are the staged rows, so nothing can change between the two.
"""

from __future__ import annotations

import logging
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset, Generation, drop_generations, ingest, keep_last, open_dataset, read_mask
from dkrr.dataset.destination import inspect
from dkrr.errors import (
    DataError,
    InterruptedRunError,
    JobFileError,
    ParameterError,
    StoreError,
    StoreMismatchError,
)
from dkrr.jobs.prepare import check_columns
from dkrr.jobs.retrain.drift import Reference, compare_rows
from dkrr.jobs.retrain.holdout import Mask, decided_mask, document_of, lost_generations, pack
from dkrr.jobs.retrain.incoming import Delivery, content_hash, deliveries
from dkrr.jobs.retrain.ledger import PREFIX, Batch, Ledger
from dkrr.jobs.retrain.records import hash_of
from dkrr.jobs.retrain.spec import RetrainSpec
from dkrr.jobs.retrain.summary import RetrainSummary
from dkrr.jobs.retrain.tick_key import held_out_files, held_out_rows
from dkrr.jobs.runs.directory import RunDirectory, utc_now
from dkrr.store.failpoints import failpoint
from dkrr.store.files import remove_array

__all__ = [
    "append_batch",
    "check_held_out",
    "current_dataset",
    "freeze_reference",
    "held_out_again",
    "initial_keys",
    "judged_by",
    "know_initial",
    "preview",
    "read_reference",
    "restore",
    "slide",
    "validate",
]

logger = logging.getLogger("dkrr.retrain")

REFERENCE = "reference.json"
INITIAL = "initial"
# A batch is refused if more than this share of its rows is in the data set, beyond what comes again by chance.
MOST_AGAIN = 0.1


def current_dataset(spec: RetrainSpec) -> Dataset | None:
    """The data set as it is now; None before it is made. Reads metadata only.

    Raises
    ------
    JobFileError
        ``[data]`` names other columns.
    """
    location = spec.retrain.data
    if inspect(location) != "complete":
        return None
    dataset = open_dataset(location)
    check_columns(spec.job.data, dataset, has_numbers=False)  # numbers are those of columns of the files
    return dataset


def stage_initial(spec: RetrainSpec, location: str) -> Dataset:
    """The first rows as a data set of their own."""
    return ingest(spec.initial, location, **spec.job.data.options(), **_one_hot(spec))


def make_initial(spec: RetrainSpec) -> Dataset:
    """Make the data set from ``[data] path``; again after an interruption, with the same result."""
    return ingest(
        spec.initial, spec.retrain.data, append=True, label=INITIAL, **spec.job.data.options(), **_one_hot(spec)
    )


def know_initial(spec: RetrainSpec, ledger: Ledger, dataset: Dataset | None, keys: list[str] | None = None) -> None:
    """Note in the ledger which bytes the first rows came from: delivered as well, they are in the data set already.

    Parameters
    ----------
    keys
        Of the files (:func:`initial_keys`) that the data set was made of just now; None where that is to be found out.
    """
    if ledger.initial is not None or spec.initial is None or dataset is None:
        return
    if keys is None:
        found = initial_keys(spec)
        first = _labelled(dataset, INITIAL)
        keys = found if first is not None and first.first_row == 0 and _initial_is(spec, ledger, first.digest) else []
    ledger.initial = keys
    ledger.write()


def initial_keys(spec: RetrainSpec) -> list[str]:
    """What tells the bytes of the first rows, file by file."""
    if spec.initial is None or spec.initial.startswith(("sklearn:", "generate:")):
        return []
    return [content_hash(delivery) for delivery in deliveries(spec.initial)]


def check_held_out(spec: RetrainSpec, ledger: Ledger) -> None:
    """Refuse held-out rows of their own that are in the data set, or were: fits have seen them.

    Raises
    ------
    JobFileError
        A file has the bytes of a batch that was appended, or of the first rows.
    """
    for name, key in held_out_files(spec):
        batch = ledger.batches.get(key) or ledger.batches.get(key[:PREFIX])
        if key in (ledger.initial or ()) or (batch is not None and batch.appended is not None):
            raise JobFileError(
                f"[holdout] path {spec.holdout.path}: the rows of {name} were added to {spec.retrain.data}",
                hint="judge by rows that no fit has seen",
            )


def restore(spec: RetrainSpec, ledger: Ledger, dataset: Dataset | None) -> tuple[Dataset | None, list[Batch]]:
    """The data set with all that it had when it was last seen, and the batches that were appended again for that.

    A data set that was lost, or set back to an earlier state, lacks generations that were decided about. Their files
    are appended again in the order in which they came, so that every row gets its number back, and what had been
    dropped since is dropped again.

    Raises
    ------
    StoreError
        A file is gone, or has other bytes than it had; nothing was changed.

    Cost
    ----
    A listing; where something is lacking, all files are read to know them by their bytes.
    """
    found, missing = lacking(spec, ledger.directory, ledger, dataset)
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise StoreError(
            f"{spec.retrain.data} lacks rows that were in it: {', '.join(missing[:5])}{more}; no file has those bytes",
            hint="restore the data set, or put the files back; to begin a new one, give the model another name",
        )
    if found and ledger.is_recovered:
        logger.warning(
            "%s was lost, and the record of its batches, too: which generations had been dropped is not known, all of "
            "them are appended again",
            spec.retrain.data,
        )
    for item in found:
        if item is None:
            dataset = make_initial(spec)
            decide(spec, ledger, dataset)
        else:
            _read(spec, ledger, *item, dataset)
            dataset = append_batch(spec, ledger, item[0])
    again = {generation.number for generation in dataset.generations} & set(ledger.dropped) if dataset else set()
    if again:
        dataset = drop_generations(spec.retrain.data, sorted(again))
    return dataset, [item[0] for item in found if item is not None]


def lacking(
    spec: RetrainSpec, directory: RunDirectory, ledger: Ledger, dataset: Dataset | None
) -> tuple[list[tuple[Batch, Delivery] | None], list[str]]:
    """What a data set had and has not, as the documents in ``directory`` know it.

    Returns
    -------
    found : list
        Batches with their files, in the order of their generations; None stands for the first rows.
    missing : list of str
        What has no file, or one with other bytes.
    """
    lost = lost_generations(directory, dataset)
    incoming = deliveries(spec.retrain.incoming, spec.own_files) if lost else []
    there = {content_hash(delivery)[:PREFIX]: delivery for delivery in incoming}
    known = {batch.label: batch for batch in ledger.batches.values()}
    found: list[tuple[Batch, Delivery] | None] = []
    missing = []
    for number in lost:
        document = directory.read(document_of(number)) or {}
        batch = known.get(str(document["label"]))
        if batch is not None and batch.key[:PREFIX] in there:
            found.append((batch, there[batch.key[:PREFIX]]))
        elif document["label"] == INITIAL and _initial_is(spec, ledger, document.get("digest")):
            found.append(None)
        else:
            what = f"made of {spec.initial}" if document["label"] == INITIAL else document["label"] or "no label"
            missing.append(f"generation {number} ({what}, {document['num_rows']:,} rows)")
    return found, missing


def _initial_is(spec: RetrainSpec, ledger: Ledger, digest: str | None) -> bool:
    """Whether the first rows are there, and still those with a digest; None where it was never written down."""
    if spec.initial is None:
        return False
    location = ledger.directory.path("staged/initial.zarr")
    remove_array(location)
    try:
        return digest in (None, stage_initial(spec, location).digest)
    except (DataError, StoreError):
        return False
    finally:
        remove_array(location)


def preview(spec: RetrainSpec, summary: RetrainSummary) -> None:
    """Tell a summary what would become of each batch; nothing outside a temporary folder is written.

    Each batch is judged as it would be if it came first; the data set is not changed by those before it.
    """
    directory, dataset = RunDirectory(spec.directory), current_dataset(spec)
    ledger, reference = Ledger.read(directory), read_reference(directory)
    with tempfile.TemporaryDirectory(prefix="dkrr-dry-run-") as folder:
        ledger.directory = RunDirectory(folder)
        found, missing = lacking(spec, directory, ledger, dataset)
        for text in missing:
            reasons = ["no file has those bytes"]
            summary.batches.append(
                {"name": text, "outcome": "missing", "stage": None, "num_rows": None, "reasons": reasons}
            )
        if missing:
            return  # so would the run end
        if dataset is None and spec.initial is not None:
            keys = initial_keys(spec)
            dataset = stage_initial(spec, ledger.directory.path("initial.zarr"))
            know_initial(spec, ledger, dataset, keys)
            summary.batches.append(
                {
                    "name": spec.initial,
                    "outcome": "appended",
                    "stage": "append",
                    "num_rows": dataset.num_rows,
                    "reasons": [],
                }
            )
        for item in found:
            if item is not None:
                summary.add_batch(item[0])
                dataset = dataset or _read(spec, ledger, *item, None)
        know_initial(spec, ledger, dataset)
        if dataset is not None:
            reference = reference or Reference.of(dataset)
        rules = judged_by(spec, reference)
        for batch, delivery in ledger.stage(deliveries(spec.retrain.incoming, spec.own_files)):
            if batch.is_due(rules):
                is_accepted = validate(spec, ledger, batch, delivery, dataset, reference)
                if is_accepted and dataset is None:
                    dataset = open_dataset(_staged(ledger, batch))
                    reference = reference or Reference.of(dataset)
            if batch.appended is None:
                summary.add_batch(batch)


def read_reference(directory: RunDirectory) -> Reference | None:
    """The frozen statistics; None before there are any."""
    found = directory.read(REFERENCE)
    return None if found is None else Reference.from_dict(found)


def freeze_reference(directory: RunDirectory, dataset: Dataset) -> Reference:
    """The frozen statistics, taken from the data set as it is when there are none."""
    found = read_reference(directory)
    if found is None:
        found = Reference.of(dataset)
        directory.write(REFERENCE, found.to_dict())
    return found


def judged_by(spec: RetrainSpec, reference: Reference | None) -> str:
    """Hash of everything that the verdict about a batch depends on, besides the batch."""
    frozen = None if reference is None else reference.to_dict()
    return hash_of(
        "validate",
        spec.drift.model_dump(),
        spec.job.data.options(),
        _one_hot(spec),
        spec.holdout.mask if spec.holdout.path is None else held_out_rows(spec),
        frozen,
    )


def _one_hot(spec: RetrainSpec) -> dict[str, Any]:
    return {"one_hot": spec.job.data.one_hot}


def _staged(ledger: Ledger, batch: Batch) -> str:
    return ledger.directory.path(f"staged/{batch.key[:32]}.zarr")


def validate(
    spec: RetrainSpec, ledger: Ledger, batch: Batch, delivery: Delivery, base: Dataset | None, reference: Any
) -> bool:
    """Judge a batch, unless it has been judged by the same rules; whether it is accepted."""
    rules = judged_by(spec, reference)
    if batch.verdict is not None and batch.verdict["judged_by"] == rules:
        return bool(batch.verdict["accepted"])
    failpoint("retrain.validate.before")
    verdict: dict[str, Any] = {"judged_by": rules, "accepted": False, "reasons": [], "at": utc_now()}
    # one file that is written anew each night is another batch each night; in a folder a name is a batch
    is_one_file = delivery.location == spec.retrain.incoming
    replaced = None if is_one_file else ledger.replaced(batch)
    if replaced is not None:
        verdict["stage"] = "stage"
        verdict["reasons"] = [
            f"{batch.name} is in the data set with other bytes (generation {(replaced.appended or {})['generation']}); "
            "deliver corrected rows under another name, after `dkrr ingest --drop-generation`"
        ]
    elif batch.key in [key for _, key in held_out_files(spec)]:
        verdict["stage"] = "stage"
        verdict["reasons"] = [f"it has the bytes of the held-out rows {spec.holdout.path}, which are never added"]
    else:
        verdict |= _examined(spec, ledger, batch, delivery, base, reference)
    batch.verdict, batch.reported = verdict, False
    failpoint("retrain.validate.before_record")
    ledger.write()
    failpoint("retrain.validate.after_record")
    if not verdict["accepted"]:
        remove_array(_staged(ledger, batch))
    return bool(verdict["accepted"])


def _examined(
    spec: RetrainSpec, ledger: Ledger, batch: Batch, delivery: Delivery, base: Dataset | None, reference: Any
) -> dict[str, Any]:
    found: dict[str, Any] = {"stage": "validate", "accepted": False}
    try:
        staged = _read(spec, ledger, batch, delivery, base)
        if spec.holdout.mask is not None and not spec.holdout.mask_is_file:
            found["held_out"] = pack(_mask_column(spec, delivery.location, len(staged.kept)))
    except (DataError, ParameterError) as exc:
        return found | {"reasons": [exc.message]}
    finally:
        if content_hash(delivery) != batch.key:
            remove_array(_staged(ledger, batch))
            raise InterruptedRunError(f"{delivery.location} was changed while it was read", hint="start again")
    twin = None if base is None else _generation_of(base, staged, batch.label)
    if twin is not None:
        label = f" ({twin.label})" if twin.label else ""
        return found | {
            "reasons": [
                f"its {staged.num_rows:,} rows are those of generation {twin.number}{label}, which {spec.retrain.data} "
                "has: a second time they would be held out and trained on; take the file away, or drop the generation"
            ],
            "num_rows": staged.num_rows,
        }
    if seen := held_out_again(spec, ledger, staged):
        return found | {
            "reasons": [f"it has {seen}, which are never added; deliver it without them"],
            "num_rows": staged.num_rows,
        }
    again = 0 if base is None else _rows_again(base, staged, _is_of(base, batch.label))
    if again:
        return found | {
            "reasons": [
                f"{again:,} of its {staged.num_rows:,} rows are in {spec.retrain.data} already: a second time they "
                "would be held out and trained on; deliver those that are new"
            ],
            "num_rows": staged.num_rows,
        }
    findings = [] if reference is None else compare_rows(reference, staged, spec.drift)
    return found | {
        "accepted": not findings,
        "reasons": [finding.sentence for finding in findings],
        "findings": [finding.to_dict() for finding in findings],
        "num_rows": staged.num_rows,
    }


def _is_of(dataset: Dataset, label: str) -> NDArray[np.bool_]:
    """Which rows are of the generation with a label (n,)."""
    found, generation = np.zeros(dataset.num_rows, dtype=np.bool_), _labelled(dataset, label)
    if generation is not None:
        found[generation.n - generation.num_rows : generation.n] = True
    return found


def _generation_of(dataset: Dataset, staged: Dataset, label: str) -> Generation | None:
    """The generation that has the very rows of a batch, whatever bytes and name they came in; not the batch's own.

    Cost: the rows of generations that are as long, up to the first that differs.
    """
    known = (item for item in dataset.generations if item.num_rows == staged.num_rows and item.label != label)
    return next((item for item in known if _has_rows(dataset, item, staged)), None)


def _has_rows(dataset: Dataset, generation: Generation, staged: Dataset) -> bool:
    """Whether a generation has the last rows of a file, or all of them where no window has cut it."""
    first, skipped = generation.n - generation.num_rows, staged.num_rows - generation.num_rows
    if skipped < 0 or (skipped and generation.number != dataset.generations[0].number):
        return False
    for one, other in ((staged.X, dataset.X), (staged.y, dataset.y), (staged.weight, dataset.weight)):
        if one is None or other is None:
            if one is not other:
                return False
            continue
        for start, stop in other.blocks():
            low, high = max(start, first), min(stop, generation.n)
            if low < high and not np.array_equal(
                one.read(low - first + skipped, high - first + skipped), other.read(low, high)
            ):
                return False
    return True


def _rows_again(rows: Dataset, others: Dataset, without: NDArray[np.bool_] | None = None) -> int:
    """How many of the other rows are among these, wherever they stand; 0 where no more are than come again by chance.

    A new row is there by chance as often as these rows are alike among themselves. Those ``without`` do not count.

    Cost: all rows are read once; 8 bytes a row.
    """
    mine = np.concatenate([_hashes(others, start, stop) for start, stop in others.X.blocks()])
    theirs = np.concatenate([_hashes(rows, start, stop) for start, stop in rows.X.blocks()])
    values, counts = np.unique(theirs if without is None else theirs[~without], return_counts=True)
    alike = counts[counts > 1].sum() / max(1, counts.sum())
    again = int(np.count_nonzero(np.isin(mine, values)))
    return again if again > (MOST_AGAIN + alike) * len(mine) else 0


def held_out_again(spec: RetrainSpec, ledger: Ledger, rows: Dataset, without: NDArray[np.bool_] | None = None) -> str:
    """What says that the held-out rows of a file of their own are among others; "" where they are not.

    Cost: all rows are read once.
    """
    path = spec.holdout.path
    if path is None:
        return ""
    given = spec.job.data.options() | {"like": rows}
    held_out = _ingested(path, ledger.directory.path("staged/held-out.zarr"), given)
    again = _rows_again(rows, held_out, without)
    return f"{again:,} of the {held_out.num_rows:,} held-out rows of {path}" if again else ""


def _hashes(dataset: Dataset, start: int, stop: int) -> NDArray[np.uint64]:
    """A number for each row that tells features and targets from others."""
    parts = [part.read(start, stop) for part in (dataset.X, dataset.y) if part is not None]
    bits = np.ascontiguousarray(np.column_stack(parts) + 0.0).view(np.uint64)  # 0.0 and -0.0 are the same number
    total = np.zeros(len(bits), dtype=np.uint64)
    for column in bits.T:
        total = (total ^ (column >> np.uint64(29)) ^ column) * np.uint64(0x9E3779B97F4A7C15)
        total ^= total >> np.uint64(32)
    return total


def _read(spec: RetrainSpec, ledger: Ledger, batch: Batch, delivery: Delivery, base: Dataset | None) -> Dataset:
    """The batch as a data set of its own."""
    given = spec.job.data.options() | ({"like": base} if base is not None else _one_hot(spec))
    return _ingested(delivery.location, _staged(ledger, batch), given)


def _ingested(source: str, location: str, given: dict[str, Any]) -> Dataset:
    try:
        return ingest(source, location, **given)
    except StoreMismatchError:  # read by other rules before, or other bytes
        remove_array(location)
        return ingest(source, location, **given)


def _mask_column(spec: RetrainSpec, path: str, num_rows: int) -> Mask:
    return read_mask(path, num_rows, column=spec.holdout.mask, **spec.job.data.text_options())


def append_batch(spec: RetrainSpec, ledger: Ledger, batch: Batch) -> Dataset:
    """Add an accepted batch to the data set as one generation; done once, whatever is interrupted."""
    failpoint("retrain.append.before")
    dataset = current_dataset(spec)
    generation = None if dataset is None else _labelled(dataset, batch.label)
    if dataset is None or generation is None:
        staged = open_dataset(_staged(ledger, batch))
        dataset = ingest(staged, spec.retrain.data, append=True, label=batch.label)
        generation = dataset.generations[-1]
    decide(spec, ledger, dataset)
    batch.appended = {"generation": generation.number, "num_rows": generation.num_rows, "at": utc_now()}
    failpoint("retrain.append.before_record")
    ledger.write()
    failpoint("retrain.append.after_record")
    remove_array(_staged(ledger, batch))
    return dataset


def _labelled(dataset: Dataset, label: str) -> Generation | None:
    return next((found for found in dataset.generations if found.label == label), None)


def decide(spec: RetrainSpec, ledger: Ledger, dataset: Dataset) -> Mask:
    """Which rows of the data set are held out; generations that are new are decided about now."""
    given: dict[int, str] = {}
    if spec.holdout.mask is not None and not spec.holdout.mask_is_file:
        known = {
            batch.label: str(batch.verdict["held_out"])
            for batch in ledger.batches.values()
            if batch.verdict is not None and "held_out" in batch.verdict
        }
        for generation in dataset.generations:
            if not ledger.directory.has(document_of(generation.number)):
                mask = known.get(generation.label or "")
                given[generation.number] = mask or pack(_mask_of(spec, ledger, dataset, generation))
    return decided_mask(ledger.directory, dataset, spec.holdout, given)


def _mask_of(spec: RetrainSpec, ledger: Ledger, dataset: Dataset, generation: Generation) -> Mask:
    """The column of the file whose rows a generation has, for one that this job has not appended itself.

    Raises
    ------
    DataError
        No file has these rows: which of them are held out is not known.

    Cost
    ----
    The first rows, or the file that the label names, are read; where it is another one, all files.
    """
    m = len(generation.kept)
    found = deliveries(spec.retrain.incoming, spec.own_files)
    if spec.initial is not None:
        if generation.label == INITIAL and generation.first_row == 0 and ledger.initial == initial_keys(spec):
            return _mask_column(spec, spec.initial, m)
        found.insert(0, Delivery(INITIAL, spec.initial, None))
    name = (generation.label or "").rpartition(" ")[0]
    location = ledger.directory.path("staged/marked.zarr")
    for delivery in sorted(found, key=lambda item: item.name not in (generation.label, name)):
        remove_array(location)
        try:
            staged = ingest(delivery.location, location, **spec.job.data.options(), like=dataset)
            kept = staged.kept
            is_its_file = _has_rows(dataset, generation, staged) and np.array_equal(kept[-m:], generation.kept)
        except (DataError, ParameterError):
            continue
        finally:
            remove_array(location)
        if is_its_file:
            return _mask_column(spec, delivery.location, len(kept))[-m:]
    raise DataError(
        f"[holdout] mask: no file of {spec.retrain.incoming} has the {generation.num_rows:,} rows of generation "
        f"{generation.number} of {dataset.path} ({generation.label or 'no label'}), so which of them are held out "
        f"(column {spec.holdout.mask!r}) is not known",
        hint="drop the generation (`dkrr ingest --drop-generation`) and deliver its file, or give a mask file",
    )


def slide(spec: RetrainSpec, dataset: Dataset) -> Dataset:
    """The data set with what ``[window]`` keeps."""
    if spec.window is None:
        return dataset
    failpoint("retrain.append.before_window")
    return keep_last(spec.retrain.data, generations=spec.window.generations, rows=spec.window.rows)
