"""Taking chat templates apart: real ones, and ones that cannot carry an append-only transcript."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import TeamSection
from teamtr_lora.team import ChatPieces, TeamProtocol, build_team, check_prefix_stability

ROLES = {"planner": "plans", "solver": "solves"}

PLAIN = "{% for m in messages %}{{ 'Q: ' if m['role'] == 'user' else 'A: ' }}{{ m['content'] }}\n{% endfor %}"
PLAIN_OPEN = "{% if add_generation_prompt %}A: {% endif %}"
GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<|im_start|>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)


def trl_template(name: str) -> str:
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


def test_chatml_pieces(make_tokenizer: Callable[..., Any]) -> None:
    chat = ChatPieces(make_tokenizer(), reasoning=False)
    assert (chat.agent_open, chat.agent_close) == ("<|im_start|>assistant\n", "<|im_end|>\n")
    assert (chat.user_open, chat.user_close) == ("<|im_start|>user\n", "<|im_end|>\n")
    assert chat.prologue("S", "U") == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    assert [chat.decode([i], skip_special=False) for i in chat.end_ids] == ["<|im_end|>"]


@pytest.mark.parametrize("reasoning", [False, True])
def test_qwen3_opens_an_empty_thought_in_the_generation_prompt_only(make_tokenizer: Callable[..., Any], reasoning: bool) -> None:
    tokenizer = make_tokenizer(trl_template("qwen3"))
    chat = ChatPieces(tokenizer, reasoning=reasoning)
    assert chat.agent_open == "<|im_start|>assistant\n" + ("" if reasoning else "<think>\n\n</think>\n\n")
    assert chat.agent_close == "<|im_end|>\n" and chat.user_open == "<|im_start|>user\n"
    for view in ("shared", "per_agent"):
        tags = "keep" if reasoning else "strip"
        check_prefix_stability(TeamProtocol(tokenizer, ROLES, view=view, reasoning_tags=tags))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "end", "special"),
    [
        ("qwen2_5", "<|im_end|>", ()),
        ("llama3", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
        ("gemma", "<end_of_turn>", ("<start_of_turn>", "<end_of_turn>")),
        ("lfm2", "<|im_end|>", ()),
        ("nemotron_3_nano", "<|im_end|>", ()),
    ],
)
def test_templates_of_real_bases(make_tokenizer: Callable[..., Any], name: str, end: str, special: tuple[str, ...]) -> None:
    tokenizer = make_tokenizer(trl_template(name), special=("<|im_start|>", *special), bos="<|bos|>")
    for view in ("shared", "per_agent"):
        protocol = TeamProtocol(tokenizer, ROLES, view=view, system="S")  # type: ignore[arg-type]
        check_prefix_stability(protocol)
        assert protocol.chat.decode(protocol.end_ids[:1], skip_special=False) == end
        assert "S" in protocol.chat.decode(protocol.begin("q").prompt_for("planner"))


def test_a_long_text_is_told_of_by_the_protocol_alone(
    make_tokenizer: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 4
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer.encode("what others read, " * 4)
    assert "longer than the specified maximum" in caplog.text
    tokenizer.deprecation_warnings.clear()  # it warns once
    caplog.clear()
    assert len(ChatPieces(tokenizer, reasoning=False).encode("what others read, " * 4)) > 4 and caplog.text == ""


CONVERSATIONS = ("u", "su", "uau", "suau", "uauau")
SAID = {"s": ("system", 'Be "brief" {{ here }}.'), "u": ("user", "Wie groß ist 2 + 2?\n"), "a": ("assistant", "4 \\ four")}


@pytest.mark.parametrize("name", ["chatml", "qwen2_5", "llama3", "gemma", "lfm2", "nemotron_3_nano", "no system role"])
def test_the_plain_template_writes_what_the_base_s_would(make_tokenizer: Callable[..., Any], name: str) -> None:
    """Of conversations of every kind, for a server that must not run a stranger's template."""
    own = {"chatml": None, "no system role": GEMMA}
    written = own[name] if name in own else trl_template(name)
    tokenizer = make_tokenizer(*([] if written is None else [written]), special=("<|im_start|>", "<|eot_id|>"), bos="<|bos|>")
    chat = ChatPieces(tokenizer, reasoning=False)
    plain = chat.plain_template()
    assert plain.isascii() and "range" not in plain and plain.count("for ") == 2, "one loop, over the messages (and its end)"
    for kinds in CONVERSATIONS:
        turns = [{"role": SAID[kind][0], "content": SAID[kind][1]} for kind in kinds]
        asked = turns
        if "s" in kinds and name in ("gemma", "no system role"):  # then the system text opens the first user turn
            asked = [{"role": "user", "content": f"{turns[0]['content']}\n\n{turns[1]['content']}"}, *turns[2:]]
        for opened in (True, False):
            wanted = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=opened, enable_thinking=False)
            found = tokenizer.apply_chat_template(turns, chat_template=plain, tokenize=False, add_generation_prompt=opened)
            assert found.replace("<think>\n\n</think>\n\n", "") == wanted.replace("<think>\n\n</think>\n\n", ""), kinds


