"""The fused adapter layers against autograd in float64, and against PEFT's own modules."""

from collections import Counter
from contextlib import nullcontext
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from teamtr_lora.base import fused_lora
from teamtr_lora.base.fused_lora import (
    A_SCALE,
    B_SCALE,
    FusedLora,
    WideLinear,
    WideLora,
    can_fuse,
    can_widen,
    fused,
    refresh,
    two_parts,
)
from teamtr_lora.base.precision import float32_products
from teamtr_lora.base.segment_attention import Segments, attending_over_segments

ADAPTER = "agent_a"


def tiny(dtype: torch.dtype, device: str = "cpu", targets: str | list[str] = "all-linear") -> nn.Module:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    config = Qwen3Config(vocab_size=300, num_attention_heads=4, num_key_value_heads=2, **sizes)
    model = get_peft_model(Qwen3ForCausalLM(config), LoraConfig(r=4, lora_alpha=8, target_modules=targets), ADAPTER)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
        elif "lora_A" not in name:
            parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_("lora_" in name)
    return model.eval().to(device)


def gradients(model: nn.Module, ids: Tensor, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Of a weighted sum of the last hidden states, scaled so that half precision does not underflow."""
    trained = {name: p for name, p in model.named_parameters() if "lora_" in name}
    for parameter in trained.values():
        parameter.grad = None
    hidden = model.get_base_model().model(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[operator]
    ((hidden.to(weight.dtype) * weight).sum() * 16).backward()
    return {name: p.grad.double() / 16 for name, p in trained.items() if p.grad is not None}, hidden.detach()


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    apart = sum(float(((found[n] - wanted[n].to(found[n].device)) ** 2).sum()) for n in wanted)
    return float((apart / sum(float((wanted[n] ** 2).sum()) for n in wanted)) ** 0.5)


def test_float32_gradients_are_those_of_float64() -> None:
    ids, weight = torch.randint(0, 300, (3, 17)), torch.randn(3, 17, 64)
    model = tiny(torch.float32)
    trained = {name: p for name, p in model.named_parameters() if "lora_" in name}
    with fused(model, ADAPTER, compiled=False):
        assert isinstance(model.get_base_model().model.layers[0].mlp.up_proj, FusedLora)  # type: ignore[operator]
        hidden = model.get_base_model().model(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[operator]
        (hidden * weight).sum().backward()
    found = {name: p.grad.double() for name, p in trained.items() if p.grad is not None}
    wanted, exact = gradients(tiny(torch.float32).double(), ids, weight.double())
    assert distance(found, wanted) < 1e-6
    torch.testing.assert_close(hidden.detach().double(), exact, rtol=1e-5, atol=1e-5)


def test_one_layer_in_half_precision_has_the_gradients_of_float64() -> None:
    """On the same rounded base and inputs; the GPU test below takes whole models."""
    torch.manual_seed(3)
    layer = nn.Linear(96, 80).half().requires_grad_(False)
    a, b = torch.randn(8, 96) / 96**0.5, torch.randn(80, 8) * 0.02
    x, weight = torch.randn(5, 40, 96).half(), torch.randn(5, 40, 80).half()
    half = [tensor.clone().requires_grad_() for tensor in (x, a, b)]
    ours = FusedLora(layer, half[1], half[2], 2.0)
    refresh([ours])
    (ours(half[0]) * weight).sum().backward()
    exact = [tensor.double().requires_grad_() for tensor in (x, a, b)]
    plain = nn.functional.linear(exact[0], layer.weight.double(), layer.bias.double())
    ((plain + 2.0 * (exact[0] @ exact[1].t()) @ exact[2].t()) * weight.double()).sum().backward()
    for found, wanted in zip(half, exact, strict=True):
        assert found.grad is not None and wanted.grad is not None
        assert float((found.grad.double() - wanted.grad).norm() / wanted.grad.norm()) < 1e-3
    assert half[1].grad is not None and half[1].grad.dtype == torch.float32


def test_what_fused_layers_have_trained_is_the_same_policy_in_plain_peft(tmp_path: Path) -> None:
    """A step through fused layers, the export, and PEFT's own loader on a fresh base: the same log-probabilities."""
    torch.manual_seed(2)
    ids, model = torch.randint(0, 300, (3, 17)), tiny(torch.float32)
    decoder: Any = model.get_base_model()  # type: ignore[operator]
    trained = [p for name, p in model.named_parameters() if "lora_" in name]
    start = [p.detach().clone() for p in trained]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    with fused(model, ADAPTER, compiled=False):
        for _ in range(2):
            optimizer.zero_grad()
            decoder(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
        with torch.no_grad():
            here = decoder(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    assert all(bool((p != before).any()) for p, before in zip(trained, start, strict=True))
    model.save_pretrained(str(tmp_path))  # type: ignore[operator]
    fresh: Any = tiny(torch.float32).unload()  # type: ignore[operator]
    loaded: Any = PeftModel.from_pretrained(fresh, str(tmp_path / ADAPTER))
    with torch.no_grad():
        there = loaded.eval()(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    torch.testing.assert_close(here, there, rtol=0, atol=1e-5)


def test_peft_is_back_afterwards_whatever_was_raised() -> None:
    model = tiny(torch.float32)
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(KeyboardInterrupt), fused(model, ADAPTER, compiled=False):
        raise KeyboardInterrupt
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert not can_fuse(model, ADAPTER) and not can_fuse(model, "nobody")  # on a CPU, and without such an adapter


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [A_SCALE, B_SCALE])
def test_two_half_precision_parts_keep_twice_the_bits(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 400) * torch.logspace(-4, -1, 400)
    high, low = two_parts(weight, scale, dtype)
    apart = ((high.float() + low.float()) / scale - weight).abs()
    bits, smallest = (20, 2.0**-24) if dtype == torch.float16 else (15, 0.0)  # float16 has no numbers below that
    assert bool((apart <= weight.abs() * 2.0**-bits + smallest / scale).all())


@pytest.mark.parametrize("kind", [FusedLora, WideLora])
@pytest.mark.parametrize("changed", ["a", "b"])
def test_what_half_precision_cannot_resolve_of_a_factor_still_moves_the_output(kind: type[FusedLora], changed: str) -> None:
    """The output is the difference of two weights that are 1 but for 2^-13, which float16 does not see: it is all low part."""
    layer = nn.Linear(2, 1, bias=False).half().requires_grad_(False)
    layer.weight.zero_()
    nearly = torch.tensor([1.0 + 2.0**-13, 1.0])
    assert nearly.half().tolist() == [1.0, 1.0]
    a = nearly[None] if changed == "a" else torch.eye(2)
    b = torch.ones(1, 1) if changed == "a" else nearly[None]
    ours = kind(layer, a, b, 3.0)
    refresh([ours])
    with torch.no_grad():
        assert float(ours(torch.tensor([[1.0, -1.0]]).half())) == 3 * 2.0**-13


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_a_wide_pass_rounds_only_what_goes_into_a_product(targets: str | list[str], device: str) -> None:
    """Against float64 on the same stored weights, beside a pass in half precision. Another agent has adapters elsewhere."""
    ids = torch.randint(0, 300, (3, 33), device=device)
    model = tiny(torch.float16, device, targets)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["o_proj", "up_proj"]))  # type: ignore[operator]
    decoder: Any = model.get_base_model().model  # type: ignore[operator]
    before = [*model.named_modules()]
    with torch.no_grad():
        exact = tiny(torch.float16, device, targets).double().get_base_model().model(input_ids=ids).last_hidden_state  # type: ignore[operator]
        with fused(model, ADAPTER, compiled=False):
            half = decoder(input_ids=ids, use_cache=False).last_hidden_state
        with float32_products(tf32=True), fused(model, ADAPTER, compiled=False, wide=True):
            found = decoder(input_ids=ids, use_cache=False).last_hidden_state
            assert isinstance(decoder.layers[0].mlp.gate_proj, WideLora if targets == "all-linear" else WideLinear)
    assert [*model.named_modules()] == before
    assert found.dtype == torch.float32
    noise, coarse = ((each - exact).norm() / exact.norm() for each in (found, half))
    assert float(noise) < 6e-4 and float(noise) < 0.7 * float(coarse)
    peft = model.get_base_model().model(input_ids=ids).last_hidden_state  # type: ignore[operator]
    assert peft.dtype == torch.float16, "nothing of the wide pass stays"


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
@pytest.mark.parametrize("device", DEVICES)
def test_layers_that_add_up_in_float32_are_less_noisy(device: str, targets: str | list[str]) -> None:
    """Against float64 on the same stored weights, forward and backward; on a CPU, since flash kernels are of half precision."""
    torch.manual_seed(0)
    ids_everywhere, weight_everywhere = torch.randint(0, 300, (1, 48)), torch.randn(1, 48, 64)
    found = {}
    for how, dtype in (("exact", torch.float64), ("rounded", torch.float16), ("float32_sum", torch.float16)):
        place = torch.device("cpu" if how == "exact" else device)
        ids, weight = ids_everywhere.to(place), weight_everywhere.to(place)
        segments = Segments.of([(0, 0), (0, 0)], [20, 28]).to(place)
        at = torch.cat([torch.arange(20), torch.arange(28)])[None].to(place)
        model = tiny(torch.float16, place.type, targets).to(torch.float64 if dtype == torch.float64 else None)
        causal_lm: Any = model.get_base_model()  # type: ignore[operator]
        with torch.no_grad():  # the sum is larger than what a layer adds to it, as in trained bases
            causal_lm.get_input_embeddings().weight.mul_(32)
        around = fused(model, ADAPTER, compiled=False, float32_sum=how == "float32_sum")
        with attending_over_segments(causal_lm), nullcontext() if how == "exact" else around:
            hidden = causal_lm.model(input_ids=ids, position_ids=at, segments=segments, use_cache=False).last_hidden_state
            assert hidden.dtype == (torch.float32 if how == "float32_sum" else dtype)
            ((hidden.to(weight.dtype if how != "exact" else dtype) * weight).sum() * 16).backward()
        gradient = {name: p.grad.double().cpu() / 16 for name, p in model.named_parameters() if p.grad is not None}
        found[how] = {"hidden": hidden.detach().double().cpu()}, gradient
        assert not any("Rounded" in type(module).__name__ for module in model.modules())
    for what, share in ((0, 0.5), (1, 1.0)):  # gradients are half precision's own either way
        noise, coarse = (distance(found[how][what], found["exact"][what]) for how in ("float32_sum", "rounded"))
        assert noise < 2e-3 and noise < share * coarse, (what, noise, coarse)


class Operations(TorchDispatchMode):
    """Counts what is called while active."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(operation)] += 1
        return operation(*args, **kwargs or {})


def test_no_product_and_no_attention_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters on two modules: the products of all others are not in an operation of ours."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition", fullgraph=True))
    monkeypatch.setattr(fused_lora, "_compiled", cache(fused_lora._compiled.__wrapped__))
    torch._dynamo.reset()
    model = tiny(torch.float32, targets=["q_proj", "down_proj"])
    causal_lm: Any = model.get_base_model()  # type: ignore[operator]
    segments = Segments.of([(0, 0), (0, 0)], [10, 14])
    ids = torch.randint(0, 300, (1, 24))
    with attending_over_segments(causal_lm), fused(model, ADAPTER, compiled=True):
        hidden = causal_lm.model(input_ids=ids, segments=segments, use_cache=False).last_hidden_state
        with Operations() as backward:
            hidden.sum().backward()
    torch._dynamo.reset()
    ours = {
        name: backward.found[f"teamtr_lora.{name}.default"] for name in ("lora", "attend", "attend_backward", "lora_backward")
    }
    assert ours == {"lora": 0, "attend": 0, "attend_backward": 2, "lora_backward": 4}
    assert backward.found["aten.mm.default"] == 2 * 5, "the gradient of each bare layer's input, in both layers"


def test_compiled_layers_that_compute_again_have_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """By gradient checkpointing; those that do not are in the test of their one graph."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition", fullgraph=True))
    monkeypatch.setattr(fused_lora, "_compiled", cache(fused_lora._compiled.__wrapped__))
    torch._dynamo.reset()
    ids, weight = torch.randint(0, 300, (1, 24)), torch.randn(1, 24, 64)
    segments = Segments.of([(0, 0), (0, 0)], [10, 14])
    found = []
    for compiled in (False, True):
        model = tiny(torch.float32)
        causal_lm: Any = model.get_base_model()  # type: ignore[operator]
        if compiled:
            causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        with attending_over_segments(causal_lm), fused(model, ADAPTER, compiled=compiled):
            hidden = causal_lm.model(input_ids=ids, segments=segments, use_cache=False).last_hidden_state
            (hidden * weight).sum().backward()
        found.append({name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None})
    torch._dynamo.reset()
    assert distance(found[1], found[0]) < 1e-6


