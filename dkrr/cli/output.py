"""Results on stdout: a table for people, JSON for programs. Everything else goes to stderr."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import click

__all__ = ["print_facts", "print_json", "print_table"]

PIPE_WIDTH = 120  # rich assumes 80 columns where there is no terminal, and would cut paths


def print_table(table: Any) -> None:
    """Print a rich table, or anything else that rich can show."""
    import sys

    from rich.console import Console

    Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)


def print_facts(facts: Iterable[tuple[str, Any]], title: str | None = None) -> None:
    """Print names and values as two aligned columns; nothing is cut, so lines can be searched."""
    facts = [(name, str(value)) for name, value in facts]
    if title:
        click.echo(title)
    width = max((len(name) for name, _ in facts), default=0)
    for name, value in facts:
        click.echo(f"  {name:<{width}}  {value}")


def print_json(value: Any) -> None:
    """Print one JSON document; what is not finite is null."""
    from dkrr.store.documents import plain

    click.echo(json.dumps(plain(value), indent=2, sort_keys=True, default=str, allow_nan=False))
