"""A first job file for data that nobody has fitted yet.

    gamma = 1 / median |a - b|^2     over pairs of whitened rows of a sample

You need it to start: the widths of kernels mean nothing before one has seen the distances between rows. The median
makes half of all pairs closer than one width, which is rarely the best choice and never a foolish one.

Cost: reads at most 100,000 rows or 256 MiB; distances between 1,000 of them.

References
----------
Garreau, Jitkrittum, Kanagawa (2017), Large sample analysis of the median heuristic.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset.sources import Table, open_table
from dkrr.dataset.table import column_number, is_missing, is_number
from dkrr.errors import DataError, JobFileError
from dkrr.jobs import toml
from dkrr.jobs.toml import BUILT_IN, FILE_SUFFIXES
from dkrr.selection.tuning import start_width
from dkrr.store.documents import create_bytes
from dkrr.store.files import is_url, name_of

READ_ROWS = 100_000
READ_BYTES = 256 * 2**20
SAMPLE_ROWS = 1_000


def init_job(
    data_path: str | os.PathLike[str],
    target: str | int | Sequence[str | int] | None = None,
    base: str | os.PathLike[str] | None = None,
    *,
    reading: dict[str, Any] | None = None,
) -> str:
    """The text of a commented job file for the data, with whitening and a median-distance gamma.

    Parameters
    ----------
    data_path
        Anything that ``[data] path`` may be.
    target
        Target columns, names or numbers; None means what the data itself declares, else the last column.
    base
        Folder where the file will stand, the current one by default; the data's path is written relative to it.
    reading
        Other keys of ``[data]`` that say how the data is read: header, delimiter, decimal, missing.

    Raises
    ------
    DataError, StoreError
        The data cannot be read, or its features are not numbers.
    ParameterError
        A target that does not exist.
    """
    path, reading = os.fspath(data_path), reading or {}
    named = [target] if isinstance(target, str | int) else list(target or [])
    table = _open(path, reading, named)
    if not named and table.target is None:
        named = [table.names[-1] if table.is_named else -1]
    positions = [column_number(table, name, "target") for name in named] or list(table.target or ())
    features = [i for i in range(len(table.names)) if i not in {*positions, table.weight}]
    rows, is_text = _read_sample(table, features, positions, reading.get("decimal", "."))
    if not (is_url(path) or path.startswith(BUILT_IN) or os.path.isabs(path)):
        near = os.path.relpath(path, base)
        # ".." behind a link to a folder means another file as text
        is_same = os.path.realpath(os.path.join(base or "", near)) == os.path.realpath(path)
        path = near if is_same else os.path.realpath(path)
    target_line = f"target = {toml.inline(named)}   # names or column numbers; -1 is the last column"
    if not named:
        target_line = f"# target = {toml.inline([table.names[i] for i in positions])}   # declared by the data itself"
    return _TEMPLATE.format(
        path=toml.inline(path),
        target=target_line,
        reading="".join(f"{key} = {toml.inline(value)}\n" for key, value in reading.items()),
        num_features=len(features),
        classes="one_hot = true" if is_text else "# one_hot = true",
        metric="accuracy" if is_text else "rmse",
        gamma=f"{median_gamma(rows):.4g}",
        num_sampled=len(rows),
        name=_name(path),
    )


def is_data(path: str) -> bool:
    """Whether a path or address is that of data, by its ending, and not that of a job file."""
    return is_url(path) or path.startswith(BUILT_IN) or os.path.isdir(path) or path.endswith(FILE_SUFFIXES)


def write_job(
    data_path: str, target: Sequence[str | int], reading: dict[str, Any], *, command: str = "fit"
) -> tuple[Path, bool]:
    """Write the file of :func:`init_job` to the present folder; where it is, and whether it was not there before.

    It is named after the data, as its run is. One that is there already and identical is left as it is.

    Parameters
    ----------
    target, reading
        As in :func:`init_job`.
    command
        What the job is for, as errors call it.

    Raises
    ------
    JobFileError
        No target is named, neither here nor by the data; another file of that name is there.
    """
    if not target and _open(data_path, reading).target is None:
        raise JobFileError(
            f"{data_path} is data and names no target",
            hint=f"`dkrr {command} {data_path} --target NAME` writes its job file and uses it; -1 is the last column",
        )
    path, text = Path(f"{_name(data_path)}.toml"), init_job(data_path, list(target) or None, reading=reading)
    if create_bytes(os.getcwd(), path.name, text.encode()) is not None:
        return path, True
    if not path.is_file() or path.read_bytes() != text.encode():
        raise JobFileError(
            f"{path} exists and is another job than `dkrr init {data_path}` would write",
            hint=f"`dkrr {command} {path}` uses it as it is; rename or remove it for a new one",
        )
    return path, False


def _open(path: str, reading: dict[str, Any], named: Sequence[str | int] = ()) -> Table:
    return open_table(path, **{key: value for key, value in reading.items() if key != "missing"}, named=named)


def median_gamma(rows: NDArray[np.float64]) -> float:
    """gamma = 1 / median |a - b|^2 over pairs of the whitened rows (m, d); 1 / d where that has no meaning.

    Columns are whitened with their own mean and standard deviation, constant ones become 0.
    """
    std = rows.std(axis=0)
    return start_width((rows - rows.mean(axis=0)) / np.where(std == 0, 1.0, std)) ** -2


def _read_sample(
    table: Table, features: list[int], targets: list[int], decimal: str
) -> tuple[NDArray[np.float64], bool]:
    """Rows spread evenly over the first ``READ_ROWS``, features only, and whether the target is a word."""
    if not features:
        raise DataError(f"{table.label} has no column besides its targets", hint="name fewer targets")
    parts: list[NDArray[np.float64]] = []
    num_read, is_text = 0, False
    for block, labels in table.blocks(features, targets[0] if len(targets) == 1 else None):
        parts.append(block)
        words = (label for label in (labels or [])[:100] if isinstance(label, str))
        is_text = is_text or any(not is_number(label, decimal) and not is_missing(label) for label in words)
        num_read += len(block)
        if num_read >= READ_ROWS or 8 * num_read * len(features) >= READ_BYTES:
            break
    rows = np.concatenate(parts)
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), SAMPLE_ROWS)).astype(int)]
    rows = rows[np.isfinite(rows).all(axis=1)]  # a missing value is reported by the fit, with its row and column
    if not len(rows):
        raise DataError(
            f"{table.label} has no row without missing values among those read", hint="fill them, or leave columns out"
        )
    return rows, is_text


def _name(path: str) -> str:
    """A name for the run, from that of the data."""
    stem = name_of(path).rpartition(":")[2].partition("?")[0].partition(".")[0]
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in stem) or "job"


_TEMPLATE = """\
# A job of dkrr: `dkrr plan` says what it needs, `dkrr fit` runs it. Relative paths mean the folder of this file.

[data]
path = {path}
{target}
standardize = true          # whiten the {num_features} features and the target with the training rows' statistics
# header = "auto"           # of a CSV file: true, false or "auto"
{reading}{classes}            # one column for each class of the target

[evaluate]
fraction = 0.1              # held out, decided for each row by a hash of its number; or path = ..., or mask = ...
metric = "{metric}"

[model]
kernel = "rbf"              # k(a, b) = exp(-gamma |a - b|^2); also laplacian, matern, poly, linear, ...
gamma = {gamma}             # 1 / median squared distance of {num_sampled} whitened rows that differ
alpha = 0.1                 # the ridge, added to the diagonal as it is; about the share of noise in a whitened target
# fit_intercept = true      # a constant that the ridge does not shrink

[solver]
name = "auto"
# tile_size = 2048          # rows of a tile; by default what a worker's memory allows

[cluster]
# scheduler = "local"       # or tls://host:port, or a scheduler file; by default where this place says, else local
# workers = 2               # by default one for each core
# memory_limit = "2GiB"     # of each worker

[output]
directory = "runs/{name}"
keep = "factor"             # what stays in the store afterwards: "all", "factor" or "model"
"""
