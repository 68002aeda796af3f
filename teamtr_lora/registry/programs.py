"""Teams from elsewhere whose task runs programs of a dataset: the user says once, for each dataset, that they may be run.

What was said is kept in the user's own folder, not beside the team: whoever made the team could have written it there.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from teamtr_lora.base.source import cache_root
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import write_atomic
from teamtr_lora.common.trust import SANDBOXED, TRUST_PROGRAMS, UNPROTECTED
from teamtr_lora.recipe import Recipe
from teamtr_lora.runs.stored_run import load_run_recipe

logger = logging.getLogger(__name__)


def programs_of(recipe: Recipe) -> str | None:
    """The dataset whose programs the recipe's task runs, as one text; None where it runs none."""
    return recipe.task.programs_of(recipe.folder)


def recipe_to_go_on_with(run: Path, overrides: Sequence[str]) -> Recipe:
    """The recipe of a run that is to be resumed. A run directory may come from somebody else: its programs must be trusted."""
    recipe = load_run_recipe(run, overrides)
    check_programs(recipe, run)
    return recipe


def check_programs(recipe: Recipe, where: str | Path) -> None:
    """Refuses to play a stored team whose task runs programs of a dataset that the user has not trusted yet."""
    dataset = programs_of(recipe)
    if dataset is None or dataset in _trusted():
        return
    if os.environ.get(TRUST_PROGRAMS) not in (SANDBOXED, UNPROTECTED):
        raise UserError(
            f"{where}: its task {recipe.task.name!r} runs programs that come with the dataset {dataset}, in a sandbox "
            "(teamtr-lora docs security); if you trust that dataset, add --trust-programs once, or set "
            f"{TRUST_PROGRAMS}={SANDBOXED}"
        )
    trust_programs(recipe)


def trust_programs(recipe: Recipe) -> None:
    """Remembers that programs of the recipe's dataset may run: the user has said so, or trains on it."""
    dataset, known = programs_of(recipe), _trusted()
    if dataset is None or dataset in known:
        return
    try:
        write_atomic(_file(), json.dumps(sorted({*known, dataset}), indent=2) + "\n")
    except UserError as error:
        logger.warning("programs of %s run now, but that is not remembered: %s", dataset, error)


def _trusted() -> set[str]:
    try:
        known = json.loads(_file().read_bytes())
    except (OSError, ValueError, RecursionError):  # none yet, or a damaged one: asked again
        return set()
    return {name for name in known if isinstance(name, str)} if isinstance(known, list) else set()


def _file() -> Path:
    return cache_root() / "trusted_programs.json"
