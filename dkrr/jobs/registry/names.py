"""How a model is named: ``protein@production``, and where the registry is.

You need it wherever a person types a model. Nothing is opened here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from dkrr.errors import ParameterError
from dkrr.store.files import is_url
from dkrr.store.objects import parse_address

__all__ = ["MODELS_VARIABLE", "NAMES", "Reference", "check_name", "models_folder", "parse_reference"]

MODELS_VARIABLE = "DKRR_MODELS"
NAMES = ("production", "candidate", "previous")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_REFERENCE = re.compile(rf"({_NAME.pattern})@({_NAME.pattern})")


@dataclass(frozen=True)
class Reference:
    """A model by name, and which of its versions: an alias, an id, or the number an id begins with."""

    name: str
    selector: str


def check_name(name: str) -> str:
    """The name of a model, if it is one.

    Raises
    ------
    ParameterError
        It holds other characters, or is too long.
    """
    if not _NAME.fullmatch(name) or name.endswith((".partial", ".lock")):
        raise ParameterError(
            f"{name!r} is not the name of a model", hint="use a-z, 0-9, '.', '_' and '-', at most 64 of them"
        )
    return name


def parse_reference(text: str) -> Reference | None:
    """The reference that a text is; None for a path that exists, an address, and everything else."""
    if is_url(text) or os.path.exists(text):
        return None
    match = _REFERENCE.fullmatch(text)
    return None if match is None else Reference(match[1], match[2])


def models_folder(given: str | None = None) -> str:
    """Root of the registry: what is given, else ``DKRR_MODELS``, a path or an address, else ./models."""
    text = given or os.environ.get(MODELS_VARIABLE) or "models"
    return str(parse_address(text)) if is_url(text) else os.path.abspath(os.path.expanduser(text))
