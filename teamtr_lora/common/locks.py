"""Locks between processes. The system releases them with the process that holds them, however that process ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import disk_errors


def acquire(path: Path, where: Path, busy: str | None = None) -> FileLock:
    """Takes the lock in file `path`, to be given back with `release()`.

    `busy` is what the error says of `where` when another process holds the lock; with None this process waits for its turn.
    """
    with disk_errors(where):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Create the file first: where it cannot be created, filelock would think the lock is taken and wait forever.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o666))
        # `held` may have it for an instant, which is no reason to give up
        lock = FileLock(path, timeout=-1 if busy is None else 0.3)
        try:
            lock.acquire()
        except Timeout as error:
            raise UserError(f"{where}: {busy}") from error
    return lock


def held(path: Path) -> bool:
    """Whether some process holds the lock in this file, without taking it from anybody who wants it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def locked(path: Path, where: Path, busy: str | None = None) -> Iterator[None]:
    """`acquire` for the length of a `with` block."""
    lock = acquire(path, where, busy)
    try:
        yield
    finally:
        lock.release()
