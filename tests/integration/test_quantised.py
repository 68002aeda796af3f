"""4-bit and 8-bit bases and 8-bit optimizers through bitsandbytes: real runs, and the state in a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from teamtr_lora.recipe import load_recipe
from teamtr_lora.runs.metrics import UpdateRow, read_rows
from teamtr_lora.training.optimizers import flatten_state
from teamtr_lora.training.trainer import TeamTRTrainer

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (the extra `quant`)")

ROOT = Path(__file__).resolve().parents[2]
TWO_AGENTS = ['team.agents=[{"name": "planner", "role": "ones"}, {"name": "solver", "role": "tens"}]', "task.digits=2"]
SMALL = [
    *TWO_AGENTS,
    "training.stages=1",
    "rollout.items_per_stage=8",
    "rollout.episodes_per_item=4",
    "training.inner_epochs=2",
    "evaluation.items=4",
    "trust_region.delta=0.05",
]


def run(tmp_path: Path, name: str, *overrides: str, resume: bool = False) -> tuple[TeamTRTrainer, list[UpdateRow]]:
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml", [*SMALL, *overrides, f"output_dir={tmp_path / name}"])
    trainer = TeamTRTrainer.from_recipe(recipe)
    trainer.train(resume=resume)
    return trainer, [row for row in read_rows(tmp_path / name) if isinstance(row, UpdateRow)]


@pytest.mark.parametrize(("quantization", "optimizer"), [("4bit", "adamw_8bit"), ("8bit", "paged_adamw_8bit")])
def test_a_quantised_base_trains_and_an_8bit_optimizer_comes_back_bit_for_bit(
    tmp_path: Path, quantization: str, optimizer: str
) -> None:
    """The optimizer's steps on a CPU depend on where the library's tensors lie in memory, so its state is compared, not a whole
    run."""
    choice = [f"base.quantization={quantization}", f"training.optimizer={optimizer}"]
    first, rows = run(tmp_path, "run", *choice)
    assert first.playable is not None and first.playable.base.quantization == quantization
    assert any(row.decision in ("accepted", "shrunk") and row.optimizer_steps for row in rows)
    assert not any(row.out_of_region for row in rows)
    again, _ = run(tmp_path, "run", *choice, resume=True)
    assert first.run is not None and again.run is not None
    for agent, kept in first.run.updater.optimizers.items():
        saved, scalars = flatten_state(kept)
        loaded, loaded_scalars = flatten_state(again.run.updater.optimizers[agent])
        assert loaded_scalars == scalars
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
