"""Files that may come from anywhere: read once and whole, as the plain files that they have to be; JSON without surprises."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from teamtr_lora.common.errors import UserError

MAX_JSON_DEPTH = 64  # a dozen is much, and what reads it later goes down by calls


def show(value: object) -> str:
    """A name from outside, fit for one line of a terminal whatever is in it."""
    text = ascii(value)
    return text if len(text) <= 120 else text[:117] + "..."


def read_regular(path: Path, limit: int, *, folder: Path | None = None) -> bytes:
    """The bytes of a plain file. A device, a pipe, a link out of `folder` (any link without one) or too much is refused."""
    where = f"{path}"
    if folder is not None:
        target = Path(os.path.realpath(path))  # does not raise on circular links; open() then refuses them
        if not target.is_relative_to(os.path.realpath(folder)):
            raise UserError(f"{where}: a link out of its folder; copy the file itself to where the link is")
        path = target
    with open_regular(path, where) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise UserError(f"{where}: {size} bytes are more than the {limit} that such a file may have")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise UserError(f"{where}: grew past {limit} bytes while it was read")
    return data


def open_regular(path: Path, where: str) -> BinaryIO:
    """A plain file, to read from. A device, a pipe or a link is refused; `where` is what the error calls it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        what = "a link; put the file itself there" if path.is_symlink() else f"cannot be read ({error.strerror})"
        raise UserError(f"{where}: {what}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{where}: not a plain file")
    return os.fdopen(descriptor, "rb")


def parse_json(data: bytes | str, where: str) -> dict[str, Any]:
    """A JSON object; keys that appear twice, NaN, infinity and deep nesting are refused."""
    try:
        value = json.loads(data, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair cannot be written to any file
    except RecursionError as error:
        raise UserError(f"{where}: nested too deep to be read") from error
    except ValueError as error:  # JSONDecodeError and UnicodeError are such
        raise UserError(f"{where}: no proper JSON ({' '.join(ascii(str(error))[1:-1].split())[:160]})") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: holds no JSON object")
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [inner for inner in level if isinstance(inner, (dict, list))]
    if level:
        raise UserError(f"{where}: nested too deep to be read")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {show(key)} appears twice")
        result[key] = value
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
