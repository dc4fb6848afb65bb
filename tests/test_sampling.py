"""The sample of a large table: the same in every run, of the promised size, and nothing of the table is lost."""

from __future__ import annotations

from pathlib import Path

from tests.sampling import MAX_CASES
from tests.test_skips import run_sample

TABLES = f"""
import pytest

@pytest.mark.parametrize("a", range(8))
@pytest.mark.parametrize("b", range(5))
def test_large(a, b): pass

@pytest.mark.parametrize("a", range({MAX_CASES}))
def test_small(a): pass

@pytest.mark.whole
@pytest.mark.parametrize("a", range({MAX_CASES + 3}))
def test_whole(a): pass
"""


def names(folder: Path, expression: str) -> list[str]:
    result = run_sample(folder, "--collect-only", "-m", expression, "-W", "ignore", sample=TABLES)
    return [line for line in result.stdout.splitlines() if "::" in line]


def test_a_large_table_is_sampled_and_the_rest_is_thorough(tmp_path: Path) -> None:
    kept, rest = names(tmp_path, "not thorough"), names(tmp_path, "thorough")
    assert len([name for name in kept if "large" in name]) == MAX_CASES
    assert len([name for name in kept if "small" in name]) == MAX_CASES
    assert len([name for name in kept if "whole" in name]) == MAX_CASES + 3
    assert len(rest) == 40 - MAX_CASES
    assert not set(kept) & set(rest)
