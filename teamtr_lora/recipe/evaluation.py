"""How a team is measured."""

from __future__ import annotations

from pydantic import Field

from teamtr_lora.recipe.sections import Section


class EvaluationSection(Section):
    """Measuring the team on held-out items."""

    every_stages: int = Field(
        default=1, ge=0, description="Stages between evaluations; 0 evaluates only before and after the run."
    )
    items: int = Field(default=256, ge=1, description="Held-out items per evaluation.")
    samples_per_item: int = Field(default=1, ge=1, description="Episodes per item (k of avg@k and pass@k).")
    temperature: float | None = Field(
        default=None, ge=0, description="Sampling temperature; null takes the rollout's, 0 is greedy."
    )
