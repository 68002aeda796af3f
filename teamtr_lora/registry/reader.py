"""Reading the registry: names are checked before they become paths, and no link below the root is followed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teamtr_lora.base.adapter_files import MAX_JSON_BYTES, MAX_WEIGHT_BYTES
from teamtr_lora.base.lora_config import PlainLora, read_lora_config
from teamtr_lora.base.versions import CONFIG, MANIFEST, VERSION_NAME, WEIGHTS, version_number
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import sha256
from teamtr_lora.common.foreign_files import parse_json, read_regular
from teamtr_lora.common.settings import PATTERN_WORDS, SAFE_NAME, meant
from teamtr_lora.recipe import Recipe
from teamtr_lora.registry.identity import protocol_hash
from teamtr_lora.registry.manifest import CARD, AdapterManifest, TeamManifest, read_manifest, team_file

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_ROOT = Path("adapters")
FILES = {WEIGHTS: MAX_WEIGHT_BYTES, CONFIG: MAX_JSON_BYTES, CARD: MAX_JSON_BYTES}  # and the most bytes each may have
VERSION_FILES = {**FILES, MANIFEST: MAX_JSON_BYTES}  # those that a manifest has hashes of, and itself
TEAM_FILE = re.compile(r"team-([0-9]{4,9})\.json")


class RegistryReader:
    """The teams and adapter versions below `root`, to read them."""

    def __init__(self, root: Path = DEFAULT_ROOT) -> None:
        self.root = Path(root)

    def teams(self) -> list[str]:
        """Teams that have a version."""
        return [name for name in self.names(self.root) if self.numbers(name)]

    def numbers(self, team: str) -> list[int]:
        """Numbers of a team's versions, oldest first."""
        names = {path.name for path in entries(self.team_folder(team))}
        found = {int(match[1]) for name in names if (match := TEAM_FILE.fullmatch(name))} - {0}
        return sorted(number for number in found if team_file(number) in names)

    def team(self, name: str, number: int | None = None) -> TeamManifest:
        """A version of a team; without a number the current one."""
        numbers = self.numbers(name)
        if not numbers:
            raise UserError(f"{self.root}: no team {name!r} here; {meant(name, self.teams())}")
        if number is not None and number not in numbers:
            raise UserError(f"{self.root / name}: no team version {number}; it has {', '.join(map(str, numbers))}")
        path = self.team_folder(name) / team_file(number or numbers[-1])
        return parse_team(read_file(path, MAX_JSON_BYTES), str(path), name, number or numbers[-1])

    def agents(self, team: str) -> list[str]:
        """Agents that have a folder, whether a team version uses them or not."""
        return self.names(self.team_folder(team))

    def versions(self, team: str, agent: str) -> list[str]:
        """Names of an agent's versions, oldest first."""
        folder = self.team_folder(team) / safe(agent, "agent")
        names = [path.name for path in entries(folder) if re.fullmatch(VERSION_NAME, path.name) and path.is_dir()]
        return sorted(names, key=lambda name: (version_number(name), name))

    def folder(self, team: str, agent: str, version: str) -> Path:
        """Where a version lies; it must exist and be reached without a link."""
        if not re.fullmatch(VERSION_NAME, version):
            raise UserError(f"{team}/{agent}: {version!r} is no version name; they look like v0003-0123456789ab")
        path = self.team_folder(team) / safe(agent, "agent") / version
        if not path.is_dir():
            have = self.versions(team, agent)
            raise UserError(f"{path}: no such adapter version; {agent} has {', '.join(have[-5:]) or 'none'}")
        for part in (path, path.parent):
            if part.is_symlink():
                raise UserError(f"{part}: a link; the registry follows none")
        return path

    def manifest(self, team: str, agent: str, version: str) -> AdapterManifest:
        path = self.folder(team, agent, version) / MANIFEST
        return parse_adapter(read_file(path, MAX_JSON_BYTES), str(path), (team, agent, version))

    def contents(self, team: str, agent: str, version: str) -> dict[str, bytes]:
        """The files of a version, manifest included, each with the hash its manifest says."""
        folder = self.folder(team, agent, version)
        found = {name: read_file(folder / name, limit) for name, limit in VERSION_FILES.items()}
        manifest = parse_adapter(found[MANIFEST], str(folder / MANIFEST), (team, agent, version))
        check_hashes(manifest, found, str(folder))
        return found

    def lora(self, team: str, agent: str, version: str) -> PlainLora:
        """Rank and scale of a version, by its own config."""
        path = self.folder(team, agent, version) / CONFIG
        data = read_file(path, MAX_JSON_BYTES)
        if sha256(data) != self.manifest(team, agent, version).files[CONFIG]:  # type: ignore[index]
            raise UserError(f"{path}: does not match its hash; the file was altered")
        return read_lora_config(parse_json(data, str(path)), str(path))

    def check_number_is_free(self, team: str, agent: str, version: str, where: str) -> None:
        """Refuses a version from elsewhere whose number another version has here."""
        for have in self.versions(team, agent):
            if have != version and version_number(have) == version_number(version):
                raise UserError(
                    f"{where}: {team}/{agent} has another version {version_number(have)} in {self.root} ({have}); use another "
                    f"team name (pull: such as --name {team[:29]}-2)"
                )

    def users(self, team: str, agent: str, version: str) -> list[int]:
        """Team versions that use an adapter version."""
        return [number for number in self.numbers(team) if self.team(team, number).agents.get(agent) == version]

    def check_members(self, manifest: TeamManifest) -> Recipe:
        """The recipe of a team whose adapters are here, belong to its base and are what the recipe says."""
        from teamtr_lora.registry.fit import check_lora

        recipe = checked_recipe(manifest)
        for member in recipe.team.agents:
            version = manifest.agents[member.name]
            where = f"{manifest.team}/{member.name}/{version}"
            check_belongs(self.manifest(manifest.team, member.name, version), manifest, where)
            check_lora(self.lora(manifest.team, member.name, version), member.lora, where)
        return recipe

    def team_folder(self, team: str) -> Path:
        folder = self.root / safe(team, "team")
        if folder.is_symlink():
            raise UserError(f"{folder}: a link; the registry follows none")
        return folder

    def names(self, folder: Path) -> list[str]:
        """Sub-folders that can be a team's or an agent's."""
        return [p.name for p in entries(folder) if re.fullmatch(SAFE_NAME, p.name) and p.is_dir() and not p.is_symlink()]


