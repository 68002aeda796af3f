"""Which engine a recipe asks for. Each is imported only when it is used: vLLM is an extra."""

from __future__ import annotations

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import FrozenBase
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import RolloutSection
from teamtr_lora.rollout.sampler import Sampler


def open_sampler(base: FrozenBase, bank: AdapterBank, rollout: RolloutSection, *, context_tokens: int) -> Sampler:
    if rollout.engine != "transformers" and not bank.can_mix:
        raise UserError(f"rollout.engine = {rollout.engine}: vLLM cannot serve DoRA adapters; use the transformers engine")
    if rollout.engine == "vllm":
        from teamtr_lora.rollout.vllm.engine import VllmSampler

        return VllmSampler(base, bank, rollout, context_tokens=context_tokens)
    if rollout.engine == "vllm_server":
        from teamtr_lora.rollout.vllm_server import ServerSampler

        return ServerSampler(base, bank, rollout, context_tokens=context_tokens)
    from teamtr_lora.rollout.transformers_engine import TransformersSampler

    return TransformersSampler(
        bank,
        vocab_size=base.vocab_size,
        context_tokens=context_tokens,
        pad_id=base.pad_id,
        requests_per_batch=rollout.requests_per_batch,
    )
