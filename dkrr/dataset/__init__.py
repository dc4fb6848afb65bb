"""X, y and weights on disk in row chunks: ingest, digests, statistics, splits."""

from dkrr.dataset.dataset import Dataset, open_dataset
from dkrr.dataset.ingest import ingest
from dkrr.dataset.masks import read_mask, row_hash_fraction
from dkrr.dataset.rows import Floats, RowArray, RowReader, default_rows_per_chunk
from dkrr.dataset.scaling import Scaling
from dkrr.dataset.split import prepare_rows

__all__ = [
    "Dataset",
    "Floats",
    "RowArray",
    "RowReader",
    "Scaling",
    "default_rows_per_chunk",
    "ingest",
    "open_dataset",
    "prepare_rows",
    "read_mask",
    "row_hash_fraction",
]
