"""gsm8k, math500, aime24, aime25, dapo_math: one answer, in a box or after the benchmark's own marker.

Plain numbers and equal texts are decided here; everything else by math-verify in other processes. Text outside a box or marker is
never looked at: a symbolic parser finds an answer in almost any prose.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.benchmarks import math_answer
from teamtr_lora.tasks.benchmarks.math_pool import shared_pool
from teamtr_lora.tasks.machinery.bench import BenchTask, field, turns_text
from teamtr_lora.tasks.machinery.forms import Form, shown
from teamtr_lora.tasks.machinery.overlap import bare_problem
from teamtr_lora.tasks.machinery.task import Item, Split, item_of
from teamtr_lora.tasks.machinery.task_settings import ItemSource
from teamtr_lora.team import Episode, Message

logger = logging.getLogger(__name__)

READERS: dict[str, tuple[math_answer.Reader, ...]] = {
    "gsm8k": (math_answer.last_box, math_answer.last_hashes),
    "math500": (math_answer.last_box,),
    "aime24": (math_answer.last_box,),
    "aime25": (math_answer.last_box,),
    "dapo_math": (math_answer.last_box, math_answer.last_answer_line),
}
INSTRUCTIONS = {
    "gsm8k": "Reason step by step, then put the final number in \\boxed{}.",
    "math500": "Reason step by step, then put the final answer in \\boxed{}.",
    "aime24": "Reason step by step, then put the final answer, an integer from 0 to 999, in \\boxed{}.",
    "aime25": "Reason step by step, then put the final answer, an integer from 0 to 999, in \\boxed{}.",
    "dapo_math": "Reason step by step. The last line of your response should be of the form Answer: $Answer.",
}
PROBLEM = ("problem", "question", "prompt")
ANSWER = ("answer", "ground_truth", "solution")


class MathData(Form):
    answer: str | int | float
    problem: str = ""


class MathTask(BenchTask):
    data_form = MathData
    scores_the_answer_alone = True

    def __init__(self, name: str, instruction: str | None = None, answer_seconds: float = 3.0) -> None:
        self.name = name
        self._instruction = INSTRUCTIONS[name] if instruction is None else instruction
        self._pool = shared_pool(answer_seconds)

    def row_item(self, row: Mapping[str, Any], name: str) -> Item:
        problem = bare_problem(turns_text(field(row, name, PROBLEM, (str, list)), name)).strip()  # DAPO's is a conversation
        gold = str(field({**row, **_reward_model(row)}, name, ANSWER, (str, int, float)))
        if "####" in gold and (marked := math_answer.last_hashes(gold)):
            gold = marked[1]
        self._check_gold(gold, name)
        prompt = f"{problem}\n\n{self._instruction}" if self._instruction else problem
        return Item(name, prompt, {"problem": problem, "answer": gold})

    def _check_gold(self, gold: str, name: str) -> None:
        if self.name.startswith("aime") and math_answer.integer(gold) is None:
            raise UserError(f"item {name}: answer = {shown(gold)} is no integer, and every answer of {self.name} is one")

    def check_item(self, item: Item) -> None:
        super().check_item(item)
        self._check_gold(str(item.data["answer"]), item.id)

    def usable(self, rows: Any, split: Split) -> Sequence[int]:
        """Published sets have a few rows whose answer was lost; nothing can be learned from those."""
        lost = {place for place, row in enumerate(rows) if self.lost_answer(row)}
        if lost:
            logger.warning(
                "%d of %d %s items have no answer and are left out; the first is row %d", len(lost), len(rows), split, min(lost)
            )
        return [place for place in range(len(rows)) if place not in lost]

    def lost_answer(self, row: Mapping[str, Any]) -> bool:
        found = [value for key, value in {**row, **_reward_model(row)}.items() if str(key).lower() in ANSWER]
        return bool(found) and all(value is None or value == "" for value in found)

    def answer(self, text: str) -> str | None:
        return math_answer.stated(text, READERS[self.name])

    def vote(self, episode: Episode) -> str | None:
        stated = super().vote(episode)
        return None if stated is None else math_answer.canonical(stated)

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        """All at once, so that the slow comparisons share the pool."""
        texts = [episode.answer_text for episode in episodes]
        return [float(right) for right in self._right([item_of(episode) for episode in episodes], texts)]

    def _right(self, items: Sequence[Item], texts: Sequence[str]) -> list[bool]:
        answers, golds = [self.answer(text) for text in texts], [str(item.data["answer"]) for item in items]
        if self.name.startswith("aime"):  # integers, and nothing that algebra could make of something else
            numbers = [None if answer is None else math_answer.integer(answer) for answer in answers]
            return [n is not None and n == math_answer.integer(gold) for n, gold in zip(numbers, golds, strict=True)]
        verdicts = [
            False if answer is None else math_answer.quick(gold, answer, str(item.data.get("problem", "")))
            for gold, answer, item in zip(golds, answers, items, strict=True)
        ]
        unclear = [i for i, verdict in enumerate(verdicts) if verdict is None]
        pairs = [(math_answer.for_algebra(golds[i]), math_answer.for_algebra(answers[i] or "")) for i in unclear]
        for i, verdict in zip(unclear, self._pool.equal(pairs), strict=True):
            verdicts[i] = verdict
        return [bool(verdict) for verdict in verdicts]

    def message_correct(self, item: Item, message: Message) -> bool:
        return self._right([item], [message.text])[0]


def _reward_model(row: Mapping[str, Any]) -> dict[str, Any]:
    """verl's layout keeps the answer one level down."""
    inner = row.get("reward_model")
    return {"ground_truth": inner.get("ground_truth")} if isinstance(inner, Mapping) else {}


class MathSettings(ItemSource):
    """Problems with one answer, in a box or after the benchmark's marker; compared symbolically by math-verify."""

    paper_samples: ClassVar[Mapping[str, int]] = {"aime24": 64, "aime25": 64, "math500": 4}
    reads_alone: ClassVar[bool] = True
    about: ClassVar[Mapping[str, str]] = {
        "gsm8k": "GSM8K: grade-school word problems; the answer is a number in a box or after ####, compared by math-verify.",
        "math500": "MATH-500: competition problems; the answer is in a box and is compared symbolically by math-verify.",
        "aime24": "AIME 2024: thirty olympiad problems; the answer is an integer from 0 to 999, in a box.",
        "aime25": "AIME 2025: thirty olympiad problems; the answer is an integer from 0 to 999, in a box.",
        "dapo_math": "DAPO-Math-17k: problems with integer answers, in a box or on an Answer: line.",
    }

    name: Literal["gsm8k", "math500", "aime24", "aime25", "dapo_math"] = Field(
        description="gsm8k: a number in a box or after ####; math500, aime24, aime25: in a box; dapo_math: in a box or on an "
        "Answer: line. Rows need problem (or question) and answer."
    )
    instruction: str | None = Field(
        default=None, description="Text after each problem that says how to answer; null takes the task's own, empty adds none."
    )
    answer_seconds: float = Field(
        default=3.0, gt=0, description="Longest time to compare one answer, in seconds; one that takes longer is wrong."
    )

    def make(self, folder: Path) -> MathTask:
        return MathTask(self.name, self.instruction, self.answer_seconds)
