"""One agent's messages as token sequences, and returns."""

from collections.abc import Callable
from typing import Any

import pytest

from teamtr_lora.team import Episode, Message, TeamProtocol, agent_sequences


def message(agent: str, turn: int, prompt: list[int], tokens: list[int]) -> Message:
    return Message(agent, turn, prompt, tokens, [0.0] * len(tokens), "v0000-x", "stop", "")


def play(team: TeamProtocol, speakers: list[str], text: str = "hello", feedback: str | None = None) -> Episode:
    transcript = team.begin("q")
    episode = Episode("item", 0, "q", 0)
    for turn, agent in enumerate(speakers):
        tokens = team.chat.encode(f"{text} {turn}") + team.end_ids[:1]
        episode.messages.append(message(agent, turn, transcript.prompt_for(agent), tokens))
        transcript.add_message(agent, tokens)
        if feedback:
            transcript.add_feedback(feedback)
    return episode


@pytest.mark.parametrize("view", ["shared", "per_agent"])
def test_a_view_that_grew_is_one_sequence(make_tokenizer: Callable[..., Any], view: str) -> None:
    team = TeamProtocol(make_tokenizer(), {"a": "", "b": ""}, view=view)  # type: ignore[arg-type]
    episodes = [play(team, ["a", "b", "a", "a", "b"], feedback="no"), play(team, ["b", "a"])]
    for agent, spans in (("a", [3, 1]), ("b", [2, 1])):
        sequences = agent_sequences(episodes, agent)
        assert [len(s.spans) for s in sequences] == spans
        assert [s.episode for s in sequences] == episodes
        for sequence in sequences:
            assert len(sequence.ids) == sequence.spans[-1].end, "nothing after the last message is run"
            for span in sequence.spans:
                assert sequence.ids[span.start : span.end] == span.message.token_ids
                assert sequence.ids[: span.start] == span.message.prompt_ids, "scored after exactly what it was sampled after"


def test_a_view_that_was_cut_is_several_sequences(make_tokenizer: Callable[..., Any]) -> None:
    team = TeamProtocol(make_tokenizer(), {"a": "", "b": ""}, reasoning_tags="strip")
    sequences = agent_sequences([play(team, ["a", "b", "a"], text="<think>hm</think>yes")], "a")
    assert [len(s.spans) for s in sequences] == [1, 1]
    for sequence in sequences:
        span = sequence.spans[0]
        assert sequence.ids == span.message.prompt_ids + span.message.token_ids


def test_grow_cut_grow() -> None:
    episode = Episode("i", 0, "q", 0)
    episode.messages = [
        message("a", 0, [1, 2], [3]),
        message("a", 1, [1, 2, 3, 4], [5]),
        message("a", 2, [1, 2, 9], [6]),
        message("a", 3, [1, 2, 9, 6], [7]),
    ]
    sequences = agent_sequences([episode], "a")
    assert [s.ids for s in sequences] == [[1, 2, 3, 4, 5], [1, 2, 9, 6, 7]]
    assert [[(p.start, p.end) for p in s.spans] for s in sequences] == [[(2, 3), (4, 5)], [(3, 4), (4, 5)]]


def test_equal_prompts_of_two_episodes_stay_apart() -> None:
    episodes = [Episode(f"i{n}", 0, "q", 0, messages=[message("a", 0, [1], [2])]) for n in range(2)]
    assert len(agent_sequences(episodes, "a")) == 2


def test_empty_messages_and_other_agents_are_left_out() -> None:
    episode = Episode("i", 0, "q", 0, messages=[message("a", 0, [1], []), message("b", 1, [1, 2], [3])])
    assert agent_sequences([episode], "a") == []
    assert agent_sequences([], "a") == []


def test_returns_and_token_counts() -> None:
    episode = Episode("i", 0, "q", 0, messages=[message("a", 0, [1], [2, 3]), message("b", 1, [1], [4])], rewards=[1.0, 4.0])
    assert episode.reward == 5.0
    assert episode.discounted_return(0.5) == 1.0 + 0.5 * 4.0
    assert episode.discounted_return(0.0) == 1.0
    assert episode.tokens == 3
    cut = message("a", 0, [1], [2])
    cut.finish = "length"
    assert cut.truncated and not episode.messages[0].truncated
