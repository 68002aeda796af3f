"""What a run writes about itself, and what that may cost."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from teamtr_lora.common.settings import Section


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
