"""A vault with two dials, opened by a team: the ones and the tens of a sum of two numbers.

Each message turns one dial, the vault answers whether it clicks, and a team with several rounds may try again. Shown here:
several turns, a tool call, a reward in every turn, credit by agent, and an environment that takes its time.
"""

import asyncio
import random
import re

from teamtr_lora import Feedback, Interaction, Item, Task
from teamtr_lora.team.tool_calls import read_calls


def turned_to(text):
    """The tool call `dial(total=12)` in any usual spelling; or =12 at the end, which is how the embedded base writes sums."""
    calls, said = read_calls(text, ["dial"])
    if calls:
        return str(calls[0].arguments.get("total"))
    found = re.search(r"=\s*([0-9]+)\s*$", said)
    return found[1] if found else None


class Vault(Interaction):
    """One episode: which dials have clicked so far."""

    def __init__(self, item, seconds):
        super().__init__(item)
        self.seconds, self.clicked = seconds, set()

    async def feed(self, message):
        await asyncio.sleep(self.seconds)  # the mechanism; other episodes are played meanwhile
        dial = message.turn % 2
        if dial in self.clicked:
            return Feedback("open", credit={})
        if turned_to(message.text) != self.item.data["totals"][dial]:
            return Feedback("closed", credit={})  # a reward of 0, and nobody earned anything
        self.clicked.add(dial)
        return Feedback("click", reward=0.5, done=len(self.clicked) == 2, credit={message.agent: 0.5})


class NumberVault(Task):
    """Settings: the largest number, and the seconds that a dial takes to turn."""

    name = "number_vault"

    def __init__(self, largest=99, seconds=0.0):
        self.largest, self.seconds = largest, seconds

    def items(self, split):
        rng = random.Random(0)
        pairs = sorted({(rng.randint(10, self.largest), rng.randint(10, self.largest)) for _ in range(512)})
        rng.shuffle(pairs)
        chosen = pairs[:64] if split == "test" else pairs[64:]
        return [Item(f"{a}+{b}", prompt=f"{a}+{b}", data={"totals": self.totals(a, b)}) for a, b in chosen]

    def totals(self, a, b):
        """What the dials must be turned to: the ones with their carry, as 15, and the tens with it, as 9."""
        ones = a % 10 + b % 10
        return [str(ones), str(a // 10 + b // 10 + ones // 10)]

    def open(self, item):
        return Vault(item, self.seconds)

    def answer(self, text):
        return turned_to(text)


def make_task(largest=99, seconds=0.0):
    """What a recipe names: task: {name: custom, callable: "number_vault:make_task", settings: {largest: 49}}"""
    return NumberVault(largest, seconds)
