"""Causal attention over sequences that lie end to end in one row, on a GPU's flash kernels: no padding and no mask.

Sequences that open alike share their opening. It is computed once, and each rest attends to it and to itself:

    [ openings | lone sequences | rests of the first opening | rests of the second | ... ]

The kernels take queries and keys of different lengths, the last query at the last key. So each rest is given a copy of its
opening's keys and values before its own, and an opening's gradient is the sum over its copies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from teamtr_lora.base.precision import HALF_DTYPES, has_sliding_window

NAME = "teamtr_lora_segments"
LARGEST_HEAD = 192  # wider ones have a flash backward on few GPUs
TOLERATED = 0.05  # relative error of a trial in half precision; what is wrong is off by much more

logger = logging.getLogger(__name__)


class Segments(NamedTuple):
    """Where the parts of a row begin and what each attends to. The last number of a `_S` is where the last part ends."""

    part_S: Tensor  # of every opening, lone sequence and rest
    longest: int
    key_K: Tensor  # tokens whose keys the parts attend to, part by part: its opening's, and its own
    keys_S: Tensor  # where a part's keys begin in key_K
    longest_keys: int
    own_N: Tensor  # by token: where its key is among its own part's
    copy_C: Tensor  # the other places in key_K: copies of openings, which lie first in the row
    openings: int  # tokens of all openings

    @classmethod
    def of(cls, opening_S: Sequence[tuple[int, int]], length_S: Sequence[int]) -> Segments:
        """`opening_S`: by part the tokens of its opening, from and to, from the same for a part without one."""
        begin_S = np.cumsum([0, *length_S])
        key_K, own_N, copy_C = [], [], []
        keys_S = [0]
        for (first, last), begin, length in zip(opening_S, begin_S, length_S, strict=False):
            key_K += [np.arange(first, last), np.arange(begin, begin + length)]
            own = keys_S[-1] + last - first
            copy_C.append(np.arange(keys_S[-1], own))
            own_N.append(np.arange(own, own + length))
            keys_S.append(own + length)
        return cls(
            part_S=torch.tensor(begin_S, dtype=torch.int32),
            longest=max(length_S),
            key_K=torch.from_numpy(np.concatenate(key_K)),
            keys_S=torch.tensor(keys_S, dtype=torch.int32),
            longest_keys=int(np.diff(keys_S).max()),
            own_N=torch.from_numpy(np.concatenate(own_N)),
            copy_C=torch.from_numpy(np.concatenate(copy_C)),
            openings=max((last for first, last in opening_S if last > first), default=0),
        )

    def to(self, device: torch.device) -> Segments:
        return Segments._make(each.to(device) if isinstance(each, Tensor) else each for each in self)


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
    where = Segments.of([(0, 0), (0, 0), (0, 9), (0, 9)], [9, 11, 23, 17])
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
        out, lse = attend(q, k, v, at.part_S, at.longest, at.key_K, at.keys_S, at.longest_keys, scale)
        ctx.save_for_backward(q, k, v, out, lse, at.part_S, at.key_K, at.keys_S, at.own_N, at.copy_C)
        ctx.scale, ctx.sizes = scale, (at.longest, at.longest_keys, at.openings)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, part_S, key_K, keys_S, own_N, copy_C = ctx.saved_tensors
        longest, longest_keys, openings = ctx.sizes
        at = (part_S, longest, key_K, keys_S, longest_keys, own_N, copy_C, openings)
        gradients = _attend_backward(grads[0].contiguous(), q, k, v, out, lse, *at, ctx.scale)
        return *gradients, *[None] * (1 + len(Segments._fields))


def _attend_parts(
    q: Tensor, k: Tensor, v: Tensor, part_S: Tensor, longest: int, key_K: Tensor, keys_S: Tensor, longest_keys: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of each part over its keys, and its log-sum-exp [heads, tokens]."""
    k, v = k[key_K], v[key_K]
    if q.is_cuda:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, part_S, keys_S, longest, longest_keys, 0.0, True, False, scale=scale
        )
        return out, lse
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for here, there in _parts(part_S, keys_S):
        score = _scores(q[here], k[there], scale)
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
    part_S: Tensor,
    longest: int,
    key_K: Tensor,
    keys_S: Tensor,
    longest_keys: int,
    own_N: Tensor,
    copy_C: Tensor,
    openings: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    k, v = k[key_K], v[key_K]
    if q.is_cuda:
        seed, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)  # of dropout
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, part_S, keys_S, longest, longest_keys, 0.0, True, seed, unused, scale=scale
        )
    else:
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for here, there in _parts(part_S, keys_S):
            chance = (_scores(q[here], k[there], scale) - lse[:, here, None]).exp()
            d_chance = torch.einsum("ihd,jhd->hij", grad[here], _repeated(v[there], q))
            d_score = chance * (d_chance - (grad[here] * out[here]).sum(-1).t()[..., None]) * scale
            dq[here] = torch.einsum("hij,jhd->ihd", d_score, _repeated(k[there], q))
            heads = (k.shape[1], -1)  # the query heads of one key head lie side by side
            dk[there] = torch.einsum("hij,ihd->jhd", d_score, q[here]).unflatten(1, heads).sum(2)
            dv[there] = torch.einsum("hij,ihd->jhd", chance, grad[here]).unflatten(1, heads).sum(2)
    opening_C = key_K[copy_C]
    return dq, *(_with_copies(each, own_N, copy_C, opening_C, openings) for each in (dk, dv))


def _with_copies(d_keys: Tensor, own_N: Tensor, copy_C: Tensor, opening_C: Tensor, openings: int) -> Tensor:
    """The gradient of every token's key: that of its own part, and for openings the sum over their copies, rounded once."""
    d_tokens, wide = d_keys[own_N], torch.promote_types(d_keys.dtype, torch.float32)
    total = d_tokens[:openings].to(wide).index_add_(0, opening_C, d_keys[copy_C].to(wide))
    d_tokens[:openings] = total.to(d_keys.dtype)
    return d_tokens


# Not by `torch.library.custom_op`, whose checks around every call take longer than the call.
_OPS = torch.library.Library("teamtr_lora", "FRAGMENT")
_KEYS = "Tensor part_S, SymInt longest, Tensor key_K, Tensor keys_S, SymInt longest_keys"
_OPS.define(f"attend(Tensor q, Tensor k, Tensor v, {_KEYS}, float scale) -> (Tensor, Tensor)")
_OPS.define(
    f"attend_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_KEYS}, Tensor own_N, Tensor copy_C,"
    " SymInt openings, float scale) -> (Tensor, Tensor, Tensor)"
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


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    score = torch.einsum("ihd,jhd->hij", q, _repeated(k, q)) * scale
    later = torch.ones_like(score, dtype=torch.bool).triu(1 + len(k) - len(q))
    return score.masked_fill(later, float("-inf"))
