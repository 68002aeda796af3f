"""strict_fp32 against a model that really is fp32."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen3Config

from teamtr_lora.base.precision import decoder_layers, head_weight, strict_fp32
from teamtr_lora.common.errors import UserError

torch.set_num_threads(1)

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
IDS_B_T = torch.arange(24).reshape(2, 12) % 97
MASK_B_T = torch.tensor([[1] * 12, [0] * 4 + [1] * 8])


def tiny(dtype: torch.dtype, *, tied: bool = True) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, tie_word_embeddings=tied, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    return model.eval().requires_grad_(False)


def with_lora(model: nn.Module) -> nn.Module:
    """fp32 adapters whose B is not zero, so that the adapter path matters."""
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = param.data.float()
    return model


def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS_B_T, attention_mask=MASK_B_T).logits[MASK_B_T.bool()]


def snapshot(model: nn.Module) -> dict[str, tuple[torch.dtype, int, torch.Tensor]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (t.dtype, t.data_ptr(), t.data.clone()) for name, t in tensors}


def assert_untouched(model: nn.Module, before: dict[str, tuple[torch.dtype, int, torch.Tensor]]) -> None:
    after = snapshot(model)
    assert after.keys() == before.keys()
    for name, (dtype, pointer, values) in before.items():
        assert after[name][:2] == (dtype, pointer), name
        assert torch.equal(after[name][2], values), name
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert "forward" not in module.__dict__


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lora", [True, False])
def test_half_precision_base_computes_as_its_fp32_copy(dtype: torch.dtype, tied: bool, lora: bool) -> None:
    model = tiny(dtype, tied=tied)
    model = with_lora(model) if lora else model
    reference = copy.deepcopy(model).float()
    before = snapshot(model)
    with torch.no_grad():
        plain = logits(model)
        with strict_fp32(model):
            strict = logits(model)
        expected = logits(reference)
    assert strict.dtype == torch.float32
    torch.testing.assert_close(strict, expected, atol=1e-6, rtol=1e-6)
    assert (plain.float() - expected).abs().max() > 1e-3, "the test would pass without strict_fp32"
    assert_untouched(model, before)


def test_fp32_base_is_left_alone() -> None:
    model = tiny(torch.float32)
    with torch.no_grad(), strict_fp32(model):
        hooked = [name for name, module in model.named_modules() if module._forward_hooks]
        strict = logits(model)
    assert hooked == []
    with torch.no_grad():
        assert torch.equal(strict, logits(model))


def test_never_more_than_one_layer_in_fp32() -> None:
    model = tiny(torch.bfloat16)
    names = {id(param): name for name, param in model.named_parameters()}
    largest_layer = max(sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model))
    seen: list[set[str]] = []

    def record(*_: object) -> None:
        wide = [p for p in model.parameters() if p.dtype == torch.float32]
        assert sum(p.numel() for p in wide) <= largest_layer
        seen.append({".".join(names[id(p)].split(".")[:3]) for p in wide})

    leaves = [module for module in model.modules() if not list(module.children())]
    handles = [leaf.register_forward_pre_hook(record) for leaf in leaves]
    with torch.no_grad(), strict_fp32(model):
        logits(model)
    for handle in handles:
        handle.remove()
    assert all(len(units) <= 1 for units in seen)
    assert {"model.layers.0", "model.layers.1", "model.layers.2"} <= set().union(*seen)


@pytest.mark.parametrize("where", ["layer", "outside"])
def test_exceptions_restore_everything(where: str) -> None:
    model = tiny(torch.float16)
    before = snapshot(model)
    precision_before = torch.get_float32_matmul_precision()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    handle = decoder_layers(model)[1].mlp.register_forward_hook(fail) if where == "layer" else None
    with pytest.raises(ZeroDivisionError), torch.no_grad(), strict_fp32(model, tf32=True):
        assert torch.get_float32_matmul_precision() == "high"
        logits(model)
        fail()
    if handle is not None:
        handle.remove()
    assert torch.get_float32_matmul_precision() == precision_before
    assert_untouched(model, before)


def test_matmul_precision_and_autocast() -> None:
    model = tiny(torch.bfloat16)
    torch.set_float32_matmul_precision("high")
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), strict_fp32(model):
            assert torch.get_float32_matmul_precision() == "highest"
            strict = logits(model)
            with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
                logits(model)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        torch.testing.assert_close(strict, logits(copy.deepcopy(model).float()), atol=1e-6, rtol=1e-6)


def test_gradients_are_refused() -> None:
    model = tiny(torch.bfloat16)
    with pytest.raises(RuntimeError, match="no_grad"), strict_fp32(model):
        pass
    with torch.no_grad(), strict_fp32(model), torch.enable_grad(), pytest.raises(RuntimeError, match="gradients"):
        logits(model)


def dequantised(model: nn.Module) -> nn.Module:
    """An independent fp32 reference: NF4 table lookups written out, block scales by bitsandbytes' own state."""
    import bitsandbytes as bnb

    reference = copy.deepcopy(model)
    for name, module in list(reference.named_modules()):
        if isinstance(module, bnb.nn.Linear4bit):
            state = module.weight.quant_state
            packed = module.weight.data.reshape(-1)
            codes = torch.stack([packed >> 4, packed & 15], dim=-1).reshape(-1).long()
            absmax = bnb.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
            values = state.code[codes].reshape(-1, state.blocksize) * absmax.reshape(-1, 1)
            weight = values.reshape(state.shape)
        elif isinstance(module, bnb.nn.Linear8bitLt):
            scale = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
            weight = module.weight.data.float() * scale.reshape(-1, 1) / 127
        else:
            continue
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        plain.weight.data = weight.float()
        parent, _, child = name.rpartition(".")
        setattr(reference.get_submodule(parent), child, plain)
    return nn.Module.float(reference)  # transformers refuses .float() on what was loaded quantised


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_base_computes_as_its_dequantised_copy(bits: str, dtype: torch.dtype, tmp_path) -> None:
    pytest.importorskip("bitsandbytes")
    from teamtr_lora.base.frozen_base import quantization_config

    tiny(torch.float32).save_pretrained(tmp_path)
    config = quantization_config(bits, dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=dtype, device_map={"": "cpu"}).eval()
    expected_model = dequantised(model)
    model = with_lora(model)
    with torch.no_grad(), model.disable_adapter():
        with strict_fp32(model):
            strict = logits(model)
        torch.testing.assert_close(strict, logits(expected_model), atol=1e-4, rtol=1e-4)
        assert not any("forward" in module.__dict__ for module in model.modules())
    with torch.no_grad(), strict_fp32(model):
        assert (logits(model) - strict).abs().max() > 1e-3, "the adapter has no effect under strict_fp32"


