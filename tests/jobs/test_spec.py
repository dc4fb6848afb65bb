"""Job files: what is accepted, what it means, and the sentence that a mistake gets."""

from __future__ import annotations

import os
import string
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dkrr.errors import JobFileError
from dkrr.jobs.init import init_job
from dkrr.jobs.spec import JobSpec
from dkrr.store.objects import StorageSettings, parse_address

FULL = """\
[data]
path = "train.csv.gz"
target = [-1]
header = false
features = ["a", 2]
weight = "w"
delimiter = ";"
one_hot = false
standardize = true

[evaluate]
fraction = 0.1
metric = "r2"

[model]
kernel = "matern"
alpha = 1e-3
kernel_params = {nu = 1.5, length_scale = 0.75}

[solver]
name = "cholesky"
tile_size = 2048
precision = "float64"
gram = "stored"
tol = 1e-6
max_iter = 100

[cluster]
scheduler = "local"
workers = 2
threads_per_worker = 1
memory_limit = "2GiB"

[storage]
endpoint_url = "https://storage.example"
region = "eu-north-1"
profile = "lab"

[output]
directory = "runs/{id}"
store = "runs/store"
keep = "all"
"""


MISTAKES = [
    ('[model]\nkernal = "rbf"', "unknown key 'kernal' in [model]; did you mean 'kernel'"),
    ("[modle]\nalpha = 1", "unknown table [modle]; did you mean 'model'"),
    ("[model]\nzzz = 1", "unknown key 'zzz' in [model]; known: C, alpha, coef0, degree, epsilon, fit_intercept, gamma"),
    ('[model.kernel]\nsum = [{kernel = "rbf", gama = 1}]', "unknown key 'gama' in [model.kernel.sum]"),
    ('[model.kernel]\nsum = [{product = [{kernel = "rbf"}, 2], alpha = 1}]', "unknown key 'alpha' in [model.kernel"),
    ('[model]\nkernel = "rfb"', "rbf"),
    ("[model]\nkernel = 5", "[model] kernel = 5: the name of a kernel, or a table"),
    ('[model]\nkernel = {kernel = "rbf", sum = ["linear"]}', "one of kernel, sum and product expected, kernel and sum"),
    ("[model]\nkernel = {}", "one of kernel, sum and product expected, none given"),
    ('[model]\ngamma = 1.0\nkernel = {kernel = "rbf"}', "gamma belongs into the kernel's own table"),
    ('[model]\nkernel = {sum = ["linear"], gamma = 1.0}', "gamma belongs into the tables of the sum"),
    ("[model]\nkernel = {sum = [1.0, 2.0]}", "the sum has no kernel in it"),
    ("[model]\nkernel = {sum = []}", "the sum has no kernel in it"),
    ('[model]\nkernel = {product = [-1.0, "linear"]}', "greater than 0"),
    ("[model]\nalpha = -1", "[model] alpha = -1: a finite number >= 0, or a list with one for each target, expected"),
    ("[model]\nalpha = nan", "[model] alpha = nan: a finite number >= 0"),
    ("[model]\nalpha = true", "[model] alpha = True: a finite number >= 0"),
    ("[model]\nalpha = []", "[model] alpha = []: a finite number >= 0"),
    ('[model]\nalpha = "big"', "[model] alpha = 'big': a finite number >= 0"),
    ('[model]\nkernel = "rbf"\ngamma = 0', "[model] gamma = 0: input should be greater than 0"),
    ('[model]\nkernel = "rbf"\ngamma = "auto"', "[model] gamma = 'auto': input should be a valid number"),
    ('[solver]\nprecision = "float32"\nname = "cg"', "precision 'float32' with solver 'cg', whose answers are float64"),
    ('[solver]\nprecision = "float32"\nname = "nystrom"', "precision 'mixed' makes its passes in float32"),
    ('[solver]\nnum_centers = 100', "num_centers is for solver 'nystrom', 'auto' given"),
    ('[solver]\nname = "cg"\ncenters = "uniform"', "centers is for solver 'nystrom', 'cg' given: nystrom is an "),
    ('[solver]\nname = "nystrom"\ngram = "stored"', "nystrom has no n x n matrix to store"),
    ('[solver]\nname = "nystrom"\nrank = 100', "that of nystrom is made of its centres: ask for cg"),
    ('[solver]\nname = "cholesky"\nrank = 100', "rank is for solver 'cg', 'cholesky' given: ask for cg"),
    ('[solver]\npreconditioner = "none"', "preconditioner is for solver 'cg', 'auto' given"),
    ('[solver]\nname = "cg"\npreconditioner = "none"\nrank = 5', "rank 5 with preconditioner 'none'"),
    ('[solver]\nrank = 0', "[solver] rank = 0: \"auto\" or a whole number above 0 expected"),
    ('[solver]\nname = "nystrom"\nnum_centers = "many"', "num_centers = 'many': \"auto\" or a whole number above 0"),
    ('[solver]\nseed = -1', "[solver] seed = -1: input should be greater than or equal to 0"),
    ('[solver]\nname = "cholseky"', "'cholseky' is not allowed; 'auto', 'cholesky', 'cg', 'nystrom' or 'primal'"),
    ('[solver]\nname = "cholseky"', "did you mean 'cholesky'"),
    ('[solver]\ngram = "on-the-fly"', "'auto', 'stored' or 'on_the_fly' expected: did you mean 'on_the_fly'"),
    ("[solver]\ntile_size = 20000", "\"auto\" or a whole number from 1 to 16,384 expected"),
    ("[solver]\ntile_size = 0", "\"auto\" or a whole number from 1"),
    ("[solver]\ntol = 0", "[solver] tol = 0: input should be greater than 0"),
    ('[cluster]\nworkers = "2"', "[cluster] workers = '2': input should be a valid integer"),
    ("[cluster]\nworkers = 0", "[cluster] workers = 0: input should be greater than or equal to 1"),
    ('[cluster]\nmemory_limit = "lots"', "[cluster] memory_limit = 'lots': a size such as \"2GiB\""),
    ("[cluster]\nmemory_limit = -1", "a number of bytes above 0"),
    ("[cluster]\nmemory_limit = true", "a size such as \"2GiB\""),
    ('[cluster]\nscheduler = "tcp://10.0.0.1:8786"', "without encryption and authentication"),
    ('[cluster]\nscheduler = "http://10.0.0.1:8786"', "tls://host:port or a scheduler file expected"),
    ("[evaluate]\nfraction = 1.5", "[evaluate] fraction = 1.5: input should be less than 1"),
    ('[evaluate]\nfraction = 0.1\npath = "x"', "[evaluate]: one of path, mask and fraction expected, path and"),
    ('[evaluate]\nmetric = "rmse"', "[evaluate]: one of path, mask and fraction expected, none given"),
    ('[evaluate]\nfraction = 0.1\nmetric = "mse"', "'log_loss' or 'pinball' expected"),
    ('[cluster]\ndriver = "slurm"', "unknown key 'driver' in [cluster]"),
    ('[output]\ndirectory = "runs/{name}"', "{id} is the only thing that braces may hold"),
    ('[output]\nkeep = "nothing"', "'all', 'factor' or 'model' expected"),
    ('[output]\nstore = ""', "a path is expected"),
    ("output = 3", "[output]"),
    ('[storage]\nsecret_access_key = "hunter2"', "[storage] secret_access_key looks like a secret"),
    ('[storage]\ntoken = "hunter2"', "[storage] token looks like a secret"),
    ('[storage]\naccess-key = "hunter2"', "looks like a secret"),
    ('[storage]\nendpoint_url = "https://me:hunter2@host"', "[storage] endpoint_url is an address with a password"),
    ('[cluster]\nscheduler = "tls://me:hunter2@host:1"', "[cluster] scheduler is an address with a password in it"),
    ('[storage]\nendpoint_url = "https://host/?X-Amz-Signature=hunter2"', "an address with a credential in it"),
    ('[model]\nkernel_params = {api_key = "hunter2"}', "looks like a secret"),
    ('[storage]\nendpoint_url = "http://host:9000"', "reached without encryption"),
    ('[storage]\nendpoint_url = "host:9000"', "an address such as"),
    ('[evaluate]\npath = "gs://bucket/a"', "gs:// is not supported"),
    ('[evaluate]\npath = "s3://hunter2@bucket/a"', "an address with a credential in it"),
    ('[evaluate]\npath = "s3://user:hunter2@bucket/a"', "an address with a password in it"),
    ('[evaluate]\npath = "s3://b/a?endpoint_url=https://u:hunter2@host"', "an address with a password in it"),
    ("[data]\n", "[data] path is missing"),
    ("[data]\npath = 3", "[data] path = 3: input should be a valid string"),
    ('[data]\npath = "x"\nheader = "yes"', "[data] header = 'yes': true, false or \"auto\" expected"),
    ('[data]\npath = "x"\nheader = 1', 'true, false or "auto" expected'),
    ('[data]\npath = "x"\ntarget = 1.5', "[data] target = 1.5: column names or numbers expected"),
    ('[data]\npath = "x"\ntarget = []', "column names or numbers expected"),
    ('[data]\npath = "x"\nweight = true', "a column name or number expected"),
    ('[data]\npath = "x"\ndelimiter = "::"', "at most 1 character"),
    ('[data]\npath = "x"\nstandardize = "yes"', "valid boolean"),
    ('data = "x.csv"', "[data]"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), MISTAKES)
