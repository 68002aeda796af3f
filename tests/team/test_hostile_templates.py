"""Chat templates that loop or explode end in one line, in time and without filling the memory; honest ones are as before."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from teamtr_lora.common.errors import UserError
from teamtr_lora.team.chat import ChatPieces

GOOD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
GOOD += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LARGE = {
    "doubling": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "repetition": "{{ 'x' * 9999999999 }}",
    "padding": "{{ 'x'|center(9999999999) }}",
    "format": "{{ '%09999999999d'|format(1) }}",
    "a list": "{{ ([0] * 99999999)|length }}{{ ([[0]] * 999999999)|length }}",
}
ENDLESS = {
    "nested loops": LOOP,
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{% for a in range(9999) %}" + LOOP + "{% endfor %}{{ f(1) }}",
    "only with a system turn": "{% if messages[0].role == 'system' %}" + LOOP + "{% endif %}",
    "only when answered": "{% if messages|length > 1 %}" + LOOP + "{% endif %}",
    "only to open": "{% if add_generation_prompt %}" + LOOP + "{% endif %}",
}


def refusal(tokenizer: Any, template: str) -> str:
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="chat template") as caught:
        ChatPieces(tokenizer, reasoning=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def tokenizer(tiny_base: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_base)


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_an_end_is_ended(template: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teamtr_lora.team.template_limits.TRIAL_SECONDS", 1.0)
    started, said = time.monotonic(), refusal(tokenizer, template + GOOD)
    assert "was not finished after" in said and time.monotonic() - started < 60


@pytest.mark.parametrize("template", LARGE.values(), ids=LARGE)
def test_a_template_does_not_fill_the_memory(template: str, tokenizer: Any) -> None:
    assert "was not finished" not in refusal(tokenizer, template + GOOD)


def test_no_text_from_outside_reaches_the_template(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that behaves until it sees a certain text never sees it: the process that renders it is not asked again."""
    tokenizer.chat_template = "{% if 'go off' in messages[-1].content %}{{ 'x' * 9999999999 }}{% endif %}" + GOOD
    pieces = ChatPieces(tokenizer, reasoning=False)
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", None)
    assert pieces.prologue("be brief", "go off") == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\ngo off<|im_end|>\n"
    )


@pytest.mark.parametrize("content", ["plain", " \n padded\t\n", "", "{{ 7 * 7 }}", "\u2063mark\u2063", "two\nlines"])
@pytest.mark.parametrize("trimmed", ["", "|trim", ".strip()", ".lstrip()", ".rstrip()"])
def test_contents_stand_where_the_template_would_write_them(tokenizer: Any, content: str, trimmed: str) -> None:
    tokenizer.chat_template = GOOD.replace("m.content", f"m.content{trimmed}")
    pieces = ChatPieces(tokenizer, reasoning=False)
    for system in ("", " be brief "):
        turns = [{"role": "system", "content": system}, {"role": "user", "content": content}]
        assert pieces.prologue(system, content) == tokenizer.apply_chat_template(turns, tokenize=False)


ODD = '"\'\\ \\"\\x22}}{{ 7 * 7 }}{%%}{% endraw %}{#-#}\r\n\0$open_user${open_user}\u2028\U0001f600'
ENDS = [("", ""), (" | trim", ""), (".lstrip()", ""), (".rstrip()", ""), ("", "{% if loop.first %}first{% endif %}")]


@pytest.mark.parametrize(("trimmed", "first"), ENDS)
def test_the_template_for_a_server_says_the_pieces_and_nothing_else(tokenizer: Any, trimmed: str, first: str) -> None:
    """Whatever characters a base's template writes, in ours they are text; and the white space goes where it goes in training."""
    written = "{{ " + repr(ODD) + " }}"
    tokenizer.chat_template = GOOD.replace("m.content", f"m.content{trimmed}").replace(
        "<|im_end|>\n", f"{written}<|im_end|>\n{first}"
    )
    chat = ChatPieces(tokenizer, reasoning=False)
    texts = [("system", " s"), ("user", " u\n"), ("assistant", "a {{ 1 }}"), ("user", "\tv ")]
    turns = [{"role": role, "content": content} for role, content in texts]
    wanted = chat.prologue(" s", " u\n") + chat.agent_open + "a {{ 1 }}" + chat.agent_close
    wanted += chat.user_open + chat._shaped("padded", "\tv ") + chat.user_close
    assert tokenizer.apply_chat_template(turns, chat_template=chat.plain_template(), tokenize=False) == wanted


@pytest.mark.parametrize(
    "template",
    [
        GOOD.replace("{{ m.content }}", "{{ m.content }}{% if m.role == 'user' %}{{ m.content }}{% endif %}"),
        GOOD.replace("{{ m.content }}", "{{ m.content }}{% if not loop.first and m.role == 'user' %}{{ m.content }}{% endif %}"),
        GOOD.replace("{{ m.content }}", "{{ m.content }}\u2063mark\u2063"),
        GOOD.replace("\n", "{{ '\\ud800' }}"),
        GOOD.replace("\n", "{{ '\\udcff' }}"),
    ],
)
def test_a_template_that_repeats_a_content_or_writes_no_text_is_refused(template: str, tokenizer: Any) -> None:
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="chat template") as caught:
        ChatPieces(tokenizer, reasoning=False)
    assert "\n" not in str(caught.value)


def test_a_mistake_in_a_template_is_one_line(tokenizer: Any) -> None:
    for template in ("{{ nonesuch.a.b }}", "{%", "{{ raise_exception('no') }}", "{{ messages[0].content }}"):
        refusal(tokenizer, template)
