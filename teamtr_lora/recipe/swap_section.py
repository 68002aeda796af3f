"""How an agent is replaced: the swap section of a recipe."""

from __future__ import annotations

from pydantic import Field

from teamtr_lora.common.settings import Section


class SwapSection(Section):
    """Replacing an agent (`teamtr-lora swap`) or the base (`rebase`); training does not read it."""

    stage0: bool = Field(
        default=True,
        description="Align the new adapter with the old agent before it takes its place (Stage-0 distillation).",
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
