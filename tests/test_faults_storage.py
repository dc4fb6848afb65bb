"""What storage and memory can do to a fit and a prediction: the right bytes, or a typed error and then the right bytes.

B: the final bytes are those of an undisturbed run. E: a typed error; the same command, run once more, gives B.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.dataset import ingest, open_dataset, prepare_rows
from dkrr.engine.cluster import checked_executor
from dkrr.errors import (
    DamagedChunkError,
    DataError,
    MemoryBudgetError,
    NumericalError,
    ResidualError,
    StorageFullError,
    StoreError,
)
from dkrr.fit.fitting import FitSettings, fit_rows
from dkrr.linalg.cg import Checkpoint
from dkrr.linalg.direct import CholeskyFactor, factorise
from dkrr.linalg.operators import BlockColumns, RidgeOperator
from dkrr.linalg.products import ArrayRows
from dkrr.linalg.solution import IterativeSettings, Solution
from dkrr.linalg.workspace import Workspace
from dkrr.models.model import Model, load_model
from dkrr.models.prediction import predict_dataset, score_dataset
from dkrr.store.files import join, remove_array, storage_errors
from dkrr.tiles import TileGrid, TileMatrix
from tests.faults import (
    DAMAGES,
    GET_KINDS,
    SET_KINDS,
    Fault,
    FaultyStore,
    InTurn,
    Spoiling,
    Twice,
    attempt,
    chunk_files,
    contents,
    failing_at,
    objects_in_memory,
    swap,
    times,
)
from tests.linalg.helpers import Apart, operator, rows
from tests.test_faults_cluster import cluster

__all__ = ["objects_in_memory"]

pytestmark = pytest.mark.usefixtures("objects_in_memory")

N, TILE, NEW = 150, 32, 90
NUM_TILES = 15  # five a side, the last one ragged; the last two columns have partial sums
KINDS: dict[str, dict[str, Any]] = {
    "stored": {"gram": "stored"},
    "cg": {"solver": "cg", "iterative": IterativeSettings(tol=1e-8, rank=60)},
}
PHASE_ROWS = 80  # for the phases whose every access fails once: three tiles a side


@pytest.fixture(autouse=True)
def small_and_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without pauses, products in six pairs of super-blocks, and a checkpoint every four iterations."""
    monkeypatch.setattr("dkrr.engine.tasks.time.sleep", lambda seconds: None)
    monkeypatch.setattr("dkrr.linalg.matmul.super_blocks", lambda n, *_: TileGrid(n, 64))
    monkeypatch.setattr(Checkpoint, "is_due", lambda checkpoint, iteration: iteration % 4 == 0)


@cache
def scratch() -> Path:
    """A folder until the end of the tests."""
    holder = tempfile.TemporaryDirectory(prefix="dkrr-faults-")
    atexit.register(holder.cleanup)
    return Path(holder.name)


@cache
def small_system(n: int = N) -> RidgeOperator:
    """The operator of n rows, which are written (and synced to the disk) once."""
    folder = scratch() / str(n)
    folder.mkdir()
    return operator(rows(folder, n=n, d=3, t=2), tile_size=TILE)


# --- one fit on disk, from rows to predictions ------------------------------------------------------------------------


@cache
def prepared_rows() -> Path:
    """Rows to train on and rows to predict."""
    small_system()
    ingest(np.random.default_rng(5).standard_normal((NEW, 3)), scratch() / f"{N}/new.zarr")
    return scratch() / str(N)


