"""The episodes that a stage's updates learn from: which items, played when, by which team, and used again or not."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from teamtr_lora.algorithm.variants.chosen import Variants
from teamtr_lora.base.versions import read_version
from teamtr_lora.rollout.collector import PlayPlan, check_prompts
from teamtr_lora.rollout.playable import versions_in_place
from teamtr_lora.runs.run_state import RunState
from teamtr_lora.tasks import DataOrder, Item, Task
from teamtr_lora.team import Episode
from teamtr_lora.training.importance import episode_log_weights
from teamtr_lora.training.run_context import RunContext
from teamtr_lora.training.scoring import Scorer

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
        self._newest: Rollout | None = None
        self._check_items()

    def _check_items(self) -> None:
        task, config, team = self._context.task, self._context.config, self._context.playable.team
        count, size = config.rollout.items_per_stage, task.items("train").size
        self._order.check_stage(count)
        if size is not None and type(task).open is Task.open:  # prompts are the rows of a dataset, just as they are
            check_prompts(team, self._order.take(0, min(size, config.training.stages * count)))

    def items(self, state: RunState) -> list[Item]:
        """The stage's items; every rollout of the stage plays the same ones anew, or its share of them."""
        return self._order.take(state.cursor, self._context.config.rollout.items_per_stage)

    def roll_out(self, state: RunState, items: list[Item], stage: int, place: int) -> Rollout:
        """Fresh episodes, or the ones sampled earlier in the stage where the recipe says to use them again. `place` counts the
        stage's updates from 0."""
        sampled_at = self._variants.resampling.sampled_before(place)
        if sampled_at == place:
            state.rollout_versions = self._context.playable.adapter_versions()
            self._newest = self._play(items, stage, place)
            return self._newest
        if self._newest is None:  # the run was resumed in between: the same seeds and versions give the same episodes again
            with versions_in_place(self._context.playable, state.rollout_versions, self._context.run_dir.adapters):
                self._newest = self._play(items, stage, sampled_at)
        return replace(self._newest, seconds=0.0, fresh=False)

    def _play(self, items: list[Item], stage: int, place: int) -> Rollout:
        started = time.monotonic()
        playable, config, events = self._context.playable, self._context.config, self._context.events
        starts = self._variants.resampling.rollouts(len(self._context.agents))
        plan = PlayPlan(
            items=self._variants.matched.share(items, starts.index(place), len(starts)),
            episodes_per_item=config.rollout.episodes_per_item,
            temperature=config.rollout.temperature,
            max_message_tokens=config.rollout.max_message_tokens,
            purpose=f"{config.seed}/stage {stage}/update {place}",
        )
        versions = playable.versions()
        episodes = playable.play(self._context.task, plan, lambda d, n, t: events.progress("rollout", d, n, t))
        return Rollout(episodes=episodes, versions=versions, seconds=time.monotonic() - started)

    def weigh(self, state: RunState, rollout: Rollout, scorer: Scorer) -> np.ndarray | None:
        """The logs of the weights of episodes that are used again, where the recipe weights them."""

        def ratios() -> np.ndarray:
            bank, sampled = self._context.playable.bank, state.rollout_versions
            changed = [agent for agent in self._context.agents if bank.version(agent).name != rollout.versions[agent]]
            before = {agent: read_version(self._context.run_dir.adapters, sampled[agent]) for agent in changed}
            limit = self._context.config.training.tokens_per_microbatch
            return episode_log_weights(scorer, bank, rollout.episodes, before, tokens_per_microbatch=limit)

        return None if rollout.fresh else self._variants.resampling.weights(ratios)

    def probe_items(self, state: RunState) -> list[Item]:
        """The next stage's, where the split has enough items: different ones, and none that this stage learns from."""
        config = self._context.config
        count, next_stage = config.diagnostics.probe_items, state.cursor + config.rollout.items_per_stage
        learned = {item.id for item in self.items(state)}
        ahead: dict[str, Item] = {}
        unseen: dict[str, Item] = {}
        for item in self._order.after(next_stage):
            ahead[item.id] = item
            unseen |= {item.id: item} if item.id not in learned else {}
            if len(unseen) == count:
                break
        return list((unseen if len(unseen) >= min(count, LEAST_PROBED) else ahead).values())[:count]
