"""autologi: open puzzles, right when the format check and every constraint accept the answer.

Items in AutoLogi's format: a prompt, and two programs, one that defines `inputs_check(inputs)` and one that defines
`constraint_list`, functions of the inputs; also with the constraints one by one, and in verl's layout. The programs run in the
sandbox, whoever wrote them.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.benchmarks.autologi_maker import MAKERS, Puzzle
from teamtr_lora.tasks.benchmarks.math_answer import last_box
from teamtr_lora.tasks.machinery.bench import BenchTask, field, turns_text
from teamtr_lora.tasks.machinery.drawn import DrawnItems, draw_for
from teamtr_lora.tasks.machinery.forms import Form
from teamtr_lora.tasks.machinery.sandbox import Limits, run_checks
from teamtr_lora.tasks.machinery.task import Item, Split, item_of
from teamtr_lora.tasks.machinery.task_settings import ItemsOrGenerated, data_file
from teamtr_lora.team import Episode, Message

FENCE = re.compile(r"```[ \t]*[a-zA-Z]*[ \t]*\n(.*?)```", re.DOTALL)
BRACKETS = re.compile(r"[\[\]{}]")
LONGEST = 20_000  # characters of an answer worth checking
CHECK, CONSTRAINTS = "inputs_check", "constraint_list"
PROCESSES = min(8, os.cpu_count() or 1)  # checks at a time
CHECK_KEYS = ("inputs_check_code", "inputs_check", "format_check", "check")
CONSTRAINT_KEYS = ("constraint_list_code", "constraint_list", "constraints")
FUNCTION = re.compile(r"^def[ \t]+([A-Za-z_]\w*)[ \t]*\(", re.MULTILINE)


def answer_in(text: str) -> str | None:
    """The last fenced block with a table or list in it, or what is in the last box, or else the last outermost {...} or [...]."""
    text = text[-4 * LONGEST :]
    fenced = [block for block in FENCE.findall(text) if "{" in block or "[" in block]
    box = None if fenced else last_box(text)
    found = fenced[-1].strip() if fenced else box[1] if box else _last_group(text)
    return found if found and len(found) <= LONGEST else None


def _last_group(text: str) -> str | None:
    """As AutoLogi does: the last {...}, and only without one the last [...]."""
    last: dict[str, str] = {}
    opened: list[int] = []
    for bracket in BRACKETS.finditer(text):
        place = bracket.start()
        if bracket[0] in "{[":
            opened.append(place)
        elif opened and text[opened[-1]] + bracket[0] in ("{}", "[]"):
            start = opened.pop()
            if not opened:
                last[text[start]] = text[start : place + 1]
        else:
            opened.clear()
    return last.get("{", last.get("["))


def constraint_source(given: Any, name: str) -> str:
    """A program that defines `constraint_list`, of one program or of a list with a function each."""
    if isinstance(given, str):
        named = FUNCTION.findall(given)
        listed = re.search(rf"^{CONSTRAINTS}\s*=", given, re.MULTILINE)
        return given if listed or not named else f"{given}\n\n{CONSTRAINTS} = [{', '.join(named)}]\n"
    if not given:
        raise UserError(f"item {name}: constraints = [] accepts every answer; give a function at least, or leave the item out")
    parts = []
    for number, code in enumerate(given):
        if not isinstance(code, str):
            raise UserError(f"item {name}: constraint {number} = {code!r:.60} is not the text of a function")
        named = FUNCTION.findall(code)
        parts.append(f"{code}\n_constraint_{number} = {named[-1]}" if named else f"_constraint_{number} = ({code.strip()})")
    every = ", ".join(f"_constraint_{number}" for number in range(len(parts)))
    return "\n\n".join([*parts, f"{CONSTRAINTS} = [{every}]\n"])


class LogicData(Form):
    check: str
    constraints: str


class AutoLogi(BenchTask):
    name = "autologi"
    data_form = LogicData

    def __init__(self, size: int = 4, check_seconds: float = 5.0) -> None:
        self._size = size
        self._limits = Limits(wall_seconds=check_seconds, cpu_seconds=max(1, round(check_seconds)))

    def row_item(self, row: Mapping[str, Any], name: str) -> Item:
        prompt = turns_text(field(row, name, ["prompt", "question", "puzzle", "problem"], (str, list)), name)
        code = _programs(row, name)
        check = field(code, name, CHECK_KEYS)
        if not re.search(rf"\b{CHECK}\b", check) and (named := FUNCTION.findall(check)):
            check = f"{check}\n\n{CHECK} = {named[-1]}\n"
        constraints = constraint_source(field(code, name, CONSTRAINT_KEYS, (str, list)), name)
        return Item(name, prompt, {"check": check, "constraints": constraints})

    def generated(self, split: Split) -> DrawnItems:
        return DrawnItems(f"autologi/{self._size}", split, self._made)

    def _made(self, rng: random.Random, split: Split, name: str) -> Item:
        def draw() -> tuple[str, Puzzle]:
            kind = rng.choice(sorted(MAKERS))
            return kind, MAKERS[kind](rng, self._size)

        kind, puzzle = draw_for(split, draw, lambda drawn: f"{drawn[1].story} {sorted(rule.text for rule in drawn[1].rules)}")
        data = {"kind": kind, "check": puzzle.check_code, "constraints": puzzle.constraint_code, "example": puzzle.example}
        return Item(name, puzzle.prompt, data)

    def verdict(self, item: Item, text: str) -> float:
        answer = answer_in(text)
        if answer is None:
            return 0.0
        source = f"{item.data['check']}\n\n{item.data['constraints']}\n"
        return float(run_checks(source, [CHECK, CONSTRAINTS], answer, self._limits).accepted)

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        """Each check is a process of its own; several run at once."""
        texts = [episode.answer_text for episode in episodes]
        with ThreadPoolExecutor(PROCESSES) as threads:
            return list(threads.map(self.verdict, map(item_of, episodes), texts))

    def answer(self, text: str) -> str | None:
        return answer_in(text)

    def vote(self, episode: Episode) -> str | None:
        """The value that the answer writes out, spelled in one way; of what is no JSON, the text without white space. Python's
        own reader of values is for the sandbox: a text can bring it down."""
        written = super().vote(episode)
        try:
            return json.dumps(json.loads(written), sort_keys=True) if written else None
        except (ValueError, RecursionError):
            return "".join(written.split()) if written else None

    def message_correct(self, item: Item, message: Message) -> bool:
        return bool(self.verdict(item, message.text))


def _programs(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Where the programs are: in `code`, in verl's reward_model, or in the row itself."""
    verl = row.get("reward_model")
    code = row.get("code") if row.get("code") is not None else verl.get("ground_truth") if isinstance(verl, Mapping) else None
    if isinstance(code, str):
        try:
            code = json.loads(code)
        except (ValueError, RecursionError) as error:
            raise UserError(f"item {name}: code is no JSON object with the two programs") from error
    if code is not None and not isinstance(code, Mapping):
        raise UserError(f"item {name}: code = {code!r:.60} is no object with inputs_check_code and constraint_list_code")
    return row if code is None else code


class AutoLogiSettings(ItemsOrGenerated):
    """Open puzzles checked by programs, in a sandbox; AutoLogi's items, or generated ones with at least one solution."""

    paper_samples: ClassVar[Mapping[str, int]] = {"autologi": 64}
    reads_alone: ClassVar[bool] = True

    name: Literal["autologi"] = Field(
        description="Rows need prompt and code {Inputs_Check_code, Constraint_List_code}; without path or hub, items are made."
    )
    size: int = Field(default=4, ge=3, le=7, description="People or things in a generated puzzle; more are harder.")
    check_seconds: float = Field(default=5.0, gt=0, description="Longest run of one item's checking programs, in seconds.")

    def programs_of(self, folder: Path) -> str | None:
        if self.hub:
            return f"{self.hub} of the hub"
        files = [str(data_file(folder, path).resolve()) for path in (self.path, self.test_path) if path]
        return " and ".join(files) or None

    def make(self, folder: Path) -> AutoLogi:
        return AutoLogi(self.size, self.check_seconds)
