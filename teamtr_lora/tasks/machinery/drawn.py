"""Items that a random generator makes, without end."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import TypeVar

from teamtr_lora.tasks.machinery.task import Item, Split

T = TypeVar("T")


class DrawnItems:
    """Item `position` of a split is `make(rng, split, id)`; the generator is seeded by `name`, split and position alone."""

    size: int | None = None

    def __init__(self, name: str, split: Split, make: Callable[[random.Random, Split, str], Item]) -> None:
        self._name, self._split, self._make = name, split, make

    def __getitem__(self, position: int) -> Item:
        rng = random.Random(f"{self._name}/{self._split}/{position}")
        return self._make(rng, self._split, f"{self._split}:{position}")


def draw_for(split: Split, draw: Callable[[], T], key: Callable[[T], str], test_share: float = 0.2) -> T:
    """Draws until a draw belongs to the split. A hash of the key decides, so equal keys are in the same split."""
    while True:
        drawn = draw()
        if split_of(key(drawn), test_share) == split:
            return drawn


def split_of(key: str, test_share: float = 0.2) -> Split:
    return "test" if hashlib.sha256(key.encode()).digest()[0] < 256 * test_share else "train"
