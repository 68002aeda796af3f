"""The two views: append-only, token-exact, and each message where its reader expects it."""

from collections.abc import Callable
from typing import Any

import pytest

from teamtr_lora.team import TeamProtocol, Transcript, check_prefix_stability

ROLES = {"planner": "plans", "solver": "solves", "checker": ""}
END = "<|im_end|>"


@pytest.fixture
def protocol(make_tokenizer: Callable[..., Any]) -> Callable[..., TeamProtocol]:
    """Digits merge into "12", so that "1" then "2" is a spelling no encoder would choose."""

    def build(view: str = "shared", **options: Any) -> TeamProtocol:
        tokenizer = make_tokenizer(merges=(("1", "2"),), special=("<|im_start|>", "<|stop|>"))
        return TeamProtocol(tokenizer, ROLES, view=view, system="Be brief.", **options)  # type: ignore[arg-type]

    return build


def say(protocol: TeamProtocol, transcript: Transcript, agent: str, text: str, *, end: bool = True) -> list[int]:
    """Adds a message; returns the prompt and the tokens it was sampled after, as one list."""
    ids = protocol.chat.encode(text) + (protocol.end_ids[:1] if end else [])
    prompt = transcript.prompt_for(agent)
    transcript.add_message(agent, ids)
    return prompt + ids


def shown(protocol: TeamProtocol, ids: list[int]) -> str:
    return protocol.chat.decode(ids, skip_special=False)


def test_the_shared_view_is_one_transcript_whose_headers_name_the_speakers(protocol: Callable[..., TeamProtocol]) -> None:
    team = protocol()
    transcript = team.begin("question?")
    say(team, transcript, "planner", "p1")
    say(team, transcript, "solver", "s1")
    assert shown(team, transcript.prompt_for("checker")) == (
        "<|im_start|>system\nBe brief.\nplanner: plans\nsolver: solves<|im_end|>\n<|im_start|>user\nquestion?<|im_end|>\n"
        "<|im_start|>assistant\nplanner:\np1<|im_end|>\n<|im_start|>assistant\nsolver:\ns1<|im_end|>\n"
        "<|im_start|>assistant\nchecker:\n"
    )
    header = {agent: team.chat.encode(team.chat.agent_open + f"{agent}:\n") for agent in ROLES}
    common = {tuple(transcript.prompt_for(agent)[: -len(header[agent])]) for agent in ROLES}
    assert len(common) == 1, "whoever reads it, the transcript is the same tokens"


