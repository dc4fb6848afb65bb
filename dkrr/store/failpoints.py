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
import signal
import threading
import time
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

__all__ = ["Failpoints", "failpoint"]

_LOG = logging.getLogger("dkrr.failpoints")
_ERRNOS = {"eio": errno.EIO, "enospc": errno.ENOSPC, "estale": errno.ESTALE}
_SIGNALS = {"sigkill": signal.SIGKILL, "sigstop": signal.SIGSTOP}
_ON_ARRAYS = {"nan", "bitflip"}
_ACTIONS = sorted([*_ERRNOS, *_SIGNALS, *_ON_ARRAYS, "memoryerror", "sleep=SECONDS"])
_GRAMMAR = "'seed=7;site:probability:action' or 'site:@3:action' expected"


@dataclass
class _Rule:
    """One ``site:when:action`` with its own generator and count of visits."""

    number: int
    site: str
    action: str
    probability: float
    visit: int | None  # fire at exactly this visit, counted from 1
    seconds: float
    draws: random.Random
    visits: int = field(default=0)

    @classmethod
    def parse(cls, number: int, text: str, seed: int) -> _Rule:
        parts = [part.strip() for part in text.split(":")]
        if len(parts) != 3 or not parts[0]:
            raise ValueError(f"failpoint {text!r} is not understood; {_GRAMMAR}")
        site, when, action = parts
        name, _, argument = action.partition("=")
        known = {*_ERRNOS, *_SIGNALS, *_ON_ARRAYS, "memoryerror", "sleep"}
        if name not in known or (name == "sleep") != bool(argument):
            raise ValueError(f"failpoint {text!r} has action {action!r}; one of {', '.join(_ACTIONS)} expected")
        try:
            visit = int(when[1:]) if when.startswith("@") else None
            probability = 1.0 if visit is not None else float(when)
            seconds = float(argument) if argument else 0.0
        except ValueError:
            raise ValueError(f"failpoint {text!r} has no number where one belongs; {_GRAMMAR}") from None
        if not 0.0 <= probability <= 1.0 or (visit is not None and visit < 1) or not 0.0 <= seconds < float("inf"):
            raise ValueError(f"failpoint {text!r}: probability 0 to 1, visit from @1 and seconds >= 0 expected")
        return cls(number, site, name, probability, visit, seconds, random.Random(f"{seed}/{number}/{text}"))  # noqa: S311

    def is_due(self) -> bool:
        """Count a visit of the site and say whether the rule fires at it."""
        self.visits += 1
        if self.visit is not None:
            return self.visits == self.visit
        return self.draws.random() < self.probability


class Failpoints:
    """The rules of one specification; ``once`` is the folder of token files, or None.

    Raises
    ------
    ValueError
        The specification is not understood: a mistyped fault must not pass as a test that survived it.
    """

    def __init__(self, specification: str, once: str | None = None) -> None:
        self.specification = specification
        self.once = Path(once) if once else None
        self.seed = 0
        self._lock = threading.Lock()
        texts = []
        for text in filter(None, (part.strip() for part in specification.split(";"))):
            if text.startswith("seed="):
                try:
                    self.seed = int(text.removeprefix("seed="))
                except ValueError:
                    raise ValueError(f"failpoint {text!r} is not a seed; {_GRAMMAR}") from None
            else:
                texts.append(text)
        self.rules = [_Rule.parse(number, text, self.seed) for number, text in enumerate(texts)]
        if self.once is not None:
            self.once.mkdir(parents=True, exist_ok=True)

    def hit(self, site: str, array: Any = None) -> None:
        """Pass ``site``: fire every rule that is due there."""
        for rule in self.rules:
            if not (rule.site == site or ("*" in rule.site and fnmatchcase(site, rule.site))):
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
        else:
            _spoil(rule, site, array)


def _spoil(rule: _Rule, site: str, array: Any) -> None:
    """Change one element, or one bit, of ``array`` in place."""
    if array is None:
        raise ValueError(f"failpoint {site} hands over no array; {rule.action} belongs on one that does")
    if rule.action == "nan":
        shape = array.shape
        array[tuple(rule.draws.randrange(length) for length in shape)] = float("nan")
        return
    octets = memoryview(array).cast("B")
    position = rule.draws.randrange(len(octets))
    octets[position] ^= 1 << rule.draws.randrange(8)


def _from_environment() -> Failpoints | None:
    specification = os.environ.get("DKRR_FAILPOINTS", "")
    if not specification:
        return None
    once = os.environ.get("DKRR_FAILPOINTS_ONCE") or None
    _LOG.warning("DKRR_FAILPOINTS is set, faults will happen on purpose: %s (once: %s)", specification, once)
    return Failpoints(specification, once)


_active = _from_environment()


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
