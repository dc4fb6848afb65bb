"""Every kind of task alone in a fresh process: its memory rises by no more than was projected for it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.engine.machine import ONE_THREAD
from dkrr.linalg.workspace import task_bytes, tile_bytes
from tests.benchmarks.processes import clean_environment, run_sampled
from tests.measure.figures import SCALE, Judge
from tests.measure.task_memory import KINDS

MODULE = "tests.measure.task_memory"
CONTROL = "control: holds its operands"
MIB = 2**20
TINY_TILE_SIZE = 32


@dataclass(frozen=True)
class Bench:
    """A system of large tiles and one of tiny tiles, both on disk."""

    folder: Path
    tile_size: int
    d: int
    precision: str

    @property
    def projected_bytes(self) -> int:
        """Peak of a worker that runs the task, as planned."""
        return task_bytes(self.tile_size, self.d, np.dtype(self.precision).itemsize)

    @property
    def task_bytes(self) -> int:
        """What a task takes besides the interpreter."""
        return tile_bytes(self.tile_size, self.d, np.dtype(self.precision).itemsize)

    def prepare(self, t: int) -> None:
        systems = {self._path("large"): self.tile_size, self._path("tiny"): TINY_TILE_SIZE}
        for folder in systems:
            Path(folder).mkdir()
        self._program("prepare", systems=systems, d=self.d, t=t, precision=self.precision)

    def run(self, kind: str) -> dict[str, Any]:
        """Run one kind of task alone."""
        function, index = KINDS[kind]
        return self._program(
            "run_task_alone",
            kind=function,
            index=index,
            folder=self._path("large"),
            tile_size=self.tile_size,
            tiny_folder=self._path("tiny"),
            tiny_tile_size=TINY_TILE_SIZE,
        )

    def _path(self, name: str) -> str:
        return str(self.folder / name)

    def _program(self, name: str, **arguments: Any) -> dict[str, Any]:
        (self.folder / "arguments.json").write_text(json.dumps(arguments))
        done = run_sampled(
            [
                *(sys.executable, "-m", "tests.benchmarks.harness", f"{MODULE}:{name}"),
                *(str(self.folder / "arguments.json"), str(self.folder / "result")),
            ],
            folder=self.folder,
            environment=clean_environment(ONE_THREAD),
            timeout=600,
        )
        assert done.status == "ok", done.stderr
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return result


@pytest.mark.measure
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("d", "t", "precision"), [(10, 1, "float64"), (300, 1, "float64"), (10, 256, "float64"), (10, 1, "float32")]
)
def test_measure_task_memory(judge: Judge, folder: Path, d: int, t: int, precision: str) -> None:
    bench = Bench(folder, 2048 if SCALE == 1 else 256, d, precision)
    bench.prepare(t)
    bar = bench.task_bytes
    found = {kind: bench.run(kind) for kind in KINDS}
    for kind, result in found.items():
        print(f"{kind}: rises by {result['rise_bytes'] / MIB:.1f} MiB to {result['peak_bytes'] / MIB:.1f} MiB")
    control = found.pop(CONTROL)
    kind, worst = max(found.items(), key=lambda item: item[1]["rise_bytes"])
    peak = max(result["peak_bytes"] for result in found.values())
    judge(
        f"memory: tasks, d = {d}, t = {t}, {precision}",
        f"at most {worst['rise_bytes'] / MIB:.1f} MiB ({kind}), process {peak / MIB:.0f} MiB; "
        f"control {control['rise_bytes'] / MIB:.1f} MiB",
        f"b = {bench.tile_size:,}: {bar / MIB:.1f} MiB, process {bench.projected_bytes / MIB:.0f} MiB; control above",
        worst["rise_bytes"] <= bar and peak <= bench.projected_bytes and control["rise_bytes"] > bar,
        at_full_size=True,
    )


@pytest.fixture(scope="module")
def small_bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("tasks"), 512, 10, "float64")
    bench.prepare(t=1)
    return bench


@pytest.mark.parametrize("kind", ["gram, ragged", "factor, ragged", "factor, diagonal", "backward", "residual"])
def test_a_task_stays_within_its_projection(small_bench: Bench, kind: str) -> None:
    result = small_bench.run(kind)
    assert result["computed"]
    assert result["rise_bytes"] <= small_bench.task_bytes
    assert result["peak_bytes"] <= small_bench.projected_bytes


def test_a_task_that_holds_its_operands_does_not(small_bench: Bench) -> None:
    assert small_bench.run(CONTROL)["rise_bytes"] > small_bench.task_bytes
