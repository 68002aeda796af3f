"""`adapters import`: a whole team out of a run directory, or one PEFT LoRA folder trained elsewhere.

Everything is looked at before anything is written, and nothing of a foreign config is kept: the stored one is made anew from the
few values that were understood.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from teamtr_lora.base.adapter_files import MAX_JSON_BYTES, MAX_WEIGHT_BYTES
from teamtr_lora.base.frozen_base import base_facts
from teamtr_lora.base.source import NANO, Progress, beside, resolve
from teamtr_lora.base.versions import CONFIG, WEIGHTS, AdapterVersion, content_hash, version_folder
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.foreign_files import parse_json, read_regular, show
from teamtr_lora.common.settings import known_agent
from teamtr_lora.recipe import AgentSection, BaseSection, LoraSection, Recipe, ScriptSettings, TeamSection
from teamtr_lora.recipe.problems import check
from teamtr_lora.recipe.words import RecipeError
from teamtr_lora.registry.fit import (
    Adapter,
    check_lora,
    check_targets,
    modules_of,
    open_contents,
    pickles,
    refuse_pickles,
    understand,
)
from teamtr_lora.registry.identity import Identity, identify_folder, protocol_hash
from teamtr_lora.registry.local_keys import local_files, put
from teamtr_lora.registry.manifest import AdapterManifest, MadeBy, Replaced, TeamManifest, one_line
from teamtr_lora.registry.programs import programs_of
from teamtr_lora.registry.reader import entries, safe
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.runs.history import Replaced as RunReplaced
from teamtr_lora.runs.layout import ADAPTERS, is_run
from teamtr_lora.runs.stored_run import read_run, recipe_only


@dataclass
class Imported:
    adapters: list[AdapterManifest] = field(default_factory=list)
    team: TeamManifest | None = None  # None: the team stays as it was
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "adapters": [adapter.model_dump(mode="json") for adapter in self.adapters],
            "team": self.team.model_dump(mode="json") if self.team else None,
            "notes": self.notes,
        }


def import_path(
    registry: Registry,
    path: Path,
    *,
    team: str,
    agent: str | None = None,
    base: str | None = None,
    progress: Progress | None = None,
) -> Imported:
    """Stores a run's team, or one adapter in PEFT's format, in the registry under the name `team`.

    `agent` and `base` are for a PEFT folder: whose adapter it is, and its base where the team is new.
    """
    registry.team_folder(team)  # refuses a name that no team can have
    if not os.path.isdir(path):
        raise UserError(
            f"{show(str(path))}: no such folder; give a run directory or the folder that PEFT's save_pretrained wrote"
        )
    if wrong := recipe_only(path):
        raise UserError(f"{show(str(path))}: {wrong}")
    if is_run(path):
        if agent is not None:
            raise UserError(f"--agent {agent}: a run is imported whole; leave it out, or give {path}/{ADAPTERS}/{agent}/VERSION")
        return _import_run(registry, path, team, base, progress)
    return _import_folder(registry, path, team, agent, base, progress)


def read_folder(folder: Path) -> dict[str, bytes]:
    """The two files of a PEFT adapter, as they are."""
    refuse_pickles([path.name for path in entries(folder)], str(folder))
    return {CONFIG: _read(folder, CONFIG, MAX_JSON_BYTES), WEIGHTS: _read(folder, WEIGHTS, MAX_WEIGHT_BYTES)}


def _read(folder: Path, name: str, limit: int) -> bytes:
    try:
        return read_regular(folder / name, limit, folder=folder)
    except FileNotFoundError as error:
        inside = sorted(path.name for path in entries(folder) if (path / CONFIG).is_file())
        instead = f"; there are adapters in it: give {show(str(folder / inside[-1]))}" if inside else ""
        raise UserError(f"{folder}: no run and no PEFT adapter ({name} is missing){instead}") from error


# --- a PEFT folder


def _import_folder(
    registry: Registry, path: Path, team: str, agent: str | None, base: str | None, progress: Progress | None
) -> Imported:
    contents = read_folder(path)
    understand(contents, str(path))  # refuses a damaged adapter before its base is fetched
    current = registry.team(team) if registry.numbers(team) else None
    agent = _which_agent(current, agent)
    if current is None and base is None:
        said = parse_json(contents[CONFIG], CONFIG).get("base_model_name_or_path")
        raise UserError(f"--base: the team {team!r} is new, so say which base this adapter is for (its config says {show(said)})")
    source, revision = base or "", None
    if current and base in (None, current.base.source):
        source, revision = current.base.source, current.base.revision
    if source != NANO and os.path.exists(local := os.path.expanduser(source)):
        source = os.path.realpath(local)
    folder = resolve(source, revision, progress)
    adapter = understand(contents, str(path), base_facts(folder))
    identity = identify_folder(folder, source, revision)
    if current:
        _same_base(current, identity)
        identity = Identity(current.base, current.tokenizer_hash)  # keeps the team's name for the base, not the one in --base
        recipe = current.load_recipe()
    else:
        recipe = _alone(agent, adapter.lora, source, revision)
    stored = _store(registry, team, agent, adapter, identity=identity, recipe=recipe, made_by="import", current=current)
    done = Imported([stored])
    if unread := pickles(entry.name for entry in entries(path)):
        done.notes.append(f"not read, as pickles can run code: {', '.join(map(show, unread))}")
    if adapter.lora.dora:
        done.notes.append("vLLM cannot serve DoRA adapters: use the transformers engine")
    if current and current.agents[agent] == stored.version:
        done.notes.append(f"team version {current.number} has it already")
    elif current:
        place = shlex.quote(str(registry.root / team))
        done.notes.append(
            f"the team is as it was; put it in with: teamtr-lora swap {place} --agent {agent} --with {stored.version}"
        )
    else:
        done.team = registry.publish_team(team, recipe, {agent: stored.version}, identity=identity, made_by="import")
    return done


def _which_agent(current: TeamManifest | None, agent: str | None) -> str:
    known = list(current.agents) if current else []
    if agent is None and len(known) == 1:
        return known[0]
    if agent is None:
        listed = f"one of {', '.join(known)}" if known else "a name for it"
        raise UserError(f"--agent: say whose adapter this is: {listed}")
    return known_agent(agent, known) if known else safe(agent, "--agent")


def _alone(agent: str, lora: LoraSection, source: str, revision: str | None) -> Recipe:
    """The recipe of a team of one agent, whose task is not known."""
    try:
        return Recipe(
            base=BaseSection(source=source, revision=revision),
            team=TeamSection(agents=[AgentSection(name=agent, lora=lora)]),
            task=ScriptSettings(name="script"),
        )
    except ValueError as error:
        raise UserError(f"--agent {agent}: {' '.join(str(error).split())}") from error


def _same_base(team: TeamManifest, identity: Identity) -> None:
    if identity.base.weights_hash != team.base.weights_hash or identity.tokenizer_hash != team.tokenizer_hash:
        raise UserError(
            f"--base {identity.base.source}: team {team.team} is on {team.base.source!r}, which has other weights or another "
            "tokenizer; import it under another --team"
        )


# --- a run directory


def _import_run(registry: Registry, path: Path, team: str, base: str | None, progress: Progress | None) -> Imported:
    run = read_run(path)
    recipe, versions = run.recipe, run.versions
    folders = {agent: version_folder(run.adapters, version) for agent, version in versions.items()}
    contents = {agent: read_folder(folder) for agent, folder in folders.items()}
    for agent, version in versions.items():
        open_contents(contents[agent], str(folders[agent]), version.content_hash)
    history = run.history()
    recipe = _portable(recipe, base or beside(recipe.base.source, recipe.folder))
    source, revision = recipe.base.source, recipe.base.revision
    folder = resolve(source, revision, progress)
    facts, identity = base_facts(folder), identify_folder(folder, source, revision)
    adapters = {agent: understand(contents[agent], str(folders[agent]), facts) for agent in versions}
    for agent, adapter in adapters.items():
        wanted = recipe.team.lora_of(agent)
        check_lora(adapter.lora, wanted, str(folders[agent]))
        check_targets(modules_of(adapter.lora.targets, facts), wanted, facts, str(folders[agent]))
    current = registry.team(team) if registry.numbers(team) else None
    if current:
        _same_base(current, identity)
        if current.agents.keys() != versions.keys():
            raise UserError(
                f"--team {team}: has the agents {', '.join(current.agents)}, this run has others; choose another name"
            )
    done, members = Imported(), {}
    if history.stale:
        done.notes.append("the run was not evaluated since its team last changed: no metrics are stored with it")
    if dataset := programs_of(run.recipe):
        done.notes.append(f"its task runs programs of the dataset {show(dataset)}; playing it asks for --trust-programs once")
    for agent, adapter in adapters.items():
        stored = _store(
            registry, team, agent, adapter, identity=identity, recipe=recipe, made_by=history.made_by[agent], current=current,
            metrics=history.metrics,
        )  # fmt: skip
        done.adapters.append(stored)
        members[agent] = stored.version
    if current and current.agents == members and current.load_recipe() == recipe:
        done.notes.append(f"team version {current.number} is this run already")
        return done
    done.team = registry.publish_team(
        team, recipe, members, identity=identity, made_by="rebase" if set(history.made_by.values()) == {"rebase"} else "train",
        lineage=_lineage(history.lineage, versions, members), metrics=history.metrics,
    )  # fmt: skip
    return done


def _lineage(
    history: Sequence[RunReplaced], versions: Mapping[str, AdapterVersion], members: Mapping[str, str]
) -> list[Replaced]:
    """The run's replacements as a team manifest has them: the run's current versions have other numbers in the registry."""
    names = {(agent, version.name): members[agent] for agent, version in versions.items()}
    return [
        Replaced(
            agent=step.agent,
            old=step.old,
            new=names.get((step.agent, step.new), step.new),
            how=one_line(f"{step.how} from {step.source}"),
        )
        for step in history
    ]


def _store(
    registry: Registry,
    team: str,
    agent: str,
    adapter: Adapter,
    *,
    identity: Identity,
    recipe: Recipe,
    made_by: MadeBy,
    current: TeamManifest | None,
    metrics: Mapping[str, float] | None = None,
) -> AdapterManifest:
    """The adapter as a new version, or the version that holds these weights already: a repeated import stores nothing twice."""
    config = adapter.config(identity.base.source)
    content = content_hash(adapter.tensors, config)
    for version in reversed(registry.versions(team, agent)):
        manifest = registry.manifest(team, agent, version)
        if (manifest.content_hash, manifest.base) == (content, identity.base):
            return manifest
    unknown = current is None and made_by == "import"  # an adapter alone does not say what it was trained on
    return registry.publish_adapter(
        team, agent, adapter.tensors, config, identity=identity, protocol_hash=protocol_hash(recipe.team), made_by=made_by,
        parent=current.agents[agent] if current else None, metrics=metrics, task="" if unknown else recipe.task.name,
    )  # fmt: skip


def _portable(recipe: Recipe, source: str) -> Recipe:
    """The recipe with absolute paths in place of those relative to its folder, so that it can be used from anywhere here."""
    data = recipe.model_dump(mode="json")
    data["base"]["source"], data["output_dir"] = source, None
    for key, value in local_files(data).items():
        if (recipe.folder / value).exists():
            put(data, key, str((recipe.folder / value).resolve()))
    portable, problems = check(data)
    if portable is None:
        raise RecipeError(problems, "the run's recipe")
    return portable
