"""The adapter that is to take an agent's place: fresh, from a registry, from a PEFT folder or from the hub.

Whatever comes from outside is untrusted: its files are looked at in full before a tensor is built from them.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from teamtr_lora.base.adapter_files import MAX_JSON_BYTES
from teamtr_lora.base.source import HUB_ID
from teamtr_lora.base.versions import CONFIG, MANIFEST, VERSION_NAME, WEIGHTS, content_hash, read_adapter_folder
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.foreign_files import parse_json, read_regular
from teamtr_lora.common.settings import SAFE_NAME, nearest
from teamtr_lora.recipe import LoraSection
from teamtr_lora.registry.fit import refuse_pickles
from teamtr_lora.registry.hub_client import HubRepo
from teamtr_lora.registry.imports import read_folder, understand
from teamtr_lora.registry.manifest import OWN_HASH, AdapterManifest
from teamtr_lora.registry.reader import FILES, check_hashes, parse_adapter
from teamtr_lora.registry.registry_store import Registry

TOKENIZER = "tokenizer.json"
MAX_TOKENIZER_BYTES = 256 << 20
_FRESH_KEYS = ("rank", "targets", "alpha", "rslora", "dora")
_WORDS = {"rank": "a whole number", "alpha": "a number", "rslora": "true or false", "dora": "true or false"}


@dataclass(frozen=True)
class Incoming:
    """What is known of it before a base is there to put it on."""

    spec: str
    kind: str  # fresh, stored (a version of the team's own), registry, folder or hub
    fresh: Mapping[str, Any] = field(default_factory=dict)  # kind fresh: what the spec says
    contents: Mapping[str, bytes] | None = None  # the two files of any other kind, checked but for what needs the base
    manifest: AdapterManifest | None = None  # what a registry says of it
    tokenizer: bytes | None = None  # tokenizer.json that came with it
    from_outside: bool = False  # kind stored: it came in by import or a direct swap, trained elsewhere

    @property
    def base_name(self) -> str | None:
        """The base that its config names."""
        name = parse_json(self.contents[CONFIG], self.spec).get("base_model_name_or_path") if self.contents else None
        return str(name) if name else None

    @property
    def foreign(self) -> bool:
        """Whether it was trained elsewhere, so that it may have habits of its own."""
        return self.kind not in ("fresh", "stored") or self.from_outside


def find_incoming(spec: str, registry: Registry, own: Path) -> Incoming:
    """`fresh:...`, a version of the agent itself (`own` holds them), TEAM/AGENT[/VERSION] of the registry, a folder in PEFT's
    format, or a hub id user/name[@revision]."""
    if spec == "fresh" or spec.startswith("fresh:"):
        return Incoming(spec, "fresh", _parse_fresh(spec))
    if re.fullmatch(VERSION_NAME, spec):
        if not (own / spec).is_dir():
            there = ", ".join(sorted(folder.name for folder in own.iterdir() if re.fullmatch(VERSION_NAME, folder.name)))
            raise UserError(f"--with {spec}: the agent has no such version in {own}; it has {there}")
        found = _from_folder(spec, own / spec, "stored")
        if not spec.endswith(content_hash(*read_adapter_folder(own / spec))[:12]):
            raise UserError(f"--with {spec}: {own / spec} does not match its hash; the version was altered on disk")
        return found
    parts, teams = spec.split("/"), registry.teams()
    if len(parts) in (2, 3) and all(re.fullmatch(SAFE_NAME, part) for part in parts[:2]) and parts[0] in teams:
        return _from_registry(spec, registry, *parts)
    if os.path.isdir(spec):  # os.path's, as Path's raises for a name that no file system takes
        return _from_folder(spec, Path(spec), "folder")
    if "@" not in spec and parts[0] not in teams and (like := nearest(parts[0], teams)):
        raise UserError(
            f"--with {spec!r}: the team {parts[0]!r} is not in {registry.root}; did you mean {'/'.join([like, *parts[1:]])!r}? "
            "A hub id that is so like it is written with its revision: user/name@main"
        )
    name, _, revision = spec.partition("@")
    if HUB_ID.fullmatch(name) and not spec.startswith("."):
        return _from_hub(spec, name, revision or None, registry)
    raise UserError(
        f"--with {spec!r}: no folder of that name, no adapter of {registry.root} and no hub id; use fresh:rank=32, "
        "TEAM/AGENT[/VERSION], a folder with adapter_config.json, or user/name"
    )


def find_fresh(spec: str) -> dict[str, Any]:
    """Parses `fresh:...`; any other spec is an error."""
    if spec != "fresh" and not spec.startswith("fresh:"):
        raise UserError(f"--with {spec!r}: on another base adapters are fresh; write fresh:rank=32")
    return _parse_fresh(spec)


def fresh_lora(values: Mapping[str, Any], old: LoraSection) -> LoraSection:
    """Settings left out are copied from the old adapter.

    alpha is such that one step of an Adam-like optimizer moves the policy about as far as it moved the old adapter's: its steps
    are of one size in every entry, so their effect is alpha / rank (rslora: alpha / sqrt(rank)) times sqrt(rank).
    """
    rank, rslora = max(values.get("rank", old.rank), 1), values.get("rslora", old.rslora)
    effect = old.alpha if old.rslora else old.alpha / old.rank**0.5
    alpha = effect if rslora else effect * rank**0.5
    rank = values.get("rank", old.rank)
    try:
        return LoraSection(**{"targets": old.targets, "dora": old.dora, "alpha": alpha, **values, "rank": rank, "rslora": rslora})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"--with fresh: {first['loc'][0]} = {first['input']!r}: {first['msg']}") from error


def _parse_fresh(spec: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for part in filter(None, spec.partition(":")[2].split(",")):
        key, equals, text = (word.strip() for word in part.partition("="))
        if not equals or key not in _FRESH_KEYS or key in values:
            like = nearest(key, _FRESH_KEYS)
            fix = f"did you mean {like!r}?" if like and like != key else f"give each of {', '.join(_FRESH_KEYS)} at most once"
            raise UserError(f"--with {spec!r}: {part!r} is no key=value of a fresh adapter; {fix}")
        values[key] = _fresh_value(spec, key, text)
    return values


def _fresh_value(spec: str, key: str, text: str) -> Any:
    try:
        if key == "rank":
            return int(text)
        if key == "alpha":
            return float(text)
        if key != "targets":
            return {"true": True, "false": False}[text.lower()]
    except (ValueError, KeyError) as error:
        raise UserError(f"--with {spec!r}: {key} = {text!r} must be {_WORDS[key]}") from error
    if not text or "" in text.split("+"):
        raise UserError(f"--with {spec!r}: targets must be all-linear, or names joined by +, such as targets=q_proj+v_proj")
    return text if text == "all-linear" else text.split("+")


def _from_registry(spec: str, registry: Registry, team: str, agent: str, version: str | None = None) -> Incoming:
    version = version or registry.team(team).agents.get(agent)
    if version is None:
        raise UserError(f"--with {spec!r}: the team {team!r} of {registry.root} has no agent {agent!r}; name a VERSION too")
    contents = registry.contents(team, agent, version)
    understand(contents, spec)
    return Incoming(spec, "registry", contents=contents, manifest=registry.manifest(team, agent, version))


def _from_folder(spec: str, folder: Path, kind: str) -> Incoming:
    contents = read_folder(folder)
    understand(contents, str(folder))
    tokenizer = folder / TOKENIZER
    own = read_regular(tokenizer, MAX_TOKENIZER_BYTES, folder=folder) if tokenizer.is_file() else None
    return Incoming(spec, kind, contents=contents, tokenizer=own, manifest=_manifest(folder, contents))


def _manifest(folder: Path, contents: Mapping[str, bytes]) -> AdapterManifest | None:
    """The registry's manifest, if the adapter comes from one; it names the base that the adapter was made for."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    data = read_regular(path, MAX_JSON_BYTES, folder=folder)
    if OWN_HASH not in parse_json(data, str(path)):  # a run's own, or another program's
        return None
    manifest = parse_adapter(data, str(path))
    check_hashes(manifest, contents, str(folder))
    return manifest


