"""`plan` on a hub id, against a hub of our own on this machine: what is fetched and what is not."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from safetensors.numpy import load_file, save_file

from teamtr_lora.base.frozen_base import base_facts
from teamtr_lora.base.source import describe, resolve
from teamtr_lora.cli import main
from teamtr_lora.recipe import load_recipe
from teamtr_lora.study.plan import make_plan

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
RECIPE = """
base: {source: org/tiny, device: cpu}
team: {agents: [{name: planner, lora: {rank: 2}}]}
task: {name: column_sum, digits: 1}
rollout: {items_per_stage: 8, episodes_per_item: 2, max_message_tokens: 3}
"""


@pytest.fixture
def repository(tiny_base: Path, tmp_path: Path) -> Path:
    """The tiny base in two shards."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for file in tiny_base.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    weights = load_file(tiny_base / "model.safetensors")
    names = sorted(weights)
    parts = {SHARDS[0]: names[: len(names) // 2], SHARDS[1]: names[len(names) // 2 :]}
    for shard, chosen in parts.items():
        save_file({name: weights[name] for name in chosen}, folder / shard, metadata={"format": "pt"})
    weight_map = {name: shard for shard, chosen in parts.items() for name in chosen}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes an address the hub of this process; its cache is empty."""

    def connected(address: str) -> None:
        settings = {
            "ENDPOINT": address,
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(tmp_path / "hf"),
        }
        settings["HUGGINGFACE_CO_URL_TEMPLATE"] = address + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "127.0.0.1")
        close_session()  # the next one reads the proxies anew

    yield connected
    close_session()


def test_plan_fetches_no_weights_and_uses_what_is_here(
    hub: Any, connect: Callable[[str], None], repository: Path, tmp_path: Path
) -> None:
    hub.add("org/tiny", {file.name: file.read_bytes() for file in repository.iterdir()})
    connect(hub.address)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    hub.phase = "plan"
    planned = make_plan(recipe)
    assert not list(describe("org/tiny").glob("*.safetensors")), "no weights came"
    hub.phase = "full"
    whole = resolve("org/tiny")
    hub.phase = "cached"
    assert make_plan(recipe).parameters == planned.parameters == base_facts(whole).parameters > 0
    sizes = {shard: (repository / shard).stat().st_size for shard in SHARDS}
    asked = {name for phase, name, _ in hub.sent if phase == "plan"}
    assert asked >= {"config.json", "tokenizer.json"} and not asked & {*SHARDS}
    assert not any(name.endswith(".py") for _, name, _ in hub.sent)
    assert {name for phase, name, size in hub.sent if phase == "full" and size == sizes.get(name)} == set(SHARDS)
    assert not [name for phase, name, _ in hub.sent if phase == "cached"], "a base that is here was fetched again"


def test_a_hub_that_cannot_be_reached_is_one_line(
    tmp_path: Path, connect: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    connect("http://127.0.0.1:9")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 2
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line]
    assert printed.out == "" and len(lines) == 1, printed.err
    assert "org/tiny" in lines[0] and "hub could not be read" in lines[0] and "Connection refused" in lines[0], lines[0]