def test_the_per_agent_view_is_each_agents_own_conversation(protocol: Callable[..., TeamProtocol]) -> None:
    team = protocol("per_agent")
    transcript = team.begin("question?")
    assert shown(team, transcript.prompt_for("checker")) == (
        "<|im_start|>system\nBe brief.\nYou are checker.<|im_end|>\n<|im_start|>user\nquestion?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    say(team, transcript, "planner", "p1")
    say(team, transcript, "solver", "s1")
    say(team, transcript, "checker", "c1")
    assert shown(team, transcript.prompt_for("planner")) == (
        "<|im_start|>system\nBe brief.\nYou are planner: plans<|im_end|>\n<|im_start|>user\nquestion?<|im_end|>\n"
        "<|im_start|>assistant\np1<|im_end|>\n<|im_start|>user\nsolver:\ns1\n\nchecker:\nc1<|im_end|>\n<|im_start|>assistant\n"
    )
    assert shown(team, transcript.prompt_for("solver")) == (
        "<|im_start|>system\nBe brief.\nYou are solver: solves<|im_end|>\n<|im_start|>user\nquestion?\n\nplanner:\np1<|im_end|>\n"
        "<|im_start|>assistant\ns1<|im_end|>\n<|im_start|>user\nchecker:\nc1<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("view", ["shared", "per_agent"])
def test_views_only_grow(protocol: Callable[..., TeamProtocol], view: str) -> None:
    """Several rounds, an agent twice in a row, feedback after some messages and twice in a row, a message cut off."""
    team = protocol(view)
    transcript = team.begin("question?")
    seen: dict[str, list[int]] = {}
    script = ["planner", "solver", "solver", "checker", "planner", "planner", "checker", "solver", "planner"]
    for turn, agent in enumerate(script):
        key = agent if view == "per_agent" else ""
        prompt = transcript.prompt_for(agent)
        before = seen.get(key, [])
        assert prompt[: len(before)] == before, f"turn {turn}: {agent}'s view was rewritten"
        assert len(prompt) > len(before)
        assert transcript.prompt_for(agent) == prompt, "looking changes nothing"
        seen[key] = say(team, transcript, agent, f"message {turn}", end=turn != 3)
        for _ in range(turn % 3):
            transcript.add_feedback(f"feedback {turn}")
    text = shown(team, transcript.prompt_for("checker"))
    assert [f"message {turn}" in text for turn in range(len(script))] == [True] * len(script)
    assert text.count("feedback 5") == 2 and text.count("feedback 1") == 1


def test_feedback_arrives_as_a_user_turn(protocol: Callable[..., TeamProtocol]) -> None:
    for view, expected in (
        ("shared", "planner:\np1<|im_end|>\n<|im_start|>user\ntoo low<|im_end|>\n<|im_start|>assistant\nplanner:\n"),
        ("per_agent", "p1<|im_end|>\n<|im_start|>user\ntoo low<|im_end|>\n<|im_start|>assistant\n"),
    ):
        team = protocol(view)
        transcript = team.begin("q")
        say(team, transcript, "planner", "p1")
        transcript.add_feedback("too low")
        assert shown(team, transcript.prompt_for("planner")).endswith(expected)


def test_an_agent_that_speaks_twice_in_a_row_sees_two_turns_of_its_own(protocol: Callable[..., TeamProtocol]) -> None:
    team = protocol("per_agent")
    transcript = team.begin("q")
    say(team, transcript, "planner", "p1")
    say(team, transcript, "planner", "p2")
    assert shown(team, transcript.prompt_for("planner")).endswith(
        "<|im_start|>assistant\np1<|im_end|>\n<|im_start|>assistant\np2<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_kept_reading_is_of_the_same_tokens_with_the_same_special_ones(protocol: Callable[..., TeamProtocol]) -> None:
    chat, ids = protocol().chat, protocol().chat.encode(f"1{END}2")
    assert [chat.decode(ids, skip_special=skip) for skip in (False, True, False, True)] == [f"1{END}2", "12"] * 2
    ids.pop()
    assert [chat.decode(ids, skip_special=skip) for skip in (True, False)] == ["1", f"1{END}"]
    assert [chat.decode(ids[:1], skip_special=skip) for skip in (True, False)] == ["1", "1"]


@pytest.mark.parametrize("view", ["shared", "per_agent"])
def test_sampled_tokens_are_never_retokenised(protocol: Callable[..., TeamProtocol], view: str) -> None:
    team = protocol(view)
    one, two = team.chat.encode("1")[0], team.chat.encode("2")[0]
    assert team.chat.encode(team.chat.decode([one, two])) == team.chat.encode("12") != [one, two]
    sampled = [one, two, one, two, *team.end_ids[:1]]
    transcript = team.begin("12?")
    prompt = transcript.prompt_for("planner")
    assert transcript.add_message("planner", sampled) == "1212"
    own = transcript.prompt_for("planner")
    assert own[: len(prompt) + len(sampled)] == prompt + sampled
    others = transcript.prompt_for("solver")
    assert any(others[i : i + 4] == sampled[:4] for i in range(len(others)))


@pytest.mark.parametrize("view", ["shared", "per_agent"])
def test_a_message_cut_off_is_closed_after_its_tokens(protocol: Callable[..., TeamProtocol], view: str) -> None:
    team = protocol(view)
    complete, cut = team.begin("q"), team.begin("q")
    whole = say(team, complete, "planner", "p1")
    part = say(team, cut, "planner", "p1", end=False)
    assert part == whole[:-1]
    assert cut.prompt_for("planner") == complete.prompt_for("planner"), "readers cannot tell the two apart"
    assert cut.prompt_for("planner")[len(part)] == team.end_ids[0], "the end token follows the sampled span"


def test_a_message_that_ends_with_another_end_token_keeps_it(make_tokenizer: Callable[..., Any]) -> None:
    team = TeamProtocol(make_tokenizer(eos="<|endoftext|>", special=("<|im_start|>", "<|im_end|>")), ROLES)
    close, eos = team.end_ids
    assert [shown(team, [close]), shown(team, [eos])] == ["<|im_end|>", "<|endoftext|>"]
    transcript = team.begin("q")
    sampled = [*team.chat.encode("p1"), eos]
    prompt = transcript.prompt_for("planner")
    assert transcript.add_message("planner", sampled) == "p1"
    after = transcript.prompt_for("planner")
    assert after[: len(prompt) + len(sampled)] == prompt + sampled
    assert shown(team, after[len(prompt) :]).startswith("p1<|endoftext|><|im_end|>\n")


@pytest.mark.parametrize("view", ["shared", "per_agent"])
def test_an_empty_message_leaves_a_well_formed_transcript(protocol: Callable[..., TeamProtocol], view: str) -> None:
    team = protocol(view)
    for sampled in ([], team.end_ids[:1]):
        transcript = team.begin("q")
        assert transcript.add_message("planner", list(sampled)) == ""
        assert shown(team, transcript.prompt_for("planner")).count(END) == 3


def test_the_start_up_check_accepts_both_views_of_a_chatml_base(protocol: Callable[..., TeamProtocol]) -> None:
    for view in ("shared", "per_agent"):
        check_prefix_stability(protocol(view), rounds=3)
