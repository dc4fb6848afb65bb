"""Which columns of a table are features, targets and weights, and which of them a fit on other rows is asked about.

Where both sides have names, names decide: the order does not matter, and what was not fitted is left aside. Where one
side has none, columns are told by their place, and as many as were fitted are expected.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dkrr.errors import DataError, ParameterError, did_you_mean

if TYPE_CHECKING:
    from dkrr.dataset.dataset import Dataset
    from dkrr.dataset.table import Table

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


class Fitted(Protocol):
    """What is known of the columns of a fit: a model, or the data set it is made of."""

    @property
    def names(self) -> Sequence[str]:
        """Of the features; none where somebody gave them none."""

    @property
    def named_targets(self) -> Sequence[str]:
        """Of the columns that the targets are read from; none where somebody gave them none."""

    @property
    def target_names(self) -> Sequence[str]:
        """Of the targets, one by one; of classes ``label=class``."""

    @property
    def classes(self) -> Sequence[Any] | None: ...

    @property
    def num_features(self) -> int: ...

    @property
    def num_targets(self) -> int: ...


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
    is_single = isinstance(target, str) or not isinstance(target, Sequence)
    wanted: Sequence[Any] = [target] if is_single else target  # type: ignore[assignment]
    targets, y_is_1d = table.target or (), table.target_is_1d
    if target is not None:
        targets = tuple(column_number(table, column, "target") for column in wanted)
        y_is_1d = table.target_is_1d if table.target is not None else is_single
        if not targets:
            raise ParameterError("target is an empty list", hint="leave it out if there is no target")
    if table.target not in (None, targets):
        names = ", ".join(table.names[j] for j in table.target or ())
        raise ParameterError(
            f"target {target!r} of {table.label}, which has targets of its own ({names})", hint="leave target out"
        )
    weights = [] if table.weight is None else [table.weight]
    if weight is not None:
        weights = [column_number(table, weight, "weight")]
        if table.weight not in (None, *weights):
            raise ParameterError(f"weight {weight!r} of {table.label}, which has weights of its own", hint="drop it")
    if isinstance(features, str) or not isinstance(features, Iterable | None):
        raise ParameterError(f"features is {features!r}; a list of names or numbers expected", hint="use a list")
    inputs = tuple(j for j in range(len(table.names)) if j not in (*targets, *weights))
    if features is not None:
        inputs = tuple(column_number(table, column, "features") for column in features)
    if not inputs:
        raise DataError(
            f"{table.label} has no feature columns left ({len(table.names)} in all)",
            hint="check target, weight, features and the delimiter",
        )
    for column, count in Counter([*inputs, *targets, *weights]).items():
        if count > 1:
            raise ParameterError(
                f"column {table.names[column]!r} is used {count} times among features, target and weight",
                hint="name every column once",
            )
    return Layout(features=inputs, targets=targets, weight=weights[0] if weights else None, y_is_1d=y_is_1d)


def column_number(table: Table, column: Any, role: str) -> int:
    """The number of a column that is named, or given by its number, as the ``role`` of the table.

    Raises
    ------
    ParameterError
        It does not exist, or may be either of two.
    """
    names, is_text = table.names, isinstance(column, str)
    if isinstance(column, bool) or not (is_text or hasattr(type(column), "__index__")):
        raise ParameterError(f"{role} {column!r} is neither a name nor a number", hint="use a column name")
    named = [j for j, name in enumerate(names) if name == str(column)]
    number = int(column) if is_number(column, names) else None
    placed = [j for j in range(len(names)) if number in (j, j - len(names))]
    if is_text and len(named) > 1:
        raise ParameterError(
            f"{role} {column!r}: {len(named)} columns of {table.label} have that name", hint="use column numbers"
        )
    found = [*dict.fromkeys(named + placed if len(named) == 1 else placed)]
    if len(found) > 1:
        raise ParameterError(
            f"{role} {number} may be column {placed[0]} of {table.label} ({names[placed[0]]!r}) or the one that is "
            f"called {str(number)!r}, column {named[0]}",
            hint=f"the text {str(number)!r} means the name; rename the columns to mean a number",
        )
    if not found and number is None:
        shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
        raise ParameterError(
            f"{role} {column!r} is not a column of {table.label}, which has no column {column!r} among {shown}",
            hint=did_you_mean(column, names, "use one of its names, or a column number, and check the delimiter"),
        )
    if not found:
        raise ParameterError(
            f"{role} {number} is not a column of {table.label}; it has columns 0 to {len(names) - 1}",
            hint=f"columns count from 0 to {len(names) - 1}; -1 is the last",
        )
    return found[0]


def is_number(column: Any, names: Sequence[str]) -> bool:
    """Whether a column is given by its number, as such or as text that is no name."""
    return not isinstance(column, str) or (column not in names and re.fullmatch(r"-?\d+", column) is not None)


def target_columns(target_names: Sequence[str], classes: Sequence[Any] | None) -> tuple[str, ...]:
    """The columns of a table that targets are read from: of one-hot targets the one with the labels."""
    if classes is None or not target_names:
        return tuple(target_names)
    return (target_names[0].removesuffix(f"={classes[0]}"),)


def find_names(wanted: Sequence[str], names: Sequence[str], label: str, noun: str = "columns") -> tuple[int, ...]:
    """Where in ``names`` each of ``wanted`` is.

    Raises
    ------
    DataError
        Some are missing, or there twice.
    """
    places = {name: j for j, name in enumerate(names)}
    missing, known = [name for name in wanted if name not in places], set(wanted)
    if missing:
        others = [name for name in names if name not in known]
        near = did_you_mean(missing[0], others)
        raise DataError(
            f"{label} has no {noun} {_shown(missing)}, which the fit had; it has "
            + (f"{_shown(others)}, which the fit had not" if others else "no others"),
            hint=f"{near} Rename it" if near else "rename those that mean the same; their order is free",
        )
    unique_names([name for name in names if name in known], label, noun)
    return tuple(places[name] for name in wanted)


def frame_labels(values: Any) -> list[Any] | None:
    """What the columns of a frame of any library are called; None of what is no frame."""
    for attribute in ("column_names", "columns"):  # pyarrow's, everybody's
        if hasattr(type(values), attribute):
            return list(getattr(values, attribute))
    return None


def unique_names(labels: Sequence[Any], label: str, noun: str = "columns") -> list[str]:
    """Labels of columns as names.

    Raises
    ------
    DataError
        Some are the same.
    """
    names = [str(name) for name in labels]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(f"{label} has {noun} of the same name: {_shown(repeated)}", hint="rename them")
    return names


def _shown(names: Sequence[Any]) -> str:
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _features(fitted: Fitted, names: Sequence[str], label: Any, *, is_named: bool) -> tuple[int, ...]:
    """Which of the columns ``names`` are the features of a fit: by name, or all where one side has no names."""
    if fitted.names and is_named:
        return find_names(fitted.names, names, str(label))
    if len(names) != fitted.num_features:
        raise DataError(
            f"{label} has {len(names)} features, the model was fitted with {fitted.num_features}",
            hint="give the same columns in the same order, or names on both sides",
        )
    return tuple(range(len(names)))


def feature_columns(fitted: Fitted, table: Table) -> list[int]:
    """The columns of a table that are the features of a fit.

    Raises
    ------
    DataError
        A name is missing; or, where one side has no names, another number of columns that are no targets or weights.
    """
    taken = {*(table.target or ()), table.weight}
    free = [column for column in range(len(table.names)) if column not in taken]
    found = _features(fitted, [table.names[j] for j in free], table.label, is_named=table.is_named)
    return [free[j] for j in found]


def ordered_like(fitted: Fitted, table: Table) -> dict[str, Any]:
    """Columns of a table with features and targets of a fit, by name, as ``ingest`` is told; {} where places decide.

    Raises
    ------
    DataError
        A name is missing, or the targets had none and other columns than they are left.
    """
    if not (fitted.names and table.is_named):
        return {}
    features = [table.names[j] for j in feature_columns(fitted, table)]
    if table.target is not None:
        return {"features": features, "target": None}
    if fitted.named_targets:
        find_names(fitted.named_targets, table.names, table.label)
        return {"features": features, "target": list(fitted.named_targets)}
    left = [name for j, name in enumerate(table.names) if name not in features and j != table.weight]
    wanted = 1 if fitted.classes is not None else fitted.num_targets
    if len(left) != wanted:
        raise DataError(
            f"{table.label} has {len(left)} columns besides the features ({_shown(left)}); "
            f"{wanted} expected, for the targets of the fit have no names",
            hint="leave the others out of the file",
        )
    return {"features": features, "target": left}


def match_features(fitted: Fitted, dataset: Dataset) -> tuple[int, ...] | None:
    """Columns of X that are the features of a fit, None where those are all in order.

    Raises
    ------
    DataError
        As for :func:`feature_columns`.
    """
    found = _features(fitted, dataset.feature_names, dataset.path, is_named=bool(dataset.names))
    return None if found == tuple(range(dataset.num_features)) else found


def match_targets(fitted: Fitted, dataset: Dataset) -> tuple[int, ...] | None:
    """Columns of y that are the targets of a fit, -1 for a class that no row has, None where those are all in order.

    Raises
    ------
    DataError
        A row has a class that the fit does not know, a name is missing, or there is another number of targets.
    """
    if fitted.classes is not None and dataset.classes is not None:
        known, there = list(fitted.classes), list(dataset.classes)
        unknown = [label for j, label in enumerate(there) if label not in known and dataset.y_mean[j] > 0]
        if unknown:
            raise DataError(
                f"{dataset.path} has rows of class {_shown(unknown)}; the model knows {_shown(known)}",
                hint="leave those rows out, or fit on rows of these classes, too",
            )
        found = tuple(there.index(label) if label in there else -1 for label in known)
    elif fitted.named_targets and dataset.named_targets:  # of classes on one side: their columns have names, too
        found = find_names(fitted.target_names, dataset.target_names, str(dataset.path), "targets")
    elif dataset.num_targets != fitted.num_targets:
        raise DataError(
            f"{dataset.path} has {dataset.num_targets} targets, the model {fitted.num_targets}",
            hint="name the columns that the model predicts as targets",
        )
    else:
        return None
    return None if found == tuple(range(dataset.num_targets)) else found


def kept_columns(table: Table, names: Sequence[str]) -> tuple[int, ...]:
    """Columns of a table, names or numbers, that are to be copied beside predictions.

    Raises
    ------
    DataError
        There is no such column, or the table cannot hand out columns as they stand.
    """
    try:
        columns = tuple(dict.fromkeys(column_number(table, name, "keep") for name in names))
    except ParameterError as exc:
        raise DataError(exc.message, hint=exc.hint) from None
    for column in columns:
        table.label_type(column)
    return columns