def test_a_mistake_gets_its_sentence(tmp_path: Path, text: str, expected: str) -> None:
    data = "" if text.startswith(("[data]", "data")) else '\n[data]\npath = "x.csv"\n'
    path = tmp_path / "job.toml"
    path.write_text(f"{data}\n{text}" if text.startswith("[") else f"{text}\n{data}")
    with pytest.raises(JobFileError) as caught:
        JobSpec.load(path)
    message = str(caught.value)
    assert expected in message
    assert "hunter2" not in message
    assert "\n" not in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "expected", "line"),
    [
        (FULL.replace("tile_size", "tilesize").encode(), "{path}:{line}: unknown key 'tilesize' in [solver]", 22),
        (b"[data\n", "not valid TOML", None),
        (b"[data]\npath = x.csv\n", "line 2", None),
        (b"[data]\npath = 'x'\npath = 'y'\n", "line 3", None),
        (b"\xff\xfe", "not UTF-8", None),
        (b"", "[data] is missing", None),
    ],
)
def test_a_file_and_its_line_are_named(tmp_path: Path, content: bytes, expected: str, line: int | None) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    with pytest.raises(JobFileError) as caught:
        JobSpec.load(path)
    assert expected.format(path=path, line=line) in str(caught.value)
    assert str(path) in str(caught.value)
    assert line is None or caught.value.line == line