def test_head_weight_is_the_logits_matrix() -> None:
    model = with_lora(tiny(torch.float32))
    hidden = torch.randn(5, SIZES["hidden_size"])
    weight = head_weight(model)
    assert weight.shape == (97, 64)
    torch.testing.assert_close(hidden @ weight.T, model.get_base_model().lm_head(hidden))


def test_head_weight_refuses_other_heads() -> None:
    softcapped = AutoModelForCausalLM.from_config(Gemma2Config(**SIZES))
    with pytest.raises(UserError, match="final_logit_softcapping"):
        head_weight(softcapped)
    biased = tiny(torch.float32, tied=False)
    biased.lm_head = nn.Linear(64, 97, bias=True)
    with pytest.raises(UserError, match="bias"):
        head_weight(biased)
    adapted = get_peft_model(tiny(torch.float32, tied=False), LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(UserError, match="output head"):
        head_weight(adapted)


def test_decoder_layers_of_llama_and_of_a_wrapped_model() -> None:
    llama = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    assert decoder_layers(llama) is llama.model.layers
    qwen = tiny(torch.float32)
    layers = qwen.model.layers
    assert decoder_layers(with_lora(qwen)) is layers
    with pytest.raises(UserError, match="decoder layers"):
        decoder_layers(nn.Linear(2, 2))