def _from_hub(spec: str, name: str, revision: str | None, here: Registry) -> Incoming:
    repo = HubRepo(name, revision)
    nowhere = f"--with {spec!r}: no such folder here, nor such an adapter in the registry {here.root}"
    try:
        remote = repo.look()
    except UserError as error:  # a slip in a path is likelier than an id of the hub
        raise UserError(f"{nowhere}; looked for on the hub: {error}") from error
    if remote is None:
        raise UserError(f"{nowhere}, and no such repository on the hub")
    refuse_pickles([file for file in remote.files if "/" not in file], f"--with {spec!r}")
    limits = {WEIGHTS: FILES[WEIGHTS], CONFIG: FILES[CONFIG], TOKENIZER: MAX_TOKENIZER_BYTES, MANIFEST: MAX_JSON_BYTES}
    for file, limit in limits.items():
        if file not in remote.files and file in FILES:
            raise UserError(f"--with {spec!r}: the repository holds no {file}; for a whole team use `teamtr-lora pull`")
        if file in remote.files and not 0 <= remote.files[file].size <= limit:
            raise UserError(f"--with {spec!r}: {file} has {remote.files[file].size} bytes; at most {limit} can be right")
    with tempfile.TemporaryDirectory(prefix="teamtr-lora-") as folder:
        for file in limits.keys() & remote.files.keys():
            repo.fetch(file, remote, Path(folder))
        return _from_folder(spec, Path(folder), "hub")