def parse_adapter(data: bytes, where: str, expected: tuple[str, str, str] | None = None) -> AdapterManifest:
    """manifest.json; `expected` is the (team, agent, version) of the folder it lies in."""
    manifest = read_manifest(AdapterManifest, parse_json(data, where), where)
    if expected and (manifest.team, manifest.agent, manifest.version) != expected:
        raise UserError(f"{where}: is about {manifest.team}/{manifest.agent}/{manifest.version}; it was moved or altered")
    return manifest


def open_version(
    contents: Mapping[str, bytes], where: str, expected: tuple[str, str, str] | None = None
) -> tuple[AdapterManifest, dict[str, Tensor], dict[str, Any]]:
    """Manifest, tensors and PEFT config out of a version's files, wherever they come from: every hash is computed again."""
    from teamtr_lora.registry.fit import open_contents

    manifest = parse_adapter(contents[MANIFEST], f"{where}/{MANIFEST}", expected)
    check_hashes(manifest, contents, where)
    return manifest, *open_contents(contents, where, manifest.content_hash)


def checked_recipe(team: TeamManifest) -> Recipe:
    """A team's recipe, which must be the one that its protocol_hash was made of."""
    recipe = team.load_recipe()
    if protocol_hash(recipe.team) != team.protocol_hash:
        raise UserError(f"{team.team} {team_file(team.number)}: protocol_hash is not the recipe's; the file was altered")
    return recipe


def parse_team(data: bytes, where: str, team: str | None = None, number: int | None = None) -> TeamManifest:
    manifest = read_manifest(TeamManifest, parse_json(data, where), where)
    if (team or manifest.team, number or manifest.number) != (manifest.team, manifest.number):
        raise UserError(f"{where}: is about {manifest.team} {team_file(manifest.number)}; it was moved or altered")
    return manifest


def check_belongs(adapter: AdapterManifest, team: TeamManifest, where: str) -> None:
    """An adapter is used on the very base that it was made for."""
    ours, theirs = adapter.base, team.base
    if ours.weights_hash != theirs.weights_hash:
        raise UserError(f"{where}: belongs to the base {ours.source!r}, the team's is {theirs.source!r}; use rebase")
    if adapter.tokenizer_hash != team.tokenizer_hash:
        raise UserError(f"{where}: was made with another tokenizer than the team's; use rebase")
    if (ours.source, ours.revision) != (theirs.source, theirs.revision):
        names = [f"{base.source!r}{f' at {base.revision!r}' if base.revision else ''}" for base in (ours, theirs)]
        raise UserError(f"{where}: names the base {names[0]}, the team names {names[1]}; import it into this team again")


def check_hashes(manifest: AdapterManifest, contents: Mapping[str, bytes], where: str) -> None:
    """The files that are given have the hashes that the manifest says."""
    for name, expected in manifest.files.items():
        if name in contents and sha256(contents[name]) != expected:
            raise UserError(f"{where}/{name}: does not match its hash; the file was altered")


def entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror})") from error


def safe(name: str, what: str) -> str:
    """Returns `name` if it is safe as the name of a folder in the registry, and refuses it otherwise."""
    if not re.fullmatch(SAFE_NAME, name):
        raise UserError(f"{what} {name!r}: must be {PATTERN_WORDS[SAFE_NAME]}")
    return name


def read_file(path: Path, limit: int) -> bytes:
    try:
        return read_regular(path, limit)
    except FileNotFoundError as error:
        raise UserError(f"{path}: is missing") from error
