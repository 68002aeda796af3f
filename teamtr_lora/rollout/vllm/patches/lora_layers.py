"""Patch `lora_layers`: vLLM's LoRA layers apply all adapters to all tokens at once.

Replaces: the arithmetic of vLLM's LoRA layers (`apply` of a layer, `add_lora_linear` of the wrapper around its kernels) and where
their weights lie. vLLM's kernels go adapter by adapter, on a CPU token by token. Here all adapters of a layer lie beside each
other in one buffer: every layer has `add_lora`, two dense products and a mask. On a GPU, where the layer's own weight is a plain
matrix W, the adapters' A lies below it instead (`linear_with_lora`): one product gives both, and for a decoding step's few tokens
one small kernel (lora_kernel.py) does the rest.
Why: for the few adapters of a team, finding each token's own costs more than computing with all of them; and vLLM's own kernels
take 16 bits only, so base.precision=fp32 on a GPU needs this.
Worth: random Qwen3-1.7B, 22k tokens/s with it and 17.6k without (one H200), by `tools/bench_rollout.py --base random:qwen3-1.7b
--episodes 256 --prompt-tokens 128 --message-tokens 64 --memory-share 0.3 --parts patches`. On SmolLM2-135M, whose steps wait for
Python, one run read 32k with it and 44k without, on a CPU whose speed drifts by as much: leave it out there if that matters.
Knows: vLLM 0.26 and 0.32.
Other versions: vLLM's own layers and kernels. Also where slots x rank is more than DENSE_COLUMNS.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from teamtr_lora.rollout.vllm.patches.patch import Patch

logger = logging.getLogger(__name__)

DENSE_COLUMNS = 256  # slots x rank of a layer up to which products over all slots cost less than finding each token's own
FEW_TOKENS = 4096  # up to here the joined product and the kernel win; above it, products of their own are as fast


def fits_side_by_side(slots: int, rank: int) -> bool:
    return slots * rank <= DENSE_COLUMNS


@contextmanager
def lora_side_by_side(slots: int, rank: int) -> Iterator[None]:
    """An engine that is started within this context gets this layout, with room for `slots` adapters up to `rank`. It has to be
    in place before vLLM compiles the model."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod as Plain
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin as Runner

    create_weights, load_lora_model = Plain.create_weights, Runner.load_lora_model

    def with_room(
        method: Any, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], *args: Any, **more: Any
    ) -> None:
        """Makes the weight with room for A's rows below it. Moving the weight later, to where there is room, would leave holes in
        the memory that vLLM accounts for."""
        outs = output_partition_sizes
        create_weights(method, layer, input_size_per_partition, [*outs, len(outs) * slots * rank], *args, **more)
        layer.weight.data = layer.weight.data[: sum(outs)]
        layer.room_below = layer.weight.data_ptr()  # if vLLM puts the weight elsewhere afterwards, the room is not there

    def laid_out(runner: Any, *args: Any, **more: Any) -> Any:
        model = load_lora_model(runner, *args, **more)
        only_with_adapters(runner)
        manager = runner.lora_manager._adapter_manager
        wrappers = list(manager.punica_wrapper_mapping.values())
        if len(wrappers) == 1 and all(isinstance(module.lora_a_stacked, tuple) for module in manager.modules.values()):
            _choose_slots(wrappers[0], manager.lora_slots)
            for module in manager.modules.values():
                lay_out(module)
        else:
            logger.warning("patch lora_layers does not fit this base: vLLM's own LoRA kernels run, which are slower")
        return model

    Plain.create_weights, Runner.load_lora_model = with_room, laid_out
    try:
        yield
    finally:
        Plain.create_weights, Runner.load_lora_model = create_weights, load_lora_model


def only_with_adapters(runner: Any) -> None:
    """No request of ours comes without an adapter. A runner that has still to capture CUDA graphs leaves out those of steps
    without one, half of them and of the time; were there such a step, it would run without a graph."""
    cases = getattr(runner, "lora_capture_cases", None)
    if cases and any(cases):
        runner.lora_capture_cases = [adapters for adapters in cases if adapters]


class Laid(NamedTuple):
    """A layer's stacked buffers as views of two matrices with a column for every part, slot and rank."""

    a: tuple[Tensor, ...]  # [slot, 1, rank, in], one for each part of a fused layer
    b: tuple[Tensor, ...]  # [slot, 1, out, rank]
    b_O_C: Tensor  # [out, columns], block diagonal in the parts


