"""The GPU kernel of the patch `lora_layers`. Imported only where there is a GPU, since only there does torch bring Triton."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor


def add_chosen(wide_T_OC: Tensor, b_O_C: Tensor, chosen_T_S: Tensor, outs: Sequence[int], blocks: tuple[int, int]) -> Tensor:
    """y + B (chosen * h), where `wide` is y beside h."""
    tokens, (width, columns), slots = len(wide_T_OC), b_O_C.shape, chosen_T_S.shape[1]
    assert chosen_T_S.shape == (tokens, slots), "the kernel would read past its end"
    rows, depth = blocks
    y_T_O = wide_T_OC.new_empty(tokens, width)
    part = columns // len(outs)
    first = outs[0]
    second = first + outs[1] if len(outs) > 1 else width
    height = min(64, max(16, triton.next_power_of_2(tokens)))
    _add_chosen[(triton.cdiv(tokens, height), width // rows)](
        wide_T_OC, b_O_C, chosen_T_S, y_T_O, tokens, width, columns, first, second,
        SLOTS=slots, RANK=part // slots, PART=part, HEIGHT=height, ROWS=rows, DEPTH=depth,
    )  # fmt: skip
    return y_T_O


@triton.jit(do_not_specialize=["tokens"])
def _add_chosen(  # type: ignore[no-untyped-def]
    wide, b, chosen, y, tokens, width, columns, first, second,
    SLOTS: tl.constexpr, RANK: tl.constexpr, PART: tl.constexpr, HEIGHT: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    start = tl.program_id(1) * ROWS
    o = start + tl.arange(0, ROWS)
    here = t < tokens
    row = t.to(tl.int64) * (width + columns)
    mine = tl.full((HEIGHT,), -1, tl.int32)
    for slot in tl.static_range(SLOTS):
        mine = tl.where(tl.load(chosen + t * SLOTS + slot, mask=here, other=0) != 0, slot, mine)
    # a block of outputs belongs to one part of the layer, which has columns of its own
    own = ((start >= first).to(tl.int32) + (start >= second).to(tl.int32)) * PART
    sum_ = tl.load(wide + row[:, None] + o[None, :], mask=here[:, None], other=0.0).to(tl.float32)
    for begin in tl.static_range(0, PART, DEPTH):
        c = begin + tl.arange(0, DEPTH)
        h = tl.load(wide + row[:, None] + width + own + c[None, :], mask=here[:, None], other=0.0)
        h = tl.where((c // RANK)[None, :] == mine[:, None], h, 0.0).to(h.dtype)
        weights = tl.load(b + o[None, :] * columns + own + c[:, None])
        sum_ = tl.dot(h, weights, sum_, input_precision="ieee")
    tl.store(y + t.to(tl.int64)[:, None] * width + o[None, :], sum_.to(y.dtype.element_ty), mask=here[:, None])
