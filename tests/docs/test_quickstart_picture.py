"""The README's picture and transcript are those of a real quickstart run, whose end is the shipped team."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import teamtr_lora
from teamtr_lora.evaluation.commands import EvalOptions, evaluate_team

ROOT = Path(teamtr_lora.__file__).resolve().parent.parent
FOLDER = ROOT / "teamtr_lora" / "docs" / "quickstart"
SMALL = """
team: {protocol: {system: Add by columns.}, agents: [{name: solver, role: ones, lora: {rank: 2}}]}
task: {name: column_sum, digits: 1}
rollout: {items_per_stage: 8, episodes_per_item: 2, max_message_tokens: 8}
training: {stages: 1, inner_epochs: 1}
evaluation: {items: 4}
"""
SVG = "{http://www.w3.org/2000/svg}"


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / "metrics.jsonl").read_text().splitlines()]


def test_the_shipped_picture_is_drawn_from_the_shipped_numbers(tool: Callable[[str], ModuleType]) -> None:
    assert tool("draw_quickstart").draw(rows()) == (FOLDER / "quickstart.svg").read_text()


def test_every_update_is_in_the_picture_with_its_decision() -> None:
    picture = ElementTree.fromstring((FOLDER / "quickstart.svg").read_text())
    marked = [group.get("class") for group in picture.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]
    updates = [row for row in rows() if row["kind"] == "update"]
    assert marked == [row["decision"] for row in updates] and len(marked) == 24
    assert all(row["bound"] <= row["delta"] for row in updates if row["decision"] in ("accepted", "shrunk"))


def test_it_can_be_read_on_light_and_dark_pages() -> None:
    """It has a background of its own, and every colour of text has a partner for dark pages."""
    text = (FOLDER / "quickstart.svg").read_text()
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    for kind in re.findall(r"^  (\.?\w+)", light, re.M):
        if kind != ".title":  # a size only
            assert re.search(rf"^    (.*, )?{re.escape(kind)}\b", dark, re.M) or f", {kind}" in dark, kind


def test_the_numbers_are_those_of_the_readme() -> None:
    accuracies = [f"{row['accuracy']:.3f}" for row in rows() if row["kind"] == "evaluation"]
    assert f"{accuracies[0]} -> {accuracies[-1]}" in (ROOT / "README.md").read_text()


def test_the_tool_makes_the_extract_from_a_run(tool: Callable[[str], ModuleType], tmp_path: Path) -> None:
    from teamtr_lora.training.trainer import TeamTRTrainer

    (tmp_path / "small.yaml").write_text(SMALL)
    with TeamTRTrainer.from_recipe(
        teamtr_lora.load_recipe(tmp_path / "small.yaml", [f"output_dir={tmp_path / 'run'}"])
    ) as trainer:
        done = trainer.train()
    assert tool("draw_quickstart").main([done.run_dir, "--folder", str(tmp_path / "picture")]) == 0
    made = [json.loads(line) for line in (tmp_path / "picture" / "metrics.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in made] == ["evaluation", "update", "evaluation"]
    assert made[1]["agent"] == "solver" and made[-1]["accuracy"] == round(done.accuracy_after or 0, 6)
    ElementTree.parse(tmp_path / "picture" / "quickstart.svg")


@pytest.mark.parametrize(("column", "team"), [(0, "recipes/quickstart.yaml"), (1, "adapters/column_sum")])
def test_the_transcript_of_the_readme_is_real(column: int, team: str, tmp_path: Path) -> None:
    """The shipped team is the one that the quickstart ends with."""
    lines = re.findall(r"^(?:planner|solver|checker) +\(\w+\) +(\S+) +(\S+)", (ROOT / "README.md").read_text(), re.M)
    assert len(lines) == 3
    evaluate_team(ROOT / team, EvalOptions(limit=16, k=4, out=tmp_path / "found"))
    answers = [json.loads(line) for line in (tmp_path / "found" / "episodes.jsonl").read_text().splitlines()]
    first = next(answer for answer in answers if answer["prompt"] == "108+195")
    assert [message["text"] for message in first["messages"]] == [line[column] for line in lines]
    assert first["success"] == bool(column)
