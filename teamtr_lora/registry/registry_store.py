"""The registry on disk: immutable adapter versions and teams, whole or absent, never overwritten.

    ROOT/TEAM/AGENT/VERSION/{adapter_model.safetensors, adapter_config.json, README.md, manifest.json}
    ROOT/TEAM/team-0001.json, team-0002.json, ...      the highest number is the current team

Writers of one team take turns (by a lock that goes with its process); readers need none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save as save_safetensors
from torch import Tensor

from teamtr_lora.base.frozen_base import base_facts
from teamtr_lora.base.source import present
from teamtr_lora.base.versions import CONFIG, MANIFEST, WEIGHTS, AdapterVersion, content_hash, version_number
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import (
    TEMPORARY,
    create_atomic,
    disk_errors,
    dump_json,
    remove_temporaries,
    sha256,
    sync_folder,
    write_folder_atomic,
)
from teamtr_lora.common.locks import locked
from teamtr_lora.recipe import Recipe
from teamtr_lora.registry.card import adapter_card
from teamtr_lora.registry.fit import open_contents, understand
from teamtr_lora.registry.identity import Identity, protocol_hash
from teamtr_lora.registry.manifest import (
    CARD,
    AdapterManifest,
    MadeBy,
    Replaced,
    TeamManifest,
    make_manifest,
    manifest_bytes,
    now,
    sealed,
    team_file,
)
from teamtr_lora.registry.reader import VERSION_FILES, RegistryReader, open_version, parse_team, safe


class Registry(RegistryReader):
    """The teams and adapter versions below `root`, to read them and to store new ones."""

    def publish_adapter(
        self,
        team: str,
        agent: str,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],
        *,
        identity: Identity,
        protocol_hash: str,
        made_by: MadeBy,
        parent: str | None = None,
        metrics: Mapping[str, float] | None = None,
        task: str = "",
    ) -> AdapterManifest:
        """Stores an adapter as the agent's next version. `task` is for the card."""
        safe(agent, "agent")
        cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        content = content_hash(cpu, dict(config))
        files = {WEIGHTS: save_safetensors(cpu, metadata={"format": "pt"}), CONFIG: dump_json(dict(config)).encode()}
        open_contents(files, f"{team}/{agent}", content)  # what is published can be read again
        with self._writing(team):
            number = self._next_number(team, agent)
            described: dict[str, Any] = {
                "team": team, "agent": agent, **AdapterVersion(agent, number, content).stored(),
                "base": identity.base, "tokenizer_hash": identity.tokenizer_hash, "protocol_hash": protocol_hash,
                "parent": parent, "made_by": made_by, "metrics": dict(metrics or {}), "created": now(),
            }  # fmt: skip
            files[CARD] = adapter_card(described, config, task).encode()
            hashes = {name: sha256(data) for name, data in files.items()}
            manifest = make_manifest(AdapterManifest, {**described, "files": hashes}, f"{team}/{agent}")
            files[MANIFEST] = manifest_bytes(manifest)
            write_folder_atomic(self.root / team / agent / manifest.version, files)
        return manifest

    def publish_team(
        self,
        team: str,
        recipe: Recipe,
        agents: Mapping[str, str],
        *,
        identity: Identity,
        made_by: str,
        parent: int | None = None,
        lineage: Sequence[Replaced] = (),
        metrics: Mapping[str, float] | None = None,
    ) -> TeamManifest:
        """Makes these adapter versions the current team. With `parent`, only if that is still the current version."""
        with self._writing(team):
            numbers = self.numbers(team)
            current = numbers[-1] if numbers else None
            if parent is not None and parent != current:
                raise UserError(f"{self.root / team}: is at version {current} now, not {parent}: somebody published meanwhile")
            number = (current or 0) + 1
            data = {
                "team": team, "number": number, "recipe": recipe.model_dump(mode="json"), "agents": dict(agents),
                "base": identity.base, "tokenizer_hash": identity.tokenizer_hash, "protocol_hash": protocol_hash(recipe.team),
                "parent": current, "made_by": made_by, "lineage": list(lineage), "metrics": dict(metrics or {}), "created": now(),
            }  # fmt: skip
            manifest = make_manifest(TeamManifest, data, f"{team} {team_file(number)}")
            self.check_members(manifest)
            create_atomic(self.root / team / team_file(number), manifest_bytes(manifest))
        return manifest

    def undo(self, team: str) -> TeamManifest:
        """The team before the last swap becomes current again, as a new version: nothing is lost.

        Once more goes back one more swap, not forth again. What an import or a pull brought is no swap, and stays.
        """
        current = self.team(team)
        standing = self._standing(team, current.number)
        if standing is None or standing.made_by != "swap" or standing.parent is None:
            made = f", and version {standing.number} is what {standing.made_by} made" if standing else ""
            raise UserError(
                f"{self.root / team}: there is no swap to undo{made}; an older version is used by its file, such as "
                f"{team_file(1)}"
            )
        if standing.parent not in self.numbers(team):
            raise UserError(f"{self.root / team}: version {standing.parent}, before the swap, is not here; it was removed")
        before = self.team(team, standing.parent)
        how = f"undo: back to team version {before.number}"
        lineage = [
            Replaced(agent=agent, old=current.agents.get(agent), new=version, how=how)
            for agent, version in before.agents.items()
            if current.agents.get(agent) != version
        ]
        return self.publish_team(
            team,
            before.load_recipe(),
            before.agents,
            identity=Identity(before.base, before.tokenizer_hash),
            made_by="undo",
            parent=current.number,
            lineage=lineage,
            metrics=before.metrics,
        )

    def adopt_adapter(self, contents: Mapping[str, bytes], where: str, team: str = "") -> AdapterManifest:
        """Stores a version exactly as another registry wrote it, bit for bit, or for a `team` of another name. One that is here
        already is left as it is."""
        if odd := sorted(contents.keys() ^ VERSION_FILES.keys()):
            raise UserError(f"{where}: {odd[0]!r} is missing or no file of an adapter version")
        manifest, _, _ = open_version(contents, where)
        if team not in ("", manifest.team):
            manifest = sealed(manifest.model_copy(update={"team": team}))
            contents = {**contents, MANIFEST: manifest_bytes(manifest)}
        if folder := present(manifest.base.source, manifest.base.revision):  # else it is checked when the base is there
            understand(contents, where, base_facts(folder))
        team, agent, version = manifest.team, manifest.agent, manifest.version
        with self._writing(team):
            self.check_number_is_free(team, agent, version, where)
            if version not in self.versions(team, agent):
                write_folder_atomic(self.root / team / agent / version, dict(contents))
            elif self.contents(team, agent, version) != dict(contents):
                raise UserError(f"{where}: {team}/{agent}/{version} is here with other files; use another team name")
        return manifest

    def withdraw(self, team: str, versions: Mapping[str, str]) -> None:
        """Takes back adapters that were adopted for a team which then could not be stored; agent -> version."""
        with self._writing(team):
            for agent, version in versions.items():
                folder = self.root / team / agent / version
                if folder.is_dir() and not self.users(team, agent, version):
                    _remove_folder(folder, folder.parent)
            for empty in [*(self.root / team / agent for agent in versions), self.root / team]:
                with contextlib.suppress(OSError):  # it holds other versions, or was never made
                    empty.rmdir()

    def adopt_team(self, data: bytes, where: str) -> TeamManifest:
        """Stores a team version exactly as another registry wrote it; its adapters must be here."""
        manifest = parse_team(data, where)
        team, number = manifest.team, manifest.number
        with self._writing(team):
            self.check_members(manifest)
            path = self.root / team / team_file(number)
            numbers = self.numbers(team)
            if number in numbers:
                if path.read_bytes() != data:
                    raise UserError(f"{where}: {team} has another version {number} here; use another team name")
            elif numbers and number < numbers[-1]:
                raise UserError(f"{where}: {team} is at version {numbers[-1]} here, past {number}; use another team name")
            else:
                create_atomic(path, data)
        return manifest

    def move_in(self, staged: Registry, team: str) -> None:
        """A team that is new here, in one step out of another registry on the same disk."""
        folder = self.team_folder(team)
        with self._writing(team), disk_errors(folder):
            os.rename(staged.team_folder(team), folder)
            sync_folder(self.root)

    def remove(
        self,
        team: str,
        *,
        agent: str | None = None,
        version: str | None = None,
        number: int | None = None,
        with_teams: bool = False,
    ) -> list[str]:
        """Removes an adapter version (agent and version), an old team version (number), or the whole team; says what went.

        A version that a team version uses stays, unless `with_teams` removes those team versions too. The current one stays.
        """
        if not self.team_folder(team).is_dir():
            raise UserError(f"{self.root}: no team {team!r} here")
        with self._writing(team):
            if agent is not None and version is not None:
                users = self.users(team, agent, version)
                if users and not with_teams:
                    listed = ", ".join(map(str, users))
                    raise UserError(f"{team}/{agent}/{version}: used by team version {listed}; --with-teams removes that too")
                folder = self.folder(team, agent, version)
                gone = [self._remove_number(team, used) for used in self._not_current(team, users)]
                _remove_folder(folder, folder.parent)
                return [*gone, f"{team}/{agent}/{version}"]
            if number is not None:
                if number not in self.numbers(team):
                    raise UserError(f"{self.root / team}: no team version {number}")
                return [self._remove_number(team, used) for used in self._not_current(team, [number])]
            _remove_folder(self.team_folder(team), self.root)
            return [team]

    # --- pieces

    def _standing(self, team: str, number: int | None) -> TeamManifest | None:
        """The team version `number`; if that is an undo, the version that it restored."""
        if number not in self.numbers(team):
            return None
        manifest = self.team(team, number)
        if manifest.made_by != "undo":
            return manifest
        undone = self._standing(team, manifest.parent)
        return self._standing(team, undone.parent) if undone else None

    def _not_current(self, team: str, numbers: list[int]) -> list[int]:
        if numbers and numbers[-1] == self.numbers(team)[-1]:
            raise UserError(
                f"{self.root / team}: version {numbers[-1]} is the current team; undo it first, or remove the whole team"
            )
        return numbers

    def _remove_number(self, team: str, number: int) -> str:
        path = self.team_folder(team) / team_file(number)
        with disk_errors(path):
            path.unlink()
        return f"{team}/{path.name}"

    def _next_number(self, team: str, agent: str) -> int:
        """One above every number that is stored or named by a team version, so no number is reused."""
        named = [self.team(team, number).agents.get(agent) for number in self.numbers(team)]
        return max([0, *(version_number(name) for name in [*self.versions(team, agent), *named] if name)]) + 1

    @contextmanager
    def _writing(self, team: str) -> Iterator[None]:
        """This process alone writes to the team; what a killed one left unfinished is cleared."""
        folder = self.team_folder(team)
        with locked(self.root / f".{team}.lock", self.root):
            remove_temporaries(folder)
            shutil.rmtree(_doomed(folder, self.root), ignore_errors=True)
            yield


def _doomed(folder: Path, beside: Path) -> Path:
    return beside / f"{TEMPORARY}removed-{folder.name}"


def _remove_folder(folder: Path, beside: Path) -> None:
    """Gone in one step: renamed out of sight, then deleted."""
    with disk_errors(folder):
        os.rename(folder, _doomed(folder, beside))
        shutil.rmtree(_doomed(folder, beside))