@dataclass
class Fit:
    """A fit and a prediction in a folder; running it again continues."""

    folder: Path
    kind: str = "stored"
    executor: Any = None

    def __post_init__(self) -> None:
        if not self.folder.exists():
            shutil.copytree(prepared_rows(), self.folder)
        self.store, self.model = self.folder / "store", self.folder / "model.zarr"
        self.executor = self.executor or (Apart() if self.kind == "cg" else InTurn())

    def run(self) -> None:
        train = open_dataset(str(self.folder / "rows.zarr"))
        kernel = operator(train).kernel
        settings = FitSettings(kernel=kernel, alpha=(1e-2,), tile_size=TILE, **KINDS[self.kind])
        work = Workspace(store=str(self.store), executor=self.executor, blas="test")
        with fit_rows(train, settings, work) as result:
            assert result.operator.rows is not None
            model = Model(
                kernel=kernel,
                x_fit=train.X,
                dual_coef=result.dual_coef,
                solution=replace(result.solution, seconds={}, reused={}, message=""),
                center=np.asarray(result.operator.rows.center),
            )
            model.save(str(self.model), overwrite=True)

    def predict(self) -> bytes:
        new = open_dataset(str(self.folder / "new.zarr"))
        with storage_errors(self.folder):
            result, _ = predict_dataset(
                load_model(str(self.model)), new, str(self.folder / "predicted.zarr"), self.executor
            )
            return result.read(0, NEW).tobytes()

    def state(self) -> tuple[Any, ...]:
        """Everything that must be the same: tiles, model, predictions; and nothing may be left over."""
        left = [path.name for path in self.folder.rglob("*") if path.name.endswith((".partial", ".lock"))]
        return contents(self.store), contents(self.model), self.predict(), left

    def array(self, kind: str) -> Path:
        """Where the only Gram matrix or factor is."""
        (found,) = (self.store / kind).glob("*.zarr")
        return found


@cache
def undisturbed(kind: str = "stored") -> tuple[Any, ...]:
    """What every fit must end with."""
    fit = Fit(scratch() / f"undisturbed-{kind}", kind)
    fit.run()
    return fit.state()


def finished(folder: Path) -> Fit:
    """A copy of the undisturbed fit."""
    undisturbed()
    shutil.copytree(scratch() / "undisturbed-stored", folder)
    return Fit(folder)


