"""Debates and role plays: who speaks, who hears what when, and whose message is the team's answer."""

from __future__ import annotations

from typing import Any

import pytest

from teamtr_lora.recipe import problems
from teamtr_lora.team import Episode, Message, Router, TeamProtocol, agent_sequences, build_router, check_prefix_stability

DEBATERS = ["ann", "bob", "cat"]


@pytest.fixture
def tokenizer(make_tokenizer: Any) -> Any:
    return make_tokenizer()


def said(agent: str, text: str, turn: int = 0) -> Message:
    return Message(agent, turn, [], [], [], "", "stop", text)


def played(router: Router, texts: dict[int, str] | None = None) -> list[Message]:
    messages: list[Message] = []
    while (agent := router.next(messages)) is not None:
        assert len(messages) < 50, "the router never ends"
        messages.append(said(agent, (texts or {}).get(len(messages), ""), len(messages)))
    return messages


def read(message: Message) -> str | None:
    return message.text or None


def answer(router: Router, texts: list[str]) -> str | None:
    messages = played(router, dict(enumerate(texts)))
    assert len(messages) == len(texts)
    place = router.answer_turn(messages, read)
    return None if place is None else messages[place].text


def test_everybody_speaks_once_a_round_and_the_judge_once_at_the_end() -> None:
    plain = build_router("debate", DEBATERS, rounds=2)
    assert [m.agent for m in played(plain)] == DEBATERS * 2
    judged = build_router("debate", DEBATERS, rounds=2, judge="bob")
    assert [m.agent for m in played(judged)] == ["ann", "cat", "ann", "cat", "bob"]
    assert (plain.max_messages, judged.max_messages) == (6, 5)


def test_the_majority_of_the_last_round_decides() -> None:
    router = build_router("debate", DEBATERS, rounds=2)
    assert answer(router, ["7", "7", "7", "5", "8", "8"]) == "8", "what was said before counts no more"
    assert answer(router, ["", "", "", "5", "", "5"]) == "5"
    messages = played(router, dict(enumerate(["1", "2", "3", "4", "9", "9"])))
    assert router.answer_turn(messages, read) == 4, "the first message that states it"


@pytest.mark.parametrize(
    ("last", "expected"),
    [(["1", "2", "3"], "1"), (["", "2", "3"], "2"), (["", "", ""], ""), (["", "", "3"], "3"), (["2", "1", "1"], "1")],
)
def test_ties_go_to_the_agent_listed_first_and_silence_does_not_vote(last: list[str], expected: str) -> None:
    assert answer(build_router("debate", DEBATERS), last) == expected


def test_two_pairs_tie_in_the_order_of_the_agents() -> None:
    router = build_router("debate", ["a", "b", "c", "d"])
    assert answer(router, ["x", "y", "y", "x"]) == "x"
    assert answer(router, ["z", "y", "x", "y"]) == "y"


def test_the_judges_message_is_the_answer_whatever_the_majority_says() -> None:
    router = build_router("debate", [*DEBATERS, "judge"], judge="judge")
    assert answer(router, ["4", "4", "4", "9"]) == "9"


def test_nobody_spoke() -> None:
    assert build_router("debate", DEBATERS).answer_turn([], read) is None
    assert build_router("round_robin", DEBATERS).answer_turn([], read) is None


def test_role_play_ends_when_the_instructor_says_so_and_the_assistant_answers() -> None:
    router = build_router("role_play", ["boss", "worker"], rounds=3, done_marker="DONE")
    assert [m.agent for m in played(router)] == ["boss", "worker"] * 3
    assert answer(router, ["add", "12", "DONE"]) == "12"
    assert answer(router, ["DONE", "3", "again", "4", "go on", "5 DONE"]) == "5 DONE", (
        "the marker counts once there is something to be done with, and only from the instructor"
    )
    assert router.answer_turn([said("boss", "add")], read) == 0, "cut off before the assistant spoke"


def test_an_episode_names_the_message_that_is_the_answer() -> None:
    """The last one, until a router has chosen; none where nobody spoke."""
    episode = Episode("i", 0, "p", 0, messages=[said("a", "1"), said("b", "2"), said("c", "3")])
    assert episode.answer_text == "3"
    episode.answer_turn = 0
    assert episode.answer_text == "1" and episode.answer_message is episode.messages[0]
    silent = Episode("i", 0, "p", 0)
    assert silent.answer_text == "" and silent.answer_message is None


