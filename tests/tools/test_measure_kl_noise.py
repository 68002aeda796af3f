"""The sampled monitor's noise against the exact KL's, on messages of the embedded team."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from teamtr_lora.recipe import load_recipe
from teamtr_lora.training.trainer import TeamTRTrainer

ROOT = Path(__file__).resolve().parents[2]


def test_at_delta_k1_is_noise_and_the_exact_kl_is_ten_times_better(tool: Callable[[str], ModuleType]) -> None:
    """64 messages, KL 0.01: sqrt(2 * 0.01 / 64) = 0.018, more than the KL itself."""
    trainer = TeamTRTrainer.from_recipe(load_recipe(ROOT / "recipes" / "quickstart.yaml"))
    try:
        found = tool("measure_kl_noise").measure(trainer, kl=0.01, messages=64, steps=1, copies=4)
    finally:
        trainer.close()
    assert found["kl"] == pytest.approx(0.01, rel=0.06) and found["k1_expected"] == pytest.approx(0.0177, abs=6e-4)
    own = found["given_the_contexts"]
    assert own["k1"] == pytest.approx(0.018, rel=0.3) and own["k1"] > found["kl"]
    assert own["k1_over_exact"] >= 10
