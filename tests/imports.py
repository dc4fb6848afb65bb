"""Which module imports which, read from the source: the imports at the top, in functions and under TYPE_CHECKING."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

# from the lowest floor to the highest; a module may import from its own floor and from those below
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"_version", "errors", "kernels", "markup", "store", "threads"}),
    frozenset({"dataset"}),
    frozenset({"tiles"}),
    frozenset({"engine"}),
    frozenset({"linalg"}),
    frozenset({"fit"}),
    frozenset({"models"}),
    frozenset({"selection"}),
    frozenset({"jobs"}),
    frozenset({"cli"}),
)
_LEVEL = {unit: level for level, units in enumerate(FLOORS) for unit in units}


def imported_names(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that ``source`` imports, ``import_module("...")`` included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package else -1]
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *filter(None, [node.module])])
            # "from dkrr import errors" names a module, "from dkrr.errors import DataError" does not
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"} and node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)


def modules(package: Path) -> Iterator[tuple[str, bool, str]]:
    """Dotted name, whether it is a package, and source of every module below ``package``."""
    for path in sorted(package.rglob("*.py")):
        parts = list(path.relative_to(package.parent).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        yield ".".join(parts[:-1] if is_package else parts), is_package, path.read_text()


def violations(package: Path) -> list[str]:
    """Every import in ``package`` that points upwards, round in a circle, or to ``distributed`` from another floor."""
    found = []
    edges: dict[str, set[str]] = {}
    root = package.name
    for module, is_package, source in modules(package):
        if module == root:
            continue  # the facade re-exports names of every floor
        unit = module.split(".")[1]
        if unit not in _LEVEL:
            found.append(f"{module}: on no floor; add it to FLOORS")
            continue
        for line, name in imported_names(source, module, is_package):
            where = f"{module}:{line} imports {name}"
            top, *rest = name.split(".")
            if unit != "engine" and (top == "distributed" or name.startswith("dask.distributed")):
                found.append(f"{where}: only engine imports distributed")
            if top != root or (rest and rest[0] == "__version__"):
                continue
            if not rest or rest[0] not in _LEVEL:
                found.append(f"{where}: import from the module that defines it")
            elif _LEVEL[rest[0]] > _LEVEL[unit]:
                found.append(f"{where}: upwards")
            elif rest[0] != unit:
                edges.setdefault(unit, set()).add(rest[0])
    return found + [f"{unit} imports itself by way of others" for unit in sorted(edges) if _reaches(edges, unit, unit)]


def _reaches(edges: dict[str, set[str]], start: str, goal: str) -> bool:
    seen: set[str] = set()
    waiting = list(edges.get(start, ()))
    while waiting:
        unit = waiting.pop()
        if unit == goal:
            return True
        if unit not in seen:
            seen.add(unit)
            waiting.extend(edges.get(unit, ()))
    return False
