"""`adapters verify`: every hash of the registry computed again, everything that does not fit named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from teamtr_lora.base.frozen_base import BaseFacts, base_facts
from teamtr_lora.base.source import present
from teamtr_lora.base.versions import MANIFEST, VERSION_NAME, version_number
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.settings import SAFE_NAME
from teamtr_lora.registry.fit import check_lora, open_contents, understand
from teamtr_lora.registry.identity import Identity, identify_folder, protocol_hash
from teamtr_lora.registry.manifest import AdapterManifest, TeamManifest, team_file
from teamtr_lora.registry.reader import FILES, TEAM_FILE, RegistryReader, check_belongs, entries

Adapters = dict[tuple[str, str], AdapterManifest]  # those without a fault, by agent and version
# What was found of each base, by source and revision; None where it is not on this machine.
Bases = dict[tuple[str, str | None], tuple[Identity, BaseFacts] | None]


@dataclass(frozen=True)
class Problem:
    where: str
    wrong: str

    def __str__(self) -> str:
        return f"{self.where}: {self.wrong}"


@dataclass
class Verified:
    """What was looked at, and what was found."""

    adapters: int = 0
    teams: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be checked here

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": not self.problems}

    def add(self, where: object, wrong: str) -> None:
        self.problems.append(Problem(str(where), wrong))

    @contextmanager
    def finding(self, where: object) -> Iterator[None]:
        """A refusal inside becomes a problem."""
        try:
            yield
        except UserError as error:
            text = " ".join(str(error).split())
            self.problems.append(Problem(str(where), text.removeprefix(f"{where}: ")))


def verify(registry: RegistryReader, team: str | None = None) -> Verified:
    """Checks one team or all: files against hashes, contents against names, teams against their adapters and bases."""
    found = Verified()
    if team is not None:
        if not registry.team_folder(team).is_dir():
            raise UserError(f"{registry.root}: no team {team!r} here")
        names = [team]
    else:
        names = registry.names(registry.root)
        for path in entries(registry.root):
            if path.name not in names and not path.name.startswith(".") and (path.is_dir() or path.is_symlink()):
                found.add(path, "not a team's folder")
    bases: Bases = {}
    for name in names:
        _verify_team(registry, name, found, bases)
    return found


def _verify_team(registry: RegistryReader, team: str, found: Verified, bases: Bases) -> None:
    folder = registry.team_folder(team)
    numbers = registry.numbers(team)  # before the adapters: one that is published meanwhile may name adapters not looked at
    adapters: Adapters = {}
    for path in entries(folder):
        if path.name.startswith("."):
            continue  # unfinished work of a process that was killed; the next one that publishes clears it
        match = TEAM_FILE.fullmatch(path.name)
        if path.is_dir() and not path.is_symlink() and re.fullmatch(SAFE_NAME, path.name):
            adapters |= _verify_agent(registry, team, path, found, bases)
        elif not match or path.name != team_file(int(match[1])) or int(match[1]) == 0:
            found.add(path, "does not belong in a team's folder")
    for number in numbers:
        found.teams += 1
        path = folder / team_file(number)
        with found.finding(path):
            manifest = registry.team(team, number)
            _verify_base(manifest, path, found, bases)
            _verify_members(registry, manifest, path, adapters, found)


def _verify_members(registry: RegistryReader, manifest: TeamManifest, path: Path, adapters: Adapters, found: Verified) -> None:
    for agent, version in manifest.agents.items():
        adapter = adapters.get((agent, version))
        if adapter is None:
            found.add(path, f"its {agent} {version} is missing or damaged")
        else:
            with found.finding(path):
                check_belongs(adapter, manifest, f"its {agent} {version}")
    with found.finding(path):
        recipe = manifest.load_recipe()
        if protocol_hash(recipe.team) != manifest.protocol_hash:
            found.add(path, "protocol_hash is not the hash of its recipe's protocol, router and roles")
        for member in recipe.team.agents:
            version = manifest.agents[member.name]
            if (member.name, version) in adapters:
                check_lora(registry.lora(manifest.team, member.name, version), member.lora, f"its {member.name} {version}")


def _verify_agent(registry: RegistryReader, team: str, folder: Path, found: Verified, bases: Bases) -> Adapters:
    good: Adapters = {}
    numbers: dict[int, str] = {}
    for path in entries(folder):
        if path.name.startswith("."):
            continue
        if path.is_symlink() or not path.is_dir() or not re.fullmatch(VERSION_NAME, path.name):
            found.add(path, "does not belong in an agent's folder")
            continue
        found.adapters += 1
        if (number := version_number(path.name)) in numbers:
            found.add(path, f"has the number of {numbers[number]}")
        numbers.setdefault(version_number(path.name), path.name)
        for extra in entries(path):
            if extra.name not in FILES and extra.name != MANIFEST:
                found.add(extra, "is not in the manifest")
        with found.finding(path):
            manifest = registry.manifest(team, folder.name, path.name)
            contents = registry.contents(team, folder.name, path.name)
            open_contents(contents, str(path), manifest.content_hash)
            good[folder.name, path.name] = manifest
            if base := _verify_base(manifest, path, found, bases):
                understand(contents, str(path), base[1])
    return good


def _verify_base(
    manifest: AdapterManifest | TeamManifest, path: Path, found: Verified, bases: Bases
) -> tuple[Identity, BaseFacts] | None:
    """Against the base itself, where it is on this machine."""
    key = (manifest.base.source, manifest.base.revision)
    if key not in bases:
        folder = present(*key)
        bases[key] = (identify_folder(folder, *key), base_facts(folder)) if folder else None
        if folder is None:
            found.notes.append(f"the base {manifest.base.source!r} is not on this machine: its hashes were not computed again")
    here = bases[key]
    if here and here[0].base.weights_hash != manifest.base.weights_hash:
        found.add(path, f"the weights of {manifest.base.source!r} are not those it was made for")
    if here and here[0].tokenizer_hash != manifest.tokenizer_hash:
        found.add(path, f"the tokenizer of {manifest.base.source!r} is not the one it was made with")
    return here
