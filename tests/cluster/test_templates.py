"""What all templates have in common: they are found, they are accepted by their shell, they are on TLS."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.cluster.programs import CLUSTER, programs

FILES = [path for path in sorted(CLUSTER.rglob("*")) if path.is_file()]
SCRIPTS = [path for path in FILES if path.read_bytes().startswith(b"#!")]
TEMPLATES = [path for path in FILES if path.name not in ("README.md", "local.sh")]


def test_every_template_stands_in_a_readme() -> None:
    for path in TEMPLATES:
        readmes = [folder / "README.md" for folder in (path.parent, CLUSTER)]
        texts = [readme.read_text() for readme in readmes if readme.exists()]
        assert any(path.name in text or f"*{path.suffix}" in text for text in texts), path
    for folder in (path for path in CLUSTER.iterdir() if path.is_dir()):
        assert f"{folder.name}/" in (CLUSTER / "README.md").read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_one(script: Path) -> None:
    shell = script.read_text().splitlines()[0].rpartition("/")[2].rpartition(" ")[2]
    assert shell in ("bash", "sh")
    assert os.access(script, os.X_OK)
    done = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_all_are_on_tls() -> None:
    for path in TEMPLATES:
        lines = [line for line in path.read_text().splitlines() if "tcp://" in line and "127.0.0.1" not in line]
        assert all(line.lstrip().startswith("#") for line in lines), path


def test_with_environment(tmp_path: Path) -> None:
    script = str(CLUSTER / "with-environment")
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    variables["PATH"] = f"{programs(tmp_path / 'bin')}{os.pathsep}{variables['PATH']}"

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [script, *arguments], env={**variables, **more}, capture_output=True, text=True, timeout=60, check=False
        )

    done = run("sh", "-c", 'echo "$OPENBLAS_NUM_THREADS $1"; exit 5', "sh", "two words")
    assert (done.returncode, done.stdout) == (5, "1 two words\n"), done.stderr
    assert run().returncode == 2
    broken = run("echo", "it ran", DKRR="false")  # without the environment the command would compute other bits
    assert (broken.returncode, broken.stdout) == (1, "")
