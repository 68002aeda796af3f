"""Evaluation of hand-made episodes: every number computed here by hand."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from teamtr_lora.common.errors import UserError
from teamtr_lora.evaluation.evaluate import Evaluation, Measure, evaluation_items, plan_in_training, summarise
from teamtr_lora.recipe import BaseSection, RolloutSection, TeamSection, TeamTRConfig
from teamtr_lora.rollout.collector import PlayPlan
from teamtr_lora.rollout.playable import open_team
from teamtr_lora.tasks import Item, Task
from teamtr_lora.tasks.generated.column_sum import ColumnSum
from teamtr_lora.tasks.machinery.task import Split
from teamtr_lora.team import Episode, Message

ITEM = Item("x", "17+25", {"totals": [12, 4], "answer": "42"})  # ones 12, tens 4


def episode(group: int, *texts: str, reward: float | None = None, agents: str = "ab") -> Episode:
    messages = [Message(agents[t % len(agents)], t, [1], [5, 6], [0.0, 0.0], "v", "stop", text) for t, text in enumerate(texts)]
    made = Episode(f"x{group}", group, ITEM.prompt, 0, ITEM, messages)
    task = ColumnSum(2)
    made.rewards = [0.0] * (len(texts) - 1) + [task.score([made])[0] if reward is None else reward]
    made.success = task.success(made.reward)
    return made


def plan(k: int, temperature: float = 1.0) -> PlayPlan:
    return PlayPlan([ITEM], episodes_per_item=k, temperature=temperature, max_message_tokens=2, purpose="by hand")


def own(result: Evaluation, agent: str) -> Measure:
    found = result.agents[agent]
    assert found is not None
    return found


RIGHT, ONES, TENS, NONE = ("=12", "=4"), ("=12", "=5"), ("=1", "=4"), ("=1", "=1")


def test_all_the_numbers_of_a_small_evaluation() -> None:
    groups = [[RIGHT, RIGHT], [RIGHT, ONES], [NONE, TENS], [TENS, TENS]]
    episodes = [episode(g, *texts) for g, group in enumerate(groups) for texts in group]
    result = summarise(episodes, ColumnSum(2), plan(2, 0.5))
    shares = [1.0, 0.5, 0.0, 0.0]
    se = lambda values: float(np.std(values, ddof=1) / np.sqrt(len(values)))  # noqa: E731
    assert (result.items, result.k, result.episodes, result.split, result.temperature) == (4, 2, 8, "test", 0.5)
    assert result.avg_at_k == result.mean_reward == pytest.approx(0.375)
    assert result.standard_error == result.mean_reward_standard_error == pytest.approx(se(shares))
    assert result.pass_at_k == pytest.approx(0.5) and result.pass_at_k_standard_error == pytest.approx(se([1, 1, 0, 0]))
    assert own(result, "a").value == pytest.approx(0.5) and own(result, "a").standard_error == pytest.approx(se([1, 1, 0, 0]))
    tens = [1.0, 0.5, 0.5, 1.0]
    assert own(result, "b").value == pytest.approx(0.75) and own(result, "b").standard_error == pytest.approx(se(tens))
    assert result.coordination is not None and result.coordination.value == pytest.approx(0.375)
    assert result.coordination.standard_error == pytest.approx(se(shares))
    assert result.coordination_given_success is not None and result.coordination_given_success.value == 1.0
    assert result.sampled_tokens == 8 * 2 * 2
    assert json.loads(json.dumps(result.as_dict()))["agents"]["b"]["value"] == pytest.approx(0.75)


def test_a_team_can_be_right_without_all_its_agents() -> None:
    """Success comes from the reward, coordination from each agent's own last message: here they part."""
    episodes = [episode(0, *RIGHT, reward=1.0), episode(0, *ONES, reward=1.0), episode(1, *RIGHT, reward=0.0), episode(1, *NONE)]
    result = summarise(episodes, ColumnSum(2), plan(1))
    assert result.avg_at_k == 0.5
    assert result.coordination is not None and result.coordination.value == pytest.approx((0.5 + 0.5) / 2)
    given = result.coordination_given_success
    assert given is not None and given.value == pytest.approx(0.5) and given.standard_error is None, "one item had successes"


