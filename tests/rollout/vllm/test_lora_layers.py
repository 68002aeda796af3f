"""The adapters' arithmetic in vLLM's layers, against each token's own product."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from teamtr_lora.rollout.vllm.patches.lora_layers import (
    add_lora,
    kernel_blocks,
    lay_out,
    lay_side_by_side,
    linear_with_lora,
    lora_side_by_side,
    only_with_adapters,
)


class Case:
    """A fused layer with adapters, and what each token should come to."""

    def __init__(self, seed: int, slots: int, rank: int, width: int, tokens: int, outs: list[int]) -> None:
        rng = np.random.default_rng(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.from_numpy(rng.normal(size=shape))

        a = tuple(draw(slots, 1, rank, width) for _ in outs)
        b = tuple(draw(slots, 1, out, rank) for out in outs)
        self.outs, self.weight, self.bias, self.x_T_I = outs, draw(sum(outs), width), draw(sum(outs)), draw(tokens, width)
        self.y_T_O = self.x_T_I @ self.weight.T
        slot_T = rng.integers(-1, slots, tokens)
        self.chosen_T_S = torch.from_numpy(slot_T)[:, None] == torch.arange(slots)
        self.expected = self.y_T_O.clone()
        for t, slot in enumerate(slot_T):
            if slot >= 0:
                self.expected[t] += torch.cat([b[i][slot, 0] @ (a[i][slot, 0] @ self.x_T_I[t]) for i in range(len(outs))])
        self.theirs = (*a, *b)
        self.joined = torch.cat([self.weight, draw(len(outs) * slots * rank, width)])
        self.laid = lay_side_by_side(a, b, self.joined[len(self.weight) :])
        for ours, theirs in zip((*self.laid.a, *self.laid.b), self.theirs, strict=True):
            assert ours.shape == theirs.shape and not ours.any()
            ours.copy_(theirs)

    def joined_bias(self) -> torch.Tensor:
        return torch.cat([self.bias, self.bias.new_zeros(len(self.joined) - len(self.bias))])


def some_case(seed: int) -> Case:
    rng = np.random.default_rng(seed + 100)
    slots, rank, width, tokens = (int(n) for n in rng.integers(1, 6, 4))
    return Case(seed, slots, rank, width, tokens, [int(n) for n in rng.integers(1, 7, int(rng.integers(1, 4)))])


@pytest.mark.parametrize("seed", range(5))
def test_products_side_by_side_are_each_tokens_own(seed: int) -> None:
    case = some_case(seed)
    y_T_O = case.y_T_O.clone()
    add_lora(y_T_O, case.x_T_I, list(case.laid.a), list(case.laid.b), case.chosen_T_S)
    assert torch.allclose(y_T_O, case.expected, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_a_joined_product_is_the_layers_and_each_tokens_own(seed: int) -> None:
    case = some_case(seed)
    asked = (case.x_T_I, case.joined), (case.laid.b_O_C, case.chosen_T_S, case.outs)
    assert torch.equal(case.joined[: len(case.weight)], case.weight)
    assert torch.allclose(linear_with_lora(*asked[0], None, *asked[1]), case.expected, atol=1e-12)
    with_bias = torch.ops.teamtr_lora.linear_with_lora(*asked[0], case.joined_bias(), *asked[1])
    assert torch.allclose(with_bias, case.expected + case.bias, atol=1e-12)


def test_another_agents_infinity_stays_its_own() -> None:
    case = Case(0, slots=2, rank=2, width=3, tokens=4, outs=[3])
    case.chosen_T_S[:] = torch.tensor([[True, False]])
    before = linear_with_lora(case.x_T_I, case.joined, None, case.laid.b_O_C, case.chosen_T_S, case.outs)
    case.laid.a[0][1].fill_(torch.inf)
    after = linear_with_lora(case.x_T_I, case.joined, None, case.laid.b_O_C, case.chosen_T_S, case.outs)
    assert torch.equal(after, before)


SLOTS, RANK, WIDTH = 4, 8, 64


@pytest.fixture(scope="module")
def vllm_layers() -> Iterator[Any]:
    """vLLM's linear layers, which want its process groups, made as an engine that starts makes them."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers import linear

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        initialize_model_parallel(1, 1)
        with lora_side_by_side(SLOTS, RANK):
            yield linear
        cleanup_dist_env_and_memory()


LAYERS: dict[str, tuple[Any, list[str]]] = {
    "qkv": (lambda linear: linear.QKVParallelLinear(WIDTH, 16, 8, 2, bias=True), ["q", "k", "v"]),
    "qkv in one": (lambda linear: linear.QKVParallelLinear(WIDTH, 16, 8, 2, bias=True), ["qkv"]),
    "gate and up": (lambda linear: linear.MergedColumnParallelLinear(WIDTH, [96, 48], bias=False), ["gate", "up"]),
    "column": (lambda linear: linear.ColumnParallelLinear(WIDTH, 80, bias=True, skip_bias_add=True), []),
    "row": (lambda linear: linear.RowParallelLinear(WIDTH, 80, bias=True), []),
    "replicated": (lambda linear: linear.ReplicatedLinear(WIDTH, 48, bias=True), []),
}


