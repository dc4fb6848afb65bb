"""What the README files say is true: code runs, commands, options and paths exist, tables are what the code does."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import dask
import numpy as np
import pytest
from click.testing import CliRunner
from scipy.spatial.distance import cdist

import dkrr
from dkrr import errors
from dkrr.cli import main
from dkrr.jobs.retrain_spec import GateSpec, RetrainSpec
from dkrr.jobs.spec import JobSpec
from dkrr.kernels.make import NAMED
from dkrr.linalg.loss import LOSSES
from dkrr.linalg.solution import backward_error_bar
from dkrr.linalg.workspace import choose_tile_size, task_bytes
from dkrr.tiles import TileGrid

ROOT = Path(__file__).parent.parent
FOLDERS = ("cluster", "dkrr", "tests", "workflows")
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", *(found for name in FOLDERS for found in sorted((ROOT / name).rglob("README.md"))))
}
README, TUTORIALS = TEXTS["README.md"], TEXTS["workflows/README.md"]
NUM_FEATURES = 10  # for the table of sizes, in which the features hardly matter
NAME_OF_FILE = re.compile(r"# (\w+\.(?:py|toml))\n")


def fences(text: str) -> list[tuple[str, str]]:
    """Language and code of every fenced block, in order."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [(language, textwrap.dedent(code)) for _, language, code in found]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return [code for found, code in fences(text) if found == language]


