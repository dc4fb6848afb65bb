"""The comparison of products on a small problem: equal answers count, others and missing programs are said."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.benchmarks import products
from tests.benchmarks.harness import Problem

SMALL = Problem(n=3000, d=10, gamma=0.05)


@pytest.mark.thorough
def test_every_contender_has_a_row(tmp_path: Path) -> None:
    rows = products.compare("rbf", SMALL, 1, tmp_path)
    console = Console(width=150, file=StringIO())
    console.print(products.product_table("rbf", SMALL, rows))
    for name, row in rows.items():
        if importlib.util.find_spec(row.contender.family) is None:
            assert row.status.startswith("not installed")
            assert products.ratio_to_dkrr(rows, name) is None
        else:
            assert row.status == "ok"
            assert row.median is not None
        assert name in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.thorough
def test_the_answers_of_scikit_learn_are_the_same(tmp_path: Path) -> None:
    rows = products.compare("laplacian", replace(SMALL, n=2000, d=20), 1, tmp_path)
    assert [row.status for row in rows.values()] == ["ok", "ok"]
    assert rows["sklearn float64"].error is not None
    assert rows["sklearn float64"].error < 1e-13


@pytest.mark.thorough
def test_another_answer_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = products.CONTENDERS["laplacian"]
    unequal = replace(other, overrides={"precision": "float64", "gamma": 0.07})
    monkeypatch.setitem(products.CONTENDERS, "laplacian", [own, unequal])
    rows = products.compare("laplacian", replace(SMALL, n=500, d=20), 1, tmp_path)
    assert rows[other.name].status.startswith("rejected")
    assert rows[other.name].median is None
