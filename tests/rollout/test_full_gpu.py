"""A GPU that is full is one line: which phase, and the keys that make it smaller, with values; the checkpoint stays usable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from teamtr_lora.base.memory import memory_phase, phase_of
from teamtr_lora.cli import main
from teamtr_lora.recipe import Recipe
from teamtr_lora.recipe.memory_keys import smaller

RECIPE = """
base: {source: tiny, device: cpu}
team: {agents: [{name: planner, lora: {rank: 2}}, {name: solver, lora: {rank: 4}}]}
task: {name: dataset, path: rows.jsonl, test_path: rows.jsonl, on_overlap: allow, reward: "gpu_rewards:odd"}
rollout: {items_per_stage: 8, episodes_per_item: 4, max_message_tokens: 3}
training: {stages: 1, inner_epochs: 1, learning_rate: 0.01, tokens_per_microbatch: 4096}
evaluation: {items: 4}
"""
REWARD = """
def odd(prompts, completions, **columns):
    return [sum(b % 2 for b in text.encode()) / max(1, len(text.encode())) for text in completions]
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(12)))
    (tmp_path / "gpu_rewards.py").write_text(REWARD)
    (tmp_path / "tiny").symlink_to(tiny_base)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def full(monkeypatch: pytest.MonkeyPatch, where: str, *, after: int = 0) -> None:
    """From its call number `after` on, `where` finds the GPU full."""
    module, _, name = where.rpartition(".")
    calls = 0

    def exhausted(*args: Any, __function: Any = None, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nGPU 0 has ...")
        return real(*args, **more)

    target = pytest.importorskip(module) if module.count(".") == 2 else None
    holder = target or getattr(pytest.importorskip(module.rpartition(".")[0]), module.rpartition(".")[2])
    real = getattr(holder, name)
    monkeypatch.setattr(holder, name, exhausted)


@pytest.mark.parametrize(
    ("where", "after", "phase", "keys"),
    [
        ("teamtr_lora.rollout.playable.load_base", 0, "loading", ["base.quantization=4bit"]),
        ("teamtr_lora.rollout.playable.AdapterBank", 0, "loading", ["base.quantization=4bit"]),
        ("teamtr_lora.rollout.playable.play", 1, "rollout", ["rollout.requests_per_batch=128"]),
        ("teamtr_lora.training.update.optimize", 0, "update",
         ["training.tokens_per_microbatch=2048", "training.gradient_checkpointing=true"]),
        ("teamtr_lora.training.gate.read_candidate", 0, "gate", ["training.tokens_per_microbatch=2048"]),
    ],
)  # fmt: skip
def test_each_phase_of_training(
    where: str, after: int, phase: str, keys: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with monkeypatch.context() as broken:
        full(broken, where, after=after)
        assert main(["train", "recipe.yaml", "--run-dir", "run"]) == 2
    line = capsys.readouterr().err.strip()
    assert "\n" not in line and f"during {phase};" in line and "Traceback" not in line
    assert all(key in line for key in keys) and "--resume" in line
    if phase != "loading":
        tried = [key for key in keys if key.startswith(("training", "rollout"))]
        assert main(["train", "run", "--resume", *tried, "--json"]) == 0, "with the very settings that the line names"
        assert json.loads(capsys.readouterr().out)["updates"] == 2


def test_libraries_below_torch_have_their_own_words_for_it() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught, memory_phase("update"), memory_phase("gate"):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert phase_of(caught.value) == "gate"
    with pytest.raises(RuntimeError, match="shapes") as other, memory_phase("update"):
        raise RuntimeError("shapes do not fit")
    assert not isinstance(other.value, torch.OutOfMemoryError)


def test_eval_and_ask(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    full(monkeypatch, "teamtr_lora.rollout.playable.play")
    for argv in (["eval", "recipe.yaml", "--limit", "1"], ["eval", "recipe.yaml", "--limit", "1", "--baseline", "cot"]):
        assert main(argv) == 2
        assert "during rollout; try rollout.requests_per_batch=128" in capsys.readouterr().err


def test_keys_depend_on_what_the_recipe_has() -> None:
    data: dict[str, Any] = {"team": {"agents": [{"name": "a"}]}, "task": {"name": "countdown"}}
    small = {"tokens_per_microbatch": 1, "gradient_checkpointing": True}
    recipe = Recipe(**data, training=small, rollout={"engine": "vllm", "vllm": {"memory_share": 0.6}})
    assert smaller(recipe, "update") == smaller(recipe, "gate") == ["rollout.vllm.memory_share=0.3"]
    assert smaller(recipe, "loading") == ["base.quantization=4bit", "rollout.vllm.memory_share=0.3"]
    last = Recipe(**data, training=small, rollout={"requests_per_batch": 1})
    assert all(smaller(last, phase) for phase in ("loading", "rollout", "update", "gate"))
