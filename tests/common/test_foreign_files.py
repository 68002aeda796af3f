"""What others wrote is read as a plain file and as proper JSON, or refused in one line."""

import os
from pathlib import Path

import pytest

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.foreign_files import MAX_JSON_DEPTH, parse_json, read_regular, show


def test_only_a_plain_file_within_its_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "outside").write_bytes(b"12345")
    (tmp_path / "in" / "near").write_bytes(b"123")
    (tmp_path / "in" / "far").symlink_to(tmp_path / "outside")
    (tmp_path / "in" / "here").symlink_to(tmp_path / "in" / "near")
    os.mkfifo(tmp_path / "in" / "pipe")
    folder = tmp_path / "in"
    assert read_regular(folder / "near", 3) == read_regular(folder / "here", 3, folder=folder) == b"123"
    for name, limit, inside, wrong in (
        ("near", 2, None, "3 bytes are more than the 2"),
        ("here", 3, None, "a link; put the file itself there"),
        ("far", 9, folder, "a link out of its folder"),
        ("pipe", 9, folder, "not a plain file"),
    ):
        with pytest.raises(UserError, match=wrong):
            read_regular(folder / name, limit, folder=inside)
    with pytest.raises(FileNotFoundError):
        read_regular(folder / "none", 9)


def test_json_is_one_object_without_surprises() -> None:
    def nested(depth: int) -> str:
        return '{"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"

    assert parse_json(b'{"a": [1, "\xc3\xa9"]}', "f") == {"a": [1, "é"]}
    assert parse_json(nested(MAX_JSON_DEPTH), "f").keys() == {"a"}
    for text, wrong in (
        ("[1]", "holds no JSON object"),
        ('{"a": 1, "a": 2}', "the key 'a' appears twice"),
        ('{"a": NaN}', "NaN is no JSON number"),
        ('{"a": "\\ud800"}', "no proper JSON"),
        (nested(MAX_JSON_DEPTH + 1), "nested too deep"),
        (nested(100_000), "nested too deep"),
    ):
        with pytest.raises(UserError, match=wrong):
            parse_json(text, "f")


def test_a_name_from_outside_is_one_short_line() -> None:
    assert show("a\n\x1b[31m\u202e") == r"'a\n\x1b[31m\u202e'"
    assert len(show("x" * 1000)) == 120
