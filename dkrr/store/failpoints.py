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
    visit: int | None
    seconds: float
    draws: random.Random
    visits: int = 0

    def is_due(self) -> bool:
        """Count a visit of the site and say whether the rule fires at it."""
        self.visits += 1
        return self.draws.random() < self.probability if self.visit is None else self.visits == self.visit


class Failpoints:
    """The rules of one specification; ``once`` is the folder of token files, or None.

    Raises
    ------
    ValueError
        The specification is not understood: a mistyped fault must not pass as a test that survived it.
    """

    def __init__(self, specification: str, once: str | None = None) -> None:
        self.once = Path(once) if once else None
        self.seed = 0
        self.rules: list[_Rule] = []
        self._lock = threading.Lock()
        for text in filter(None, (part.strip() for part in specification.split(";"))):
            found = _RULE.fullmatch(text)
            if found is not None:
                number, visit = len(self.rules), found["visit"]
                draws = random.Random(f"{self.seed}/{number}/{text}")  # noqa: S311
                self.rules.append(
                    _Rule(
                        number=number,
                        site=found["site"],
                        action=found["action"] or "sleep",
                        probability=float(found["probability"] or 1),
                        visit=int(visit) if visit else None,
                        seconds=float(found["seconds"] or 0),
                        draws=draws,
                    )
                )
            elif not self.rules and (seed := re.fullmatch(r"seed=(-?\d+)", text)):
                self.seed = int(seed[1])
            else:
                raise ValueError(
                    f"failpoint {text!r} is not understood; 'seed=7' first, then 'site:probability:action' or "
                    f"'site:@3:action' expected, with one of {', '.join(_ACTIONS)}, sleep=SECONDS"
                )
        if self.once is not None:
            self.once.mkdir(parents=True, exist_ok=True)

    def hit(self, site: str, array: Any = None) -> None:
        """Pass ``site``: fire every rule that is due there."""
        for rule in self.rules:
            if not fnmatchcase(site, rule.site):
                continue
            with self._lock:  # worker threads share the count and the generator
                due = rule.is_due()
            if due and self._take_token(rule):
                self._fire(rule, site, array)

    def _take_token(self, rule: _Rule) -> bool:
        if self.once is None:
            return True
        try:
            # on disk before the fault: a process that kills itself must not leave its successor a free token
            os.close(os.open(self.once / str(rule.number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        return True

    def _fire(self, rule: _Rule, site: str, array: Any) -> None:
        what = f"failpoint {site}: {rule.action} at visit {rule.visits} (seed {self.seed})"
        _LOG.warning("%s", what)
        if rule.action in _ERRNOS:
            number = _ERRNOS[rule.action]
            raise OSError(number, f"{os.strerror(number)} ({what})")
        if rule.action == "memoryerror":
            raise MemoryError(what)
        if rule.action == "sleep":
            time.sleep(rule.seconds)
        elif rule.action in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[rule.action])
        elif array is None:
            raise ValueError(f"failpoint {site} hands over no array; {rule.action} belongs on one that does")
        elif rule.action == "nan":
            array[tuple(rule.draws.randrange(length) for length in array.shape)] = float("nan")
        else:
            octets = memoryview(array).cast("B")
            octets[rule.draws.randrange(len(octets))] ^= 1 << rule.draws.randrange(8)


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
