"""arbench_gn: find a secret of four different digits from feedback on guesses, in 25 turns and one final guess.

As in AR-Bench, with one change that saves tokens: an episode ends with the right guess (`stop_when_right: false` plays all turns,
and then the last guess counts).
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.machinery.bench import BenchTask, field
from teamtr_lora.tasks.machinery.drawn import DrawnItems, draw_for
from teamtr_lora.tasks.machinery.forms import Form
from teamtr_lora.tasks.machinery.task import Feedback, Interaction, Item, Split, item_of
from teamtr_lora.tasks.machinery.task_settings import ItemsOrGenerated
from teamtr_lora.team import Episode, Message

TEST_SHARE = 0.1
BRACKETS = str.maketrans("", "", "[](){}*`$\"'")
STATED = re.compile(r"guess[ \t]*[:：]\s*([0-9](?:[ \t,-]{0,3}[0-9]){3,10})(?![0-9])", re.IGNORECASE)
BARE = re.compile(r"(?<![0-9])[0-9]{4}(?![0-9])")

RULES = """I have a secret number of four digits, all different; it may start with 0, such as 0123 or 9468.
You have {turns} turns to guess it. After each guess I say how many of its digits are in the secret and in the correct position,
and how many are in the secret but in a different position. Give each guess in this format:
Guess: [number]"""
ANSWER = """{same} digits are present in the answer and in the correct positions
{other} digits are present in the answer but in the different positions"""
WASTED = "That was no guess in the format Guess: [number], for example Guess: 1234; the turn is lost."
FINAL = "All turns are over. Give your final answer in the format Guess: [number]"


def guess_in(text: str) -> str | None:
    """The last stated guess of four digits, or without any the last number of four digits."""
    text = text.translate(BRACKETS)
    stated = [digits for found in STATED.findall(text) if len(digits := re.sub(r"[^0-9]", "", found)) == 4]
    found = stated or BARE.findall(text)
    return found[-1] if found else None


def compare(secret: str, guess: str) -> tuple[int, int]:
    """Digits in place, and digits that are elsewhere (a digit guessed twice counts once)."""
    same = sum(a == b for a, b in zip(secret, guess, strict=True))
    return same, (Counter(secret) & Counter(guess)).total() - same


class Guessing(Interaction):
    def __init__(self, item: Item, turns: int, stop_when_right: bool) -> None:
        super().__init__(item)
        self._turns, self._stop, self._played = turns, stop_when_right, 0

    def feed(self, message: Message) -> Feedback:
        self._played += 1
        guess = guess_in(message.text)
        if self._played > self._turns or (self._stop and guess == self.item.data["number"]):
            return Feedback(done=True)
        said = WASTED
        if guess is not None:
            same, other = compare(self.item.data["number"], guess)
            said = ANSWER.format(same=same, other=other)
        return Feedback(f"{said}\n{FINAL if self._played == self._turns else f'Turn {self._played + 1}:'}")


class GuessingData(Form):
    number: Annotated[str, Field(pattern="^[0-9]{4}$")]


class GuessingTask(BenchTask):
    name = "arbench_gn"
    data_form = GuessingData
    needs_every_message = True

    def __init__(self, turns: int = 25, stop_when_right: bool = True) -> None:
        self._turns, self._stop = turns, stop_when_right

    def row_item(self, row: Mapping[str, Any], name: str) -> Item:
        number = str(field(row, name, ["number"], (str, int))).zfill(4)  # a spreadsheet drops the first 0
        if not re.fullmatch(r"[0-9]{4}", number):
            raise UserError(f"item {name}: number = {number!r} is not four digits")
        return self._item(name, number)

    def _item(self, name: str, number: str) -> Item:
        return Item(name, RULES.format(turns=self._turns) + "\n\nTurn 1:", {"number": number})

    def text(self, item: Item) -> str:
        return str(item.data["number"])

    def generated(self, split: Split) -> DrawnItems:
        return DrawnItems(self.name, split, self._made)

    def _made(self, rng: random.Random, split: Split, name: str) -> Item:
        return self._item(name, draw_for(split, lambda: "".join(rng.sample("0123456789", 4)), str, TEST_SHARE))

    def open(self, item: Item) -> Guessing:
        return Guessing(item, self._turns, self._stop)

    def score(self, episodes: Any) -> list[float]:
        return [float(self._found(episode)) for episode in episodes]

    def _found(self, episode: Episode) -> bool:
        said = episode.messages[: self._turns + 1]
        return bool(said) and guess_in(said[-1].text) == item_of(episode).data["number"]

    def answer(self, text: str) -> str | None:
        return guess_in(text)


class GuessingSettings(ItemsOrGenerated):
    """Guess a secret of four different digits from feedback; AR-Bench's items, or generated ones."""

    paper_samples: ClassVar[Mapping[str, int]] = {"arbench_gn": 25}
    replies: ClassVar[str] = "the game"
    reads_alone: ClassVar[bool] = True

    name: Literal["arbench_gn"] = Field(description="Rows need number; without path or hub, items are generated.")
    turns: int = Field(default=25, ge=1, description="Guesses with feedback; one final guess follows. A message is a turn.")
    stop_when_right: bool = Field(
        default=True, description="End the episode with the right guess; false plays all turns, as AR-Bench does."
    )

    def make(self, folder: Path) -> GuessingTask:
        return GuessingTask(self.turns, self.stop_when_right)