def test_what_lies_behind_a_weight_that_was_put_elsewhere_is_not_touched(vllm_layers: Any) -> None:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.utils import from_layer

    layer = vllm_layers.RowParallelLinear(WIDTH, 80, bias=False)
    together = torch.ones(200, WIDTH)  # its weight, and somebody else's behind it
    layer.weight.data = together[:80]
    config = LoRAConfig(max_lora_rank=RANK, max_loras=SLOTS, max_cpu_loras=SLOTS)
    config.lora_dtype = torch.float32
    module = from_layer(layer, SLOTS, config, [], None)
    lay_out(module)
    assert together.all() and not hasattr(module, "joined")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_vllms_layers_compute_each_tokens_own(vllm_layers: Any, name: str, packed: bool) -> None:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.utils import from_layer
    from vllm.platforms import current_platform

    if packed and not current_platform.is_cpu():
        pytest.skip("vLLM packs weights only on a CPU")
    torch.manual_seed(0)
    make, parts = LAYERS[name]
    layer = make(vllm_layers)
    layer.weight.data.normal_()
    if layer.bias is not None:
        layer.bias.data.normal_()
    weight, tokens = layer.weight.data.clone(), 7
    if packed:  # as vLLM does on a CPU: the layer is a product with a plain matrix no more
        layer.quant_method.process_weights_after_loading(layer)
    config = LoRAConfig(max_lora_rank=RANK, max_loras=SLOTS, max_cpu_loras=SLOTS)
    config.lora_dtype = torch.float32
    module = from_layer(layer, SLOTS, config, parts, None)
    slot_T = torch.tensor([0, 1, 2, 3, -1, 2, 0])
    chosen_T_S = slot_T[:, None] == torch.arange(SLOTS)

    class Wrapper:
        def __init__(self) -> None:
            self.chosen_T_S = chosen_T_S

        def add_lora_linear(self, y: Any, x: Any, a: Any, b: Any, *_: Any) -> None:
            add_lora(y, x, list(a), list(b), self.chosen_T_S)

    module.set_mapping(Wrapper())
    lay_out(module)
    assert hasattr(module, "joined") == (not packed)
    a, b = ([stacked.normal_().clone() for stacked in buffers] for buffers in (module.lora_a_stacked, module.lora_b_stacked))
    x_T_I = torch.randn(tokens, WIDTH)
    expected = x_T_I @ weight.T + (layer.bias if layer.bias is not None and not layer.skip_bias_add else 0.0)
    for t, slot in enumerate(slot_T.tolist()):
        if slot >= 0:
            expected[t] += torch.cat([b[i][slot, 0] @ (a[i][slot, 0] @ x_T_I[t]) for i in range(len(a))])
    assert torch.allclose(module(x_T_I)[0], expected, rtol=1e-4, atol=1e-3)
    assert packed or torch.equal(layer.weight, weight)


def test_blocks_of_the_kernel_divide_every_part() -> None:
    assert kernel_blocks([2048, 1024, 1024], 192) == (128, 64)
    assert kernel_blocks([576, 192, 192], 3 * 3 * 16) == (64, 16)
    assert kernel_blocks([100, 20], 128) is None  # outputs that no block divides
    assert kernel_blocks([128], 3 * 8) is None  # too few columns for a product
    assert kernel_blocks([128] * 4, 4 * 64) is None


interpreted = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (interpreted or torch.cuda.is_available()),
    reason="the kernel needs a GPU, or Triton with TRITON_INTERPRET=1; its CPU counterpart is tested above",
)
@pytest.mark.parametrize(
    ("slots", "rank", "tokens", "outs"),
    [(4, 16, 70, [128, 64, 64]), (3, 16, 1, [64, 64]), (2, 8, 33, [48]), (9, 32, 5, [32, 16, 16])],
)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_the_kernel_gives_the_same_products(
    slots: int, rank: int, tokens: int, outs: list[int], dtype: torch.dtype, error: float
) -> None:
    from teamtr_lora.rollout.vllm.patches.lora_kernel import add_chosen

    case = Case(1, slots=slots, rank=rank, width=24, tokens=tokens, outs=outs)
    device = "cpu" if interpreted else "cuda"
    wide, b = (t.to(device, dtype) for t in (case.x_T_I @ case.joined.T, case.laid.b_O_C))
    blocks = kernel_blocks(outs, b.shape[1])
    assert blocks
    said = add_chosen(wide, b, case.chosen_T_S.to(device), outs, blocks)
    assert said.dtype == dtype
    assert float((said.cpu().double() - case.expected).abs().max() / case.expected.abs().max()) < error


def test_graphs_are_captured_for_steps_with_adapters_only() -> None:
    for cases, wanted in ([0, 3], [3]), ([0, 1, 2, 4], [1, 2, 4]), ([0], [0]):
        runner = SimpleNamespace(lora_capture_cases=cases)
        only_with_adapters(runner)
        assert runner.lora_capture_cases == wanted
    only_with_adapters(SimpleNamespace())  # one that captures in another way