def lay_side_by_side(a: tuple[Tensor, ...], b: tuple[Tensor, ...], a_C_I: Tensor | None = None) -> Laid:
    """Empty buffers for the shapes of `a` and `b`; `a_C_I`, where given, becomes A's."""
    parts, (slots, _, rank, width) = len(a), a[0].shape
    outs = [part.shape[2] for part in b]
    a_all = (a[0].new_empty(parts * slots * rank, width) if a_C_I is None else a_C_I).zero_().view(parts, slots, rank, width)
    b_all = b[0].new_zeros(sum(outs), parts, slots, rank)
    rows = b_all.split(outs)
    return Laid(
        tuple(a_all[i].unsqueeze(1) for i in range(parts)),
        tuple(rows[i][:, i].permute(1, 0, 2).unsqueeze(1) for i in range(parts)),
        b_all.flatten(1),
    )


def lay_out(module: Any) -> None:
    """Gives a LoRA layer of vLLM the layout, before there are adapters in it."""
    layer, a, b = module.base_layer, module.lora_a_stacked, module.lora_b_stacked
    kind: Any = type(module)
    joined = _joined_weight(module)
    if joined is None:
        module.lora_a_stacked, module.lora_b_stacked, _ = lay_side_by_side(a, b)
        return
    module.lora_a_stacked, module.lora_b_stacked, module.b_O_C = lay_side_by_side(a, b, joined[len(layer.weight) :])
    module.joined, module.outs, module.joined_bias = joined, [part.shape[2] for part in b], None
    if layer.bias is not None:
        module.joined_bias = pad(layer.bias.data, (0, len(joined) - len(layer.weight)))
        layer.bias.data = module.joined_bias[: len(layer.weight)]
    module.__class__ = _joined(kind)


def _joined_weight(module: Any) -> Tensor | None:
    """The layer's weight and the room below it, where the layer is one product with a plain matrix: not quantised, not packed,
    not split over GPUs, with no forward of its own."""
    layer, (a, b) = module.base_layer, (module.lora_a_stacked, module.lora_b_stacked)
    parts, (slots, _, rank, width) = len(a), a[0].shape
    shape = (sum(part.shape[2] for part in b), width)
    plain = (
        type(layer).__module__ == "vllm.model_executor.layers.linear"
        and type(layer.quant_method).__name__ == "UnquantizedLinearMethod"
        and module.tp_size == 1
        and layer.weight.shape == shape
        and layer.weight.is_contiguous()
        and layer.weight.dtype == a[0].dtype
        and getattr(layer, "room_below", None) == layer.weight.data_ptr()
    )
    if not plain:
        return None
    weight, rows = layer.weight.data, shape[0] + parts * slots * rank
    end = (weight.storage_offset() + rows * width) * weight.element_size()
    return weight.as_strided((rows, width), (width, 1)) if weight.untyped_storage().nbytes() >= end else None


@functools.cache
def _joined(kind: Any) -> Any:
    class Joined(kind):
        def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            x_T_I = x.view(-1, x.shape[-1])
            chosen_T_S = self.punica_wrapper.chosen_T_S[: x_T_I.shape[0]]
            joined_bias = None if bias is None else self.joined_bias
            y_T_O = torch.ops.teamtr_lora.linear_with_lora(x_T_I, self.joined, joined_bias, self.b_O_C, chosen_T_S, self.outs)
            return y_T_O.view(*x.shape[:-1], y_T_O.shape[1])

    return Joined


def _choose_slots(wrapper: Any, slots: int) -> None:
    class SideBySide(type(wrapper)):  # type: ignore[misc]
        def update_metadata(self, *args: Any, **kwargs: Any) -> None:
            super().update_metadata(*args, **kwargs)
            self.choose(self.token_lora_indices)

        def choose(self, slot_T: Tensor) -> None:
            self.chosen_T_S[: len(slot_T)].copy_(slot_T[:, None] == self.slots_S)

        def add_lora_linear(self, y: Tensor, x: Tensor, a: Any, b: Any, scale: float, output_slices: Any, **_: Any) -> None:
            chosen_T_S = self.chosen_T_S[: x.shape[0]]
            torch.ops.teamtr_lora.add_lora(y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), list(a), list(b), chosen_T_S)

    wrapper.__class__ = SideBySide
    device = wrapper._token_lora_indices.device
    wrapper.slots_S = torch.arange(slots, device=device)
    wrapper.chosen_T_S = torch.zeros(len(wrapper._token_lora_indices), slots, dtype=torch.bool, device=device)


