"""Reasoning tags: what the others read, and that the sampled tokens stay what they were."""

from collections.abc import Callable
from typing import Any

import pytest
from pace import processor_seconds

from teamtr_lora.team import TeamProtocol

ROLES = {"a": "", "b": ""}


@pytest.fixture
def team(make_tokenizer: Callable[..., Any]) -> TeamProtocol:
    return TeamProtocol(make_tokenizer(), ROLES, reasoning_tags="strip")


def visible(team: TeamProtocol, text: str) -> str:
    return team.chat.decode(team.visible(team.chat.encode(text) + team.end_ids[:1]))


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("plain", "plain"),
        ("<think>why</think>yes", "yes"),
        ("so <think>why</think>yes", "so yes"),
        ("<think>a</think>x<think>b</think>y", "xy"),
        ("<think></think>yes", "yes"),
        ("before<think>never closed", "before"),
        ("<think>only thought", ""),
        ("<think>a<think>b</think>c", "c"),
        ("é😀<think>ü😀</think>ñ😀", "é😀ñ😀"),
        ("a < b and <thin", "a < b and <thin"),
    ],
)
def test_stripping(team: TeamProtocol, said: str, read: str) -> None:
    """One token a byte: every tag spans several tokens."""
    assert visible(team, said) == read


def test_tags_that_share_tokens_with_text_hide_all_of_the_thought(make_tokenizer: Callable[..., Any]) -> None:
    """Tokens are whole: one that holds the start of a tag goes with it, and nothing of the thought is left."""
    tokenizer = make_tokenizer(merges=((".", "<"), ("t", "h"), ("e", ">"), (">", "W")), split=False)
    team = TeamProtocol(tokenizer, ROLES)
    read = visible(team, "ok.<think>SECRET</think>Well")
    assert read in ("okell", "ok.ell", "okWell", "ok.Well")
    assert visible(team, "ok.<think>SECRET") in ("ok", "ok.")


def test_tags_that_are_special_tokens(make_tokenizer: Callable[..., Any]) -> None:
    team = TeamProtocol(make_tokenizer(special=("<|im_start|>", "<think>", "</think>")), ROLES)
    assert len(team.chat.encode("<think>")) == 1
    assert visible(team, "so <think>SECRET</think>yes") == "so yes"


@pytest.mark.parametrize("view", ["shared", "per_agent"])
def test_what_is_stripped_is_in_nobodys_later_prompt(make_tokenizer: Callable[..., Any], view: str) -> None:
    for policy, there in (("strip", False), ("keep", True)):
        team = TeamProtocol(make_tokenizer(), ROLES, view=view, reasoning_tags=policy)  # type: ignore[arg-type]
        transcript = team.begin("q")
        sampled = team.chat.encode("<think>SECRET</think>yes") + team.end_ids[:1]
        prompt = transcript.prompt_for("a")
        text = transcript.add_message("a", sampled)
        assert text == ("<think>SECRET</think>yes" if there else "yes")
        for agent in ROLES:
            seen = team.chat.decode(transcript.prompt_for(agent))
            assert ("SECRET" in seen) is there, (policy, agent)
            assert "yes" in seen
        grew = transcript.prompt_for("a")[: len(prompt) + len(sampled)] == prompt + sampled
        assert grew is there, "a stripped view is cut, never silently kept"


def test_a_cut_off_thought_is_stripped_and_the_turn_closed(team: TeamProtocol) -> None:
    transcript = team.begin("q")
    assert transcript.add_message("a", team.chat.encode("<think>SECRET and more")) == ""
    assert team.chat.decode(transcript.prompt_for("b"), skip_special=False).endswith(
        "assistant\na:\n<|im_end|>\n<|im_start|>assistant\nb:\n"
    )


def test_a_thought_the_template_opened_is_stripped_too(make_tokenizer: Callable[..., Any]) -> None:
    """DeepSeek-R1's generation prompt ends with <think>: the message then holds only the closing tag."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    team = TeamProtocol(make_tokenizer(template), ROLES, view="per_agent")
    assert visible(team, "SECRET</think>yes") == "yes"


def test_stripping_a_long_message_takes_no_noticeable_time(team: TeamProtocol) -> None:
    """A message is cut on the way of every episode: thousands of tokens must not cost seconds."""
    ids = team.chat.encode("<think>" + "word " * 1200 + "</think>yes")
    with processor_seconds(1):
        assert team.chat.decode(team.visible(ids)) == "yes"
