"""Samples of memory and rate: all of them while there are few, and never more than a few hundred."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from dkrr.jobs.runs import samples as samples_module
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.samples import MOST_ATTEMPTS, MOST_SAMPLES, MOST_WORKERS, Recorder, Samples, read_attempts
from dkrr.jobs.runs.status import Status


@pytest.fixture(autouse=True)
def _driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "resident_bytes", lambda: 77)


def test_a_few_samples_are_kept_as_they_are() -> None:
    samples = Samples(1, "then")
    samples.add(2.0, 1e9, {"a": 10})
    samples.add(4.0, 3e9, {"a": 30, "b": 5})  # b has just come
    samples.add(6.0, 2e9, {"b": 7})  # a is gone
    found = samples.to_dict()
    assert found["seconds"] == [2.0, 4.0, 6.0]
    assert found["flops_per_second"] == [1e9, 3e9, 2e9]
    assert found["memory_bytes"] == {"driver": [77, 77, 77], "a": [10, 30, None], "b": [None, 5, 7]}
    assert found["num_workers"] == 2


@pytest.mark.parametrize("count", [MOST_SAMPLES - 1, MOST_SAMPLES, 10 * MOST_SAMPLES + 7])
def test_many_samples_become_fewer_and_no_peak_is_lost(count: int) -> None:
    samples = Samples(1, "then")
    for k in range(count):
        samples.add(2.0 * k, 1e9, {"a": 10**6 if k == count // 3 else 1000 + k % 7})
    found = samples.to_dict()
    assert len(found["seconds"]) < MOST_SAMPLES
    assert {len(values) for values in found["memory_bytes"].values()} == {len(found["seconds"])}
    assert max(found["memory_bytes"]["a"]) == 10**6
    assert found["seconds"] == sorted(found["seconds"])
    assert found["seconds"][-1] == pytest.approx(2.0 * (count - 1), abs=64)
    steps = [after - before for before, after in pairwise(found["seconds"][:-1])]
    assert max(steps) == min(steps)  # the last sample may stand for less time, no other one
    assert found["flops_per_second"] == [1e9] * len(found["seconds"])
    assert len(json.dumps(found)) < 30_000


def test_many_workers_become_three_curves() -> None:
    samples = Samples(1, "then")
    samples.add(2.0, 0.0, {"w0": 900})
    many = {f"w{k}": 100 + k for k in range(MOST_WORKERS + 5)}
    samples.add(4.0, 0.0, many)
    samples.add(6.0, 0.0, many)
    found = samples.to_dict()["memory_bytes"]
    assert set(found) == {"driver", "largest", "median", "smallest"}
    assert found["largest"] == [900, 116, 116]  # the one that had a curve of its own counts
    assert found["smallest"] == [None, 100, 100]
    assert samples.num_workers == MOST_WORKERS + 5


def test_attempts_are_kept_beside_each_other(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    for epoch in range(1, 12):
        recorder = Recorder(epoch, "then")
        recorder.begin(run)
        recorder.sample()
        recorder.write(run, Status(state="running"), now=True)
        recorder.write(run, Status(state="interrupted"), now=True)
    attempts = read_attempts(run)
    assert [item["epoch"] for item in attempts] == list(range(12 - MOST_ATTEMPTS, 12))
    assert {item["state"] for item in attempts} == {"interrupted"}


def test_flops_count_from_where_a_phase_began() -> None:
    recorder = Recorder(1, "then")
    recorder.count(90e9, anew=True)  # found valid
    recorder.count(100e9)
    recorder.count(0.0, anew=True)
    recorder.count(5e9)
    recorder.sample()
    (rate,) = recorder.samples.rates
    assert rate > 0
    assert recorder._work == pytest.approx(15e9)
    recorder.sample()
    assert recorder.samples.rates[1] == 0.0


def test_no_samples_is_no_error(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    assert read_attempts(run) == []
    run.write("samples.json", {"attempts": "none"})
    assert read_attempts(run) == []
