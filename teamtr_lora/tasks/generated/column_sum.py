"""Adding two numbers by columns, one column a message: the embedded task.

    347+285     ->  7+5+0=12   (ones: digits, carry in, total)
                    4+8+1=13   (tens)
                    3+2+1=6    (hundreds)

The team's sum is read column by column from all messages, so every message is needed; and a message needs the carry of the
one before it. Procedural, seeded and unlimited; a pair of numbers, in either order, belongs to train or to test by a hash.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.machinery.drawn import DrawnItems, draw_for
from teamtr_lora.tasks.machinery.forms import Form
from teamtr_lora.tasks.machinery.task import Item, Split, Task, item_of
from teamtr_lora.tasks.machinery.task_settings import TaskSettings
from teamtr_lora.team import Episode, Message

TOTAL = re.compile(r"=\s*([0-9]+)")


def column_totals(first: int, second: int, digits: int) -> list[int]:
    """The total of each column from the right, carry included."""
    totals: list[int] = []
    carry = 0
    for column in range(digits):
        totals.append(first // 10**column % 10 + second // 10**column % 10 + carry)
        carry = totals[-1] // 10
    return totals


def pair_key(pair: tuple[int, int]) -> str:
    """The same for both orders of two numbers."""
    return f"{min(pair)}+{max(pair)}"


class ColumnData(Form):
    totals: list[int]


class ColumnSum(Task):
    name = "column_sum"
    data_form = ColumnData

    def __init__(self, digits: int = 3, credit: str = "all") -> None:
        self.digits, self._reward = digits, credit
        self.needs_every_message = digits > 1

    def check_item(self, item: Item) -> None:
        super().check_item(item)
        if len(item.data["totals"]) != self.digits:
            raise UserError(f"item {item.id}: data.totals has {len(item.data['totals'])} columns; set digits to that")

    def items(self, split: Split) -> DrawnItems:
        return DrawnItems(f"column_sum/{self.digits}", split, self._made)

    def _made(self, rng: random.Random, split: Split, name: str) -> Item:
        low, high = 10 ** (self.digits - 1), 10**self.digits - 1
        first, second = draw_for(split, lambda: (rng.randint(low, high), rng.randint(low, high)), pair_key)
        sum_ = f"{first}+{second}"
        data = {"totals": column_totals(first, second, self.digits), "answer": str(first + second)}
        return Item(id=f"{split}:{sum_}", prompt=sum_, data=data)

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        """The last word on each column counts, so a team with several rounds may correct itself."""
        shares = [self._share_right(episode) for episode in episodes]
        return shares if self._reward == "columns" else [float(share == 1) for share in shares]

    def _share_right(self, episode: Episode) -> float:
        expected = [str(total) for total in item_of(episode).data["totals"]]
        return sum(s == e for s, e in zip(self._totals(episode), expected, strict=True)) / self.digits

    def _totals(self, episode: Episode) -> list[str | None]:
        stated = [self.answer(message.text) for message in episode.messages]
        last = {turn % self.digits: answer for turn, answer in enumerate(stated)}
        if self.digits == 1:  # one message is the whole answer, and need not be the last one
            last = {0: self.answer(episode.answer_text)}
        return [last.get(column) for column in range(self.digits)]

    def vote(self, episode: Episode) -> str | None:
        """All the columns: the last message alone is one of them."""
        totals = self._totals(episode)
        return None if None in totals else " ".join(map(str, totals))

    def team_answer(self, episode: Episode) -> str:
        """The sum that the columns make: each gives its last digit, the leftmost its whole total."""
        totals = self._totals(episode)
        if None in totals:
            return super().team_answer(episode)
        *right, left = [int(total) for total in totals if total is not None]
        return str(left) + "".join(str(total % 10) for total in reversed(right))

    def success(self, reward: float) -> bool:
        return reward >= 1

    def answer(self, text: str) -> str | None:
        """The column total a message states: its last `=number`."""
        found = TOTAL.findall(text)
        return (found[-1].lstrip("0") or "0") if found else None

    def part(self, message: Message) -> int:
        return message.turn % self.digits

    def message_correct(self, item: Item, message: Message) -> bool:
        return self.answer(message.text) == str(item.data["totals"][self.part(message)])

    def check_agents(self, agents: Sequence[str], max_messages: int) -> None:
        if max_messages < self.digits:
            raise UserError(
                f"task.digits = {self.digits}: the team speaks {max_messages} messages an episode and each column needs one; "
                f"set task.digits={max_messages} or add agents or rounds"
            )


class ColumnSumSettings(TaskSettings):
    """Add two numbers column by column: generated, seeded, and solved only if every agent's message is right."""

    reads_alone: ClassVar[bool] = True

    name: Literal["column_sum"] = Field(default="column_sum", description="The generated addition task of the quickstart.")
    digits: int = Field(default=3, ge=1, le=8, description="Digits per number.")
    credit: Literal["all", "columns"] = Field(
        default="all",
        description="all: 1 where every column is right, else 0; columns: the share of columns that are right, without which "
        "long numbers are hardly learned. Only a whole sum counts as a success either way.",
    )

    def make(self, folder: Path) -> ColumnSum:
        return ColumnSum(self.digits, self.credit)
