"""tab:pnp-ablation as a list of recipes: each row switches on one more of the paper's four steps."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from teamtr_lora.recipe import load_recipe
from teamtr_lora.swap.compatibility import protocol_checks
from teamtr_lora.team import TeamProtocol

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "plug_and_play"
ROWS = ["no_unification", "system_prompt", "reasoning_tags", "tool_calls", "full"]


def switches(name: str) -> list[bool]:
    recipe = load_recipe(FOLDER / f"{name}.yaml")
    protocol = recipe.team.protocol
    return [
        protocol.system is not None,
        protocol.reasoning_tags == "strip",
        protocol.tool_calls == "canonical",
        recipe.swap.stage0,
    ]


def test_each_row_of_the_ablation_adds_one_step() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(ROWS)
    for place, name in enumerate(ROWS):
        assert switches(name) == [step < place for step in range(4)], name
    full, bare = (load_recipe(FOLDER / f"{name}.yaml") for name in ("full", "no_unification"))
    same = {"team", "swap"}
    assert full.model_dump(exclude=same) == bare.model_dump(exclude=same)
    assert [c.verdict for c in protocol_checks(full, None)] == ["ok"] * 3
    assert protocol_checks(bare, None)[0].verdict == "note", "an ablation may go on where a user is stopped"


def test_without_a_system_text_the_template_decides(tiny_base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nI am the default.<|im_end|>\n{% endif %}"
        + tokenizer.chat_template
    )
    roles = {"left": "first"}

    def opening(system: str | None) -> str:
        protocol = TeamProtocol(tokenizer, roles, system=system)
        return str(tokenizer.decode(protocol.begin("q").prompt_for("left")))

    assert opening("").startswith("<|im_start|>system\nleft: first<|im_end|>\n<|im_start|>user\nq<|im_end|>")
    assert opening(None).startswith(
        "<|im_start|>system\nI am the default.<|im_end|>\n<|im_start|>user\nleft: first\n\nq<|im_end|>"
    )
