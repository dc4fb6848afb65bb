"""Imports point downwards, only the engine knows distributed, and importing dkrr is quick and silent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dkrr
from tests.imports import violations

PACKAGE = Path(dkrr.__file__).parent


def test_imports_point_downwards() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("path", "line", "expected"),
    [
        ("kernels/rbf.py", "from dkrr.tiles.store import TileGrid", "upwards"),
        ("dataset/ingest.py", "def f():\n    from dkrr.engine import cluster", "upwards"),
        ("dataset/ingest.py", "def f():\n    from ..jobs import spec", "upwards"),
        ("tiles/store.py", "from dkrr import models", "upwards"),
        ("linalg/gram.py", "if TYPE_CHECKING:\n    import dkrr.jobs.spec", "upwards"),
        ("engine/tasks.py", "import importlib\nimportlib.import_module('dkrr.linalg.gram')", "upwards"),
        ("linalg/gram.py", "def f():\n    from distributed import Client", "only engine"),
        ("jobs/run.py", "import dask.distributed", "only engine"),
        ("jobs/run.py", "from dask import distributed", "only engine"),
        ("cli/fit.py", "from dkrr import KernelRidge", "module that defines it"),
        ("plots.py", "", "on no floor"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, path: str, line: str, expected: str) -> None:
    planted = tmp_path / "dkrr" / path
    planted.parent.mkdir(parents=True)
    planted.write_text(line)
    found = violations(tmp_path / "dkrr")
    assert len(found) == 1
    assert expected in found[0]


def test_a_planted_circle_is_found(tmp_path: Path) -> None:
    package = tmp_path / "dkrr"
    package.mkdir()
    (package / "errors.py").write_text("def f():\n    from dkrr.kernels import Kernel")
    (package / "kernels.py").write_text("from dkrr.markup import table")
    (package / "markup.py").write_text("from dkrr.errors import DkrrError")
    expected = [f"{name} imports itself by way of others" for name in ("errors", "kernels", "markup")]
    assert violations(package) == expected


# dask loads dkrr.cli for every command of its own, and every worker loads dkrr; scikit-learn is for estimators, and for
# scores of classes
FACES = {"sklearn", "pandas", "matplotlib", "scipy.stats"}
HEAVY = FACES | {"numpy", "scipy", "pyarrow", "zarr", "dask", "distributed", "pydantic", "rich"}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("dkrr", HEAVY), ("dkrr.cli", HEAVY), ("dkrr.jobs.run", FACES), ("dkrr.jobs.predict", FACES)],
)
def test_import_is_silent_and_loads_nothing_heavy(module: str, heavy: set[str]) -> None:
    code = f"import sys, {module}; sys.stderr.write(' '.join(sorted({heavy!r} & set(sys.modules))))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DKRR_")}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("name", dkrr.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(dkrr, name) is not None
    assert name in dir(dkrr)


def test_every_error_is_public() -> None:
    from dkrr import errors

    assert set(errors.__all__) <= set(dkrr.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="KernelRigde"):
        _ = dkrr.KernelRigde
