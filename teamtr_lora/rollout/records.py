"""Teams and episodes on disk: what a run directory says about its team, and how a transcript is written down."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.errors import UserError
from teamtr_lora.recipe import Recipe, load_recipe
from teamtr_lora.team import Episode


def episode_record(episode: Episode) -> dict[str, Any]:
    """A readable transcript with token counts and adapter versions."""
    return {
        "item": episode.item_id,
        "group": episode.group,
        "prompt": episode.prompt,
        "reward": episode.reward,
        "success": episode.success,
        "ended": episode.ended,
        "messages": [
            {
                "agent": m.agent,
                "text": m.text,
                "version": m.version,
                "prompt_tokens": len(m.prompt_ids),
                "tokens": len(m.token_ids),
                "finish": m.finish,
                "feedback": feedback,
            }
            for m, feedback in zip(episode.messages, episode.feedback, strict=True)
        ],
    }


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
    return recipe, versions