@pytest.mark.parametrize(
    ("site", "action"),
    [
        ("read*/c/*", "estale"),
        ("draft*/c/*", "eio"),
        ("write*", "enospc"),
        ("written*/c/*", "eio"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_access_of_a_fit_may_fail_once(kind: str, site: str, action: str, tmp_path: Path) -> None:
    """A task tries again, so that one failure within a task is not even noticed; elsewhere it ends the fit with E."""
    step = {"stored": 7, "cg": 83}[kind] * (1 if site != "read*/c/*" else 4 if kind == "stored" else 2)
    for number in range(1, 4000, step):
        fit = Fit(tmp_path / str(number), kind)
        with failing_at(f"{site}:@{number}:{action}") as points:
            outcome = attempt(lambda fit=fit: (fit.run(), fit.predict()), "B")
        if points.rules[0].visits < number:
            assert outcome == "B"
            assert number > 10
            break
        fit.run()
        assert fit.state() == undisturbed(kind), number
    else:
        pytest.fail("the fault never stopped firing")


@pytest.mark.parametrize("site", ["gram.tile", "cholesky.tile", "solve.block"])
def test_memory_errors_name_the_tile_size_and_a_smaller_one(site: str, tmp_path: Path) -> None:
    fit = Fit(tmp_path / "fit")
    with failing_at(f"compute.{site}:@2:memoryerror"), pytest.raises(MemoryBudgetError) as caught:
        fit.run()
    assert caught.value.tile_size == TILE
    assert "tile_size = 16" in caught.value.hint
    assert isinstance(caught.value, MemoryError)
    fit.run()
    assert fit.state() == undisturbed()


@pytest.mark.parametrize("site", ["gram.tile", "cholesky.tile"])
def test_a_full_disk_is_told_with_what_is_still_to_be_written(site: str, tmp_path: Path) -> None:
    fit = Fit(tmp_path / "fit")
    with (
        failing_at(f"compute.{site}:1:enospc"),
        pytest.raises(StorageFullError, match=rf"about {NUM_TILES * (8 * TILE**2 + 4):,} bytes are still to be"),
    ):
        fit.run()
    fit.run()
    assert fit.state() == undisturbed()


@pytest.mark.parametrize("site", ["gram.tile", "cholesky.tile", "solve.block", "predict.block"])
def test_a_nan_in_a_result_is_never_written(site: str, tmp_path: Path) -> None:
    fit = Fit(tmp_path / "fit")
    number = 1 if site == "predict.block" else 2
    with failing_at(f"compute.{site}:@{number}:nan") as points:
        outcome = attempt(lambda: (fit.run(), fit.predict()), "B")
    assert outcome == ("E" if points.rules[0].visits else "B")
    fit.run()
    assert fit.state() == undisturbed()


def test_every_task_may_run_twice(tmp_path: Path) -> None:
    """The second one finds the tile and computes nothing; tasks that only sum give the same sums."""
    fit = Fit(tmp_path / "fit", executor=Twice())
    fit.run()
    assert fit.state() == undisturbed()
    assert fit.executor.computed_again == []


# --- damage between and during runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [*DAMAGES, "swapped"])
@pytest.mark.parametrize("kind", ["grams", "factors"])
def test_every_damaged_tile_is_found_and_computed_again(kind: str, damage: str, tmp_path: Path) -> None:
    """Tiles of an interrupted fit, one after the other; no other tile is written again."""
    fit = finished(tmp_path / "fit")
    files = chunk_files(fit.array(kind))
    for number, path in enumerate(files[::3]):
        written = times(fit.store)
        touched = [path]
        if damage == "swapped":
            touched.append(files[(3 * number + 4) % len(files)])
            swap(*touched)
        else:
            DAMAGES[damage](path)
        fit.run()
        assert fit.state() == undisturbed(), path
        changed = {key for key, when in times(fit.store).items() if written[key] != when}
        assert changed == {str(path.relative_to(fit.store)) for path in touched}


# --- wrong in memory, before the checksum is taken --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "reader"),
    [
        ((0, 0), (1, 0)),
        ((1, 0), (1, 1)),
        ((4, 0), (4, 1)),
        ((3, 1), (3, 3, 0)),
        ((4, 3), (4, 4)),
        ((4, 4), None),
    ],
)
def test_a_nan_that_reached_the_disk_is_blamed_on_its_tile(
    key: tuple[int, int], reader: tuple[int, ...] | None, tmp_path: Path
) -> None:
    """Its reader writes nothing and names it; it is computed again, without an error."""
    system = small_system()
    expected, factor = tiles(system, tmp_path / "right"), tiles(system, tmp_path / "L")
    factorise(system, expected, Workspace("", InTurn()))

    def spoil() -> None:
        tile = np.array(factor.read(*key))
        tile[-1, 0] = np.nan
        factor.write(*key, tile)

    if reader is None:
        factorise(system, factor, Workspace("", InTurn()))
        spoil()
    else:
        executor = Spoiling("factorise", reader, spoil)
        factorise(system, factor, Workspace("", executor))
        assert executor.done
    solve(system, factor)  # reads what the factorisation had no need of: the last tile
    assert contents(tmp_path / "L") == contents(tmp_path / "right")


def test_a_wrong_tile_is_blamed_before_the_matrix(tmp_path: Path) -> None:
    """A pivot fails because of a tile with a good checksum: the tile and the sums it went into are computed again."""
    system = small_system(4 * TILE)
    expected, factor = tiles(system, tmp_path / "right"), tiles(system, tmp_path / "L")
    factorise(system, expected, Workspace("", InTurn()))
    executor = Spoiling("factorise", (3, 3, 0), lambda: factor.write(3, 0, 10 * factor.read(3, 0)))
    factorise(system, factor, Workspace("", executor))
    assert executor.done
    assert contents(tmp_path / "L") == contents(tmp_path / "right")


@pytest.mark.parametrize("seed", range(NUM_TILES + 5))
def test_a_bit_that_flips_in_memory_never_gives_a_wrong_answer(seed: int, tmp_path: Path) -> None:
    """E by a wrong pivot, a value that is not finite, or the residual; or a bit too low to matter."""
    system = small_system()
    expected, factor = tiles(system, tmp_path / "right"), tiles(system, tmp_path / "L")
    factorise(system, expected, Workspace("", InTurn()))
    right = solve(system, expected)
    with failing_at(f"seed={seed};compute.cholesky.*:@{seed + 1}:bitflip"):
        try:
            factorise(system, factor, Workspace("", InTurn()))
            found = solve(system, factor)
        except (NumericalError, DataError):
            return
    # the bar of the residual, 30 n eps, times a condition number of at most n / alpha
    np.testing.assert_allclose(found, right, rtol=0, atol=30 * N * 2.2e-16 * N / 1e-2 * np.abs(right).max())


# --- every get and every set of a store that is not a folder ----------------------------------------------------------


def tiles(system: RidgeOperator, store: Any) -> TileMatrix:
    with storage_errors(store):  # as around a fit
        return TileMatrix.create(store, system.grid, dtype="float64")


def solve(system: RidgeOperator, factor: TileMatrix, store: Any = None) -> np.ndarray:
    """A u = rhs with a factor; rhs, z and u in ``store``, which a damaged or wrong answer empties, as in a fit."""
    store = FaultyStore().address if store is None else store
    values = np.random.default_rng(0).standard_normal((system.grid.n, 2))
    try:
        with storage_errors(store):
            rhs = BlockColumns.create(store, "rhs", system.grid, 2, "float64")
            for i in range(system.grid.num_tiles):
                if not rhs.is_valid(i, 0):
                    rhs.write(i, 0, values[system.grid.span(i)])
            work = Workspace(store="", executor=InTurn(), blas="test")
            u = CholeskyFactor(operator=system, factor=factor, workspace=work).solve(rhs)[0]
            return np.vstack([u.read_rows(i) for i in range(system.grid.num_tiles)])
    except (ResidualError, DamagedChunkError, DataError):
        remove_array(store)
        raise


def factor_and_solve(store: Any) -> bytes:
    system = small_system(PHASE_ROWS)
    factor = tiles(system, join(store, "factor"))
    factorise(system, factor, Workspace("", InTurn()))
    return solve(system, factor, join(store, "solve")).tobytes()


@cache
def undisturbed_objects() -> tuple[bytes, dict[str, bytes]]:
    store = FaultyStore()
    return factor_and_solve(store.address), store.contents()


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize(
    ("operation", "kind"), [("get", kind) for kind in GET_KINDS] + [("set", kind) for kind in SET_KINDS]
)
def test_every_get_and_every_set_may_fail(operation: Any, kind: str, forever: bool) -> None:
    answer, expected = undisturbed_objects()

    def same(store: FaultyStore) -> None:
        assert factor_and_solve(store.address) == answer, "a fault changed the answer"

    for number in range(1, 1000, 3 if forever else 1):
        store = FaultyStore(Fault(operation, number, kind, forever))
        attempt(lambda store=store: same(store), "B")
        fired = store.fired
        store.arm(None)
        if attempt(lambda store=store: same(store), "B") == "E":
            # spoilt metadata (no store of ours writes it in pieces) is named until somebody removes it
            spoilt = [key for key, value in store.contents().items() if "zarr.json" in key and value != expected[key]]
            assert spoilt, number
            assert kind in ("torn", "short", "flip")
            for key in spoilt:
                store.lose(key)
            same(store)
        assert store.contents() == expected, number
        if not fired:
            break
    assert 1 < number < 999


@pytest.mark.parametrize("fault", ["eio", "memoryerror"])
@pytest.mark.parametrize("damage", [*DAMAGES, "swapped"])
def test_a_fault_during_the_recovery_from_damage(damage: str, fault: str, tmp_path: Path) -> None:
    fit = finished(tmp_path / "fit")
    folder = fit.array("factors") / "c"
    if damage == "swapped":
        swap(folder / "1/0", folder / "1/1")
    else:
        DAMAGES[damage](folder / "1/0")
    with failing_at(f"compute.cholesky.tile:1:{fault}") as points:
        assert attempt(fit.run, "B") == "E"
    assert points.rules[0].visits
    with failing_at("write*:@2:eio"):
        attempt(fit.run, "B")
    fit.run()
    assert fit.state() == undisturbed()


@pytest.mark.parametrize(
    ("name", "interrupted_at"),
    [("rhs", "compute.solve.block"), ("z", "write*/model.zarr"), ("u", "write*/model.zarr")],
)
@pytest.mark.parametrize("damage", [*DAMAGES, "swapped"])
def test_damage_to_an_interrupted_solve(name: str, interrupted_at: str, damage: str, tmp_path: Path) -> None:
    """Right-hand sides and solutions that wait for the fit to be continued; the residual rests on the former."""
    fit = Fit(tmp_path / "fit")
    with failing_at(f"{interrupted_at}:1:enospc"), pytest.raises(StorageFullError):
        fit.run()
    (solves,) = (fit.store / "solves").glob("*.zarr")
    folder = solves / "alpha-0" / name / "c"
    if damage == "swapped":
        swap(folder / "0/0", folder / "1/0")
    else:
        DAMAGES[damage](folder / "1/0")
    outcome = attempt(fit.run, "B")
    assert outcome == "B" or name != "rhs"
    if outcome == "B":
        assert fit.state() == undisturbed()
    fit.run()
    assert fit.state() == undisturbed()


def test_swapped_tiles_of_a_finished_factor_are_found_by_the_residual(tmp_path: Path) -> None:
    """Nothing is continued, so nothing is sampled; the error leaves everything as it is, the next run repairs it."""
    system = small_system(4 * TILE)
    factor = tiles(system, tmp_path / "L")
    factorise(system, factor, Workspace("", InTurn()))
    whole = contents(tmp_path / "L")
    swap(tmp_path / "L/c/1/0", tmp_path / "L/c/2/1")
    with pytest.raises(ResidualError) as caught:
        solve(system, factor)
    assert "--verify" in caught.value.hint
    factorise(system, factor, Workspace("", InTurn()))
    assert contents(tmp_path / "L") == whole
    solve(system, factor)


# --- conjugate gradients: the bits depend on what was interrupted where, the answer does not --------------------------


def assert_right(fit: Fit) -> None:
    """Predictions to what the tolerance of the iterations leaves."""
    shutil.rmtree(fit.folder / "predicted.zarr", ignore_errors=True)  # of coefficients with other bits
    found, expected = (np.frombuffer(values) for values in (fit.predict(), undisturbed("cg")[2]))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_preconditioner_of_an_interrupted_fit(damage: str, tmp_path: Path) -> None:
    """Made again where it shows; else it costs iterations."""
    fit = Fit(tmp_path / "fit", "cg")
    with failing_at("write*/state.npz:1:enospc"), pytest.raises(StorageFullError):
        fit.run()
    DAMAGES[damage](next(path for path in chunk_files(fit.store) if "preconditioners" in str(path)))
    if attempt(fit.run, "T") != "T":
        fit.run()
    assert_right(fit)


@pytest.mark.parametrize("fault", ["@3:nan", "@43:nan", "@3:bitflip", "@43:bitflip", "0.008:bitflip"])
def test_what_memory_does_to_a_product_is_found(fault: str, tmp_path: Path) -> None:
    """A flipped bit is finite: the true residual finds it, or the direction does."""
    fit = Fit(tmp_path / "fit", "cg")
    with failing_at(f"seed=0;compute.multiply.pair:{fault}"):
        assert attempt(lambda: (fit.run(), assert_right(fit)), "T") in "ET"
    fit.run()
    assert_right(fit)


@pytest.mark.system
@pytest.mark.short
def test_workers_are_killed_in_every_phase_of_an_iteration(tmp_path: Path) -> None:
    """After a pair was computed, after it was written, and before a file has its name."""
    fit, once = Fit(tmp_path / "fit", "cg"), tmp_path / "once"
    sites = ["compute.multiply.pair:@5", "written*/c/*:@9", "write*/c/*:@13"]
    with cluster(";".join(f"{site}:sigkill" for site in sites), once) as client:
        fit.executor = checked_executor(client)
        fit.executor.stall_seconds = 60.0
        fit.run()
    assert {path.name for path in once.iterdir()} == {"0", "1", "2"}
    fit.executor = InTurn()
    assert_right(fit)


@pytest.mark.parametrize("damage", [*DAMAGES, "swapped"])
@pytest.mark.parametrize("part", ["X_fit", "dual_coef", "rows"])
def test_damage_never_changes_a_prediction(part: str, damage: str, tmp_path: Path) -> None:
    """A model ends with a typed error, and so do rows to predict or to score."""
    n = 4096 + 20
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, 2))
    data = ingest(x, tmp_path / "rows.zarr", y=x[:, :1], rows_per_chunk=1024)
    kernel = operator(data).kernel
    facts: dict[str, Any] = {"solver": "cholesky", "precision": "float64", "converged": True, "num_iterations": 0}
    solution = Solution(relative_residual=[0.0], backward_error=[0.0], **facts)
    coefficients = rng.standard_normal((n, 1))
    model = Model(kernel=kernel, x_fit=ArrayRows(x), dual_coef=ArrayRows(coefficients), solution=solution)
    model.save(tmp_path / "model.zarr")
    folder = tmp_path / ("rows.zarr/X" if part == "rows" else f"model.zarr/{part}")
    if damage == "swapped":
        swap(folder / "c/0/0", folder / "c/1/0")
    else:
        DAMAGES[damage](folder / "c/0/0")
    if part == "rows":
        loaded = load_model(tmp_path / "model.zarr")
        for use in (lambda: predict_dataset(loaded, data, str(tmp_path / "p.zarr"), InTurn()),
                    lambda: score_dataset(loaded, data, InTurn())):  # fmt: skip
            with pytest.raises(DamagedChunkError):
                use()
        return
    with pytest.raises(StoreError, match=f"{part}/c/0/0"):
        load_model(tmp_path / "model.zarr")
    if damage != "swapped":  # what workers do, which leave the manifest to their client
        with pytest.raises(DamagedChunkError):
            load_model(tmp_path / "model.zarr", verify=False).predict(x[:5])


