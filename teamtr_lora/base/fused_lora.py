"""The training pass of an adapter in half precision: frozen layer and LoRA factors in one autograd node, layers compiled.

PEFT computes a float32 adapter on a half-precision base by casting the activations of every adapted layer to float32 and back,
and multiplies them in strict float32. That moves several times the memory of the base layer's own product. Here the activations
stay in half precision and all products run on tensor cores with float32 accumulation. The float32 master weights enter as the sum
of two half-precision parts, so that a step smaller than half precision can resolve still changes the policy that is trained.

Used on a GPU only, for training passes and, `wide`, for the gate's quick ones: there only the inputs of products are rounded to
half precision, whose 11 bits are those of TF32 at twice its speed; what comes out of a product and all between them is float32.
Strict passes, sampling and exported weights go through PEFT's own modules, which `fused` puts back.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from teamtr_lora.base.precision import HALF_DTYPES, decoder_layers
from teamtr_lora.base.segment_attention import attend

# The low parts of small weights would fall below half precision's range: factors are multiplied by a power of two first, which is
# exact, and the product is divided by it. LoRA's A has the size of 1 / sqrt(width); B starts at zero and stays small. A's is
# small, because the inner activation is kept multiplied by it and must not overflow.
A_SCALE, B_SCALE = 2.0**3, 2.0**12


def two_parts(weight: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`scale * weight` rounded to `dtype`, and what the rounding left over."""
    scaled = weight * scale
    high = scaled.to(dtype)
    return high, (scaled - high.to(weight.dtype)).to(dtype)


