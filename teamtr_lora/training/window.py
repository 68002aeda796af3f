"""The rollouts that updates learn from again, each episode with its weight, also across a kill and a resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from teamtr_lora.algorithm.occupancy import weight_degeneracy
from teamtr_lora.runs.rollout_store import RolloutStore
from teamtr_lora.runs.run_state import RolloutRecord
from teamtr_lora.team import Episode

# A weight beyond this counts as this: one episode must not carry an update.
LARGEST_WEIGHT = 4.0


@dataclass
class PlayedEpisodes:
    """Episodes, and the log of how much likelier today's team is to play each of them than the team that did."""

    episodes: list[Episode]
    log_weight_E: np.ndarray

    @classmethod
    def fresh(cls, episodes: list[Episode]) -> PlayedEpisodes:
        """Today's team has played them."""
        return cls(episodes, np.zeros(len(episodes)))

    @property
    def effective_share(self) -> float:
        """The effective sample size of the weighted episodes, as a share of their number."""
        return weight_degeneracy(self.log_weight_E).ess

    def __getitem__(self, chosen_E: np.ndarray) -> PlayedEpisodes:
        return PlayedEpisodes(
            [e for e, chosen in zip(self.episodes, chosen_E, strict=True) if chosen], self.log_weight_E[chosen_E]
        )


@dataclass(frozen=True, kw_only=True)
class Material:
    """What one update is given: the newest rollout, and the earlier ones that it may learn from."""

    newest: PlayedEpisodes
    earlier: Sequence[PlayedEpisodes] = ()
    # of all episodes: later updates use it again, and need to know how much likelier this one makes it. None: none of them
    kept_E: np.ndarray | None = None

    @cached_property
    def episodes(self) -> list[Episode]:
        """All of them, the newest first; groups are numbered on from rollout to rollout."""
        found = list(self.newest.episodes)
        for part in self.earlier:
            first = 1 + max(episode.group for episode in found)
            found += [replace(episode, group=first + episode.group) for episode in part.episodes]
        return found

    def weighted_parts(self) -> list[tuple[PlayedEpisodes, np.ndarray]]:
        """The newest rollout and each earlier one, with the logs of their capped weights."""
        return [(part, np.minimum(part.log_weight_E, np.log(LARGEST_WEIGHT))) for part in (self.newest, *self.earlier)]

    def log_weights(self) -> np.ndarray:
        """Of all episodes, capped."""
        return np.concatenate([log_weight_E for _, log_weight_E in self.weighted_parts()])

    def reused_log_weights(self) -> np.ndarray:
        """Of the episodes that another team has played, not capped."""
        return np.concatenate(
            [np.zeros(0), *(part.log_weight_E for part in (self.newest, *self.earlier) if part.log_weight_E.any())]
        )

    def shift(self, log_ratio_E: np.ndarray) -> None:
        """An update has made each episode likelier by so much."""
        start = 0
        for part in (self.newest, *self.earlier):
            part.log_weight_E = part.log_weight_E + log_ratio_E[start : start + len(part.episodes)]
            start += len(part.episodes)


class EpisodeWindow:
    """Up to `room` rollouts, the oldest first."""

    def __init__(self, store: RolloutStore, room: int, *, writes: bool = True) -> None:
        self._store, self._room, self._writes = store, room, writes
        self._kept: list[tuple[RolloutRecord, PlayedEpisodes]] = []

    def resume(self, records: Sequence[RolloutRecord]) -> None:
        """Reads the rollouts that a checkpoint names."""
        self._kept = [
            (record, PlayedEpisodes(self._store.read(record.name, record.content_hash), np.array(record.log_weights)))
            for record in records
        ]

    def records(self) -> list[RolloutRecord]:
        """For the checkpoint."""
        return [replace(record, log_weights=played.log_weight_E.tolist()) for record, played in self._kept]

    def __iter__(self) -> Iterator[PlayedEpisodes]:
        return (played for _, played in self._kept)

    @property
    def newest(self) -> tuple[RolloutRecord, PlayedEpisodes]:
        return self._kept[-1]

    def drop_stale(self, least_share: float) -> None:
        """Removes the rollouts that have become too unlike what today's team would play."""
        self._kept = [kept for kept in self._kept if kept[1].effective_share >= least_share]

    def add(self, name: str, versions: dict[str, str], played: PlayedEpisodes) -> None:
        digest = self._store.write(name, played.episodes) if self._writes else ""
        record = RolloutRecord(name=name, content_hash=digest, versions=versions, log_weights=[])
        self._kept = [*self._kept, (record, played)][-self._room :]