def test_addresses_are_reached_as_storage_says(tmp_path: Path) -> None:
    storage = {"endpoint_url": "http://127.0.0.1:9000", "region": "eu-1", "allow_http": True}
    places = {
        "data": {"path": "s3://b/d.zarr"},
        "evaluate": {"mask": "s3://b/t.csv"},
        "output": {"directory": "s3://b/runs/x"},
    }
    job = JobSpec.from_dict({**places, "storage": storage})
    query = "?endpoint_url=http://127.0.0.1:9000&region=eu-1&allow_http=true"
    found = (job.data.path, job.evaluate and job.evaluate.mask, job.directory, job.store)
    assert found == tuple(f"s3://b/{place}{query}" for place in ("d.zarr", "t.csv", "runs/x", "runs/store"))
    assert (job.run_id, job.to_dict()["data"], job.to_dict()["output"]["directory"]) == (
        "x",
        {**job.to_dict()["data"], "path": "s3://b/d.zarr"},
        "s3://b/runs/x",
    )
    assert parse_address(job.data.path).settings == StorageSettings(**storage)


names = st.text(string.ascii_letters + "äß_ \"'\\\x7f\t", min_size=1, max_size=8)
columns = st.lists(st.one_of(names, st.integers(-5, 5)), min_size=1, max_size=3)
positive = st.floats(1e-6, 1e6)
leaves = st.one_of(
    st.fixed_dictionaries({"kernel": st.sampled_from(["rbf", "laplacian"])}, optional={"gamma": positive}),
    st.fixed_dictionaries(
        {"kernel": st.just("poly")}, optional={"gamma": positive, "degree": st.integers(1, 4), "coef0": positive}
    ),
    st.just({"kernel": "matern", "kernel_params": {"nu": 1.5, "length_scale": 0.75}}),
    st.just("linear"),
)
kernel_tables = st.recursive(
    leaves,
    lambda inner: st.builds(
        lambda form, parts, number: {form: [*parts, *number]},
        st.sampled_from(["sum", "product"]),
        st.lists(inner, min_size=1, max_size=3),
        st.lists(positive, max_size=1),
    ),
    max_leaves=5,
)


