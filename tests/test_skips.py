"""Skips are counted by reason, and fail where that is asked for; the test command stands in the README once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SAMPLE = """
import pytest

def test_passes(): pass

@pytest.mark.skipif(True, reason="no server")
def test_skips(): pass

def test_skips_inside(): pytest.skip("no server")

def test_skips_for_another_reason(data_folder): pass

@pytest.mark.xfail
def test_is_expected_to_fail(): assert False
"""


def run_sample(folder: Path, *options: str, sample: str = SAMPLE) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "test_sample.py").write_text(sample)
    (folder / "pytest.ini").write_text("[pytest]\n")
    # with CI set pytest repeats whole messages in its summary, and they would be counted twice
    dropped = {"DKRR_DATA", "CI", "BUILD_NUMBER"}
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    # where conftest.py finds its own helpers; no plugin of a package is wanted, and some load NumPy
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_skips_are_counted_by_reason(tmp_path: Path) -> None:
    result = run_sample(tmp_path)
    assert result.returncode == 0
    assert "num_skipped 3\nskipped 2: no server\nskipped 1: DKRR_DATA is not set" in result.stdout


@pytest.mark.parametrize("option", ["--fail-on-skip", "--no-skips"])
def test_the_option_turns_skips_into_failures(tmp_path: Path, option: str) -> None:
    result = run_sample(tmp_path, option)
    assert result.returncode == 1
    assert result.stdout.count("skipped although --fail-on-skip is given: no server") == 2
    assert "1 failed, 1 passed, 1 xfailed, 2 errors" in result.stdout  # a skip in set-up is an error


def test_a_skipped_module_fails_too(tmp_path: Path) -> None:
    sample = "import pytest\npytest.importorskip('a_module_that_is_not_there')\n"
    assert run_sample(tmp_path, sample=sample).returncode != 1
    result = run_sample(tmp_path, "--fail-on-skip", sample=sample)
    assert result.returncode in (1, 2)
    assert "skipped although --fail-on-skip is given" in result.stdout


def commands(section: str) -> list[str]:
    text = (ROOT / "README.md").read_text()
    body = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", text, flags=re.S | re.M)
    assert body is not None
    blocks = re.findall(r"^```sh\n(.*?)^```", body[1], flags=re.S | re.M)
    return [line for block in blocks for line in block.splitlines()]


def test_continuous_integration_runs_the_readmes_line() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    awk = re.search(r"test_command=\$\((awk .*)\)\n", script)
    assert awk is not None
    found = subprocess.run(["bash", "-c", awk[1]], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.splitlines() == commands("Test it")
    assert 'now fast "nice -n 5 ${test_command##* && }"' in script


def test_what_the_readme_installs_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (line,) = commands("Test it")
    extras = re.findall(r"\[(\w+)\]", line)
    assert extras
    assert set(extras) <= set(project["optional-dependencies"])
