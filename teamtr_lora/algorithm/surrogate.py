"""The clipped surrogate over the updated agent's messages (eq:ppo_obj), in log space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# exp overflows float32 near 88 and its gradient turns to NaN; a ratio of e^30 is clipped or hopeless either way
LARGEST_LOG_RATIO = 30.0

Ratio = Literal["message", "token", "sequence_mean"]


def sum_by_message(values_N: Tensor, message_N: Tensor, messages: int) -> Tensor:
    """Sums token values into their messages: [N] -> [M]."""
    return torch.zeros(messages, dtype=values_N.dtype, device=values_N.device).index_add(0, message_N, values_N)


def clipped_objective(log_ratio: Tensor, advantage: Tensor, clip: float, clip_high: float) -> Tensor:
    """`min(w A, clip(w, 1 - clip, 1 + clip_high) A)` elementwise."""
    ratio = torch.exp(log_ratio.clamp(max=LARGEST_LOG_RATIO))
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip_high) * advantage)


@dataclass(frozen=True)
class SurrogateTerms:
    """Per message, so that micro-batches can be added and groups can be clustered."""

    objective_M: Tensor
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
    ratio: Ratio = "message",
) -> SurrogateTerms:
    """Ratios are clipped to 1 - clip and 1 + clip_high (None: 1 + clip).

    `message`: w is the product over the message's tokens (the paper's). `token`: one ratio a token, averaged over the
    message. `sequence_mean`: the geometric mean of the token ratios."""
    messages = advantage_M.numel()
    delta_N = logp_new_N - logp_cur_N
    length_M = sum_by_message(torch.ones_like(delta_N), message_N, messages).clamp(min=1)
    log_ratio_M = sum_by_message(delta_N, message_N, messages)
    high = clip if clip_high is None else clip_high
    bounds = (torch.log1p(torch.tensor(-clip)).item(), torch.log1p(torch.tensor(high)).item())
    if ratio == "token":
        objective_N = clipped_objective(delta_N, advantage_M[message_N], clip, high)
        objective_M = sum_by_message(objective_N, message_N, messages) / length_M
        outside_N = ((delta_N < bounds[0]) | (delta_N > bounds[1])).to(delta_N.dtype)
        clipped_M = sum_by_message(outside_N, message_N, messages) / length_M
    else:
        used_M = log_ratio_M if ratio == "message" else log_ratio_M / length_M
        objective_M = clipped_objective(used_M, advantage_M, clip, high)
        clipped_M = ((used_M < bounds[0]) | (used_M > bounds[1])).to(delta_N.dtype)
    return SurrogateTerms(objective_M, log_ratio_M, clipped_M)
