"""GPU kernels over rows of logits, each read twice: the softmax of `head_statistics`, and the normaliser and KL of `token_kl`.

Imported only where there is a GPU: Triton comes with torch only there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _normaliser(logits, width, inverse_t, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """log sum exp of one row."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)  # every lane keeps a maximum and a sum of its own
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(logits + column, mask=column < width, other=float("-inf")) * inverse_t
        larger = tl.maximum(largest, value)
        kept = tl.where(largest == float("-inf"), 0.0, tl.exp(largest - larger))
        total = total * kept + tl.where(value == float("-inf"), 0.0, tl.exp(value - larger))
        largest = larger
    top = tl.max(largest, 0)
    return top + tl.log(tl.sum(total * tl.exp(largest - top), 0))


@triton.jit
def _softmax(logits, probabilities, normalisers, width, inverse_t, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    probabilities += row * width
    normaliser = _normaliser(logits, width, inverse_t, BLOCK)
    tl.store(normalisers + row, normaliser)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(logits + column, mask=column < width, other=float("-inf")) * inverse_t
        probability = (tl.exp(value - normaliser) * scale).to(probabilities.dtype.element_ty)
        tl.store(probabilities + column, probability, mask=column < width)


def softmax_into(probabilities: Tensor, logits: Tensor, temperature: float, scale: float) -> Tensor:
    """Writes scale * softmax(logits / temperature) and returns log sum exp(logits / temperature), row by row."""
    rows, width = logits.shape
    normalisers = torch.empty(rows, device=logits.device, dtype=torch.float32)
    _softmax[(rows,)](logits, probabilities, normalisers, width, 1 / temperature, scale, BLOCK=BLOCK, num_warps=8)
    return normalisers


@triton.jit
def _compare(  # type: ignore[no-untyped-def]
    logits, others, normalisers, kls, width, inverse_t, near, TWO: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    normaliser = _normaliser(logits, width, inverse_t, BLOCK)
    tl.store(normalisers + row, normaliser)
    if TWO:
        others += row * width
        before = _normaliser(others, width, inverse_t, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            there = column < width
            z = tl.load(logits + column, mask=there, other=0.0)
            z_before = tl.load(others + column, mask=there, other=0.0)
            log_p = z_before * inverse_t - before
            d = (z - z_before) * inverse_t - (normaliser - before)  # the logits of a small step are subtracted exactly
            p = tl.exp(log_p)
            # e^d - 1 - d by its series, where the difference itself would leave little of a small d
            series = tl.full([BLOCK], 1.0, tl.float32)
            for step in tl.static_range(7):
                series = 1 + d * (1.0 / (9 - step)) * series
            term = tl.where(tl.abs(d) < near, p * (d * d / 2 * series), tl.exp(log_p + d) - p - p * d)
            total += tl.where(there, term, 0.0)
        tl.store(kls + row, tl.sum(total, 0))


def normaliser_and_kl(logits: Tensor, current: Tensor | None, temperature: float, near: float) -> tuple[Tensor, Tensor]:
    """log sum exp(logits / temperature), and KL(current || this) row by row, as `token_kl.kl_terms` has it; 0 without `current`.
    `near`: the log-ratio up to which its series is taken."""
    rows, width = logits.shape
    normaliser_N = torch.empty(rows, device=logits.device, dtype=torch.float32)
    kl_N = torch.zeros_like(normaliser_N)
    others = logits if current is None else current
    _compare[(rows,)](
        logits, others, normaliser_N, kl_N, width, 1 / temperature, near, TWO=current is not None, BLOCK=BLOCK, num_warps=8
    )
    return normaliser_N, kl_N
