"""Log-probabilities and exact KL of the training pass from two head products, with no logits kept for the backward pass.

The logits of a frozen head are linear in the hidden state: z = h W'. So two numbers and one vector say all that the surrogate and
the KL need of a token's distribution over the vocabulary: the log-normaliser lse(h) = log sum exp(z / T), the target's logit, and
the mean head row m(h) = sum_v softmax(z / T)_v W_v, which is the gradient of T lse with respect to h. Then

    log q(target)    = z_target / T - lse(h)                      gradient: (W_target - m(h)) / T
    KL(cur || new)   = lse(h) - lse(c) - (h - c) . m(c) / T       gradient: (m(h) - m(c)) / T

with c the current policy's hidden state. The second line is the Bregman divergence of the log-normaliser: exact over the whole
vocabulary, at no head product beyond the candidate's own, because lse(c) and m(c) are kept once per update. Its rounding error is
about 1e-6 a token, far below what half-precision activations add; the gate measures with `token_kl.score_tokens`, whose error is
quadratic in the rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from teamtr_lora.algorithm.token_kl import TokenScores, head_logits

# Probabilities are multiplied by this before they are rounded to float16, so that small ones are not flushed to zero.
HALF_SCALE = 2.0**15


@dataclass(frozen=True)
class HeadStatistics:
    """What is kept of one policy at every message token."""

    hidden_ND: Tensor
    normaliser_N: Tensor  # log sum exp(z / T)
    mean_row_ND: Tensor  # m(h), float32

    def detach(self) -> HeadStatistics:
        return HeadStatistics(self.hidden_ND.detach(), self.normaliser_N.detach(), self.mean_row_ND.detach())


def score_with_statistics(
    hidden_ND: Tensor,
    head_VD: Tensor,
    target_N: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    current: HeadStatistics | None = None,
) -> tuple[TokenScores, HeadStatistics]:
    """The scores of `score_tokens`, and this policy's own statistics, which the next passes take as `current`."""
    logp_N, kl_N, normaliser_N, mean_row_ND = _Scores.apply(hidden_ND, head_VD, target_N, temperature, chunk_tokens, current)
    statistics = HeadStatistics(hidden_ND, normaliser_N, mean_row_ND).detach()
    return TokenScores(logp_N, None if current is None else kl_N), statistics


@torch.no_grad()
def read_with_statistics(
    hidden_ND: Tensor,
    head_VD: Tensor,
    target_N: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    current: HeadStatistics | None = None,
) -> TokenScores:
    """The same scores from one head product: the mean head row is of use to gradients and to later passes alone."""
    normaliser_N, logp_N, _ = _statistics(hidden_ND, head_VD, target_N, temperature, chunk_tokens, rows=False)
    return TokenScores(logp_N, None if current is None else _kl(hidden_ND, normaliser_N, temperature, current))


def _kl(hidden_ND: Tensor, normaliser_N: Tensor, temperature: float, current: HeadStatistics) -> Tensor:
    """The Bregman divergence of the log-normaliser between the current policy's hidden states and these."""
    wide = current.mean_row_ND.dtype
    step_ND = hidden_ND.to(wide) - current.hidden_ND.to(wide)
    return normaliser_N - current.normaliser_N - (step_ND * current.mean_row_ND).sum(1) / temperature


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        target_N: Tensor,
        temperature: float,
        chunk_tokens: int,
        current: HeadStatistics | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        normaliser_N, logp_N, mean_row_ND = _statistics(hidden_ND, head_VD, target_N, temperature, chunk_tokens)
        toward_target_ND = head_VD[target_N].to(mean_row_ND.dtype) - mean_row_ND
        if current is None:
            kl_N, away_ND = torch.zeros_like(normaliser_N), None
        else:
            kl_N = _kl(hidden_ND, normaliser_N, temperature, current)
            away_ND = mean_row_ND - current.mean_row_ND
        ctx.save_for_backward(toward_target_ND, *([] if away_ND is None else [away_ND]))
        ctx.temperature, ctx.dtype = temperature, hidden_ND.dtype
        ctx.mark_non_differentiable(normaliser_N, mean_row_ND)
        return logp_N, kl_N, normaliser_N, mean_row_ND

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        toward_target_ND, *rest = ctx.saved_tensors
        grad_ND = grads[0][:, None] * toward_target_ND
        if rest:
            grad_ND = grad_ND + grads[1][:, None] * rest[0]
        return (grad_ND / ctx.temperature).to(ctx.dtype), None, None, None, None, None


def _statistics(
    hidden_ND: Tensor, head_VD: Tensor, target_N: Tensor, temperature: float, chunk_tokens: int, *, rows: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """(normaliser_N, logp_N, mean_row_ND), a chunk of tokens at a time; without `rows` the last is empty."""
    wide = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
    normaliser_N = torch.empty(hidden_ND.shape[0], device=hidden_ND.device, dtype=wide)
    logp_N = torch.empty_like(normaliser_N)
    mean_row_ND = torch.empty(hidden_ND.shape if rows else (0, 0), device=hidden_ND.device, dtype=wide)
    for start in range(0, hidden_ND.shape[0], chunk_tokens):
        part = slice(start, start + chunk_tokens)
        logits = head_logits(hidden_ND[part], head_VD) if wide == torch.float32 else hidden_ND[part] @ head_VD.t()
        target = logits.gather(1, target_N[part, None])[:, 0] / temperature
        if rows:
            normaliser_N[part], mean_row_ND[part] = _normalise(logits, head_VD, temperature, hidden_ND.dtype)
        else:
            normaliser_N[part] = _normaliser(logits, temperature)
        logp_N[part] = target - normaliser_N[part]
    return normaliser_N, logp_N, mean_row_ND


def _normalise(logits: Tensor, head_VD: Tensor, temperature: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The log-normaliser and the mean head row of one chunk."""
    if logits.is_cuda and dtype in (torch.float16, torch.bfloat16) and head_VD.dtype == dtype:
        from teamtr_lora.algorithm.softmax_kernel import softmax_into  # Triton comes with torch only where there is a GPU

        scale = HALF_SCALE if dtype == torch.float16 else 1.0
        probability = torch.empty(logits.shape, device=logits.device, dtype=dtype)
        normaliser = softmax_into(probability, logits, temperature, scale)
        return normaliser, torch.mm(probability, head_VD, out_dtype=torch.float32) / scale
    scaled = logits / temperature
    normaliser = torch.logsumexp(scaled, dim=-1)
    return normaliser, (scaled - normaliser[:, None]).exp() @ head_VD.to(logits.dtype)


def _normaliser(logits: Tensor, temperature: float) -> Tensor:
    """The log-normaliser alone, rounded as `_normalise` does."""
    if logits.is_cuda and logits.dtype == torch.float32:
        from teamtr_lora.algorithm.softmax_kernel import normaliser_and_kl

        return normaliser_and_kl(logits, None, temperature, 0.0)[0]
    return torch.logsumexp(logits / temperature, dim=-1)
