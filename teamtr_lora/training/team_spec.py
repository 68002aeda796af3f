"""`TeamSpec`: a team as a script describes it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError

from teamtr_lora.base.frozen_base import base_facts, base_identity
from teamtr_lora.base.source import beside, resolve
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.help_page import HelpPage
from teamtr_lora.common.program import said
from teamtr_lora.recipe import (
    AgentSection,
    BaseSection,
    ProtocolSection,
    Recipe,
    RecipeError,
    RouterSection,
    TeamSection,
    problems,
)
from teamtr_lora.registry.fit import modules_of
from teamtr_lora.registry.stored import StoredTeam, find_team


class TeamSpec(BaseModel, metaclass=HelpPage):
    """A team for a script: `TeamSpec(base={"source": "nano"}, agents=[{"name": "planner", "role": "..."}, ...])`.

    base      the frozen model that every agent shares: source, precision, device, quantization, revision
    agents    the members in speaking order, each {name, role, lora: {rank, alpha, targets, rslora, dora}}
    protocol  what each agent sees of the conversation: view, system, reasoning_tags, tool_calls, context_tokens, on_overflow
    router    who speaks when: kind, rounds, sequence, done_marker, judge, answer, callable
    own_answer_share    how much of what an agent learns from is the reward of its own last answer, from 0 to 1
    recombine           whether a message is credited with its mean reward beside the others' messages of its whole group

    These are the sections of a recipe, which `teamtr-lora keys base` and `keys team` explain. A mistake in them raises
    RecipeError, which names every wrong key and its fix.
    """

    model_config = ConfigDict(extra="forbid")
    base: BaseSection = Field(default_factory=BaseSection)
    agents: list[AgentSection]
    protocol: ProtocolSection = Field(default_factory=ProtocolSection)
    router: RouterSection = Field(default_factory=RouterSection)
    own_answer_share: float = 0.0
    recombine: StrictBool = False

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _team_error(values, error) from error


def team_parts(team: TeamSpec | dict[str, Any] | str | Path) -> tuple[dict[str, Any], dict[str, Any], Path | None]:
    """base section, team section, and the run or stored team whose adapters the team starts from."""
    if isinstance(team, (str, Path)):
        recipe = find_team(Path(team), scored=False).recipe
        base = recipe.base.model_dump() | {"source": beside(recipe.base.source, recipe.folder)}
        return base, recipe.team.model_dump(), Path(team)
    if not isinstance(team, (TeamSpec, dict)):
        raise UserError(f"team: give a TeamSpec, a dict of its fields or the folder of a run, not {type(team).__name__}")
    spec = team if isinstance(team, TeamSpec) else TeamSpec(**team)
    try:
        section = TeamSection(**{name: getattr(spec, name) for name in TeamSection.model_fields})
    except ValidationError as error:  # the agents' names and the router: each is right by itself, not all together
        raise _team_error(spec.model_dump(), error) from error
    return spec.base.model_dump(), section.model_dump(), None


def start_of(recipe: Recipe, source: Path) -> StoredTeam:
    """The run or stored team whose adapters a run of `recipe` begins with; UserError where they do not fit it."""
    stored = find_team(source, scored=False)
    theirs, where = stored.recipe.team, f"{said(cli='--from', python='team=')} {source}"
    names, wanted = sorted(agent.name for agent in theirs.agents), sorted(agent.name for agent in recipe.team.agents)
    if names != wanted:
        raise UserError(
            f"{where}: has adapters for the agents {', '.join(names)}, and the recipe's are {', '.join(wanted)}; "
            "call the recipe's agents (team.agents.*.name) by those names"
        )
    bases = [(beside(made.base.source, made.folder), made.base.revision) for made in (stored.recipe, recipe)]
    if bases[0] != bases[1] and len({base_identity(resolve(*base))["weights_sha256"] for base in bases}) > 1:
        raise UserError(
            f"{where}: its adapters are for base.source = {bases[0][0]}, and the recipe's is {bases[1][0]}; "
            "use that base, or move the team to another one with rebase"
        )
    keys: list[str] = []
    for name in names:
        had, wants = theirs.lora_of(name), recipe.team.lora_of(name)
        same = had.targets == wants.targets or _mean_the_same(had.targets, wants.targets, bases[1])
        old, new = had.model_dump(), wants.model_dump() | ({"targets": had.targets} if same else {})
        keys += [f"team.agents.{name}.lora.{key}={_as_yaml(value)}" for key, value in old.items() if value != new[key]]
    if keys:
        raise UserError(f"{where}: its adapters have other LoRA settings than the recipe; give {shlex.join(keys)}")
    return stored


def _mean_the_same(targets: str | list[str], others: str | list[str], base: tuple[str, str | None]) -> bool:
    """Whether they name the same modules of the base: all-linear is the list of all of them."""
    facts = base_facts(resolve(*base))
    return modules_of(targets, facts) == modules_of(others, facts)


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _team_error(values: dict[str, Any], error: ValidationError) -> UserError:
    """What is wrong with a team, in the words for a recipe that has it."""
    data = {"base": values.get("base", {}), "team": {key: value for key, value in values.items() if key != "base"}}
    found = [problem.of_a_script("TeamSpec") for problem in problems(_sections_as_dicts(data))]
    return RecipeError(found, "TeamSpec") if found else UserError(f"TeamSpec: {error.errors()[0]['msg']}")


def _sections_as_dicts(value: Any) -> Any:
    """Sections as the mappings that they were made of."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, dict):
        return {key: _sections_as_dicts(item) for key, item in value.items()}
    return [_sections_as_dicts(item) for item in value] if isinstance(value, list) else value
