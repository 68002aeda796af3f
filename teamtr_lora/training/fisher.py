"""Per-message gradients of an agent's adapter, and what thm:info-lower-stage makes of them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from teamtr_lora.algorithm.certificate import leave_one_out
from teamtr_lora.algorithm.local_gain import gram_model
from teamtr_lora.algorithm.surrogate import LARGEST_LOG_RATIO
from teamtr_lora.base.bank import AdapterBank, Snapshot
from teamtr_lora.runs.diagnostic_rows import FisherReading
from teamtr_lora.team import Episode, agent_sequences
from teamtr_lora.training.batches import Microbatch, message_batch
from teamtr_lora.training.scoring import Scorer

FEWEST = 4  # messages, of at least two groups: fewer cannot be halved
HALF_PRECISION_SCALE = 256.0  # keeps small gradients from vanishing on their way through float16 activations


def fisher_reading(
    scorer: Scorer,
    bank: AdapterBank,
    agent: str,
    before: Snapshot,
    episodes: list[Episode],
    *,
    messages: int,
    discount: float,
    measured_kl: float,
    seed: int,
) -> FisherReading | None:
    """The local model at the agent as it was (`before`), on messages that the team played then, beside the step to the agent as
    it is now.

    Leaves the agent as it is. None where there are too few messages, or the agent has not moved.
    """
    spoke = [e for e, episode in enumerate(episodes) if any(m.agent == agent and m.token_ids for m in episode.messages)]
    chosen = _spread_out(spoke, messages)
    after = bank.snapshot(agent)
    step = torch.cat([(after[name] - before[name]).flatten().double().cpu() for name in before])
    if len(chosen) < FEWEST or len({episodes[e].group for e in chosen}) < 2 or not bool(step.any()):
        return None
    parts = [part for e in chosen for part in _parts(scorer, agent, episodes[e], e)]
    bank.restore(agent, before)
    try:
        rows_MP, logp_before_M = _message_gradients(scorer, bank, agent, parts)
    finally:
        bank.restore(agent, after)
    logp_after_M = _message_logp(scorer, bank, agent, parts)
    episode_M = [part.episode for part in parts for _ in range(part.messages)]
    group_E = [episode.group for episode in episodes]
    advantage_E = leave_one_out([episode.discounted_return(discount) for episode in episodes], group_E)
    advantage_M = advantage_E[episode_M]
    along_M = (rows_MP.double() @ step).numpy()
    per_episode = len(episode_M) / len(chosen) * len(spoke) / len(episodes)  # of all episodes, as L: some it did not speak in
    gram_MM = (rows_MP.double() @ rows_MP.double().T).numpy()
    model = gram_model(
        gram_MM,
        advantage_M,
        [group_E[e] for e in episode_M],
        messages_per_episode=per_episode,
        parameters=rows_MP.shape[1],
        seed=seed,
    )
    linear = per_episode * float((advantage_M * along_M).mean())
    log_ratio_M = np.minimum((logp_after_M - logp_before_M).numpy(), LARGEST_LOG_RATIO)
    gained = per_episode * float((advantage_M * np.expm1(log_ratio_M)).mean())
    values = FisherReading(
        messages=len(episode_M),
        **asdict(model),
        smoothness=max(0.0, 2 * (linear - gained) / float(step @ step)),
        step_kl=0.5 * float((along_M**2).mean()),
        measured_kl=measured_kl,
    )
    return values if all(math.isfinite(v) for v in values.model_dump().values()) else None


def _spread_out(places: list[int], count: int) -> list[int]:
    """About `count` of them, evenly over the list, so that all groups have a part."""
    stride = max(1, len(places) // max(1, count))
    return places[::stride][:count]


@dataclass(frozen=True)
class _Part:
    """One sequence of an episode as a micro-batch, its messages numbered from 0."""

    tokens: Microbatch
    messages: int
    episode: int  # its place among the episodes


def _parts(scorer: Scorer, agent: str, episode: Episode, place: int) -> list[_Part]:
    found = []
    for sequence in agent_sequences([episode], agent):
        batch = message_batch([sequence], None, tokens_per_microbatch=len(sequence.ids), device=scorer.device)
        found.append(_Part(batch.microbatches[0], len(batch.messages), place))
    return found


def _message_gradients(scorer: Scorer, bank: AdapterBank, agent: str, parts: list[_Part]) -> tuple[Tensor, Tensor]:
    """[M, P] on the CPU, and each message's log-probability. One forward pass a sequence, one backward pass a message."""
    rows: list[Tensor] = []
    logps: list[float] = []
    with bank.training(agent) as parameters:
        for part in parts:
            hidden_ND = scorer.hidden(part.tokens)
            scale = HALF_PRECISION_SCALE if hidden_ND.dtype == torch.float16 else 1.0
            logp_N = scorer.score(part.tokens, hidden_ND).logp_N
            for message in range(part.messages):
                total = logp_N[part.tokens.message_N == message].sum()
                grads = torch.autograd.grad(total * scale, parameters, retain_graph=message + 1 < part.messages)
                rows.append(torch.cat([(g / scale).flatten().cpu() for g in grads]))
                logps.append(float(total.detach()))
    return torch.stack(rows), torch.tensor(logps, dtype=torch.float64)


@torch.no_grad()
def _message_logp(scorer: Scorer, bank: AdapterBank, agent: str, parts: list[_Part]) -> Tensor:
    bank.activate(agent)
    found: list[float] = []
    for part in parts:
        logp_N = scorer.score(part.tokens, scorer.hidden(part.tokens)).logp_N
        found += [float(logp_N[part.tokens.message_N == message].sum()) for message in range(part.messages)]
    return torch.tensor(found, dtype=torch.float64)
