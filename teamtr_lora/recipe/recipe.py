"""How it learns: the remaining sections, and the whole recipe.

`TeamTRConfig` is what a script passes beside its own team and data; `Recipe` adds what a file needs to be complete.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from teamtr_lora.algorithm.variants.advantage_kinds import ADVANTAGES
from teamtr_lora.algorithm.variants.chosen import Variants
from teamtr_lora.algorithm.variants.gain import GAINS
from teamtr_lora.algorithm.variants.matched import MATCHED, stage_budget
from teamtr_lora.algorithm.variants.optimizer_kinds import OPTIMIZERS
from teamtr_lora.algorithm.variants.ordering import ORDERS
from teamtr_lora.algorithm.variants.publishing import UPDATES
from teamtr_lora.algorithm.variants.radii import RADII
from teamtr_lora.algorithm.variants.ratio import RATIOS
from teamtr_lora.algorithm.variants.reduction import REDUCTIONS
from teamtr_lora.algorithm.variants.region import REGIONS
from teamtr_lora.algorithm.variants.resampling import RESAMPLING
from teamtr_lora.algorithm.variants.reuse import REUSE
from teamtr_lora.common.help_page import HelpPage, list_keys
from teamtr_lora.common.program import in_a_recipe, in_a_script
from teamtr_lora.common.settings import FOLDER, Mistake, Section, Text, refuse
from teamtr_lora.recipe.choices import OneOf
from teamtr_lora.recipe.measuring_sections import DiagnosticsSection, EvaluationSection, SwapSection
from teamtr_lora.recipe.rollout_section import RolloutSection, engine_mistakes
from teamtr_lora.recipe.team_sections import BaseSection, TeamSection
from teamtr_lora.tasks.table import BY_NAME, DEFAULT, TaskSection

_ORDER, _RESAMPLING, _UPDATE, _MATCHED = OneOf(ORDERS), OneOf(RESAMPLING), OneOf(UPDATES), OneOf(MATCHED)
_ADVANTAGE, _RATIO, _OPTIMIZER, _REUSE = OneOf(ADVANTAGES), OneOf(RATIOS), OneOf(OPTIMIZERS), OneOf(REUSE)
_KIND, _RADII, _REDUCTION, _GAIN = OneOf(REGIONS), OneOf(RADII), OneOf(REDUCTIONS), OneOf(GAINS)


class TrainingSection(Section):
    """The stage loop and one agent's update."""

    stages: int = Field(default=8, ge=1, description="Stages in the run; in each stage every agent is updated once.")
    order: Annotated[str, _ORDER] | Annotated[list[Text], Field(min_length=1)] = Field(
        default="random",
        description=_ORDER.described("Order in which a stage updates the agents") + " Or a list of all agents' names.",
    )
    resampling: Annotated[str, _RESAMPLING] = Field(
        default="every_update", description=_RESAMPLING.described("When the team is sampled again within a stage")
    )
    resample_every: int = Field(default=2, ge=1, description="resampling: every_k only. Updates per rollout.")
    update: Annotated[str, _UPDATE] = Field(
        default="sequential", description=_UPDATE.described("When an agent's update is played by the team")
    )
    matched: Annotated[str, _MATCHED] = Field(
        default="update", description=_MATCHED.described("What items_per_stage times episodes_per_item counts")
    )
    reuse: Annotated[str, _REUSE] = Field(
        default="window",
        description=_REUSE.described("Which episodes an update learns from and which judge it, with resampling: every_update"),
    )
    window: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="reuse: window only. Rollouts before the newest one that an update learns from; more of them make a better "
        "direction of the same episodes, and take longer. auto: one less than there are agents, or two each with matched: stage "
        "and a delta of at most 0.05.",
    )
    least_ess: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Earlier rollouts are learned from while the effective sample size of their weights is at least this share.",
    )
    advantage: Annotated[str, _ADVANTAGE] = Field(
        default="group", description=_ADVANTAGE.described("What an episode's return is worth beside its group's")
    )
    learning_rate: Literal["auto"] | Annotated[float, Field(gt=0)] = Field(
        default="auto",
        description="Optimizer step size. auto: found for each agent by a probing step, and kept so that the inner epochs end "
        "at the edge of the trust region (kinds without a gate keep initial_learning_rate).",
    )
    initial_learning_rate: float = Field(
        default=1e-3, gt=0, description="learning_rate: auto only. Size of the first probing step."
    )
    optimizer: Annotated[str, _OPTIMIZER] = Field(
        default="adamw", description=_OPTIMIZER.described("Optimizer; the 8-bit ones need the extra `quant`")
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="Decoupled weight decay on the adapter weights, per step as a multiple of the learning rate.",
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="Largest gradient norm; longer gradients are scaled down to it.")
    inner_epochs: int = Field(default=4, ge=1, description="Passes over an update's episodes, less the held-out ones.")
    minibatches_per_epoch: int = Field(default=1, ge=1, description="Optimizer steps per pass.")
    tokens_per_microbatch: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="Most tokens in one forward pass, padding included; gradients accumulate over passes. auto: 1024 on a CPU; "
        "on a GPU as many as keep it busy, or as fit beside the engine.",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory, more time."
    )
    shard: Literal["auto", "never", "always"] = Field(
        default="auto",
        description="Whether several processes split the frozen base among them (FSDP2). auto: where it does not fit one GPU "
        "beside the engine and the smallest update.",
    )
    compile: bool = Field(
        default=True,
        description="On a GPU in half precision: compile the decoder layers of training passes, which then "
        "take less time; the first update waits for it.",
    )
    discount: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = Field(
        default="auto", description="Discount per message; auto is 1 - 1/H with H messages per episode."
    )
    ratio: Annotated[str, _RATIO] = Field(
        default="message", description=_RATIO.described("Unit of the importance ratio in the surrogate")
    )
    clip_ratio: float = Field(
        default=0.2, gt=0, lt=1, description="Surrogate clip range: ratios outside 1 +/- this earn nothing more."
    )
    clip_ratio_high: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="How far above 1 a ratio may go before it earns nothing more (DAPO: 0.28); null: clip_ratio."
    )
    advantage_clip: float = Field(default=3.0, gt=0, description="Largest advantage, in standard deviations of the group.")
    advantage_eps: float = Field(default=1e-6, gt=0, description="Added to the group's reward variance, inside the root.")
    min_informative_groups: int = Field(
        default=1,
        ge=1,
        description="Fewest groups with reward variance among those of the gradient; with fewer an update is skipped.",
    )
    stop_after_idle_stages: int = Field(
        default=2,
        ge=0,
        description="End the run after this many stages in a row in which every update was skipped; 0 never does.",
    )
    head_chunk_tokens: int = Field(
        default=1024, ge=1, description="Tokens per chunk of the output head; bounds memory for logits."
    )

    @property
    def starting_rate(self) -> float:
        """The learning rate as far as the recipe alone tells."""
        return self.initial_learning_rate if self.learning_rate == "auto" else self.learning_rate

    @property
    def trl_optimizer(self) -> str:
        """What TRL calls the optimizer."""
        return OPTIMIZERS[self.optimizer].trl

    @model_validator(mode="after")
    def _joint_has_one_batch(self) -> Self:
        needed = UPDATES[self.update].resampling
        if needed not in (None, self.resampling):
            wrong = f"a {self.update} update has one batch a stage, and training.resampling is {self.resampling}"
            refuse("training", [(("update",), self.update, wrong, f"set training.resampling={needed}")])
        return self


