"""Tiles that pass their checksum and are nevertheless wrong, and everything else that can be wrong with an array.

A checksum proves that a tile is what was once written, not that it was written there: two valid tiles that changed
places, or an entry that changed in memory before the checksum was taken, pass it. Here a few entries are compared with
what they must be:

    K_pq = k(x_p, x_q)                         Gram matrix
    A_pq = sum_{r <= q} L_pr L_qr              factor, p >= q

Samples are taken when an interrupted run is continued, of tiles that are there already, and by ``dkrr info --verify``.
They find every exchange of whole tiles, unless the tiles are equal to rounding; what changed in a single entry is found
by the true residual (:mod:`dkrr.linalg.matmul`) instead.

Cost
----
Gram: one tile read, five kernel entries. Factor: 4 (j + 1) row slices of b entries, four kernel rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from dkrr.errors import DamagedChunkError
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.workspace import INVERSE_DIAGONAL, MAKER
from dkrr.store.chunks import ChunkArray, FloatArray
from dkrr.store.files import list_keys, local_root, read_json
from dkrr.tiles import TileMatrix

NUM_GRAM_SAMPLES = 4
GRAM_RTOL = 1e-6
NUM_FACTOR_SAMPLES = 2
# An entry evaluated alone and the same entry evaluated within a block differ by the rounding of |a|^2 + |b|^2 - 2ab.
KERNEL_RTOL = 1e-9


def gram_samples_agree(operator: RidgeOperator, gram: TileMatrix, i: int, j: int) -> bool:
    """Whether a few entries of tile (i, j) of K are those that the rows give: four places and the extreme entries.

    The extremes matter for short-ranged kernels, most of whose entries are zero in whatever tile. Without a kernel (a
    precomputed matrix) there is nothing to compare with, and the answer is True.

    Raises
    ------
    DamagedChunkError
        The tile is missing or fails its checksum.
    """
    if operator.kernel is None or operator.rows is None:
        return True
    rows, columns = operator.grid.shape(i, j)
    tile = gram.read(i, j)
    draws = np.random.default_rng((i, j))
    places = [(int(draws.integers(rows)), int(draws.integers(columns))) for _ in range(NUM_GRAM_SAMPLES)]
    places += [divmod(int(position), columns) for position in (tile.argmax(), tile.argmin())]
    first, second = operator.grid.span(i).start, operator.grid.span(j).start
    for p, q in places:
        entry, scale = kernel_entry(operator, first + p, second + q)
        # "not <=": a NaN agrees with nothing
        if not abs(entry - float(tile[p, q])) <= GRAM_RTOL * scale:
            return False
    return True


def factor_sample_agrees(
    operator: RidgeOperator, factor: TileMatrix, i: int, j: int, num_rows: int | None = None
) -> bool:
    """Whether A_pq = sum_{r <= q} L_pr L_qr holds at two places (p, q) of tile (i, j), or of its first ``num_rows``.

    Only rows p and q of tiles (i, 0..j) and (j, 0..j) are read, without their checksums: a byte that changed may be
    found here or by the next reader. The places depend on (i, j) alone. A wrong tile (i, k) also makes tiles (i, j),
    j > k, disagree; a continued factorisation meets and repairs (i, k) first.

    The bar: componentwise |A - L L^T|_pq <= gamma_n sqrt(A_pp A_qq) (Cauchy-Schwarz on the rows of L), where gamma_n
    is n eps at worst and grows like sqrt(n) eps in practice, since rounding errors cancel. One hundred times
    the latter is far above anything seen, and stays below 1 % in float32 for n up to 700,000.

    Raises
    ------
    DamagedChunkError
        A tile is missing or too short.

    References
    ----------
    Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., theorem 10.3; Higham and Mary, A new approach to
    probabilistic rounding error analysis, SIAM J. Sci. Comput. 41 (2019).
    """
    return all(error <= bar for error, bar in _factor_errors(operator, factor, i, j, num_rows))


def _factor_errors(
    operator: RidgeOperator, factor: TileMatrix, i: int, j: int, num_rows: int | None = None
) -> Iterator[tuple[float, float]]:
    """|A_pq - (L L^T)_pq| and its bar at each place sampled; infinity for what is not a number."""
    grid = factor.grid
    eps = float(np.finfo(factor.dtype).eps)
    first, second = grid.span(i).start, grid.span(j).start
    for p, q in _factor_places(num_rows or grid.rows(i), grid.rows(j), i, j):
        left = read_rows(factor, [(i, k, p) for k in range(j + 1)])
        right = left if (i, p) == (j, q) else read_rows(factor, [(j, k, q) for k in range(j + 1)])
        left[-1], right[-1] = left[-1][: q + 1], right[-1][: q + 1]  # right of the diagonal there is nothing
        found = float(np.dot(np.concatenate(left, dtype=np.float64), np.concatenate(right, dtype=np.float64)))
        entry, scale = operator_entry(operator, first + p, second + q)
        error = abs(entry - found)
        yield (error if np.isfinite(error) else np.inf), (100 * np.sqrt(grid.n) * eps + KERNEL_RTOL) * scale


def _factor_places(rows: int, columns: int, i: int, j: int) -> list[tuple[int, int]]:
    """Places in tile (i, j), on or below the diagonal, so far to the right that half of the tile's row counts."""
    draws = np.random.default_rng((i, j))
    places = []
    for _ in range(NUM_FACTOR_SAMPLES):
        p = int(draws.integers(rows // 2, rows) if i == j else draws.integers(rows))
        last = p + 1 if i == j else columns
        places.append((p, int(draws.integers(last // 2, last))))
    return places


def kernel_entry(operator: RidgeOperator, p: int, q: int) -> tuple[float, float]:
    """k(x_p, x_q) of two rows, and the scale max(|k_pq|, sqrt(k_pp k_qq)) that its error is measured by."""
    if operator.kernel is None or operator.rows is None:
        return _given_entry(operator, p, q)
    a, b = operator.rows.read(p, p + 1), operator.rows.read(q, q + 1)
    diagonal = abs(float(operator.kernel.diag(a)[0]) * float(operator.kernel.diag(b)[0])) ** 0.5
    entry = float((operator.kernel.diag(a) if p == q else operator.kernel.block(a, b)).flat[0])
    return entry, max(abs(entry), diagonal)


def _given_entry(operator: RidgeOperator, p: int, q: int) -> tuple[float, float]:
    gram, b = operator.gram, operator.grid.tile_size
    assert gram is not None  # noqa: S101  (an operator has a kernel or a matrix)

    def entry(row: int, column: int) -> float:
        return float(read_rows(gram, [(row // b, column // b, row % b)])[0][column % b])

    value = entry(p, q)
    return value, max(abs(value), abs(entry(p, p) * entry(q, q)) ** 0.5)


def operator_entry(operator: RidgeOperator, p: int, q: int) -> tuple[float, float]:
    """A_pq, and the scale sqrt(A_pp A_qq) that its error is measured by; p and q are rows of the whole matrix."""
    entry, scale = kernel_entry(operator, p, q)
    if operator.weighted and operator.rows is not None:
        left, right = operator.rows.root_weight(p, p + 1), operator.rows.root_weight(q, q + 1)
        if left is not None and right is not None:
            root = float(left[0]) * float(right[0])
            entry, scale = entry * root, scale * root
    return entry + (operator.alpha if p == q else 0.0), scale + operator.alpha


def read_rows(matrix: TileMatrix, wanted: Sequence[tuple[int, int, int]]) -> list[FloatArray]:
    """Row p of tile (i, k) for every (i, k, p), b entries each, from the bytes at its offset: no checksum."""
    b, dtype = matrix.grid.tile_size, matrix.dtype
    length = b * dtype.itemsize
    array = matrix.array
    root = local_root(array.store)
    if root is not None:
        parts = [_file_part(os.path.join(root, array.chunk_key((i, k))), length, p * length) for i, k, p in wanted]
    else:
        parts = _object_parts(array, [((i, k), p * length) for i, k, p in wanted], length)
    rows: list[FloatArray] = []
    for (i, k, p), part in zip(wanted, parts, strict=True):
        if part is None or len(part) != length:
            # names what is wrong; when nothing is, the tile was written a moment ago
            rows.append(np.array(matrix.array.read((i, k))[p]))
        else:
            rows.append(np.frombuffer(part, dtype))
    return rows


def _file_part(path: str, length: int, offset: int) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return os.pread(descriptor, length, offset)
    finally:
        os.close(descriptor)


def _object_parts(array: ChunkArray, wanted: list[tuple[tuple[int, int], int]], length: int) -> list[bytes | None]:
    """Byte ranges of chunks at an address."""
    from dkrr.store.objects import read_range

    return [read_range(array.store, array.chunk_key(index), start, length) for index, start in wanted]


def verify_array(array: ChunkArray, indices: Iterable[Sequence[int]] | None = None) -> list[str]:
    """Problems of an array: chunks that are missing or damaged, keys that do not belong there.

    Parameters
    ----------
    array
        Any array of checksummed chunks.
    indices
        Chunks that must be there; None means all.

    Returns
    -------
    problems : list of str
        One sentence each, naming the chunk and the reason; empty when the array is whole.

    Cost
    ----
    One pass over the bytes; memory for one chunk.
    """
    wanted = [tuple(index) for index in (np.ndindex(*array.num_chunks) if indices is None else indices)]
    problems = [f"chunk {index} is damaged ({reason})" for index, reason in _damages(array, wanted)]
    return problems + list(_unknown_keys(array, wanted))


def _damages(array: ChunkArray, indices: Iterable[Sequence[int]]) -> Iterator[tuple[str, str]]:
    """Chunks that are missing or damaged, and why."""
    for index in indices:
        try:
            array.read(index)
        except DamagedChunkError as exc:
            yield f"({', '.join(map(str, index))})", exc.reason


def verify_gram(gram: TileMatrix, operator: RidgeOperator | None = None) -> list[str]:
    """Problems of a Gram matrix: every lower tile's checksum and finiteness, sampled entries, unknown keys.

    Parameters
    ----------
    operator
        The kernel and the rows, when they are at hand; without them no entry is compared.
    """
    problems = []
    for i, j in gram.grid.lower():
        problem = _tile_problem(gram, i, j)
        if problem is None and operator is not None and not gram_samples_agree(operator, gram, i, j):
            problem = "passes its checksum and holds other entries than its rows give"
        if problem is not None:
            problems.append(f"tile ({i}, {j}) {problem}")
    return problems + list(_unknown_keys(gram.array, gram.grid.lower()))


def verify_factor(factor: TileMatrix, operator: RidgeOperator | None = None) -> list[str]:
    """Problems of a factor: every lower tile's checksum and finiteness, sampled entries of L L^T, unknown keys.

    Of tiles that stand to the right of a wrong tile, in its row block or against it, no entries are compared: they
    would disagree whether they are right or not. Of the diagonal of the inverse, which may lie below the factor, the
    chunks that are there are read; the others are computed when they are needed.

    Parameters
    ----------
    operator
        A, when kernel and rows are at hand; without them no entry is compared.
    """
    problems = []
    wrong: set[int] = set()  # row blocks with a wrong tile, which comes into every later sum over their rows
    for i, j in factor.grid.lower():
        problem = _tile_problem(factor, i, j)
        if problem is None and operator is not None and not wrong & {i, j}:
            error, bar = max(_factor_errors(operator, factor, i, j), key=lambda pair: pair[0] / max(pair[1], 1e-300))
            if not error <= bar:
                problem = f"passes its checksum and is wrong (L L^T differs from A by {error:.1e}, {bar:.1e} allowed)"
        if problem is not None:
            wrong.add(i)
            problems.append(f"tile ({i}, {j}) {problem}")
    below = None
    if read_json(factor.array.store, f"{INVERSE_DIAGONAL}/zarr.json") is not None:
        below = ChunkArray.open(factor.array.store, INVERSE_DIAGONAL)
        for index, reason in _damages(below, np.ndindex(*below.num_chunks)):
            if reason != "missing":
                problems.append(f"chunk {index} of {INVERSE_DIAGONAL} is damaged ({reason})")
    return problems + list(_unknown_keys(factor.array, factor.grid.lower(), below))


def _tile_problem(matrix: TileMatrix, i: int, j: int) -> str | None:
    """What is wrong with a tile by itself."""
    try:
        tile = matrix.read(i, j)
    except DamagedChunkError as exc:
        return f"is damaged ({exc.reason})"
    # the Gram matrix is mirrored on read and the factor is 0 there, so the part above the diagonal does not count
    finite = np.isfinite(tile if i != j else np.tril(tile))
    if finite.all():
        return None
    row, column = np.argwhere(~finite)[0] + (matrix.grid.span(i).start, matrix.grid.span(j).start)
    return f"holds a value that is not finite, at row {row:,}, column {column:,}"


def _unknown_keys(
    array: ChunkArray, indices: Iterable[Sequence[int]], below: ChunkArray | None = None
) -> Iterator[str]:
    known = {array.chunk_key(index) for index in indices} | {f"{array.path}/zarr.json".lstrip("/"), MAKER}
    if below is not None:
        known |= {below.chunk_key(index) for index in np.ndindex(*below.num_chunks)} | {f"{below.path}/zarr.json"}
    prefix = f"{array.path}/" if array.path else ""
    for key in (prefix + key for key in list_keys(array.location)):
        if key not in known:
            what = "left by an interrupted write" if key.endswith(".partial") else "of unknown origin"
            yield f"{key} is {what}"
