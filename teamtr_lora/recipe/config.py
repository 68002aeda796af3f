"""What a script writes as `TeamTRConfig(stages=2, delta=0.02)`: keys put into their sections, mistakes in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from teamtr_lora.common.program import OF_THE_TRAINER
from teamtr_lora.common.settings import Section, nearest
from teamtr_lora.recipe.elsewhere import NAMES
from teamtr_lora.recipe.problems import check_settings
from teamtr_lora.recipe.recipe import Recipe, TeamTRConfig
from teamtr_lora.recipe.words import MISSING, Problem, RecipeError, key_text, own_names


class _Config(TeamTRConfig):
    """`TeamTRConfig` with pydantic's own errors, which `check_settings` puts into words."""


def into_sections(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Puts each bare key into the first section that has it.

    Also returns the keys that were given twice, each with the section that had it already. Unknown keys stay where they are:
    the check of the whole refuses them by name.
    """
    placed = {key: value.model_dump(exclude_unset=True) if isinstance(value, Section) else value for key, value in values.items()}
    twice: dict[str, str] = {}
    for key, value in values.items():
        owner = None if key in TeamTRConfig.model_fields else _section_of(key)
        given = placed.get(owner, {}) if owner else None
        if owner and isinstance(given, Mapping):  # a section that is no mapping stays for the check to refuse
            if key in given:
                twice[key] = owner
            del placed[key]
            placed[owner] = {**given, key: value}
    return placed, twice


def config_error(data: Mapping[str, Any], twice: Mapping[str, str]) -> RecipeError:
    """Every problem of what `into_sections` returned."""
    found = [
        Problem(key, data[section][key], f"is in {section}= too", f"give it once, as {key}= or in {section}=")
        for key, section in twice.items()
    ]
    known = {key: value for key, value in data.items() if key in TeamTRConfig.model_fields}
    found += [_unknown(key, value) for key, value in data.items() if key not in known and not _section_of(key)]
    wrong = check_settings(known, _Config)[1]
    return RecipeError([*found, *(problem.of_a_script("TeamTRConfig") for problem in wrong)], "TeamTRConfig")


def _sections() -> dict[str, type[Section]]:
    kinds = {name: field.annotation for name, field in TeamTRConfig.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}


def _section_of(key: str) -> str | None:
    return next((name for name, section in _sections().items() if key in section.model_fields), None)


def _unknown(key: str, value: Any) -> Problem:
    shown, hidden = key_text((key,)), MISSING if isinstance(value, (dict, list)) else value
    if key in OF_THE_TRAINER:
        return Problem(shown, hidden, "is no setting of TeamTRConfig", f"give it to TeamTRTrainer, as {key}=")
    if key in Recipe.model_fields:
        return Problem(shown, MISSING, "is no setting of TeamTRConfig", "give the team and the data to TeamTRTrainer")
    theirs, ours = NAMES.get(key), {name: path for name, path in own_names().items() if not path.startswith("task.")}
    meant = theirs.key if theirs else ours.get(key) or ours.get(nearest(key, ours) or "")
    fix = theirs.words(str) if theirs else "" if meant else "`teamtr-lora keys` lists the keys"
    return Problem(shown, hidden, "unknown key", fix, suggestion=meant).of_a_script("TeamTRConfig")
