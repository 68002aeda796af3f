"""Causal attention over sequences that lie end to end in one row, on a GPU's flash kernels: no padding and no mask.

Sequences that open alike share their opening. It is computed once, and each rest attends to it and to itself:

    [ openings | lone sequences | rests of the first opening | rests of the second | ... ]

A rest's attention is the mean of two, over itself and over its opening, weighted by their sums of exponentials. The kernel's
backward needs of a softmax only its output and its log-sum-exp, so given those of the whole it yields each part's own gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from teamtr_lora.base.precision import HALF_DTYPES, has_sliding_window

NAME = "teamtr_lora_segments"
LARGEST_HEAD = 192  # wider ones have a flash backward on few GPUs
TOLERATED = 0.05  # relative error of a trial in half precision; what is wrong is off by much more

logger = logging.getLogger(__name__)


class Segments(NamedTuple):
    """Where the parts of a row begin; the last number of each tensor is where the last part ends."""

    part_S: Tensor  # of every opening, lone sequence and rest
    longest: int
    openings: int  # tokens of all openings
    rests: int  # where the rests begin
    opening_G: Tensor
    longest_opening: int
    rest_G: Tensor  # of all rests of an opening together, counted from `rests`
    longest_rests: int

    def to(self, device: torch.device) -> Segments:
        return self._replace(part_S=self.part_S.to(device), opening_G=self.opening_G.to(device), rest_G=self.rest_G.to(device))


def takes_segments(model: Any) -> bool:
    """Whether every layer of a half-precision base on a GPU attends in the usual way, so that another kernel can do it."""
    parameter = next(model.parameters())
    if not parameter.is_cuda or parameter.dtype not in HALF_DTYPES or torch.cuda.get_device_capability(parameter.device) < (8, 0):
        return False
    text = model.config.get_text_config(decoder=True)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if not model._supports_attention_backend or has_sliding_window(model) or width % 8 or width > LARGEST_HEAD:
        return False
    keys = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return _kernels_fit(parameter.device, parameter.dtype, text.num_attention_heads // keys, width)


@cache
def _kernels_fit(device: torch.device, dtype: torch.dtype, queries_per_key: int, width: int) -> bool:
    """The flash kernels are called below torch's public interface, which another version may change: they are tried once, with
    gradients, against the same in float64 on a CPU. Where they do not fit, rows are padded."""
    start = [torch.tensor(places, dtype=torch.int32) for places in ([0, 9, 20, 43, 60], [0, 9], [0, 40])]
    where = Segments(part_S=start[0], longest=23, openings=9, rests=20, opening_G=start[1], longest_opening=9, rest_G=start[2],
                     longest_rests=40)  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(60, 2 * n, width, generator=draw).to(dtype) for n in (queries_per_key, 1, 1, queries_per_key)]

    def tried(place: torch.device, kind: torch.dtype) -> list[Tensor]:
        q, k, v, grad = (each.detach().to(place, kind).clone().requires_grad_(n < 3) for n, each in enumerate(made))
        with torch.enable_grad():
            out = _OverSegments.apply(q, k, v, width**-0.5, *where.to(place))
        return [each.detach().double().cpu() for each in (out, *torch.autograd.grad(out, (q, k, v), grad))]

    try:
        pairs = zip(tried(device, dtype), tried(torch.device("cpu"), torch.float64), strict=True)
        off = max(float((got - true).norm() / true.norm()) for got, true in pairs)
    except (RuntimeError, TypeError, AttributeError) as error:
        logger.warning("flash kernels do not take rows that lie end to end, training rows are padded: %s", str(error)[:200])
        return False
    if not off < TOLERATED:
        logger.warning("flash kernels are %.1g off on rows that lie end to end, training rows are padded", off)
    return off < TOLERATED


@contextmanager
def attending_over_segments(model: Any) -> Iterator[None]:
    """While active, a forward of `model` may be given `segments`. Without them its attention is what it always is."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    segments: Segments | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """[B, heads, tokens, width] -> [B, tokens, heads, width], called by transformers' layers; with segments B is 1."""
    # Flash kernels are of half precision, whose 11 bits are those of TF32. Queries and keys may be wider than what they are made
    # of: rotations are float32 where a layer's input is.
    half = value.dtype if value.dtype in HALF_DTYPES else torch.float16
    if query.dtype == torch.float32 and (query.is_cuda or half == value.dtype):
        query, key, value = query.to(half), key.to(half), value.to(half)
    if segments is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    q, k, v = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
    out = _OverSegments.apply(q, k, v, scaling, *segments)
    return out[None], None


