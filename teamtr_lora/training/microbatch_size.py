"""How many tokens a forward pass of an update takes: what the recipe says, or as many as fit beside the engine."""

from __future__ import annotations

import logging
from dataclasses import replace

from teamtr_lora.algorithm.variants.chosen import learned_items
from teamtr_lora.base.frozen_base import base_facts
from teamtr_lora.base.memory import free_bytes
from teamtr_lora.base.memory_model import CPU_TOKENS, MARGIN, UpdateShape, choose_tokens, update_memory, update_peak, update_shape
from teamtr_lora.recipe import TeamTRConfig
from teamtr_lora.rollout.playable import PlayableTeam

logger = logging.getLogger(__name__)


def microbatch_tokens(playable: PlayableTeam, config: TeamTRConfig) -> int:
    """`training.tokens_per_microbatch` as a number. On a GPU, says so where an update will hardly fit into its memory."""
    wanted, device = config.training.tokens_per_microbatch, playable.base.device
    if device.type == "cpu":
        return CPU_TOKENS if wanted == "auto" else wanted
    facts, shape = base_facts(playable.base.folder), team_shape(playable, config)
    beside, lendable = free_bytes(device), playable.sampler.lendable_bytes()
    tokens = choose_tokens(facts, shape, beside, lendable) if wanted == "auto" else wanted
    need = update_peak(update_memory(facts, replace(shape, tokens=max(tokens, config.rollout.max_message_tokens))))
    logger.info("training.tokens_per_microbatch: %d, for an update of about %.1f GiB", tokens, need / 2**30)
    if need > beside + lendable:
        logger.warning(
            "an update needs about %.1f GiB and the GPU has %.1f GiB left for it: set training.gradient_checkpointing=true, "
            "lower training.tokens_per_microbatch (%d), or give rollout.vllm.memory_share less",
            need / 2**30, (beside + lendable) / 2**30, tokens,
        )  # fmt: skip
    return tokens


def update_bytes(playable: PlayableTeam, config: TeamTRConfig, tokens: int) -> int:
    """What the largest update takes at most beside what stands, with micro-batches of `tokens`; 0 on a CPU."""
    if playable.base.device.type == "cpu":
        return 0
    shape = replace(team_shape(playable, config), tokens=max(tokens, config.rollout.max_message_tokens))
    return int(MARGIN * update_peak(update_memory(base_facts(playable.base.folder), shape)))


def team_shape(playable: PlayableTeam, config: TeamTRConfig) -> UpdateShape:
    """What an update's memory depends on, for this team."""
    base, agents = playable.base, len(playable.team.names)
    return update_shape(
        config,
        playable.bank.specs.values(),
        agents=agents,
        messages=playable.team.router.max_messages,
        learned_items=learned_items(config, agents),
        processes=playable.ranks.size,
        value=base.dtype.itemsize,
        device=base.device.type,
        quantized=base.quantization != "none",
    )
