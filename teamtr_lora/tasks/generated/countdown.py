"""countdown: reach a target with the given numbers, each used once, by + - * /. The last message's last expression counts."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from teamtr_lora.tasks.machinery.drawn import DrawnItems, draw_for
from teamtr_lora.tasks.machinery.forms import Form
from teamtr_lora.tasks.machinery.task import Item, Split, Task, item_of
from teamtr_lora.tasks.machinery.task_settings import TaskSettings
from teamtr_lora.team import Episode, Message

LONGEST = 200
# Matches the longest run of expression characters, so part of `1.5+3` is not taken for an expression.
EXPRESSION = re.compile(r"[-+*/().,^0-9 ]*[0-9)]")
PLAIN = re.compile(r"[-+*/()0-9 ]+")
TOKEN = re.compile(r"[0-9]+|[-+*/()]")
SIGNS = str.maketrans({"×": "*", "·": "*", "⋅": "*", "∙": "*", "∗": "*", "÷": "/", "−": "-"})
LATEX = {r"\times": "*", r"\cdot": "*", r"\div": "/", r"\left": "", r"\right": ""}
TIMES = re.compile(r"(?<=[0-9)]) ?[xX] ?(?=[0-9(])")
FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
BOLD = re.compile(r"(?:^|(?<=[\s:=]))\*\*([^*\n]+(?:\*[^*\n]+)*)\*\*(?![0-9(])", re.MULTILINE)
PUNCTUATION = re.compile(r"[.,](?=\s|$)|^\s*[-*]\s", re.MULTILINE)  # the end of a sentence, the bullet of a list


def expression_in(text: str) -> str | None:
    """The last run of numbers and signs that has a sign in it."""
    text = FRACTION.sub(r"(\1)/(\2)", BOLD.sub(r" \1 ", text[-5_000:]).translate(SIGNS))
    for command, sign in LATEX.items():
        text = text.replace(command, sign)
    text = TIMES.sub("*", PUNCTUATION.sub("\n", text))
    found = [part for part in EXPRESSION.findall(text) if re.search(r"[-+*/]", part)]
    return found[-1].strip() if found and len(found[-1]) <= LONGEST else None


def value_of(expression: str) -> tuple[Fraction, list[int]] | None:
    """The exact value and the numbers used; None for anything that is no expression."""
    tokens = TOKEN.findall(expression) if PLAIN.fullmatch(expression) else []
    numbers = [int(token) for token in tokens if token.isdigit()]
    try:
        value, end = _sum(tokens, 0)
    except (IndexError, ValueError, ZeroDivisionError, RecursionError):
        return None
    return (value, numbers) if end == len(tokens) else None


def _sum(tokens: list[str], place: int) -> tuple[Fraction, int]:
    value, place = _product(tokens, place)
    while place < len(tokens) and tokens[place] in "+-":
        other, after = _product(tokens, place + 1)
        value, place = (value + other if tokens[place] == "+" else value - other), after
    return value, place


def _product(tokens: list[str], place: int) -> tuple[Fraction, int]:
    value, place = _atom(tokens, place)
    while place < len(tokens) and tokens[place] in "*/":
        other, after = _atom(tokens, place + 1)
        value, place = (value * other if tokens[place] == "*" else value / other), after
    return value, place


def _atom(tokens: list[str], place: int) -> tuple[Fraction, int]:
    if tokens[place] == "(":
        value, place = _sum(tokens, place + 1)
        if tokens[place] != ")":
            raise ValueError("an open bracket")
        return value, place + 1
    return Fraction(int(tokens[place])), place + 1  # int() raises ValueError for anything else


class CountdownData(Form):
    numbers: list[int]
    target: int


class Countdown(Task):
    name = "countdown"
    data_form = CountdownData

    def __init__(self, numbers: int = 3, shots: int = 2) -> None:
        self._numbers, self._shots = numbers, shots

    def items(self, split: Split) -> DrawnItems:
        return DrawnItems(f"countdown/{self._numbers}/{self._shots}", split, self._made)

    def _made(self, rng: random.Random, split: Split, name: str) -> Item:
        def draw(split: Split) -> tuple[list[int], int, str]:
            return draw_for(split, lambda: self._draw(rng), lambda drawn: f"{sorted(drawn[0])} {drawn[1]}")

        numbers, target, solution = draw(split)
        examples = [draw("train") for _ in range(self._shots)]
        lines = [
            f"{_question(shown, goal)} {way}"
            for shown, goal, way in examples
            if (sorted(shown), goal) != (sorted(numbers), target)
        ]
        rule = "Reach the target with all the numbers, each once, by + - * /."
        data = {"numbers": numbers, "target": target, "solution": solution}
        return Item(name, "\n".join([rule, *lines, _question(numbers, target)]), data)

    def _draw(self, rng: random.Random) -> tuple[list[int], int, str]:
        """Shuffled numbers, a target from 1 to 999 and an expression that reaches it."""
        while True:
            numbers = [rng.randint(1, 20) for _ in range(self._numbers)]
            solution = str(numbers[0])
            for number in numbers[1:]:
                sign = rng.choice("+-*")
                before = f"({solution})" if sign == "*" and re.search(r"[-+]", solution) else solution
                solution = f"{before}{sign}{number}"
            value = value_of(solution)
            assert value is not None
            shuffled = rng.sample(numbers, len(numbers))
            if 0 < value[0] <= 999:
                return shuffled, int(value[0]), solution

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        return [float(self._right(item_of(e), e.answer_text)) for e in episodes]

    def _right(self, item: Item, text: str) -> bool:
        expression = expression_in(text)
        found = value_of(expression) if expression else None
        return found is not None and found[0] == item.data["target"] and sorted(found[1]) == sorted(item.data["numbers"])

    def answer(self, text: str) -> str | None:
        return expression_in(text)

    def vote(self, episode: Episode) -> str | None:
        """However it is spaced; what has no value is no answer."""
        expression = super().vote(episode)
        return "".join(expression.split()) if expression and value_of(expression) else None

    def message_correct(self, item: Item, message: Message) -> bool:
        return self._right(item, message.text)


def _question(numbers: Sequence[int], target: int) -> str:
    return f"Numbers {', '.join(map(str, numbers))}; target {target}:"


class CountdownSettings(TaskSettings):
    """Reach a target with the given numbers, each once, by + - * /; generated, checked exactly."""

    reads_alone: ClassVar[bool] = True

    name: Literal["countdown"] = Field(description="The last expression in the last message is the answer.")
    numbers: int = Field(default=3, ge=2, le=6, description="Numbers per item; more are harder.")
    shots: int = Field(default=2, ge=0, description="Solved examples before the question.")

    def make(self, folder: Path) -> Countdown:
        return Countdown(self.numbers, self.shots)
