"""Version folders: written once, readable by their hash alone, never replaced."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from teamtr_lora.base.versions import AdapterVersion, content_hash, read_version, version_folder, write_version
from teamtr_lora.common.errors import UserError

CONFIG = {"r": 2, "lora_alpha": 4.0, "use_rslora": False, "target_modules": ["q_proj"], "peft_type": "LORA"}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{i}.lora_{side}.weight": torch.randn(2, 3, generator=generator) for i in range(2) for side in "AB"}


def version(content: dict[str, torch.Tensor], number: int = 3) -> AdapterVersion:
    return AdapterVersion("solver", number, content_hash(content, CONFIG))


def test_a_version_comes_back_bit_for_bit(tmp_path: Path) -> None:
    content = tensors()
    content["layer.0.lora_A.weight"][0, 0] = -0.0
    folder = write_version(tmp_path, version(content), content, CONFIG)
    assert folder == tmp_path / "solver" / version(content).name
    got = read_version(tmp_path, version(content))
    assert got.keys() == content.keys()
    assert all(torch.equal(got[n].view(torch.int32), content[n].view(torch.int32)) for n in content)
    assert {p.name for p in folder.iterdir()} == {"adapter_model.safetensors", "adapter_config.json", "manifest.json"}
    assert json.loads((folder / "manifest.json").read_text())["content_hash"] == version(content).content_hash


def test_the_name_carries_number_and_hash(tmp_path: Path) -> None:
    content = tensors()
    assert version(content, 7).name == f"v0007-{content_hash(content, CONFIG)[:12]}"
    assert version(tensors(1), 7).name != version(content, 7).name


def test_the_hash_sees_names_shapes_types_bits_and_scale() -> None:
    content = tensors()
    name = "layer.0.lora_A.weight"
    base = content_hash(content, CONFIG)
    assert content_hash(dict(reversed(list(content.items()))), CONFIG) == base, "the order of a dictionary is no content"
    assert content_hash({**content, name: content[name].t().contiguous().t()}, CONFIG) == base, "nor are strides"
    flipped = content[name].clone()
    flipped.view(torch.int32)[1, 1] ^= 1
    others = [
        {**content, name: flipped},
        {**content, name: content[name].t()},
        {**content, name: content[name].reshape(3, 2)},
        {**content, name: content[name].view(torch.int32)},
        {**{n: t for n, t in content.items() if n != name}, "renamed": content[name]},
        {n: t for n, t in content.items() if n != name},
    ]
    hashes = [content_hash(other, CONFIG) for other in others]
    hashes += [content_hash(content, {**CONFIG, **change}) for change in ({"lora_alpha": 4.5}, {"r": 3}, {"use_rslora": True})]
    assert len({base, *hashes}) == 1 + len(hashes)


def test_writing_the_same_version_again_changes_nothing(tmp_path: Path) -> None:
    content = tensors()
    folder = write_version(tmp_path, version(content), content, CONFIG)
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}
    write_version(tmp_path, version(content), content, CONFIG)
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()} == before
    assert [p.name for p in (tmp_path / "solver").iterdir()] == [folder.name], "no temporary folder is left"


def test_altered_weights_are_noticed_on_reading_and_on_writing_again(tmp_path: Path) -> None:
    content = tensors()
    folder = write_version(tmp_path, version(content), content, CONFIG)
    stored = load_file(folder / "adapter_model.safetensors")
    stored["layer.1.lora_B.weight"][0, 0] += 1e-6
    save_file(stored, folder / "adapter_model.safetensors")
    for act in (
        lambda: read_version(tmp_path, version(content)),
        lambda: write_version(tmp_path, version(content), content, CONFIG),
    ):
        with pytest.raises(UserError) as caught:
            act()
        assert str(folder) in str(caught.value) and "hash" in str(caught.value)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda f: (f / "adapter_model.safetensors").write_bytes((f / "adapter_model.safetensors").read_bytes()[:40]),
        lambda f: (f / "adapter_model.safetensors").unlink(),
        lambda f: (f / "adapter_config.json").unlink(),
        lambda f: (f / "adapter_config.json").write_text("{"),
        lambda f: (f / "adapter_config.json").write_text("[]"),
        lambda f: (f / "adapter_config.json").write_text(json.dumps({**CONFIG, "lora_alpha": 40.0})),
    ],
    ids=["truncated weights", "no weights", "no config", "half a config", "another kind of config", "another scale"],
)
def test_a_damaged_version_is_one_clear_line(tmp_path: Path, spoil) -> None:
    content = tensors()
    folder = write_version(tmp_path, version(content), content, CONFIG)
    spoil(folder)
    with pytest.raises(UserError) as caught:
        read_version(tmp_path, version(content))
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_another_full_hash_under_the_same_name_is_refused(tmp_path: Path) -> None:
    content, other = tensors(), tensors(1)
    first = version(content)
    folder = write_version(tmp_path, first, content, CONFIG)
    same_name = AdapterVersion("solver", 3, first.content_hash[:12] + "0" * 52)
    assert version_folder(tmp_path, same_name) == folder
    with pytest.raises(RuntimeError, match="not that version"):
        write_version(tmp_path, same_name, other, CONFIG)
    with pytest.raises(UserError, match="hash"):
        read_version(tmp_path, same_name)
    assert all(torch.equal(t, content[n]) for n, t in read_version(tmp_path, first).items())


def test_content_that_is_not_the_version_is_never_written_under_its_name(tmp_path: Path) -> None:
    """A version is its content: other tensors under its name must be refused, before and after the real one is there."""
    content, other = tensors(), tensors(1)
    with pytest.raises((UserError, ValueError, RuntimeError)):
        write_version(tmp_path, version(content), other, CONFIG)
    write_version(tmp_path, version(content), content, CONFIG)
    with pytest.raises((UserError, ValueError, RuntimeError)):
        write_version(tmp_path, version(content), other, CONFIG)


def test_only_safetensors_is_loaded(tmp_path: Path) -> None:
    content = tensors()
    folder = write_version(tmp_path, version(content), content, CONFIG)
    (folder / "adapter_model.safetensors").unlink()
    torch.save(content, folder / "adapter_model.bin")
    with pytest.raises(UserError, match="adapter_model.safetensors is missing"):
        read_version(tmp_path, version(content))


def test_a_version_has_one_stored_form() -> None:
    made = AdapterVersion("solver", 7, "ab" * 32)
    stored = json.loads(json.dumps(made.stored()))
    assert stored == {"number": 7, "content_hash": "ab" * 32, "version": "v0007-abababababab"}
    assert AdapterVersion.from_stored("solver", stored) == made
    for key, value in (
        ("number", "7"), ("number", True), ("number", -1), ("number", 10**9), ("content_hash", "../x"), ("content_hash", None),
        ("content_hash", "AB" * 32), ("version", "v0008-abababababab"), ("version", "../../x"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="solver"):
            AdapterVersion.from_stored("solver", stored | {key: value})
