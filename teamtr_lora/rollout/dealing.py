"""Which process plays which items of a plan: whole groups, weighted by what their messages cost before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from teamtr_lora.common.ranks import Ranks, deal
from teamtr_lora.rollout.collector import PlayPlan, Progress
from teamtr_lora.team import Episode

# Episodes of a lot at most, where lots have to be the same whatever the number of processes. The embedded base on one CPU thread
# needs 14 ms an episode in batches of 256, 17 ms in batches of 128 and 22 ms in batches of 64.
LOT_EPISODES = 128

PlayPart = Callable[[PlayPlan, Progress | None], list[Episode]]


@dataclass
class Dealer:
    """Deals plans out to the ranks.

    Rounding depends on what is computed together. With `fixed_lots` a plan is cut into the same lots for any number of ranks,
    and each lot is played alone, so that the episodes are the same bit for bit. Otherwise a rank plays its share at once.
    """

    ranks: Ranks
    fixed_lots: bool
    alone: bool = False  # the first rank plays everything: the engine is elsewhere, and does not get faster by more clients
    _tokens: dict[str, float] = field(default_factory=dict)  # of an episode, by item: what it took the last time

    def play(self, plan: PlayPlan, part: PlayPart, progress: Progress | None) -> list[Episode]:
        """All episodes of the plan, in its order, on every rank. `part` plays a plan in this process."""
        lots = self._lots(plan)
        owners = deal(self._costs(plan, lots), 1 if self.alone else self.ranks.size)
        mine = [lot for lot, owner in zip(lots, owners, strict=True) if owner == self.ranks.rank]
        if mine and not self.fixed_lots:
            mine = [sorted(place for lot in mine for place in lot)]
        own, total = sum(map(len, mine)), len(plan.items) * plan.episodes_per_item
        played: dict[int, list[Episode]] = {}  # by place in the plan
        tokens = 0
        for lot in mine:
            told = _scaled(progress, len(played) * plan.episodes_per_item, tokens, total, own * plan.episodes_per_item)
            whole = len(lot) == len(plan.items)
            found = part(plan if whole else _part_of(plan, lot), told)
            tokens += sum(episode.tokens for episode in found)
            played |= {place: found[i * plan.episodes_per_item :][: plan.episodes_per_item] for i, place in enumerate(lot)}
        if self.ranks.size > 1:  # items may be large, and everybody has them
            sent = {place: [replace(e, item=None) for e in episodes] for place, episodes in played.items()}
            for other in self.ranks.gather(sent):
                for place, episodes in other.items():
                    played.setdefault(place, [replace(e, item=plan.items[place]) for e in episodes])
        for place, item in enumerate(plan.items):
            self._tokens[item.id] = sum(episode.tokens for episode in played[place]) / plan.episodes_per_item
        return [episode for place in range(len(plan.items)) for episode in played[place]]

    def _lots(self, plan: PlayPlan) -> list[list[int]]:
        """Places in the plan, a lot a list."""
        items = len(plan.items)
        most = max(1, LOT_EPISODES // plan.episodes_per_item) if self.fixed_lots else 1
        count = -(-items // most)  # as even as they can be, so that no rank has a long one
        return [list(range(items * lot // count, items * (lot + 1) // count)) for lot in range(count)]

    def _costs(self, plan: PlayPlan, lots: list[list[int]]) -> list[float]:
        """Tokens of each lot, as far as they are known; items that were never played count as the mean of the others."""
        known = [self._tokens[item.id] for item in plan.items if item.id in self._tokens]
        usual = sum(known) / len(known) if known else 1.0
        return [sum(self._tokens.get(plan.items[place].id, usual) for place in lot) for lot in lots]


def _part_of(plan: PlayPlan, lot: list[int]) -> PlayPlan:
    return replace(plan, items=[plan.items[place] for place in lot], groups=[plan.group(place) for place in lot])


def _scaled(progress: Progress | None, done: int, tokens: int, total: int, own: int) -> Progress | None:
    """One rank's progress as that of the whole plan; `done` and `tokens` come from its earlier lots."""
    if progress is None:
        return None
    return lambda now, _, more: progress((done + now) * total // own, total, (tokens + more) * total // own)
