"""Per-message gradients of an agent's adapter, and what thm:info-lower-stage makes of them."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from teamtr_lora.algorithm.certificate import leave_one_out
from teamtr_lora.algorithm.local_gain import gram_model
from teamtr_lora.base.bank import AdapterBank, Snapshot
from teamtr_lora.runs.diagnostic_rows import FisherReading
from teamtr_lora.team import Episode, agent_sequences
from teamtr_lora.training.scoring import Microbatch, Scorer, message_batch

FEWEST = 4  # messages, of at least two groups: fewer have no halves
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
    """At the agent as it was (`before`), on messages that the team of then played, of the step to the agent as it is.

    Leaves the agent as it is. None where there are too few messages, or the step is none.
    """
    chosen = _spread_out([e for e in episodes if any(m.agent == agent and m.token_ids for m in e.messages)], messages)
    after = bank.snapshot(agent)
    step = torch.cat([(after[name] - before[name]).flatten().double().cpu() for name in before])
    if len(chosen) < FEWEST or len({e.group for e in chosen}) < 2 or not bool(step.any()):
        return None
    bank.restore(agent, before)
    try:
        rows_MP, logp_before_M, owner_M = _message_gradients(scorer, bank, agent, chosen)
    finally:
        bank.restore(agent, after)
    logp_after_M = _message_logp(scorer, bank, agent, chosen)
    advantage_E = leave_one_out([e.discounted_return(discount) for e in episodes], [e.group for e in episodes])
    advantage = dict(zip(map(id, episodes), advantage_E.tolist(), strict=True))
    advantage_M = np.array([advantage[id(e)] for e in owner_M])
    along_M = (rows_MP.double() @ step).numpy()
    per_episode = len(owner_M) / len(chosen)
    gram_MM = (rows_MP.double() @ rows_MP.double().T).numpy()
    model = gram_model(
        gram_MM,
        advantage_M,
        [e.group for e in owner_M],
        messages_per_episode=per_episode,
        parameters=rows_MP.shape[1],
        seed=seed,
    )
    linear = per_episode * float((advantage_M * along_M).mean())
    gained = per_episode * float((advantage_M * np.expm1(np.minimum((logp_after_M - logp_before_M).numpy(), 30.0))).mean())
    values = FisherReading(
        messages=len(owner_M),
        damping=model.damping,
        slope=model.slope,
        slope_in_sample=model.slope_in_sample,
        smallest_eigenvalue=model.smallest_eigenvalue,
        smoothness=max(0.0, 2 * (linear - gained) / float(step @ step)),
        step_kl=0.5 * float((along_M**2).mean()),
        measured_kl=measured_kl,
    )
    return values if all(math.isfinite(v) for v in values.model_dump().values()) else None


def _spread_out(episodes: list[Episode], count: int) -> list[Episode]:
    """About `count` of them, evenly over the list, so that all groups have a part."""
    stride = max(1, len(episodes) // max(1, count))
    return episodes[::stride][:count]


def _message_gradients(
    scorer: Scorer, bank: AdapterBank, agent: str, episodes: list[Episode]
) -> tuple[Tensor, Tensor, list[Episode]]:
    """[M, P] on the CPU, each message's log-probability, and its episode. One forward pass an episode, one backward a message."""
    rows: list[Tensor] = []
    logps: list[float] = []
    owners: list[Episode] = []
    with bank.training(agent) as parameters:
        for episode in episodes:
            for part, count in _parts(scorer, agent, episode):
                hidden_ND = scorer.hidden(part)
                scale = HALF_PRECISION_SCALE if hidden_ND.dtype == torch.float16 else 1.0
                logp_N = scorer.score(part, hidden_ND).logp_N
                for message in range(count):
                    total = logp_N[part.message_N == message].sum()
                    grads = torch.autograd.grad(total * scale, parameters, retain_graph=message + 1 < count)
                    rows.append(torch.cat([(g / scale).flatten().cpu() for g in grads]))
                    logps.append(float(total.detach()))
                    owners.append(episode)
    return torch.stack(rows), torch.tensor(logps, dtype=torch.float64), owners


@torch.no_grad()
def _message_logp(scorer: Scorer, bank: AdapterBank, agent: str, episodes: list[Episode]) -> Tensor:
    bank.activate(agent)
    found: list[float] = []
    for episode in episodes:
        for part, count in _parts(scorer, agent, episode):
            logp_N = scorer.score(part, scorer.hidden(part)).logp_N
            found += [float(logp_N[part.message_N == message].sum()) for message in range(count)]
    return torch.tensor(found, dtype=torch.float64)


def _parts(scorer: Scorer, agent: str, episode: Episode) -> list[tuple[Microbatch, int]]:
    """One micro-batch a sequence of the episode, with its messages numbered from 0."""
    found = []
    for sequence in agent_sequences([episode], agent):
        batch = message_batch(
            [sequence],
            {id(episode): 0.0},
            {id(episode): 0},
            tokens_per_microbatch=len(sequence.ids),
            mask_truncated=False,
            device=scorer.device,
        )
        found.append((batch.microbatches[0], len(batch.messages)))
    return found
