"""Following a run reads what is new, and how runs stand is told from small files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_up_run import make_run

from teamtr_lora.common.locks import acquire, held
from teamtr_lora.runs import follow
from teamtr_lora.runs.follow import RowFollower
from teamtr_lora.runs.layout import LOCK
from teamtr_lora.runs.metrics import read_rows
from teamtr_lora.runs.standing import find_runs, standing


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The lines of a run's log."""
    return (make_run(tmp_path_factory.mktemp("made") / "run", 6) / "metrics.jsonl").read_bytes().splitlines(keepends=True)


def test_each_row_is_read_once(made: list[bytes], tmp_path: Path, monkeypatch: Any) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr(follow, "parse_row", lambda line, where, own=follow.parse_row: parsed.append(line) or own(line, where))
    log, follower = tmp_path / "metrics.jsonl", RowFollower(tmp_path)
    assert not follower.look() and follower.rows == []
    for count, line in enumerate(made, start=1):
        with open(log, "ab") as file:
            file.write(line)
        assert follower.look() and len(follower.rows) == count and not follower.look()
    assert [line + b"\n" for line in parsed] == made and follower.rows == read_rows(tmp_path)


def test_a_row_that_is_being_written_is_none_yet(made: list[bytes], tmp_path: Path) -> None:
    log, follower = tmp_path / "metrics.jsonl", RowFollower(tmp_path)
    log.write_bytes(made[0] + made[1][:50])
    assert follower.look() and len(follower.rows) == 1
    log.write_bytes(made[0] + made[1])
    assert follower.look() and len(follower.rows) == 2


def test_a_resumed_run_may_have_other_rows_in_place_of_lost_ones(made: list[bytes], tmp_path: Path) -> None:
    log, follower = tmp_path / "metrics.jsonl", RowFollower(tmp_path)
    log.write_bytes(b"".join(made[:3]))
    follower.look()
    log.write_bytes(b"".join([*made[:2], made[3], made[4]]))  # longer than before, but not a continuation
    assert follower.look() and follower.rows == read_rows(tmp_path)


def test_a_run_trains_while_somebody_holds_its_lock(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 4)
    assert standing(run, "run").state == "stopped", "one update of its second stage is made"
    lock = acquire(run / LOCK, run, "busy")
    try:
        found = standing(run, "run")
        assert found.state == "training" and held(run / LOCK)
        assert found.seconds_left == pytest.approx(found.seconds / 4 * 3), "updates that are left, by the time of those made"
    finally:
        lock.release()
    assert standing(run, "run").state == "stopped" and not held(run / LOCK)
    assert standing(make_run(tmp_path / "done", 6), "done").state == "finished"


def test_to_look_at_a_lock_takes_it_from_nobody(tmp_path: Path) -> None:
    for _ in range(50):
        assert not held(tmp_path / LOCK)
        lock = acquire(tmp_path / LOCK, tmp_path, "busy")
        assert held(tmp_path / LOCK)
        lock.release()


def test_runs_are_found_in_folders_of_folders(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a" / "b", 1)
    (tmp_path / ".hidden").mkdir()
    assert find_runs(tmp_path) == find_runs(run) == [run]
    (tmp_path / "link").symlink_to(run)
    assert find_runs(tmp_path) == [run], "links are not followed"
