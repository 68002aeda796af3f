"""An evaluation on disk: settings.json, episodes.jsonl (a line an answer, as they come), result.json when it is finished.

An evaluation is played in chunks of fixed items, and a chunk is written down when it is scored. After a kill the same command
drops what is behind the last whole chunk and goes on; as chunks are batched alike either way, a CPU ends with the same result.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.evaluation.outcome import Attempt, Outcome
from teamtr_lora.evaluation.result import EvaluationResult, make_result
from teamtr_lora.common.files import disk_errors, dump_json, remove_temporaries, write_atomic
from teamtr_lora.registry.locks import locked
from teamtr_lora.runs.transcripts import episode_record

SETTINGS, EPISODES, RESULT = "settings.json", "episodes.jsonl", "result.json"


def evaluation_name(settings: dict[str, Any]) -> str:
    """Readable, and one for each different evaluation: nothing is ever overwritten by another one's."""
    digest = hashlib.sha256(dump_json(settings).encode()).hexdigest()[:8]
    size = f"{settings['items']}x{settings['k']}"
    return f"{settings['policy']['kind']}-{settings['split']}-{size}-t{settings['temperature']:g}-{digest}"


class EvaluationStore:
    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, settings

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """While this process evaluates here; the lock goes with it, however it ends."""
        busy = "another process is evaluating here; wait for it, or give --out"
        with locked(self.folder / ".lock", self.folder, busy):
            self._check_settings()
            remove_temporaries(self.folder)
            yield

    def _check_settings(self) -> None:
        path = self.folder / SETTINGS
        if not path.exists():
            if any(not entry.name.startswith(".") for entry in self.folder.iterdir()):
                raise UserError(f"{self.folder}: is not empty and holds no evaluation; choose another --out")
            write_atomic(path, dump_json(self.settings))
            return
        stored = _read_json(path)
        if stored != json.loads(dump_json(self.settings)):
            names = [name for name in self.settings if stored.get(name) != json.loads(dump_json(self.settings[name]))]
            raise UserError(
                f"{self.folder}: holds another evaluation ({', '.join(names) or 'settings'} differ); choose another --out"
            )

    @property
    def finished(self) -> bool:
        return (self.folder / RESULT).exists()

    def forget(self) -> None:
        """To start again from nothing."""
        with disk_errors(self.folder):
            (self.folder / RESULT).unlink(missing_ok=True)
            (self.folder / EPISODES).unlink(missing_ok=True)

    def outcomes(self, chunk_sizes: Sequence[int]) -> list[list[Outcome]]:
        """The chunks that are whole; what is written behind them is dropped."""
        path = self.folder / EPISODES
        if not path.exists():
            return []
        read: list[Outcome] = []
        ends: list[int] = [0]
        with disk_errors(path), open(path, "r+b") as file:
            for line in file:
                outcome = _outcome(line, self.settings)
                if outcome is None:
                    break
                read.append(outcome)
                ends.append(ends[-1] + len(line))
            whole, start = [], 0
            for size in chunk_sizes:
                if start + size > len(read):
                    break
                whole.append(read[start : start + size])
                start += size
            file.truncate(ends[start])
        return whole

    def append(self, attempts: Sequence[Attempt], outcomes: Sequence[Outcome]) -> None:
        rows = [{**episode_record(a.episode), **o.as_dict()} for a, o in zip(attempts, outcomes, strict=True)]
        text = "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows)
        with disk_errors(self.folder / EPISODES), open(self.folder / EPISODES, "ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def finish(self, result: EvaluationResult) -> None:
        write_atomic(self.folder / RESULT, dump_json(result.as_dict()))


def is_evaluation(folder: Path) -> bool:
    return (folder / SETTINGS).is_file()


def read_evaluation(folder: Path) -> EvaluationResult:
    """A finished one, from its episodes."""
    settings = _read_json(folder / SETTINGS)
    if not (folder / RESULT).exists():
        raise UserError(f"{folder}: this evaluation is not finished; run the same eval command again")
    try:
        with open(folder / EPISODES, "rb") as file:
            outcomes = [_outcome(line) for line in file]
    except OSError as error:
        raise UserError(f"{folder}: its {EPISODES} cannot be read ({error.strerror})") from error
    known = [outcome for outcome in outcomes if outcome is not None]
    if len(known) != len(outcomes) or len(known) != settings.get("items", 0) * settings.get("k", 0):
        raise UserError(f"{folder}: its {EPISODES} is damaged; run the same eval command again")
    return make_result(known, settings, str(folder))


def _outcome(line: bytes) -> Outcome | None:
    """None for what a kill or another program left."""
    if not line.endswith(b"\n"):
        return None
    try:
        return Outcome.from_dict(json.loads(line))
    except (ValueError, KeyError, TypeError):
        return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: is damaged ({error}); remove its folder") from error
    return data if isinstance(data, dict) else {}
