"""Checkpoints: after every update, atomic, hash-checked. A killed run loses at most the update it was in.

    checkpoint/step-000012/state.json          where the run is, and everything that is no tensor
                          /tensors.safetensors  optimizer moments and generator states
                          /manifest.json        sha256 of both
Adapter weights are not copied here: they are the immutable versions in adapters/, named by content hash in the state.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json, sha256, write_folder_atomic

FORMAT = 1
KEPT = 2  # a second one, so that a damaged newest checkpoint costs one update and not the run
COUNTS = ("updates", "accepted", "shrunk", "rejected", "skipped", "out_of_region_accepted")
STATE, TENSORS, MANIFEST = "state.json", "tensors.safetensors", "manifest.json"


@dataclass
class RunState:
    """Where a run is. `stage` and `update` count what is complete; a stage in progress has 0 < update < n or waits for its
    evaluation (update == n)."""

    step: int = 0  # checkpoints written
    stage: int = 0  # stages complete
    update: int = 0  # updates complete in the stage in progress
    cursor: int = 0  # training items taken by complete stages
    versions: dict[str, dict[str, Any]] = field(default_factory=dict)
    rollout_versions: dict[str, dict[str, Any]] = field(default_factory=dict)  # that sampled the episodes in use
    stage_versions: dict[str, dict[str, Any]] = field(default_factory=dict)  # that began the stage in progress
    probing: bool = False  # the stage in progress is probed
    probe_seconds: float = 0.0
    betas: dict[str, float] = field(default_factory=dict)
    radii: dict[str, float] = field(default_factory=dict)  # of the stage in progress
    slopes: dict[str, float | None] = field(default_factory=dict)  # what gain_weighted radii go by
    loss_scaler: dict[str, float] = field(default_factory=dict)  # empty where no half precision needs one
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    sampled_tokens: int = 0
    seconds: float = 0.0
    metrics_bytes: int = 0
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    episodes_evaluated: int = 0
    started: bool = False  # stage 0 (floors and the evaluation before training) is done
    loras: dict[str, dict[str, Any]] = field(default_factory=dict)  # of agents that were swapped: what the recipe says is older
    swaps: list[dict[str, Any]] = field(default_factory=list)  # lineage: every replacement and undo, oldest first

    def adapter_versions(self) -> dict[str, AdapterVersion]:
        return {agent: AdapterVersion(agent, v["number"], v["content_hash"]) for agent, v in self.versions.items()}


def as_state(bank: AdapterBank) -> dict[str, dict[str, Any]]:
    """The current versions of all agents, as a state keeps them."""
    return {a: {"number": bank.version(a).number, "content_hash": bank.version(a).content_hash} for a in bank.agents}


class CheckpointStore:
    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "checkpoint"

    def exists(self) -> bool:
        return bool(self._steps())

    def save(self, state: RunState, optimizers: dict[str, tuple[dict[str, Tensor], dict[str, Any]]]) -> None:
        tensors = {f"optimizer/{agent}/{name}": t for agent, (parts, _) in optimizers.items() for name, t in parts.items()}
        tensors |= _generator_tensors()
        body = {
            "format": FORMAT,
            "state": asdict(state),
            "optimizers": {agent: scalars for agent, (_, scalars) in optimizers.items()},
            "python_random": _to_lists(random.getstate()),
        }
        contents = {STATE: dump_json(body).encode(), TENSORS: save_safetensors(tensors)}
        contents[MANIFEST] = dump_json({name: sha256(data) for name, data in contents.items()}).encode()
        folder = self._folder / f"step-{state.step:06d}"
        if folder.exists():  # left by a kill between rename and what follows; the same step is written again
            shutil.rmtree(folder)
        write_folder_atomic(folder, contents)
        for old in self._steps()[:-KEPT]:
            shutil.rmtree(old)

    def state(self) -> RunState:
        """Where the newest checkpoint is, without its tensors."""
        return RunState(**self._body(self._read_checked(self._steps()[-1], STATE))["state"])

    def load(self) -> tuple[RunState, dict[str, tuple[dict[str, Tensor], dict[str, Any]]]]:
        """The newest checkpoint, checked; also puts the random generators back."""
        contents = self._read_checked(self._steps()[-1], STATE, TENSORS)
        body = self._body(contents)
        tensors = load_safetensors(contents[TENSORS])
        _restore_generators(tensors, body["python_random"])
        optimizers = {agent: (_under(tensors, f"optimizer/{agent}/"), scalars) for agent, scalars in body["optimizers"].items()}
        return RunState(**body["state"]), optimizers

    def _body(self, contents: dict[str, bytes]) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(contents[STATE])
        if body.get("format") != FORMAT:
            raise UserError(
                f"{self._steps()[-1]}: written by another version of teamtr-lora (format {body.get('format')}, this one reads "
                f"{FORMAT})"
            )
        return body

    def _read_checked(self, folder: Path, *names: str) -> dict[str, bytes]:
        older = [p.name for p in self._steps() if p != folder]
        fix = f"remove that folder to go on from {older[-1]}" if older else "start again with another --run-dir"
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
            contents = {name: (folder / name).read_bytes() for name in names}
            wrong = [name for name, data in contents.items() if sha256(data) != manifest[name]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder}: the checkpoint is damaged ({type(error).__name__}: {error}); {fix}") from error
        if wrong:
            raise UserError(f"{folder}: the checkpoint is damaged ({wrong[0]} does not match its hash); {fix}")
        return contents

    def _steps(self) -> list[Path]:
        return sorted(self._folder.glob("step-*")) if self._folder.is_dir() else []


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
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
