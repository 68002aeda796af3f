"""Which engine a recipe asks for. Each is imported only when it is used: vLLM is an extra."""

from __future__ import annotations

import pkgutil

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import FrozenBase
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import RolloutSection
from teamtr_lora.recipe.engine_facts import ENGINES
from teamtr_lora.rollout.sampler import Sampler

SAMPLERS = {
    "transformers": "teamtr_lora.rollout.transformers_engine:TransformersSampler",
    "vllm": "teamtr_lora.rollout.vllm.engine:VllmSampler",
    "vllm_server": "teamtr_lora.rollout.vllm_server:ServerSampler",
}
"""The sampler of each record in `teamtr_lora.recipe.engine_facts`; called as `open_sampler` is."""


def open_sampler(base: FrozenBase, bank: AdapterBank, rollout: RolloutSection, *, context_tokens: int) -> Sampler:
    facts = ENGINES[rollout.engine]
    if not facts.dora and not bank.can_mix:
        raise UserError(f"rollout.engine = {facts.name}: it cannot serve DoRA adapters; use rollout.engine=transformers")
    sampler: Sampler = pkgutil.resolve_name(SAMPLERS[facts.name])(base, bank, rollout, context_tokens=context_tokens)
    return sampler
