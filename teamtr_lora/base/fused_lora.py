"""The training pass of an adapter in half precision: frozen layer and LoRA factors in one autograd node, layers compiled.

PEFT computes a float32 adapter on a half-precision base by casting the activations of every adapted layer to float32 and back,
and multiplies them in strict float32. That moves several times the memory of the base layer's own product. Here the activations
stay in half precision and all products run on tensor cores with float32 accumulation. The float32 master weights enter as the sum
of two half-precision parts, so that a step smaller than half precision can resolve still changes the policy that is trained.

Used for training passes on a GPU only. Strict passes, sampling and exported weights go through PEFT's own modules, which
`fused` puts back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from teamtr_lora.base.precision import HALF_DTYPES, decoder_layers

# The low parts of small weights would fall below half precision's range: factors are multiplied by a power of two first, which is
# exact, and the product is divided by it in float32. LoRA's A has the size of 1 / sqrt(width); B starts at zero and stays small.
A_SCALE, B_SCALE = 2.0**6, 2.0**12


def two_parts(weight: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """[2r, n] from [r, n]: `scale * weight` rounded to `dtype`, and below it what the rounding left over."""
    scaled = weight * scale
    high = scaled.to(dtype)
    return torch.cat([high, (scaled - high.to(weight.dtype)).to(dtype)], 0)


def _wide(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in float32: half-precision products are exact there."""
    if left.dtype not in HALF_DTYPES:
        return left @ right
    return torch.mm(left, right, out_dtype=torch.float32) if left.is_cuda else left.float() @ right.float()


class _LoraLinear(torch.autograd.Function):
    """y = x W' + bias + scaling (x A') B', with gradients for x, A and B; W is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        x_ND, rank = x.reshape(-1, x.shape[-1]), a.shape[0]
        a_parts = two_parts(a, A_SCALE, x.dtype)
        b_parts = two_parts(b.t(), B_SCALE, x.dtype)
        both = _wide(x_ND, a_parts.t())
        inner_NR = ((both[:, :rank] + both[:, rank:]) / A_SCALE).to(x.dtype)
        y = functional.linear(x_ND, weight, bias)
        y.addmm_(torch.cat([inner_NR, inner_NR], 1), b_parts, alpha=scaling / B_SCALE)
        ctx.save_for_backward(x_ND, weight, inner_NR, a_parts, b_parts)
        ctx.scaling, ctx.shape = scaling, x.shape
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight, inner_NR, a_parts, b_parts = ctx.saved_tensors
        rank = inner_NR.shape[1]
        grad_y = grads[0].reshape(-1, grads[0].shape[-1])
        both = _wide(grad_y, b_parts.t())
        grad_inner = ((both[:, :rank] + both[:, rank:]) * (ctx.scaling / B_SCALE)).to(grad_y.dtype)
        grad_a = _wide(grad_inner.t(), x_ND)
        grad_b = _wide(grad_y.t(), inner_NR) * ctx.scaling
        grad_x = grad_y @ weight
        grad_x.addmm_(torch.cat([grad_inner, grad_inner], 1), a_parts, alpha=1 / A_SCALE)
        return grad_x.view(ctx.shape), None, None, grad_a, grad_b, None


class FusedLora(nn.Module):
    """A frozen linear layer with one adapter on it."""

    def __init__(self, layer: nn.Module, a: Tensor, b: Tensor, scaling: float) -> None:
        super().__init__()
        self.layer, self.a, self.b, self.scaling = layer, a, b, float(scaling)

    def forward(self, x: Tensor) -> Tensor:
        # read now: the weights of a layer that is split over processes are there during its passes only
        y: Tensor = _LoraLinear.apply(x, self.layer.weight, self.layer.bias, self.a, self.b, self.scaling)
        return y


def can_fuse(model: nn.Module, adapter: str) -> bool:
    """Whether every module that `adapter` is on is a plain linear layer in half precision on a GPU, with a plain LoRA."""
    places = _adapted(model, adapter)
    return bool(places) and all(
        type(module.base_layer) is nn.Linear
        and module.base_layer.weight.is_cuda
        and module.base_layer.weight.dtype in HALF_DTYPES
        and adapter not in getattr(module, "lora_magnitude_vector", {})
        for _, _, module in places
    )


@contextmanager
def fused(model: nn.Module, adapter: str, *, compiled: bool) -> Iterator[None]:
    """While active, the modules of `adapter` are fused ones, and decoder layers run compiled where `compiled` says so.

    All layers, and all adapters of one rank, share one compiled graph: their weights are inputs of it.
    """
    places = _adapted(model, adapter)
    layers = list(decoder_layers(model))
    try:
        for parent, name, module in places:
            a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
            parent._modules[name] = FusedLora(module.base_layer, a, b, module.scaling[adapter])
        for layer in layers if compiled else ():
            layer.forward = torch.compile(layer.forward, dynamic=True)
        # sizes vary from batch to batch, scales and scalings do not: as constants they keep the graph free of guards
        with torch._dynamo.config.patch(specialize_float=True):
            yield
    finally:
        for layer in layers if compiled else ():
            layer.__dict__.pop("forward", None)
        for parent, name, module in places:
            parent._modules[name] = module


def _adapted(model: nn.Module, adapter: str) -> list[tuple[nn.Module, str, Any]]:
    """(parent, name in it, PEFT's module) of every module that `adapter` is on."""
    return [
        (parent, name, module)
        for parent in model.modules()
        for name, module in parent._modules.items()
        if module is not None and adapter in getattr(module, "lora_A", {})
    ]
