"""The units: what systemd says of them, and what their ExecStart runs, run with the units' own environment."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.cluster.containers import Container, Engine, engine
from tests.cluster.programs import CLUSTER, make_certificates, need
from tests.cluster.test_docker import given_to_the_user, small_job
from tests.faults import chunk_files, wait_until

FOLDER = CLUSTER / "systemd"
UNITS = ("dkrr-scheduler.service", "dkrr-worker.service", "dkrr-driver@.service")
HOST = "scheduler.example.org"


def settings(unit: str) -> dict[str, list[str]]:
    """Values by name, as often as they are given."""
    found: dict[str, list[str]] = {}
    for line in (FOLDER / unit).read_text().replace("\\\n", " ").splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def environment(unit: str, configuration: str) -> dict[str, str]:
    """What systemd would set: Environment=, and the lines of EnvironmentFile=, which win."""
    words = [word for value in settings(unit)["Environment"] for word in shlex.split(value)]
    lines = [line for line in configuration.splitlines() if line and not line.startswith("#")]
    return dict(word.split("=", 1) for word in [*words, *lines])


def command(unit: str, variables: dict[str, str], instance: str = "") -> list[str]:
    """ExecStart= with its variables and the instance filled in."""
    (line,) = settings(unit)["ExecStart"]
    words = [re.sub(r"\$\{(\w+)\}", lambda m: variables[m[1]], word) for word in line.split()]
    return [word.replace("%i", instance) for word in words]


def container(unit: str, configuration: str, mounts: list[tuple[str, Path, bool]], instance: str = "") -> Container:
    variables = environment(unit, configuration)
    cache = ["/var/cache/dkrr"] if "CacheDirectory" in settings(unit) else []
    return Container(
        command(unit, variables, instance), {"HOME": "/", **variables}, mounts, ["/tmp", *cache],
        workdir=settings(unit).get("WorkingDirectory", ["/"])[0],
    )  # fmt: skip


@pytest.fixture
def configuration() -> str:
    """dkrr.conf for a tiny cluster."""
    text = (FOLDER / "dkrr.conf").read_text()
    assert HOST in text
    return text.replace("4GiB", "1GiB")


def verify(containers: Engine, units: dict[str, str], folder: Path) -> tuple[int, str]:
    """What systemd-analyze says of units, where their commands and their user are."""
    folder.mkdir()
    for name, text in units.items():
        (folder / name).write_text(text)
    found = Container(
        ["sh", "-c", "echo dkrr:x:10001:10001::/:/bin/sh >>/etc/passwd; exec systemd-analyze verify --man=no /units/*"],
        {}, [("/units", folder, True)], ["/tmp", "/run"], user="0:0", read_only=False,
    )  # fmt: skip
    ended = containers.run(found)
    return ended.code, ended.err


@pytest.mark.system
@pytest.mark.short
@pytest.mark.timeout(120)
def test_systemd_accepts_the_units_and_no_wrong_one(tmp_path: Path) -> None:
    need("systemd-analyze", package="systemd")
    texts = {unit: (FOLDER / unit).read_text() for unit in UNITS}
    with engine(tmp_path / "engine") as containers:
        assert verify(containers, texts, tmp_path / "units") == (0, "")
        for number, (old, new, said) in enumerate(
            (
                ("Restart=always", "Restart=allways", "restart specifier"),
                ("ProtectSystem=", "ProtectSytem=", "Unknown key"),
                ("/opt/dkrr/bin/dask", "/opt/dkrr/bin/dusk", "not executable"),
            )
        ):
            wrong = texts[UNITS[0]]
            assert old in wrong
            _, err = verify(containers, {UNITS[0]: wrong.replace(old, new)}, tmp_path / f"wrong-{number}")
            assert said in err


def test_no_unit_has_rights_and_all_are_on_tls() -> None:
    for unit in UNITS:
        found = settings(unit)
        assert found["User"] == ["dkrr"]
        assert found["NoNewPrivileges"] == ["true"]
        assert found["ProtectSystem"] == ["strict"]
        assert "tcp://" not in (FOLDER / unit).read_text()
        assert any("DASK_CONFIG=/etc/dkrr/" in value for value in found["Environment"])
    assert "tcp://" not in (FOLDER / "dkrr.conf").read_text()
    # 6 and 75 are tried again
    assert settings(UNITS[2])["RestartPreventExitStatus"] == ["1 2 3 4 5 8"]


@pytest.mark.system
@pytest.mark.timeout(300)
def test_what_the_units_run(tmp_path: Path, configuration: str) -> None:
    tls = given_to_the_user(make_certificates(tmp_path / "tls", "-p", "/etc/dkrr"))
    shared = tmp_path / "srv"
    small_job(shared)
    (shared / "jobs").mkdir()
    (shared / "job.toml").rename(shared / "jobs/small.toml")
    os.chown(shared / "jobs", 10001, 10001)
    with engine(tmp_path / "engine", HOST) as containers:
        for unit in UNITS[:2]:
            role = unit.removeprefix("dkrr-").removesuffix(".service")
            mounts = [(f"/etc/dkrr/{role}", tls / role, True), ("/srv/dkrr", shared, False)]
            server = containers.start(container(unit, configuration, mounts))
            wait_until(lambda server=server: "tls://" in containers.log(server) or server.poll() is not None, 60)
            assert server.poll() is None, containers.logs()
        mounts = [("/etc/dkrr/client", tls / "client", True), ("/srv/dkrr", shared, False)]
        driver = container(UNITS[2], configuration, mounts, "small")
        ended = containers.run(driver)
        assert ended.code == 0, containers.logs()
        assert chunk_files(shared / "jobs/runs/cluster/model.zarr")
        # a job that is wrong is one that is not tried again
        wrong = container(UNITS[2], configuration, mounts, "missing")
        assert str(containers.run(wrong).code) in settings(UNITS[2])["RestartPreventExitStatus"][0].split()
