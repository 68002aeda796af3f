"""The memory model against what autograd keeps, and the size of a micro-batch that it chooses."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from teamtr_lora.base import fused_lora
from teamtr_lora.base.frozen_base import BaseFacts, LinearShape
from teamtr_lora.base.fused_lora import fused
from teamtr_lora.base.memory_model import (
    ENOUGH_WORK,
    SIZES,
    TrainingPath,
    UpdateShape,
    choose_tokens,
    kept_per_token,
    training_path,
    update_memory,
    update_peak,
)
from teamtr_lora.base.segment_attention import Segments, attending_over_segments

RANK, GIB = 4, 2**30
KINDS: dict[str, Any] = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def facts_of(kind: str, layers: int = 2) -> BaseFacts:
    return BaseFacts(
        hidden_size=256, layers=layers, intermediate_size=768, heads=4, kv_heads=2, head_dim=64, head_norms=kind == "qwen3",
        vocab_size=300, context_tokens=512, parameters=0, stored_quantization="none", linears=(),
    )  # fmt: skip


def tiny(kind: str, layers: int) -> nn.Module:
    config_of, model_of = KINDS[kind]
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = config_of(vocab_size=300, num_hidden_layers=layers, **sizes)
    model: Any = get_peft_model(model_of(config), LoraConfig(r=RANK, lora_alpha=8, target_modules="all-linear"), "agent_a")
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.half()
        parameter.requires_grad_("lora_" in name)
    return model.eval()


def kept_tensors(node: Any) -> Iterator[torch.Tensor]:
    """What a node of the autograd graph, and every node before it, keeps for the backward pass."""
    todo, known = [node], {node}
    while todo:
        node = todo.pop()
        held = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        yield from (each for each in (*held, *getattr(node, "saved_tensors", ())) if isinstance(each, torch.Tensor))
        fresh = {before for before, _ in node.next_functions if before is not None} - known
        known |= fresh
        todo += fresh


def kept_bytes(model: nn.Module, around: AbstractContextManager[Any], tokens: int) -> int:
    """Of all tensors that autograd keeps of a forward pass and that grow with its tokens."""
    causal_lm: Any = model.get_base_model()  # type: ignore[operator]
    part = tokens // 4  # an opening, a lone sequence, and two rests
    rows = Segments.of([(0, 0), (0, 0), (0, part), (0, part)], [part] * 4)
    with attending_over_segments(causal_lm), around:
        ids = torch.randint(0, 300, (1, tokens))
        hidden = causal_lm.model(input_ids=ids, use_cache=False, segments=rows).last_hidden_state
    kept = [tensor for tensor in kept_tensors(hidden.grad_fn) if tokens in tensor.shape]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}.values())


PATHS = [("qwen3", "peft"), ("qwen3", "fused"), ("qwen3", "compiled"), ("llama", "peft"), ("llama", "fused")]


@pytest.mark.parametrize(("kind", "path"), PATHS)
def test_what_a_layer_keeps_is_what_autograd_keeps(kind: str, path: TrainingPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    monkeypatch.setattr(fused_lora, "_compiled", cache(fused_lora._compiled.__wrapped__))
    tokens, found = 400, {}
    for layers in (1, 3):
        model = tiny(kind, layers)
        around: Any = nullcontext()
        if path != "peft":
            around = fused(model, "agent_a", compiled=path == "compiled")
        found[layers] = kept_bytes(model, around, tokens)
    torch._dynamo.reset()
    counted = (found[3] - found[1]) / 2 / tokens
    assert kept_per_token(facts_of(kind), path, 2, RANK) == pytest.approx(counted, rel=0.04)


QWEN3_1_7B = BaseFacts(
    hidden_size=2048, layers=28, intermediate_size=6144, heads=16, kv_heads=8, head_dim=128, head_norms=True, vocab_size=151936,
    context_tokens=4096, parameters=1_720_574_976, stored_quantization="none",
    linears=tuple(LinearShape(f"{layer}.all", 2048, 24576) for layer in range(28)),
)  # fmt: skip
SHAPE = UpdateShape(
    tokens=9216,
    learned_tokens=65536,
    judged_tokens=16384,
    rank=16,
    value=2,
    path="compiled",
    checkpointing=False,
    head_chunk=1024,
)


def test_checkpointing_keeps_one_layer_and_every_input() -> None:
    plain = update_memory(QWEN3_1_7B, SHAPE)["activations"]
    checkpointed = update_memory(QWEN3_1_7B, replace(SHAPE, checkpointing=True))["activations"]
    layer = kept_per_token(QWEN3_1_7B, "compiled", 2, 16)
    assert plain - checkpointed == 9216 * (27 * layer - 28 * 2048 * 2)


def test_a_size_is_what_fits_and_no_more_than_keeps_a_gpu_busy() -> None:
    enough = ENOUGH_WORK // 2048
    assert choose_tokens(QWEN3_1_7B, SHAPE, 100 * GIB, 0) == enough
    for free in (12, 16, 20):
        size = choose_tokens(QWEN3_1_7B, SHAPE, free * GIB, 0)
        assert size < enough and update_peak(update_memory(QWEN3_1_7B, replace(SHAPE, tokens=size))) < free * GIB
        larger = SIZES[SIZES.index(size) + 1]
        assert 1.2 * update_peak(update_memory(QWEN3_1_7B, replace(SHAPE, tokens=larger))) > free * GIB
    assert choose_tokens(QWEN3_1_7B, SHAPE, GIB, 0) == SIZES[0]  # the run says that it will hardly fit
    assert choose_tokens(QWEN3_1_7B, SHAPE, 4 * GIB, 60 * GIB) == 8192  # an engine that sleeps lends its memory


def test_which_layers_a_training_pass_goes_through() -> None:
    plain = {"quantized": False, "dora": False, "compiled": True}
    assert training_path("cuda", 2, **plain) == "compiled"
    assert training_path("cuda", 2, **plain | {"compiled": False}) == "fused"
    for device, value, other in (("cpu", 4, {}), ("cuda", 4, {}), ("cuda", 2, {"quantized": True}), ("cuda", 2, {"dora": True})):
        assert training_path(device, value, **plain | other) == "peft"
