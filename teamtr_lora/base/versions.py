"""Adapter versions: immutable `(agent, number, content hash)`, one folder each, safetensors only.

What a version is called and how it is written down needs no torch; torch is imported only where tensors are read or written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from teamtr_lora.base.adapter_files import MAX_JSON_BYTES, MAX_WEIGHT_BYTES
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json, sha256, write_folder_atomic
from teamtr_lora.common.foreign_files import parse_json, read_regular

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS, CONFIG, MANIFEST = "adapter_model.safetensors", "adapter_config.json", "manifest.json"
VERSION_NAME = r"^v[0-9]{4,9}-[0-9a-f]{12}$"
MAX_NUMBER = 999_999_999


@dataclass(frozen=True)
class AdapterVersion:
    """One immutable state of an agent's adapter: the agent, a number that grows with every update, and the sha256 of what the
    adapter holds."""

    agent: str
    number: int
    content_hash: str

    @property
    def name(self) -> str:
        """Unique for its content, so a server that keys caches by name can never serve an old one."""
        return f"v{self.number:04d}-{self.content_hash[:12]}"

    def stored(self) -> dict[str, Any]:
        """The version as every JSON file of ours has it, under the agent's name; `from_stored` reads it."""
        return {"number": self.number, "content_hash": self.content_hash, "version": self.name}

    @classmethod
    def from_stored(cls, agent: str, data: Mapping[str, Any]) -> Self:
        """The version out of its stored form. ValueError where it cannot be one: its name becomes the name of a folder."""
        number, digest = data["number"], data["content_hash"]
        if type(number) is not int or not 0 <= number <= MAX_NUMBER:
            raise ValueError(f"{agent} has no proper version number")
        if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"{agent} has no proper content_hash")
        version = cls(agent, number, digest)
        if data["version"] != version.name:
            raise ValueError(f"{agent} is called by another name than its number and content_hash give")
        return version


def stored_versions(versions: Mapping[str, AdapterVersion]) -> dict[str, dict[str, Any]]:
    """The versions of a team as JSON data, by agent."""
    return {agent: version.stored() for agent, version in versions.items()}


def versions_from(stored: Mapping[str, Mapping[str, Any]]) -> dict[str, AdapterVersion]:
    """What `stored_versions` made, with the checks of `AdapterVersion.from_stored`."""
    return {agent: AdapterVersion.from_stored(agent, data) for agent, data in stored.items()}


def version_names(versions: Mapping[str, AdapterVersion]) -> dict[str, str]:
    """What each agent's version is called."""
    return {agent: version.name for agent, version in versions.items()}


def version_number(name: str) -> int:
    """The number in a version's name."""
    return int(name[1:].partition("-")[0])


def content_hash(tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    """Over names, shapes, types, bytes and what scales them: equal hashes mean equal policies on one base."""
    import torch

    digest = hashlib.sha256()
    scaling = {key: config.get(key) for key in ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")}
    digest.update(json.dumps(scaling, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def version_folder(root: Path, version: AdapterVersion) -> Path:
    return root / version.agent / version.name


def write_version(root: Path, version: AdapterVersion, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """Publishes a version folder that plain PEFT can load. The same version written again is left as it is."""
    from safetensors.torch import save as save_safetensors

    folder = version_folder(root, version)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}  # from a GPU once
    if content_hash(tensors, config) != version.content_hash:
        raise RuntimeError(f"{version.agent} {version.name}: these tensors are not that version's")
    contents = {WEIGHTS: save_safetensors(tensors, metadata={"format": "pt"}), CONFIG: dump_json(config).encode()}
    contents[MANIFEST] = _manifest(version, contents[CONFIG])
    try:
        write_folder_atomic(folder, contents)
    except FileExistsError:
        read_version(root, version)  # raises when what is there is not this version
    return folder


def _manifest(version: AdapterVersion, config: bytes) -> bytes:
    """The content hash leaves out what changes no policy here, such as the names of modules. PEFT goes by them: their file has a
    hash of its own."""
    return dump_json({"agent": version.agent, **version.stored(), "config_sha256": sha256(config)}).encode()


def verify_version(folder: Path) -> AdapterVersion:
    """The version in a folder of `write_version`, every byte checked against its hashes and the folder's name."""
    agent, number = folder.parent.name, version_number(folder.name)
    version = AdapterVersion(agent, number, content_hash(*read_adapter_folder(folder)))
    try:
        config, manifest = (read_regular(folder / name, MAX_JSON_BYTES) for name in (CONFIG, MANIFEST))
    except FileNotFoundError as error:
        raise UserError(f"{folder}: {MANIFEST} is missing") from error
    if version.name != folder.name or manifest != _manifest(version, config):
        raise UserError(f"{folder}: content does not match its hash; it was altered")
    return version


def read_version(root: Path, version: AdapterVersion) -> dict[str, Tensor]:
    """The tensors of a version, checked against its content hash."""
    folder = version_folder(root, version)
    tensors, config = read_adapter_folder(folder)
    if content_hash(tensors, config) != version.content_hash:
        raise UserError(f"{folder}: content does not match its hash {version.content_hash[:12]}; the version was altered on disk")
    return tensors


def read_adapter_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of an adapter in PEFT's format, whatever their hash is."""
    from safetensors import SafetensorError
    from safetensors.torch import load as load_safetensors

    try:
        weights = read_regular(folder / WEIGHTS, MAX_WEIGHT_BYTES, folder=folder)
        config = parse_json(read_regular(folder / CONFIG, MAX_JSON_BYTES, folder=folder), f"{folder / CONFIG}")
    except FileNotFoundError as error:
        raise UserError(f"{folder}: not an adapter version: {Path(str(error.filename)).name} is missing") from error
    try:
        return load_safetensors(weights), config
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{folder}: the adapter is damaged ({error})") from error
