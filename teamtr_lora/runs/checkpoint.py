"""Checkpoints: after every update, atomic, hash-checked. A killed run loses at most one update.

    checkpoint/step-000012/state.json                 where the run is, and everything that is no tensor
                          /tensors.safetensors        generator states
                          /moments-AGENT.safetensors  of that agent's optimizer
                          /manifest.json              sha256 of them all
Adapter weights are not copied here: they are the immutable versions in adapters/, named by content hash in the state. Moments are
twice as large, and an update changes those of one agent: the others' files are hard links to the last checkpoint's.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json, sha256, write_folder_atomic
from teamtr_lora.runs.run_state import FORMAT, MANIFEST, STATE, TENSORS, CheckpointReader, RunState, moments_file

Optimizers = dict[str, tuple[dict[str, Tensor], dict[str, Any]]]  # by agent: tensors and scalars

KEPT = 2  # a second one, so that a damaged newest checkpoint costs one update and not the run


class _Written(NamedTuple):
    """One agent's moments as the last checkpoint has them."""

    tensors: dict[str, Tensor]
    path: Path
    digest: str


class CheckpointStore(CheckpointReader):
    """Writes checkpoints, and reads all of the newest one."""

    def __init__(self, run: Path) -> None:
        super().__init__(run)
        self._written: dict[str, _Written] = {}

    def save(self, state: RunState, optimizers: Optimizers) -> None:
        self.prepared(state, optimizers)()

    def prepared(self, state: RunState, optimizers: Optimizers) -> Callable[[], None]:
        """A function that writes the checkpoint of now, whenever it is called. `optimizers`: each agent's moments, which nobody
        changes, and its scalars; the same dictionary of moments as last time is not written again. Of the older checkpoints all
        but the last are removed."""
        moments = {agent: tensors for agent, (tensors, _) in optimizers.items() if tensors}
        body = {
            "format": FORMAT,
            "state": state.stored(),
            "optimizers": {agent: scalars for agent, (_, scalars) in optimizers.items()},
            "moments": sorted(moments),
            "python_random": _to_lists(random.getstate()),
        }
        return partial(self._write, f"step-{state.step:06d}", dump_json(body).encode(), _generator_tensors(), moments)

    def _write(self, name: str, body: bytes, generators: dict[str, Tensor], moments: dict[str, dict[str, Tensor]]) -> None:
        folder = self._folder / name
        if folder.exists():  # left by a kill between rename and what follows; the same step is written again
            shutil.rmtree(folder)
        contents: dict[str, bytes | Path] = {STATE: body, TENSORS: save_safetensors(generators)}
        hashes = {file: sha256(data) for file, data in contents.items() if isinstance(data, bytes)}
        written = {}
        for agent, tensors in moments.items():
            file, last = moments_file(agent), self._written.get(agent)
            if last is not None and last.tensors is tensors and last.path.exists():
                contents[file], hashes[file] = last.path, last.digest
            else:
                contents[file] = data = save_safetensors(tensors)
                hashes[file] = sha256(data)
            written[agent] = _Written(tensors, folder / file, hashes[file])
        contents[MANIFEST] = dump_json(hashes).encode()
        write_folder_atomic(folder, contents)
        self._written = written
        for old in self.steps()[:-KEPT]:
            shutil.rmtree(old)

    def load(self) -> tuple[RunState, Optimizers]:
        """The newest checkpoint, checked; also puts the random generators back."""
        state, body, contents = self._read(whole=True)
        with self.understood():
            moments = {agent: load_safetensors(contents[moments_file(agent)]) for agent in body["moments"]}
            optimizers = {agent: (moments.get(agent, {}), scalars) for agent, scalars in body["optimizers"].items()}
            _restore_generators(load_safetensors(contents[TENSORS]), body["python_random"])
        return state, optimizers

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Around what puts the newest checkpoint back: hashes that fit do not say that a stranger's contents make sense."""
        try:
            yield
        except (UserError, torch.OutOfMemoryError):
            raise
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, SafetensorError) as error:
            raise UserError(f"{self.steps()[-1]}: the checkpoint is damaged ({type(error).__name__}: {error})") from error


def _generator_tensors() -> dict[str, Tensor]:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    tensors = {
        "random/torch": torch.get_rng_state(),
        "random/numpy_keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "random/numpy_rest": torch.tensor([float(position), float(has_gauss), float(gauss)], dtype=torch.float64),
    }
    for device in range(torch.cuda.device_count()):
        tensors[f"random/cuda{device}"] = torch.cuda.get_rng_state(device)
    return tensors


def _restore_generators(tensors: dict[str, Tensor], python_random: list[Any]) -> None:
    torch.set_rng_state(tensors["random/torch"])
    position, has_gauss, gauss = tensors["random/numpy_rest"].tolist()
    np.random.set_state(("MT19937", tensors["random/numpy_keys"].numpy().astype(np.uint32), int(position), int(has_gauss), gauss))
    version, state, gauss_next = python_random
    random.setstate((version, tuple(state), gauss_next))
    for device in range(torch.cuda.device_count()):
        if f"random/cuda{device}" in tensors:
            torch.cuda.set_rng_state(tensors[f"random/cuda{device}"], device)


def _to_lists(value: Any) -> Any:
    return [_to_lists(v) for v in value] if isinstance(value, tuple) else value
