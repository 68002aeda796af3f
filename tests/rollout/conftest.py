"""A tiny team whose adapters differ, so that a message tells which of them made it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import FrozenBase, load_base
from teamtr_lora.recipe import LoraSection, RolloutSection, TeamSection
from teamtr_lora.rollout.transformers_engine import TransformersSampler
from teamtr_lora.team import Team, build_team

AGENTS = ["a", "b", "c"]


@pytest.fixture(scope="module")
def base(tiny_base: Path) -> FrozenBase:
    return load_base(str(tiny_base), device="cpu")


@pytest.fixture(scope="module")
def bank(base: FrozenBase) -> AdapterBank:
    """Ranks differ; B, which LoRA starts at zero, is random."""
    specs = {name: LoraSection(rank=rank) for name, rank in zip(AGENTS, (2, 4, 8), strict=True)}
    bank = AdapterBank(base.model, specs, base_name="tiny", seed=0)
    generator = torch.Generator().manual_seed(0)
    for agent in AGENTS:
        moved = {n: torch.randn(t.shape, generator=generator) * 0.1 for n, t in bank.snapshot(agent).items()}
        bank.restore(agent, moved)
        bank.commit(agent)
    return bank


@pytest.fixture
def make_sampler(bank: AdapterBank, base: FrozenBase) -> Callable[..., TransformersSampler]:
    def make(**options: Any) -> TransformersSampler:
        context_tokens = options.pop("context_tokens", 128)
        sampler = TransformersSampler(base, bank, RolloutSection(**options), context_tokens=context_tokens)
        for agent in AGENTS:
            sampler.publish(bank.version(agent))
        return sampler

    return make


@pytest.fixture
def make_team(base: FrozenBase) -> Callable[..., Team]:
    def make(names: list[str] | None = None, *, context_tokens: int = 512, router: Any = None, **protocol: Any) -> Team:
        section = TeamSection.model_validate(
            {
                "agents": [{"name": name} for name in names or AGENTS[:2]],
                "protocol": {"context_tokens": context_tokens, **protocol},
                "router": router or {},
            }
        )
        return build_team(section, base.tokenizer, base_context_tokens=base.context_tokens)

    return make