def test_an_agents_last_message_is_its_answer() -> None:
    result = summarise([episode(0, "=1", "=4", "=12", "=4")], ColumnSum(2), plan(1))
    assert own(result, "a").value == 1.0 and result.coordination is not None and result.coordination.value == 1.0
    assert result.standard_error is None


def test_an_agent_that_gives_several_parts_of_the_answer_must_have_all_right() -> None:
    """One agent in place of a team: its last message is only the last column."""
    for texts, right in ((RIGHT, 1.0), (TENS, 0.0), (ONES, 0.0), (("=1", "=4", "=12", "=4"), 1.0), (("=1", "=4", "=12"), 1.0)):
        result = summarise([episode(0, *texts, agents="a")], ColumnSum(2), plan(1))
        assert result.coordination is not None and result.coordination.value == right
        assert own(result, "a").value == result.avg_at_k == right


def test_an_agent_that_never_spoke_is_not_judged() -> None:
    result = summarise([episode(0, "=12"), episode(1, *RIGHT)], ColumnSum(2), plan(1))
    assert own(result, "a").value == 1.0
    assert own(result, "b").value == 1.0 and own(result, "b").standard_error is None, "judged where it spoke"


class Silent(Task):
    """A task that cannot judge a single message."""

    def items(self, split: Split) -> "Sized":
        return Sized(3)

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        return [1.0] * len(episodes)


class Sized:
    def __init__(self, size: int | None) -> None:
        self.size = size

    def __getitem__(self, position: int) -> Item:
        return Item(f"n{position}", f"question {position}")


@pytest.mark.parametrize("data", [{}, {"answer": "hi"}, {"answer": "ho"}])
def test_no_judgement_of_messages_no_coordination(data: dict[str, str]) -> None:
    """Also where the item has an answer: what of a message is to be compared with it is not known."""
    said = [Message("a", 0, [1], [2], [0.0], "v", "stop", "hi")]
    made = Episode("x", 0, "q", 0, Item("x", "q", data), said, rewards=[1.0], success=True)
    result = summarise([made], Silent(), plan(1))
    assert result.agents == {"a": None} and result.coordination is None and result.coordination_given_success is None
    assert result.avg_at_k == 1.0


def test_the_first_items_of_a_split_are_evaluated() -> None:
    class Some(Silent):
        size: int | None = 3

        def items(self, split: Split) -> Sized:
            return Sized(self.size)

    task = Some()
    assert [i.id for i in evaluation_items(task, "test", 2)] == ["n0", "n1"]
    assert [i.id for i in evaluation_items(task, "test", 9)] == ["n0", "n1", "n2"]
    task.size = None
    assert len(evaluation_items(task, "test", 9)) == 9
    with pytest.raises(UserError, match=r"evaluation\.items .*--limit.* = 99999999: .* without end, .* use at most 1000000$"):
        evaluation_items(task, "test", 99_999_999)
    task.size = 3
    assert len(evaluation_items(task, "test", 99_999_999)) == 3, "all of those that end"
    task.size = 0
    with pytest.raises(UserError, match="test split is empty"):
        evaluation_items(task, "test", 1)


def test_evaluation_is_repeatable_and_a_longer_one_contains_the_shorter(tiny_base: Path) -> None:
    team = TeamSection.model_validate({"agents": [{"name": "a"}, {"name": "b"}]})
    playable = open_team(BaseSection(source=str(tiny_base), device="cpu"), team, RolloutSection(), seed=0, folder=Path("."))

    class Letters(Silent):
        """Right when the last message has an even number of characters: about half the time."""

        def score(self, episodes: Sequence[Episode]) -> list[float]:
            self.seen = [[m.token_ids for m in e.messages] for e in episodes]
            return [float(len(e.messages[-1].text) % 2 == 0) for e in episodes]

    task = Letters()

    def run(items: int, k: int, seed: int = 0) -> tuple[float, list[list[list[int]]]]:
        plan = plan_in_training(task, TeamTRConfig(seed=seed, max_message_tokens=6), items, k)
        result = summarise(playable.play(task, plan), task, plan)
        assert result.episodes == items * k and 0 <= result.avg_at_k <= result.pass_at_k <= 1
        return result.avg_at_k, task.seen

    assert run(3, 4) == run(3, 4)
    assert run(2, 4)[1] == run(3, 4)[1][:8], "the same episodes, item by item"
    assert run(3, 4)[1] != run(3, 4, seed=1)[1]
