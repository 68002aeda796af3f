"""The order in which a stage updates the agents (alg:teamtr draws a permutation)."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar


class Ordering(ABC):
    words: ClassVar[str]

    @abstractmethod
    def arrange(self, agents: Sequence[str], seed: str) -> list[str]:
        """The order of one stage; `seed` differs from stage to stage."""


class Random(Ordering):
    words = "drawn anew each stage"

    def arrange(self, agents: Sequence[str], seed: str) -> list[str]:
        order = list(agents)
        random.Random(seed).shuffle(order)
        return order


class Fixed(Ordering):
    words = "as the team lists them"

    def arrange(self, agents: Sequence[str], seed: str) -> list[str]:
        return list(agents)


class Reverse(Ordering):
    words = "the last of the team's list first"

    def arrange(self, agents: Sequence[str], seed: str) -> list[str]:
        return list(reversed(agents))


class Listed(Ordering):
    """The recipe's own list of all agents' names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def arrange(self, agents: Sequence[str], seed: str) -> list[str]:
        return list(self._names)


ORDERS: dict[str, type[Ordering]] = {"random": Random, "fixed": Fixed, "reverse": Reverse}


def ordering(setting: str | Sequence[str]) -> Ordering:
    """What `training.order` says: a name of the table, or a list of the agents."""
    return ORDERS[setting]() if isinstance(setting, str) else Listed(setting)
