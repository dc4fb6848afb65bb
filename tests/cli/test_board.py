"""The board of a run and its triangle: on every width, with and without colours, for few tiles and for many."""

from __future__ import annotations

import io
from typing import Any

import pytest

from dkrr.cli.board import PhaseLines, board, phase_line
from dkrr.cli.progress import LiveBoard, ProgressDisplay
from dkrr.cli.triangle import ASCII, BLOCKS, coarser, triangle_lines
from dkrr.jobs.runs.status import Status
from dkrr.jobs.runs.tilemap import TileMap


def tiles_of(side: int, num_done: int, num_running: int = 2) -> dict[str, Any]:
    tiles = TileMap()
    keys = [(i, j) for j in range(side) for i in range(j, side)]
    tiles.begin("factorise", keys)
    for key in keys[:num_done]:
        tiles.finished(key)
    tiles.running(keys[num_done : num_done + num_running])
    found = tiles.to_dict()
    assert found is not None
    return found


def running(side: int = 20, num_done: int = 55, **values: Any) -> Status:
    total = side * (side + 1) // 2
    known: dict[str, Any] = {
        "state": "running", "phase": "factorise", "tasks_done": num_done, "tasks_total": total,
        "flops_per_second": 163.2e9, "phase_seconds": 65.0, "phase_seconds_left": 41.0, "num_workers": 2,
        "num_threads": 2, "elapsed_seconds": 70.0, "memory_bytes": 812 * 2**20, "tiles": tiles_of(side, num_done),
    }  # fmt: skip
    return Status(**(known | values))


def shown(status: Status, width: int, height: int, **options: Any) -> list[str]:
    from rich.console import Console

    stream = io.StringIO()
    console = Console(file=stream, width=width, height=height, force_terminal=False, legacy_windows=False)
    console.print(board(status, "running", width=width, height=height, **options))
    return stream.getvalue().splitlines()


def picture(lines: list[str]) -> list[str]:
    return [line for line in lines if line[:2] in ("██", "[]", "··", "░░", "▒▒", "▓▓")]


def test_signs_of_a_small_triangle() -> None:
    # column by column: (0,0) (1,0) (2,0) (1,1) are done, (2,1) (2,2) run
    tiles = tiles_of(3, 4)
    assert ["".join(sign for sign, _ in line) for line in triangle_lines(tiles, 5)] == ["██", "████", "██[][]"]
    assert ["".join(sign for sign, _ in line) for line in triangle_lines(tiles, 5, ASCII)] == ["# ", "# # ", "# [][]"]
    kinds = [[kind for _, kind in line] for line in triangle_lines(tiles_of(3, 2, 1), 5)]
    assert kinds == [["done"], ["done", "todo"], ["running", "todo", "todo"]]


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 19, 20, 100])
def test_fewer_rows_than_tiles(rows: int) -> None:
    whole = 20 * 21 // 2
    shares, lit = coarser(tiles_of(20, whole - 1, 1), rows)
    assert len(shares) <= min(rows, 20)
    assert [len(row) for row in shares] == list(range(1, len(shares) + 1))
    assert lit == {(len(shares) - 1, len(shares) - 1)}
    assert shares[-1][-1] < 9  # one tile is missing
    assert all(share == 9 for row in shares[:-1] for share in row)
    assert {share for row in coarser(tiles_of(20, whole, 0), rows)[0] for share in row} == {9}
    first = coarser(tiles_of(20, 1, 0), rows)[0]
    assert first[0][0] > 0  # one of them has begun
    assert BLOCKS.of(first[0][0], False) != BLOCKS.todo


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (60, 24), (40, 20), (20, 10), (200, 8)])
@pytest.mark.parametrize("side", [3, 20, 48, 300])
def test_it_fits_the_terminal(side: int, width: int, height: int) -> None:
    status = running(side=side, num_done=side)
    lines = shown(status, width, height)
    assert len(lines) <= height
    assert max(len(line) for line in lines) <= width
    text = "\n".join(lines)
    assert "[]" in text
    assert "factorise" in text
    if width >= 80 and height >= 20:
        assert f"{side:,} of {side * (side + 1) // 2:,}" in text
        for fact in ("163.2 GF/s", "0:41 of this phase", "2, 2 threads", "812 MiB", "1:10"):
            assert fact in text


