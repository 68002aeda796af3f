"""Sections `training` and `trust_region`: the stage loop, one agent's update, and how far it may go."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from teamtr_lora.algorithm.variants.advantage_kinds import ADVANTAGES
from teamtr_lora.algorithm.variants.gain import GAINS
from teamtr_lora.algorithm.variants.matched import MATCHED
from teamtr_lora.algorithm.variants.optimizer_kinds import OPTIMIZERS
from teamtr_lora.algorithm.variants.ordering import ORDERS
from teamtr_lora.algorithm.variants.publishing import UPDATES
from teamtr_lora.algorithm.variants.radii import RADII
from teamtr_lora.algorithm.variants.ratio import RATIOS
from teamtr_lora.algorithm.variants.reduction import REDUCTIONS
from teamtr_lora.algorithm.variants.region import REGIONS
from teamtr_lora.algorithm.variants.resampling import RESAMPLING
from teamtr_lora.algorithm.variants.reuse import REUSE
from teamtr_lora.algorithm.variants.schedule import SCHEDULES
from teamtr_lora.common.settings import Section, Text, refuse
from teamtr_lora.recipe.choices import OneOf

_ORDER, _RESAMPLING, _UPDATE, _MATCHED = OneOf(ORDERS), OneOf(RESAMPLING), OneOf(UPDATES), OneOf(MATCHED)
_ADVANTAGE, _RATIO, _OPTIMIZER, _REUSE = OneOf(ADVANTAGES), OneOf(RATIOS), OneOf(OPTIMIZERS), OneOf(REUSE)
_KIND, _RADII, _REDUCTION, _GAIN = OneOf(REGIONS), OneOf(RADII), OneOf(REDUCTIONS), OneOf(GAINS)
_SCHEDULE = OneOf(SCHEDULES)


class TrainingSection(Section):
    """The stage loop and one agent's update."""

    stages: int = Field(default=8, ge=1, description="Stages in the run; in each stage every agent is updated once.")
    order: Annotated[str, _ORDER] | Annotated[list[Text], Field(min_length=1)] = Field(
        default="random",
        description="Order in which a stage updates the agents: a list of all their names, or by a rule",
        json_schema_extra=_ORDER.in_words,
    )
    resampling: Annotated[str, _RESAMPLING] = Field(
        default="every_update",
        description="When the team is sampled again within a stage",
        json_schema_extra=_RESAMPLING.in_words,
    )
    resample_every: int = Field(default=2, ge=1, description="resampling: every_k only. Updates per rollout.")
    update: Annotated[str, _UPDATE] = Field(
        default="sequential", description="When an agent's update is played by the team", json_schema_extra=_UPDATE.in_words
    )
    matched: Annotated[str, _MATCHED] = Field(
        default="update", description="What items_per_stage times episodes_per_item counts", json_schema_extra=_MATCHED.in_words
    )
    reuse: Annotated[str, _REUSE] = Field(
        default="window",
        description="Which episodes an update learns from and which judge it, with resampling: every_update",
        json_schema_extra=_REUSE.in_words,
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
        default="group", description="What an episode's return is worth beside its group's", json_schema_extra=_ADVANTAGE.in_words
    )
    learning_rate: Literal["auto"] | Annotated[float, Field(gt=0)] = Field(
        default="auto",
        description="Optimizer step size. auto: found for each agent by a probing step, and kept so that the inner epochs end "
        "at the edge of the trust region (kinds without a gate keep initial_learning_rate).",
    )
    initial_learning_rate: float = Field(
        default=1e-3, gt=0, description="learning_rate: auto only. Size of the first probing step."
    )
    schedule: Annotated[str, _SCHEDULE] = Field(
        default="constant",
        description="What a learning_rate that is a number does over the stages",
        json_schema_extra=_SCHEDULE.in_words,
    )
    optimizer: Annotated[str, _OPTIMIZER] = Field(
        default="adamw", description="Optimizer; the 8-bit ones need the extra `quant`", json_schema_extra=_OPTIMIZER.in_words
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
        default="message", description="Unit of the importance ratio in the surrogate", json_schema_extra=_RATIO.in_words
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

    @property
    def trl_schedule(self) -> str:
        """What TRL calls the schedule."""
        return SCHEDULES[self.schedule].trl

    @property
    def rate_changes(self) -> bool:
        """Whether the number of stages decides what the learning rate of each is."""
        return SCHEDULES[self.schedule].changes

    def rate_in(self, stage: int) -> float:
        """The learning rate of a stage, as far as the recipe alone tells."""
        return self.starting_rate * SCHEDULES[self.schedule]().share(stage, self.stages)

    @model_validator(mode="after")
    def _found_rates_have_no_schedule(self) -> Self:
        if self.learning_rate == "auto" and self.rate_changes:
            wrong = "a learning rate that is found anew in every update follows no schedule"
            refuse(
                "training",
                [(("schedule",), self.schedule, wrong, "set training.learning_rate to a number, or training.schedule=constant")],
            )
        return self

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
        default="gate", description="What holds an update back; every kind is measured", json_schema_extra=_KIND.in_words
    )
    delta: float = Field(
        default=0.01, gt=0, description="Radius of the trust region in nats of KL, per message or per token as `reduction` says."
    )
    radii: Annotated[str, _RADII] = Field(default="equal", description="Each agent's radius", json_schema_extra=_RADII.in_words)
    reduction: Annotated[str, _REDUCTION] = Field(
        default="message_sum", description="How the KL of a message counts", json_schema_extra=_REDUCTION.in_words
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
        default="veto", description="What a gating kind asks of a step's surrogate gain", json_schema_extra=_GAIN.in_words
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
