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

    accuracy: float
    standard_error: float | None
    by_item: list[float]
    evaluation: dict[str, Any]

    @property
    def sampled_tokens(self) -> int:
        return int(self.evaluation["sampled_tokens"])


@dataclass(frozen=True)
class Shock:
    """Accuracy lost by the replacement (positive: lost), paired by item."""

    lost: float
    standard_error: float | None


def shock(before: TeamScore, after: TeamScore) -> Shock:
    lost = [a - b for a, b in zip(before.by_item, after.by_item, strict=True)]
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
    evaluation = recorded(episodes, task, plan, discount)
    return TeamScore(evaluation["avg_at_k"], evaluation["standard_error"], evaluation["by_item"], evaluation)
