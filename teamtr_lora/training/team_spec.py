"""`TeamSpec`: a team as a script describes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError

from teamtr_lora.base.source import beside
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.help_page import HelpPage
from teamtr_lora.recipe import AgentSection, BaseSection, ProtocolSection, RecipeError, RouterSection, TeamSection, problems
from teamtr_lora.registry.stored import find_team


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
