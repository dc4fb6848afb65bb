"""What every test shares: one BLAS thread, the data folder, a small cluster, and skips that cannot be overlooked."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before NumPy loads: OpenBLAS reads it once, and the tests run next to worker processes
# fifty wake-ups a second of each scheduler, nanny and worker, only to warn of a slow one: half of what idle ones cost
os.environ.setdefault("DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL", "1s")
# processes that tests start find the hook for their faults there, and what is tested
_here = Path(__file__).parent
_paths = [str(_here / "hooks"), str(_here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_paths)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fail-on-skip", "--no-skips", action="store_true", help="a skipped test fails")


def _reason(report: Any) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(text).removeprefix("Skipped: ")


def _fail_if_skipped(report: Any, config: pytest.Config) -> None:
    # an expected failure is reported as skipped too, and is none
    if report.skipped and not hasattr(report, "wasxfail") and config.getoption("--fail-on-skip"):
        reason = _reason(report)
        report.outcome = "failed"
        report.longrepr = f"skipped although --fail-on-skip is given: {reason}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    report = yield
    _fail_if_skipped(report, item.config)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    _fail_if_skipped(report, collector.config)
    return report


def pytest_collection_finish() -> None:
    if "dkrr.fit.rates" in sys.modules:
        _measure_once(sys.modules["dkrr.fit.rates"])
    gc.set_threshold(50_000, 20, 20)
    gc.freeze()  # no collection of garbage looks at what the modules hold: half a second each


def _measure_once(rates: Any) -> None:
    """Plans measure the machine once for each kind of kernel and each disk: half a second of the processor each time.

    To the time of an entry the numbers in a kernel do not matter, and the number of features hardly.
    """
    measure, measure_disk = rates._rates, rates._disk
    known: dict[Any, Any] = {}

    def rates_of(kernel: str | None, num_features: int, threads: int) -> Any:
        kind = re.sub(r"[\d.e+-]+", "", kernel or ""), num_features.bit_length(), threads
        if kind not in known:
            known[kind] = measure(kernel, num_features, threads)
        return known[kind]

    def disk(folder: str) -> Any:
        device = os.stat(folder).st_dev
        if device not in known:
            known[device] = measure_disk(folder)
        return known[device]

    rates._rates, rates._disk = rates_of, disk


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    terminalreporter.section("skipped tests")
    terminalreporter.write_line(f"num_skipped {sum(reasons.values())}")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A test that shows dkrr's log leaves the next one the log as it found it."""
    logger = logging.getLogger("dkrr")
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data sets that DKRR_DATA names; the test is skipped, and counted, without it."""
    value = os.environ.get("DKRR_DATA", "")
    if not value or not Path(value).is_dir():
        pytest.skip(f"DKRR_DATA is not set to a folder of data sets (it is {value!r})")
    return Path(value)


@pytest.fixture(scope="session")
def _two_workers() -> Iterator[Any]:
    """Two worker processes of 1 GiB and one thread each, started where a test wants them first."""
    from dkrr.engine.cluster import local_cluster

    with local_cluster(workers=2, memory_limit="1GiB") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster_client(_two_workers: Any) -> Iterator[Any]:
    """A client of the two workers, in a module the default one; a worker that a test killed is there again."""
    from distributed import Client

    with Client(_two_workers) as client:
        client.wait_for_workers(2, timeout=60)
        yield client
