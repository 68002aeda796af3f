"""Budgets (tab:compute-lite): whether variants are compared at the same number of episodes for each update, or for each stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol, TypeVar

from teamtr_lora.algorithm.variants.resampling import RESAMPLING

Item = TypeVar("Item")


class Matched(ABC):
    words: ClassVar[str]
    shared: ClassVar[bool]  # whether a stage's rollouts share its episodes

    @abstractmethod
    def count(self, items_per_stage: int, rollouts: int) -> int:
        """How many items each of a stage's rollouts plays."""

    @abstractmethod
    def share(self, items: Sequence[Item], nth: int, rollouts: int) -> list[Item]:
        """The items of a stage's rollout number `nth`, counted from 0."""


class MatchedUpdate(Matched):
    words = "the episodes that each update learns from, so every rollout of a stage plays all its items"
    shared = False

    def count(self, items_per_stage: int, rollouts: int) -> int:
        return items_per_stage

    def share(self, items: Sequence[Item], nth: int, rollouts: int) -> list[Item]:
        return list(items)


class MatchedStage(Matched):
    words = "the episodes of a whole stage, whose items are shared out evenly among its rollouts"
    shared = True

    def count(self, items_per_stage: int, rollouts: int) -> int:
        return items_per_stage // rollouts

    def share(self, items: Sequence[Item], nth: int, rollouts: int) -> list[Item]:
        count = self.count(len(items), rollouts)
        return list(items[nth * count : (nth + 1) * count])


MATCHED: dict[str, type[Matched]] = {"update": MatchedUpdate, "stage": MatchedStage}


class BudgetSettings(Protocol):
    @property
    def resampling(self) -> str: ...
    @property
    def resample_every(self) -> int: ...
    @property
    def matched(self) -> str: ...


def stage_budget(settings: BudgetSettings, items_per_stage: int, agents: int) -> tuple[int, int]:
    """(rollouts of a stage, items that each of them plays)."""
    rollouts = len(RESAMPLING[settings.resampling](settings).rollouts(agents))
    return rollouts, MATCHED[settings.matched]().count(items_per_stage, rollouts)
