"""Every agent names one of the digits on offer, and no two should name the same.

    Pick one of 3 8 5 1     ->  8     3     8     1     (two of four stand apart)

What an agent should say depends on what the others say now, not on what they said when an episode was sampled: with
`team.router.kind: blind` they cannot hear each other, so they have to come to an arrangement by learning. Two that learn from the
same old episodes both move to the digit that was free there. Procedural, seeded and unlimited; a set of digits, in any order,
belongs to train or to test by a hash.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.machinery.drawn import DrawnItems, draw_for
from teamtr_lora.tasks.machinery.forms import Form
from teamtr_lora.tasks.machinery.task import Item, Split, Task, item_of
from teamtr_lora.tasks.machinery.task_settings import TaskSettings
from teamtr_lora.team import Episode

DIGIT = re.compile(r"[0-9]")


class DistinctData(Form):
    options: list[int]


class Distinct(Task):
    name = "distinct"
    data_form = DistinctData
    needs_every_message = True

    def __init__(self, options: int = 4, coupling: float = 1.0) -> None:
        self.options, self.coupling = options, coupling

    def items(self, split: Split) -> DrawnItems:
        return DrawnItems(f"distinct/{self.options}", split, self._made)

    def _made(self, rng: random.Random, split: Split, name: str) -> Item:
        digits = draw_for(split, lambda: rng.sample(range(10), self.options), lambda drawn: f"distinct {sorted(drawn)}")
        prompt = f"Pick one of {' '.join(map(str, digits))}"
        return Item(id=name, prompt=prompt, data={"options": digits})

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        return [self._reward(episode) for episode in episodes]

    def _reward(self, episode: Episode) -> float:
        named = self._named(episode)
        offered = {str(digit) for digit in item_of(episode).data["options"]}
        times = Counter(named.values())
        listed = sum(digit in offered for digit in named.values())
        apart = sum(digit in offered and times[digit] == 1 for digit in named.values())
        # exactly 1 where everybody stands apart, whatever the coupling
        return (listed + self.coupling * (apart - listed)) / len(named) if named else 0.0

    def _named(self, episode: Episode) -> dict[str, str | None]:
        """By agent; its last word counts, so a team with several rounds may come to terms."""
        return {message.agent: self.answer(message.text) for message in episode.messages}

    def answer(self, text: str) -> str | None:
        """The first digit in a message."""
        found = DIGIT.search(text)
        return found[0] if found else None

    def vote(self, episode: Episode) -> str | None:
        """What everybody names: one agent's digit is no answer of the team."""
        return " ".join(digit or "-" for digit in self._named(episode).values()) or None

    def team_answer(self, episode: Episode) -> str:
        return self.vote(episode) or ""

    def check_agents(self, agents: Sequence[str], max_messages: int) -> None:
        if len(agents) < 2:
            raise UserError("task.name = 'distinct': one agent alone has nobody to differ from; it needs a team of two or more")
        if len(agents) > self.options:
            raise UserError(
                f"task.options = {self.options}: the team has {len(agents)} agents, and each needs a digit of its own; "
                f"set task.options={len(agents)} or more"
            )


class DistinctSettings(TaskSettings):
    """Every agent names one of a few digits, and no two the same one: generated, with a dial for how much they depend on each
    other."""

    name: Literal["distinct"] = Field(description="The generated task of agents that have to differ.")
    options: int = Field(default=4, ge=2, le=8, description="Digits on offer; at least as many as agents.")
    coupling: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="The reward is the share of agents whose digit nobody else names, times this, plus the share that name any "
        "digit on offer, times the rest: at 0 no agent's reward depends on the others, at 1 all of it does.",
    )

    def make(self, folder: Path) -> Distinct:
        return Distinct(self.options, self.coupling)