def test_in_a_round_nobody_sees_the_others_words_of_that_round(tokenizer: Any) -> None:
    protocol = TeamProtocol(tokenizer, dict.fromkeys([*DEBATERS, "judge"], ""), view="per_agent", round_messages=3)
    transcript = protocol.begin("the question")
    views: dict[tuple[int, str], str] = {}
    for round_ in (1, 2):
        for agent in DEBATERS:
            views[round_, agent] = protocol.raw_text(transcript.prompt_for(agent))
            transcript.add_message(agent, protocol.chat.encode(f"{agent}-says-{round_}") + protocol.end_ids[:1])
    for agent in DEBATERS:
        assert "-says-" not in views[1, agent]
        for other in DEBATERS:
            assert f"{other}-says-1" in views[2, agent], "the round before is heard, and one's own words are remembered"
            assert f"{other}-says-2" not in views[2, agent]
    judge = protocol.raw_text(transcript.prompt_for("judge"))
    assert all(f"{agent}-says-{round_}" in judge for agent in DEBATERS for round_ in (1, 2))
    assert judge.count("-says-") == 6


def test_feedback_to_a_round_comes_after_it(tokenizer: Any) -> None:
    protocol = TeamProtocol(tokenizer, dict.fromkeys(DEBATERS, ""), view="per_agent", round_messages=3)
    transcript = protocol.begin("the question")
    for agent in DEBATERS:
        assert "warm" not in protocol.raw_text(transcript.prompt_for(agent))
        transcript.add_message(agent, protocol.chat.encode("a guess") + protocol.end_ids[:1])
        transcript.add_feedback(f"warm {agent}")
    assert all(f"warm {agent}" in protocol.raw_text(transcript.prompt_for("cat")) for agent in DEBATERS[:2])


def test_views_of_a_debate_only_grow(tokenizer: Any) -> None:
    """So all of an agent's messages of an episode are scored in one pass over exactly the tokens they were sampled after."""
    protocol = TeamProtocol(tokenizer, dict.fromkeys(DEBATERS, ""), view="per_agent", round_messages=3)
    check_prefix_stability(protocol)
    transcript, episode = protocol.begin("q"), Episode("i", 0, "q", 0)
    for turn in range(9):
        agent = DEBATERS[turn % 3]
        prompt, tokens = transcript.prompt_for(agent), protocol.chat.encode(f"words {turn}") + protocol.end_ids[:1]
        transcript.add_message(agent, tokens)
        episode.messages.append(Message(agent, turn, prompt, tokens, [], "", "stop", ""))
    for agent in DEBATERS:
        (sequence,) = agent_sequences([episode], agent)
        assert len(sequence.spans) == 3


TWO = [{"name": "a"}, {"name": "b"}]
VIEW = {"view": "per_agent"}


@pytest.mark.parametrize(
    ("team", "line"),
    [
        ({"agents": TWO, "router": {"kind": "debate"}}, "team.router.kind = 'debate': one shared transcript cannot hide"),
        ({"agents": TWO, "router": {"kind": "blind"}}, "team.router.kind = 'blind': one shared transcript cannot hide"),
        ({"agents": TWO[:1], "protocol": VIEW, "router": {"kind": "debate"}}, "a debate needs two agents beside the judge"),
        ({"agents": TWO, "protocol": VIEW, "router": {"kind": "debate", "judge": "b"}}, "a debate needs two agents beside"),
        ({"agents": TWO, "protocol": VIEW, "router": {"kind": "debate", "judge": "c"}}, "team.router.judge = 'c': no agent has"),
        ({"agents": TWO, "router": {"judge": "b"}}, "team.router.judge = 'b': only a debate has a judge"),
        ({"agents": TWO[:1], "router": {"kind": "role_play"}}, "a role play has two agents, the team has 1"),
    ],
)
def test_teams_that_cannot_debate_or_play_roles_are_refused_in_one_line(team: dict[str, Any], line: str) -> None:
    (problem,) = problems({"team": team})
    assert line in str(problem)


def test_a_wrong_agent_is_not_reported_twice() -> None:
    team = {"agents": [{"name": "Bad"}, {"name": "b"}], "router": {"kind": "debate", "judge": "Bad"}, "protocol": VIEW}
    (problem,) = problems({"team": team})
    assert problem.key == "team.agents.0.name"


def test_other_problems_are_still_found_beside_a_refused_debate() -> None:
    found = problems({"team": {"agents": TWO, "router": {"kind": "debate"}}, "training": {"order": ["a"]}})
    assert {problem.key for problem in found} == {"team.router.kind", "training.order"}
