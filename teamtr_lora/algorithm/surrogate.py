"""The clipped surrogate over the updated agent's messages (eq:ppo_obj), in log space."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from teamtr_lora.algorithm.variants.ratio import RATIOS

# exp overflows float32 near 88 and its gradient turns to NaN; a ratio of e^30 is clipped or hopeless either way
LARGEST_LOG_RATIO = 30.0


def sum_by_message(values_N: Tensor, message_N: Tensor, messages: int) -> Tensor:
    """Sums token values into their messages: [N] -> [M]."""
    return torch.zeros(messages, dtype=values_N.dtype, device=values_N.device).index_add(0, message_N, values_N)


def clipped_objective(log_ratio: Tensor, advantage: Tensor, clip: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """`min(w A, clip(w, 1 - clip, 1 + clip_high) A)` elementwise, and `w A`."""
    ratio = torch.exp(log_ratio.clamp(max=LARGEST_LOG_RATIO))
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip_high) * advantage), ratio * advantage


@dataclass(frozen=True)
class SurrogateTerms:
    """Per message, so that micro-batches can be added and groups can be clustered.

    What is maximised is clipped, what judges a step is not: clipping only takes away, so by it even a step that changes ratios at
    random, and nothing on average, would seem to harm.
    """

    objective_M: Tensor
    unclipped_M: Tensor
    log_ratio_M: Tensor  # of the whole message, whatever ratio the objective uses
    clipped_M: Tensor  # share of the ratios outside the clip range


def surrogate_terms(
    logp_new_N: Tensor,
    logp_cur_N: Tensor,
    message_N: Tensor,
    advantage_M: Tensor,
    *,
    clip: float,
    clip_high: float | None = None,
    ratio: str = "message",
) -> SurrogateTerms:
    """Ratios are clipped to 1 - clip and 1 + clip_high (None: 1 + clip). `ratio`: their unit, a name of the table RATIOS."""
    messages = advantage_M.numel()
    delta_N = logp_new_N - logp_cur_N
    length_M = sum_by_message(torch.ones_like(delta_N), message_N, messages).clamp(min=1)
    log_ratio_M = sum_by_message(delta_N, message_N, messages)
    high = clip if clip_high is None else clip_high
    bounds = (torch.log1p(torch.tensor(-clip)).item(), torch.log1p(torch.tensor(high)).item())
    used, owner = RATIOS[ratio]().ratios(delta_N, message_N, log_ratio_M, length_M)
    objective_M, unclipped_M = clipped_objective(used, advantage_M if owner is None else advantage_M[owner], clip, high)
    clipped_M = ((used < bounds[0]) | (used > bounds[1])).to(delta_N.dtype)
    if owner is not None:
        objective_M, unclipped_M, clipped_M = (
            sum_by_message(each, owner, messages) / length_M for each in (objective_M, unclipped_M, clipped_M)
        )
    return SurrogateTerms(objective_M, unclipped_M, log_ratio_M, clipped_M)