def add_lora(y_T_O: Tensor, x_T_I: Tensor, a: list[Tensor], b: list[Tensor], chosen_T_S: Tensor) -> None:
    """y += B (chosen * (A x)) on buffers that lie side by side; `chosen` is true at each token's slot."""
    parts, (slots, _, rank, width) = len(a), a[0].shape
    columns = parts * slots * rank
    a_C_I, b_O_C = a[0].as_strided((columns, width), (width, 1)), b[0].as_strided((y_T_O.shape[1], columns), (columns, 1))
    _add_chosen(y_T_O, x_T_I @ a_C_I.T, b_O_C, chosen_T_S, parts)


def linear_with_lora(
    x_T_I: Tensor, joined: Tensor, bias: Tensor | None, b_O_C: Tensor, chosen_T_S: Tensor, outs: list[int]
) -> Tensor:
    """W x + bias + B (chosen * (A x)), where `joined` is W above A and `bias` as long as both."""
    width = b_O_C.shape[0]
    blocks = kernel_blocks(outs, b_O_C.shape[1])
    if (
        blocks
        and x_T_I.is_cuda
        and x_T_I.shape[0] <= FEW_TOKENS
        and x_T_I.element_size() == 2
        and _multiplies_tiles(x_T_I.device)
    ):
        from teamtr_lora.rollout.vllm.patches.lora_kernel import add_chosen

        return add_chosen(linear(x_T_I, joined, bias), b_O_C, chosen_T_S, outs, blocks)
    y_T_O = linear(x_T_I, joined[:width], None if bias is None else bias[:width])
    _add_chosen(y_T_O, x_T_I @ joined[width:].T, b_O_C, chosen_T_S, len(outs))
    return y_T_O


def _add_chosen(y_T_O: Tensor, h_T_C: Tensor, b_O_C: Tensor, chosen_T_S: Tensor, parts: int) -> None:
    slots = chosen_T_S.shape[1]
    h_T_P_S_R = h_T_C.view(-1, parts, slots, h_T_C.shape[1] // (parts * slots))
    # torch.where, not a product with 0: another adapter's value for this token may be infinite, and 0 * inf is NaN.
    own_T_P_S_R = torch.where(chosen_T_S[:, None, :, None], h_T_P_S_R, 0.0)
    y_T_O.addmm_(own_T_P_S_R.view_as(h_T_C), b_O_C.T)


@functools.cache
def _multiplies_tiles(device: torch.device) -> bool:
    """Whether the GPU's 16-bit matrix units are known to Triton."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def kernel_blocks(outs: Sequence[int], columns: int) -> tuple[int, int] | None:
    """Outputs and columns that one step of the small kernel takes: powers of two that divide every part's."""
    rows, depth = math.gcd(128, *outs), math.gcd(64, columns // len(outs))
    return (rows, depth) if rows >= 16 and depth >= 16 and len(outs) <= 3 else None


# registered as operators, so that torch.compile calls them whole and does not look into them
_library = torch.library.Library("teamtr_lora", "FRAGMENT")
_library.define("add_lora(Tensor(a!) y, Tensor x, Tensor[] a, Tensor[] b, Tensor chosen) -> ()")
_library.define("linear_with_lora(Tensor x, Tensor joined, Tensor? bias, Tensor b, Tensor chosen, int[] outs) -> Tensor")
for _key in ("CPU", "CUDA"):
    _library.impl("add_lora", add_lora, _key)
    _library.impl("linear_with_lora", linear_with_lora, _key)
_library.impl("add_lora", lambda *_: None, "Meta")
_library.impl("linear_with_lora", lambda x, joined, bias, b, *_: x.new_empty(x.shape[0], b.shape[0]), "Meta")


def around_start(options: dict[str, Any]) -> AbstractContextManager[None]:
    slots, rank = options["max_loras"], options["max_lora_rank"]
    if not fits_side_by_side(slots, rank):
        logger.warning(
            "patch lora_layers is for at most %d slots x rank (here %d x %d): vLLM's own LoRA kernels run, which are slower",
            DENSE_COLUMNS, slots, rank,
        )  # fmt: skip
        return nullcontext()
    # vLLM keeps compiled models by their settings: one with its own layers must not stand in for one with ours
    options["additional_config"] = {"teamtr_lora": "adapters side by side"}
    return lora_side_by_side(slots, rank)


PATCH = Patch(name="lora_layers", for_adapters=True, around_start=around_start)
