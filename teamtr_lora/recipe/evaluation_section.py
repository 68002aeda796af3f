"""How a team is measured."""

from __future__ import annotations

from pydantic import Field

from teamtr_lora.common.settings import Section
from teamtr_lora.recipe.rollout_section import RolloutSection

# K of the paper's avg@K and pass@K (app:benchmarks); tau-bench by its pass@1 / pass@4 (sec:experiments). Other tasks: 1.
PAPER_SAMPLES = {
    "aime24": 64,
    "aime25": 64,
    "math500": 4,
    "zebralogic": 64,
    "autologi": 64,
    "arbench_gn": 25,
    "arbench_dc": 25,
    "arbench_sp": 25,
    "planbench_blocksworld": 8,
    "tau2_retail": 4,
    "tau2_airline": 4,
}


class EvaluationSection(Section):
    """Measuring the team on held-out items."""

    every_stages: int = Field(
        default=1, ge=0, description="Stages between evaluations; 0 evaluates only before and after the run."
    )
    items: int = Field(default=256, ge=1, description="Held-out items per evaluation.")
    samples_per_item: int | None = Field(
        default=None,
        ge=1,
        description="Episodes per item (k of avg@k and pass@k); null is 1 while training, and in `eval` the paper's number for "
        "the task's benchmark (64 for AIME and ZebraLogic, 4 for MATH-500, ...), 1 for a task of no benchmark.",
    )
    temperature: float | None = Field(
        default=None, ge=0, description="Sampling temperature; null takes the rollout's, 0 is greedy."
    )

    def sampled_at(self, rollout: RolloutSection) -> float:
        """The temperature of an evaluation."""
        return rollout.temperature if self.temperature is None else self.temperature

    @property
    def samples_in_training(self) -> int:
        return self.samples_per_item or 1

    def samples_in_eval(self, task: str) -> int:
        return self.samples_per_item or PAPER_SAMPLES.get(task, 1)
