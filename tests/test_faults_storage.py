"""What storage can do to a fit and a prediction, access by access: the right bytes, or a typed error and then the right bytes.

B: the final bytes are those of an undisturbed run. E: a typed error; the same command run once more gives B.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from zarr.core.sync import sync
from zarr.storage import MemoryStore

from dkrr.dataset import Dataset, RowArray, ingest, open_dataset, prepare_rows
from dkrr.dataset.destination import storage_errors
from dkrr.engine.tasks import InProcessExecutor, Node, Receipt, run_task
from dkrr.errors import (
    DamagedChunkError,
    DataError,
    DkrrError,
    MemoryBudgetError,
    NumericalError,
    ResidualError,
    StorageFullError,
    StoreError,
)
from dkrr.fitting import FitSettings, fit_rows
from dkrr.linalg.cholesky import factorise
from dkrr.linalg.direct import CholeskyFactor, CholeskySolver, Workspace
from dkrr.linalg.gram import build_gram
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.triangular import BlockColumns
from dkrr.model import Model, load_model
from dkrr.prediction import predict_dataset, score_dataset
from dkrr.tiles import TileMatrix
from tests.faults import (
    DAMAGES,
    GET_KINDS,
    SET_KINDS,
    Fault,
    FaultyStore,
    chunk_files,
    contents,
    failing_at,
    swap,
    times,
)
from tests.linalg.helpers import operator, rows

N, TILE = 150, 64


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries at once: the pauses between them are not what is tested."""
    monkeypatch.setattr("dkrr.engine.tasks.time.sleep", lambda seconds: None)


# --- one fit on disk, from rows to predictions ------------------------------------------------------------------------


@dataclass
class Fit:
    """A fit and a prediction in a folder; running it again continues."""

    folder: Path
    gram: str = "on_the_fly"
    executor: Any = None

    @property
    def train(self) -> Dataset:
        return open_dataset(str(self.folder / "rows.zarr"))

    @property
    def model_path(self) -> Path:
        return self.folder / "model.zarr"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def prepare(self) -> Fit:
        self.folder.mkdir(exist_ok=True)
        rows(self.folder, n=N, d=3, t=2)
        rng = np.random.default_rng(5)
        ingest(rng.standard_normal((90, 3)), self.folder / "new.zarr")
        return self

    def run(self) -> None:
        work = Workspace(store=str(self.store), executor=self.executor or InProcessExecutor(), blas="test")
        train = self.train
        kernel = operator(train).kernel
        settings = FitSettings(kernel=kernel, alpha=(1e-2,), tile_size=TILE, gram=self.gram)
        with fit_rows(train, settings, work) as result:
            assert train.y is not None
            center = None if result.operator.rows is None else result.operator.rows.center
            model = Model(
                kernel=kernel,
                x_fit=train.X,
                dual_coef=result.dual_coef,
                solution=replace(result.solution, seconds={}),
                center=None if center is None else np.asarray(center),
            )
            model.save(str(self.model_path), overwrite=True)

    def predict(self) -> np.ndarray:
        new = open_dataset(str(self.folder / "new.zarr"))
        with storage_errors(self.folder):
            result, _ = predict_dataset(
                load_model(str(self.model_path)), new, str(self.folder / "p.zarr"), self.executor or InProcessExecutor()
            )
            return result.read(0, 90)

    def state(self) -> tuple[dict[str, bytes], dict[str, bytes], bytes]:
        """Everything that must be the same: the store's tiles, the model, predictions."""
        return contents(self.store), contents(self.model_path), self.predict().tobytes()


