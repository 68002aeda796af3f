"""What RUN_OR_TEAM means, for every command and every function that takes one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.common.code_paths import misnamed
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.settings import nearest
from teamtr_lora.recipe import Recipe, load_recipe
from teamtr_lora.recipe.named import named_code
from teamtr_lora.registry.identity import identify
from teamtr_lora.registry.manifest import TeamManifest
from teamtr_lora.registry.other_items import on_other_items
from teamtr_lora.registry.programs import check_programs
from teamtr_lora.registry.reader import DEFAULT_ROOT, TEAM_FILE, RegistryReader, entries
from teamtr_lora.runs.layout import EVALUATIONS, is_run
from teamtr_lora.runs.stored_run import read_run, recipe_only, run_like


@dataclass(frozen=True)
class Location:
    """Where a word that stands for a team leads."""

    kind: Literal["run", "team", "recipe"]
    path: Path  # the run directory, the root of the registry, or the recipe file
    team: str = ""  # kind team: its name in the registry
    number: int | None = None  # kind team: one version of it; None is the current one


@dataclass(frozen=True)
class StoredTeam:
    """A team on disk, wherever it lies."""

    recipe: Recipe
    versions: dict[str, AdapterVersion]  # empty: every agent has a fresh adapter
    adapters: Path  # AGENT/VERSION lies in here
    evaluations: Path  # where results about it go


def locate(source: str | Path, root: Path = DEFAULT_ROOT, *, recipes: bool = False) -> Location:
    """What RUN_OR_TEAM means: a run directory, a registry team's folder or one of its team files, or a team's bare name in the
    registry `root`. With `recipes` also a recipe file, whose team has not been trained."""
    source = Path(source)
    if is_run(source):
        return Location("run", source)
    if os.path.isfile(source) and (match := TEAM_FILE.fullmatch(source.name)):
        folder = source.resolve().parent
        return Location("team", folder.parent, folder.name, int(match[1]))
    if recipes and os.path.isfile(source):  # os.path's, as Path's raises for a name that no file system takes
        return Location("recipe", source)
    if os.path.isdir(source) and any(TEAM_FILE.fullmatch(path.name) for path in entries(source)):
        folder = source.resolve()
        return Location("team", folder.parent, folder.name)
    registry = RegistryReader(root)
    if source == Path(source.name) and source.name in registry.teams():
        return Location("team", root, source.name)
    if wrong := recipe_only(source):
        raise UserError(f"{source}: {wrong}")
    teams = registry.teams()
    like = nearest(source.name, teams) or run_like(source)
    hint = f"; did you mean {like!r}?" if like else f"; the registry {root}: {', '.join(teams)}" if teams else ""
    raise UserError(f"{source}: no run or team here; give the folder that train printed, or a team of a registry{hint}")


def find_team(
    source: str | Path,
    root: Path = DEFAULT_ROOT,
    *,
    scored: bool = True,
    recipes: bool = False,
    more: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> StoredTeam:
    """The team that RUN_OR_TEAM means, checked.

    `scored`: its task will be played, so the code of its rewards must be here; for talking to the team it need not be.
    `root` and `recipes` are `locate`'s. `more`: recipe files and overrides that the recipe is changed by; a trained team's only
    in the sections that `on_other_items` takes.
    """
    found = locate(source, root, recipes=recipes)
    files, overrides = more
    if found.kind == "run":
        run = read_run(found.path)
        recipe = on_other_items(run.recipe, files, overrides, source)
        if scored:
            check_programs(recipe, found.path)
        return StoredTeam(recipe, run.versions, run.adapters, run.evaluations)
    if found.kind == "recipe":
        name = "-".join(path.stem for path in (found.path, *map(Path, files)))
        return StoredTeam(load_recipe([found.path, *files], overrides), {}, found.path.parent, Path(EVALUATIONS) / name)
    registry, name = RegistryReader(found.path), found.team
    team = registry.team(name, found.number)
    recipe = on_other_items(registry.check_members(team).placed_in(Path.cwd()), files, overrides, source)
    _check_code_is_here(recipe, f"{registry.root / name}", scored)
    if scored:
        check_programs(recipe, registry.root / name)
    _check_base(team, registry.root / name)
    versions = {agent: registry.manifest(name, agent, version).adapter_version() for agent, version in team.agents.items()}
    return StoredTeam(recipe, versions, registry.root / name, Path(EVALUATIONS) / f"{name}-{team.number}")


def _check_code_is_here(recipe: Recipe, where: str, scored: bool) -> None:
    """A recipe in a registry may be a stranger's: the functions it names must be in files that the user has put here, or in
    packages that the user trusts. Loading them asks the same, when a base is loaded already."""
    for key, path in named_code(recipe.model_dump()).items():
        if key.startswith("task.") and not scored:
            continue
        if wrong := misnamed(path, recipe.folder):
            raise UserError(f"{where}: {key} = {path!r}: {'; '.join(wrong)} (a stored team's code is looked for in this folder)")


def _check_base(team: TeamManifest, where: Path) -> None:
    here = identify(team.base.source, team.base.revision)
    if here.base.weights_hash != team.base.weights_hash:
        raise UserError(f"{where}: made for other weights than {team.base.source!r} has now; get that base again, or use rebase")
    if here.tokenizer_hash != team.tokenizer_hash:
        raise UserError(f"{where}: made with another tokenizer than {team.base.source!r} has now; get that base again")
