"""Sources without a file, for demonstrations and tests: ``sklearn:<name>`` and ``generate:<name>?n=...``.

Generated rows come in fixed blocks of 1,024 with a random stream each, seeded by (seed, block number). So row i is the
same whatever is read before it, in whatever pieces, and the first n rows are the same for every longer n.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset.rows import Floats
from dkrr.dataset.sources.table import MatrixTable
from dkrr.errors import ParameterError

__all__ = ["GeneratedTable", "SklearnTable"]

BLOCK_ROWS = 1024
_SETS = ("breast_cancer", "diabetes", "digits", "iris", "wine")


def _unknown(what: str, name: str, allowed: Sequence[str]) -> ParameterError:
    near = difflib.get_close_matches(name, allowed, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "choose one of them"
    return ParameterError(f"{what} {name!r} is unknown; {', '.join(allowed)} exist", hint=hint)


class SklearnTable(MatrixTable):
    """A data set that scikit-learn ships; its last column is the target."""

    def __init__(self, source: str) -> None:
        name = source.partition(":")[2]
        if name not in _SETS:
            raise _unknown("scikit-learn data set", name, _SETS)
        from sklearn import datasets

        bunch = getattr(datasets, f"load_{name}")()
        self._values = np.column_stack([bunch.data, bunch.target])
        names = [*map(str, bunch.feature_names), "target"]
        super().__init__(source, self._values.shape, names=names)
        self.target, self.target_is_1d = (len(names) - 1,), True

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        return self._values[start:stop]


def _friedman(random: np.random.Generator, d: int, t: int, noise: float, seed: int) -> Floats:
    X = random.random((BLOCK_ROWS, d))
    y = 10 * np.sin(np.pi * X[:, 0] * X[:, 1]) + 20 * (X[:, 2] - 0.5) ** 2 + 10 * X[:, 3] + 5 * X[:, 4]
    return np.column_stack([X, y[:, None] + noise * random.standard_normal((BLOCK_ROWS, t))])


def _normal(random: np.random.Generator, d: int, t: int, noise: float, seed: int) -> Floats:
    X = random.standard_normal((BLOCK_ROWS, d))
    directions = np.random.default_rng([seed, 1 << 40]).standard_normal((d, t))
    directions /= np.linalg.norm(directions, axis=0)
    # einsum and not a BLAS product: its bits do not depend on the BLAS kernel of the machine
    y = np.sin(np.einsum("ij,jk->ik", X, directions))
    return np.column_stack([X, y + noise * random.standard_normal((BLOCK_ROWS, t))])


_MAKERS: dict[str, tuple[Callable[[np.random.Generator, int, int, float, int], Floats], dict[str, float], int]] = {
    # name: (function, defaults, fewest features)
    "friedman": (_friedman, {"n": 20480, "d": 10, "t": 1, "noise": 1.0, "seed": 0}, 5),
    "normal": (_normal, {"n": 20480, "d": 10, "t": 1, "noise": 0.1, "seed": 0}, 1),
}


class GeneratedTable(MatrixTable):
    """Rows of a formula with noise; the last t columns are the targets.

    ``friedman``: x uniform on [0, 1]^d, y = 10 sin(pi x0 x1) + 20 (x2 - 1/2)^2 + 10 x3 + 5 x4 + noise e.
    ``normal``: x standard normal, y_j = sin(a_j . x) + noise e with unit vectors a_j. e is standard normal.
    Parameters: n rows, d features, t targets, noise, seed.

    References
    ----------
    Friedman (1991), "Multivariate adaptive regression splines", The Annals of Statistics 19.
    """

    def __init__(self, source: str) -> None:
        name, _, query = source.partition(":")[2].partition("?")
        if name not in _MAKERS:
            raise _unknown("generator", name, sorted(_MAKERS))
        self._make, defaults, fewest = _MAKERS[name]
        values = dict(defaults)
        for key, text in parse_qsl(query, keep_blank_values=True):
            if key not in values:
                raise _unknown(f"parameter of generate:{name}", key, sorted(values))
            try:
                values[key] = float(text) if key == "noise" else int(text)
            except ValueError:
                wanted = "a number" if key == "noise" else "an integer"
                raise ParameterError(f"{source}: {key} is {text!r}; {wanted} expected", hint=f"{key}=10") from None
        least = {"n": 1, "d": fewest, "t": 1, "noise": 0, "seed": 0}
        for key, value in values.items():
            if not least[key] <= value < float("inf"):
                raise ParameterError(f"{source}: {key} is {value}; at least {least[key]} expected", hint=f"raise {key}")
        n, self._d, self._t, self._seed = (int(values[key]) for key in ("n", "d", "t", "seed"))
        self._noise = float(values["noise"])
        width = self._d + self._t
        targets = ["y"] if self._t == 1 else [f"y{k}" for k in range(self._t)]
        names = [*(f"x{j}" for j in range(self._d)), *targets]
        super().__init__(source, (n, width), names=names, step=BLOCK_ROWS)
        self.target, self.target_is_1d = tuple(range(self._d, width)), self._t == 1

    def read_rows(self, start: int, stop: int) -> Floats:
        first, last = start // BLOCK_ROWS, -(-stop // BLOCK_ROWS)
        blocks = [self._block(i) for i in range(first, last)]
        return np.concatenate(blocks)[start - first * BLOCK_ROWS : stop - first * BLOCK_ROWS]

    def _block(self, i: int) -> Floats:
        random = np.random.default_rng([self._seed, i])
        return self._make(random, self._d, self._t, self._noise, self._seed)
