"""Which columns of a table are features, targets and weights."""

from __future__ import annotations

import difflib
import operator
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dkrr.dataset.sources.table import Table
from dkrr.errors import DataError, ParameterError

__all__ = ["Layout", "resolve"]

Column = str | int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Column numbers of a table, resolved once.

    Parameters
    ----------
    features, targets
        In the order in which they are stored.
    weight
        None without weights.
    y_is_1d
        Whether the targets are one column without a second axis.
    """

    features: tuple[int, ...]
    targets: tuple[int, ...]
    weight: int | None
    y_is_1d: bool


def resolve(
    table: Table,
    *,
    target: Column | Sequence[Column] | None,
    features: Sequence[Column] | None,
    weight: Column | None,
) -> Layout:
    """Turn names and numbers into a :class:`Layout`.

    ``target`` None means the table's own targets, if it has any. One name or number gives 1-D targets, a list 2-D ones.
    ``features`` None means all columns that are neither target nor weight.

    Raises
    ------
    ParameterError
        A column that does not exist (the nearest right name is offered), or one with two parts.
    DataError
        No features are left.
    """
    targets, y_is_1d = table.target or (), table.target_is_1d
    if target is not None:
        is_single = isinstance(target, str) or not isinstance(target, Sequence)
        wanted: Sequence[Any] = [target] if is_single else target  # type: ignore[assignment]
        chosen = tuple(_number(table, column, "target") for column in wanted)
        if not chosen:
            raise ParameterError("target is an empty list", hint="leave it out if there is no target")
        if table.target is not None and chosen != table.target:
            names = ", ".join(table.names[j] for j in table.target)
            raise ParameterError(
                f"target {target!r} of {table.label}, which has targets of its own ({names})", hint="leave target out"
            )
        if table.target is None:
            targets, y_is_1d = chosen, is_single
    weights = table.weight
    if weight is not None:
        number = _number(table, weight, "weight")
        if weights is not None and number != weights:
            raise ParameterError(f"weight {weight!r} of {table.label}, which has weights of its own", hint="drop it")
        weights = number
    taken = {*targets, *(() if weights is None else (weights,))}
    if features is None:
        inputs = tuple(j for j in range(len(table.names)) if j not in taken)
    else:
        if isinstance(features, str):
            raise ParameterError(f"features is {features!r}; a list of names or numbers expected", hint="use a list")
        inputs = tuple(_number(table, column, "features") for column in features)
    if not inputs:
        raise DataError(
            f"{table.label} has no feature columns left ({len(table.names)} in all)",
            hint="check target, weight, features and the delimiter",
        )
    for column, count in Counter([*inputs, *targets, *([] if weights is None else [weights])]).items():
        if count > 1:
            raise ParameterError(
                f"column {table.names[column]!r} is used {count} times among features, target and weight",
                hint="name every column once",
            )
    return Layout(features=inputs, targets=targets, weight=weights, y_is_1d=y_is_1d)


def _number(table: Table, column: Any, role: str) -> int:
    names = table.names
    if isinstance(column, str):
        found = [j for j, name in enumerate(names) if name == column]
        if len(found) > 1:
            raise ParameterError(
                f"{role} {column!r}: {len(found)} columns of {table.label} have that name", hint="use column numbers"
            )
        if found:
            return found[0]
        if not re.fullmatch(r"-?\d+", column):
            near = difflib.get_close_matches(column, names, n=1, cutoff=0.5)
            shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            raise ParameterError(
                f"{role} {column!r} is not a column of {table.label} ({shown})",
                hint=f"did you mean {near[0]!r}?" if near else "use one of its names, or a column number",
            )
        column = int(column)
    try:
        if isinstance(column, bool):
            raise TypeError
        number = operator.index(column)
    except TypeError:
        raise ParameterError(f"{role} {column!r} is neither a name nor a number", hint="use a column name") from None
    if not -len(names) <= number < len(names):
        raise ParameterError(
            f"{role} {number} is not a column of {table.label}; it has columns 0 to {len(names) - 1}",
            hint="negative numbers count from the last column, -1",
        )
    return number % len(names)