def test_where_a_wide_pass_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_lora, "can_fuse", lambda *_: True)
    assert can_widen(tiny(torch.float16), ADAPTER) and not can_widen(tiny(torch.bfloat16), ADAPTER)
    model = tiny(torch.float16)
    model.get_base_model().model.layers[1].input_layernorm = nn.LayerNorm(64).half()  # type: ignore[operator]
    assert not can_widen(model, ADAPTER), "its norm does not take a float32 input"


@pytest.mark.parametrize("wide", [False, True])
def test_all_layers_sizes_and_steps_share_one_compiled_graph(monkeypatch: pytest.MonkeyPatch, wide: bool) -> None:
    """Each further graph of a large base would take half a minute to compile. It computes what the layers do without one: hidden
    states, and the gradients of a training pass."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition", fullgraph=True))
    monkeypatch.setattr(fused_lora, "_compiled", cache(fused_lora._compiled.__wrapped__))
    torch._dynamo.reset()
    counters.clear()
    found = [passes_of_several_sizes(compiled=compiled, wide=wide) for compiled in (False, True)]
    torch._dynamo.reset()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert len(found[0]) == 3
    for plain, compiled in zip(*found, strict=True):
        assert len(plain) == 1 + (not wide) * 2 * 2 * 7, "two parts of an adapter on seven modules, in both layers"
        assert distance(compiled, plain) < 1e-6
        assert all(distance({name: compiled[name]}, {name: plain[name]}) < 1e-5 for name in plain)


def passes_of_several_sizes(*, compiled: bool, wide: bool) -> list[dict[str, Tensor]]:
    """Of each: the hidden states, and the gradients of a training pass. The adapters move between them."""
    model, found = tiny(torch.float16 if wide else torch.float32), []
    trained = {name: p for name, p in model.named_parameters() if "lora_" in name}
    decoder: Any = model.get_base_model()  # type: ignore[operator]
    with attending_over_segments(decoder), fused(model, ADAPTER, compiled=compiled, wide=wide), torch.set_grad_enabled(not wide):
        for openings, lone, rests in ([5, 7], [3], [7, 8]), ([5], [6, 4], [9]), ([4, 4, 4], [], [4, 4, 4]):
            parts = [*openings, *lone, *rests]
            begins = list(accumulate(openings, initial=0))
            opening = [(0, 0)] * len(openings + lone) + [pair for pair, _ in zip(pairwise(begins), rests, strict=False)]
            segments = Segments.of(opening, parts)
            ids = torch.arange(sum(parts))[None] * 7 % 300
            hidden = decoder.model(input_ids=ids, position_ids=ids % 9, segments=segments, use_cache=False).last_hidden_state
            found.append({"hidden": hidden.detach().double()})
            if not wide:
                (hidden * torch.linspace(-1, 1, 64)).sum().backward()
                found[-1] |= {name: p.grad.double() for name, p in trained.items() if p.grad is not None}
            with torch.no_grad():
                for parameter in trained.values():
                    parameter.grad = None
                    parameter.add_(0.01)
    return found


def test_torch_is_asked_for_compiled_layers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every update begins three passes of 28 layers and more."""
    asked: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda forward, **_: asked.append(forward) or forward)
    monkeypatch.setattr(fused_lora, "_compiled", cache(fused_lora._compiled.__wrapped__))
    model = tiny(torch.float32)
    layers = model.get_base_model().model.layers  # type: ignore[operator]
    for _ in range(2):
        with fused(model, ADAPTER, compiled=True):
            assert all(layer.forward.__self__ is layer and layer.forward.__func__ is asked[0] for layer in layers)
    assert len(asked) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="half precision on tensor cores and compiled layers need a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_half_precision_on_a_gpu(compiled: bool) -> None:
    """Against float64 on the same rounded base: no further away than PEFT's float32 adapters are."""
    ids, weight = torch.randint(0, 300, (3, 65), device="cuda"), torch.randn(3, 65, 64, device="cuda")
    model = tiny(torch.float16, "cuda")
    wanted, _ = gradients(tiny(torch.float16, "cuda").double(), ids, weight.double())
    peft, _ = gradients(model, ids, weight)
    trained = {name: p for name, p in model.named_parameters() if "lora_" in name}
    for parameter in trained.values():
        parameter.grad = None
    assert can_fuse(model, ADAPTER)
    with fused(model, ADAPTER, compiled=compiled):
        hidden = model.get_base_model().model(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[operator]
        ((hidden.float() * weight).sum() * 16).backward()
    found = {name: p.grad.double() / 16 for name, p in trained.items() if p.grad is not None}
    assert distance(found, wanted) < max(1e-3, 1.2 * distance(peft, wanted))