@pytest.fixture(scope="module", params=["on_the_fly", "stored"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    fit = Fit(tmp_path_factory.mktemp("undisturbed"), gram=request.param).prepare()
    fit.run()
    return request.param, fit.state()


def attempt(action: Callable[[], Any]) -> str:
    """B or E; an error without a type is a failure."""
    try:
        action()
    except DkrrError as exc:
        assert exc.message
        assert "\n" not in exc.message
        return "E"
    return "B"


def is_clean(folder: Path) -> bool:
    return not list(folder.rglob("*.partial")) and not list(folder.rglob("*.lock"))


@pytest.mark.parametrize("site", ["chunk.before_read", "chunk.before_write", "chunk.mid_write", "chunk.after_write"])
def test_every_access_of_a_fit_may_fail_once(site: str, reference: tuple[str, Any], tmp_path: Path) -> None:
    """A task retries, so a single EIO within one is not even noticed; elsewhere it ends the run with a type."""
    gram, expected = reference
    fired = 0
    for number in range(1, 1000, 1 if site == "chunk.mid_write" else 4):
        fit = Fit(tmp_path / str(number), gram=gram).prepare()
        with failing_at(f"{site}:@{number}:eio") as points:
            attempt(lambda fit=fit: (fit.run(), fit.predict()))
        if points.rules[0].visits < number:
            break
        fired += 1
        assert is_clean(fit.folder), number
        fit.run()
        assert fit.state() == expected, number
    else:
        pytest.fail("the fault never stopped firing")
    assert fired >= 5


@pytest.mark.parametrize("number", [1, 4, 9, 14])
def test_a_disk_that_stays_full_ends_with_the_bytes_needed(
    number: int, reference: tuple[str, Any], tmp_path: Path
) -> None:
    gram, expected = reference
    fit = Fit(tmp_path / "fit", gram=gram).prepare()
    with failing_at(f"chunk.mid_write:@{number}:eio") as points:
        points.rules[0].visit, points.rules[0].action = None, "enospc"
        points.rules[0].is_due = lambda: _count(points.rules[0]) >= number  # type: ignore[method-assign]
        with pytest.raises(StorageFullError) as caught:
            fit.run()
    assert caught.value.exit_code == 3
    assert isinstance(caught.value, OSError)
    before = times(fit.store) if fit.store.exists() else {}
    assert is_clean(fit.folder)
    fit.run()
    assert fit.state() == expected
    after = times(fit.store)
    assert {key: after[key] for key in before if key in after} == {key: before[key] for key in before if key in after}


def _count(rule: Any) -> int:
    rule.visits += 1
    return int(rule.visits)


def test_a_full_disk_in_a_task_says_how_much_is_missing(tmp_path: Path) -> None:
    fit = Fit(tmp_path / "fit").prepare()
    with failing_at("cholesky.tile.after_compute:1:enospc"), pytest.raises(StorageFullError) as caught:
        fit.run()
    assert f"about {6 * (8 * TILE**2 + 4):,} bytes are still to be written" in caught.value.message


@pytest.mark.parametrize("site", ["gram.tile.after_compute", "cholesky.tile.before_read", "solve.block.after_compute"])
def test_memory_errors_name_the_tile_size_and_a_smaller_one(site: str, tmp_path: Path) -> None:
    fit = Fit(tmp_path / "fit", gram="stored").prepare()
    expected = Fit(tmp_path / "other", gram="stored").prepare()
    expected.run()
    with failing_at(f"{site}:@2:memoryerror"), pytest.raises(MemoryBudgetError) as caught:
        fit.run()
    assert caught.value.tile_size == TILE
    assert "tile_size = 32" in caught.value.hint
    assert isinstance(caught.value, MemoryError)
    fit.run()
    assert fit.state() == expected.state()


@pytest.mark.parametrize(
    ("site", "error"),
    [
        ("gram.tile.after_compute", DataError),
        ("cholesky.tile.after_compute", DataError),
        ("solve.block.after_compute", DataError),
    ],
)
def test_a_nan_in_memory_is_never_written(
    site: str, error: type[DkrrError], reference: tuple[str, Any], tmp_path: Path
) -> None:
    gram, expected = reference
    if site.startswith("gram") and gram != "stored":
        gram = "stored"
    fit = Fit(tmp_path / "fit", gram=gram).prepare()
    with failing_at(f"{site}:@2:nan"), pytest.raises(error, match="not finite"):
        fit.run()
    assert all(np.isfinite(_values(path)).any() for path in chunk_files(fit.store))
    fit.run()
    if gram == reference[0]:
        assert fit.state() == expected
    else:
        fit.predict()


def _values(path: Path) -> np.ndarray:
    return np.frombuffer(path.read_bytes()[:-4])


# --- a tile that is wrong although its checksum is right --------------------------------------------------------------


@pytest.mark.parametrize("number", range(1, 7))
def test_a_nan_that_reached_the_disk_is_blamed_on_its_tile(number: int, tmp_path: Path) -> None:
    """The checksum is taken of what was spoilt; the reader finds it, and the tile is computed again."""
    system = operator(rows(tmp_path, n=N, d=3, t=2))
    expected, factor = tiles(system, tmp_path / "a"), tiles(system, tmp_path / "b")
    factorise(system, expected, InProcessExecutor())
    # seed 3 draws entries below the diagonal; a NaN above it is never read
    with failing_at(f"seed=3;chunk.before_write:@{number}:nan") as points:
        factorise(system, factor, InProcessExecutor())
    assert points.rules[0].visits > number
    solve(system, factor)  # reads what the factorisation had no need of: the last tile
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("number", range(2, 12))
def test_a_bit_that_flips_in_memory_is_found_by_the_residual(number: int, tmp_path: Path) -> None:
    """High bits of entries: E, by a wrong pivot, a value that is not finite, or the residual. Never a wrong answer."""
    data = rows(tmp_path, n=N, d=3, t=2)
    system = operator(data)
    factor = tiles(system, tmp_path / "L")
    right = tiles(system, tmp_path / "right")
    factorise(system, right, InProcessExecutor())
    with failing_at(f"seed={number};cholesky.tile.after_compute:@{number % 6 + 1}:bitflip"):
        factorise(system, factor, InProcessExecutor())
    expected = solve(system, right)
    try:
        found = solve(system, factor)
    except NumericalError:
        return  # and nothing was changed; see the next test for what a second run finds
    assert np.linalg.norm(found - expected) <= 1e-9 * np.linalg.norm(expected)


def exchange(folder: Path, first: str, second: str) -> None:
    swap(folder / "c" / first, folder / "c" / second)


@pytest.mark.parametrize(("first", "second"), [("1/0", "2/0"), ("0/0", "1/1"), ("1/0", "2/1"), ("2/0", "2/1")])
def test_swapped_tiles_of_the_factor_are_found_when_it_is_continued(first: str, second: str, tmp_path: Path) -> None:
    """All other tiles stay as they are, to the modification time."""
    data = rows(tmp_path, n=4 * TILE, d=3, t=2)
    system = operator(data)
    factor = tiles(system, tmp_path / "L")
    factorise(system, factor, InProcessExecutor())
    before, written = contents(tmp_path / "L"), times(tmp_path / "L")
    exchange(tmp_path / "L", first, second)
    factorise(system, factor, InProcessExecutor())
    assert contents(tmp_path / "L") == before
    after = times(tmp_path / "L")
    assert {key for key in after if after[key] != written[key]} == {f"c/{first}", f"c/{second}"}


def test_swapped_tiles_are_found_by_the_residual_when_nothing_is_continued(tmp_path: Path) -> None:
    system = operator(rows(tmp_path, n=N, d=3, t=2))
    factor = tiles(system, tmp_path / "L")
    factorise(system, factor, InProcessExecutor())
    exchange(tmp_path / "L", "1/0", "2/1")
    with pytest.raises((ResidualError, DataError)):
        solve(system, factor)


def test_swapped_tiles_under_a_running_factorisation_do_not_blame_the_matrix(tmp_path: Path) -> None:
    """A pivot that fails because of a wrong tile: the tile is computed again, and no alpha is suggested."""
    system = operator(rows(tmp_path, n=4 * TILE, d=3, t=2), alpha=1e-6)
    right, factor = tiles(system, tmp_path / "right"), tiles(system, tmp_path / "L")
    factorise(system, right, InProcessExecutor())

    class Swapping(InProcessExecutor):
        """Exchanges two tiles, once, behind the back of the run that has just written them."""

        done = False

        def run(self, phase: str, function: Any, payload: Any, nodes: Any, progress: Any = None) -> Any:
            def spoiling(task: Any, i: int, j: int) -> Any:
                if (i, j) == (3, 3) and not self.done:
                    self.done = True
                    # large entries in place of the small ones of a later column
                    exchange(tmp_path / "L", "3/0", "3/2")
                return function(task, i, j)

            return super().run(phase, spoiling, payload, nodes, progress)

    executor = Swapping()
    try:
        factorise(system, factor, executor)
    except DkrrError as exc:
        pytest.fail(f"{exc}")
    assert executor.done
    factorise(system, factor, InProcessExecutor())
    assert contents(tmp_path / "L") == contents(tmp_path / "right")


# --- every get and every set of a store that is not a folder ----------------------------------------------------------


def tiles(system: RidgeOperator, store: Any) -> TileMatrix:
    with storage_errors(store):  # as around a fit
        return TileMatrix.create(store, system.grid, dtype="float64")


def solve(system: RidgeOperator, factor: TileMatrix, store: Any = None) -> np.ndarray:
    """A u = rhs with a factor; rhs, z and u in ``store``, which is emptied as after a failed fit."""
    store = MemoryStore() if store is None else store
    values = np.random.default_rng(0).standard_normal((system.grid.n, 2))
    try:
        with storage_errors(store):
            rhs = BlockColumns.create(store, "rhs", system.grid, 2, "float64")
            for i, panel in rhs.blocks():
                if not rhs.is_valid(i, panel):
                    rhs.write(i, panel, values[system.grid.span(i)])
            work = Workspace(store="", executor=InProcessExecutor(), blas="test")
            u, _ = CholeskyFactor(solver=CholeskySolver(), operator=system, factor=factor, workspace=work).solve(rhs)
            return np.vstack([u.read_rows(i) for i in range(system.grid.num_tiles)])
    except (ResidualError, DamagedChunkError, DataError):
        sync(store.delete_dir(""))
        raise


class Phase:
    """One phase over a store; ``run`` does it and reads what a later phase would."""

    def __init__(self, folder: Path) -> None:
        self.data = rows(folder, n=N, d=3, t=2)
        self.system = operator(self.data)
        self.folder = folder

    def run(self, store: Any) -> Any:
        raise NotImplementedError


class GramPhase(Phase):
    def run(self, store: Any) -> Any:
        gram = tiles(self.system, store)
        build_gram(self.system, gram, InProcessExecutor())
        factor = tiles(self.system, MemoryStore())
        factorise(replace(self.system, gram=gram), factor, InProcessExecutor())
        return [factor.read(i, j).tobytes() for i, j in factor.grid.lower()]


class FactorPhase(Phase):
    def run(self, store: Any) -> Any:
        factor = tiles(self.system, store)
        factorise(self.system, factor, InProcessExecutor())
        return solve(self.system, factor).tobytes()


class SolvePhase(Phase):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.factor = tiles(self.system, folder / "L")
        factorise(self.system, self.factor, InProcessExecutor())

    def run(self, store: Any) -> Any:
        return solve(self.system, self.factor, store).tobytes()


class PredictPhase(Phase):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        fit = Fit(folder / "fit").prepare()
        fit.run()
        self.model = load_model(str(fit.model_path))

    def run(self, store: Any) -> Any:
        with storage_errors(store):
            result, _ = predict_dataset(self.model, self.data, store, SmallBlocks())
            return result.read(0, N).tobytes()


class SmallBlocks(InProcessExecutor):
    pass


PHASES = {"gram": GramPhase, "factorise": FactorPhase, "solve": SolvePhase, "predict": PredictPhase}


@pytest.fixture(scope="module", params=list(PHASES))
def phase(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Phase, Any, Any]:
    phase = PHASES[request.param](tmp_path_factory.mktemp(request.param))
    store = FaultyStore()
    answer = phase.run(store)
    return phase, answer, store.contents()


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize(
    ("operation", "kind"), [("get", kind) for kind in GET_KINDS] + [("set", kind) for kind in SET_KINDS]
)
def test_every_get_and_every_set_may_fail(
    phase: tuple[Phase, Any, Any], operation: Any, kind: str, forever: bool
) -> None:
    run, answer, expected = phase
    for number in range(1, 1000):
        store = FaultyStore(fault=Fault(operation, number, kind, forever))
        outcome = attempt(lambda store=store: _same(run.run(store), answer))
        fired = store.fired
        store.arm(None)
        if not fired:
            assert outcome == "B"
            assert store.contents() == expected
            break
        if attempt(lambda store=store: _same(run.run(store), answer)) == "E":
            # spoilt metadata (no store of ours writes it in pieces) is named until somebody removes it
            spoilt = [key for key, value in store.contents().items() if "zarr.json" in key and value != expected[key]]
            assert spoilt, number
            assert kind in ("torn", "short", "flip")
            for key in spoilt:
                sync(store.delete(key))
            assert _same(run.run(store), answer)
        assert store.contents() == expected, number
    else:
        pytest.fail("the fault never stopped firing")
    assert number > 1


def _same(found: Any, expected: Any) -> bool:
    assert found == expected, "a fault changed the answer"
    return True
