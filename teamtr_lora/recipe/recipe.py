"""The whole recipe.

`TeamTRConfig` is what a script passes beside its own team and data; `Recipe` adds what a file needs to be complete.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from teamtr_lora.algorithm.variants.chosen import Variants
from teamtr_lora.algorithm.variants.matched import stage_budget
from teamtr_lora.common.help_page import HelpPage, list_keys
from teamtr_lora.common.program import in_a_recipe, in_a_script
from teamtr_lora.common.settings import FOLDER, Mistake, Section, refuse
from teamtr_lora.recipe.measuring_sections import DiagnosticsSection, EvaluationSection, SwapSection, TrackingSection
from teamtr_lora.recipe.rollout_section import RolloutSection, engine_mistakes
from teamtr_lora.recipe.team_sections import BaseSection, TeamSection
from teamtr_lora.recipe.training_sections import TrainingSection, TrustRegionSection
from teamtr_lora.tasks.table import BY_NAME, DEFAULT, TaskSection


class TeamTRConfig(Section, metaclass=HelpPage):
    """The settings of a run: everything but the base, the team and the task. What a script passes to TeamTRTrainer as `args`.

    Keys may be named without their section: `TeamTRConfig(stages=2, delta=0.02)` is the same as
    `TeamTRConfig(training={"stages": 2}, trust_region={"delta": 0.02})`. A name that several sections have is taken for the
    first of them: `temperature` is the rollout's. A mistake raises RecipeError, which names every wrong key and its fix.

    `teamtr-lora keys` explains every key with its default. The sections and their keys:
    """

    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="Seed of everything random in the run.")
    output_dir: Annotated[str, Field(pattern=FOLDER)] | None = Field(
        default=None, description="The run directory itself; null chooses one under runs."
    )
    rollout: RolloutSection = Field(default_factory=RolloutSection, description="How episodes are sampled.")
    training: TrainingSection = Field(default_factory=TrainingSection, description="The stage loop and one agent's update.")
    trust_region: TrustRegionSection = Field(
        default_factory=TrustRegionSection, description="How far one update may move an agent."
    )
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection, description="Measuring the team on held-out items.")
    diagnostics: DiagnosticsSection = Field(default_factory=DiagnosticsSection, description="What is written for people to read.")
    tracking: TrackingSection = Field(default_factory=TrackingSection, description="Experiment trackers.")
    swap: SwapSection = Field(default_factory=SwapSection, description="How `swap` and `rebase` replace agents.")

    def __init__(self, **values: Any) -> None:
        if type(self) is not TeamTRConfig:
            super().__init__(**values)
            return
        from teamtr_lora.recipe.config import config_error, into_sections  # which reads the classes of this module

        placed, twice = into_sections(values)
        try:
            super().__init__(**placed)
        except ValidationError as error:
            raise config_error(placed, twice) from error
        if twice:
            raise config_error(placed, twice)

    def unmeasured(self) -> list[str]:
        """What `certify`, `diagnose` and reports will not show of a run with these settings, each with the setting."""
        looked, evaluated, probes = self.diagnostics, self.evaluation.every_stages, "diagnostics.probe_every_stages"
        left_out = (
            ("staleness, importance weights, token shift", probes, not looked.probe_every_stages),
            ("token shift", "diagnostics.token_shift_ranks", looked.probe_every_stages > 0 == looked.token_shift_ranks),
            ("the largest gain in the region", probes, not looked.probe_every_stages and looked.fisher_messages),
            ("the largest gain in the region", "diagnostics.fisher_messages", not looked.fisher_messages),
            ("spread of the KL, monitors, drift of contexts", "diagnostics.from_updates", not looked.from_updates),
            ("gain and slack of each stage", "evaluation.every_stages", evaluated != 1 and self.training.stages > 1),
            ("transcripts", "diagnostics.save_episodes", looked.save_episodes in ("none", 0)),
        )
        return [f"{what} ({self.written(key)})" for what, key, missing in left_out if missing]

    def written(self, key: str, value: Any = None) -> str:
        """A key, such as rollout.temperature, as the user of these settings writes it, for advice."""
        return in_a_script(key, value)

    @model_validator(mode="after")
    def _gate_has_groups(self) -> Self:
        items, share = self.rollout.items_per_stage, self.trust_region.holdout
        held = Variants.of(self).reuse.judging_items(items)
        setting = f"rollout.items_per_stage = {items} with trust_region.holdout = {share:g} holds out {held} of {items} items"
        where = ("trust_region", "holdout")
        if held < 2:
            fix = f"use rollout.items_per_stage >= {_items_for_two(share)}"
            if items > 2:
                fix += f", or trust_region.holdout = {math.ceil(200 / items) / 100:g} (default 0.25)"
            refuse(
                "trust_region", [(where, share, f"{setting}; a clustered standard error needs at least two held-out groups", fix)]
            )
        if held >= items:
            fix = "use a larger rollout.items_per_stage or a smaller trust_region.holdout (default 0.25)"
            refuse("trust_region", [(where, share, f"{setting}; nothing is left for the gradient", fix)])
        return self


list_keys(TeamTRConfig)


def _items_for_two(holdout: float) -> int:
    """Fewest items per stage of which two are held out and one is left."""
    items = max(3, int(1.5 / holdout))
    while round(items * holdout) < 2:
        items += 1
    return items


class Recipe(TeamTRConfig):
    """A complete run: the settings of TeamTRConfig, and with them the base, the team and the task.

    `load_recipe` reads one from a file, `TeamTRTrainer.from_recipe` trains it. Its sections are attributes:
    `recipe.training.stages`, `recipe.team.agents[0].lora.rank`, `recipe.task.name`. A recipe is checked as a whole when it is
    made and is not meant to be changed afterwards; give `load_recipe` overrides instead.
    """

    base: BaseSection = Field(default_factory=BaseSection, description="The frozen model that every agent shares.")
    team: TeamSection = Field(description="The agents and how they talk.")
    task: TaskSection = Field(
        default_factory=BY_NAME[DEFAULT], description="What the team is trained on; `name` selects the kind."
    )

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        mistakes: list[Mistake] = list(engine_mistakes(self))
        names = [agent.name for agent in self.team.agents]
        mistakes += self._shares_are_even()
        if isinstance(self.training.order, list) and sorted(self.training.order) != sorted(names):
            mistakes.append((("training", "order"), self.training.order, "an explicit order names every agent once",
                             f"use each of {', '.join(names)} once"))  # fmt: skip
        refuse("recipe", mistakes)
        return self

    def _shares_are_even(self) -> list[Mistake]:
        """With matched: stage every rollout of a stage gets as many items, and enough for its gate."""
        items = self.rollout.items_per_stage
        rollouts, share = self.stage_budget()
        held = Variants.of(self).reuse.judging_items(share)
        if share == items or (share * rollouts == items and 2 <= held < share):
            return []
        holdout = self.trust_region.holdout
        least = max(_items_for_two(holdout), int(0.5 / (1 - holdout)) + 2, -(-items // rollouts))
        fix = f"use {least * rollouts}, or training.matched=update"
        wrong = f"matched: stage cannot share {items} items among the {rollouts} rollouts of a stage"
        if share * rollouts == items:
            wrong = f"matched: stage gives each of the {rollouts} rollouts {share} items, too few for two held out and one left"
        return [(("rollout", "items_per_stage"), items, wrong, fix)]

    def stage_budget(self) -> tuple[int, int]:
        """(rollouts of a stage, items that each of them plays)."""
        return stage_budget(self.training, self.rollout.items_per_stage, len(self.team.agents))

    def written(self, key: str, value: Any = None) -> str:
        return (in_a_script if self.is_a_scripts else in_a_recipe)(key, value)

    _folder: Path = PrivateAttr(default_factory=Path)
    _is_a_scripts: bool = PrivateAttr(default=False)

    def of_a_script(self) -> Self:
        """The same recipe, of which advice speaks as of a script's settings."""
        self._is_a_scripts = True
        return self

    @property
    def is_a_scripts(self) -> bool:
        return self._is_a_scripts

    @property
    def folder(self) -> Path:
        """Where the recipe was found: datasets and reward modules are named relative to it. Never dumped."""
        return self._folder

    def placed_in(self, folder: Path) -> Self:
        """The same recipe, whose relative paths now start at `folder`."""
        copy = self.model_copy(deep=True)
        copy._folder = folder
        return copy

    def with_loras(self, loras: Mapping[str, Mapping[str, Any]]) -> Self:
        """The same recipe with other adapters for the agents named, checked as a whole."""
        data = self.model_dump()
        for agent in data["team"]["agents"]:
            agent["lora"] = dict(loras.get(agent["name"], agent["lora"]))
        return type(self).model_validate(data).placed_in(self.folder)

    def __eq__(self, other: object) -> bool:
        # Ignores the folder a recipe was read from; pydantic would compare that private attribute too.
        if not isinstance(other, Recipe):
            return NotImplemented
        return self.model_dump() == other.model_dump()
