"""Locks between processes: they go with the process that holds them, however it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import disk_errors


@contextmanager
def locked(path: Path, where: Path, busy: str | None = None) -> Iterator[None]:
    """`busy`: what is said of `where` when another process holds the lock; None waits for it."""
    with disk_errors(where):
        path.parent.mkdir(parents=True, exist_ok=True)
        # filelock takes a place where no file can be made for one that somebody holds, and waits
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0), 0o666))
        lock = FileLock(path, timeout=-1 if busy is None else 0)
        try:
            lock.acquire()
        except Timeout as error:
            raise UserError(f"{where}: {busy}") from error
    try:
        yield
    finally:
        lock.release()
