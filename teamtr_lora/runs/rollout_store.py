"""Episodes that later updates learn from again: rollouts/NAME.json, for a run that is resumed in between.

A checkpoint names the files that it needs, with their hashes. A file is written before the checkpoint that names it, and removed
when no checkpoint does.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import sha256, write_atomic
from teamtr_lora.runs.layout import read_own
from teamtr_lora.team import Episode

MAX_ROLLOUT_BYTES = 4 << 30
_EPISODES = TypeAdapter(list[Episode])


class RolloutStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, episodes: list[Episode]) -> str:
        """Returns the hash to read it by. Items are left out: nobody plays these episodes again."""
        # training waits for this: json would take seven times as long
        data = to_json([replace(episode, item=None) for episode in episodes])
        write_atomic(self._folder / f"{name}.json", data)
        return sha256(data)

    def read(self, name: str, digest: str) -> list[Episode]:
        path = self._folder / f"{name}.json"
        data = read_own(path, MAX_ROLLOUT_BYTES)
        if data is None or sha256(data) != digest:
            wrong = "missing" if data is None else "damaged: it does not match its hash"
            raise UserError(f"{path}: {wrong}; start again with another --run-dir")
        try:
            return _EPISODES.validate_json(data, strict=True)
        except ValidationError as error:
            raise UserError(f"{path}: these are no episodes ({error.errors()[0]['msg']})") from error

    def keep_only(self, names: Collection[str]) -> None:
        """Removes what no checkpoint names any more."""
        for path in self._folder.glob("*.json"):
            if path.stem not in names:
                path.unlink()
