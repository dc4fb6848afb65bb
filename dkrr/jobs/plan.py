"""Plan: what a job needs and how long it may take, computed before anything is started; refuses what cannot fit.

memory of a task   260 MiB + 5 b^2 itemsize + 24 b d bytes
disk               rows + tiles of the factor (and of the Gram matrix when stored) + right-hand sides + model
flops              n^3 / 3 per distinct alpha
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dkrr.chunks import ChunkArray
from dkrr.engine.doctor import Calibration, calibrate
from dkrr.engine.environment import cpu_count
from dkrr.engine.memory import total_memory_bytes
from dkrr.errors import ParameterError, PlanRefusedError
from dkrr.fitting import BASELINE_BYTES, choose_gram, choose_tile_size, task_bytes
from dkrr.jobs.prepare import Prepared, prepare
from dkrr.jobs.spec import JobSpec, StorageSpec
from dkrr.kernels import Kernel
from dkrr.stores import is_url, local_root, read_json
from dkrr.tiles import TileGrid

__all__ = ["Plan", "make_plan", "plan"]

PARALLEL_EFFICIENCY = 0.8
MAPPED_READ_BYTES_PER_SECOND = 4e9
CLUSTER_START_SECONDS = 2.0
DISK_RESERVE_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that "auto" became, what it needs, and what is there.

    Sizes are in bytes, times in seconds.
    """

    num_rows: int
    num_test_rows: int
    num_features: int
    num_targets: int
    kernel: dict[str, Any]
    alpha: list[float]
    solver: str
    precision: str
    gram: str
    tile_size: int
    tile_rule: str
    num_tiles_per_side: int
    num_tasks: int
    flops: float
    workers: int
    memory_limit_bytes: int | None
    task_bytes: int
    disk_bytes: dict[str, int]
    disk_present_bytes: int
    disk_free_bytes: int | None
    estimated_seconds: dict[str, float]
    calibration: dict[str, float]
    refusal: str = ""
    hint: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def disk_needed_bytes(self) -> int:
        """Bytes still to be written."""
        return max(0, sum(self.disk_bytes.values()) - self.disk_present_bytes)

    @property
    def total_seconds(self) -> float:
        """Estimated wall time."""
        return sum(self.estimated_seconds.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {
            "disk_needed_bytes": self.disk_needed_bytes,
            "total_seconds": self.total_seconds,
        }

    def check(self) -> None:
        """Raise :class:`~dkrr.errors.PlanRefusedError` when the job cannot fit."""
        if self.refusal:
            raise PlanRefusedError(self.refusal, hint=self.hint)

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        text = StringIO()
        Console(width=100, file=text).print(self.table())
        return text.getvalue()

    def table(self) -> Any:
        """The plan as a rich table."""
        from dkrr.jobs.tables import plan_table

        return plan_table(self)

    def __rich__(self) -> Any:
        return self.table()


def plan(job: JobSpec | str | Path | dict[str, Any]) -> Plan:
    """Plan a job: a :class:`~dkrr.jobs.spec.JobSpec`, the path of a job file, or nested dicts.

    The data is ingested (bad rows are found here) and the machine measured for about a second.

    Raises
    ------
    JobFileError, DataError
        The job or its data cannot be used.
    """
    if isinstance(job, dict):
        job = JobSpec.from_dict(job)
    elif not isinstance(job, JobSpec):
        job = JobSpec.load(job)
    store = job.output.store_directory(run_id(job))
    return make_plan(job, prepare(job, store), store)


def run_id(job: JobSpec) -> str:
    """What ``{id}`` in the output directory becomes: 12 hexadecimal digits that belong to this job and no other."""
    if "{id}" not in job.output.directory:
        return Path(job.output.directory).name
    text = json.dumps(job.to_dict(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def make_plan(job: JobSpec, prepared: Prepared, store: Any) -> Plan:
    """Plan a job whose rows are prepared. Measures the machine; starts nothing."""
    if job.storage != StorageSpec():
        raise ParameterError("[storage] is for object stores, which this version's jobs do not use yet")
    train = prepared.train
    n, d, t = train.num_rows, train.num_features, train.num_targets
    kernel = job.model.build_kernel()
    resolved: Kernel | None = None if kernel.name == "precomputed" else kernel.resolve(d)
    alpha = [float(a) for a in np.atleast_1d(job.model.alpha)]
    if len(alpha) not in (1, t):
        raise ParameterError(f"[model] alpha has {len(alpha)} values for {t} targets; 1 or {t} expected")
    precision = "float64" if job.solver.precision == "auto" else job.solver.precision
    itemsize = 8 if precision == "float64" else 4
    gram = job.solver.gram if job.solver.gram != "auto" else choose_gram(resolved, len(set(alpha)))
    workers = job.cluster.workers or cpu_count()
    limit = _memory_limit(job, workers)
    refusal, hint = "", ""
    if job.solver.tile_size == "auto":
        rule = "n / 10 up to a multiple of 128, in 256..2048, within 80 % of a worker's memory"
        try:
            threads = workers * job.cluster.threads_per_worker
            b = choose_tile_size(n, d, limit, itemsize, threads)
        except ParameterError as exc:
            b, refusal, hint = 128, exc.message, exc.hint
    else:
        b, rule = int(job.solver.tile_size), "as given"
    per_task = task_bytes(b, d, itemsize) * job.cluster.threads_per_worker
    if not refusal and limit is not None and per_task > limit:
        smaller = int(((0.8 * limit - BASELINE_BYTES) / (5 * itemsize)) ** 0.5) if limit > BASELINE_BYTES else 0
        refusal = f"a task with tiles of {b} needs {_size(per_task)}, a worker may use {_size(limit)}"
        hint = f"set tile_size to at most {smaller // 128 * 128}" if smaller >= 128 else "raise memory_limit"
    grid = TileGrid(n, b)
    num_factors = len(set(alpha))
    tiles = grid.num_lower * (b * b * itemsize + 4)
    disk = {
        "factor": tiles * num_factors,
        "gram": grid.num_lower * (b * b * 8 + 4) if gram == "stored" else 0,
        "right-hand sides": 4 * 8 * grid.num_tiles * b * t,
        "model": 8 * n * (d + t),
    }
    wanted = {
        "kernel": None if resolved is None else json.loads(json.dumps(resolved.to_dict())),
        "rows_digest": train.digest,
        "n": n,
        "tile_size": b,
    }
    present = _present_bytes(store, grid, wanted, alpha)
    free = _free_bytes(store)
    needed = max(0, sum(disk.values()) - present)
    if not refusal and free is not None and needed + DISK_RESERVE_BYTES > free:
        refusal = f"the job writes {_size(needed)} to {store}, {_size(free)} are free"
        hint = "give another [output] store" + ("" if itemsize == 4 else ", or precision = 'float32' (half)")
    calibration = calibrate(_existing_folder(store))
    notes = []
    if job.cluster.insecure:
        notes.append("insecure = true: the scheduler is reached without encryption or authentication")
    return Plan(
        num_rows=n,
        num_test_rows=0 if prepared.test is None else prepared.test.num_rows,
        num_features=d,
        num_targets=t,
        kernel={"kernel": "precomputed"} if resolved is None else resolved.to_dict(),
        alpha=alpha,
        solver="cholesky",
        precision=precision,
        gram=gram,
        tile_size=b,
        tile_rule=rule,
        num_tiles_per_side=grid.num_tiles,
        num_tasks=grid.num_lower * (num_factors + (gram == "stored")) + (2 * num_factors + 1) * grid.num_tiles,
        flops=n**3 / 3 * num_factors,
        workers=workers,
        memory_limit_bytes=limit,
        task_bytes=per_task,
        disk_bytes=disk,
        disk_present_bytes=present,
        disk_free_bytes=free,
        estimated_seconds=_seconds(calibration, n, t, itemsize, workers * job.cluster.threads_per_worker, alpha, gram),
        calibration=asdict(calibration),
        refusal=refusal,
        hint=hint,
        notes=notes,
    )


def _seconds(
    calibration: Calibration, n: int, t: int, itemsize: int, threads: int, alpha: list[float], gram: str
) -> dict[str, float]:
    threads = min(threads, cpu_count())
    rate = (
        calibration.gemm_flops_per_second_float64 if itemsize == 8 else calibration.gemm_flops_per_second_float32
    ) * threads
    entry = calibration.kernel_entry_seconds / threads
    num_factors = len(set(alpha))
    factor_bytes = n * n / 2 * itemsize
    written = factor_bytes * num_factors + (4 * n * n if gram == "stored" else 0)
    kernel_passes = 0.5 if gram == "stored" else 0.5 * num_factors
    return {
        "start": CLUSTER_START_SECONDS,
        "gram": kernel_passes * n * n * entry,
        "factorise": n**3 / 3 * num_factors / (rate * PARALLEL_EFFICIENCY),
        "write": written / calibration.disk_write_bytes_per_second,
        "solve": 2 * num_factors * factor_bytes / MAPPED_READ_BYTES_PER_SECOND,
        "residual": num_factors * n * n * entry + 2.0 * n * n * t / rate,
    }


def _memory_limit(job: JobSpec, workers: int) -> int | None:
    limit = job.cluster.memory_limit
    if limit == "auto":
        return total_memory_bytes() // workers if job.cluster.scheduler == "local" else None
    return int(limit)


def _present_bytes(store: Any, grid: TileGrid, wanted: dict[str, Any], alpha: list[float]) -> int:
    """Bytes of valid tiles that this job goes on writing: arrays whose key has the same fields, and one of its alphas.

    The BLAS kernel is not compared: which one the workers have is known only when they run.
    """
    root = local_root(store)
    if root is None:
        return 0
    total = 0
    for folder in ("factors", "grams"):
        for path in sorted((root / folder).glob("*.zarr")):
            fields = (read_json(str(path), "zarr.json") or {}).get("attributes", {})
            same = all(fields.get(name) == value for name, value in wanted.items())
            if same and (folder == "grams" or fields.get("alpha") in alpha):
                array = ChunkArray.open(str(path))
                total += sum(array.chunk_bytes + 4 for key in grid.lower() if array.is_valid(key))
    return total


def _existing_folder(store: Any) -> Path:
    path = Path.cwd() if is_url(store) else Path(store).absolute()
    while not path.exists():
        path = path.parent
    return path


def _free_bytes(store: Any) -> int | None:
    return None if is_url(store) else shutil.disk_usage(_existing_folder(store)).free


def _size(num_bytes: float) -> str:
    from dask.utils import format_bytes

    return format_bytes(int(num_bytes))
