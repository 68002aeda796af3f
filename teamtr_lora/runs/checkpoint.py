"""Checkpoints: after every update, atomic, hash-checked. A killed run loses at most one update.

    checkpoint/step-000012/state.json          where the run is, and everything that is no tensor
                          /tensors.safetensors  optimizer moments and generator states
                          /manifest.json        sha256 of both
Adapter weights are not copied here: they are the immutable versions in adapters/, named by content hash in the state.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json, sha256, write_folder_atomic
from teamtr_lora.runs.run_state import FORMAT, MANIFEST, STATE, TENSORS, CheckpointReader, RunState

Optimizers = dict[str, tuple[dict[str, Tensor], dict[str, Any]]]  # by agent: tensors and scalars

KEPT = 2  # a second one, so that a damaged newest checkpoint costs one update and not the run


class CheckpointStore(CheckpointReader):
    """Writes checkpoints, and reads all of the newest one."""

    def save(self, state: RunState, optimizers: Optimizers) -> None:
        self.prepared(state, optimizers)()

    def prepared(self, state: RunState, optimizers: Optimizers) -> Callable[[], None]:
        """A function that writes the checkpoint of now, whenever it is called. `optimizers`: each agent's moments, which nobody
        changes, and its scalars. Of the older checkpoints all but the last are removed."""
        tensors = {f"optimizer/{agent}/{name}": t for agent, (parts, _) in optimizers.items() for name, t in parts.items()}
        tensors |= _generator_tensors()
        body = {
            "format": FORMAT,
            "state": state.stored(),
            "optimizers": {agent: scalars for agent, (_, scalars) in optimizers.items()},
            "python_random": _to_lists(random.getstate()),
        }
        return partial(self._write, f"step-{state.step:06d}", dump_json(body).encode(), tensors)

    def _write(self, name: str, body: bytes, tensors: dict[str, Tensor]) -> None:
        contents = {STATE: body, TENSORS: save_safetensors(tensors)}
        contents[MANIFEST] = dump_json({name: sha256(data) for name, data in contents.items()}).encode()
        folder = self._folder / name
        if folder.exists():  # left by a kill between rename and what follows; the same step is written again
            shutil.rmtree(folder)
        write_folder_atomic(folder, contents)
        for old in self.steps()[:-KEPT]:
            shutil.rmtree(old)

    def load(self) -> tuple[RunState, Optimizers]:
        """The newest checkpoint, checked; also puts the random generators back."""
        state, body, contents = self._read(STATE, TENSORS)
        with self.understood():
            tensors = load_safetensors(contents[TENSORS])
            _restore_generators(tensors, body["python_random"])
            optimizers = {
                agent: (tensors_under(tensors, f"optimizer/{agent}/"), scalars) for agent, scalars in body["optimizers"].items()
            }
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


def tensors_under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names begin with `prefix`, by what follows it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


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
