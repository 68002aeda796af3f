"""Trajectory weights for episodes that an earlier team of the stage sampled: the `importance` alternative to resampling."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from teamtr_lora.algorithm.occupancy import trajectory_log_weights
from teamtr_lora.algorithm.surrogate import sum_by_message
from teamtr_lora.base.bank import AdapterBank, Snapshot
from teamtr_lora.team import Episode, agent_sequences
from teamtr_lora.training.batches import MessageBatch
from teamtr_lora.training.gate import gate_pass
from teamtr_lora.training.scoring import Scorer, keep_current, unweighted_batch


@torch.no_grad()
def message_log_ratios(
    scorer: Scorer, bank: AdapterBank, agent: str, episodes: list[Episode], before: Snapshot, *, tokens_per_microbatch: int
) -> tuple[np.ndarray, np.ndarray]:
    """log pi_now(message) / pi_before(message) of the agent's messages, and the episode each is in."""
    batch = unweighted_batch(scorer, agent_sequences(episodes, agent), tokens_per_microbatch)
    now = bank.snapshot(agent)
    bank.activate(agent)
    with gate_pass(scorer):
        new_M = _message_logp(scorer, batch)
        bank.restore(agent, before)
        try:
            old_M = _message_logp(scorer, batch)
        finally:
            bank.restore(agent, now)
    return (new_M - old_M).numpy(), batch.episode_M.numpy()


def episode_log_weights(
    scorer: Scorer, bank: AdapterBank, episodes: list[Episode], sampled: Mapping[str, Snapshot], *, tokens_per_microbatch: int
) -> np.ndarray:
    """log pi_now(episode) / pi_sampled(episode). `sampled` has the agents that have changed since, as they were: the messages of
    the others have the same probability as then."""
    log_E = np.zeros(len(episodes))
    for agent, before in sampled.items():
        ratios = message_log_ratios(scorer, bank, agent, episodes, before, tokens_per_microbatch=tokens_per_microbatch)
        log_E += trajectory_log_weights(*ratios, len(episodes))
    return log_E


def _message_logp(scorer: Scorer, batch: MessageBatch) -> torch.Tensor:
    total_M = torch.zeros(len(batch.messages), dtype=torch.float64)
    for part, logp_N in zip(batch.microbatches, keep_current(scorer, batch).logp, strict=True):
        total_M += sum_by_message(logp_N.double().cpu(), part.message_N.cpu(), len(batch.messages))
    return total_M
