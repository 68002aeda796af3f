"""Writing files so that a reader never sees half of one: they are written beside, synced and renamed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from teamtr_lora.common.errors import UserError

TEMPORARY = ".tmp-"  # prefix of everything not yet renamed into place
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns a full disk (or quota) into one clear line; what was saved before stays as it was."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise UserError(
                f"{path}: no space left to write ({error.strerror}); everything saved before is intact: free some space, then "
                "run it again (train: with --resume)"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            fix = "choose another folder (train: --run-dir; eval: --out), or make this one writable"
            raise UserError(f"{path}: cannot write here ({error.strerror}); {fix}") from error
        if error.errno is None:  # raised by us: a folder that must not be replaced
            raise
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error


def write_synced(path: Path, data: bytes) -> None:
    """A new file with this data, on the disk when this returns. What was there is replaced; a link is never written through."""
    path.unlink(missing_ok=True)
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _written_beside(path: Path, data: bytes | str) -> Iterator[Path]:
    """Writes the data to a temporary file beside `path`, for the caller to put in place; removes it afterwards."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f"{TEMPORARY}{os.getpid()}-{path.name}"
        try:
            write_synced(temporary, data.encode() if isinstance(data, str) else data)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replaces `path` in one step."""
    with _written_beside(path, data) as temporary:
        os.replace(temporary, path)


def create_atomic(path: Path, data: bytes | str) -> None:
    """Creates file `path` in one step; an existing one is an error (FileExistsError), also one that appears meanwhile."""
    with _written_beside(path, data) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError as error:
            raise FileExistsError(path) from error


def write_folder_atomic(path: Path, contents: Mapping[str, bytes | Path]) -> None:
    """Creates folder `path` with all its files in one step; an existing `path` is an error (FileExistsError). A path among the
    contents is of a file that was written in this way and never changes: it is the same file again, and not written twice."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            for name, data in contents.items():
                if isinstance(data, bytes):
                    write_synced(temporary / name, data)
                else:
                    _link_or_copy(data, temporary / name)
            sync_folder(temporary)
            if path.exists():
                raise FileExistsError(path)
            os.rename(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync_folder(path.parent)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # not every file system has hard links
        write_synced(target, source.read_bytes())


def remove_temporaries(folder: Path, *, apart: str | None = None) -> None:
    """Removes what a killed process left half-written. `apart`: a folder below that another lock guards, which is left alone."""
    for leftover in folder.rglob(f"{TEMPORARY}*"):
        if apart is not None and leftover.is_relative_to(folder / apart):
            continue
        shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink(missing_ok=True)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def dump_json(value: Any) -> str:
    """JSON with sorted keys, for people to read. NaN and infinity, which JSON has not, are refused."""
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"
