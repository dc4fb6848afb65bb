"""Events: numbered segments that are written once, read in order, and continued by the next driver."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.events import MAX_EVENTS, EventLog, Follower, first_free, read_events, segment_name


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def messages(run: RunDirectory, start: int = 0) -> list[tuple[int, str]]:
    return [(number, event["message"]) for number, event in read_events(run, start)]


def test_a_flush_is_a_segment(run: RunDirectory) -> None:
    log = EventLog(run, epoch=1)
    log.flush()
    assert not run.has(segment_name(0))
    log.add("phase", "gram began", tasks_done=0)
    log.add("phase", "factorise began")
    log.flush()
    first = run.read_bytes(segment_name(0))
    log.add("state", "finished")
    log.flush()
    log.flush()
    assert run.read_bytes(segment_name(0)) == first, "a segment is never written again"
    assert messages(run) == [(0, "gram began"), (0, "factorise began"), (1, "finished")]
    assert messages(run, start=1) == [(1, "finished")]
    event = json.loads((first or b"").splitlines()[0])
    assert (event["epoch"], event["kind"], event["tasks_done"]) == (1, "phase", 0)
    assert event["time"].endswith("Z")


def test_the_next_driver_continues_the_numbers(run: RunDirectory) -> None:
    for epoch in (1, 2, 3):
        log = EventLog(run, epoch)
        log.add("state", f"driver {epoch}")
        log.flush()
    assert messages(run) == [(0, "driver 1"), (1, "driver 2"), (2, "driver 3")]


def test_a_number_that_is_taken_is_passed_over(run: RunDirectory) -> None:
    """Two drivers that count at the same time do not overwrite each other."""
    one, two = EventLog(run, 1), EventLog(run, 2)
    for log, text in ((one, "a"), (two, "b"), (one, "c"), (two, "d")):
        log.add("state", text)
        log.flush()
    assert [text for _, text in messages(run)] == ["a", "b", "c", "d"]


def test_events_wait_for_a_disk_that_is_full(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(run, 1)
    for number in range(MAX_EVENTS + 5):
        log.add("warning", str(number))
    full = monkeypatch.context()
    with full as patch:
        patch.setattr(RunDirectory, "create", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(OSError, match="No space left"):
            log.flush()
    log.flush()
    found = [text for _, text in messages(run)]
    assert found == [*map(str, range(MAX_EVENTS)), "5 more events were dropped"]
    log.flush()
    assert not run.has(segment_name(1))


def test_a_line_that_cannot_be_read_is_said(run: RunDirectory) -> None:
    run.write_bytes(segment_name(0), b'{"message": "ok"}\n{"mess\n')
    assert messages(run) == [(0, "ok"), (0, "unreadable line in events/000000.jsonl")]


@settings(deadline=None)
@given(count=st.integers(0, 3000))
def test_the_first_free_number(count: int) -> None:
    asked: list[int] = []
    assert first_free(lambda number: asked.append(number) or number < count) == count  # type: ignore[func-returns-value]
    assert len(asked) <= 26


def test_following_gives_everything_once(run: RunDirectory) -> None:
    follower, log = Follower(run), EventLog(run, 1)
    assert (list(follower.events()), list(follower.log_lines())) == ([], [])
    log.add("state", "a")
    log.flush()
    os.makedirs(run.location, exist_ok=True)
    with open(os.path.join(run.location, "driver.log"), "wb") as file:
        file.write(b"one\ntw")
        file.flush()
        assert [event["message"] for event in follower.events()] == ["a"]
        assert list(follower.log_lines()) == ["one"]
        file.write(b"o\n")
        file.flush()
        assert list(follower.log_lines()) == ["two"]
    assert (list(follower.events()), list(follower.log_lines())) == ([], [])
