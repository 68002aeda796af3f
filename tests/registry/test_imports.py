"""Adapters from elsewhere: what PEFT writes comes in as it is, everything that could hurt is refused before a byte is written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from teamtr_lora.base.adapter_files import MAX_HEADER_BYTES, MAX_JSON_BYTES
from teamtr_lora.base.source import resolve
from teamtr_lora.common.errors import UserError
from teamtr_lora.registry.imports import import_path
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.registry.verify import verify

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
HEAD = "base_model.model.lm_head"
IDS = torch.tensor([[1, 80, 70, 90, 75, 100]])


def peft_folder(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> PeftModel:
    """What somebody else's training with plain PEFT leaves behind."""
    base = AutoModelForCausalLM.from_pretrained(resolve("nano"), dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **({"r": 4, "target_modules": "all-linear"} | settings)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
            if "lora_" in name:
                parameter.data = parameter.data.to(dtype).float()
    model.save_pretrained(folder)
    if dtype != torch.float32:
        save_file({k: v.to(dtype) for k, v in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS, metadata={"format": "pt"})
    return model.eval()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only: copy it to spoil it."""
    folder = tmp_path_factory.mktemp("peft") / "plain"
    peft_folder(folder, lora_alpha=16)
    return folder


@pytest.fixture
def copy(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "copy"))


@torch.no_grad()
def logits(folder: Path) -> Tensor:
    base = AutoModelForCausalLM.from_pretrained(resolve("nano"), dtype=torch.float32)
    return PeftModel.from_pretrained(base, folder).eval()(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"lora_alpha": 16, "lora_dropout": 0.1}, torch.float32),
        ({"use_rslora": True, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": "gaussian"}, torch.bfloat16),
        ({"use_dora": True, "lora_alpha": 6}, torch.float32),
        ({"target_modules": r"model\.layers\.1\.mlp\.(up|down)_proj"}, torch.float16),
        ({"layers_to_transform": [0], "target_modules": ["v_proj"], "r": 1}, torch.float32),
    ],
    ids=["plain", "rslora", "dora", "regex", "one layer"],
)
def test_what_peft_wrote_computes_the_same_after_import(tmp_path: Path, settings: dict[str, Any], dtype: torch.dtype) -> None:
    model = peft_folder(tmp_path / "theirs", dtype, **settings)
    registry = Registry(tmp_path / "adapters")
    done = import_path(registry, tmp_path / "theirs", team="mine", agent="helper", base="nano")
    assert done.team is not None and done.team.made_by == "import" and not verify(registry).problems
    stored = registry.folder("mine", "helper", done.adapters[0].version)
    with torch.no_grad():
        assert torch.equal(logits(stored), model(input_ids=IDS).logits)
    assert json.loads((stored / CONFIG).read_text())["base_model_name_or_path"] == "nano"  # not a path of this machine
    lora = done.team.load_recipe().team.agents[0].lora
    assert (lora.rank, lora.rslora, lora.dora) == (settings.get("r", 4), "use_rslora" in settings, "use_dora" in settings)
    assert any("vLLM cannot serve DoRA" in note for note in done.notes) == lora.dora


FEATURES: dict[str, dict[str, Any]] = {
    "rank_pattern": {"rank_pattern": {"q_proj": 8}},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 8}},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "lora_bias": {"lora_bias": True},
    "layer_replication": {"layer_replication": [[0, 2], [1, 3]]},
    "trainable_token_indices": {"trainable_token_indices": [1]},
    "target_parameters": {"target_parameters": ["mlp.experts.gate"]},
    "alora_invocation_tokens": {"alora_invocation_tokens": [1, 2]},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "use_qalora": {"use_qalora": True},
    "use_bdlora": {"use_bdlora": {"nblocks": 2}},
    "arrow_config": {"arrow_config": {"top_k": 3}},
    "megatron_config": {"megatron_config": {"x": 1}},
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "bias": {"bias": "lora_only"},
    "peft_type": {"peft_type": "IA3"},
    "trust_remote_code": {"trust_remote_code": True},
    "some_new_feature": {"some_new_feature": {"on": True}},
    "r = 0": {"r": 0},
    "r = True": {"r": True},
    "r = 100000": {"r": 100000},
    "lora_alpha = -1": {"lora_alpha": -1},
    "lora_alpha = None": {"lora_alpha": None},
    "use_dora": {"use_dora": "yes"},
    "target_modules": {"target_modules": ["../../q_proj"]},
    "exclude_modules": {"exclude_modules": "/etc/passwd"},
    "layers.1.mlp.down_proj', which has tensors": {"layers_to_transform": [0, 2, 3]},
    "which has tensors": {"target_modules": ["q_proj", "v_proj"]},
    "which has tensors; it": {"exclude_modules": ["o_proj"]},
    "layers_to_transform = 2": {"target_modules": "all-linear", "layers_to_transform": 2},
    "layers_to_transform numbers": {"layers_to_transform": 1.5},
    "must be names": {"layers_pattern": 5, "layers_to_transform": [0]},
    "rank 5": {"r": 5},
    "lacks its magnitude": {"use_dora": True},
}


@pytest.mark.parametrize("named", FEATURES)
def test_what_is_not_supported_is_named(copy: Path, tmp_path: Path, named: str) -> None:
    config = json.loads((copy / CONFIG).read_text())
    (copy / CONFIG).write_text(json.dumps(config | FEATURES[named]))
    refused(copy, tmp_path, named)


def refused(folder: Path, tmp_path: Path, words: str) -> None:
    """One line that says so, and nothing was written anywhere."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as caught:
        import_path(Registry(tmp_path / "adapters"), folder, team="mine", agent="helper", base="nano")
    assert words in str(caught.value), caught.value
    assert "\n" not in str(caught.value) and str(caught.value).isprintable()
    assert sorted(tmp_path.rglob("*")) == before


class Boom:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("/".join([os.environ["BOOM"], "executed"]),)


def header(entries: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(shape: list[Any], start: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def renamed(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name if key == A else key: tensor for key, tensor in tensors.items()}


def with_value(value: float) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[A][1, 2] = value
        return tensors

    return change


POISON: dict[str, tuple[bytes | Callable[[dict[str, Tensor]], Any], str]] = {
    "a pickle": (lambda _: pickle.dumps(Boom()), "holds a pickle"),
    "a zip, as torch.save writes": (b"PK\x03\x04" + b"\0" * 100, "holds a pickle"),
    "empty": (b"", "not a safetensors file"),
    "seven bytes": (b"\0" * 7, "not a safetensors file"),
    "a header of 10 GB": (struct.pack("<Q", 10 << 30) + b"{}" + b" " * 100, "not a safetensors file"),
    "a header of 2**63": (struct.pack("<Q", 1 << 63) + b"{}", "not a safetensors file"),
    "overlapping tensors": (header({A: entry([2, 1], 0, 8), A + "x": entry([1, 1], 4, 8)}, b"\0" * 8), "overlap"),
    "a gap": (header({A: entry([1, 1], 4, 8)}, b"\0" * 8), "gaps"),
    "more bytes than tensors": (header({A: entry([1, 1], 0, 4)}, b"\0" * 8), "describes 4 bytes"),
    "bytes cut off": (lambda t: save(t)[:-1], "the file holds"),
    "offsets from behind": (header({A: entry([1, 1], 8, 4)}, b"\0" * 8), "-4 bytes"),
    "negative offsets": (header({A: entry([1, 1], -4, 0)}, b"\0" * 8), "no LoRA matrix has"),
    "a shape that overflows": (header({A: entry([1 << 62, 1 << 62], 0, 4)}, b"\0" * 4), "no LoRA matrix has"),
    "a shape whose product overflows": (header({A: entry([1 << 40, 1 << 40], 0, 0)}), "but 0 bytes"),
    "an empty shape": (header({A: entry([0, 4], 0, 0)}), "no LoRA matrix has"),
    "a shape of text": (header({A: entry(["4", 4], 0, 64)}, b"\0" * 64), "no LoRA matrix has"),
    "another type": (header({A: entry([4, 4], 0, 16, "F8_E4M3")}, b"\0" * 16), "is of type"),
    "no type": (header({A: {"shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4), "malformed"),
    "a name twice": (header(f'{{"{A}": {json.dumps(entry([1, 1], 0, 4))}, "{A}": 1}}'.encode(), b"\0" * 4), "appears twice"),
    "no JSON": (header(b"{'a': 1}"), "no proper JSON"),
    "nested without end": (header(b"[" * 200_000), "nested too deep"),
    "metadata of numbers": (header({"__metadata__": {"a": 1}}), "metadata"),
    "no tensors": (header({}), "holds no tensors"),
    "NaN": (with_value(float("nan")), "NaN or infinity"),
    "infinity": (with_value(float("-inf")), "NaN or infinity"),
    "a name with ..": (renamed("base_model.model.model.layers.0.../../x.lora_A.weight"), "read as a path"),
    "a name with a slash": (renamed("/etc/passwd"), "read as a path"),
    "a name with an escape": (renamed("\x1b[31mbase"), "no LoRA matrix"),
    "a name without end": (renamed("x" * 100_000), "no LoRA matrix"),
    "an adapter of the embedding": (renamed("base_model.model.model.embed_tokens.lora_embedding_A"), "embedding"),
    "an adapter of the head": (lambda t: t | {f"{HEAD}.lora_{x}.weight": torch.ones(4, 4) for x in "AB"}, "no linear layer"),
    "a layer that is not there": (lambda t: {k.replace("layers.0", "layers.77"): v for k, v in t.items()}, "no linear layer"),
    "a wrong width": (lambda t: t | {A: torch.ones(4, 127)}, "the base needs [4, 128]"),
    "a wrong rank": (lambda t: t | {A: torch.ones(5, 128)}, "rank 4"),
    "three dimensions": (lambda t: t | {A: torch.ones(4, 128, 1)}, "no LoRA matrix has"),
    "A without B": (lambda t: {k: v for k, v in t.items() if k != A.replace("_A", "_B")}, "lacks its B"),
    "a base weight": (lambda t: t | {"base_model.model.model.norm.weight": torch.ones(128)}, "no LoRA matrix"),
}  # fmt: skip


@pytest.mark.parametrize("poison", POISON)
def test_poisoned_weights_are_refused(copy: Path, tmp_path: Path, poison: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOM", str(tmp_path))
    content, words = POISON[poison]
    made = content if isinstance(content, bytes) else content(load_file(copy / WEIGHTS))
    (copy / WEIGHTS).write_bytes(made if isinstance(made, bytes) else save(made, {"format": "pt"}))
    refused(copy, tmp_path, words)
    assert not (tmp_path / "executed").exists()


def test_no_length_of_a_header_looks_like_a_pickle(copy: Path, tmp_path: Path) -> None:
    """A header of 128 bytes and a pickle begin with the same byte."""
    for pad in range(256):
        metadata = {"format": "pt", "pad": "x" * pad}
        save_file(load_file(copy / WEIGHTS), copy / WEIGHTS, metadata=metadata)
        if (copy / WEIGHTS).read_bytes()[0] == 0x80:
            break
    assert (copy / WEIGHTS).read_bytes()[0] == 0x80
    assert import_path(Registry(tmp_path / "adapters"), copy, team="mine", agent="helper", base="nano").team is not None


def replace_by_link(path: Path, target: Path) -> None:
    path.rename(target)
    path.symlink_to(target)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickled weights only": (lambda f: (f / WEIGHTS).rename(f / "adapter_model.bin"), "is a pickle"),
    "pickled weights beside": (lambda f: (f / "adapter_model.bin").write_bytes(b"\x80\x04."), "'adapter_model.bin' is a pickle"),
    "a pickle of another name": (lambda f: (f / "Extra.PKL").write_bytes(b"\x80\x04."), "'Extra.PKL' is a pickle"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), f"{WEIGHTS} is missing"),
    "no config": (lambda f: (f / CONFIG).unlink(), f"{CONFIG} is missing"),
    "weights linked from outside": (lambda f: replace_by_link(f / WEIGHTS, f.parent / "w"), "a link out of its folder"),
    "config linked from outside": (lambda f: replace_by_link(f / CONFIG, f.parent / "c"), "a link out of its folder"),
    "a link to itself": (lambda f: ((f / CONFIG).unlink(), (f / CONFIG).symlink_to(f / CONFIG)), "adapter_config.json"),
    "a device": (lambda f: ((f / CONFIG).unlink(), (f / CONFIG).symlink_to("/dev/zero")), "a link out of its folder"),
    "a pipe": (lambda f: replace_by_pipe(f / WEIGHTS), "not a plain file"),
    "a folder": (lambda f: ((f / CONFIG).unlink(), (f / CONFIG).mkdir()), "not a plain file"),
    "a giant config": (lambda f: os.truncate(f / CONFIG, MAX_JSON_BYTES + 1), "more than"),
    "giant weights": (lambda f: os.truncate(f / WEIGHTS, 5 << 30), "more than"),  # a hole: takes no room on the disk
    "a giant header": (lambda f: giant_header(f / WEIGHTS), "not a safetensors file"),
    "config with a key twice": (lambda f: (f / CONFIG).write_text('{"r": 4, "r": 8, "peft_type": "LORA"}'), "appears twice"),
    "config with NaN": (lambda f: (f / CONFIG).write_text('{"r": 4, "lora_alpha": NaN}'), "NaN"),
    "config of a list": (lambda f: (f / CONFIG).write_text("[1, 2]"), "no JSON object"),
    "config of half a character": (lambda f: (f / CONFIG).write_text('{"peft_type": "\\ud800"}'), "no proper JSON"),
    "config of bytes": (lambda f: (f / CONFIG).write_bytes(b"\xff\xfe\x00"), "no proper JSON"),
    "config nested": (lambda f: (f / CONFIG).write_text('{"a":' * 100_000 + "1" + "}" * 100_000), "nested too deep"),
    "config with a huge number": (lambda f: (f / CONFIG).write_text('{"r": ' + "9" * 10_000 + "}"), "no proper JSON"),
}


def giant_header(path: Path) -> None:
    length = MAX_HEADER_BYTES + 1
    path.write_bytes(struct.pack("<Q", length))
    os.truncate(path, 8 + length)


@pytest.mark.parametrize("trick", FILES)
def test_tricks_with_files_are_refused(copy: Path, tmp_path: Path, trick: str) -> None:
    spoil, words = FILES[trick]
    spoil(copy)
    refused(copy, tmp_path, words)


def test_hard_links_and_links_inside_the_folder_are_fine(copy: Path, tmp_path: Path) -> None:
    os.link(copy / WEIGHTS, tmp_path / "w")
    (copy / CONFIG).rename(copy / "real.json")
    (copy / CONFIG).symlink_to("real.json")
    assert import_path(Registry(tmp_path / "adapters"), copy, team="mine", agent="helper", base="nano").team is not None


def test_what_a_trainer_leaves_beside_is_named_and_not_read(copy: Path, tmp_path: Path) -> None:
    for name in ("training_args.bin", "rng_state_0.pth"):
        (copy / name).write_bytes(b"\x80\x04.")
    done = import_path(Registry(tmp_path / "adapters"), copy, team="mine", agent="helper", base="nano")
    assert done.notes == ["not read, as pickles can run code: 'rng_state_0.pth', 'training_args.bin'"]


def test_half_an_adapter_is_refused(copy: Path, tmp_path: Path) -> None:
    """Every layer is meant, one has no tensors: a file that was cut, though each of its parts is whole."""
    tensors = load_file(copy / WEIGHTS)
    save_file({k: v for k, v in tensors.items() if ".layers.1." not in k}, copy / WEIGHTS, metadata={"format": "pt"})
    refused(copy, tmp_path, "layers.1.mlp.down_proj', which has no tensors")


def test_an_adapter_for_a_team_waits_for_a_swap(copy: Path, filled: Registry, tiny_base: Path) -> None:
    before = filled.team("demo")
    done = import_path(filled, copy, team="demo", agent="planner")  # the team knows its base
    assert f"teamtr-lora swap {filled.root / 'demo'} --agent planner" in done.notes[0]
    assert done.team is None and filled.team("demo") == before and not verify(filled).problems
    assert filled.manifest("demo", "planner", done.adapters[0].version).parent == before.agents["planner"]
    assert import_path(filled, copy, team="demo", agent="planner").adapters == done.adapters  # stored once
    for options, words in (
        ({}, "say whose adapter this is: one of checker, planner"),
        ({"agent": "nobody"}, "no such agent"),
        ({"agent": "planner", "base": str(tiny_base)}, "the base needs"),
    ):
        with pytest.raises(UserError, match=words):
            import_path(filled, copy, team="demo", **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="say which base this adapter is for"):
        import_path(filled, copy, team="new", agent="helper")
    for name in ("..", "A b", ""):
        with pytest.raises(UserError, match="must be a safe file name"):
            import_path(filled, copy, team=name, agent="helper", base="nano")
        with pytest.raises(UserError, match="--agent .*: must be a safe file name"):
            import_path(filled, copy, team="new", agent=name or "../x", base="nano")
    assert filled.teams() == ["demo"]