@pytest.mark.parametrize("name", ["glm4moe", "gptoss", "idefics3", "phi3"])
def test_templates_that_cannot_do_it_are_refused_in_one_line(make_tokenizer: Callable[..., Any], name: str) -> None:
    """GLM closes a turn with nothing, gpt-oss rewrites the last answer, idefics wants lists, Phi-3 ends with an extra token."""
    with pytest.raises(UserError, match=r"team\.protocol|chat template") as caught:
        check_prefix_stability(TeamProtocol(make_tokenizer(trl_template(name)), ROLES))
    assert "\n" not in str(caught.value)


def test_a_template_without_a_system_role_puts_it_in_the_first_user_turn(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(GEMMA)
    for view in ("shared", "per_agent"):
        protocol = TeamProtocol(tokenizer, ROLES, view=view, system="Be brief.")  # type: ignore[arg-type]
        check_prefix_stability(protocol)
    prompt = protocol.begin("q").prompt_for("planner")
    assert protocol.chat.decode(prompt, skip_special=False) == (
        "<|im_start|>user\nBe brief.\nYou are planner: plans\n\nq<|im_end|>\n<|im_start|>model\n"
    )
    assert protocol.chat.prologue("", "q") == "<|im_start|>user\nq<|im_end|>\n"


@pytest.mark.parametrize(
    "template",
    [
        # how long the conversation is, written at its head
        "[{{ messages | length }}]{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}",
        # earlier answers are dropped
        "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}"
        "<|im_start|>{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}",
        # earlier answers are changed
        "{% for m in messages %}<|im_start|>"
        "{{ m['content'] if loop.last or m['role'] == 'user' else '(old)' }}<|im_end|>{% endfor %}",
        # the contents are not there at all
        "{% for m in messages %}<|im_start|>{{ m['role'] }}<|im_end|>{% endfor %}",
        # raises whatever it is given
        "{{ raise_exception('never') }}",
        # not even a template
        "{% for %}",
    ],
    ids=["counted", "dropped", "changed", "blank", "raises", "broken"],
)
def test_templates_that_rewrite_history_are_refused(make_tokenizer: Callable[..., Any], template: str) -> None:
    with pytest.raises(UserError, match="chat template") as caught:
        check_prefix_stability(TeamProtocol(make_tokenizer(template), ROLES))
    assert "\n" not in str(caught.value)


def test_a_turn_that_ends_without_a_special_token_uses_the_end_of_sequence(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(PLAIN + PLAIN_OPEN, eos="<|endoftext|>", special=())
    protocol = TeamProtocol(tokenizer, ROLES)
    check_prefix_stability(protocol)
    assert protocol.end_ids == [tokenizer.eos_token_id]
    transcript = protocol.begin("q")
    prompt = transcript.prompt_for("planner")
    sampled = [*protocol.chat.encode("p1\n"), tokenizer.eos_token_id]
    transcript.add_message("planner", sampled)
    assert transcript.prompt_for("solver")[: len(prompt) + len(sampled)] == prompt + sampled


def test_a_turn_without_any_end_is_refused(make_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="end-of-sequence"):
        TeamProtocol(make_tokenizer(PLAIN + PLAIN_OPEN, eos=None, special=()), ROLES)


def test_a_turn_closed_with_nothing_at_all_is_refused_or_works(make_tokenizer: Callable[..., Any]) -> None:
    """The end of sequence could close such a turn; what must not happen is a crash in the middle of an episode."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    try:
        protocol = TeamProtocol(make_tokenizer(template), ROLES)
        check_prefix_stability(protocol)
    except UserError:
        return
    assert protocol.end_ids


def test_an_end_token_that_no_list_names_still_ends_messages(make_tokenizer: Callable[..., Any]) -> None:
    """Phi-3's <|end|> and others are special in tokenizer.json but are no named special token of the tokenizer."""
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    added = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
    tokenizer = make_tokenizer(template, eos="<|endoftext|>", special=(), added=added)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert tokenizer.encode("a<|end|>")[-1] == end
    assert end in ChatPieces(tokenizer, reasoning=False).end_ids


def test_a_tokenizer_that_merges_across_the_turn_boundary_is_refused(make_tokenizer: Callable[..., Any]) -> None:
    """The header's newline and the first letter of a message become one token when a longer transcript is encoded."""
    tokenizer = make_tokenizer(merges=(("Ċ", "I"),), split=False)
    with pytest.raises(UserError, match="prefix-stable"):
        check_prefix_stability(TeamProtocol(tokenizer, ROLES))
    check_prefix_stability(TeamProtocol(make_tokenizer(merges=(("Ċ", "I"),), split=True), ROLES))


def test_build_team_refuses_an_unstable_protocol_before_anything_is_played(make_tokenizer: Callable[..., Any]) -> None:
    section = TeamSection.model_validate({"agents": [{"name": "planner"}, {"name": "solver"}]})
    with pytest.raises(UserError, match="prefix-stable"):
        build_team(section, make_tokenizer(merges=(("Ċ", "I"),), split=False), base_context_tokens=64)
    team = build_team(section, make_tokenizer(), base_context_tokens=64)
    assert team.names == ["planner", "solver"] and team.context_tokens == 64


def test_the_context_is_the_smaller_of_recipe_and_base(make_tokenizer: Callable[..., Any]) -> None:
    for wanted, expected in ((32, 32), (128, 64), (None, 64)):
        section = TeamSection.model_validate({"agents": [{"name": "a"}], "protocol": {"context_tokens": wanted}})
        assert build_team(section, make_tokenizer(), base_context_tokens=64).context_tokens == expected


def test_encoding_is_cached_but_never_shared(make_tokenizer: Callable[..., Any]) -> None:
    chat = ChatPieces(make_tokenizer(), reasoning=False)
    first = chat.encode("abc")
    first.append(0)
    assert chat.encode("abc") == first[:-1]
    for i in range(5000):
        chat.encode(str(i))
    assert chat.encode("abc") == first[:-1]


def test_a_template_that_prints_the_date_gives_the_same_prompt_every_day(make_tokenizer: Callable[..., Any]) -> None:
    template = (
        "{{ strftime_now('%Y-%m-%d') }} {{ date_string }}\n{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    pieces = ChatPieces(make_tokenizer(template), reasoning=False)
    assert pieces.prologue("s", "q").startswith("2024-07-26 26 Jul 2024\n")


def test_build_team_passes_the_bases_end_ids_on(make_tokenizer: Callable[..., Any]) -> None:
    section = TeamSection.model_validate({"agents": [{"name": "planner"}]})
    tokenizer = make_tokenizer(eos="<|im_end|>", added=("<|eom|>",))
    own = build_team(section, tokenizer, base_context_tokens=64).protocol.end_ids
    eom = tokenizer.convert_tokens_to_ids("<|eom|>")
    assert build_team(section, tokenizer, base_context_tokens=64, end_ids=(*own, eom)).protocol.end_ids == [*own, eom]
