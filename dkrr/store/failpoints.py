"""Faults on purpose, at named places, for the tests that show what survives.

``failpoint("chunk.before_write", block)`` does nothing unless the environment variable ``DKRR_FAILPOINTS`` is set when
this module is imported, for example to ::

    DKRR_FAILPOINTS="seed=7;chunk.after_write:0.01:sigkill;chunk.before_write:@3:enospc"

Rules are separated by semicolons; each is ``site:when:action``. A site may end in ``*``. ``when`` is a probability, or
``@k`` for exactly the k-th time that this process comes by the site. Actions: ``eio``, ``enospc``, ``estale``
(OSError), ``memoryerror``, ``sleep=SECONDS``, ``sigkill``, ``sigstop`` (of this process), and on sites that hand over
an array ``nan`` (one element becomes NaN) and ``bitflip`` (one bit changes).

Each rule draws from its own generator, seeded with the seed and the rule, so that a process meets the same faults in
every repetition. Where ``DKRR_FAILPOINTS_ONCE`` names a folder, a rule fires once among all processes that share the
folder (the one that fires first creates the file ``<number of the rule>`` there): a restarted worker lives on.

Cost when unset: one comparison.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import signal
import threading
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

_LOG = logging.getLogger("dkrr.failpoints")
_ERRNOS = {"eio": errno.EIO, "enospc": errno.ENOSPC, "estale": errno.ESTALE}
_SIGNALS = {"sigkill": signal.SIGKILL, "sigstop": signal.SIGSTOP}
_ACTIONS = ("bitflip", *_ERRNOS, "memoryerror", "nan", *_SIGNALS)
_RULE = re.compile(
    rf"(?P<site>[^:\s]+):(?:@(?P<visit>[1-9]\d*)|(?P<probability>0|1(?:\.0)?|0?\.\d+|\de-\d+)):"
    rf"(?:(?P<action>{'|'.join(_ACTIONS)})|sleep=(?P<seconds>\d+\.?\d*))"
)


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
        texts = [text.strip() for text in specification.split(";") if text.strip()]
        found_seed = re.fullmatch(r"seed=(-?\d+)", texts[0]) if texts else None
        self.seed = int(found_seed[1]) if found_seed else 0
        for number, text in enumerate(texts[1:] if found_seed else texts):
            found = _RULE.fullmatch(text)
            if found is None:
                raise ValueError(
                    f"failpoint {text!r} is not understood; 'seed=7' first, then 'site:probability:action' or "
                    f"'site:@3:action' expected, with one of {', '.join(_ACTIONS)}, sleep=SECONDS"
                )
            action, probability = found["action"] or "sleep", float(found["probability"] or 1)
            visit, seconds = int(found["visit"] or 0), float(found["seconds"] or 0)
            draws = random.Random(f"{self.seed}/{number}/{text}")  # noqa: S311
            self.rules.append(_Rule(number, found["site"], action, probability, visit, seconds, draws))

    def hit(self, site: str, array: Any = None) -> None:
        """Pass ``site``: fire every rule that is due there."""
        for rule in self.rules:
            if fnmatchcase(site, rule.site):
                with self._lock:  # worker threads share the count and the generator
                    is_due = rule.is_due()
                if is_due and self._take_token(rule):
                    self._fire(rule, site, array)

    def _take_token(self, rule: _Rule) -> bool:
        if self.once is not None:
            self.once.mkdir(parents=True, exist_ok=True)
            try:
                # on disk before the fault: a process that kills itself must not leave its successor a free token
                (self.once / str(rule.number)).touch(exist_ok=False)
            except FileExistsError:
                return False
        return True

    def _fire(self, rule: _Rule, site: str, array: Any) -> None:
        what = f"failpoint {site}: {rule.action} at visit {rule.visits} (seed {self.seed})"
        _LOG.warning("%s", what)
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


_active: Failpoints | None = None
if _specification := os.environ.get("DKRR_FAILPOINTS"):
    _LOG.warning("DKRR_FAILPOINTS is set, faults will happen on purpose: %s", _specification)
    _active = Failpoints(_specification, os.environ.get("DKRR_FAILPOINTS_ONCE"))


def failpoint(site: str, array: Any = None) -> None:
    """Fail here when ``DKRR_FAILPOINTS`` says so.

    Parameters
    ----------
    site
        Name of the place, such as "chunk.before_write".
    array
        A writable array that the actions ``nan`` and ``bitflip`` may change.
    """
    if _active is not None:
        _active.hit(site, array)
