"""The episodes that a stage's updates learn from: which items, played when, by which team, and used again or not."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice

import numpy as np

from teamtr_lora.algorithm.variants.chosen import Variants
from teamtr_lora.rollout.collector import PlayPlan
from teamtr_lora.runs.run_state import RunState
from teamtr_lora.tasks import DataOrder, Item
from teamtr_lora.team import Episode
from teamtr_lora.training.run_context import RunContext
from teamtr_lora.training.update import UpdateOutcome, episode_advantages
from teamtr_lora.training.window import EpisodeWindow, Material, PlayedEpisodes

LOOKED_AT = 8  # items for each that a probe wants or must not take
LEAST_PROBED = 8  # with fewer items than this that a stage leaves over, a probe also takes the stage's own


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """`versions` are the team that played it."""

    episodes: list[Episode]
    versions: dict[str, str]
    seconds: float
    fresh: bool = True  # sampled for this update, not for an earlier one of the stage


class StageRollouts:
    def __init__(self, context: RunContext, variants: Variants) -> None:
        self._context, self._variants = context, variants
        self._order = DataOrder(context.task.items("train"), context.config.seed)
        self._fresh, agents = variants.resampling.always_fresh, len(context.agents)
        self._room = variants.reuse.window(agents) if self._fresh else int(agents > 1)
        self.window = EpisodeWindow(context.run_dir.rollouts, self._room, writes=context.playable.ranks.first)

    def items(self, state: RunState) -> list[Item]:
        """The stage's items; every rollout of the stage plays the same ones anew, or its share of them."""
        return self._order.take(state.cursor, self._context.config.rollout.items_per_stage)

    def roll_out(self, items: list[Item], stage: int, place: int) -> Rollout:
        """Fresh episodes, or the ones sampled earlier in the stage where the recipe says to use them again. `place` counts the
        stage's updates from 0."""
        if self._variants.resampling.sampled_before(place) == place:
            return self._play(items, stage, place)
        record, played = self.window.newest
        return Rollout(episodes=played.episodes, versions=record.versions, seconds=0.0, fresh=False)

    def _play(self, items: list[Item], stage: int, place: int) -> Rollout:
        started = time.monotonic()
        playable, config, events = self._context.playable, self._context.config, self._context.events
        starts = self._variants.resampling.rollouts(len(self._context.agents))
        own = self._variants.matched.share(items, starts.index(place), len(starts))
        plan = PlayPlan.of(config.rollout, own, f"{config.seed}/stage {stage}/update {place}")
        versions = playable.versions()
        episodes = playable.play(self._context.task, plan, lambda d, n, t: events.progress("rollout", d, n, t))
        return Rollout(episodes=episodes, versions=versions, seconds=time.monotonic() - started)

    def material(self, rollout: Rollout, place: int, discount: float) -> Material:
        """What an update is given: the rollout, and earlier ones that it may learn from too."""
        newest = PlayedEpisodes(rollout.episodes) if rollout.fresh else self.window.newest[1]
        if not self._fresh:  # after a stage's last update its episodes are done with
            again = self._variants.resampling.weighted and place + 1 < len(self._context.agents)
            return Material(newest=newest, reused_E=np.ones(len(newest.episodes), bool) if again else None)
        if not self._room:
            return Material(newest=newest)
        self.window.drop_stale(self._context.config.training.least_ess)
        earlier = list(self.window)
        useful_E = [self._teaches(newest.episodes, discount), *(np.ones(len(part.episodes), bool) for part in earlier)]
        return Material(newest=newest, earlier=earlier, reused_E=np.concatenate(useful_E))

    def _teaches(self, episodes: list[Episode], discount: float) -> np.ndarray:
        """Whether an episode's group differs in return, for any agent, or will when the others are weighted beside whom its
        messages are credited: the rest have no gradient, now or later."""
        training, agents = self._context.config.training, self._context.agents
        asked = agents if any(episode.credit for episode in episodes) else agents[:1]
        group_E = np.array([episode.group for episode in episodes])
        useful_E = np.array([any(max(met) > min(met) for met in episode.beside.values()) for episode in episodes])
        for agent in asked:
            useful_E |= episode_advantages(episodes, agent, training, discount).unclipped_E.numpy() != 0
        return np.isin(group_E, group_E[useful_E])

    def keep(self, name: str, rollout: Rollout, outcome: UpdateOutcome) -> None:
        """After an update: how likely its episodes have become, and the newest of them for the updates to come."""
        material = outcome.material
        if outcome.log_ratio_E is not None:
            material.shift(outcome.version.agent, outcome.log_ratio_E)
        if rollout.fresh and self._room:
            reused_E = material.reused_E
            chosen = material.newest if reused_E is None else material.newest[reused_E[: len(rollout.episodes)]]
            if chosen.episodes:
                self.window.add(name, rollout.versions, chosen)

    def probe_items(self, state: RunState) -> list[Item]:
        """The next stage's, where the split has enough items: different ones, and none that this stage learns from."""
        config = self._context.config
        count, next_stage = config.diagnostics.probe_items, state.cursor + config.rollout.items_per_stage
        learned = {item.id for item in self.items(state)}
        ahead: dict[str, Item] = {}
        unseen: dict[str, Item] = {}
        most = LOOKED_AT * (count + len(learned))  # an endless split may have few different items
        for item in islice(self._order.after(next_stage), most):
            ahead[item.id] = item
            unseen |= {item.id: item} if item.id not in learned else {}
            if len(unseen) == count:
                break
        return list((unseen if len(unseen) >= min(count, LEAST_PROBED) else ahead).values())[:count]
