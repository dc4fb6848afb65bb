"""Jobs with a loss whose classes, labels, weights or parameters cannot be used: exit code, file, line and key."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.contract.helpers import run
from tests.jobs.retrain.project import in_process

N = 30
RNG = np.random.default_rng(2)
X = RNG.standard_normal((N, 2))
TWO = np.where(X[:, 0] > 0, "yes", "no")
NUMBERS = np.where(X[:, 0] > 0, 1.0, 2.0)


@pytest.fixture(autouse=True)
def _no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)


def said(folder: Path, y: np.ndarray, model: str, weight: np.ndarray | None, command: str, code: int) -> str:
    """What a command says of a job with these labels, in one line; it ends with ``code``, and leaves no model."""
    frame = pd.DataFrame(X, columns=["a", "b"]).assign(answer=y)
    if weight is not None:
        frame = frame.assign(w=weight)
    frame.to_csv(folder / "rows.csv", index=False)
    numeric = "pinball" in model
    (folder / "job.toml").write_text(
        '[data]\npath = "rows.csv"\nfeatures = ["a", "b"]\ntarget = "answer"\n'
        + ("" if numeric else "one_hot = true\n")
        + ("" if weight is None else 'weight = "w"\n')
        + f'[model]\nkernel = "rbf"\n{model}\n[cluster]\nworkers = 1\n[output]\ndirectory = "run"\n'
    )
    result = run(command, folder / "job.toml", exits=code)
    assert not list(folder.glob("run/model.zarr"))
    return " ".join(result.stderr.split())


@pytest.mark.parametrize("command", ["plan", "fit"])
@pytest.mark.parametrize("loss", ["hinge", "logistic"])
def test_one_class(loss: str, command: str, tmp_path: Path) -> None:
    text = said(tmp_path, np.full(N, "yes"), f'loss = "{loss}"', None, command, 4)
    assert re.search(r"all \d+ training rows of \S*rows.csv are of class 'yes'; at least two classes", text), text
    assert "[data] target" in text


# "NaN" among texts is a text
@pytest.mark.parametrize(("y", "label"), [(TWO, ""), (TWO, "?"), (NUMBERS, ""), (NUMBERS, "?"), (NUMBERS, "NaN")])
def test_a_missing_label(y: np.ndarray, label: str, tmp_path: Path) -> None:
    labels = y.astype(object)
    labels[7] = label
    text = said(tmp_path, labels, 'loss = "hinge"', None, "fit", 4)
    assert re.search(r"row 7 of \S*rows.csv, line 9, has no class in column 'answer'", text), text
    assert "remove the row" in text


@pytest.mark.parametrize("loss", ["hinge", "logistic"])
def test_a_class_without_weight(loss: str, tmp_path: Path) -> None:
    text = said(tmp_path, TWO, f'loss = "{loss}"', (TWO == "yes") * 1.0, "fit", 4)
    assert re.search(r"the weights of class 'no' are all zero", text), text
    assert "[data] weight" in text
    assert "rows.csv" in text


@pytest.mark.parametrize("command", ["plan", "fit"])
@pytest.mark.parametrize("C", ["0", "-1.5", "nan", "inf", '"1"'])
def test_C(C: str, command: str, tmp_path: Path) -> None:
    text = said(tmp_path, TWO, f'loss = "hinge"\nC = {C}', None, command, 2)
    assert re.search(r"job.toml:9: \[model\] C", text), text


@pytest.mark.parametrize("command", ["plan", "fit"])
@pytest.mark.parametrize("quantile", ["0.0", "1.0", "-0.1", "1.5", "nan", "[0.1, 1.5]", "[-0.1, 0.5]", '"0.5"'])
def test_quantile(quantile: str, command: str, tmp_path: Path) -> None:
    text = said(tmp_path, X[:, 1], f'loss = "pinball"\nquantile = {quantile}', None, command, 2)
    assert re.search(r"job.toml:8: \[model\] quantile", text), text
