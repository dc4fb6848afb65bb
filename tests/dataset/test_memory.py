"""Ingest in bounded memory, measured in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROWS, COLUMNS = 1_250_000, 20  # 200 MB
GROWTH_BYTES = 60e6  # two blocks of a source, a chunk, and what this process imports late

SCRIPT = """
import sys
sys.path[:0] = {path!r}
import numpy as np
from dkrr.dataset import ingest
{imports}
ingest(np.random.default_rng(0).random((2000, 20)), {folder!r} + "/warm.zarr")

def peak():  # not ru_maxrss: a child starts with the figure of the process that forked it
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("VmHWM")).split()[1]) * 1024

before = peak()
{action}
print(peak() - before)
"""


def growth(folder: Path, action: str, imports: str = "") -> float:
    script = SCRIPT.format(path=sys.path, folder=str(folder), action=action, imports=imports)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    header = {"descr": "<f8", "shape": (ROWS, COLUMNS)}
    for name, fortran in (("c", False), ("f", True)):
        with open(folder / f"{name}.npy", "wb") as file:
            np.lib.format.write_array_header_1_0(file, {**header, "fortran_order": fortran})
            file.truncate(file.tell() + 8 * ROWS * COLUMNS)  # a hole: no disk is used
    return folder


@pytest.mark.parametrize(
    ("source", "imports"),
    [
        ('{!r} + "/c.npy"', ""),
        ('{!r} + "/f.npy"', ""),
        ('np.load({!r} + "/c.npy", mmap_mode="r")', ""),
        ('"generate:normal?n=1250000&d=19"', "import numpy.random"),
    ],
)
def test_ingest_is_bounded(source: str, imports: str, folder: Path) -> None:
    call = source.format(str(folder))
    action = (
        f"ingest({call}, {str(folder)!r} + '/out.zarr'); import shutil; shutil.rmtree({str(folder)!r} + '/out.zarr')"
    )
    assert growth(folder, action, imports) < GROWTH_BYTES


def test_the_measurement_would_notice(folder: Path) -> None:
    assert growth(folder, f"np.load({str(folder)!r} + '/c.npy').sum()") > GROWTH_BYTES


def test_import_is_light() -> None:
    heavy = ["dask", "distributed", "pandas", "pyarrow", "scipy", "sklearn", "zarr"]
    script = (
        f"import sys; sys.path[:0] = {sys.path!r}; import dkrr.dataset; print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
