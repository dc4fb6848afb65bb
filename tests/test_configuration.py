"""``dkrr:`` in Dask's configuration: clusters of a place, time-outs, mistakes in words, and the sample that ships."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dask
import pytest
import yaml

from dkrr.engine.configuration import TIMEOUTS, timeout_seconds
from dkrr.errors import DkrrError, JobFileError, ParameterError
from dkrr.jobs.spec import ClusterSpec, JobSpec

SAMPLE = Path(__file__).parent.parent / "cluster/dask/dkrr.yaml"
DATA = {"data": {"path": "sklearn:digits"}}
ADDRESS = "tls://scheduler:8786"


def configured(**tables: Any) -> Any:
    return dask.config.set({"dkrr": tables})


def test_a_timeout() -> None:
    for value, seconds in (("10m", 600.0), (0.5, 0.5), ("45", 45.0)):
        for name in ("no-workers", "no_workers"):
            with configured(timeouts={name: value}):
                assert timeout_seconds("no-workers") == seconds
                assert timeout_seconds("stall") == TIMEOUTS["stall"]
    for value in (0, "soon", [], True, "5 parsecs", float("nan")):
        with configured(timeouts={"stall": value}), pytest.raises(ParameterError, match=r"dkrr\.timeouts\.stall is "):
            timeout_seconds("stall")


def test_the_cluster_of_a_place_is_for_jobs_that_name_none() -> None:
    with configured(cluster={"scheduler": ADDRESS, "workers": 3, "memory-limit": "2GiB"}):
        found = JobSpec.from_dict(DATA).cluster
        assert (found.scheduler, found.workers, found.memory_limit) == (ADDRESS, 3, 2 * 2**30)
        own = JobSpec.from_dict({**DATA, "cluster": {"workers": 5}}).cluster
        assert (own.scheduler, own.workers, own.memory_limit) == (ADDRESS, 5, 2 * 2**30)
        assert JobSpec.from_dict({**DATA, "cluster": {"scheduler": "local"}}).cluster == ClusterSpec()
        # what a run keeps of its job is the whole of it, and means the same at another place
        kept = JobSpec.from_dict(DATA).to_dict()
    assert JobSpec.from_dict(kept).cluster == found


def test_a_scheduler_file_of_a_place() -> None:
    with configured(cluster={"scheduler": "~/scheduler.json"}):
        assert JobSpec.from_dict(DATA, base="/elsewhere").cluster.scheduler == str(Path.home() / "scheduler.json")
    relative = configured(cluster={"scheduler": "scheduler.json"})
    with relative, pytest.raises(ParameterError, match=r"dkrr\.cluster\.scheduler is"):
        JobSpec.from_dict(DATA)


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"clusters": {}}, "unknown key dkrr.clusters"),
        ({"cluster": {"shceduler": ADDRESS}}, "unknown key dkrr.cluster.shceduler"),
        ({"cluster": ["local"]}, r"dkrr.cluster is \['local'\]"),
        ({"cluster": {"workers": 0}}, "Dask's configuration of dkrr: .*workers"),
        ({"cluster": {"scheduler": "tcp://elsewhere:8786"}}, "without encryption"),
        ({"cluster": {"driver": "slurm"}}, "unknown key dkrr.cluster.driver"),
    ],
)
def test_a_mistake_is_named(tables: dict[str, Any], expected: str) -> None:
    with configured(**tables), pytest.raises(DkrrError, match=expected) as caught:
        JobSpec.from_dict(DATA)
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.message
    with configured(cluster={"workers": 3}), pytest.raises(JobFileError, match="workers") as caught:
        JobSpec.from_dict({**DATA, "cluster": {"workers": "many"}})
    assert "Dask" not in caught.value.message  # a mistake of the job is its own


def test_the_sample_has_every_key_and_its_default() -> None:
    text = SAMPLE.read_text()
    sample = yaml.safe_load(text)
    with dask.config.set(sample):
        assert {name: timeout_seconds(name) for name in TIMEOUTS} == TIMEOUTS
        assert JobSpec.from_dict(DATA).cluster == ClusterSpec()
    assert set(sample["dkrr"]["timeouts"]) == set(TIMEOUTS)
    offered = {key.replace("-", "_") for key in re.findall(r"^    # ([a-z-]+): ", text, re.M)}
    assert offered == set(ClusterSpec.model_fields)
    # and with the comments taken away it is one that works
    used = re.sub(r"^    # ([a-z-]+): ", r"    \1: ", text.replace("cluster: {}", "cluster:"), flags=re.M)
    with dask.config.set(yaml.safe_load(used)):
        assert JobSpec.from_dict(DATA).cluster.scheduler == "tls://scheduler.example.org:8786"


def test_what_it_says_to_dask_exists_there() -> None:
    with open(Path(pytest.importorskip("distributed").__file__).with_name("distributed.yaml")) as file:
        known = yaml.safe_load(file)["distributed"]

    def paths(table: dict[str, Any]) -> set[tuple[str, ...]]:
        inner = {(key, *path) for key, value in table.items() if isinstance(value, dict) for path in paths(value)}
        return inner | {(key,) for key in table}

    assert paths(yaml.safe_load(SAMPLE.read_text())["distributed"]) <= paths(known)
