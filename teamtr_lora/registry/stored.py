"""Teams on disk, wherever they lie: what RUN_OR_TEAM means on a command line."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe, load_recipe
from teamtr_lora.registry.identity import identify
from teamtr_lora.registry.local_keys import named_code
from teamtr_lora.registry.manifest import TeamManifest
from teamtr_lora.registry.reader import DEFAULT_ROOT, TEAM_FILE, RegistryReader, entries

EVALUATIONS = "evaluations"  # a run's folder for results about it; each has a lock of its own


@dataclass(frozen=True)
class StoredTeam:
    """A team on disk, wherever it lies."""

    recipe: Recipe
    versions: dict[str, AdapterVersion]
    adapters: Path  # AGENT/VERSION lies in here
    evaluations: Path  # where results about it go


def find_team(source: Path, *, scored: bool = True) -> StoredTeam:
    """What RUN_OR_TEAM means: a run directory, a registry team's folder or one of its team files, or a team's bare name in the
    default registry. `scored`: whether its task will be played, which takes the reward of its recipe; talking to it does not."""
    if os.path.isfile(source / "recipe.yaml"):
        recipe, versions = read_team(source)
        return StoredTeam(recipe, versions, source / "adapters", source / EVALUATIONS)
    place = source.resolve()
    if is_team_file(source):
        number = int(place.stem.partition("-")[2])
        return _registry_team(RegistryReader(place.parent.parent), place.parent.name, number, scored=scored)
    if any(TEAM_FILE.fullmatch(path.name) for path in entries(place)):
        return _registry_team(RegistryReader(place.parent), place.name, scored=scored)
    registry = RegistryReader()
    if source.name in registry.teams() and source == Path(source.name):
        return _registry_team(registry, source.name, scored=scored)
    known = f"; {DEFAULT_ROOT} has the teams {', '.join(registry.teams())}" if registry.teams() else ""
    raise UserError(f"{source}: no run or team here; give the folder that train printed, or a team of a registry{known}")


def is_team_file(source: Path) -> bool:
    # os.path's, unlike Path's, has no quarrel with a name that no file system takes
    return os.path.isfile(source) and TEAM_FILE.fullmatch(source.name) is not None


def is_recipe_file(source: Path) -> bool:
    """Any other file: a team with fresh adapters, where a command takes that."""
    return os.path.isfile(source) and not is_team_file(source)


def _registry_team(registry: RegistryReader, name: str, number: int | None = None, *, scored: bool) -> StoredTeam:
    team = registry.team(name, number)
    recipe = registry.check_members(team).placed_in(Path.cwd())
    _check_code_is_here(recipe, f"{registry.root / name}", scored)
    _check_base(team, registry.root / name)
    manifests = {agent: registry.manifest(name, agent, version) for agent, version in team.agents.items()}
    versions = {agent: AdapterVersion(agent, m.number, m.content_hash) for agent, m in manifests.items()}
    return StoredTeam(recipe, versions, registry.root / name, Path("evaluations") / f"{name}-{team.number}")


def _check_code_is_here(recipe: Recipe, where: str, scored: bool) -> None:
    """A recipe in a registry may be a stranger's: the functions it names must be in files the user has put here."""
    for key, path in named_code(recipe.model_dump()).items():
        if (key.startswith("task.") and not scored) or not re.search("[:.]", path):
            continue  # nothing will be scored; or a task that a package offers, which loading it refuses unless it is trusted
        module = path.partition(":")[0] if ":" in path else path.rpartition(".")[0]
        file = Path(module.replace(".", "/") + ".py")
        if not file.is_file():
            raise UserError(f"{where}: {key} = {path!r}: there is no {file} here; run this where the team's own code is")


def _check_base(team: TeamManifest, where: Path) -> None:
    here = identify(team.base.source, team.base.revision)
    if here.base.weights_hash != team.base.weights_hash:
        raise UserError(f"{where}: made for other weights than {team.base.source!r} has now; get that base again, or use rebase")
    if here.tokenizer_hash != team.tokenizer_hash:
        raise UserError(f"{where}: made with another tokenizer than {team.base.source!r} has now; get that base again")


def read_team(folder: Path) -> tuple[Recipe, dict[str, AdapterVersion]]:
    """The recipe and current versions of a run directory (or any folder with recipe.yaml, team.json and adapters/)."""
    if not (folder / "recipe.yaml").is_file():
        raise UserError(f"{folder}: no run or team here (recipe.yaml is missing); give the folder that train printed")
    recipe = load_recipe(folder / "recipe.yaml")
    try:
        recipe = recipe.placed_in(Path(json.loads((folder / "origin.json").read_text())["recipe_folder"]))
        team = json.loads((folder / "team.json").read_text())
        versions = {a: AdapterVersion(a, v["number"], v["content_hash"]) for a, v in team.items()}
        for version in versions.values():  # they become a path
            if not isinstance(version.number, int) or not re.fullmatch("[0-9a-f]{64}", str(version.content_hash)):
                raise ValueError(f"{version.agent} has no proper version")
    except FileNotFoundError as error:
        raise UserError(
            f"{folder}: the run has no team yet ({Path(str(error.filename)).name} is missing); let train reach its first stage"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: team.json or origin.json is damaged ({error})") from error
    if set(versions) != {agent.name for agent in recipe.team.agents}:
        raise UserError(f"{folder}: team.json names {', '.join(versions)}, the recipe has other agents")
    try:  # what a swap put in place of the recipe's
        recipe = recipe.with_loras({agent: entry["lora"] for agent, entry in team.items() if "lora" in entry})
    except (ValueError, TypeError) as error:
        raise UserError(f"{folder}: team.json is damaged (it names an adapter that no recipe could)") from error
    return recipe, versions