def _wide(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in float32: half-precision products are exact there."""
    if left.dtype not in HALF_DTYPES:
        return left @ right
    return torch.mm(left, right, out_dtype=torch.float32) if left.is_cuda else left.float() @ right.float()


def _scaled(left: Tensor, right: Tensor, factor: float) -> Tensor:
    """factor * left @ right, rounded once."""
    if left.is_cuda:
        return torch.addmm(left.new_empty(right.shape[1]), left, right, beta=0, alpha=factor)
    return (_wide(left, right) * factor).to(left.dtype)


# One node of the compiled graph each way: inside, products are added in place, where the compiler would copy first.
_OPS = torch.library.Library("teamtr_lora", "FRAGMENT")
_OPS.define("lora(Tensor x, Tensor weight, Tensor? bias, Tensor a, Tensor b, float scaling) -> (Tensor, Tensor)")
_OPS.define("wide_lora(Tensor x, Tensor weight, Tensor? bias, Tensor? a, Tensor? b, float scaling) -> Tensor")
_OPS.define(
    "lora_backward(Tensor grad, Tensor x, Tensor weight, Tensor inner, Tensor a, Tensor b, float scaling)"
    " -> (Tensor, Tensor, Tensor)"
)


def _lora(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """(y, inner). The parts of `a` and `b` stand so that (high + low) (high + low) needs no other step than two products, less
    low times low: inner = x [high, low, high], times [high, high, low]."""
    inner = _scaled(x, a.t(), 1.0)
    y = functional.linear(x, weight, bias)
    return y.addmm_(inner, b.t(), alpha=scaling / (A_SCALE * B_SCALE)), inner


def _lora_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inner: Tensor, a: Tensor, b: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, A and B. The high parts suffice: a gradient need not resolve what one step changes."""
    rank = a.shape[0] // 3
    grad_inner = _scaled(grad, b[:, :rank], scaling / B_SCALE)
    grad_a = _wide(grad_inner.t(), x)
    grad_b = _wide(grad.t(), inner[:, :rank]).mul_(scaling / A_SCALE)
    grad_x = (grad @ weight).addmm_(grad_inner, a[:rank], alpha=1 / A_SCALE)
    return grad_x, grad_a, grad_b


def _wide_lora(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, scaling: float) -> Tensor:
    """A float32 layer of a half-precision `x`. `a` has the same parts, `b` is the factor itself; without them, no adapter."""
    y = _wide(x, weight.t())
    if bias is not None:
        y += bias
    if a is not None and b is not None:
        high, low, _ = _wide(x, a.t()).chunk(3, dim=1)
        y.addmm_(high + low, b.t(), alpha=scaling / A_SCALE)
    return y


_OPS.impl("lora", _lora, "CompositeExplicitAutograd")
_OPS.impl("wide_lora", _wide_lora, "CompositeExplicitAutograd")
_OPS.impl("lora_backward", _lora_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("teamtr_lora::lora", lib=_OPS)
def _(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], a.shape[0])


@torch.library.register_fake("teamtr_lora::wide_lora", lib=_OPS)
def _(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, scaling: float) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


@torch.library.register_fake("teamtr_lora::lora_backward", lib=_OPS)
def _(
    grad: Tensor, x: Tensor, weight: Tensor, inner: Tensor, a: Tensor, b: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    rank, wide = a.shape[0] // 3, torch.promote_types(x.dtype, torch.float32)
    return (torch.empty_like(x), x.new_empty(rank, x.shape[1], dtype=wide), x.new_empty(weight.shape[0], rank, dtype=wide))


class _LoraLinear(torch.autograd.Function):
    """y = x W' + bias + scaling (x A') B', with gradients for x, A and B; W is frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        a_parts: Tensor,
        b_parts: Tensor,
        scaling: float,
    ) -> Tensor:
        x_ND = x.reshape(-1, x.shape[-1])
        y, inner = torch.ops.teamtr_lora.lora(x_ND, weight, bias, a_parts, b_parts, scaling)
        ctx.save_for_backward(x_ND, weight, inner, a_parts, b_parts)
        ctx.scaling, ctx.shape = scaling, x.shape
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight, inner, a_parts, b_parts = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        grad_x, grad_a, grad_b = torch.ops.teamtr_lora.lora_backward(grad, x_ND, weight, inner, a_parts, b_parts, ctx.scaling)
        return grad_x.view(ctx.shape), None, None, grad_a, grad_b, None, None, None


class FusedLora(nn.Module):
    """A frozen linear layer with one adapter on it. `refresh` makes the parts of its factors before a pass."""

    a_parts: Tensor
    b_parts: Tensor

    def __init__(self, layer: nn.Module, a: Tensor, b: Tensor, scaling: float) -> None:
        super().__init__()
        self.layer: Any = layer
        self.a, self.b, self.scaling = a, b, float(scaling)
        self.made_of = (-1, -1)  # versions of the factors that the parts are of

    def forward(self, x: Tensor) -> Tensor:
        # read now: the weights of a layer that is split over processes are there during its passes only
        weight, bias = self.layer.weight, self.layer.bias
        rounded = x.to(weight.dtype)
        y: Tensor = _LoraLinear.apply(rounded, weight, bias, self.a, self.b, self.a_parts, self.b_parts, self.scaling)
        return y


class WideLora(FusedLora):
    """The same without gradients, float32 in and out."""

    def forward(self, x: Tensor) -> Tensor:
        return _wide_layer(x, self.layer, self.a_parts, self.b, self.scaling)


class RoundingLinear(nn.Module):
    """A frozen linear layer without an adapter, of an input that may be float32."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer: Any = layer

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.to(self.layer.weight.dtype), self.layer.weight, self.layer.bias)


class WideLinear(RoundingLinear):
    """The same, float32 in and out."""

    def forward(self, x: Tensor) -> Tensor:
        return _wide_layer(x, self.layer, None, None, 0.0)


def _wide_layer(x: Tensor, layer: Any, a: Tensor | None, b: Tensor | None, scaling: float) -> Tensor:
    x_ND = x.reshape(-1, x.shape[-1]).to(layer.weight.dtype)
    y: Tensor = torch.ops.teamtr_lora.wide_lora(x_ND, layer.weight, layer.bias, a, b, scaling)
    return y.view(*x.shape[:-1], -1)


def fixed(tensor: Tensor) -> Tensor:
    """Compiled layers take its sizes as constants. Otherwise each call would ask for them one by one."""
    torch._dynamo.mark_static(tensor)
    return tensor


@torch.no_grad()
def refresh(modules: list[FusedLora]) -> None:
    """Makes the parts of factors that a step has changed, of all of one shape together: thousands of launches would take time."""
    stale = [module for module in modules if module.made_of != (module.a._version, module.b._version)]
    alike: dict[Any, list[FusedLora]] = defaultdict(list)
    for module in stale:
        alike[module.a.shape, module.b.shape, module.layer.weight.dtype].append(module)
        module.made_of = (module.a._version, module.b._version)
    for (*_, dtype), group in alike.items():
        high, low = two_parts(torch.stack([module.a for module in group]), A_SCALE, dtype)
        for module, parts in zip(group, torch.cat([high, low, high], 1), strict=True):
            module.a_parts = fixed(parts)
        high, low = two_parts(torch.stack([module.b for module in group]), B_SCALE, dtype)
        for module, parts in zip(group, torch.cat([high, high, low], 2), strict=True):
            module.b_parts = fixed(parts)


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


def can_widen(model: nn.Module, adapter: str) -> bool:
    """Whether a `wide` pass fits: float16 products, whose inputs bf16 would round to 8 bits, and float32 between them."""
    products = (weight.dtype for module, weight in _stored(model) if isinstance(module, nn.Linear))
    return can_fuse(model, adapter) and takes_float32_sum(model) and all(dtype == torch.float16 for dtype in products)


def takes_float32_sum(model: nn.Module) -> bool:
    """Whether all that a decoder layer has beside linear layers are norms that multiply a float32 input by stored weights."""
    return all(isinstance(module, nn.Linear) or "RMSNorm" in type(module).__name__ for module, _ in _stored(model))


def _stored(model: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """The half-precision weights of decoder layers, each with its module."""
    modules = (module for layer in decoder_layers(model) for module in layer.modules())
    return ((m, weight) for m in modules for weight in m.parameters(recurse=False) if weight.dtype in HALF_DTYPES)


@contextmanager
def fused(model: nn.Module, adapter: str, *, compiled: bool, wide: bool = False, float32_sum: bool = False) -> Iterator[None]:
    """While active, the modules of `adapter` are fused ones, and decoder layers run compiled where `compiled` says so.
    `float32_sum`: the sum that layers add to is float32, as in a `wide` pass. Rounding it is half of a pass's noise.

    All layers, and all adapters of one rank, share one compiled graph: their weights are inputs of it.
    """
    places = _adapted(model, adapter)
    layers = list(decoder_layers(model))
    causal_lm: Any = model.get_base_model()  # type: ignore[operator]
    float32_sum = float32_sum or wide
    hooks: list[Any] = []
    try:
        ours = []
        for parent, name, module in places:
            a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
            ours.append((WideLora if wide else FusedLora)(module.base_layer, a, b, module.scaling[adapter]))
            parent._modules[name] = ours[-1]
        if float32_sum:
            bare = [place for layer in layers for place in _bare(layer)]
            places += bare
            for parent, name, module in bare:
                parent._modules[name] = (WideLinear if wide else RoundingLinear)(getattr(module, "base_layer", module))
        embeddings = causal_lm.get_input_embeddings()
        hooks.append(causal_lm.base_model.register_forward_pre_hook(lambda *_: refresh(ours)))
        if float32_sum:
            hooks.append(embeddings.register_forward_hook(lambda *found: found[-1].float()))
        if compiled:  # the first layer's input asks for a gradient as the others' do, so that it shares their graph
            hooks.append(embeddings.register_forward_hook(_ask_for_gradient))
        for layer in layers if compiled else ():
            layer.forward = MethodType(_compiled(type(layer).forward), layer)
        # Sizes vary from batch to batch, and two that happen to be equal once need not be so again. Scales and scalings do not
        # vary: as constants they keep the graph free of guards. Agents of several ranks need more graphs than torch makes.
        how = torch._dynamo.config.patch(specialize_float=True, recompile_limit=64)
        with how, _config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers if compiled else ():
            layer.__dict__.pop("forward", None)
        for parent, name, module in places:
            parent._modules[name] = module


@cache
def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Asking torch for it anew, for every layer of every pass, would take longer than the gate's products. For its backward pass
    a layer keeps what products and attention gave, and computes again what lies between: norms, rotations, the activation."""
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)  # says that this way of keeping is a new one
    contexts = partial(create_selective_checkpoint_contexts, _keeps_products)

    def lean(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(layer, *args, **kwargs)
        return checkpoint(partial(forward, layer), *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return torch.compile(lean, dynamic=True)


def _keeps_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _products() else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _products() -> set[Any]:
    """Adapted and bare linear layers, and attention by whichever kernel."""
    kernels = ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable")
    attention = [getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default for kernel in kernels]
    aten = torch.ops.aten
    return {torch.ops.teamtr_lora.lora.default, aten.mm.default, aten.addmm.default, attend, *attention}


def _ask_for_gradient(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _adapted(model: nn.Module, adapter: str) -> list[tuple[nn.Module, str, Any]]:
    """(parent, name in it, PEFT's module) of every module that `adapter` is on."""
    return [
        (parent, name, module)
        for parent in model.modules()
        for name, module in parent._modules.items()
        if module is not None and adapter in getattr(module, "lora_A", {})
    ]


def _bare(parent: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """The same of every linear layer without that adapter, whether or not another one is on it."""
    for name, module in parent._modules.items():
        if type(module) is nn.Linear or hasattr(module, "base_layer"):
            yield parent, name, module
        elif module is not None and not isinstance(module, FusedLora):
            yield from _bare(module)
