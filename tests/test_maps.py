"""The docstring of a room is its map: one line a module, no module missing, none that is gone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import teamtr_lora

PACKAGE = Path(teamtr_lora.__file__).parent
ROOMS = sorted(str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*/__init__.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_the_map_of_a_room_names_its_modules(room: str) -> None:
    folder = PACKAGE / room
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    named = re.findall(r"^ *(\w+)  +[^\s(]", text, flags=re.MULTILINE)  # folders have maps of their own
    modules = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    assert sorted(named) == modules, f"teamtr_lora/{room}/__init__.py: give each module one line of the docstring"
