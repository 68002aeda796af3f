"""Chat templates that loop or explode end in one line, in time and without filling the memory; honest ones are as before."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from teamtr_lora.common.errors import UserError
from teamtr_lora.team import chat as chat_module
from teamtr_lora.team.chat import ChatPieces
from teamtr_lora.team.template_limits import TooLongError, check_template, limited

GOOD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
GOOD += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
EXPLODES = {
    "nested loops": LOOP,
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
    "doubling": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "repetition": "{{ 'x' * 9999999999 }}",
    "padding": "{{ 'x'|center(9999999999) }}",
    "format": "{{ '%09999999999d'|format(1) }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a list": "{{ ([0] * 99999999)|length }}{{ ([[0]] * 999999999)|length }}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{% for a in range(9999) %}" + LOOP + "{% endfor %}{{ f(1) }}",
    "only with a system turn": "{% if messages[0].role == 'system' %}" + LOOP + "{% endif %}",
    "only when answered": "{% if messages|length > 1 %}" + LOOP + "{% endif %}",
    "only to open": "{% if add_generation_prompt %}" + LOOP + "{% endif %}",
}


@pytest.fixture
def tokenizer(tiny_base: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_base)


@pytest.mark.parametrize("template", EXPLODES.values(), ids=EXPLODES)
def test_it_ends_in_one_line(template: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teamtr_lora.team.template_limits.TRIAL_SECONDS", 3.0)
    tokenizer.chat_template = template + GOOD
    started = time.monotonic()
    with pytest.raises(UserError, match="chat template") as caught:
        ChatPieces(tokenizer, reasoning=False)
    assert "\n" not in str(caught.value) and time.monotonic() - started < 30


def test_what_only_a_later_content_sets_off_is_bounded_in_time(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer.chat_template = "{% if 'go off' in messages[-1].content %}" + LOOP + "{% endif %}" + GOOD
    pieces = ChatPieces(tokenizer, reasoning=False)
    assert "fine" in pieces.prologue("", "fine")
    monkeypatch.setattr(chat_module, "limited", lambda: limited(0.5))
    started = time.monotonic()
    with pytest.raises(UserError, match="not finished"):
        pieces.prologue("", "go off")
    assert time.monotonic() - started < 20
    assert "fine" in pieces.prologue("", "fine"), "afterwards all is as before"


@pytest.mark.parametrize(
    "template", [GOOD, "{% generation %}{{ messages[0].content }}{% endgeneration %}", "{{ nonesuch.a.b }}", "{%"]
)
def test_only_the_endless_are_refused_by_the_trial(template: str) -> None:
    check_template(template, (("eos_token", "</s>"),))


def test_the_limit_ends_its_own_thread_only() -> None:
    ended: list[str] = []

    def work(name: str, seconds: float) -> None:
        try:
            with limited(seconds):
                for _ in range(300):
                    time.sleep(0.005)
            ended.append(f"{name} finished")
        except TooLongError:
            ended.append(f"{name} stopped")

    threads = [threading.Thread(target=work, args=("short", 0.2)), threading.Thread(target=work, args=("long", 60.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ended) == ["long finished", "short stopped"]
