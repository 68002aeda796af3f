"""Which engine a recipe asks for. Each is imported only when it is used: vLLM is an extra."""

from __future__ import annotations

import importlib.util
import pkgutil

import torch

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


def begin_engine(rollout: RolloutSection, device: torch.device, dtype: torch.dtype) -> None:
    """Begins what an engine's start can do while the base is loaded."""
    if rollout.engine == "vllm" and importlib.util.find_spec("vllm") is not None:
        import peft  # noqa: F401  (with most of transformers: two threads that import it at once may see it in halves)

        from teamtr_lora.rollout.vllm.start import begin_import

        begin_import(rollout, device, dtype)


def open_sampler(base: FrozenBase, bank: AdapterBank, rollout: RolloutSection, *, context_tokens: int) -> Sampler:
    facts = ENGINES[rollout.engine]
    if not facts.dora and not bank.can_mix:
        raise UserError(f"rollout.engine = {facts.name}: it cannot serve DoRA adapters; use rollout.engine=transformers")
    sampler: Sampler = pkgutil.resolve_name(SAMPLERS[facts.name])(base, bank, rollout, context_tokens=context_tokens)
    return sampler
