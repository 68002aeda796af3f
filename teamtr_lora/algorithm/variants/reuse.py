"""Which episodes an update learns from, and which ones judge the candidate (the gate's held-out messages, cor:empL).

Sampling the team anew before every update leaves each of a stage's n updates 1/n of its episodes. Inside a trust region the teams
of the last few updates hardly differ, so their episodes can be learned from again, each weighted by how much likelier today's
team is to play it. How many rollouts are kept is decided here; the weights are training/window.py's matter.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

SMALL_RADIUS = 0.05  # nats: what updates of this size have left behind is nearly fresh for two stages


class Played(Protocol):
    """What a rule needs to know of an episode."""

    @property
    def item_id(self) -> str: ...
    @property
    def group(self) -> int: ...


class ReuseSettings(Protocol):
    @property
    def holdout(self) -> float: ...


@dataclass(frozen=True)
class Division:
    """Groups of the newest rollout. Messages of one group are dependent, so no group is ever divided."""

    fit: list[int]  # for the gradient, beside the earlier rollouts
    judge: list[int]  # what the candidate is measured on; none of them is in `fit`


class Reuse(ABC):
    words: ClassVar[str]

    def __init__(self, settings: ReuseSettings, rollouts: int | None = None, *, two_stages: bool = False) -> None:
        """`rollouts`: of a window; None: by the number of agents, those of `two_stages` or one less than a stage has."""
        self.settings, self._rollouts, self._two_stages = settings, rollouts, two_stages

    def window(self, agents: int) -> int:
        """Rollouts before the newest one that an update of a team of `agents` learns from."""
        return 0

    def judging_items(self, items: int) -> int:
        """How many of a rollout's `items` judge where there is no earlier rollout to learn from, as in a run's first update."""
        return round(items * self.settings.holdout)

    def learned_items(self, items: int, agents: int) -> int:
        """The most items that an update of a team of `agents` learns from, with `items` in a rollout."""
        return max(items - self.judging_items(items), self.window(agents) * items)

    def judges(self, items: int) -> str:
        """What an update is measured on, in words."""
        return f"{self.judging_items(items)} of {items} items held out from its gradient"

    @abstractmethod
    def divide(self, newest: Sequence[Played], informative: Collection[int], earlier: bool, seed: int) -> Division:
        """`informative`: the groups of the newest rollout whose episodes differ in return. `earlier`: whether the window holds
        anything to learn from."""


class HoldOut(Reuse):
    """The gradient comes from a part of the newest rollout, and `holdout` of its items are kept for the judgement."""

    words = "every episode once: an update learns from its rollout, less trust_region.holdout of the items, which judge it"

    def divide(self, newest: Sequence[Played], informative: Collection[int], earlier: bool, seed: int) -> Division:
        """An item that was drawn twice stays on one side. Items whose episodes do not differ in return are held out first: they
        have no gradient, and measure the KL as well as any. Some of the others judge too, so that both kinds are measured."""
        by_item: dict[str, list[int]] = {}
        for episode in newest:
            groups = by_item.setdefault(episode.item_id, [])
            if episode.group not in groups:
                groups.append(episode.group)
        items = sorted(by_item)
        random.Random(seed).shuffle(items)
        mixed = [item for item in items if set(informative) & set(by_item[item])]
        even = [item for item in items if item not in mixed]
        count = self.judging_items(len(items))
        from_mixed = min(len(mixed) - 1, max(LEAST_MIXED, count - len(even))) if len(mixed) > 1 else 0
        held = mixed[:from_mixed] + even[: max(count - from_mixed, 1)]
        judging = {group for item in held for group in by_item[item]}
        return Division(fit=[group for item in items for group in by_item[item] if group not in judging], judge=sorted(judging))


class Window(HoldOut):
    """The gradient comes from the rollouts of the last updates, n - 1 by default, across the border of stages too, and the whole
    newest rollout judges: the candidate has never seen it, and there are several times as many groups to judge by. The next
    updates then learn from it. Where there is nothing earlier to learn from, the newest rollout is divided as without reuse.
    Where n rollouts share a stage's episodes, each is so small that two stages of them are kept, unless the radius is so large
    that they would be stale."""

    words = "an update learns from the last rollouts (window), weighted by trajectory ratios, and the whole newest one judges it"

    def window(self, agents: int) -> int:
        if self._rollouts is not None:
            return self._rollouts
        return 2 * agents if self._two_stages and agents > 1 else agents - 1

    def judges(self, items: int) -> str:
        return f"the {items} items of the newest rollout, from which it has not learned"

    def divide(self, newest: Sequence[Played], informative: Collection[int], earlier: bool, seed: int) -> Division:
        if not earlier:
            return super().divide(newest, informative, earlier, seed)
        return Division(fit=[], judge=sorted({episode.group for episode in newest}))


class WindowAndNewest(Window):
    """As the window, and the gradient also comes from the newest rollout, less what is held out to judge."""

    words = "as window, and from the newest rollout too, less trust_region.holdout of its items, which judge it"

    def learned_items(self, items: int, agents: int) -> int:
        return items - self.judging_items(items) + self.window(agents) * items

    def judges(self, items: int) -> str:
        return HoldOut.judges(self, items)

    def divide(self, newest: Sequence[Played], informative: Collection[int], earlier: bool, seed: int) -> Division:
        found = HoldOut.divide(self, newest, informative, earlier, seed)
        # a single item that differs judges where the window has others to learn from
        whole = earlier and not set(informative) & set(found.judge)
        return super().divide(newest, informative, earlier, seed) if whole else found


# Of the items whose episodes differ in return, so many are held out at least (all but one, where there are fewer).
LEAST_MIXED = 2

REUSE: dict[str, type[Reuse]] = {"none": HoldOut, "window": Window, "window_and_newest": WindowAndNewest}
