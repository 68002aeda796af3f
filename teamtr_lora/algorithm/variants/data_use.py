"""Which episodes an update learns from, and which ones judge the candidate (the gate's held-out messages, cor:empL)."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol


class Played(Protocol):
    """What a rule needs to know of an episode."""

    @property
    def item_id(self) -> str: ...
    @property
    def group(self) -> int: ...


class DataSettings(Protocol):
    @property
    def holdout(self) -> float: ...


@dataclass(frozen=True)
class Share:
    """Whole groups of one rollout; messages of one group are dependent, so no group is ever divided."""

    rollout: int  # its place among the rollouts that were given
    groups: list[int]


@dataclass(frozen=True)
class Division:
    fit: list[Share]  # what the gradient comes from
    judge: Share  # what the candidate is measured on; it is in no share of `fit`


class DataUse(ABC):
    earlier: ClassVar[int] = 0  # rollouts before the newest one that are kept, and given to `divide`

    def __init__(self, settings: DataSettings) -> None:
        self.settings = settings

    @abstractmethod
    def judging_items(self, items: int) -> int:
        """How many of a rollout's `items` judge."""

    @abstractmethod
    def divide(self, rollouts: Sequence[Sequence[Played]], informative: Sequence[set[int]], seed: int) -> Division:
        """`rollouts` begins with the newest, then come up to `earlier` older ones. `informative`: of each of them, the groups
        whose episodes differ in return. Episodes of a team other than today's are weighted by trajectory ratios, whichever
        share they are in; those weights are no matter of the division."""


class HoldOut(DataUse):
    """The gradient comes from a part of the newest rollout, and `holdout` of its items are kept for the judgement."""

    words = "it learns from the newest rollout, less the share trust_region.holdout of its items, which judge it"

    def judging_items(self, items: int) -> int:
        return round(items * self.settings.holdout)

    def divide(self, rollouts: Sequence[Sequence[Played]], informative: Sequence[set[int]], seed: int) -> Division:
        """An item that was drawn twice stays on one side. Both sides get their share of the groups with reward variance: without
        any of those, the gate would measure no gain and reject every candidate."""
        by_item: dict[str, list[int]] = {}
        for episode in rollouts[0]:
            groups = by_item.setdefault(episode.item_id, [])
            if episode.group not in groups:
                groups.append(episode.group)
        items = sorted(by_item)
        random.Random(seed).shuffle(items)
        mixed = [item for item in items if informative[0] & set(by_item[item])]
        even = [item for item in items if item not in mixed]
        count = self.judging_items(len(items))
        from_mixed = min(len(mixed) - 1, max(1, round(len(mixed) * self.settings.holdout))) if len(mixed) > 1 else 0
        from_mixed = max(min(from_mixed, count), count - len(even))
        held = mixed[:from_mixed] + even[: count - from_mixed]
        judging = {group for item in held for group in by_item[item]}
        fit = [group for item in items for group in by_item[item] if group not in judging]
        return Division(fit=[Share(0, fit)], judge=Share(0, sorted(judging)))


DATA_USE: dict[str, type[DataUse]] = {"holdout": HoldOut}