def test_eighty_columns_hold_twenty_tiles_a_side() -> None:
    lines = picture(shown(running(20, 55), 80, 24))
    assert len(lines) == 20
    assert lines[0].startswith("██ ")
    assert lines[-1].startswith("████")
    assert [line.count("[]") for line in lines].count(1) == 2


def test_two_hundred_columns_show_more_of_many_tiles() -> None:
    status = running(48, 400)
    assert len(picture(shown(status, 200, 60))) > len(picture(shown(status, 80, 24)))


def test_a_terminal_without_such_signs() -> None:
    text = "\n".join(shown(running(3, 4), 80, 24, unicode=False))
    assert text.isascii()
    assert "# [][]" in text
    assert shown(Status(phase="solve", tasks_done=5, tasks_total=10), 80, 24, unicode=False)[-1].startswith(
        "#" * 30 + "."
    )


def test_a_phase_without_tiles() -> None:
    lines = shown(running(tiles=None, phase="cg, residual 3e-4", tasks_done=12, tasks_total=40), 80, 24)
    text = "\n".join(lines)
    assert "cg" in text
    assert "12 of about 40 (30%)" in text
    assert "residual 3e-4" in text
    assert "iterations" in text
    assert "GF/s" not in text
    assert "━" in text
    assert len(shown(Status(phase="prepare"), 80, 24)) == 3


def test_lines_of_phases() -> None:
    assert phase_line("prepare", {"seconds": 0.84, "tasks": 0, "flops_per_second": 0}) == "prepare: 0.8 s"
    factor = {"seconds": 12.3, "tasks": 210, "flops_per_second": 163.2e9}
    assert phase_line("factorise", factor) == "factorise: 210 tasks in 12.3 s, 163.2 GF/s"
    assert phase_line("cg", {"seconds": 200, "tasks": 40, "flops_per_second": 1e9}) == "cg: 40 iterations in 3:20"
    lines = PhaseLines()
    phases = {"start": {"number": 1, "seconds": 2, "times": 1}, "plan": {"number": 0, "seconds": 1, "times": 1}}
    assert list(lines.new(Status(phases=phases))) == ["plan: 1.0 s", "start: 2.0 s"]
    assert list(lines.new(Status(phases=phases))) == []
    again = phases | {"start": {"number": 1, "seconds": 3, "times": 2}}
    assert list(lines.new(Status(phases=again))) == ["start: 3.0 s"]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_run_that_is_driven_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    stream = Terminal()
    status = running()
    with ProgressDisplay(stream) as progress:
        progress.attach(lambda: status)
        progress("factorise", 0, 210, 0.0, 210e9)
        assert isinstance(progress._live, LiveBoard)
        progress._live._live.refresh()
        status.phases = {"factorise": {"number": 0, "seconds": 12.3, "tasks": 210, "times": 1}}
        progress("solve", 0, 10, 0.0, 1e9)
    text = stream.getvalue()
    assert "██" in text
    assert "55 of 210" in text
    assert "factorise: 210 tasks in 12.3 s" in text


def test_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    status = running()
    with ProgressDisplay(stream) as progress:
        progress.attach(lambda: status)
        progress("factorise", 0, 210, 0.0, 210e9)
        status.phases = {"factorise": {"number": 0, "seconds": 12.3, "tasks": 210, "times": 1}}
    assert stream.getvalue() == "factorise: 210 tasks in 12.3 s\n"


def test_a_way_that_was_given_up_and_the_one_after_it() -> None:
    given_up = [{"way": "cg mixed, rank 500", "next": "cg float64, rank 500", "sentence": "..."}]
    text = "\n".join(shown(running(tiles=None, phase="cg", given_up=given_up), 80, 24))
    assert "from cg mixed, rank 500" in text
    assert "cg float64, rank 500" in text
