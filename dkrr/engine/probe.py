"""Can a worker use the store: see what is written here, write, read its own back, and delete it.

A path that exists on every machine and is another disk on each of them is the mistake that this finds: tiles would be
written and never be seen by the next task. Cost: one small object here, three operations a worker.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dkrr.errors import StoreError
from dkrr.store.files import delete_key, local_root, read_json, write_json

__all__ = ["Challenge", "answer_challenge", "challenge", "remove_object"]

Challenge = dict[str, Any]
"""``{"store": path or URL, "key": name of an object, "token": what it holds}``"""


@contextmanager
def challenge(store: Any) -> Iterator[Challenge | None]:
    """A small object in ``store`` while the block runs, for workers to find; None when there is no store to look at.

    Raises
    ------
    StoreError
        The store cannot be written from here.
    """
    if store is None:
        yield None
        return
    asked = {"store": store, "key": f"probe-{uuid.uuid4().hex}.json", "token": uuid.uuid4().hex}
    root = local_root(store)
    try:
        if root is not None:
            root.mkdir(parents=True, exist_ok=True)
        write_json(store, asked["key"], {"token": asked["token"]})
    except OSError as exc:
        raise StoreError(f"{store} cannot be written ({exc})", hint="choose another [output] store") from exc
    try:
        yield asked
    finally:
        with contextlib.suppress(OSError, StoreError):
            remove_object(store, asked["key"])


def answer_challenge(asked: Challenge | None) -> str:
    """What is wrong with the store in this process; "" when all is well."""
    if asked is None:
        return ""
    store, key = asked["store"], asked["key"]
    mine = f"{key.removesuffix('.json')}-{uuid.uuid4().hex}.json"
    step = "see what was written elsewhere"
    try:
        found = read_json(store, key)
        if not isinstance(found, dict) or found.get("token") != asked["token"]:
            return f"cannot {step}: it is not the same place"
        step = "write"
        write_json(store, mine, {"token": asked["token"]})
        step = "read"
        if read_json(store, mine) != {"token": asked["token"]}:
            return "cannot read what it has just written"
        step = "delete"
        remove_object(store, mine)
    except Exception as exc:
        return f"cannot {step} ({type(exc).__name__}: {exc})"
    return ""


def remove_object(store: Any, key: str) -> None:
    """Remove one object below a path or URL."""
    delete_key(store, key)
