"""Agents that have to differ: rewards by another computation, the dial, disjoint splits, and what nano makes of it untrained."""

import statistics
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import load_recipe
from teamtr_lora.rollout.collector import PlayPlan
from teamtr_lora.rollout.playable import open_team
from teamtr_lora.tasks.generated.distinct import Distinct
from teamtr_lora.team import Episode, Message

RECIPES = Path(__file__).resolve().parents[3] / "recipes"


def episode(task: Distinct, texts: list[str], agents: str = "abcd") -> Episode:
    item = task.items("train")[0]
    messages = [Message(agents[i % len(agents)], i, [], [], [], "", "stop", text) for i, text in enumerate(texts)]
    return Episode(item_id=item.id, group=0, prompt=item.prompt, seed=0, item=item, messages=messages)


@given(st.lists(st.integers(-1, 9), min_size=4, max_size=4), st.floats(0, 1))
def test_the_reward_is_the_share_apart_and_the_share_on_offer_by_the_dial(named: list[int], coupling: float) -> None:
    task = Distinct(4, coupling)
    offered = task.items("train")[0].data["options"]
    said = ["none" if number < 0 else f"I say {number}." for number in named]
    alone = [number for number in offered if Counter(named)[number] == 1]
    on_offer = [number for number in named if number in offered]
    expected = coupling * len(alone) / 4 + (1 - coupling) * len(on_offer) / 4
    assert task.score([episode(task, said)]) == [pytest.approx(expected)]


@given(st.permutations(range(4)), st.just(0.0) | st.floats(0.01, 1))
def test_only_a_team_that_stands_apart_is_right(order: list[int], coupling: float) -> None:
    task = Distinct(4, coupling)
    offered = task.items("train")[0].data["options"]
    right = [str(offered[place]) for place in order]
    (reward,) = task.score([episode(task, right)])
    assert reward == 1 and task.success(reward), "exactly 1, so that no rounding makes it a failure"
    same = [right[0], *right[:3]]
    assert task.success(task.score([episode(task, same)])[0]) == (coupling == 0)


def test_the_last_word_of_each_agent_counts() -> None:
    task = Distinct(2)
    first, second = task.items("train")[0].data["options"]
    changed = episode(task, [str(first), str(first), str(first), f"{second}, not {first}"], agents="ab")
    assert task.score([changed]) == [1.0] and task.vote(changed) == f"{first} {second}"
    assert task.score([episode(task, [])]) == [0.0]


def test_the_answer_of_the_team_is_what_everybody_names() -> None:
    task = Distinct(4)
    assert task.team_answer(episode(task, ["4", "I say 9", "none", "9"])) == "4 9 - 9"


def test_no_set_of_digits_is_on_both_sides() -> None:
    task = Distinct(3)
    sets = {split: {frozenset(task.items(split)[i].data["options"]) for i in range(300)} for split in ("train", "test")}
    assert not sets["train"] & sets["test"] and len(sets["test"]) > 10
    item = task.items("test")[7]
    assert item == Distinct(3).items("test")[7] and all(str(digit) in item.prompt for digit in item.data["options"])


@pytest.mark.parametrize(("options", "agents", "fix"), [(2, "abc", "task.options=3"), (4, "a", "a team of two or more")])
def test_every_agent_needs_a_digit_of_its_own(options: int, agents: str, fix: str) -> None:
    with pytest.raises(UserError, match=fix):
        Distinct(options).check_agents(list(agents), len(agents))
    Distinct(4).check_agents(["a", "b", "c"], 3)


def test_the_embedded_base_has_something_to_learn_from() -> None:
    """Untrained it names digits on offer, the same for several agents, and not always: rewards differ within groups."""
    recipe = load_recipe([RECIPES / "bases" / "nano.yaml", RECIPES / "tasks" / "distinct.yaml"])
    playable = open_team(recipe.base, recipe.team, recipe.rollout, seed=0, folder=recipe.folder)
    task = recipe.task.build(recipe.folder)
    items = [task.items("train")[i] for i in range(12)]
    plan = PlayPlan(items, 8, recipe.rollout.temperature, recipe.rollout.max_message_tokens, "x")
    episodes = playable.play(task, plan)
    assert 0.1 < statistics.fmean(e.reward for e in episodes) < 0.8
    groups = [{e.reward for e in episodes if e.group == group} for group in range(12)]
    assert sum(len(rewards) > 1 for rewards in groups) >= 10
    others = [m.prompt_ids for e in episodes for m in e.messages[1:]]
    heard = playable.base.tokenizer.decode(others[0])
    assert f"{recipe.team.agents[0].name}:\n" not in heard, "blind: the first agent's words are hidden from the second"
