"""fp32 arithmetic on a half-precision or quantised base.

The gate compares two policies whose KL is small. Half precision is too coarse for that: it rounds the log-probabilities of every
token, and differently in differently padded batches, so that in bf16 a policy compared with itself shows a KL per message of ten
times the usual delta. The policy is therefore defined as fp32 arithmetic on the stored weights, and the gate measures under
`strict_fp32`. Stored weights are upcast one decoder layer at a time, so that there is never a second copy of the base.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from teamtr_lora.common.errors import UserError

HALF_DTYPES = (torch.float16, torch.bfloat16)

# Names under which the stock architectures keep their decoder layers.
_LAYER_LIST_NAMES = ("layers", "h", "blocks")

# Config keys by which an architecture changes the logits after the head product, with their neutral values.
_LOGIT_TRANSFORMS: dict[str, tuple[Any, ...]] = {
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
}


@contextmanager
def strict_fp32(model: nn.Module, *, tf32: bool = False) -> Iterator[None]:
    """While active, a no-grad forward of `model` is fp32 arithmetic (TF32 products if `tf32`) on the stored weights.

    Works on plain and on PEFT-wrapped models; fp32 adapter weights are used as they are. On leaving, every parameter
    has its own storage and dtype back, bit for bit, whatever was raised inside.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("strict_fp32 swaps the stored weights during a forward: use it under torch.no_grad()")
    layers = decoder_layers(model)
    with ExitStack() as stack:
        stack.enter_context(float32_products(tf32=tf32))
        stack.enter_context(torch.autocast(next(model.parameters()).device.type, enabled=False))
        stack.callback(layers[0].register_forward_pre_hook(_check_modes).remove)
        for module in model.modules():
            if dequantise := _dequantiser(module):
                stack.callback(_replace_forward(module, partial(_fp32_linear, module, dequantise)))
        for module, tensors in _upcast_together(model, layers):
            if type(module) is nn.Embedding:
                # A lookup does no arithmetic: casting the rows that were looked up equals casting the whole table.
                stack.callback(module.register_forward_hook(_output_to_fp32).remove)
                continue
            upcast = _Upcast(module, tensors)
            stack.callback(upcast.end)
            stack.callback(module.register_forward_pre_hook(upcast.begin).remove)
            stack.callback(module.register_forward_hook(upcast.end, always_call=True).remove)
        yield


@contextmanager
def float32_products(*, tf32: bool) -> Iterator[None]:
    """While active, products of float32 matrices on a GPU are strict ones, or TF32's."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers of a stock causal language model, PEFT-wrapped or not."""
    count = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    for name, module in model.named_modules():
        named_so = isinstance(module, nn.ModuleList) and name.rsplit(".", 1)[-1] in _LAYER_LIST_NAMES
        if named_so and len(module) > 0 and len(module) == (count or len(module)):
            return module
    kind = type(model).__name__
    raise UserError(f"base.source: {kind} has no list of decoder layers; use a base of a Llama or Qwen style architecture")


