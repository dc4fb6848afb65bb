"""What is wrong with a job file, said in one line: the place, what stands there, what belongs there.

You need it only inside :mod:`dkrr.jobs.spec`. It also refuses secrets: a job file is copied into runs, plans and
reports, and no value that looks like a credential may travel with it, nor be repeated in an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pydantic import ValidationError

from dkrr.errors import DkrrError, JobFileError

__all__ = ["describe", "line_of", "nearest", "refuse_secrets", "unknown_key"]

_SECRET = re.compile(
    r"secret|passw|passphrase|token|credential|access_?key|private_?key|api_?key|authori[sz]ation|sign"
)
_HEADER = re.compile(r"\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z0-9_.\"'-]+)\s*=")
# where the work of a key that older job files may have is done by now
_REPLACED = {
    ("cluster", "driver"): "it runs where `dkrr submit` is typed; with Slurm, `sbatch` the script in cluster/slurm",
    ("data", "drift_limit"): "[drift] of a retrain job says how far new rows may be from those of the beginning",
}
_TAGS = {"kernel name", "kernel table", "kernel number"}  # of unions in dkrr.jobs.kernel_table; no keys of the file


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The one of ``choices`` that ``name`` was probably meant to be; None when none is close."""
    close = difflib.get_close_matches(str(name).lower(), list(choices), n=1, cutoff=0.6)
    return close[0] if close else None


def line_of(text: str, path: tuple[Any, ...]) -> int | None:
    """Number of the line of ``text`` on which the key ``path`` stands; that of its table when the key has no line."""
    wanted = [str(part) for part in path if not isinstance(part, int)]
    best, best_length = None, 0
    header: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _HEADER.fullmatch(line):
            header = found = _split_key(match[1])
        elif match := _ASSIGNMENT.match(line):
            found = [*header, *_split_key(match[1])]
        else:
            continue
        if found == wanted[: len(found)] and len(found) > best_length:
            best, best_length = number, len(found)
    return best


def _split_key(text: str) -> list[str]:
    return [part.strip().strip("\"'") for part in text.split(".")]


def where(path: tuple[Any, ...]) -> str:
    """``("model", "kernel", "sum", 0, "gamma")`` as people read it: ``[model.kernel.sum] gamma``."""
    names = [str(part) for part in path if not isinstance(part, int)]
    if len(names) < 2:
        return f"[{names[0]}]" if names else "the job file"
    return f"[{'.'.join(names[:-1])}] {names[-1]}"


def located(message: str, path: tuple[Any, ...], *, text: str, source: str, hint: str = "") -> JobFileError:
    """The error for a mistake at ``path`` of the file ``source`` with content ``text``."""
    line = line_of(text, path)
    place = f"{source}:{line}: " if line else f"{source}: " if source else ""
    return JobFileError(place + message, hint=hint, line=line, key=[str(part) for part in path])


def unknown_key(path: tuple[Any, ...], choices: Iterable[str], *, text: str, source: str) -> JobFileError:
    """The error for a key, or a table, that does not exist."""
    choices = sorted(choices)
    *parents, key = [part for part in path if not isinstance(part, int)]
    what = f"unknown key {key!r} in [{'.'.join(map(str, parents))}]" if parents else f"unknown table [{key}]"
    hint = _REPLACED.get(path, "")
    close = None if hint else nearest(key, choices)
    remedy = f"nearest right name: {close!r}" if close else f"known: {', '.join(choices)}"
    return located(f"{what}; {remedy}", path, text=text, source=source, hint=hint)


def describe(error: ValidationError, *, text: str, source: str, table: str | None = None) -> JobFileError:
    """The first mistake that pydantic found, in our words, with the number of the others.

    ``table`` is the one that was checked, where that was not the whole document.
    """
    details = error.errors(include_url=False)
    first = details[0]
    path = tuple(part for part in first["loc"] if part not in _TAGS)
    path = path if table is None else (table, *path)
    value = first.get("input")
    is_table = isinstance(value, dict) or len(path) < 2
    place = where(path) if is_table else f"{where(path)} = {value!r}"
    cause = first.get("ctx", {}).get("error")
    hint = cause.hint if isinstance(cause, DkrrError) else ""
    if first["type"] == "missing":
        message = f"{where(path)} is missing"
    elif first["type"] == "literal_error":
        expected = first["ctx"]["expected"]
        message = f"{place} is not allowed; {expected} expected"
        close = nearest(str(value), re.findall(r"'([^']+)'", expected))
        hint = f"nearest right value: {close!r}" if close else ""
    elif first["type"] == "union_tag_invalid":
        message = f"{place}: the name of a kernel, or a table with kernel, sum or product, expected"
    elif cause is not None:
        message = f"{place}: {cause.message if isinstance(cause, DkrrError) else cause}"
    else:
        message = f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}"
    if len(details) > 1:
        message += f" (and {len(details) - 1} more)"
    return located(message, path, text=text, source=source, hint=hint)


def refuse_secrets(document: dict[str, Any], *, text: str, source: str) -> None:
    """Raise when a key or a value looks like a credential; the value is not repeated."""
    for path, value in _leaves(document, ()):
        names = [str(part) for part in path if isinstance(part, str)]
        if any(_looks_secret(name) for name in names):
            what = f"{where(path)} looks like a secret"
        elif isinstance(value, str) and _url_secret(value):
            what = f"{where(path)} is an address with a {_url_secret(value)} in it"
        else:
            continue
        raise located(
            what,
            path,
            text=text,
            source=source,
            hint="job files hold no credentials; use the environment, a profile or a role",
        )


def _looks_secret(name: str) -> bool:
    return bool(_SECRET.search(name.lower().replace("-", "_")))


def _url_secret(value: str) -> str:
    """What kind of secret the address holds, "" when none (or when it is no address)."""
    if "://" not in value:
        return ""
    try:
        parts = urlsplit(value)
    except ValueError:
        return ""
    if parts.password is not None:
        return "password"
    if parts.scheme == "s3" and parts.username is not None:
        return "credential"
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    if any(_looks_secret(name) for name, _ in pairs):
        return "credential"
    return next(filter(None, (_url_secret(part) for _, part in pairs)), "")


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None or not value:
        yield path, value
        return
    for key, item in items:
        yield from _leaves(item, (*path, key))
