"""`adapters verify`: every hash of the registry, or of a run directory, computed again; everything that does not fit is named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from teamtr_lora.base.frozen_base import BaseFacts, base_facts
from teamtr_lora.base.source import present
from teamtr_lora.base.versions import VERSION_NAME, AdapterVersion, verify_version, version_number
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.settings import SAFE_NAME
from teamtr_lora.registry.fit import understand
from teamtr_lora.registry.identity import Identity, identify_folder
from teamtr_lora.registry.manifest import AdapterManifest, TeamManifest, team_file
from teamtr_lora.registry.reader import TEAM_FILE, VERSION_FILES, RegistryReader, entries, open_version
from teamtr_lora.runs import layout
from teamtr_lora.runs.metrics import damaged_rows
from teamtr_lora.runs.run_state import CheckpointReader
from teamtr_lora.runs.stored_run import StoredRun, read_run

Adapters = set[tuple[str, str]]  # those without a fault: agent and version
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
    rows: int = 0  # of a run's log
    checkpoints: int = 0
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


def verify_named(registry: RegistryReader, name: str | None) -> Verified:
    """What `adapters verify` was given: a run directory, a team of the registry, or nothing, which is all teams."""
    return verify_run(Path(name)) if name is not None and layout.is_run(Path(name)) else verify(registry, name)


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
    adapters: Adapters = set()
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
            missing = [f"{agent} {version}" for agent, version in manifest.agents.items() if (agent, version) not in adapters]
            for name in missing:
                found.add(path, f"its {name} is missing or damaged")
            if not missing:
                registry.check_members(manifest)


def _verify_agent(registry: RegistryReader, team: str, folder: Path, found: Verified, bases: Bases) -> Adapters:
    good: Adapters = set()
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
            if extra.name not in VERSION_FILES:
                found.add(extra, "is not in the manifest")
        with found.finding(path):
            contents = registry.contents(team, folder.name, path.name)
            manifest, _, _ = open_version(contents, str(path))
            good.add((folder.name, path.name))
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


# --- a run directory


def verify_run(path: Path) -> Verified:
    """Checks its team and recipe, every adapter, every row of its log and every checkpoint; evaluations are not looked at."""
    found = Verified()
    layout.refuse_links(path, layout.OWN_NAMES)
    run: StoredRun | None = None
    with found.finding(path):
        run = read_run(path)
    versions = _adapters(path / layout.ADAPTERS, found)
    for agent, version in run.versions.items() if run else ():
        if version not in versions:
            found.add(path / layout.TEAM, f"its {agent} {version.name} is missing or damaged")
    with found.finding(path / layout.METRICS):
        found.rows, damaged = damaged_rows(path)
        for line, wrong in damaged:
            found.add(f"{path / layout.METRICS}: line {line}", wrong)
    _checkpoints(path, run, found)
    return found


def _adapters(folder: Path, found: Verified) -> set[AdapterVersion]:
    good: set[AdapterVersion] = set()
    for place in [inner for agent in entries(folder) if agent.is_dir() for inner in entries(agent)]:
        if place.name.startswith("."):
            continue  # what a killed process left; the next one that trains here clears it
        if not re.fullmatch(VERSION_NAME, place.name):
            found.add(place, "does not belong in an agent's folder")
            continue
        found.adapters += 1
        with found.finding(place):
            good.add(verify_version(place))
    return good


def _checkpoints(path: Path, run: StoredRun | None, found: Verified) -> None:
    reader = CheckpointReader(path)
    for step in reader.steps():
        found.checkpoints += 1
        with found.finding(step):
            state = reader.read_step(step)
            if run and step == reader.steps()[-1] and state.versions != run.versions:
                found.add(path / layout.TEAM, f"is not the team of {step.name}; train {path} --resume writes it again")
