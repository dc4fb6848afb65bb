"""Faults on purpose, at what a process does with its files and arrays, for the tests that show what survives.

Python tells audit hooks of every file that is opened, renamed, linked or removed, and dkrr of every array that a task
has computed (``sys.audit("dkrr.compute", site, array)``); the hook here fails some of them. Rules are ::

    seed=7;written*/c/*:0.01:sigkill;write*/aliases.json:@3:enospc;compute.cholesky.tile:1:sleep=0.1

separated by semicolons, each ``site:when:action``. A site is a pattern for a verb and the path that follows it, or for
``compute.`` and what is computed:

    read      a file is opened to be read
    draft     a file is opened to be written
    link      it gets a name that no other file has, as a new document or a lock does
    write     it gets its name, or takes the place of what has it
    written   that is done
    sync      a file or folder is opened to be synced or locked

``when`` is a probability, or ``@k`` for exactly the k-th time that this process comes by. Actions: ``eio``, ``enospc``,
``estale`` (OSError), ``memoryerror``, ``sleep=SECONDS``, ``sigkill``, ``sigstop`` (of this process), and for arrays
``nan`` (one element becomes NaN) and ``bitflip`` (one bit changes).

Each rule draws from its own generator, seeded with the seed and the rule, so that a process meets the same faults in
every repetition. Where ``DKRR_FAILPOINTS_ONCE`` names a folder, a rule fires once among all processes that share the
folder (the one that fires first creates the file ``<number of the rule>`` there): a restarted worker lives on.
"""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

_ERRNOS = {"eio": errno.EIO, "enospc": errno.ENOSPC, "estale": errno.ESTALE}
_SIGNALS = {"sigkill": signal.SIGKILL, "sigstop": signal.SIGSTOP}
_RULE = re.compile(
    rf"(?P<site>[^:\s]+):(?:@(?P<visit>[1-9]\d*)|(?P<probability>0|1(?:\.0)?|0?\.\d+|\de-\d+)):"
    rf"(?:(?P<action>{'|'.join(['bitflip', 'memoryerror', 'nan', *_ERRNOS, *_SIGNALS])})|sleep=(?P<seconds>\d+\.?\d*))"
)
_DRAFT = re.compile(r"\.[0-9a-f]{32}\.partial$")


@dataclass
class _Rule:
    """One ``site:when:action`` with its own generator and count of visits; ``visit``: fires at exactly this one."""

    number: int
    site: str
    action: str
    probability: float
    visit: int
    seconds: float
    draws: random.Random
    visits: int = 0

    def is_due(self) -> bool:
        """Count a visit of the site and say whether the rule fires at it."""
        self.visits += 1
        return self.visits == self.visit if self.visit else self.draws.random() < self.probability


class Failpoints:
    """The rules of one specification; ``once`` is the folder of token files, or None.

    Raises
    ------
    ValueError
        The specification is not understood: a mistyped fault must not pass as a test that survived it.
    """

    def __init__(self, specification: str, once: str | None = None) -> None:
        self.once = Path(once) if once else None
        self.rules: list[_Rule] = []
        self._lock = threading.Lock()
        seed, *texts = ["0", *(text.strip() for text in specification.split(";") if text.strip())]
        if texts and texts[0].startswith("seed="):
            seed = texts.pop(0).removeprefix("seed=")
        for number, text in enumerate(texts):
            found = _RULE.fullmatch(text)
            if found is None:
                raise ValueError(f"failpoint {text!r} is not understood")
            action, probability = found["action"] or "sleep", float(found["probability"] or 1)
            visit, seconds = int(found["visit"] or 0), float(found["seconds"] or 0)
            draws = random.Random(f"{int(seed)}/{number}/{text}")
            self.rules.append(_Rule(number, found["site"], action, probability, visit, seconds, draws))

    def hit(self, site: str, array: Any = None) -> None:
        """Pass ``site``: fire every rule that is due there."""
        for rule in self.rules:
            if fnmatchcase(site, rule.site):
                with self._lock:  # worker threads share the count and the generator
                    is_due = rule.is_due()
                if is_due and self._take_token(rule):
                    _fire(rule, site, array)

    def _take_token(self, rule: _Rule) -> bool:
        if self.once is not None:
            try:
                # on disk before the fault: a process that kills itself must not leave its successor a free token
                self.once.mkdir(parents=True, exist_ok=True)
                (self.once / str(rule.number)).touch(exist_ok=False)
            except FileExistsError:
                return False
        return True


def _fire(rule: _Rule, site: str, array: Any) -> None:
    what = f"failpoint {site}: {rule.action} at visit {rule.visits}"
    if rule.action in _ERRNOS:
        raise OSError(_ERRNOS[rule.action], f"{os.strerror(_ERRNOS[rule.action])} ({what})")
    if rule.action == "memoryerror":
        raise MemoryError(what)
    if rule.action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[rule.action])
    elif rule.action == "nan":
        array[tuple(rule.draws.randrange(length) for length in array.shape)] = float("nan")
    elif rule.action == "bitflip":
        octets = memoryview(array).cast("B")
        octets[rule.draws.randrange(len(octets))] ^= 1 << rule.draws.randrange(8)
    time.sleep(rule.seconds)


def _site_of(event: str, arguments: tuple[Any, ...]) -> str:
    """The verb and the path that rules mean; "" for what none means."""
    if event in ("os.rename", "os.link"):
        verb, path = "write" if event == "os.rename" else "link", arguments[1]
    elif event == "os.remove":
        verb, path = "written", arguments[0]
    else:
        path, mode = arguments[:2]
        verb = "sync" if mode is None else "read" if mode.startswith("r") else "draft"
    if not isinstance(path, str | os.PathLike) or (verb == "written" and not _DRAFT.search(os.fspath(path))):
        return ""
    site = verb + os.path.abspath(path)
    return "" if site.endswith(".pyc") else _DRAFT.sub("", site) if verb in ("draft", "written") else site


active: Failpoints | None = None
_is_hooked = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if active is not None:
        if event == "dkrr.compute":
            active.hit(f"compute.{arguments[0]}", arguments[1])
        elif event in ("open", "os.rename", "os.link", "os.remove") and (site := _site_of(event, arguments)):
            active.hit(site)


def arm(specification: str | None, once: str | None = None) -> Failpoints | None:
    """Let the rules of a specification hold in this process from now on, instead of others; None ends them."""
    global active, _is_hooked
    active = Failpoints(specification, once) if specification else None
    if not _is_hooked:
        sys.addaudithook(_hook)
        _is_hooked = True
    return active
