"""The GPU kernel of `head_statistics`: a row of logits is read twice and its probabilities are written once.

Imported only where there is a GPU: Triton comes with torch only there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _softmax(logits, probabilities, normalisers, width, inverse_t, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    probabilities += row * width
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
    normaliser = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
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
