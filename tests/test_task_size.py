"""Tasks carry paths, indices and parameters: what a message of every kind holds, however many rows there are."""

from __future__ import annotations

import pickletools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from dkrr import KernelRidge, load_model
from dkrr.dataset import ingest
from dkrr.engine.tasks import InProcessExecutor, Node, Queue, ThreadExecutor, run_tasks
from dkrr.models.prediction import predict_dataset, score_dataset

MAX_BYTES = 10 * 1024


class Scales:
    """Weighs every message that would be sent, under the name of its function."""

    def __init__(self) -> None:
        self.most: dict[str, int] = defaultdict(int)
        self.arrays: set[str] = set()

    def weigh(self, function: Any, payload: Any, nodes: Sequence[Node]) -> None:
        queue = Queue(nodes, 2)
        while bundle := queue.take():
            queue.finished(bundle)
            message = cloudpickle.dumps(
                (run_tasks, function, payload, [(node.key, node.flops) for node in bundle]), protocol=4
            )
            self.most[function.__name__] = max(self.most[function.__name__], len(message))
            text = " ".join(str(argument) for _, argument, _ in pickletools.genops(message))
            if "numpy" in text and "_reconstruct" in text:
                self.arrays.add(function.__name__)


class NoExecutor(ThreadExecutor):
    """What no executor of a fit is; runs what has no workspace, whose messages go nowhere."""

    run = InProcessExecutor.run


@pytest.fixture
def scales(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scales]:
    found, run = Scales(), InProcessExecutor.run

    def weighed(self: Any, phase: str, function: Any, payload: Any, nodes: Sequence[Node], progress: Any = None) -> Any:
        found.weigh(function, payload, nodes)
        return run(self, phase, function, payload, nodes, progress)

    monkeypatch.setattr(InProcessExecutor, "run", weighed)
    monkeypatch.setattr(InProcessExecutor, "num_threads", 2)  # so that graphs are those of workers, with split sums
    for name in ("InProcessExecutor", "ThreadExecutor"):  # and vectors go through the store
        monkeypatch.setattr(f"dkrr.linalg.workspace.{name}", NoExecutor)
    yield found
    for name, size in sorted(found.most.items()):
        print(f"{name}: {size:,} bytes")
    assert max(found.most.values()) < MAX_BYTES, found.most
    assert not found.arrays


def data(n: int = 640, d: int = 6, t: int = 2) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, d))
    return x, np.sin(x[:, :1] + np.arange(t)) + 0.1 * rng.standard_normal((n, t))


WAYS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "cholesky": ({"solver": "cholesky", "precision": "float64"}, {"factor_tile", "sweep_task", "compute_part"}),
    "two alphas, stored": ({"solver": "cholesky", "alpha": [0.1, 0.2]}, {"gram_tile", "factor_tile"}),
    "intercept": ({"solver": "cholesky", "fit_intercept": True}, {"factor_tile", "sweep_task"}),
    "mixed": ({"solver": "cholesky", "precision": "mixed", "tol": 1e-6}, {"factor_tile", "compute_part"}),
    "cg": ({"solver": "cg", "tol": 1e-6, "solver_params": {"rank": 60}}, {"compute_part"}),
    "nystrom": ({"solver": "nystrom", "tol": 1e-6, "solver_params": {"num_centers": 100}}, {"compute_part"}),
    "primal": ({"solver": "primal", "kernel": "poly", "degree": 3}, {"compute_part"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_task_of_a_fit_is_small(scales: Scales, tmp_path: Path, way: str) -> None:
    x, y = data()
    options, expected = WAYS[way]
    tiles = {} if options["solver"] in ("nystrom", "primal") else {"tile_size": 64}
    estimator = KernelRidge(**{"alpha": 0.1, "kernel": "rbf", "gamma": 0.1, "store": tmp_path, **tiles, **options})
    estimator.fit(x, y)
    print(way, sorted(scales.most))
    assert expected <= set(scales.most)


def test_a_task_of_what_comes_after_a_fit_is_small(scales: Scales, tmp_path: Path) -> None:
    x, y = data(t=1)
    estimator = KernelRidge(alpha=0.1, kernel="rbf", gamma=0.1, store=tmp_path / "store", tile_size=64).fit(x, y)
    estimator.leave_one_out()
    estimator.save(tmp_path / "model.zarr")
    model = load_model(tmp_path / "model.zarr")
    rows = ingest(x, str(tmp_path / "rows.zarr"), y=y)
    executor = InProcessExecutor()
    predict_dataset(model, rows, str(tmp_path / "predictions.zarr"), executor)
    score_dataset(model, rows, executor)
    predict_dataset(model, rows, str(tmp_path / "variance.zarr"), executor, phase="variance")
    assert {"panel_task", "predict_block_task"} <= set(scales.most)


def test_an_array_in_a_message_is_found(scales: Scales) -> None:
    scales.weigh(run_tasks, np.zeros(10), [Node((0,))])
    assert scales.arrays == {"run_tasks"}
    scales.arrays.clear()
