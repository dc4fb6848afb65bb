"""Values as JSON documents have them."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["exactness", "plain"]


def plain(value: Any) -> Any:
    """Nested values as JSON has them: NumPy numbers become Python's, what is not finite becomes None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def exactness(result: dict[str, Any]) -> tuple[str, float] | None:
    """What a ``result.json`` says of how exact the answer is, and the value of the least exact target; None of none."""
    gaps = [certificate.get("gap") for certificate in result.get("certificates") or []]
    name, values = ("duality gap", gaps) if gaps else ("relative residual", result.get("relative_residual") or [])
    known = [value for value in values if value is not None]
    return (name, max(known)) if known else None
