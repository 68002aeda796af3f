"""Rows of local files and hub datasets, for every task that takes its items from one."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from teamtr_lora.common.errors import UserError


def read_rows(path: Path, key: str) -> Any:
    """The rows of a local JSONL, JSON (a list of rows), CSV (all columns text) or Parquet file; the first two may be gzipped."""
    kind = (path.suffixes[-2:-1] if path.suffix == ".gz" else [path.suffix])[-1:]
    reader = READERS.get(kind[0] if kind else "")
    if reader is None:
        raise UserError(f"{key} = {str(path)!r}: unknown file type; use .jsonl, .json, .csv or .parquet")
    if not path.is_file():
        there = [p.name for p in path.parent.glob("[!.]*") if p.is_file() and READERS.keys() & set(p.suffixes)]
        near = get_close_matches(path.name, there, n=3, cutoff=0.4) or sorted(there)[:3]
        raise UserError(f"{key} = {str(path)!r}: no such file" + (f"; the folder has {', '.join(near)}" if near else ""))
    try:
        return reader(path)
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{key} = {str(path)!r}, line {line}: not UTF-8 text; save the file as UTF-8") from error
    except (ValueError, OSError, EOFError, RecursionError, csv.Error, zlib.error) as error:  # JSON, Unicode, Arrow: ValueErrors
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{key} = {str(path)!r}: cannot be read as {kind[0]}: {reason}") from error


def _text(path: Path) -> str:
    raw = path.read_bytes()
    # utf-8-sig: spreadsheets put a byte order mark before the first column name
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")


def _read_json(path: Path) -> list[dict[str, Any]]:
    """One list of rows, or rows one a line, whatever the file is called."""
    text = _text(path)
    if text.lstrip().startswith("["):
        rows = json.loads(text)
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("it is no list of objects")
        return list(rows)
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is no object with columns")
            rows.append(row)
    return rows


def _read_csv(path: Path) -> list[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)  # prompts are longer than the module's default of 128 KiB
    reader, rows = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True), []
    for row in reader:
        if None in row:
            raise ValueError(f"line {reader.line_num} has more cells than there are columns")
        rows.append(dict(row))
    return rows


def _read_parquet(path: Path) -> Any:
    import datasets
    import pyarrow.parquet

    return datasets.Dataset(pyarrow.parquet.read_table(path))


READERS: dict[str, Callable[[Path], Any]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def read_hub(name: str, config: str | None, split: str, key: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # network, authentication, missing split: all are the user's to fix
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{key} = {name!r} (split {split!r}): cannot be loaded from the hub: {reason}") from error
