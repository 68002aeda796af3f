"""How many tokens a forward pass of an update takes: what the recipe says, or as many as fit beside the engine."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from teamtr_lora.algorithm.variants.chosen import Variants
from teamtr_lora.base.frozen_base import base_facts
from teamtr_lora.base.memory_model import DEFAULT_TOKENS, UpdateShape, choose_tokens, training_path, update_memory, update_peak
from teamtr_lora.recipe import TeamTRConfig
from teamtr_lora.rollout.playable import PlayableTeam

logger = logging.getLogger(__name__)


def microbatch_tokens(playable: PlayableTeam, config: TeamTRConfig) -> int:
    """`training.tokens_per_microbatch` as a number. On a GPU, says so where an update will hardly fit into its memory."""
    wanted, device = config.training.tokens_per_microbatch, playable.base.device
    if device.type == "cpu":
        return DEFAULT_TOKENS if wanted == "auto" else wanted
    facts, shape = base_facts(playable.base.folder), update_shape(playable, config)
    beside = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    lendable = playable.sampler.lendable_bytes()
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


def update_shape(playable: PlayableTeam, config: TeamTRConfig) -> UpdateShape:
    """What an update's memory depends on, for this team; one message an agent and episode, as long as it may be."""
    base, rollout, training = playable.base, config.rollout, config.training
    learned = Variants.of(config).reuse.learned_items(rollout.items_per_stage, len(playable.team.names))
    per_episode = rollout.max_message_tokens * turns_per_agent(playable)
    return UpdateShape(
        tokens=DEFAULT_TOKENS,
        learned_tokens=learned * rollout.episodes_per_item * per_episode,
        judged_tokens=config.trust_region.judging_episodes * per_episode,
        rank=max(playable.bank.config(agent)["r"] for agent in playable.team.names),
        value=base.dtype.itemsize,
        path=training_path(
            base.device.type,
            base.dtype.itemsize,
            quantized=base.quantization != "none",
            dora=not playable.bank.can_mix,
            compiled=training.compile,
        ),
        checkpointing=training.gradient_checkpointing,
        head_chunk=training.head_chunk_tokens,
    )


def turns_per_agent(playable: PlayableTeam) -> int:
    """Messages of one agent in an episode, where all speak alike."""
    return -(-playable.team.router.max_messages // len(playable.team.names))
