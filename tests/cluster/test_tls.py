"""The script that makes certificates, and a cluster on them: nobody without one; a killed scheduler and another one."""

from __future__ import annotations

import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from distributed.security import Security

from dkrr.engine.cluster import connect
from dkrr.errors import ClusterError
from tests.cluster.helpers import CLUSTER, ByHandJob, by_hand, is_identical
from tests.faults import finish

SCRIPT = CLUSTER / "tls/make-certificates.sh"
ROLES = ("scheduler", "worker", "client")


def make(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *options, str(folder)], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls") / "a folder"
    done = make(folder)
    assert done.returncode == 0, done.stderr
    return folder


def verify(folder: Path, role: str, purpose: str) -> int:
    command = ["openssl", "verify", "-x509_strict", "-CAfile", folder / "ca.pem", "-purpose", purpose]
    return subprocess.run([*command, folder / role / f"{role}.pem"], capture_output=True, check=False).returncode


def test_certificates_are_good_for_their_role_only(certificates: Path) -> None:
    for role in ROLES:
        assert verify(certificates, role, "sslclient") == 0
    assert [verify(certificates, role, "sslserver") == 0 for role in ROLES] == [True, True, False]
    for key in certificates.rglob("*-key.pem"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert len(list(certificates.rglob("*-key.pem"))) == 4
    assert not list(certificates.glob(".making*"))


def test_again_keeps_the_authority_and_renews_the_rest(certificates: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    shutil.copytree(certificates, folder)
    before = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.pem")}
    assert make(folder, "-d", "7").returncode == 0
    after = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.pem")}
    same = {str(path) for path in before if before[path] == after[path]}
    assert same == {"ca.pem", "ca-key.pem", *(f"{role}/ca.pem" for role in ROLES)}
    assert verify(folder, "worker", "sslserver") == 0


@pytest.mark.parametrize("options", [("-d", "0"), ("-p", "tls"), ("-d", "x"), ("-n", "a/b"), ("-z",), ("two",)])
def test_wrong_options(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = make(tmp_path / "folder", *options)
    assert done.returncode == 2
    assert done.stderr
    assert not (tmp_path / "folder").exists()


# --- a cluster --------------------------------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.short
@pytest.mark.timeout(600)
def test_a_fit_on_tls_goes_on_behind_a_killed_scheduler_and_equals_a_local_one(
    certificates: Path, tmp_path: Path
) -> None:
    local = ByHandJob(tmp_path / "local")
    local.fit()
    slowly = "compute.cholesky.tile:1:sleep=0.05"
    with by_hand(tmp_path / "servers", certificates, DKRR_FAILPOINTS=slowly) as cluster:
        job = ByHandJob(tmp_path / "job", cluster.address, environment={"DASK_CONFIG": str(certificates / "client")})
        process = job.start_until_tiles(20)
        cluster.scheduler.kill()
        ended = finish(process, 30)
        assert ended.code == 6, ended.err
        assert "start the same job again" in ended.err
        cluster.wait_for_the_end_of_workers()  # Dask's behaviour: nothing of them reconnects
        written = job.fewer_than_all(20)
        cluster.start_scheduler()
        cluster.start_workers()
        job.fit()
        assert written.items() <= job.tiles().items()  # no valid tile was written again
        assert is_identical(local, job)

        # and so the command line says it
        bare = ByHandJob(tmp_path / "bare", cluster.address)
        ended = bare.command().run(90)
        assert ended.code == 6
        assert "needs TLS files" in ended.err
        stranger = tmp_path / "stranger"
        assert make(stranger).returncode == 0
        for folder, address in ((stranger, cluster.address), (certificates, cluster.address.replace("tls", "tcp"))):
            security = Security(
                require_encryption=True,
                tls_ca_file=str(folder / "ca.pem"),
                tls_client_cert=str(folder / "client/client.pem"),
                tls_client_key=str(folder / "client/client-key.pem"),
            )
            with pytest.raises(ClusterError, match="no connection"):
                connect(address, timeout=10, security=security)