def optional(**strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=strategies)


documents = st.fixed_dictionaries(
    {
        "data": st.builds(
            lambda path, rest: {"path": path, **rest},
            names,
            optional(
                target=columns,
                features=columns,
                weight=names,
                header=st.sampled_from([True, False, "auto"]),
                delimiter=st.sampled_from([",", ";", "\t"]),
                one_hot=st.booleans(),
                standardize=st.booleans(),
            ),
        )
    },
    optional={
        "evaluate": st.one_of(
            st.builds(dict, fraction=st.floats(0.01, 0.99)),
            st.builds(dict, mask=st.one_of(names, st.integers(-3, 3))),
            st.builds(dict, path=names, metric=st.sampled_from(["rmse", "r2", "accuracy"])),
        ),
        "model": st.builds(
            lambda kernel, alpha: {"kernel": kernel, "alpha": alpha},
            kernel_tables,
            st.one_of(st.floats(0, 1e9), st.lists(st.floats(0, 1e9), min_size=1, max_size=3)),
        ),
        "solver": optional(
            name=st.sampled_from(["auto", "cholesky"]),
            precision=st.sampled_from(["auto", "float64", "float32", "mixed"]),
            seed=st.integers(0, 2**32 - 1),
            allow_unconverged=st.booleans(),
            tile_size=st.one_of(st.just("auto"), st.integers(1, 16_384)),
            gram=st.sampled_from(["auto", "stored", "on_the_fly"]),
            tol=st.floats(1e-300, 0.5),
            max_iter=st.integers(1, 10**12),
        ),
        "cluster": optional(
            workers=st.integers(1, 99), memory_limit=st.one_of(st.just("auto"), st.just("2GiB"), st.integers(1, 2**50))
        ),
        "storage": optional(region=names, profile=names, allow_http=st.booleans()),
        "output": optional(
            directory=st.sampled_from(["runs/{id}", "/abs", "s3://bucket/runs"]),
            keep=st.sampled_from(["all", "factor", "model"]),
        ),
    },
)


def test_two_dots_behind_a_link_mean_what_they_mean_to_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, count in (("proj", 3), ("disk", 2)):
        (tmp_path / folder / "day1").mkdir(parents=True)
        (tmp_path / folder / "train.csv").write_text("a,b,y\n" + "1,2,3\n" * count)
    monkeypatch.chdir(tmp_path / "proj")
    os.symlink("../disk/day1", "link")
    text = '[data]\npath = "{}"\ntarget = "y"\n'
    for file, path in (("job.toml", "link/../train.csv"), ("../disk/job.toml", "train.csv")):
        Path(file).write_text(text.format(path))
    Path("made.toml").write_text(init_job("link/../train.csv", "y"))
    for name in ("job.toml", "link/../job.toml", "made.toml"):
        assert JobSpec.load(name).data.path == str(tmp_path / "disk/train.csv")


@settings(deadline=None)  # the machine may be busy
@given(documents)
def test_round_trips_through_dict_and_toml(document: dict[str, Any]) -> None:
    spec = JobSpec.from_dict(document, base="/base")
    assert JobSpec.from_dict(spec.to_dict(), base="/elsewhere", name="other") == spec
    assert JobSpec.from_dict(tomllib.loads(spec.to_toml()), base="/elsewhere") == spec
