"""X, y and weights on disk in row chunks: ingest, digests, statistics, splits."""

from dkrr.dataset.dataset import Dataset, Generation, open_dataset
from dkrr.dataset.ingest import append, ingest
from dkrr.dataset.rows import Floats, RowArray, default_rows_per_chunk, lazy_rows
from dkrr.dataset.scaling import Scaling, prepare_rows, read_mask, row_hash_fraction
from dkrr.dataset.writer import drop_generations, keep_last

__all__ = [
    "Dataset",
    "Floats",
    "Generation",
    "RowArray",
    "Scaling",
    "append",
    "default_rows_per_chunk",
    "drop_generations",
    "ingest",
    "keep_last",
    "lazy_rows",
    "open_dataset",
    "prepare_rows",
    "read_mask",
    "row_hash_fraction",
]
