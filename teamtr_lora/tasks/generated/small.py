"""Small generated questions with a number for an answer: what a base of a hundred million parameters can learn from.

Each prompt shows a few solved examples, then the question. The team's answer is the last number in its last message. Procedural,
seeded and unlimited; a question, in any order of its parts, belongs to train or to test by a hash.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from teamtr_lora.tasks.machinery.drawn import DrawnItems, draw_for
from teamtr_lora.tasks.machinery.forms import Form
from teamtr_lora.tasks.machinery.task import Item, Split, Task, item_of
from teamtr_lora.tasks.machinery.task_settings import TaskSettings
from teamtr_lora.team import Episode

# Matches the whole word or number around a digit, so 12.34, 7/34 or 34th is not read as 34.
NUMBER = re.compile(r"(?<![0-9A-Za-z_])-?[0-9]+(?:[.,:/^][0-9]+)*[0-9A-Za-z_]*")
INTEGER = re.compile(r"(-?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+))(?:\.0+)?")
LONGEST = 30  # digits of a number that could be an answer
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Question:
    text: str
    answer: int
    key: str  # equal for questions that are the same up to order: they must not be on both sides of the split


def _arithmetic(rng: random.Random) -> Question:
    terms = [rng.randint(1, 20) for _ in range(3)]
    return Question("+".join(map(str, terms)) + "=", sum(terms), f"sum {sorted(terms)}")


def _products(rng: random.Random) -> Question:
    first, second = rng.randint(2, 12), rng.randint(2, 99)
    return Question(f"{first}*{second}=", first * second, f"product {sorted((first, second))}")


def _largest(rng: random.Random) -> Question:
    numbers = rng.sample(range(1, 100), 4)
    return Question(f"Largest of {', '.join(map(str, numbers))}:", max(numbers), f"largest {sorted(numbers)}")


def _letter_count(rng: random.Random) -> Question:
    letter = rng.choice(LETTERS[:8])
    word = "".join(rng.choice(LETTERS[:8]) for _ in range(rng.randint(4, 8)))
    return Question(f"How many {letter} in {word}:", word.count(letter), f"letters {letter} {''.join(sorted(word))}")


GENERATORS: dict[str, Callable[[random.Random], Question]] = {
    "arithmetic": _arithmetic,
    "products": _products,
    "largest": _largest,
    "letter_count": _letter_count,
}


class SmallData(Form):
    answer: str


class SmallTask(Task):
    data_form = SmallData

    def __init__(self, name: str, shots: int = 4) -> None:
        self.name, self.shots = name, shots

    def items(self, split: Split) -> DrawnItems:
        return DrawnItems(f"{self.name}/{self.shots}", split, self._made)

    def _made(self, rng: random.Random, split: Split, name: str) -> Item:
        def draw(split: Split) -> Question:
            return draw_for(split, lambda: GENERATORS[self.name](rng), lambda question: question.key)

        question = draw(split)
        examples = [draw("train") for _ in range(self.shots)]
        lines = [f"{shown.text} {shown.answer}" for shown in examples if shown.key != question.key]
        prompt = "\n".join([*lines, question.text])
        return Item(id=f"{name}:{question.text}", prompt=prompt, data={"answer": str(question.answer)})

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        return [float(self._right(episode)) for episode in episodes]

    def _right(self, episode: Episode) -> bool:
        return self.answer(episode.answer_text) == item_of(episode).data["answer"]

    def answer(self, text: str) -> str | None:
        found = NUMBER.findall(text)
        whole = INTEGER.fullmatch(found[-1]) if found and len(found[-1]) < LONGEST else None
        return str(int(whole[1].replace(",", ""))) if whole else None


class SmallSettings(TaskSettings):
    """Generated questions with a number for an answer, a few solved examples before each; the last message answers."""

    reads_alone: ClassVar[bool] = True
    about: ClassVar[Mapping[str, str]] = {
        "arithmetic": "Sums of three numbers up to 20; generated, a few solved examples before each.",
        "products": "Products of a number up to 12 and one up to 99; generated, a few solved examples before each.",
        "largest": "The largest of four numbers below 100; generated, a few solved examples before each.",
        "letter_count": "How often a letter is in a made-up word; generated, a few solved examples before each.",
    }

    name: Literal["arithmetic", "products", "largest", "letter_count"] = Field(
        description="arithmetic: sums of three numbers; products: of a small and a two-digit number; largest: of four numbers; "
        "letter_count: how often a letter is in a word."
    )
    shots: int = Field(default=4, ge=0, description="Solved examples before the question.")

    def make(self, folder: Path) -> SmallTask:
        return SmallTask(self.name, self.shots)
