"""Agents that are credited for their own answers: by hand for three messages, and through the collector."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from teamtr_lora.rollout.collector import play
from teamtr_lora.rollout.own_answers import credit_own_answers
from teamtr_lora.tasks import Item, Task
from teamtr_lora.team import Episode, Message, Team
from tests.rollout.test_answers import VERSIONS, Echo, plan


class ByText(Task):
    """The answer's text is its score."""

    def __init__(self) -> None:
        self.scored: list[str] = []

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        self.scored += [episode.messages[-1].text for episode in episodes]
        return [float(episode.messages[-1].text) for episode in episodes]


def said(turn: int, agent: str, text: str) -> Message:
    return Message(agent, turn, [], [1], [0.0], "v0000-x", "stop", text)


def test_own_answers_replace_their_share_of_the_last_reward() -> None:
    messages = [said(0, "a", "0.2"), said(1, "b", "1.0"), said(2, "a", "0.6")]
    # a's first message was not its last; b's second-to-last is the team's answer; c never spoke; 0.1 came before the end
    episode = Episode(item_id="i", group=0, prompt="", seed=0, item=Item("i", "", {}), messages=messages)
    episode.rewards, episode.answer_turn = [0.1, 0.0, 1.0], 1
    task = ByText()
    credit_own_answers(task, [episode], [1.0], ["a", "b", "c"], 0.25)
    assert episode.credit == {"a": [0.1, 0.0, 0.75 + 0.25 * 0.6], "b": [0.1, 0.0, 1.0], "c": [0.1, 0.0, 1.0]}
    assert task.scored == ["0.6"], "the team's answer is not scored twice"
    assert episode.discounted_return(1.0, "a") == 0.1 + 0.9


class FirstSpeaker(Task):
    """Right is what the first agent says."""

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        return [float(episode.messages[-1].agent == "a") for episode in episodes]


def test_a_team_says_how_much_own_answers_count(make_team: Callable[..., Team]) -> None:
    def credit(**settings: Any) -> list[dict[str, list[float]]]:
        team = replace(make_team(["a", "b"]), **settings)
        episodes = play(team, FirstSpeaker(), Echo(team), plan(), VERSIONS)  # type: ignore[arg-type]
        assert {episode.reward for episode in episodes} == {0.0}, "b speaks last"
        return [episode.credit for episode in episodes]

    assert not any(credit())
    assert credit(own_answer_share=0.5) == [{"a": [0.0, 0.5], "b": [0.0, 0.0]}] * 12
