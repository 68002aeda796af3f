"""Reading a run directory: its recipe, its team, its rows and its history. None of it needs torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from teamtr_lora.base.versions import AdapterVersion, versions_from
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.settings import nearest
from teamtr_lora.recipe import Recipe, dump_recipe, load_recipe
from teamtr_lora.runs import layout
from teamtr_lora.runs.history import RunHistory, read_history
from teamtr_lora.runs.layout import holds_recipe, is_baseline, is_run, read_own_json, refuse_links
from teamtr_lora.runs.metrics import MetricsRow, read_rows


@dataclass(frozen=True)
class StoredRun:
    """A run directory as it lies on disk. Two are equal when they hold the same team of the same recipe."""

    path: Path = field(compare=False)
    recipe: Recipe  # with the adapters that swaps brought; its relative paths start where the first recipe was
    versions: dict[str, AdapterVersion]  # each agent's current one
    baseline: bool = False  # a run of `teamtr-lora baseline`, which trains one agent by TRL

    @property
    def adapters(self) -> Path:
        """AGENT/VERSION lies in here."""
        return self.path / layout.ADAPTERS

    @property
    def evaluations(self) -> Path:
        """The folder of the evaluations of this run."""
        return self.path / layout.EVALUATIONS

    def recipe_text(self) -> str:
        """The recipe as YAML."""
        return dump_recipe(self.recipe)

    def rows(self) -> list[MetricsRow]:
        """What the run has logged, oldest first."""
        return read_rows(self.path)

    def history(self) -> RunHistory:
        """How each adapter came to be, and how the team does as it is now."""
        return read_history(self.path, self.versions)


def read_run(path: Path) -> StoredRun:
    """The run in a directory that `train`, `rebase` or `baseline` wrote, checked; UserError says in one line what is wrong."""
    recipe = _own_recipe(path, "the folder that train printed")
    origin, team = (_required(path, name) for name in (layout.ORIGIN, layout.TEAM))
    try:
        recipe = recipe.placed_in(Path(origin["recipe_folder"]))
        versions = versions_from(team)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {layout.TEAM} or {layout.ORIGIN} is damaged ({error})") from error
    if set(versions) != {agent.name for agent in recipe.team.agents}:
        raise UserError(f"{path}: {layout.TEAM} names {', '.join(versions)}, the recipe has other agents")
    try:
        recipe = recipe.with_loras({agent: entry["lora"] for agent, entry in team.items() if "lora" in entry})
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: {layout.TEAM} is damaged (it names an adapter that no recipe could)") from error
    return StoredRun(path, recipe, versions, is_baseline(path))


def load_run_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a run directory, to go on with the run: relative paths start where its first recipe was."""
    recipe = _own_recipe(path, "a recipe file, or the folder that train printed", overrides)
    origin = read_own_json(path / layout.ORIGIN)
    if origin is None or not isinstance(origin.get("recipe_folder"), str):
        raise UserError(f"{path / layout.ORIGIN}: damaged (it names no recipe_folder)")
    return recipe.model_copy(update={"output_dir": str(path)}).placed_in(Path(origin["recipe_folder"]))


def recipe_only(path: Path) -> str:
    """What to do with a folder that holds a recipe and no run; empty for any other."""
    if is_run(path) or not holds_recipe(path):
        return ""
    run = layout.RUNS / path.resolve().name
    known = f"; its run is in {run}" if is_run(run) else ""
    return f"holds a recipe but no run; use: teamtr-lora train {path / layout.RECIPE}{known}"


def run_like(path: Path) -> str | None:
    """The folder beside it whose name it is a slip of."""
    if os.path.exists(path) or not os.path.isdir(path.parent):  # os.path's, as Path's raises for a name that cannot be
        return None
    like = nearest(path.name, [folder.name for folder in path.parent.glob("[!.]*") if folder.is_dir()])
    return str(path.parent / like) if like else None


def _own_recipe(path: Path, wanted: str, overrides: Sequence[str] = ()) -> Recipe:
    if not is_run(path):
        like = run_like(path)
        missing = f"no run here ({layout.RECIPE} is missing); give {wanted}{f'; did you mean {like!r}?' if like else ''}"
        raise UserError(f"{path}: {recipe_only(path) or missing}")
    refuse_links(path, layout.OWN_NAMES)
    return load_recipe(path / layout.RECIPE, overrides)


def _required(path: Path, name: str) -> dict[str, Any]:
    found = read_own_json(path / name)
    if found is None:
        raise UserError(f"{path}: the run has no team yet ({name} is missing); let train reach its first stage")
    return found
