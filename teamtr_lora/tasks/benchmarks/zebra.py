"""zebralogic, zebra: logic grids, answered with a JSON table and scored cell by cell as in ZeroEval."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from teamtr_lora.tasks.benchmarks.zebra_maker import Grid, make_grid
from teamtr_lora.tasks.machinery.bench import BenchTask, field
from teamtr_lora.tasks.machinery.drawn import DrawnItems, draw_for
from teamtr_lora.tasks.machinery.forms import Form, check_form
from teamtr_lora.tasks.machinery.task import Item, Split
from teamtr_lora.tasks.machinery.task_settings import ItemsOrGenerated
from teamtr_lora.team import Message

BRACES = re.compile(r"[{}]")

Reward = Literal["puzzle", "cells"]


def last_json(text: str) -> Any:
    """The last complete object in a text (ZeroEval's rule: the last outermost pair of braces); None when that is no JSON."""
    depth, start, last = 0, 0, None
    for brace in BRACES.finditer(text):
        if brace[0] == "{":
            start = brace.start() if depth == 0 else start
            depth += 1
        elif depth:
            depth -= 1
            last = (start, brace.end()) if depth == 0 else last
    if last is None:
        return None
    try:
        return json.loads(text[last[0] : last[1]].replace("\n", ""))
    except (ValueError, RecursionError):
        return None


def cells_right(header: list[str], rows: list[list[str]], text: str) -> tuple[int, int]:
    """(cells that are right, cells). A cell is compared without case and surrounding space; a missing one is wrong."""
    answer = last_json(text)
    table = answer.get("solution") if isinstance(answer, dict) else None
    right = 0
    for number, row in enumerate(rows, 1):
        house = table.get(f"House {number}") if isinstance(table, dict) else None
        for column, truth in zip(header[1:], row[1:], strict=True):
            right += _cell(house.get(column) if isinstance(house, dict) else None) == truth.strip().lower()
    return right, len(rows) * (len(header) - 1)


def _cell(said: Any) -> Any:
    """What a cell is compared by: the first of a list, a number as text, without case and surrounding space."""
    said = said[0] if isinstance(said, list) and said else said
    said = str(said) if isinstance(said, (int, float)) and not isinstance(said, bool) else said
    return said.strip().lower() if isinstance(said, str) else said


class ZebraData(Form):
    header: Annotated[list[str], Field(min_length=2)]  # the first column is the house
    rows: Annotated[list[list[str]], Field(min_length=1)]

    @model_validator(mode="after")
    def _is_a_table(self) -> Self:
        if any(len(row) != len(self.header) for row in self.rows):
            raise ValueError("the rows of the solution are not as long as its header")
        return self


class ZebraTask(BenchTask):
    data_form = ZebraData

    def __init__(self, name: str, houses: int = 3, attributes: int = 3, reward: Reward = "puzzle") -> None:
        self.name, self._houses, self._attributes, self._reward = name, houses, attributes, reward

    def row_item(self, row: Mapping[str, Any], name: str) -> Item:
        puzzle, solution = field(row, name, ["puzzle"]), field(row, name, ["solution"], Mapping)
        check_form(ZebraData, _as_text(solution), f"item {name}: solution")
        return self.make(name, puzzle, **{key: _as_text(solution)[key] for key in ("header", "rows")})

    def make(self, name: str, puzzle: str, header: list[str], rows: list[list[str]]) -> Item:
        blank = {f"House {i}": dict.fromkeys(header[1:], "___") for i in range(1, len(rows) + 1)}
        form = json.dumps({"reasoning": "___", "solution": blank}, indent=1)
        prompt = f"{puzzle}\n\nFill every ___ of this JSON object, and end your answer with it:\n{form}"
        return Item(name, prompt, {"problem": puzzle, "header": header, "rows": rows, "size": f"{len(rows)}x{len(header) - 1}"})

    def generated(self, split: Split) -> DrawnItems:
        return DrawnItems(f"zebra/{self._houses}x{self._attributes}", split, self._made)

    def _made(self, rng: random.Random, split: Split, name: str) -> Item:
        def draw() -> Grid:
            return make_grid(rng, self._houses, self._attributes)

        grid = draw_for(split, draw, lambda grid: " ".join(sorted(grid.clues)))
        return self.make(name, grid.text, grid.header, grid.rows)

    def cell_accuracy(self, item: Item, text: str) -> float:
        right, cells = cells_right(item.data["header"], item.data["rows"], text)
        return right / cells

    def verdict(self, item: Item, text: str) -> float:
        share = self.cell_accuracy(item, text)
        return share if self._reward == "cells" else float(share == 1)

    def message_correct(self, item: Item, message: Message) -> bool:
        return self.cell_accuracy(item, message.text) == 1

    def answer(self, text: str) -> str | None:
        """The table, spelled in one way."""
        found = last_json(text)
        table = found.get("solution") if isinstance(found, dict) else None
        if not isinstance(table, dict):
            return None
        houses = {
            name: {column: _cell(said) for column, said in house.items()} if isinstance(house, dict) else house
            for name, house in table.items()
        }
        try:
            return json.dumps(houses, sort_keys=True).lower()
        except RecursionError:
            return None

    def success(self, reward: float) -> bool:
        return reward >= 1


def _as_text(solution: Mapping[str, Any]) -> dict[str, Any]:
    """The table with numbers as text: columns such as birthdays or prices may be numbers in a file."""

    def text(value: Any) -> Any:
        if isinstance(value, list):
            return [text(part) for part in value]
        return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    return {key: text(solution[key]) for key in ("header", "rows") if key in solution}


class ZebraSettings(ItemsOrGenerated):
    """Logic grids answered with a JSON table, scored as in ZeroEval; ZebraLogic's items, or generated ones with one solution."""

    paper_samples: ClassVar[Mapping[str, int]] = {"zebralogic": 64}
    reads_alone: ClassVar[bool] = True
    about: ClassVar[Mapping[str, str]] = {
        "zebralogic": "ZebraLogic: logic grids answered with a JSON table, scored as in ZeroEval; its items or generated ones.",
        "zebra": "Logic grids with one solution, made to a size of your choice; answered and scored as in ZebraLogic.",
    }

    name: Literal["zebralogic", "zebra"] = Field(
        description="Rows need puzzle and solution {header, rows}; without path or hub, items are generated."
    )
    houses: int = Field(default=3, ge=2, le=6, description="Houses per generated grid.")
    attributes: int = Field(default=3, ge=2, le=6, description="Attributes per house of a generated grid, names included.")
    reward: Literal["puzzle", "cells"] = Field(
        default="puzzle", description="puzzle: 1 if every cell is right, else 0; cells: the share of cells that are right."
    )

    def make(self, folder: Path) -> ZebraTask:
        return ZebraTask(self.name, self.houses, self.attributes, self.reward)