class TrustRegionSection(Section):
    """How far one update may move an agent, and how that is measured."""

    kind: Annotated[str, _KIND] = Field(
        default="gate", description=_KIND.described("What holds an update back; every kind is measured")
    )
    delta: float = Field(
        default=0.01, gt=0, description="Radius of the trust region in nats of KL, per message or per token as `reduction` says."
    )
    radii: Annotated[str, _RADII] = Field(default="equal", description=_RADII.described("Each agent's radius"))
    reduction: Annotated[str, _REDUCTION] = Field(
        default="message_sum", description=_REDUCTION.described("How the KL of a message counts")
    )
    estimator: Literal["exact", "k3", "k1"] = Field(
        default="exact", description="KL estimator: exact sums over the vocabulary; k3 and k1 use the sampled token only."
    )
    holdout: float = Field(
        default=0.25, gt=0, lt=1, description="Share of a rollout's items kept out of the gradient and used by the gate."
    )
    confidence: float = Field(
        default=0.95, gt=0.5, lt=1, description="One-sided confidence of the KL's upper bound that the gate compares with delta."
    )
    step: Literal["fill", "shrink"] = Field(
        default="fill", description="fill: stretch or shrink the step to fill the region; shrink: only ever shrink it."
    )
    max_stretch: float = Field(default=1.5, ge=1, description="step: fill only. Largest factor by which a step is stretched.")
    backtracks: int = Field(default=6, ge=1, description="Most step lengths measured per update, the whole step included.")
    beta_initial: float = Field(
        default=0.1,
        ge=0,
        description="Weight of the KL penalty at first, per agent: penalty_fixed keeps it, none has no penalty, all other kinds "
        "adapt it.",
    )
    gain: Annotated[str, _GAIN] = Field(
        default="veto", description=_GAIN.described("What a gating kind asks of a step's surrogate gain")
    )
    gate_precision: Literal["auto", "fp32", "tf32"] = Field(
        default="auto",
        description="Arithmetic of the gate's forward passes on a GPU. auto: TF32 where the radius is at least five times the "
        "smallest KL that it can measure, else strict float32.",
    )
    judging_episodes: int = Field(
        default=64, ge=2, description="Most episodes that the gate reads, of all judging groups equally many (one at least)."
    )

    @model_validator(mode="after")
    def _one_rule_for_the_radius(self) -> Self:
        kinds = RADII[self.radii].kinds
        if kinds is not None and self.kind not in kinds:
            fix = f"keep radii: equal (the default), or kind: {kinds[0]}"
            refuse("trust_region", [(("radii",), self.radii, f"does nothing useful with kind {self.kind}", fix)])
        return self


class TrackingSection(Section):
    """Experiment trackers, beside the run directory's own metrics."""

    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        default_factory=list,
        description="Trackers to report to, each installed by its own name (pip install wandb): some 40 numbers by agent, the "
        "recipe as flat keys, and sample transcripts.",
    )
    project: str = Field(default="teamtr-lora", min_length=1, description="Project name shown in the trackers.")
    run_name: Text | None = Field(default=None, description="The run's name there; null takes the run directory's.")
    group: Text | None = Field(default=None, description="Group that the run is shown in, where the tracker has groups.")
    tags: list[Text] = Field(default_factory=list, description="Tags of the run, where the tracker has tags.")


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
