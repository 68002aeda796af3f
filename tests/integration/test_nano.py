"""The embedded base: small, stock, and indifferent to names. (How able it is: test_quickstart.py.)"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from transformers import AutoTokenizer

from teamtr_lora.base.source import resolve
from teamtr_lora.recipe import load_recipe
from teamtr_lora.training.trainer import TeamTRTrainer

ROOT = Path(__file__).resolve().parents[2]


def test_is_at_most_six_megabytes_and_a_stock_architecture() -> None:
    folder = resolve("nano")
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 6_000_000
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_agents_may_be_called_anything() -> None:
    """Eight random names of one to three tokens, in teams of four: as good as with the usual names."""
    pieces = [piece for piece in AutoTokenizer.from_pretrained(resolve("nano")).get_vocab() if re.fullmatch("[a-z]+", piece)]
    rng = random.Random(0)
    names: list[str] = []
    while len(names) < 8:
        name = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 3)))
        names += [name] if name not in names else []

    def accuracy(team: list[str]) -> float:
        roles = ("ones", "tens", "hundreds", "thousands")
        agents = [{"name": name, "role": role} for name, role in zip(team, roles, strict=True)]
        recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml", [f"team.agents={json.dumps(agents)}", "task.digits=4"])
        return TeamTRTrainer.from_recipe(recipe).evaluate(items=64, k=1).avg_at_k

    usual = accuracy(["planner", "solver", "checker", "writer"])
    for place in range(0, 8, 4):
        assert abs(accuracy(names[place : place + 4]) - usual) <= 0.05, names[place : place + 4]
