"""The rollouts that updates learn from again, each episode with its weight, also across a kill and a resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from teamtr_lora.algorithm.occupancy import weight_degeneracy
from teamtr_lora.runs.rollout_store import RolloutStore
from teamtr_lora.runs.run_state import RolloutRecord
from teamtr_lora.team import Episode

# A weight beyond these counts as these: one episode must not carry an update, and vanishing weights leave means over nothing.
SMALLEST_WEIGHT, LARGEST_WEIGHT = 1e-30, 4.0


@dataclass
class PlayedEpisodes:
    """Episodes, and the log of how much likelier each agent that has changed since is to say what it said there."""

    episodes: list[Episode]
    log_ratio_E: dict[str, np.ndarray] = field(default_factory=dict)  # none: today's team has played them

    @property
    def episode_log_weights(self) -> np.ndarray:
        """The log of how much likelier today's team is to play each episode. Added up in one order, whatever order agents were
        updated in: a checkpoint sorts them, and a resumed run must round as the one that was not interrupted."""
        return sum((self.log_ratio_E[agent] for agent in sorted(self.log_ratio_E)), np.zeros(len(self.episodes)))

    def message_and_worth_log_weights(self, agent: str) -> tuple[np.ndarray, np.ndarray]:
        """Of each episode: what `agent`'s messages in it are weighted by, and what their worth is still to be weighted by beside
        the others; both within limits. A message counts with its whole episode, and one that is recombined by itself: what the
        others said then counts in its worth."""
        whole_E, apart_E = self.episode_log_weights, np.array([agent in episode.beside for episode in self.episodes], bool)
        own_E = np.where(apart_E, self.log_ratio_E.get(agent, 0.0), whole_E)
        limits = np.log(SMALLEST_WEIGHT), np.log(LARGEST_WEIGHT)
        return np.clip(own_E, *limits), np.clip(whole_E - own_E, *limits)

    @property
    def effective_share(self) -> float:
        """The effective sample size of the weighted episodes, as a share of their number."""
        return weight_degeneracy(self.episode_log_weights).ess

    def __getitem__(self, chosen_E: np.ndarray) -> PlayedEpisodes:
        return PlayedEpisodes(
            [e for e, chosen in zip(self.episodes, chosen_E, strict=True) if chosen],
            {agent: log_E[chosen_E] for agent, log_E in self.log_ratio_E.items()},
        )


@dataclass(frozen=True, kw_only=True)
class Material:
    """What one update is given: the newest rollout, and the earlier ones that it may learn from."""

    newest: PlayedEpisodes
    earlier: Sequence[PlayedEpisodes] = ()
    # of all episodes: later updates use it again, and need to know how much likelier this one makes it. None: none of them
    reused_E: np.ndarray | None = None

    @cached_property
    def episodes(self) -> list[Episode]:
        """All of them, the newest first; groups are numbered on from rollout to rollout."""
        found = list(self.newest.episodes)
        for part in self.earlier:
            first = 1 + max(episode.group for episode in found)
            found += [replace(episode, group=first + episode.group) for episode in part.episodes]
        return found

    @property
    def parts(self) -> tuple[PlayedEpisodes, ...]:
        """The newest rollout, then each earlier one."""
        return (self.newest, *self.earlier)

    def message_log_weights(self, agent: str) -> np.ndarray:
        """Of the messages of `agent` in all episodes, capped."""
        return np.concatenate([part.message_and_worth_log_weights(agent)[0] for part in self.parts])

    def reused_episode_log_weights(self) -> np.ndarray:
        """Of the episodes that another team has played, not capped."""
        return np.concatenate([np.zeros(0), *(part.episode_log_weights for part in self.parts if part.episode_log_weights.any())])

    def shift(self, agent: str, log_ratio_E: np.ndarray) -> None:
        """An update of `agent` has made each episode likelier by so much."""
        start = 0
        for part in self.parts:
            part.log_ratio_E[agent] = part.log_ratio_E.get(agent, 0.0) + log_ratio_E[start : start + len(part.episodes)]
            start += len(part.episodes)


class EpisodeWindow:
    """Up to `room` rollouts, the oldest first."""

    def __init__(self, store: RolloutStore, room: int, *, writes: bool = True) -> None:
        self._store, self._room, self._writes = store, room, writes
        self._rollouts: list[tuple[RolloutRecord, PlayedEpisodes]] = []

    def resume(self, records: Sequence[RolloutRecord]) -> None:
        """Reads the rollouts that a checkpoint names."""
        self._rollouts = [
            (record, PlayedEpisodes(self._store.read(record.name, record.content_hash), _arrays(record.log_ratios)))
            for record in records
        ]

    def records(self) -> list[RolloutRecord]:
        """For the checkpoint."""
        return [
            replace(record, log_ratios={agent: log_E.tolist() for agent, log_E in played.log_ratio_E.items()})
            for record, played in self._rollouts
        ]

    def __iter__(self) -> Iterator[PlayedEpisodes]:
        return (played for _, played in self._rollouts)

    @property
    def newest(self) -> tuple[RolloutRecord, PlayedEpisodes]:
        return self._rollouts[-1]

    def drop_stale(self, least_share: float) -> None:
        """Removes the rollouts that have become too unlike what today's team would play."""
        self._rollouts = [own for own in self._rollouts if own[1].effective_share >= least_share]

    def add(self, name: str, versions: dict[str, str], played: PlayedEpisodes) -> None:
        digest = self._store.write(name, played.episodes) if self._writes else ""
        record = RolloutRecord(name=name, content_hash=digest, versions=versions, log_ratios={})
        self._rollouts = [*self._rollouts, (record, played)][-self._room :]


def _arrays(log_ratios: dict[str, list[float]]) -> dict[str, np.ndarray]:
    return {agent: np.array(values) for agent, values in log_ratios.items()}
