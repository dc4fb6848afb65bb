"""What a text file says is read as it stands, or refused with its line and column; no row is lost or made up."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dkrr
from dkrr.errors import DataError
from tests.contract.helpers import run
from tests.jobs.retrain.project import in_process


def write(folder: Path, content: str | bytes, name: str = "rows.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(path: Path, **options: Any) -> dkrr.Dataset:
    return dkrr.ingest(path, path.with_name("out.zarr"), **options)


@pytest.mark.parametrize("mark", ["?", "NA", "nan", "", "-", "null", "N/A", " NA", "NaN  ", "\tNA"])
@pytest.mark.parametrize("row", [0, 2])
def test_a_missing_value_is_an_error_with_its_line_and_never_a_header(mark: str, row: int, tmp_path: Path) -> None:
    lines = ["1.5,2,3", "4.5,5,6", "7.5,8,9"]
    lines[row] = f"{lines[row][:3]},{mark},{lines[row][-1]}"
    path = write(tmp_path, "\n".join(lines))
    with pytest.raises(DataError, match=rf"nan at row {row}, column 1 \('x1'\), line {row + 1}") as caught:
        read(path)
    assert "--missing drop" in (caught.value.hint or "")
    lines[row] = f"{mark},2,3"
    with pytest.raises(DataError, match=rf"nan at row {row}, column 0 \('x0'\), line {row + 1}"):
        read(write(tmp_path, "\n".join(lines)))


def test_init_takes_no_row_for_names(tmp_path: Path) -> None:
    lines = "\n".join(f"{i % 7 + 0.5},{i % 5},{i}" for i in range(30))
    path = write(tmp_path, "?,1,2\n" + lines)
    run("init", path, said="target = [-1]")  # a column without a name


AMBIGUOUS = {
    "text among numbers": ("x,1,2\n3,4,5\n", "'x' stands above numbers, and column 1 is a number"),
    "years after a name": ("id,2019,2020\nf,1.5,2.5\ng,2.5,3.5\n", "2019 and 2020 stand above fractions"),
    "years": ("2019,2020\n1.5,2.5\n", "2019 and 2020 stand above fractions"),
    "numbered columns": ("0,1,2\n0.5,0.25,1\n", "0 and 1 stand above fractions"),
    "a scale far from what is below": (
        "1100.0,1102.0,1104.0\n0.5,0.1,0.7\n0.4,0.4,0.2\n",
        "1100.0 and 1102.0 are evenly",
    ),
    "years above whole numbers": ("2019,2020,2021\n5,7,1\n4,4,2\n", "2019 and 2020 are evenly spaced"),
    "numbered columns of whole numbers": ("0,1,2\n5,7,1\n4,4,2\n", "0 and 1 are the numbers of its columns"),
    "a year": ("2019\n1.5\n2.5\n", "2019 stand above fractions"),
    "a number above text": ("x,7\npear,q\n", "'7' stands above text"),
    "quoted numbers and a name": ('"x","9"\n"p",1\n', "quoted"),
    "quoted numbers": ('"7","9"\n1,2\n', "quoted"),
    "names and a mark": ("a,?\n1,2\n", "'a' stands above numbers, and column 1 is a missing value"),
    "row index of pandas": (",a,b\n0,1,2\n", "column 0 is empty"),
    "trailing delimiter": ("a,b,\n1,2,\n", "column 2 is empty"),
    "decimal comma": ("0,5;1,5\n1;2\n", "'0,5' looks like a number"),
    "thousands": ('"1,000","2,000"\n1,2\n', "'1,000' looks like a number"),
    "garbled number": ("1O5,pear\n1,apple\n", "'1O5' looks like a number"),
    "garbled, with a class": ("lO5,pear\n1,apple\n2,pear\n", "'pear' is a value further down"),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_a_first_line_that_may_be_names_or_values_is_asked_about(case: str, tmp_path: Path) -> None:
    text, message = AMBIGUOUS[case]
    path = write(tmp_path, text)
    options: dict[str, Any] = {"delimiter": ";"} if ";" in text else {}
    with pytest.raises(DataError, match=f"line 1: .*{message}.*--header.*--no-header"):
        read(path, features=[-1], **options)
    if case == "decimal comma":
        run("ingest", path, tmp_path / "x.zarr", "--delimiter", ";", exits=4)


@pytest.mark.parametrize(
    ("text", "names", "rows"),
    [
        ("1stFlrSF,SalePrice\n1,2.5\n", ("1stFlrSF", "SalePrice"), 1),
        ("a,b\n?,-\n1,2\n", ("a", "b"), 1),
        ("1,2\n3,4\n", ("x0", "x1"), 2),
        ('"1","2"\n"3","4"\n', ("x0", "x1"), 2),
        ("5.1,1,pear\n4.9,2,apple\n", ("x0", "x1"), 2),
        ("5,pear\n4.9,apple\n5.5,pear\n", ("x0",), 3),
        ("a,b\r\n1,2\r\n3,4", ("a", "b"), 2),
        ("\ufeff1,2\n3,4\n", ("x0", "x1"), 2),
        ('\ufeff"a",b\n3,4\n', ("a", "b"), 1),
        ("2019,2020\n1,2\n", ("x0", "x1"), 2),
        ("x\n 1.5\n 2.5\n", ("x",), 2),
    ],
)
def test_a_first_line_that_is_plain_is_read_without_a_question(
    text: str, names: tuple[str, ...], rows: int, tmp_path: Path
) -> None:
    features = None if "pear" not in text else list(range(len(names)))
    dataset = read(write(tmp_path, text), features=features, missing="drop")
    assert dataset.feature_names == names
    assert dataset.num_rows == rows


def test_a_header_that_is_declared_is_believed(tmp_path: Path) -> None:
    path = write(tmp_path, "2019,2020\n1.5,2.5\n")
    assert read(path, header=True).feature_names == ("2019", "2020")
    assert dkrr.ingest(path, tmp_path / "b.zarr", header=False).num_rows == 2


YEARS = "2019,2020,2021,y\n" + "".join(f"{i}.5,{i * i % 7}.25,{i % 3}.5,{i}.5\n" for i in range(20))


def test_a_first_line_with_the_columns_that_are_named_has_names(tmp_path: Path) -> None:
    path, names = write(tmp_path, YEARS), ("2019", "2020", "2021")
    with pytest.raises(DataError, match="it may hold names or values"):
        read(path)
    assert read(path, target="y").feature_names == names
    whole = write(tmp_path, YEARS.replace(".5", "").replace(".25", ""), "whole.csv")
    assert dkrr.ingest(whole, tmp_path / "w.zarr", features=["2021", "y"]).num_rows == 20
    # below text, where the line would be values: the class of a row is the name of no column
    text = write(tmp_path, "2019,k\n1,pear\n2,apple\n", "k.csv")
    assert dkrr.ingest(text, tmp_path / "k.zarr", target="k", one_hot=True).num_rows == 2
    text.write_text("1,pear\n2,apple\n3,pear\n")
    with pytest.raises(dkrr.DkrrError, match="target 'pear' is not a column"):
        dkrr.ingest(text, tmp_path / "p.zarr", target="pear", one_hot=True)
    # a number may be that of a column, and a name that is not there says nothing
    for target in ("2", -1, "z"):
        with pytest.raises(DataError, match="it may hold names or values"):
            dkrr.ingest(path, tmp_path / "o.zarr", target=target)


def test_a_data_set_and_a_model_name_the_columns_of_a_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    in_process(monkeypatch)

    write(tmp_path, YEARS)
    run("ingest", "rows.csv", "rows.zarr", "--target", "y")
    run("ingest", "rows.csv", "rows.zarr", "--append")
    run("fit", "rows.csv", "--target", "y")
    write(tmp_path, "\n".join(line.rpartition(",")[0] for line in YEARS.splitlines()), "new.csv")
    run("predict", "runs/rows/model.zarr", "new.csv", "--output", "p.npy")
    assert np.load(tmp_path / "p.npy").shape == (20, 1)
    run("evaluate", "runs/rows/model.zarr", "rows.csv")
    estimator = dkrr.KernelRidge(kernel="rbf").fit(dkrr.open_dataset("rows.zarr"))
    assert len(estimator.predict("new.csv")) == len(estimator.predict("new.csv", return_std=True)[1]) == 20
    job = (tmp_path / "rows.toml").read_text()
    assert 'target = ["y"]' in job
    write(tmp_path, job.partition("[evaluate]")[0] + '[evaluate]\npath = "rows.csv"\n[model]\n', "other.toml")
    run("fit", "other.toml")
    write(tmp_path, "y,2019,2020,2021,held\n" + "".join(f"{i}.5,{i}.25,0.5,1.5,{i % 2}\n" for i in range(20)))
    for mask, target in (("held", 0), (-1, "y")):
        text = f'[data]\npath = "rows.csv"\ntarget = [{target!r}]\n[evaluate]\nmask = {mask!r}\n'
        write(tmp_path, text, f"mask{mask}.toml")
        run("fit", f"mask{mask}.toml")


def test_decimal_commas(tmp_path: Path) -> None:
    path = write(tmp_path, "a;b\n1,5;2\n-0,25;1e3\n")
    with pytest.raises(DataError, match=r"line 2, column 0 \('a'\): '1,5' is not a number.*--decimal ,"):
        read(path, delimiter=";")
    with pytest.raises(DataError, match=r"line 2, .* separated by a semicolon and have decimal commas"):
        read(path)
    dataset = read(path, decimal=",")
    assert dataset.read(0, 2).tolist() == [[1.5, 2.0], [-0.25, 1000.0]]
    with pytest.raises(DataError, match="remove it where it groups thousands"):
        read(write(tmp_path, 'a,b\n"1,234",2\n', "t.csv"))
    quoted = write(tmp_path, '"1,5",2\n"3,25",4\n', "q.csv")
    assert dkrr.ingest(quoted, tmp_path / "q.zarr", decimal=",", delimiter=",").read(0, 1).tolist() == [[1.5, 2.0]]
    point = write(tmp_path, "1.5;2\n1,5;3\n", "p.csv")  # 1.5 may be fifteen
    with pytest.raises(DataError, match=r"line 1, column 0 .*'1\.5' is not a number"):
        dkrr.ingest(point, tmp_path / "p.zarr", decimal=",", header=False)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_bytes_that_are_not_utf8(suffix: str, tmp_path: Path) -> None:
    def path(text: str) -> Path:
        content = text.encode("latin-1")
        return write(tmp_path, gzip.compress(content) if suffix == ".csv.gz" else content, f"rows{suffix}")

    with pytest.raises(
        DataError, match=r"rows.csv.*, line 1, column 1: byte 0xE9 in 'temp\xe9rature' is not UTF-8.*iconv"
    ):
        read(path("a,temp\xe9rature\n1,2\n"))
    with pytest.raises(DataError, match=r"line 3, column 1: byte 0xB5 .* is not UTF-8"):
        read(path("a,b\n1,2\n3,4\xb5\n"))
    with pytest.raises(DataError, match=r"line 2, column 1: byte 0xE9 .* is not UTF-8"):
        read(path("a,k\n1,caf\xe9\n2,bar\n"), target="k", one_hot=True)
    assert read(path("a,k\n1,caf\xe9\n2,bar\n"), features=["a"]).num_rows == 2  # a column that nobody reads


def test_quoted_fields_and_ends_of_lines(tmp_path: Path) -> None:
    text = 'note,x\r\n"a, ""b""\r\nc",1\r\n\r\n"d",2\r\n"e\n\n",oops\r\n'
    with pytest.raises(DataError, match=r"line 6, column 1 \('x'\): 'oops'"):
        read(write(tmp_path, text), features=["x"])
    dataset = read(write(tmp_path, text.replace("oops", '"3"')), features=["x"])
    assert dataset.read(0, 3)[:, 0].tolist() == [1, 2, 3]


def test_newlines_in_quotes_at_the_border_of_a_block(tmp_path: Path) -> None:
    # blocks of 4 MiB end somewhere inside a field
    lines = "line\n" * 2000
    path = write(tmp_path, "note,x\n" + "".join(f'"{lines}",{i}\n' for i in range(1000)))
    assert np.array_equal(read(path, features=["x"]).read(0, 1000)[:, 0], np.arange(1000.0))


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
@pytest.mark.parametrize("again", [None, 5, 7])
def test_a_quote_that_is_not_closed_does_not_swallow_rows(again: int | None, name: str, tmp_path: Path) -> None:
    lines = [f"{i},note {i}" for i in range(10)]
    lines[4] = '4,"see 12'
    if again is not None:  # what opens another field closes this one, and its own text is appended
        lines[again] = f'{again},"see 15'
    for between, end in (("\n", "\n"), ("\n", ""), ("\r\n", ""), ("\r", "\n"), ("\r", "\n\n")):
        text = between.join(["x,note", *lines]) + end
        path = write(tmp_path, gzip.compress(text.encode()) if name.endswith("gz") else text, name)
        with pytest.raises(DataError, match=r"line 6: a quote is not closed"):
            read(path, features=["x"])
    again_below = 'x,other,note\n1,"3" pipe","foo\n2,bar,"baz"\n3,c,d\n'  # another quote in the same line
    with pytest.raises(DataError, match=r"line 2: a quote is not closed"):
        read(write(tmp_path, again_below), features=["x"])
    for end in ("", "\n"):  # a file that was cut
        with pytest.raises(DataError, match=r"line 6: a quote is not closed"):
            read(write(tmp_path, "x,note\n" + "\n".join(lines[:5]) + end), features=["x"])
    lines[4] = '4,5" pipe'  # part of a text that is not quoted
    assert read(write(tmp_path, "x,note\n" + "\n".join(lines[:5])), features=["x"]).num_rows == 5


def test_members_of_a_gzip_file_are_one_file(tmp_path: Path) -> None:
    path = write(tmp_path, gzip.compress(b"a,b\n1,2\n") + gzip.compress(b"3,4\n"), "rows.csv.gz")
    assert read(path).read(0, 2).tolist() == [[1, 2], [3, 4]]


def test_an_empty_line_in_a_file_of_one_column_is_a_missing_value(tmp_path: Path) -> None:
    path = write(tmp_path, "x\n1\n\n3\n")
    with pytest.raises(DataError, match=r"nan at row 1, column 0 .*, line 3"):
        read(path)
    assert read(path, missing="drop").read(0, 2).tolist() == [[1], [3]]


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "1,2\n3,4\n")

    class Grown:
        """Targets that are made when they are asked for, after the file was looked at."""

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            with path.open("a") as file:
                file.write("5,6\n")
            return np.zeros(3)

    with pytest.raises(DataError, match=r"rows\.csv was changed while it was read"):
        read(path, y=Grown())


def test_classes_are_told_exactly(tmp_path: Path) -> None:
    path = write(tmp_path, "x,k\n1, pear\n2, pear\n3,apple\n")
    assert read(path, target="k", one_hot=True).classes == ("apple", "pear")
    path = write(tmp_path, 'x,k\n1," pear"\n2,pear \n3,apple\n', "two.csv")
    with pytest.raises(DataError, match="' pear' and 'pear ', which differ by white space alone"):
        read(path, target="k", one_hot=True)
    path = write(tmp_path, "x,k\n1, 7\n2,7\n3,8\n", "numbers.csv")
    assert dkrr.ingest(path, tmp_path / "numbers.zarr", target="k", one_hot=True).classes == (7, 8)
    big = 2**53
    path = write(tmp_path, f"x,k\n1,{big}\n2,{big + 1}\n", "big.csv")
    dataset = dkrr.ingest(path, tmp_path / "big.zarr", target="k", one_hot=True)
    assert dataset.classes == (big, big + 1)
    assert dataset.y is not None
    assert dataset.y.read(0, 2).tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("mark", ["?", "", "NA", "NaN"])
def test_a_class_that_is_missing(mark: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"x,k\n1,7\n2,{mark}\n3,8\n")
    with pytest.raises(DataError, match=r"row 1 of .*, line 3, has no class in column 'k'") as caught:
        read(path, target="k", one_hot=True)
    assert "remove the row" in caught.value.hint
    assert read(path, target="k", one_hot=True, missing="drop").classes == (7, 8)


@pytest.mark.parametrize("mark", ["?", "", "NA", "nan", "NULL", " N/A "])
def test_a_mark_of_a_missing_value_is_no_class_among_text(mark: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"x,k\n1,low\n2,{mark}\n3,high\n")
    with pytest.raises(DataError, match=r"row 1 of .*, line 3, has no class in column 'k'"):
        read(path, target="k", one_hot=True)
    dataset = read(path, target="k", one_hot=True, missing="drop")
    assert (dataset.num_rows, dataset.classes) == (2, ("high", "low"))
    # unless it is the name of one, as of a model that was fitted with it
    classes = [mark.strip(), "low", "high"]
    if classes[0] not in ("", "?"):
        dataset = dkrr.ingest(path, tmp_path / "named.zarr", target="k", one_hot=True, classes=classes, missing="drop")
        assert (dataset.num_rows, dataset.classes) == (3, tuple(classes))


def test_a_label_is_the_class_that_is_written_like_it(tmp_path: Path) -> None:
    """White space and all, before what is the same without it."""
    classes = ["a", " a", "b"]
    path = write(tmp_path, 'x,k\n1,a\n2," a"\n3," b"\n4,"a "\n')
    dataset = dkrr.ingest(path, tmp_path / "d.zarr", target="k", one_hot=True, classes=classes)
    assert dataset.y is not None
    assert dataset.y.read(0, 4).argmax(axis=1).tolist() == [0, 1, 2, 0]
