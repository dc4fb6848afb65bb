"""What the README says is true: its example runs as printed, its commands exist, its tables are what the code does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dkrr import errors
from dkrr.cli import main
from dkrr.jobs.spec import JobSpec
from dkrr.linalg.sizes import choose_tile_size, task_bytes
from dkrr.linalg.solution import backward_error_bar
from dkrr.tiles import TileGrid

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
NUM_FEATURES = 10  # for the table of sizes, in which the features hardly matter


def section(heading: str) -> str:
    """The text below a heading of the second level."""
    found = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found is not None, f"the README has no section {heading!r}"
    return found[1]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def rows(text: str) -> list[list[str]]:
    """The cells of a table, without its two lines of heading."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def number(text: str) -> float:
    return float(text.replace(",", "").split()[0])


def environment() -> dict[str, str]:
    """What lets another interpreter import this dkrr."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("heading", ["Run it", "Test it"])
def test_one_line_does_everything(heading: str) -> None:
    (block,) = blocks(section(heading), "sh")
    assert block.count("\n") == 1
    assert block.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    # every file it names is there
    for word in re.findall(r"\S+/\S+\.(?:py|sh|toml)", block):
        assert (ROOT / word).is_file(), word


def test_the_example_runs_exactly_as_printed(tmp_path: Path) -> None:
    (example,) = blocks(section("From Python"), "python")
    assert example.count("\n") <= 15
    (tmp_path / "example.py").write_text(example)
    for _ in range(2):  # a reader will run it again
        done = subprocess.run(
            [sys.executable, "example.py"],
            cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert re.fullmatch(r"Cholesky factor of 2,500 rows in 15 tiles, largest relative residual .*e-1\d", lines[0])
        assert float(lines[1].removeprefix("held-out R2 ")) > 0.95
        assert len(lines[2].split()) >= 3
    assert sum(path.is_dir() for path in (tmp_path / "store" / "factors").glob("*.zarr")) == 1  # found the second time


def test_the_limit_of_problems_in_memory() -> None:
    from dkrr.estimator import MAX_IN_PROCESS_ROWS

    assert f"up to {MAX_IN_PROCESS_ROWS:,} rows are solved in this process" in " ".join(README.split())


def used_commands() -> list[tuple[str, list[str]]]:
    """Every ``dkrr COMMAND --option ...`` in code of the README."""
    code = "\n".join([*blocks(README, "sh"), *re.findall(r"`([^`\n]+)`", README)])
    found = re.findall(r"\bdkrr ([a-z]+)\b([^\n|;&#)]*)", code)
    return [(name, re.findall(r"(?<!\S)(--?[a-z][a-z-]*)", rest)) for name, rest in found]


def test_every_command_and_option_named_exists() -> None:
    used = used_commands()
    assert len(used) > 10
    for name, options in used:
        assert name in main.commands, f"dkrr {name}"
        known = {text for parameter in main.commands[name].params for text in parameter.opts}
        assert set(options) <= known, f"dkrr {name} {options}"


def test_every_command_is_explained() -> None:
    table = section("From the command line").partition("| command |")[2]
    assert {re.match(r"\| `dkrr (\w+)", line)[1] for line in table.splitlines() if line.startswith("| `dkrr")} == set(
        main.commands
    )


def test_the_exit_codes_are_those_of_the_errors() -> None:
    table = section("From the command line").partition("| exit code |")[2]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    kinds = [getattr(errors, name) for name in errors.__all__]
    assert listed == {0, *(kind.exit_code for kind in kinds)}


def test_the_job_file_is_accepted() -> None:
    (text,) = blocks(section("From the command line"), "toml")
    job = JobSpec.from_dict(tomllib.loads(text), base="/somewhere")
    assert job.model.kernel == "matern"
    assert job.output.directory == "/somewhere/runs/train"
    # the kernel that is only a comment
    (kernel,) = re.findall(r"# kernel = (\{.*\})$", text, re.MULTILINE)
    nested = tomllib.loads(f'[data]\npath = "x.npy"\n[model]\nkernel = {kernel}')
    assert JobSpec.from_dict(nested).model.build_kernel().to_dict()["kernel"] == "sum"


def test_the_retrain_file_is_accepted_and_shows_the_defaults() -> None:
    from dkrr.jobs.retrain.spec import DriftSpec, GateSpec, RetrainSpec

    (text,) = blocks(section("Retraining every night"), "toml")
    spec = RetrainSpec.from_dict(tomllib.loads(text), base="/somewhere")
    assert (spec.gate, spec.drift) == (GateSpec(), DriftSpec())
    assert spec.directory == "/somewhere/models/demo/retrain"


def test_every_kernel_is_listed() -> None:
    from dkrr.kernels.make import NAMED

    table = section("The mathematics, and its conventions").partition("| name |")[2].partition("Also sums")[0]
    assert set(re.findall(r"^  \| (\w+) \|", table, re.MULTILINE)) == set(NAMED) - {"polynomial"}


def test_the_bar_of_the_backward_error() -> None:
    assert "30 n eps" in section("The mathematics, and its conventions")
    assert backward_error_bar(1000, "float64") == pytest.approx(30 * 1000 * 2.0**-52)


def test_the_table_of_sizes_is_what_the_formulas_give() -> None:
    table = rows(section("How large a problem fits"))
    assert len(table) == 6
    for n_text, gram, tile, disk, flops, seconds, memory in table:
        n = int(number(n_text))
        limit = number(memory) * 2**30
        b = choose_tile_size(n, NUM_FEATURES, int(limit))
        assert b == int(tile) == choose_tile_size(n, NUM_FEATURES, None), "the limit must not make tiles smaller"
        assert task_bytes(b, NUM_FEATURES) <= 0.8 * limit
        assert number(gram) == pytest.approx(8 * n * n / 1e9, rel=0.01)
        factor = 8 * b * b * TileGrid(n, b).num_lower
        assert number(disk) == pytest.approx(factor / 1e9, rel=0.03)
        assert factor == pytest.approx(4 * n * (n + b), rel=0.06)  # the short formula; a ragged last tile costs more
        assert number(flops) == pytest.approx(n**3 / 3, rel=0.03)
        unit = {"s": 1, "min": 60, "h": 3600}[seconds.split()[1]]
        assert number(seconds) * unit == pytest.approx(n**3 / 3 / 150e9, rel=0.12)


def test_nothing_is_left_to_fill_in() -> None:
    assert not re.findall(r"<!--|TODO|TBD|XXX", README)
