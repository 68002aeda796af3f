"""Adding a task is one file and one line: tried in a copy of the package."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import teamtr_lora

COIN = '''
"""Say heads."""
from pathlib import Path
from typing import Literal

from pydantic import Field

from teamtr_lora.tasks.machinery.task import Item, Task
from teamtr_lora.tasks.machinery.task_settings import TaskSettings


class Coin(Task):
    def __init__(self, sides):
        self.sides = sides

    def items(self, split):
        return [Item(f"{split}-{n}", "heads or tails?", {"answer": n % self.sides}) for n in range(10)]


class CoinSettings(TaskSettings):
    """Guess a coin."""

    name: Literal["coin"] = Field(description="A coin.")
    sides: int = Field(default=2, ge=2, description="Sides of the coin.")

    def make(self, folder: Path) -> Coin:
        return Coin(self.sides)
'''


def test_one_file_and_one_line_add_a_task(tmp_path: Path) -> None:
    package = Path(teamtr_lora.__file__).parent
    heavy = shutil.ignore_patterns("*.safetensors", "*.md", "__pycache__")
    shutil.copytree(package, tmp_path / "teamtr_lora", ignore=heavy)
    (tmp_path / "teamtr_lora/tasks/generated/coin.py").write_text(COIN)
    table = tmp_path / "teamtr_lora/tasks/table.py"
    table.write_text(table.read_text().replace("TABLE = (\n", 'TABLE = (\n    "generated.coin:CoinSettings",\n', 1))
    (tmp_path / "r.yaml").write_text("team: {agents: [{name: a}]}\ntask: {name: coin, sides: 3}\n")
    (tmp_path / "wrong.yaml").write_text("team: {agents: [{name: a}]}\ntask: {name: coin, side: 3}\n")

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            [sys.executable, "-m", "teamtr_lora", *argv], capture_output=True, text=True, cwd=tmp_path, env=environment
        )

    assert run("validate", "r.yaml").returncode == 0
    assert "task.side = 3: unknown key; did you mean 'sides'?" in run("validate", "wrong.yaml").stderr
    assert {"name": "coin", "items": "generated", "about": "Guess a coin."} in json.loads(run("tasks", "list", "--json").stdout)
    assert json.loads(run("tasks", "sample", "coin", "sides=4", "-n", "1", "--json").stdout)["prompt"] == "heads or tails?"
    assert "task.sides" in run("keys", "sides").stdout
    assert "CoinSettings" in json.loads(run("validate", "--schema").stdout)["$defs"]