@pytest.mark.parametrize("damage", [*DAMAGES, "swapped"])
@pytest.mark.parametrize("part", ["X", "y"])
def test_damaged_training_rows_end_the_fit(part: str, damage: str, tmp_path: Path) -> None:
    """Rows cannot be computed again. Two chunks that changed places pass their checksums, not the digest."""
    rng = np.random.default_rng(0)
    data = ingest(
        rng.standard_normal((1000, 3)), tmp_path / "rows.zarr", y=rng.standard_normal(1000), rows_per_chunk=256
    )
    path = tmp_path / "rows.zarr" / part / "c/1/0"
    if damage == "swapped":
        swap(path, tmp_path / "rows.zarr" / part / "c/2/0")
    else:
        DAMAGES[damage](path)
    settings = FitSettings(kernel=operator(data).kernel, alpha=(1.0,), tile_size=256)
    work = Workspace(store=str(tmp_path / "store"), executor=InTurn(), blas="test")
    with pytest.raises(DamagedChunkError) as caught, fit_rows(data, settings, work):
        pytest.fail("a fit on damaged rows")
    assert caught.value.path == str(tmp_path / "rows.zarr" / part)
    with pytest.raises(DamagedChunkError):
        prepare_rows(data, tmp_path / "copy.zarr", standardize=True)
    assert not (tmp_path / "copy.zarr").exists()
    assert work.phases == {}
