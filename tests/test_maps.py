"""The docstring of a room is its map: one line a module, no module missing, none that is gone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import teamtr_lora

ROOMS = (
    "algorithm", "algorithm/variants",
    "common", "evaluation", "registry", "report", "rollout", "rollout/vllm", "runs", "study", "swap", "tasks",
    "tasks/benchmarks", "tasks/generated", "tasks/machinery", "training",
)  # fmt: skip


@pytest.mark.parametrize("room", ROOMS)
def test_the_map_of_a_room_names_its_modules(room: str) -> None:
    folder = Path(teamtr_lora.__file__).parent / room
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    named = re.findall(r"^    (\w+)  +\S", text, flags=re.MULTILINE)
    modules = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    assert sorted(named) == modules, f"teamtr_lora/{room}/__init__.py: give each module one line of the docstring"
