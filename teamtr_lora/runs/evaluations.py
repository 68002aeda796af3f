"""An evaluation on disk: settings.json, episodes.jsonl (one line an answer, as they come), result.json when it is finished.

An evaluation is played in chunks of fixed items, and a chunk is written down when it is scored. After a kill the same command
drops what is behind the last whole chunk and goes on; as chunks are batched alike either way, a CPU ends with the same result.

The rows and the result are the evaluation's own: here they are JSON data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import disk_errors, dump_json, remove_temporaries, write_atomic
from teamtr_lora.common.locks import locked
from teamtr_lora.runs.layout import LOCK, MAX_METRICS_BYTES, append_synced, read_own, read_own_json, refuse_links

SETTINGS, ANSWERS, RESULT = "settings.json", "episodes.jsonl", "result.json"
_OWN_NAMES = (SETTINGS, ANSWERS, RESULT, LOCK)
Answer = TypeVar("Answer")
ParseAnswer = Callable[[dict[str, Any]], Answer]
"""Makes an answer out of its row; ValueError, KeyError or TypeError where the row is none."""


def evaluation_name(settings: Mapping[str, Any]) -> str:
    """Readable, and one for each different evaluation: nothing is ever overwritten by another one's."""
    digest = hashlib.sha256(dump_json(settings).encode()).hexdigest()[:8]
    size = f"{settings['items']}x{settings['k']}"
    return f"{settings['policy']['kind']}-{settings['split']}-{size}-t{settings['temperature']:g}-{digest}"


class EvaluationStore(Generic[Answer]):
    """The folder of one evaluation, to write it. `settings` is everything that decides its result."""

    def __init__(self, folder: Path, settings: dict[str, Any], parse: ParseAnswer[Answer]) -> None:
        self.folder, self.settings, self._parse = folder, settings, parse

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """While this process evaluates here; the lock goes with it, however it ends."""
        refuse_links(self.folder, _OWN_NAMES)
        busy = "another process is evaluating here; wait for it, or give --out"
        with locked(self.folder / LOCK, self.folder, busy):
            self._check_settings()
            remove_temporaries(self.folder)
            yield

    def _check_settings(self) -> None:
        stored, mine = _read_settings(self.folder), json.loads(dump_json(self.settings))
        if stored is None:
            if any(not entry.name.startswith(".") for entry in self.folder.iterdir()):
                raise UserError(f"{self.folder}: is not empty and holds no evaluation; choose another --out")
            write_atomic(self.folder / SETTINGS, dump_json(self.settings))
        elif stored != mine:
            names = [name for name in mine if stored.get(name) != mine[name]]
            raise UserError(
                f"{self.folder}: holds another evaluation ({', '.join(names) or 'settings'} differ); choose another --out"
            )

    @property
    def finished(self) -> bool:
        """Whether there is a result."""
        return (self.folder / RESULT).exists()

    def forget(self) -> None:
        """To start again from nothing."""
        with disk_errors(self.folder):
            (self.folder / RESULT).unlink(missing_ok=True)
            (self.folder / ANSWERS).unlink(missing_ok=True)

    def answers(self, chunk_sizes: Sequence[int]) -> list[list[Answer]]:
        """The chunks that are whole; what is written behind them is dropped."""
        path = self.folder / ANSWERS
        if not path.exists():
            return []
        read: list[Answer] = []
        ends: list[int] = [0]
        with disk_errors(path), open(path, "r+b") as file:
            for line in file:
                answer = _parsed(line, self._parse)
                if answer is None:
                    break
                read.append(answer)
                ends.append(ends[-1] + len(line))
            whole, start = [], 0
            for size in chunk_sizes:
                if start + size > len(read):
                    break
                whole.append(read[start : start + size])
                start += size
            file.truncate(ends[start])
        return whole

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """One row an answer, on the disk when this returns."""
        text = "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows)
        append_synced(self.folder / ANSWERS, text.encode())

    def finish(self, result: Mapping[str, Any]) -> None:
        """Writes the result, which says that the evaluation is complete."""
        write_atomic(self.folder / RESULT, dump_json(result))


def is_evaluation(folder: Path) -> bool:
    """Whether this is the folder of an evaluation."""
    return (folder / SETTINGS).is_file()


def read_evaluation(folder: Path, parse: ParseAnswer[Answer]) -> tuple[dict[str, Any], list[Answer]]:
    """Settings and answers of a finished evaluation."""
    refuse_links(folder, _OWN_NAMES)
    settings = _read_settings(folder) or {}
    if not (folder / RESULT).exists():
        raise UserError(f"{folder}: this evaluation is not finished; run the same eval command again")
    lines = (read_own(folder / ANSWERS, MAX_METRICS_BYTES) or b"").splitlines(keepends=True)
    answers = [answer for line in lines if (answer := _parsed(line, parse)) is not None]
    if len(answers) != len(lines) or len(answers) != settings.get("items", 0) * settings.get("k", 0):
        raise UserError(f"{folder}: its {ANSWERS} is damaged; run the same eval command again")
    return settings, answers


def _parsed(line: bytes, parse: ParseAnswer[Answer]) -> Answer | None:
    """The answer in a line; None if the line is incomplete or invalid."""
    if not line.endswith(b"\n"):
        return None
    try:
        return parse(json.loads(line))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _read_settings(folder: Path) -> dict[str, Any] | None:
    try:
        return read_own_json(folder / SETTINGS)
    except UserError as error:
        raise UserError(f"{error}; remove its folder") from error
