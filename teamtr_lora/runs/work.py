"""Work in progress on disk: what is finished of a swap or a rebase, so that the same command goes on where it was killed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from teamtr_lora.base.adapter_files import MAX_WEIGHT_BYTES
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json, remove_temporaries, write_atomic, write_folder_atomic
from teamtr_lora.runs.layout import read_own
from teamtr_lora.runs.run_state import TENSORS

REQUEST, PROGRESS = "request.json", "progress.json"


class Work:
    """A folder of parts, each written in one step. It belongs to one request: for another it starts empty."""

    def __init__(self, folder: Path) -> None:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise UserError(f"{folder}: is where work in progress is kept, but is no folder; remove it")
        self.folder = folder

    def request(self) -> dict[str, Any] | None:
        found = self.get(REQUEST.removesuffix(".json"))
        return found if isinstance(found, dict) else None

    def begin(self, request: dict[str, Any]) -> None:
        if self.request() != request:
            self.clear()
            self.put(REQUEST.removesuffix(".json"), request)
        remove_temporaries(self.folder)

    def get(self, part: str) -> Any:
        """The stored part; None if it is unfinished or cannot be read."""
        try:
            return json.loads(read_own(self.folder / f"{part}.json") or "null")
        except (OSError, ValueError):
            return None

    def put(self, part: str, value: Any) -> None:
        write_atomic(self.folder / f"{part}.json", dump_json(value))

    def get_tensors(self, part: str) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The newest step of a part that is written again and again."""
        for folder in reversed(self._steps(part)):
            try:
                state = json.loads(read_own(folder / PROGRESS) or "")
                return state, load_safetensors(read_own(folder / TENSORS, MAX_WEIGHT_BYTES) or b"")
            except (OSError, ValueError, SafetensorError):
                continue
        return None

    def put_tensors(self, part: str, step: int, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        folder = self.folder / f"{part}-{step:08d}"
        if folder.exists():
            shutil.rmtree(folder)
        data = save_safetensors({name: tensor.contiguous() for name, tensor in tensors.items()})
        write_folder_atomic(folder, {PROGRESS: dump_json(state).encode(), TENSORS: data})
        for old in self._steps(part)[:-1]:
            shutil.rmtree(old)

    def clear(self) -> None:
        if self.folder.exists():  # the request goes first, so that what a kill leaves is not taken for finished parts
            (self.folder / REQUEST).unlink(missing_ok=True)
            shutil.rmtree(self.folder)

    def _steps(self, part: str) -> list[Path]:
        return sorted(self.folder.glob(f"{part}-[0-9]*")) if self.folder.is_dir() else []
