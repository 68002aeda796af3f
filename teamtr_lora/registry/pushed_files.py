"""What a push uploads: verified files, with nothing of this machine in them.

A team's repository holds team.json (the current team version), history.json, README.md and one folder an agent; an agent's holds
one version's files at its root, where PEFT looks for them.
"""

from __future__ import annotations

import copy
import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from teamtr_lora.base.lora_config import PlainLora, read_lora_config
from teamtr_lora.base.source import is_shared_name
from teamtr_lora.base.versions import CONFIG, MANIFEST, WEIGHTS
from teamtr_lora.common.files import dump_json, sha256
from teamtr_lora.recipe.engine_facts import DEFAULT_ENGINE, ENGINES
from teamtr_lora.registry.card import repository_card
from teamtr_lora.registry.local_keys import forget, local_choices, local_paths, put
from teamtr_lora.registry.manifest import CARD, AdapterManifest, TeamManifest, manifest_bytes, sealed
from teamtr_lora.registry.reader import FILES, RegistryReader, open_version

TEAM_FILE, HISTORY_FILE = "team.json", "history.json"
_INSTEAD = {
    "rollout.server": "; whoever pulls the team samples with another rollout.engine, or servers of their own",
    "task.responder": "; whoever pulls the team names a server of their own",
}
_PATH_IN_TEXT = re.compile(r"(?<![\w.:/<~\\-])(?:~|[A-Za-z]:)?(?:[/\\][\w.+@-]+){2,}[/\\]?")


@dataclass
class Parcel:
    """Files by their path in the repository, and what stays at home."""

    files: dict[str, bytes | Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def sizes(self) -> dict[str, int]:
        return {path: len(data) if isinstance(data, bytes) else data.stat().st_size for path, data in sorted(self.files.items())}

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def agent_parcel(registry: RegistryReader, team: TeamManifest, agent: str, repo: str) -> Parcel:
    """One version, with a card that says where it then is."""
    parcel = Parcel()
    registry.check_members(team)
    contents, manifest, _ = _version(parcel, registry, team, agent)
    contents[CARD] = contents[CARD].replace(f"adapters/{team.team}/{agent}/{manifest.version}".encode(), repo.encode())
    contents[MANIFEST] = _rehashed(manifest, contents)
    parcel.files |= {file: _on_disk(registry, team, agent) if file == WEIGHTS else data for file, data in contents.items()}
    return parcel


def team_parcel(registry: RegistryReader, team: TeamManifest, repo: str) -> Parcel:
    parcel, loras = Parcel(), {}
    registry.check_members(team)
    shared = portable(team, parcel)
    for agent in team.agents:
        contents, _, loras[agent] = _version(parcel, registry, team, agent)
        weights = _on_disk(registry, team, agent)
        parcel.files |= {f"{agent}/{file}": weights if file == WEIGHTS else data for file, data in contents.items()}
    earlier = [registry.team(team.team, number) for number in registry.numbers(team.team) if number <= team.number]
    parcel.files[TEAM_FILE] = manifest_bytes(shared)
    parcel.files[HISTORY_FILE] = dump_json({str(version.number): fingerprint(version) for version in earlier}).encode()
    parcel.files[CARD] = repository_card(shared, loras, repo).encode()
    return parcel


def fingerprint(team: TeamManifest) -> str:
    """A hash that one version of a team keeps under any local name, and after being pushed and pulled."""
    kept = {"number", "agents", "tokenizer_hash", "protocol_hash", "made_by", "created"}
    data = team.model_dump(mode="json", include=kept) | {"weights_hash": team.base.weights_hash}
    return sha256(dump_json(data).encode())


def portable(team: TeamManifest, parcel: Parcel) -> TeamManifest:
    """A team version without this machine's paths and servers; unchanged if it names none."""
    recipe = copy.deepcopy(team.recipe)
    rollout, base = recipe.get("rollout", {}), recipe.get("base", {})
    for key in local_choices(recipe):
        forget(recipe, key)
        section = key.rpartition(".")[0] or key
        parcel.note(f"{section}: stays here{_INSTEAD.get(section, '')}")
    facts = ENGINES.get(rollout.get("engine"))
    if facts and facts.by_url:  # it cannot work without the servers that stay here
        rollout["engine"] = DEFAULT_ENGINE
    for key, path in local_paths(recipe).items():
        settings, name = recipe.get("task", {}).get("settings") or {}, key.removeprefix("task.settings.")
        if name in settings and (name == path or not isinstance(settings[name], str)):
            del settings[name]
            parcel.note(f"{key}: stays here, for it holds a path of this machine")
            continue
        if name in settings:  # its name may have dots, which `put` would take for sections
            settings[name] = _last(path)
        else:
            put(recipe, key, _last(path))
        parcel.note(f"{key}: only the last part of the path goes up, {_last(path)!r}")
    if isinstance(base.get("source"), str):
        base["source"] = _cut(base["source"], parcel)
    data = team.model_dump(mode="json") | {"recipe": recipe}
    data["base"]["source"] = _cut(team.base.source, parcel)
    for step in data["lineage"]:
        step["how"] = _PATH_IN_TEXT.sub(lambda found: _last(found[0]), step["how"])
    return sealed(TeamManifest.model_validate(data))


def _version(
    parcel: Parcel, registry: RegistryReader, team: TeamManifest, agent: str
) -> tuple[dict[str, bytes], AdapterManifest, PlainLora]:
    """An agent's files as they are, every hash checked, or with local paths cut to a name and the hashes made anew."""
    version = team.agents[agent]
    contents, where = registry.contents(team.team, agent, version), str(registry.folder(team.team, agent, version))
    manifest, _, config = open_version(contents, where)
    lora = read_lora_config(config, where)
    source, name = manifest.base.source, _cut(manifest.base.source, parcel)
    called = config.get("base_model_name_or_path")
    named = _cut(called, parcel) if isinstance(called, str) else called
    if (source, called) != (name, named):
        card = contents[CARD].decode(errors="replace")
        for local, cut in {source: name, str(called): str(named)}.items():
            card = card.replace(local, cut)
        contents |= {CONFIG: dump_json({**config, "base_model_name_or_path": named}).encode(), CARD: card.encode()}
        manifest = manifest.model_copy(update={"base": manifest.base.model_copy(update={"source": name})})
        contents[MANIFEST] = _rehashed(manifest, contents)
    return contents, manifest, lora


def _rehashed(manifest: AdapterManifest, contents: dict[str, bytes]) -> bytes:
    return manifest_bytes(sealed(manifest.model_copy(update={"files": {file: sha256(contents[file]) for file in FILES}})))


def _on_disk(registry: RegistryReader, team: TeamManifest, agent: str) -> Path:
    """Weights go up from their file: a team's need not fit into memory together."""
    return registry.folder(team.team, agent, team.agents[agent]) / WEIGHTS


def _cut(source: str, parcel: Parcel) -> str:
    if not source or is_shared_name(source):
        return source
    name = _last(source)
    if name != source:
        parcel.note(f"base.source: a model of this machine; only its name goes up, {name!r}, and the hash of its weights")
    return name


def _last(path: str) -> str:
    """The last name in a POSIX or Windows path; where it has none, a name made from its hash."""
    names = [part for part in re.split(r"[/\\]", path) if part not in ("", ".", "..", "~")]
    return names[-1] if names else f"base-{hashlib.sha256(path.encode()).hexdigest()[:8]}"
