"""A stranger's base: its config.json chooses no code, and whatever is in it ends in one line or in a model that is ours."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.integrations.hub_kernels as hub_kernels
from safetensors.torch import load_file
from transformers.models.auto import auto_factory

from teamtr_lora.base.frozen_base import base_facts, load_base, load_tokenizer, stored_end_ids
from teamtr_lora.cli import main
from teamtr_lora.common.errors import UserError


@pytest.fixture
def folder(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to spoil, in a world where fetching code is an error."""
    target = tmp_path / "base"
    shutil.copytree(tiny_base, target)

    def fetched(*args: object, **more: object) -> None:
        raise AssertionError(f"code was asked for: {args} {more}")

    monkeypatch.setattr(hub_kernels, "load_and_register_attn_kernel", fetched, raising=False)
    monkeypatch.setattr(hub_kernels, "get_kernel", fetched, raising=False)
    monkeypatch.setattr(auto_factory, "get_class_from_dynamic_module", fetched)
    return target


def edit(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize(
    "values",
    [
        {"_attn_implementation": "evil/flash"},
        {"attn_implementation": "evil/flash"},
        {"_attn_implementation": "evil/flash:run", "_attn_implementation_internal": "evil/flash"},
        {"_attn_implementation": {"": "evil/flash"}},
        {"_attn_implementation": "flash_attention_2"},
        {"_attn_implementation": "eager"},
        {"_experts_implementation": "evil/experts", "experts_implementation": "evil/experts"},
        {"auto_map": {"AutoConfig": "owned.Config", "AutoModelForCausalLM": "owned.Model"}},
        {"auto_map": {"AutoModelForCausalLM": "evil/repo--owned.Model"}, "custom_pipelines": {"x": {"impl": "owned.P"}}},
        {"use_kernels": True, "kernel_config": {"RMSNorm": "evil/kernels:RMSNorm"}},
        {"return_dict": False},
    ],
)
def test_what_it_asks_for_is_not_what_it_gets(folder: Path, values: dict[str, Any]) -> None:
    (folder / "owned.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    edit(folder, **values)
    assert base_facts(folder).layers == 2
    base = load_base(str(folder), device="cpu")
    assert base.model.config._attn_implementation == "sdpa"  # type: ignore[union-attr]
    assert base.model.config._experts_implementation != "evil/experts"  # type: ignore[union-attr]
    assert base.model(input_ids=torch.tensor([[1, 2]])).logits.shape[:2] == (1, 2)
    assert not hasattr(base.model.config, "auto_map") and not (folder / "ran").exists()
    load_tokenizer(folder, "x")


@pytest.mark.parametrize(
    "stored",
    [
        {"quant_method": "evil"},
        {"quant_method": "gptq", "bits": 4, "load_in_4bit": True},
        {"quant_method": "awq", "load_in_8bit": True},
        {"quant_method": {"value": "bitsandbytes"}, "load_in_4bit": True},
        {"load_in_4bit": False},
        ["bitsandbytes"],
        "bitsandbytes",
    ],
)
def test_a_foreign_quantization_is_refused(folder: Path, stored: Any) -> None:
    edit(folder, quantization_config=stored)
    for use in (base_facts, lambda folder: load_base(str(folder), device="cpu")):
        with pytest.raises(UserError, match="base"):
            use(folder)


SPOILT = [None, -1, 0, 10**7, 2**70, "x", [], {}, [1], {"a": 1}, True, 1e308, "\x1b[2J"]


@pytest.mark.parametrize("value", SPOILT, ids=map(repr, SPOILT))
def test_any_value_of_any_key_is_one_line_or_a_model(folder: Path, value: Any) -> None:
    text = (folder / "config.json").read_text()
    for key in json.loads(text):
        edit(folder, **{key: value})
        try:
            base_facts(folder)
        except UserError as error:
            assert "\n" not in str(error)
        (folder / "config.json").write_text(text)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", '{"model_type": "nonesuch"}', "{}", '{"model_type": ["qwen3"]}', '{"a":' * 20000, "\x80"]
)
def test_no_config_at_all(folder: Path, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    (tmp_path / "r.yaml").write_text(
        f"base: {{source: {folder}, device: cpu}}\nteam: {{agents: [{{name: a}}]}}\ntask: {{name: countdown}}\n"
    )
    assert main(["plan", str(tmp_path / "r.yaml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_config_that_fails_validation_is_exit_2(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    edit(folder, hidden_size="wide", layer_types=["nonesuch", 3])
    (tmp_path / "r.yaml").write_text(
        f"base: {{source: {folder}, device: cpu}}\nteam: {{agents: [{{name: a}}]}}\ntask: {{name: countdown}}\n"
    )
    for command in ("plan", "train"):
        assert main([command, str(tmp_path / "r.yaml")]) == 2
        assert "cannot be loaded" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": 3}', '{"version": "1.0", "model": {"type": "evil"}}'])
def test_no_tokenizer_at_all(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match="tokenizer"):
        load_tokenizer(folder, "x")


SLOW_REGEX = {"type": "Split", "pattern": {"Regex": "(a|[^b]+)+$|(.*)*b"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("file", "values"),
    [("tokenizer.json", {"pre_tokenizer": SLOW_REGEX}), ("tokenizer_config.json", {"model_max_length": "x"})],
    ids=["a regular expression that gives up", "a length that is none"],
)
def test_a_tokenizer_that_cannot_read_a_sentence(folder: Path, file: str, values: dict[str, Any]) -> None:
    """A library in Rust panics, which is no Exception of Python's."""
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))
    with pytest.raises(UserError, match="tokenizer") as caught:
        load_tokenizer(folder, "x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ids", [{"a": 1}, ["x"], "x", [[1]], 1.5])
def test_ends_of_messages_that_are_no_tokens(folder: Path, ids: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    for use in (lambda: load_base(str(folder), device="cpu"), lambda: stored_end_ids(folder, load_tokenizer(folder, "x"), "x")):
        with pytest.raises(UserError) as caught:
            use()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ['{"compile_config": {"backend": "x"}}', "[" * 100_000, '{"cache_config": 3, "num_beams": -1}'])
def test_any_generation_config_is_one_line_or_none(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    try:
        assert stored_end_ids(folder, load_tokenizer(folder, "x"), "x")
    except UserError as error:
        assert "\n" not in str(error)


ELSEWHERE = [
    "../outside.safetensors",
    "/outside.safetensors",
    "sub/w.safetensors",
    "weights.bin",
    "..",
    5,
    None,
    ["w"],
    "pipe.safetensors",
]


@pytest.mark.parametrize("name", ELSEWHERE, ids=map(str, ELSEWHERE))
def test_an_index_names_safetensors_of_its_own_folder(folder: Path, name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is opened, and the hash of a base covers what is loaded."""
    shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
    (folder / "sub").mkdir()
    shutil.copy(folder / "model.safetensors", folder / "sub" / "w.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "weights.bin")
    (folder / "model.safetensors").rename(folder / "decoy.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was opened"))
    with pytest.raises(UserError, match="base.source") as caught:
        load_base(str(folder), device="cpu")
    assert "\n" not in str(caught.value)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index | {"weight_map": dict.fromkeys(tensors, "decoy.safetensors")})
    )
    edit(folder, transformers_weights="sub/w.safetensors")
    assert not hasattr(load_base(str(folder), device="cpu").model.config, "transformers_weights")
    for text in ("[", "{}", "[" * 100_000, "5"):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(UserError, match="index.json is damaged"):
            load_base(str(folder), device="cpu")
