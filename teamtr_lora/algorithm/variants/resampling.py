"""Resampling (alg:teamtr): before which updates of a stage the team is sampled again.

TeamTR samples the team as it is before every update. The paper compares this with reusing the stage's first episodes, whose
occupancy becomes staler with every update (thm:stage_stale), and with correcting for it by trajectory weights (app:exp:isdeg).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol


class ResamplingSettings(Protocol):
    @property
    def resample_every(self) -> int: ...


class Resampling(ABC):
    """Updates of a stage are counted from 0."""

    words: ClassVar[str]  # for the description of the recipe's key
    weighted: ClassVar[bool] = False  # episodes used again are weighted by how much likelier the team has become to play them
    always_fresh: ClassVar[bool] = False  # every update has a rollout of its own

    def __init__(self, settings: ResamplingSettings) -> None:
        self.settings = settings

    @abstractmethod
    def sampled_before(self, place: int) -> int:
        """The update before which the episodes that update `place` learns from are sampled."""

    def rollouts(self, agents: int) -> list[int]:
        """The updates of a stage before which the team is sampled."""
        return sorted({self.sampled_before(place) for place in range(agents)})


class EveryUpdate(Resampling):
    """TeamTR: fresh episodes of the current team for every update, so that thm:stage has no staleness term."""

    words = "before every update (TeamTR)"
    always_fresh = True

    def sampled_before(self, place: int) -> int:
        return place


class EveryK(Resampling):
    """In between: `resample_every` updates share one rollout."""

    words = "before every resample_every-th update"

    def sampled_before(self, place: int) -> int:
        return place - place % self.settings.resample_every


class Never(Resampling):
    """Naive sequential training, or a joint update: all agents learn from the stage's first episodes (thm:stage_stale)."""

    words = "only before a stage's first update: naive sequential, or joint"

    def sampled_before(self, place: int) -> int:
        return 0


class Importance(Never):
    """The stage's first episodes throughout, each weighted by its trajectory ratio; the weights degenerate (app:exp:isdeg)."""

    words = "as never, with each episode weighted by how much likelier the team has become to play it"
    weighted = True


RESAMPLING: dict[str, type[Resampling]] = {
    "every_update": EveryUpdate,
    "every_k": EveryK,
    "never": Never,
    "importance": Importance,
}
