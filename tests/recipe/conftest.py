"""A recipe folder to write files into."""

from collections.abc import Callable
from pathlib import Path

import pytest

TEAM = "team: {agents: [{name: planner}, {name: solver}]}\n"


@pytest.fixture
def recipe_file(tmp_path: Path) -> Callable[..., Path]:
    """Write a recipe (a two-agent team unless told otherwise) and return its path."""

    def write(text: str = "", name: str = "recipe.yaml", team: str = TEAM) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(team + text, encoding="utf-8")
        return path

    return write
