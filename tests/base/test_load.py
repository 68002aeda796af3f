"""Loading a frozen base, and every way in which its folder can be wrong."""

import hashlib
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from teamtr_lora.base import source
from teamtr_lora.base.frozen_base import base_facts, base_identity, load_base, quantization_config, resolve_device, resolve_dtype
from teamtr_lora.common.errors import UserError

torch.set_num_threads(1)

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with a byte tokenizer, as save_pretrained leaves it."""
    folder = tmp_path_factory.mktemp("base")
    tokens = ["<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytes_only = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=272, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=640, tie_word_embeddings=True, eos_token_id=[1, 7],
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(made, tmp_path / "base"))


def edit_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_base_is_frozen_and_described(made: Path) -> None:
    base = load_base(str(made), device="cpu")
    assert (base.name, base.folder) == (str(made), made)
    assert base.dtype == torch.float32 and base.device == torch.device("cpu") and base.quantization == "none"
    assert (base.context_tokens, base.vocab_size) == (640, 272)
    assert base.eos_ids == (1, 7)
    assert base.pad_id == 1, "no pad token: the end of message stands in"
    assert not base.model.training
    assert not any(parameter.requires_grad for parameter in base.model.parameters())
    assert base.model.config._attn_implementation == "sdpa"
    text = base.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"
    stored = load_file(made / "model.safetensors")
    for name, parameter in base.model.named_parameters():
        assert torch.equal(parameter, stored[name]), name


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_precision_on_request(made: Path, precision: str, dtype: torch.dtype) -> None:
    base = load_base(str(made), device="cpu", precision=precision)
    assert base.dtype == dtype
    assert {parameter.dtype for parameter in base.model.parameters()} == {dtype}


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_quantised_base_and_its_saved_copy(made: Path, quantization: str, tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    kind = bnb.nn.Linear4bit if quantization == "4bit" else bnb.nn.Linear8bitLt
    base = load_base(str(made), device="cpu", quantization=quantization)
    quantised = [name for name, module in base.model.named_modules() if isinstance(module, kind)]
    assert len(quantised) == 2 * 7
    assert base.model.lm_head.weight.dtype == torch.float32
    if quantization == "8bit":
        return
    weight = base.model.model.layers[0].mlp.up_proj.weight
    assert (weight.quant_type, weight.quant_state.nested) == ("nf4", True)
    # bitsandbytes must not repack the weights at the first forward on CPUs that could.
    assert not any(getattr(module, "support_avx512bf16_for_cpu", False) for module in base.model.modules())
    base.model.save_pretrained(tmp_path)
    base.tokenizer.save_pretrained(tmp_path)
    again = load_base(str(tmp_path), device="cpu")
    assert again.quantization == "4bit"
    assert torch.equal(again.model.model.layers[0].mlp.up_proj.weight.data, weight.data)
    assert base_facts(tmp_path).stored_quantization == "4bit"
    with pytest.raises(UserError, match=r"base\.quantization.*stored in 4bit"):
        load_base(str(tmp_path), device="cpu", quantization="8bit")


def test_quantization_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else found(name))
    with pytest.raises(UserError, match=r"teamtr-lora\[quant\]"):
        quantization_config("4bit", torch.float32)
    assert quantization_config("none", torch.float32) is None


def test_overflowing_activations_are_found_at_start_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] = torch.full((64, 96), 3e4)
    weights["model.layers.1.mlp.up_proj.weight"] *= 100
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"base\.precision: fp16.*bf16 or fp32"):
        load_base(str(folder), device="cpu", precision="fp16")
    base = load_base(str(folder), device="cpu", precision="bf16")
    assert base.dtype == torch.bfloat16
    hooked = [name for name, module in base.model.named_modules() if module._forward_hooks]
    assert not hooked, "hooks would cut every compiled layer into pieces"


def test_device_and_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="no CUDA GPU"):
        resolve_device("cuda")
    for wrong in ("gpu", "cpu:1", "cuda:x", ""):
        with pytest.raises(UserError, match=r"base\.device"):
            resolve_device(wrong)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UserError, match="there are 2 GPUs"):
        resolve_device("cuda:2")
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.float16


def test_tokenizer_problems(folder: Path, made: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"no chat template.*chat_template\.jinja"):
        load_base(str(folder), device="cpu")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="no tokenizer"):
        load_base(str(folder), device="cpu")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer of .* cannot be loaded"):
        load_base(str(folder), device="cpu")
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(made / name, folder)
    edit_json(folder / "config.json", vocab_size=100)
    with pytest.raises(UserError, match="258 tokens, the model only 100"):
        load_base(str(folder), device="cpu")


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks weights.*layers\.1\.mlp\.up_proj"):
        load_base(str(folder), device="cpu")


def test_damaged_or_foreign_folders(folder: Path) -> None:
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_base(str(folder), device="cpu")
    (folder / "config.json").write_text(json.dumps({"model_type": "mystery", "auto_map": {"AutoConfig": "x.Y"}}))
    (folder / "x.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_base(str(folder), device="cpu")
    (folder / "config.json").write_text(config)
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UserError, match="quantised by gptq"):
        load_base(str(folder), device="cpu")
    (folder / "config.json").write_text(config)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        load_base(str(folder), device="cpu")
    assert "\n" not in str(caught.value)


def test_facts_agree_with_the_loaded_model(made: Path) -> None:
    facts = base_facts(made)
    model = load_base(str(made), device="cpu").model
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    shapes = {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    assert {linear.name: (linear.in_features, linear.out_features) for linear in facts.linears} == shapes
    assert (facts.hidden_size, facts.layers, facts.intermediate_size) == (64, 2, 96)
    assert facts.stored_quantization == "none"
    assert (facts.kv_heads, facts.head_dim, facts.vocab_size, facts.context_tokens) == (2, 32, 272, 640)


def test_facts_read_no_weights(folder: Path) -> None:
    """There need not be any; an untied head is counted."""
    untied = Qwen3Config.from_pretrained(folder, tie_word_embeddings=False)
    before = base_facts(folder)
    untied.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    after = base_facts(folder)
    assert after.parameters == before.parameters + 272 * 64
    assert after.linears == before.linears


def test_identity_follows_the_content(folder: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = base_identity(folder)
    assert base_identity(made) == first
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert first["weights_sha256"] == hashlib.sha256(f"model.safetensors {digest}\n".encode()).hexdigest()

    calls = source._sha256.cache_info().misses
    base_identity(folder)
    assert source._sha256.cache_info().misses == calls, "the files were read again"

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-6
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    changed = base_identity(folder)
    assert changed["weights_sha256"] != first["weights_sha256"]
    assert changed["tokenizer_sha256"] == first["tokenizer_sha256"]
    (folder / "chat_template.jinja").write_text(TEMPLATE + " ")
    assert base_identity(folder)["tokenizer_sha256"] != first["tokenizer_sha256"]


def test_a_base_computes_the_same_in_training_mode(made: Path, tmp_path: Path) -> None:
    """Gradient checkpointing puts it there; a base may come with dropout."""
    folder = Path(shutil.copytree(made, tmp_path / "dropping"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    ids = torch.arange(2, 34)[None]
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()
    model = load_base(str(folder), device="cpu").model
    with torch.no_grad():
        assert not torch.equal(theirs(ids).logits, theirs(ids).logits), "the base does drop"
        assert torch.equal(model(ids).logits, model.train()(ids).logits)
