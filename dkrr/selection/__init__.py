"""Choosing: kernels, widths and alpha. Names are loaded when they are first used."""

from importlib import import_module
from typing import Any

_HOMES = {"TuneResult": "choice", "TuneSettings": "choice", "tune": "tuning"}

__all__ = ["TuneResult", "TuneSettings", "tune"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dkrr.selection' has no attribute {name!r}")
    return getattr(import_module(f"dkrr.selection.{_HOMES[name]}"), name)
