"""Atomic writing: a reader, a kill and a full disk never meet half a file."""

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from teamtr_lora.common import files
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json, remove_temporaries, sha256, write_atomic, write_folder_atomic

SYNC = os.fsync


def fail_on(call: int, code: int) -> Callable[[int], None]:
    """An fsync that fails at its n-th call, as a full disk makes it."""
    calls = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == call:
            raise OSError(code, os.strerror(code))
        SYNC(descriptor)

    return fsync


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_atomic(path, "old")
    inode = path.stat().st_ino
    with open(path, "rb") as reader:
        write_atomic(path, b"new and longer")
        assert reader.read() == b"old", "a reader that had it open still sees the old file whole"
    assert path.read_bytes() == b"new and longer" and path.stat().st_ino != inode
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_keeps_the_old_file_and_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = tmp_path / "file.txt"
    write_atomic(path, "old")
    monkeypatch.setattr(files.os, "fsync", fail_on(1, code))
    with pytest.raises(UserError) as caught:
        write_atomic(path, "new")
    assert str(path) in str(caught.value) and "no space" in str(caught.value) and "--resume" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["file.txt"]


def test_a_full_disk_in_any_file_of_a_folder_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (1, 2, 3):
        monkeypatch.setattr(files.os, "fsync", fail_on(call, errno.ENOSPC))
        with pytest.raises(UserError, match="no space"):
            write_folder_atomic(tmp_path / "step", {"a": b"1", "b": b"2"})
        assert list(tmp_path.iterdir()) == [], call


def test_a_write_that_runs_out_of_space_half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_synced(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_synced", write_synced)
    with pytest.raises(UserError, match="no space"):
        write_folder_atomic(tmp_path / "step", {"a": b"12345678"})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_place_of_a_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^\.: cannot be written"):
        write_atomic(Path("."), "")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_the_users_to_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for code in (errno.EACCES, errno.EROFS):
        monkeypatch.setattr(files.os, "fsync", fail_on(1, code))
        with pytest.raises(UserError, match="--run-dir"):
            write_atomic(tmp_path / "file.txt", "new")


def test_any_other_write_error_is_one_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        write_atomic(tmp_path / "file" / "inside.txt", "new")
    monkeypatch.setattr(files.os, "fsync", fail_on(1, errno.EIO))
    with pytest.raises(UserError, match="cannot be written"):
        write_atomic(tmp_path / "other.txt", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_folder_appears_whole_and_is_never_replaced(tmp_path: Path) -> None:
    write_folder_atomic(tmp_path / "deep" / "step", {"a": b"1", "b": b"2"})
    assert {p.name: p.read_bytes() for p in (tmp_path / "deep" / "step").iterdir()} == {"a": b"1", "b": b"2"}
    with pytest.raises(FileExistsError):
        write_folder_atomic(tmp_path / "deep" / "step", {"a": b"other"})
    assert (tmp_path / "deep" / "step" / "a").read_bytes() == b"1"
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["step"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileExistsError):
        write_folder_atomic(tmp_path / "empty", {"a": b"1"})


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / ".tmp-1-step" / ".tmp-2-inner").mkdir(parents=True)
    (tmp_path / "checkpoint" / ".tmp-1-step" / "state.json").write_text("{")
    (tmp_path / "checkpoint" / "step").mkdir()
    (tmp_path / "checkpoint" / "step" / "state.json").write_text("{}")
    (tmp_path / ".tmp-9-team.json").write_text("{")
    remove_temporaries(tmp_path)
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*"))
    assert left == ["checkpoint", "checkpoint/step", "checkpoint/step/state.json"]


def test_json_is_stable_and_refuses_what_no_reader_takes() -> None:
    assert dump_json({"b": 1, "a": [0.1]}) == dump_json({"a": [0.1], "b": 1})
    assert json.loads(dump_json({"a": 0.1})) == {"a": 0.1}
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="JSON"):
            dump_json({"a": value})


def test_sha256_is_the_standard_one() -> None:
    assert sha256(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
