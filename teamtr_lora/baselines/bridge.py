"""Between our episodes and TRL's trainer: an episode of one agent as the one sequence that TRL learns from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.team import Episode, agent_sequences

Columns = dict[str, list[Any]]


def prompt_keys(stage: int, items: int) -> list[str]:
    """What stands for a stage's items in TRL's dataset: items are looked up by it, never rendered from it."""
    return [f"{stage}:{index}" for index in range(items)]


def trl_columns(episodes: Sequence[Episode], agent: str, *, mask_truncated: bool) -> Columns:
    """What `rollout_func` returns: the tokens exactly as they were sampled after, one row an episode.

    The completion runs from the agent's first message to the end of its last; `env_mask` is 1 on what it said and 0 on what it
    was told in between. `episode_reward` is what the task's verifier gave, for `reward` to hand on.
    """
    columns: Columns = {key: [] for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "episode_reward")}
    for episode in episodes:
        sequences = agent_sequences([episode], agent)
        if len(sequences) != 1:
            raise UserError(
                f"item {episode.item_id!r}: TRL learns from one sequence an episode, and hidden reasoning cut this one; set "
                "team.protocol.reasoning_tags=keep"
            )
        ids, spans = sequences[0].ids, sequences[0].spans
        start = spans[0].start
        mask, logprobs = [0] * (len(ids) - start), [0.0] * (len(ids) - start)
        for span in spans:
            said = slice(span.start - start, span.end - start)
            logprobs[said] = span.message.sampler_logprobs
            mask[said] = [int(not (mask_truncated and span.message.truncated))] * (span.end - span.start)
        columns["prompt_ids"].append(ids[:start])
        columns["completion_ids"].append(ids[start:])
        columns["logprobs"].append(logprobs)
        columns["env_mask"].append(mask)
        columns["episode_reward"].append(episode.reward)
    return columns


def reward(prompts: list[Any], completions: list[Any], episode_reward: list[float], **columns: Any) -> list[float | None]:
    """TRL's reward function: the episodes are scored already."""
    return list(episode_reward)
