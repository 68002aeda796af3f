"""The adapters' arithmetic in vLLM's layers, against each token's own product."""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from teamtr_lora.rollout.vllm_lora import Laid, add_lora, kernel_blocks, lay_side_by_side, linear_with_lora


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
        self.chosen_T_S = (torch.from_numpy(slot_T)[:, None] == torch.arange(slots)).double()
        self.expected = self.y_T_O.clone()
        for t, slot in enumerate(slot_T):
            if slot >= 0:
                self.expected[t] += torch.cat([b[i][slot, 0] @ (a[i][slot, 0] @ self.x_T_I[t]) for i in range(len(outs))])
        self.theirs = (*a, *b)

    def laid(self, weight: torch.Tensor | None = None) -> Laid:
        parts = len(self.outs)
        laid = lay_side_by_side(self.theirs[:parts], self.theirs[parts:], weight)
        for ours, theirs in zip((*laid.a, *laid.b), self.theirs, strict=True):
            assert ours.shape == theirs.shape
            ours.copy_(theirs)
        return laid

    def joined_bias(self) -> torch.Tensor:
        return torch.cat([self.bias, self.bias.new_zeros(self.laid().b_O_C.shape[1])])


def some_case(seed: int) -> Case:
    rng = np.random.default_rng(seed + 100)
    slots, rank, width, tokens = (int(n) for n in rng.integers(1, 6, 4))
    return Case(seed, slots, rank, width, tokens, [int(n) for n in rng.integers(1, 7, int(rng.integers(1, 4)))])


@pytest.mark.parametrize("seed", range(5))
def test_products_side_by_side_are_each_tokens_own(seed: int) -> None:
    case = some_case(seed)
    laid = case.laid()
    y_T_O = case.y_T_O.clone()
    add_lora(y_T_O, case.x_T_I, list(laid.a), list(laid.b), case.chosen_T_S)
    assert torch.allclose(y_T_O, case.expected, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_a_joined_product_is_the_layers_and_each_tokens_own(seed: int) -> None:
    case = some_case(seed)
    laid = case.laid(case.weight)
    asked = (case.x_T_I, laid.joined), (laid.b_O_C, case.chosen_T_S, case.outs)
    assert torch.equal(laid.joined[: len(case.weight)], case.weight)
    assert torch.allclose(linear_with_lora(*asked[0], None, *asked[1]), case.expected, atol=1e-12)
    with_bias = torch.ops.teamtr_lora.linear_with_lora(*asked[0], case.joined_bias(), *asked[1])
    assert torch.allclose(with_bias, case.expected + case.bias, atol=1e-12)


def test_a_plain_layer_on_a_gpu_is_joined_and_another_is_not(monkeypatch: Any) -> None:
    from teamtr_lora.rollout import vllm_lora

    case = Case(0, slots=3, rank=2, width=5, tokens=4, outs=[3, 2])

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = SimpleNamespace(weight=torch.nn.Parameter(case.weight.clone()), bias=case.bias)
            self.lora_a_stacked = tuple(torch.zeros_like(t) for t in case.theirs[:2])
            self.lora_b_stacked = tuple(torch.zeros_like(t) for t in case.theirs[2:])
            self.punica_wrapper = SimpleNamespace(chosen_T_S=case.chosen_T_S)

        def apply(self, x: Any, bias: Any = None) -> Any:
            return "vLLM's own"

    for plain in (True, False):
        monkeypatch.setattr(vllm_lora, "_is_plain", lambda module, plain=plain: plain)
        layer = Layer()
        vllm_lora.lay_out(layer)
        for view, theirs in zip((*layer.lora_a_stacked, *layer.lora_b_stacked), case.theirs, strict=True):
            view.copy_(theirs)
        said = layer.apply(case.x_T_I, case.bias)
        assert torch.equal(layer.base_layer.weight, case.weight)
        if plain:
            assert torch.allclose(said, case.expected + case.bias, atol=1e-12)
            assert torch.allclose(layer.apply(case.x_T_I[None]), case.expected[None], atol=1e-12)
        else:
            assert said == "vLLM's own"


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
def test_the_kernel_gives_the_same_products(slots: int, rank: int, tokens: int, outs: list[int]) -> None:
    from teamtr_lora.rollout.lora_kernel import add_chosen

    case = Case(1, slots=slots, rank=rank, width=24, tokens=tokens, outs=outs)
    laid = case.laid(case.weight)
    device = "cpu" if interpreted else "cuda"
    wide, b, chosen = ((t.float().to(device)) for t in (case.x_T_I @ laid.joined.T, laid.b_O_C, case.chosen_T_S))
    blocks = kernel_blocks(outs, b.shape[1])
    assert blocks
    assert torch.allclose(add_chosen(wide, b, chosen, outs, blocks).cpu().double(), case.expected, rtol=1e-4, atol=1e-4)
