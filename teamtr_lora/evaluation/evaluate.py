"""The plan by which a team plays held-out items, and how good it then is, with standard errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.evaluation.outcome import Attempt, Outcome, judge
from teamtr_lora.evaluation.statistics import avg_at_k, item_pass_at_k, pass_at_k, standard_error
from teamtr_lora.recipe import TeamTRConfig
from teamtr_lora.rollout.collector import PlayPlan
from teamtr_lora.tasks import Item, Task
from teamtr_lora.tasks.machinery.task import Split
from teamtr_lora.team import Episode


@dataclass(frozen=True)
class Measure:
    value: float
    standard_error: float | None


@dataclass(frozen=True)
class Evaluation:
    """`avg_at_k` is what is called accuracy elsewhere: the share of episodes that are right; `standard_error` is its own.
    `agents`: how often each one's own answer is right; `coordination`: all of them are right together; `..._given_success`: among
    episodes the team got right. All are None where the task cannot judge single messages."""

    split: str
    items: int
    k: int
    episodes: int
    temperature: float
    avg_at_k: float
    standard_error: float | None
    pass_at_k: float
    pass_at_k_standard_error: float | None
    mean_reward: float
    mean_reward_standard_error: float | None
    agents: dict[str, Measure | None]
    coordination: Measure | None
    coordination_given_success: Measure | None
    sampled_tokens: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluation_items(task: Task, split: Split, count: int) -> list[Item]:
    """The items that a team is measured on."""
    items = task.first_items(split, count)
    if not items:
        raise UserError(f"the {split} split is empty")
    return items


def plan_in_training(task: Task, config: TeamTRConfig, items: int | None = None, k: int | None = None) -> PlayPlan:
    """How a team is measured while it trains; `items` and `k`, samples an item: other than there. Seeds depend on the item and
    the sample alone: teams are compared on common random numbers."""
    section, rollout = config.evaluation, config.rollout
    return PlayPlan(
        evaluation_items(task, "test", items or section.items),
        episodes_per_item=k or section.samples_in_training,
        temperature=section.sampled_at(rollout),
        max_message_tokens=rollout.max_message_tokens,
        purpose=evaluation_purpose(config.seed, "test"),
        learned_from=False,
    )


def evaluation_purpose(seed: int, split: str) -> str:
    return f"{seed}/evaluation/{split}"


def summarise(episodes: list[Episode], task: Task, plan: PlayPlan) -> Evaluation:
    """Of the episodes of `plan_in_training`."""
    outcomes = [judge(Attempt.of(e), task) for e in episodes]
    return summarise_outcomes(outcomes, split="test", k=plan.episodes_per_item, temperature=plan.temperature)


def by_item(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Each item's outcomes, items in the order of the evaluation."""
    groups: dict[int, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.group].append(outcome)
    return list(groups.values())


def summarise_outcomes(outcomes: Sequence[Outcome], *, split: str, k: int, temperature: float) -> Evaluation:
    groups = by_item(outcomes)
    successes = [sum(o.success for o in group) for group in groups]
    samples = [len(group) for group in groups]
    rewards = [sum(o.reward for o in group) / len(group) for group in groups]
    passes = [item_pass_at_k(c, n, k) for c, n in zip(successes, samples, strict=True)]
    agents, together = _message_judgements(groups)
    given = [[ok for ok, o in zip(oks, group, strict=False) if o.success] for oks, group in zip(together, groups, strict=True)]
    return Evaluation(
        split=split,
        items=len(groups),
        k=k,
        episodes=len(outcomes),
        temperature=temperature,
        avg_at_k=avg_at_k(successes, samples),
        standard_error=standard_error([c / n for c, n in zip(successes, samples, strict=True)]),
        pass_at_k=pass_at_k(successes, samples, k),
        pass_at_k_standard_error=standard_error(passes),
        mean_reward=sum(rewards) / len(rewards),
        mean_reward_standard_error=standard_error(rewards),
        agents={agent: _over_items(values) for agent, values in agents.items()},
        coordination=_over_items(together),
        coordination_given_success=_over_items(given),
        sampled_tokens=sum(o.sampled_tokens for o in outcomes),
    )


def _message_judgements(groups: list[list[Outcome]]) -> tuple[dict[str, list[list[bool]]], list[list[bool]]]:
    """Each agent's last message judged on its own, and whether all of them are right; a list an item."""
    agents: dict[str, list[list[bool]]] = defaultdict(list)
    together: list[list[bool]] = []
    for group in groups:
        rows: list[bool] = []
        per_agent: dict[str, list[bool]] = defaultdict(list)
        for outcome in group:
            for agent, verdict in outcome.verdicts.items():
                per_agent[agent] += [] if verdict is None else [verdict]
            rows.append(bool(outcome.verdicts) and all(outcome.verdicts.values()))
        judged = any(per_agent.values())
        together.append(rows if judged else [])
        for agent, values in per_agent.items():
            agents[agent].append(values)
    return agents, together


def _over_items(values: list[list[bool]]) -> Measure | None:
    """The mean over items of each item's mean, so that the standard error is over independent items."""
    means = [sum(v) / len(v) for v in values if v]
    return Measure(sum(means) / len(means), standard_error(means)) if means else None
