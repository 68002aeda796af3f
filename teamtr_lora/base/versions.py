"""Adapter versions: immutable `(agent, number, content hash)`, one folder each, safetensors only."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from teamtr_lora.base.adapter_files import MAX_JSON_BYTES, MAX_WEIGHT_BYTES, parse_json, read_regular
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json, write_folder_atomic

WEIGHTS, CONFIG, MANIFEST = "adapter_model.safetensors", "adapter_config.json", "manifest.json"


@dataclass(frozen=True)
class AdapterVersion:
    agent: str
    number: int
    content_hash: str

    @property
    def name(self) -> str:
        """Unique for its content, so a server that keys caches by name can never serve an old one."""
        return f"v{self.number:04d}-{self.content_hash[:12]}"


def content_hash(tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    """Over names, shapes, types, bytes and what scales them: equal hashes mean equal policies on one base."""
    digest = hashlib.sha256()
    scaling = {key: config.get(key) for key in ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")}
    digest.update(json.dumps(scaling, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def version_folder(root: Path, version: AdapterVersion) -> Path:
    return root / version.agent / version.name


def write_version(root: Path, version: AdapterVersion, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """Publishes a version folder that plain PEFT can load. The same version written again is left as it is."""
    folder = version_folder(root, version)
    if content_hash(tensors, config) != version.content_hash:
        raise RuntimeError(f"{version.agent} {version.name}: these tensors are not that version's")
    contents = {
        WEIGHTS: save_safetensors({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, metadata={"format": "pt"}),
        CONFIG: dump_json(config).encode(),
        MANIFEST: dump_json({"agent": version.agent, "number": version.number, "content_hash": version.content_hash}).encode(),
    }
    try:
        write_folder_atomic(folder, contents)
    except FileExistsError:
        read_version(root, version)  # raises when what is there is not this version
    return folder


def read_version(root: Path, version: AdapterVersion) -> dict[str, Tensor]:
    """The tensors of a version, checked against its content hash."""
    folder = version_folder(root, version)
    tensors, config = read_adapter_folder(folder)
    if content_hash(tensors, config) != version.content_hash:
        raise UserError(f"{folder}: content does not match its hash {version.content_hash[:12]}; the version was altered on disk")
    return tensors


def read_adapter_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        weights = read_regular(folder / WEIGHTS, MAX_WEIGHT_BYTES, folder=folder)
        config = parse_json(read_regular(folder / CONFIG, MAX_JSON_BYTES, folder=folder), f"{folder / CONFIG}")
    except FileNotFoundError as error:
        raise UserError(f"{folder}: not an adapter version: {Path(str(error.filename)).name} is missing") from error
    try:
        return load_safetensors(weights), config
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{folder}: the adapter is damaged ({error})") from error
