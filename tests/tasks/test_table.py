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


RUN_ALL = """
import contextlib, io, json, sys
from teamtr_lora.cli import main
found = []
for line in sys.argv[1:]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(line.split())
    found.append({"code": code, "out": out.getvalue(), "err": err.getvalue()})
print(json.dumps(found))
"""


def test_one_file_and_one_line_add_a_task(tmp_path: Path) -> None:
    package = Path(teamtr_lora.__file__).parent
    heavy = shutil.ignore_patterns("*.safetensors", "*.md", "__pycache__")
    shutil.copytree(package, tmp_path / "teamtr_lora", ignore=heavy)
    (tmp_path / "teamtr_lora/tasks/generated/coin.py").write_text(COIN)
    table = tmp_path / "teamtr_lora/tasks/table.py"
    table.write_text(table.read_text().replace("TABLE = (\n", 'TABLE = (\n    "generated.coin:CoinSettings",\n', 1))
    (tmp_path / "r.yaml").write_text("team: {agents: [{name: a}]}\ntask: {name: coin, sides: 3}\n")
    (tmp_path / "wrong.yaml").write_text("team: {agents: [{name: a}]}\ntask: {name: coin, side: 3}\n")

    commands = ["validate r.yaml", "validate wrong.yaml", "tasks list --json", "tasks sample coin sides=4 -n 1 --json"]
    commands += ["keys sides", "validate --schema"]
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *commands],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    right, wrong, listed, sampled, keys, schema = json.loads(done.stdout)
    assert right["code"] == 0 and "task.side = 3: unknown key; did you mean 'sides'?" in wrong["err"]
    assert {"name": "coin", "items": "generated", "about": "Guess a coin."} in json.loads(listed["out"])
    assert json.loads(sampled["out"])["prompt"] == "heads or tails?"
    assert "task.sides" in keys["out"] and "CoinSettings" in json.loads(schema["out"])["$defs"]
