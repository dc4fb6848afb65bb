"""X, y and weights on disk in row chunks: ingest, digests, statistics, splits."""

from dkrr.dataset.dataset import Dataset, Generation, attributes_of, fields_of, open_dataset
from dkrr.dataset.ingest import append, ingest
from dkrr.dataset.rows import (
    Floats,
    RowArray,
    decode_floats,
    default_rows_per_chunk,
    lazy_rows,
    write_rows,
)
from dkrr.dataset.scaling import DRIFT_LIMIT, Scaling, prepare_rows, read_mask, row_hash_fraction
from dkrr.dataset.sources import Table, open_table
from dkrr.dataset.table import (
    Fitted,
    check_places,
    check_shape,
    feature_columns,
    frame_labels,
    given_names,
    match_features,
    match_targets,
    matched_columns,
    target_columns,
    to_floats,
    unique_names,
    with_mask,
)
from dkrr.dataset.writer import check_outside, drop_generations, keep_last

__all__ = [
    "DRIFT_LIMIT",
    "Dataset",
    "Fitted",
    "Floats",
    "Generation",
    "RowArray",
    "Scaling",
    "Table",
    "append",
    "attributes_of",
    "check_outside",
    "check_places",
    "check_shape",
    "decode_floats",
    "default_rows_per_chunk",
    "drop_generations",
    "feature_columns",
    "fields_of",
    "frame_labels",
    "given_names",
    "ingest",
    "keep_last",
    "lazy_rows",
    "match_features",
    "match_targets",
    "matched_columns",
    "open_dataset",
    "open_table",
    "prepare_rows",
    "read_mask",
    "row_hash_fraction",
    "target_columns",
    "to_floats",
    "unique_names",
    "with_mask",
    "write_rows",
]
