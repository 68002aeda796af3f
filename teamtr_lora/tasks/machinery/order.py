"""The order in which training items are drawn: a pure function of the seed and a position, so a cursor is one number."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.machinery.task import Item, Items, check_count


class DataOrder:
    """Finite splits are shuffled anew each epoch; unlimited ones are taken as they come, from a start the seed picks."""

    def __init__(self, items: Items, seed: int) -> None:
        self._items, self._seed = items, seed
        if items.size == 0:
            raise UserError("the train dataset is empty")
        self._epoch, self._shuffled = -1, [0]

    def check_stage(self, items_per_stage: int) -> None:
        size = self._items.size
        check_count(self._items, items_per_stage, f"rollout.items_per_stage = {items_per_stage}")
        if size is not None and size < items_per_stage:
            raise UserError(
                f"rollout.items_per_stage = {items_per_stage}: the train split has only {size} items and a stage plays different "
                f"ones; {f'use at most {size}' if size > 2 else 'add items: two are held out for the gate, the others train'}"
            )

    def after(self, cursor: int) -> Iterator[Item]:
        """Those from a position on, as far as every item is met, where there is an end to them."""
        size = self._items.size
        for index in count(cursor) if size is None else range(cursor, cursor + 2 * size):
            yield self._items[self._position(index)]

    def take(self, cursor: int, items: int) -> list[Item]:
        return [self._items[self._position(cursor + offset)] for offset in range(items)]

    def _position(self, index: int) -> int:
        if self._items.size is None:
            return self._seed * 1_000_003 + index
        epoch, place = divmod(index, self._items.size)
        if epoch != self._epoch:
            self._shuffled = list(range(self._items.size))
            random.Random(f"{self._seed}/epoch/{epoch}").shuffle(self._shuffled)
            self._epoch = epoch
        return self._shuffled[place]