def head_weight(model: nn.Module) -> Tensor:
    """The stored output embedding W [V, D], for callers that form logits = h W^T chunk by chunk.

    Refuses heads for which that product is not the model's logits (bias, adapter, a transform after the head): the KL
    would be that of another policy.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is None or hasattr(head, "base_layer") or not isinstance(getattr(head, "weight", None), Tensor):
        raise UserError("team.agents: lora.targets must not name the output head; use all-linear or modules of the layers")
    if getattr(head, "bias", None) is not None:
        raise UserError("base.source: an output head with a bias is not supported; use a Llama or Qwen style base")
    if not head.weight.is_floating_point():
        raise UserError("base.source: a quantised output head is not supported; use a base whose lm_head is not quantised")
    for key, neutral in _LOGIT_TRANSFORMS.items():
        value = getattr(model.config, key, None)
        if value not in neutral:
            raise UserError(f"base.source: {key}={value} in config.json is not supported; use a Llama or Qwen style base")
    return head.weight


def has_sliding_window(model: nn.Module) -> bool:
    """Whether some layer attends to the last tokens only, so that the model has to make its own attention masks."""
    config: Any = getattr(model, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return any(kind != "full_attention" for kind in kinds)
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)


class _Int8Linear(torch.autograd.Function):
    """x W^T with the int8 weight dequantised for the product, in the backward pass again: no full-size copy is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return functional.linear(x, _dequantise_8bit(module).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ _dequantise_8bit(ctx.module).to(grads[0].dtype), None


def keep_activations_unquantised(model: nn.Module) -> None:
    """Makes every 8-bit linear compute in the activations' own precision.

    bitsandbytes' int8 product also rounds the activations, by outliers of the whole batch: the same message then has another
    probability in another batch (a KL of 0.9 nats per message between sampler and trainer, seen on a 135M model).
    """
    for module in model.modules():
        if "Linear8bitLt" in {kind.__name__ for kind in type(module).__mro__} and not hasattr(module, "base_layer"):
            module.__dict__["forward"] = _int8_forward(module)


def _int8_forward(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        product = _Int8Linear.apply(x, module)
        return product if module.bias is None else product + module.bias.to(x.dtype)

    return forward


class _Upcast:
    """The tensors of one module, which hold an fp32 copy from the beginning to the end of its forward."""

    def __init__(self, module: nn.Module, tensors: list[Tensor]) -> None:
        # a layer that is split over processes has other tensors during its forward: the ones that were gathered for it
        split = any(hasattr(tensor, "device_mesh") for tensor in tensors)
        self._tensors = (lambda: _half_tensors(module, recurse=True)) if split else (lambda: tensors)
        self._stored: list[tuple[Tensor, Tensor]] = []  # each tensor that holds a copy now, with the data it held before

    def begin(self, *_: object) -> None:
        for tensor in self._tensors():
            if tensor.dtype in HALF_DTYPES:
                self._stored.append((tensor, tensor.data))
                tensor.data = tensor.data.float()

    def end(self, *_: object) -> None:
        while self._stored:
            tensor, data = self._stored.pop()
            tensor.data = data


def _upcast_together(model: nn.Module, layers: nn.ModuleList) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """Modules with the tensors that are upcast at once: each decoder layer as a whole, and every module outside them that has
    tensors of its own."""
    inside = set(layers.modules())
    for layer in layers:
        if tensors := _half_tensors(layer, recurse=True):
            yield layer, tensors
    for module in model.modules():
        if module not in inside and (tensors := _half_tensors(module, recurse=False)):
            yield module, tensors


def _half_tensors(module: nn.Module, *, recurse: bool) -> list[Tensor]:
    tensors = [*module.parameters(recurse), *module.buffers(recurse)]
    return [tensor for tensor in tensors if tensor.dtype in HALF_DTYPES]


def _output_to_fp32(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output.float()


def _check_modes(module: nn.Module, inputs: object) -> None:
    """Fails where a library that wraps the forward has switched gradients or autocast on again: the KL would be noise."""
    if torch.is_grad_enabled():
        raise RuntimeError("strict_fp32: gradients were enabled inside the forward")
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise RuntimeError("strict_fp32: autocast was enabled inside the forward")


def _replace_forward(module: nn.Module, forward: Callable[..., Tensor]) -> Callable[[], None]:
    """Gives a module another forward, and returns a function that undoes it."""
    own = module.__dict__.get("forward")

    def undo() -> None:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own

    module.__dict__["forward"] = forward
    return undo


def _fp32_linear(module: Any, dequantise: Callable[[], Tensor], x: Tensor) -> Tensor:
    """A quantised linear as a plain fp32 one."""
    return functional.linear(x.float(), dequantise(), None if module.bias is None else module.bias.float())


def _dequantiser(module: nn.Module) -> Callable[[], Tensor] | None:
    """For a bitsandbytes linear module, a function that gives its stored weight in fp32."""
    # By name, so that bitsandbytes stays optional; a subclass from another library keeps the name in its ancestry.
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if hasattr(module, "base_layer"):
        return None
    if "Linear4bit" in kinds:
        return lambda: _dequantise_4bit(module)
    if "Linear8bitLt" in kinds:
        return lambda: _dequantise_8bit(module)
    return None


def _dequantise_4bit(module: Any) -> Tensor:
    from bitsandbytes import functional as bnb

    state = copy.copy(module.weight.quant_state)
    state.dtype = torch.float32
    return bnb.dequantize_4bit(module.weight.data, state)


def _dequantise_8bit(module: Any) -> Tensor:
    from bitsandbytes import functional as bnb

    scale = module.state.SCB if module.state.SCB is not None else module.weight.SCB
    return bnb.int8_vectorwise_dequant(module.weight.data, scale).float()
