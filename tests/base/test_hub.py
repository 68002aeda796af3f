"""`plan` on a hub id, against a hub of our own on this machine: what is fetched and what is not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from safetensors.numpy import load_file, save_file

from teamtr_lora.cli import main

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
RECIPE = """
base: {source: org/tiny, device: cpu}
team: {agents: [{name: planner, lora: {rank: 2}}]}
task: {name: column_sum, digits: 1}
rollout: {items_per_stage: 8, episodes_per_item: 2, max_message_tokens: 3}
"""
# One process, as the client reads its endpoint at import: plan, fetch everything, plan without a hub.
SCRIPT = """
import json, sys, urllib.request
from teamtr_lora.base.frozen_base import base_facts
from teamtr_lora.base.source import describe, resolve
from teamtr_lora.recipe import load_recipe
from teamtr_lora.study.plan import make_plan

recipe, endpoint = load_recipe(sys.argv[1]), sys.argv[2]
mark = lambda name: urllib.request.urlopen(f"{endpoint}/mark/{name}").read()
planned = make_plan(recipe).as_dict()
folder = describe("org/tiny")
files = [p.name for p in folder.glob("*.safetensors")]
mark("full")
whole = resolve("org/tiny")
mark("cached")
again = make_plan(recipe).as_dict()
print(json.dumps({"plan": planned["parameters"], "again": again["parameters"], "files": files,
    "facts": base_facts(whole).parameters}))
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


def environment(tmp_path: Path, endpoint: str) -> dict[str, str]:
    local = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    return os.environ | local | {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


def test_plan_fetches_no_weights_and_uses_what_is_here(hub: Any, repository: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", {file.name: file.read_bytes() for file in repository.iterdir()})
    hub.phase = "plan"
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "recipe.yaml"), hub.address]
    done = subprocess.run(command, env=environment(tmp_path, hub.address), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    sizes = {shard: (repository / shard).stat().st_size for shard in SHARDS}
    assert said["files"] == [], "no weights came"
    assert said["plan"] == said["again"] == said["facts"] > 0
    planned = {(name, size) for phase, name, size in hub.sent if phase == "plan"}
    assert {name for name, _ in planned} >= {"config.json", "tokenizer.json"} and not {name for name, _ in planned} & {*SHARDS}
    assert not any(name.endswith(".py") for _, name, _ in hub.sent)
    assert {name for phase, name, size in hub.sent if phase == "full" and size == sizes.get(name)} == set(SHARDS)
    assert not [name for phase, name, _ in hub.sent if phase == "cached"], "a base that is here was fetched again"


def test_a_hub_that_cannot_be_reached_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("HF_HUB_OFFLINE", False), ("ENDPOINT", "http://127.0.0.1:9"), ("HF_HUB_CACHE", str(tmp_path / "hf"))):
        monkeypatch.setattr(constants, name, value)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 2
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line]
    assert printed.out == "" and len(lines) == 1, printed.err
    assert "org/tiny" in lines[0] and "hub could not be read" in lines[0] and "Connection refused" in lines[0], lines[0]
