"""The swap shock: how a team does on held-out items before, with the new adapter as it came, and with it aligned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from teamtr_lora.algorithm.advantage import message_discount
from teamtr_lora.evaluation.evaluate import plan_in_training
from teamtr_lora.evaluation.returns import recorded
from teamtr_lora.evaluation.statistics import standard_error
from teamtr_lora.recipe import Recipe
from teamtr_lora.rollout.collector import Progress
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.tasks import Task


@dataclass(frozen=True)
class TeamScore:
    """A team on the held-out items. Items and seeds are the same for every team, so that two teams are compared item by item."""

    evaluation: dict[str, Any]

    @property
    def accuracy(self) -> float:
        return float(self.evaluation["avg_at_k"])

    @property
    def standard_error(self) -> float | None:
        error: float | None = self.evaluation["standard_error"]
        return error

    @property
    def sampled_tokens(self) -> int:
        return int(self.evaluation["sampled_tokens"])

    def as_dict(self) -> dict[str, Any]:
        """All but the items one by one."""
        evaluation = {key: value for key, value in self.evaluation.items() if key != "by_item"}
        return {"accuracy": self.accuracy, "standard_error": self.standard_error, "evaluation": evaluation}


@dataclass(frozen=True)
class Shock:
    """Accuracy lost by the replacement (positive: lost), paired by item."""

    lost: float
    standard_error: float | None


def shock(before: TeamScore, after: TeamScore) -> Shock:
    lost = [a - b for a, b in zip(before.evaluation["by_item"], after.evaluation["by_item"], strict=True)]
    return Shock(sum(lost) / len(lost), standard_error(lost))


def score_team(
    playable: PlayableTeam, task: Task, recipe: Recipe, items: int, *, stand_in: tuple[str, str] | None, progress: Progress | None
) -> TeamScore:
    """`stand_in`: (agent, adapter): that adapter of the bank, as it is now, plays for the agent."""
    plan = plan_in_training(task, recipe, items)
    if stand_in:
        playable.publish(playable.bank.commit(stand_in[1]))
    episodes = playable.play(task, plan, progress, stand_in=dict([stand_in]) if stand_in else None)
    discount = message_discount(recipe.training.discount, playable.team.router.max_messages)
    return TeamScore(recorded(episodes, task, plan, discount))