def sections(text: str) -> dict[str, str]:
    """The text below each heading of the second level."""
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(text: str) -> list[list[str]]:
    """The cells of a table, without its two lines of heading."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def number(text: str) -> float:
    return float(text.replace(",", "").split()[0])


def every(language: str) -> list[Any]:
    """Every block of a language in every README, as parameters of a test."""
    return [
        pytest.param(code, id=f"{name}-{place}")
        for name, text in TEXTS.items()
        for place, code in enumerate(blocks(text, language))
    ]


# --- the README itself


def test_the_readme_is_short_and_has_a_picture() -> None:
    assert len(README.splitlines()) <= 200
    assert re.search(r"^!\[.+\]\(workflows/kriging.png\)$", README, re.MULTILINE)


@pytest.mark.parametrize("heading", ["Run it", "Test it"])
def test_one_line_does_everything(heading: str) -> None:
    (block,) = blocks(sections(README)[heading], "sh")
    assert block.count("\n") == 1
    assert block.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    # every file it names is there
    for word in re.findall(r"\S+/\S+\.(?:py|sh|toml)", block):
        assert (ROOT / word).is_file(), word


def test_the_example_runs_exactly_as_printed(tmp_path: Path) -> None:
    (example,) = blocks(sections(README)["From Python"], "python")
    assert example.count("\n") <= 15
    (tmp_path / "example.py").write_text(example)
    for _ in range(2):  # a reader will run it again
        done = subprocess.run(
            [sys.executable, "example.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert re.fullmatch(r"Cholesky factor of 2,500 rows in 15 tiles, largest relative residual .*e-1\d", lines[0])
        assert float(lines[1].removeprefix("held-out R2 ")) > 0.95
        assert len(lines[2].split()) >= 3
    assert sum(path.is_dir() for path in (tmp_path / "store" / "factors").glob("*.zarr")) == 1  # found the second time


def test_the_limit_of_problems_in_memory() -> None:
    from dkrr.models.estimator import MAX_IN_PROCESS_ROWS

    assert f"up to {MAX_IN_PROCESS_ROWS:,} rows are solved in this process" in " ".join(README.split())


# --- code of every README


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, from which and from workflows/ modules are imported; jobs that say nothing have one worker."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "workflows")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    place = {"scheduler": "local", "workers": 1, "memory_limit": "1GiB"}
    with mock.patch.dict(NAMED), mock.patch.dict(LOSSES), dask.config.set({"dkrr.cluster": place}):
        yield tmp_path
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent in (tmp_path, ROOT / "workflows"):
            del sys.modules[name]


def run_blocks(text: str) -> str:
    """Write the files, run the Python code in one namespace and the commands in this process; what they printed."""
    namespace: dict[str, Any] = {"__name__": "readme"}
    printed = io.StringIO()
    for language, code in fences(text):
        if named := NAME_OF_FILE.match(code):
            Path(named[1]).write_text(code)
        elif language == "python":
            with contextlib.redirect_stdout(printed):
                exec(compile(code, "readme", "exec"), namespace)  # noqa: S102  (what the README says)
        elif language == "sh":
            for line in code.splitlines():
                name, *arguments = shlex.split(line, comments=True)
                assert name == "dkrr", line
                result = CliRunner().invoke(main, arguments)
                assert result.exit_code == 0, f"{line}\n{result.output}"
                printed.write(result.stdout)
    return printed.getvalue()


def python_of(codes: list[str]) -> str:
    """The blocks as a text of their own."""
    return "".join(f"```python\n{code}```\n" for code in codes)


OTHERS = {name: blocks(text, "python") for name, text in TEXTS.items() if text not in (README, TUTORIALS)}


@pytest.mark.parametrize("name", [name for name, codes in OTHERS.items() if codes])
def test_python_of_a_readme_runs(name: str, here: Path) -> None:
    run_blocks(python_of(OTHERS[name]))


@pytest.mark.parametrize("heading", [heading for heading, text in sections(TUTORIALS).items() if fences(text)])
def test_a_tutorial_runs(heading: str, here: Path) -> None:
    printed = run_blocks(sections(TUTORIALS)[heading])
    for expected in {
        "Kriging": [r"root mean square error 0\.[234]", r"(8[5-9]|9[0-6])% of the places"],
        "A kernel of one's own": [r"R2 of new molecules 0\.[89]"],
        "Choosing kernel, widths and alpha": [r"best\.toml", r"r2 +0\.9"],
        "Rows that arrive": [r"reused", r"generations +2", r"rows +100\b"],
        "Retraining every night": [r"promoted", r"production"],
    }[heading]:
        assert re.search(expected, printed), f"{expected} is not in\n{printed}"


def test_what_contributing_adds_works(here: Path) -> None:
    example, kernel, loss, source = blocks(README, "python")
    data = re.sub(r"^est.*|^print.*", "", example, flags=re.MULTILINE)
    printed = run_blocks(python_of([data, kernel, loss, source]))
    score, gap, num_rows = (float(line) for line in printed.split())
    assert score > 0.9
    assert gap <= 1e-6
    assert num_rows == 10_000
    rng = np.random.default_rng(3)
    A, B = rng.standard_normal((40, 3)), rng.standard_normal((50, 3))
    added = dkrr.make_kernel("cauchy")
    np.testing.assert_allclose(added(A, B), 1 / (1 + cdist(A, B, "sqeuclidean")), rtol=1e-12)
    np.testing.assert_array_equal(np.diag(added(A, A)), 1.0)


@pytest.mark.parametrize("code", every("toml"))
def test_a_job_file_is_accepted(code: str) -> None:
    document = tomllib.loads(code)
    if "retrain" in document:
        RetrainSpec.from_dict(document, base="/somewhere")
    else:
        JobSpec.from_dict({"data": {"path": "rows.zarr"}, **document}, base="/somewhere")


def test_the_long_job_file_and_the_retrain_file_show_what_they_say() -> None:
    job, retrain = (tomllib.loads(code) for code in blocks(TEXTS["dkrr/jobs/README.md"], "toml"))
    spec = JobSpec.from_dict(job, base="/somewhere")
    assert spec.model.build_kernel().to_dict()["kernel"] == "sum"
    assert spec.output.directory == "/somewhere/runs/train"
    found = RetrainSpec.from_dict(retrain, base="/somewhere")
    assert found.gate == GateSpec()  # the defaults
    assert found.directory == "/somewhere/models/demo/retrain"


# --- what every README names


def used_commands(text: str) -> list[tuple[str, list[str]]]:
    """Words before the first option, and options, of every `dkrr ...` in code, after which nothing else is piped."""
    code = "\n".join([*blocks(text, "sh"), *re.findall(r"`([^`\n]+)`", text)]).replace("\\\n", " ")
    code = re.sub(r'"[^"$\n]*"', "QUOTED", code)
    found = re.findall(r"(?<![\w./-])dkrr (?!dkrr)([a-z]+\b[^\n|;&#)]*)", code)
    return [(re.split(r" -", words)[0], re.findall(r"(?<!\S)(--?[a-z][a-z-]*)", words)) for words in found]


def test_every_command_and_option_named_exists() -> None:
    used = [command for text in TEXTS.values() for command in used_commands(text)]
    assert len(used) > 60
    for text, options in used:
        command: click.Command = main
        for word in text.split():
            if not isinstance(command, click.Group) or (command is not main and word not in command.commands):
                break
            assert word in command.commands, f"dkrr {text}"
            command = command.commands[word]
        known = {text for parameter in command.params for text in parameter.opts + parameter.secondary_opts}
        assert set(options) <= known | {"-h", "--help"}, f"dkrr {text} {options}"


def test_every_option_of_dask_exists() -> None:
    from distributed.cli import dask_scheduler, dask_worker

    commands = {"scheduler": dask_scheduler.main, "worker": dask_worker.main}
    code = "\n".join(block for text in TEXTS.values() for block in blocks(text, "sh")).replace("\\\n", " ")
    used = re.findall(r"^dask (scheduler|worker)(.*)$", code, re.MULTILINE)
    assert len(used) >= 4
    for name, words in used:
        known = {text for parameter in commands[name].params for text in parameter.opts + parameter.secondary_opts}
        assert set(re.findall(r"(?<!\S)(--?[a-z][a-z-]*)", words)) <= known, words


@pytest.mark.parametrize("name", TEXTS)
def test_commands_can_be_read_by_a_shell(name: str) -> None:
    code = "\n".join(blocks(TEXTS[name], "sh"))
    done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def anchors(text: str) -> set[str]:
    """What the headings of a page are called in links."""
    without = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", without, re.MULTILINE)
    }


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_and_path_leads_somewhere(name: str) -> None:
    folder = (ROOT / name).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name]):
        path, _, anchor = target.partition("#")
        found = (folder / path).resolve() if path else ROOT / name
        assert found.exists(), target
        if anchor:
            page = found / "README.md" if found.is_dir() else found
            assert anchor in anchors(page.read_text()), target
        if found.suffix in (".png", ".svg"):
            assert found.stat().st_size < 100_000, target
    for path in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`", TEXTS[name]):
        assert (ROOT / path).exists(), path


def test_exit_codes_that_are_named_exist() -> None:
    known = {0} | {getattr(errors, name).exit_code for name in errors.__all__}
    for name, text in TEXTS.items():
        named = re.findall(r"exit\s+codes?\s+(\d+)(?:\s+(?:and|or|to)\s+(\d+))?", text)
        assert {int(code) for pair in named for code in pair if code} <= known, name
    text = TEXTS["workflows/retrain/README.md"]
    table = rows(text[text.index("| exit code |") :].partition("\n\n")[0])
    assert {int(code) for row in table for code in row[0].split(",")} == known - {1}


def test_nothing_is_left_to_fill_in() -> None:
    for name, text in TEXTS.items():
        assert not re.findall(r"<!--|TODO|TBD|XXX", text), name


# --- what their tables and formulas say


def test_every_kernel_is_listed() -> None:
    table = TEXTS["dkrr/linalg/README.md"].partition("| name |")[2].partition("Also sums")[0]
    listed = set(re.findall(r"^  \| (\w+) \|", table, re.MULTILINE))
    assert listed == set(NAMED) - {"polynomial", "additive_chi2"}


def test_the_bar_of_the_backward_error() -> None:
    assert "30 n eps" in TEXTS["dkrr/linalg/README.md"]
    assert backward_error_bar(1000, "float64") == pytest.approx(30 * 1000 * 2.0**-52)


def test_the_table_of_sizes_is_what_the_formulas_give() -> None:
    table = rows(sections(TEXTS["dkrr/fit/README.md"])["How large a problem fits"])
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


def test_kriging_is_what_the_tables_say() -> None:
    """Against the system of ordinary kriging, [[C, 1], [1, 0]] (weights, multiplier) = (c, 1), solved as it stands."""
    rng = np.random.default_rng(4)
    places, target = rng.random((40, 2)), rng.random((7, 2))
    values, sill, nugget, length = rng.standard_normal(40) + 3, 2.5, 0.4, 0.3

    def covariance(A: Any, B: Any) -> Any:
        r = np.sqrt(3) * cdist(A, B) / length
        return sill * (1 + r) * np.exp(-r)

    system = np.ones((41, 41))
    system[:40, :40] = covariance(places, places) + nugget * np.eye(40)
    system[40, 40] = 0.0
    known = np.vstack([covariance(places, target), np.ones(7)])
    weights = np.linalg.solve(system, known)
    est = dkrr.KernelRidge(
        alpha=nugget / sill, kernel="matern", kernel_params={"nu": 1.5, "length_scale": length}, fit_intercept=True
    )
    kriged, deviation = est.fit(places, values).predict(target, return_std=True, sigma2=sill)
    np.testing.assert_allclose(kriged, weights[:40].T @ values, rtol=1e-9)
    np.testing.assert_allclose(deviation**2, sill - (weights * known).sum(axis=0), rtol=1e-9)


def test_the_picture_is_made_by_its_script(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import kriging

    kriging.main(["-o", "map.png", "--places", "50"])
    assert capsys.readouterr().out == "wrote map.png\n"
    assert Path("map.png").read_bytes().startswith(b"\x89PNG")
