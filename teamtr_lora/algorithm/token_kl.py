"""Token KL of current || candidate: exact over the vocabulary, and the sampled estimators k1 and k3 (eq:emp_tok_kl).

Current and candidate share the frozen head, so both are kept as hidden states and meet here, a chunk of tokens at a time:
`[tokens, vocabulary]` exists only for one chunk, in the forward and in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from teamtr_lora.algorithm.surrogate import sum_by_message
from teamtr_lora.algorithm.variants.reduction import REDUCTIONS

# Below this |d| the KL term p * (e^d - 1 - d) keeps its relative accuracy through expm1; above, q - p - p d does and cannot
# overflow. Both are the same function.
SMALL_LOG_RATIO = 0.5


def kl_terms(logp_cur: Tensor, logp_new: Tensor) -> Tensor:
    """KL(cur || new) over the last dimension, as the sum of p (e^d - 1 - d) with d = log new - log cur.

    Equal to sum p (log p - log q), because sum (q - p) = 0, but every term is non-negative and quadratic in d: rounding noise
    of size e in the logits enters as e squared, so tiny steps keep their true KL where the plain sum drowns near 1e-7.
    """
    delta = logp_new - logp_cur
    prob_cur = logp_cur.exp()
    near = delta.abs() < SMALL_LOG_RATIO
    small = torch.where(near, delta, torch.zeros_like(delta))
    far = logp_new.exp() - prob_cur - prob_cur * torch.where(near, torch.zeros_like(delta), delta)
    return torch.where(near, prob_cur * (torch.expm1(small) - small), far).sum(-1)


def k1_terms(logp_cur_N: Tensor, logp_new_N: Tensor) -> Tensor:
    """The paper's sampled monitor: log current - log candidate of the sampled token. Unbiased, noisy, can be negative."""
    return logp_cur_N - logp_new_N


def k3_terms(logp_cur_N: Tensor, logp_new_N: Tensor) -> Tensor:
    """`exp(d) - 1 - d` of the sampled token: unbiased and non-negative."""
    delta_N = logp_new_N - logp_cur_N
    return torch.expm1(delta_N) - delta_N


def message_kl(kl_N: Tensor, message_N: Tensor, messages: int, reduction: str) -> Tensor:
    """Per message: the sum over its tokens (eq:emp_tok_kl), or what else `reduction` names."""
    tokens_M = sum_by_message(torch.ones_like(kl_N), message_N, messages).clamp(min=1)
    kl_M: Tensor = REDUCTIONS[reduction].of_message(sum_by_message(kl_N, message_N, messages), tokens_M)
    return kl_M


@dataclass(frozen=True)
class TokenScores:
    """Per sampled token, at the sampling temperature, float32."""

    logp_N: Tensor
    kl_N: Tensor | None  # exact KL(current || this policy) at the token's prefix; None without a current policy


class _HalfHead(torch.autograd.Function):
    """Half-precision inputs, float32 logits: the products are exact in float32, at tensor-core speed."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, head_VD: Tensor) -> Tensor:
        ctx.save_for_backward(head_VD)
        return torch.mm(hidden_ND, head_VD.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (head_VD,) = ctx.saved_tensors
        return grads[0].to(head_VD.dtype) @ head_VD, None


def head_logits(hidden_ND: Tensor, head_VD: Tensor) -> Tensor:
    """Float32 logits of the frozen head. The head is never rounded below its stored precision."""
    if hidden_ND.is_cuda and hidden_ND.dtype == head_VD.dtype and hidden_ND.dtype in (torch.float16, torch.bfloat16):
        return _HalfHead.apply(hidden_ND, head_VD)
    return hidden_ND.float() @ head_VD.float().t()


def score_tokens(
    hidden_ND: Tensor,
    head_VD: Tensor,
    target_N: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    current_ND: Tensor | None = None,
    current_head_VD: Tensor | None = None,
) -> TokenScores:
    """Log-probabilities of the sampled tokens under softmax(z / T), and the exact KL from `current_ND`'s policy to this one.

    `current_head_VD` is the head of a current policy on another base. Ids that only that head has are masked; ids that only
    this one has can never be right, so their probability counts as lost.
    """
    other_VD = head_VD if current_head_VD is None else current_head_VD
    shared = min(head_VD.shape[0], other_VD.shape[0])
    recompute = torch.is_grad_enabled() and hidden_ND.requires_grad

    def chunk_scores(hidden: Tensor, target: Tensor, current: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = head_logits(hidden, head_VD)
        if logits.is_cuda and not recompute and len(head_VD) == len(other_VD):
            # Triton comes with torch only where there is a GPU
            from teamtr_lora.algorithm.softmax_kernel import normaliser_and_kl

            before = None if current is None else head_logits(current, other_VD)
            normaliser, kl = normaliser_and_kl(logits, before, temperature, SMALL_LOG_RATIO)
            return logits.gather(-1, target[:, None])[:, 0] / temperature - normaliser, kl
        logp = torch.log_softmax(logits / temperature, dim=-1)
        picked = logp.gather(-1, target[:, None])[:, 0]
        if current is None:
            return picked, torch.zeros_like(picked)
        with torch.no_grad():
            logp_cur = torch.log_softmax(head_logits(current, other_VD)[:, :shared] / temperature, dim=-1)
        if shared == logp.shape[-1]:
            return picked, kl_terms(logp_cur, logp)
        kept = torch.logsumexp(logp[:, :shared], dim=-1, keepdim=True)  # log of the probability on shared ids
        return picked, kl_terms(logp_cur, logp[:, :shared] - kept) - kept[:, 0]

    logps, kls = [], []
    for start in range(0, hidden_ND.shape[0], chunk_tokens):
        part = slice(start, start + chunk_tokens)
        inputs = (hidden_ND[part], target_N[part], None if current_ND is None else current_ND[part])
        if recompute:  # the chunk's logits are not kept for the backward pass
            logp, kl = checkpoint(chunk_scores, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            logp, kl = chunk_scores(*inputs)
        logps.append(logp)
        kls.append(kl)
    if not logps:
        empty = hidden_ND.new_zeros(0, dtype=torch.float32)
        return TokenScores(empty, None if current_ND is None else empty)
    return TokenScores(torch.cat(logps), None if current_ND is None else torch.cat(kls))
