"""The embedded base: small, stock, able and imperfect. (That vLLM serves it: tests/rollout/test_vllm_engine.py.)"""

from __future__ import annotations

import json
from pathlib import Path

from teamtr_lora.base.source import resolve
from teamtr_lora.recipe import load_recipe
from teamtr_lora.training.trainer import TeamTRTrainer

ROOT = Path(__file__).resolve().parents[2]


def test_is_at_most_six_megabytes_and_a_stock_architecture() -> None:
    folder = resolve("nano")
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 6_000_000
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_the_untrained_team_is_right_between_30_and_60_percent_of_the_time() -> None:
    trainer = TeamTRTrainer.from_recipe(load_recipe(ROOT / "recipes" / "quickstart.yaml"))
    evaluation = trainer.evaluate(items=512, k=1)
    assert evaluation.temperature == 1.0
    assert 0.30 <= evaluation.avg_at_k <= 0.60
    assert evaluation.coordination is not None and evaluation.coordination.value == evaluation.avg_at_k