class _OverSegments(torch.autograd.Function):
    """[tokens, heads, width] each."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, *where: Any) -> Tensor:
        at = Segments(*where)
        out, lse = attend(q, k, v, at.part_S, at.part_S, at.longest, at.longest, True, scale)
        if at.openings:
            rests, openings = slice(at.rests, None), slice(0, at.openings)
            far, far_lse = attend(
                q[rests], k[openings], v[openings], at.rest_G, at.opening_G, at.longest_rests, at.longest_opening, False, scale
            )
            wide, near_lse = torch.promote_types(out.dtype, torch.float32), lse[:, rests]
            share = torch.sigmoid(far_lse - near_lse).t()[..., None]
            both = torch.lerp(out[rests].to(wide), far.to(wide), share.to(wide)).to(out.dtype)
            out = torch.cat([out[: at.rests], both])
            lse = torch.cat([lse[:, : at.rests], torch.logaddexp(near_lse, far_lse)], 1)
        ctx.save_for_backward(q, k, v, out, lse, at.part_S, at.opening_G, at.rest_G)
        ctx.scale, ctx.sizes = scale, (at.longest, at.openings, at.rests, at.longest_opening, at.longest_rests)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, part_S, opening_G, rest_G = ctx.saved_tensors
        longest, openings, rests, longest_opening, longest_rests = ctx.sizes
        grad = grads[0].contiguous()
        dq, dk, dv = _attend_backward(grad, q, k, v, out, lse, part_S, part_S, longest, longest, True, ctx.scale)
        if openings:
            far_dq, far_dk, far_dv = _attend_backward(
                grad[rests:], q[rests:], k[:openings], v[:openings], out[rests:], lse[:, rests:].contiguous(), rest_G, opening_G,
                longest_rests, longest_opening, False, ctx.scale,
            )  # fmt: skip
            dq = torch.cat([dq[:rests], dq[rests:] + far_dq])
            dk, dv = torch.cat([dk[:openings] + far_dk, dk[openings:]]), torch.cat([dv[:openings] + far_dv, dv[openings:]])
        return dq, dk, dv, *[None] * (1 + len(Segments._fields))


def _attend_parts(
    q: Tensor, k: Tensor, v: Tensor, q_start: Tensor, k_start: Tensor, longest_q: int, longest_k: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of each part of `q` over the part of `k` of the same number, and its log-sum-exp [heads, tokens]."""
    if q.is_cuda:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, q_start, k_start, longest_q, longest_k, 0.0, causal, False, scale=scale
        )
        return out, lse
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for here, there in _parts(q_start, k_start):
        score = _scores(q[here], k[there], causal, scale)
        lse[:, here] = torch.logsumexp(score, -1)
        out[here] = torch.einsum("hij,jhd->ihd", (score - lse[:, here, None]).exp(), _repeated(v[there], q))
    return out, lse


def _attend_parts_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_start: Tensor,
    k_start: Tensor,
    longest_q: int,
    longest_k: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, where `out` and `lse` may be of a softmax that goes over further keys too."""
    if q.is_cuda:
        seed, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)  # of dropout
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, q_start, k_start, longest_q, longest_k, 0.0, causal, seed, unused, scale=scale
        )
        return dq, dk, dv
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for here, there in _parts(q_start, k_start):
        chance = (_scores(q[here], k[there], causal, scale) - lse[:, here, None]).exp()
        d_chance = torch.einsum("ihd,jhd->hij", grad[here], _repeated(v[there], q))
        d_score = chance * (d_chance - (grad[here] * out[here]).sum(-1).t()[..., None]) * scale
        dq[here] = torch.einsum("hij,jhd->ihd", d_score, _repeated(k[there], q))
        heads = (k.shape[1], -1)  # the query heads of one key head lie side by side
        dk[there] = torch.einsum("hij,ihd->jhd", d_score, q[here]).unflatten(1, heads).sum(2)
        dv[there] = torch.einsum("hij,ihd->jhd", chance, grad[here]).unflatten(1, heads).sum(2)
    return dq, dk, dv


# Not by `torch.library.custom_op`, whose checks around every call take longer than the call.
_OPS = torch.library.Library("teamtr_lora", "FRAGMENT")
_PLACES = "Tensor q_start, Tensor k_start, SymInt longest_q, SymInt longest_k, bool causal, float scale"
_OPS.define(f"attend(Tensor q, Tensor k, Tensor v, {_PLACES}) -> (Tensor, Tensor)")
_OPS.define(
    f"attend_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_PLACES}) -> (Tensor, Tensor, Tensor)"
)
_OPS.impl("attend", _attend_parts, "CompositeExplicitAutograd")
_OPS.impl("attend_backward", _attend_parts_backward, "CompositeExplicitAutograd")
attend, _attend_backward = torch.ops.teamtr_lora.attend.default, torch.ops.teamtr_lora.attend_backward.default


@torch.library.register_fake("teamtr_lora::attend", lib=_OPS)
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.float32 if q.is_cuda else q.dtype
    return torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], device=q.device, dtype=wide)


@torch.library.register_fake("teamtr_lora::attend_backward", lib=_OPS)
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _parts(q_start: Tensor, k_start: Tensor) -> Iterator[tuple[slice, slice]]:
    q_at, k_at = q_start.tolist(), k_start.tolist()
    for i in range(len(q_at) - 1):
        yield slice(q_at[i], q_at[i + 1]), slice(k_at[i], k_at[i + 1])


def _repeated(keys: Tensor, q: Tensor) -> Tensor:
    """One key head for every query head."""
    return keys.repeat_interleave(q.shape[1] // keys.shape[1], 1)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    score = torch.einsum("ihd,jhd->hij", q, _repeated(k, q)) * scale
    return score.masked_fill(torch.ones_like(score, dtype=torch.bool).triu(1), float("-inf")) if causal else score
