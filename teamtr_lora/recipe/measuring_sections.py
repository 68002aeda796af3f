"""The sections that do not change what is learned: evaluation, diagnostics, swap and tracking."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from teamtr_lora.common.settings import Section, Text
from teamtr_lora.recipe.rollout_section import RolloutSection


class EvaluationSection(Section):
    """Measuring the team on held-out items."""

    every_stages: int = Field(
        default=1, ge=0, description="Stages between evaluations; 0 evaluates only before and after the run."
    )
    items: int = Field(
        default=256,
        ge=1,
        description="Held-out items per evaluation: all of a smaller split, at most a million of a task that makes its own.",
    )
    samples_per_item: int | None = Field(
        default=None,
        ge=1,
        description="Episodes per item (k of avg@k and pass@k); null is 1 while training, and in `eval` the paper's number for "
        "the task's benchmark (64 for AIME and ZebraLogic, 4 for MATH-500, ...), 1 for a task of no benchmark.",
    )
    temperature: float | None = Field(
        default=None, ge=0, description="Sampling temperature; null takes the rollout's, 0 is greedy."
    )

    def due(self, stage: int, stages: int) -> bool:
        """Whether the team is measured after this stage; always after the last."""
        return stage >= stages or (self.every_stages > 0 and stage % self.every_stages == 0)

    def sampled_at(self, rollout: RolloutSection) -> float:
        """The temperature of an evaluation."""
        return rollout.temperature if self.temperature is None else self.temperature

    @property
    def samples_in_training(self) -> int:
        return self.samples_per_item or 1


class DiagnosticsSection(Section):
    """What is written for people to read, and what measuring it may cost. None of it changes what is learned."""

    save_episodes: Literal["all", "none"] | Annotated[int, Field(ge=0)] = Field(
        default="all", description="Episodes per update written to the run's episodes folder: all, none or a number."
    )
    from_updates: bool = Field(
        default=True,
        description="With every update, what its own numbers tell: KL by message and group, the reliability of the KL monitors, "
        "and the drift of contexts since the stage began. Costs well under 5% of an update.",
    )
    probe_every_stages: int = Field(
        default=0,
        ge=0,
        description="Stages between probes, in which every update is also measured on episodes of their own, by the team that "
        "began the stage and by the team as it is: Gap_i, Delta_stale, D_occ, importance weights. 0 never probes.",
    )
    probe_items: int = Field(
        default=32,
        ge=2,
        description="Items of a probe: coming ones that this stage does not learn from, as far as the split has them; where it "
        "leaves fewer than eight (or than are wanted), the stage's own are among them.",
    )
    probe_episodes_per_item: int = Field(default=4, ge=2, description="Episodes per item of a probe.")
    probe_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Largest share of the run's time that probes may take: while they have taken more, one that is due is left "
        "out (so it depends on the machine which stages are probed). null: no limit.",
    )
    token_shift_ranks: int = Field(
        default=10,
        ge=0,
        description="Probes only: ranks by which the first accepted update's change of token probabilities is shown, for the "
        "step taken and for one far out of region. 0 leaves it out.",
    )
    fisher_messages: int = Field(
        default=0,
        ge=0,
        description="Probes only: messages whose gradients estimate the largest gain that the trust region allows "
        "(thm:info-lower-stage), one backward pass each; fewer than 4 give none. 0 leaves it out.",
    )


class SwapSection(Section):
    """Replacing an agent (`teamtr-lora swap`) or the base (`rebase`); training does not read it."""

    stage0: bool = Field(
        default=True, description="Align the new adapter with the old agent before it takes its place (Stage-0 distillation)."
    )
    require_protocol: bool = Field(
        default=True,
        description="Refuse a swap where the protocol leaves something to each agent's own habits: no explicit system text, "
        "or (for adapters from elsewhere) kept reasoning tags or tool calls as written.",
    )
    probe_contexts: int = Field(
        default=500, ge=4, description="Contexts in which the agent speaks, half to learn from and half held out."
    )
    delta_align: float | None = Field(
        default=None,
        gt=0,
        description="Radius that alignment must reach on the held-out contexts, in the units of trust_region.delta; null takes "
        "trust_region.delta.",
    )
    align_rate: float = Field(
        default=2e-3, gt=0, description="First step size of the alignment; halved where it makes no progress."
    )
    align_steps: int = Field(default=600, ge=1, description="Most optimizer steps of the alignment.")
    contexts_per_step: int = Field(default=64, ge=1, description="Probe contexts per optimizer step.")


class TrackingSection(Section):
    """Experiment trackers, beside the run directory's own metrics."""

    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        default=[],
        description="Trackers to report to, each installed by its own name (pip install wandb): some 40 numbers by agent, the "
        "recipe as flat keys, and sample transcripts.",
    )
    project: str = Field(default="teamtr-lora", min_length=1, description="Project name shown in the trackers.")
    run_name: Text | None = Field(default=None, description="The run's name there; null takes the run directory's.")
    group: Text | None = Field(default=None, description="Group that the run is shown in, where the tracker has groups.")
    tags: list[Text] = Field(default=[], description="Tags of the run, where the tracker has tags.")
