"""Probes: how an update looks on extra episodes, played once by the team that began the stage and once by the team as it is.

Nobody learns from these episodes, so nothing measured on them is fitted. Both teams play the same items with the same random
numbers, so that what is common to both cancels in their difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np
import torch

from teamtr_lora.algorithm.certificate import centred_surrogate, leave_one_out
from teamtr_lora.algorithm.occupancy import Excess, stale_gap, token_shift, trajectory_log_weights, weight_degeneracy
from teamtr_lora.algorithm.surrogate import LARGEST_LOG_RATIO
from teamtr_lora.algorithm.variants.chosen import Variants
from teamtr_lora.base.bank import Snapshot
from teamtr_lora.base.versions import AdapterVersion, read_version
from teamtr_lora.recipe import TeamTRConfig
from teamtr_lora.rollout.collector import PlayPlan
from teamtr_lora.runs.diagnostic_rows import ExcessReading, FisherReading, GapReading, ProbeReading, TokenShiftReading
from teamtr_lora.tasks import Item
from teamtr_lora.team import Episode, agent_sequences
from teamtr_lora.training.batches import MessageBatch
from teamtr_lora.training.fisher import fisher_reading
from teamtr_lora.training.gate import gate_pass
from teamtr_lora.training.run_context import RunContext
from teamtr_lora.training.scoring import message_log_ratios
from teamtr_lora.training.update import AgentUpdater, UpdateOutcome
from teamtr_lora.training.update_diagnostics import contexts, coupled_difference, shift_between

SHIFT_TOKENS = 128  # token positions behind a token shift: whole vocabularies of them are kept at once
FAR = 10.0  # times delta: the KL of the out-of-region step that is shown


class StageProbe:
    """The probe of one stage, which the team of `versions` began. `start`: the probe's episodes that it played."""

    def __init__(
        self,
        context: RunContext,
        updater: AgentUpdater,
        plan: PlayPlan,
        versions: Mapping[str, AdapterVersion],
        start: list[Episode],
    ) -> None:
        self._playable, self._task, self._config = context.playable, context.task, context.config
        self._adapters, self._scorer, self._discount = context.run_dir.adapters, updater.scorer, updater.discount
        self._publishing = Variants.of(context.config).publishing
        self._plan, self._versions, self._start = plan, versions, start
        self._log_weights: dict[str, np.ndarray] = {}  # by agent that has changed since: its part of each start episode's weight
        self._now: list[Episode] = []
        self._before: Snapshot = {}
        self._played = 0

    def before_update(self, agent: str, update: int) -> None:
        """Plays the team as it is, and remembers the agent as it is."""
        if update == 0:
            self._now, self._played = self._start, len(self._start)
        else:
            self._publishing.catch_up(self._playable)
            self._now = self._playable.play(self._task, self._plan)
            self._played = len(self._now)
        self._before = self._playable.bank.snapshot(agent)

    def after_update(self, agent: str, outcome: UpdateOutcome, seed: int) -> ProbeReading:
        """Measures the update of `agent` that has just been made. Call where forward passes may run."""
        weights = self._weights(agent)
        first = not self._changed(agent)
        gap = self._gap(agent, seed) if outcome.accepted else None
        at_once = self._playable.team.router.round_messages
        start, now = (contexts(played, self._task, at_once) for played in (self._start, self._now))
        shift = shift_between(start, now, seed) or Excess(0.0, 0.0)
        far = first and outcome.accepted and self._config.diagnostics.token_shift_ranks > 0
        return ProbeReading(
            episodes=self._played,
            tokens=sum(e.tokens for e in self._now) if self._played else 0,
            gap=gap,
            context_shift=ExcessReading(
                value=shift.value, null=shift.null, coupled=coupled_difference(self._start, self._now, self._task, at_once)
            ),
            weights={name: value if math.isfinite(value) else 0.0 for name, value in asdict(weight_degeneracy(weights)).items()},
            token_shift=self._token_shift(agent, outcome) if far else None,
            fisher=self._fisher(agent, outcome, seed),
        )

    def _changed(self, updated: str) -> list[str]:
        """Agents updated in this stage before `updated`, in the team's order."""
        bank = self._playable.bank
        return [a for a in self._playable.team.names if a != updated and bank.version(a).name != self._versions[a].name]

    def _weights(self, updated: str) -> np.ndarray:
        """log weight of every start episode, from the stage's first team to the team before this update."""
        total_E = np.zeros(len(self._start))
        for agent in self._changed(updated):
            if agent not in self._log_weights:  # updated before the run was resumed
                before = read_version(self._adapters, self._versions[agent])
                self._log_weights[agent] = self._ratios(agent, self._start, before)[1]
            total_E += self._log_weights[agent]
        return total_E

    def _ratios(self, agent: str, episodes: list[Episode], before: Snapshot) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """Log ratios of the agent's messages with their episodes, and summed by episode."""
        bank, batch = self._playable.bank, self._scorer.batch(agent_sequences(episodes, agent))
        bank.activate(agent)
        with gate_pass(self._scorer):
            log_M, episode_M = message_log_ratios(self._scorer, bank, agent, batch, before), batch.episode_M.numpy()
        return (log_M, episode_M), trajectory_log_weights(log_M, episode_M, len(episodes))

    def _gap(self, agent: str, seed: int) -> GapReading:
        """Gap_i of the step just taken, in undiscounted raw reward."""
        sides: list[np.ndarray] = []
        for episodes in (self._start, self._now):
            ratios, by_episode = self._ratios(agent, episodes, self._before)
            if episodes is self._start:
                self._log_weights[agent] = by_episode
            sides.append(surrogate_by_group(*ratios, episodes))
            if self._now is self._start:
                sides.append(sides[0])
                break
        stale_G, fresh_G = sides
        found = stale_gap(stale_G, fresh_G, seed=seed)
        return GapReading(**asdict(found), stale=float(stale_G.mean()), fresh=float(fresh_G.mean()))

    def _token_shift(self, agent: str, outcome: UpdateOutcome) -> dict[str, TokenShiftReading]:
        bank, ranks = self._playable.bank, self._config.diagnostics.token_shift_ranks
        assert outcome.accepted_reading is not None
        kl = outcome.accepted_reading.kl["exact"].mean
        if not 0 < kl < math.inf:
            return {}
        far, after = math.sqrt(FAR * outcome.delta / kl), bank.snapshot(agent)
        batch = self._few_messages(agent)
        if not batch.messages:
            return {}
        bank.activate(agent)
        found = {}
        with gate_pass(self._scorer):
            try:
                rows = {}
                for step in (0.0, 1.0, far):
                    bank.interpolate(agent, self._before, after, step)
                    hidden_ND = torch.cat([self._scorer.hidden(part) for part in batch.microbatches])[:SHIFT_TOKENS]
                    rows[step] = self._scorer.log_probabilities(hidden_ND).cpu().numpy()
            finally:
                bank.restore(agent, after)
        for name, step in (("in_region", 1.0), ("out_of_region", far)):
            found[name] = TokenShiftReading(step=step, **asdict(token_shift(rows[0.0], rows[step], ranks)))
        return found

    def _few_messages(self, agent: str) -> MessageBatch:
        chosen: list[Episode] = []
        tokens = 0
        for episode in self._now:
            spoken = sum(len(m.token_ids) for m in episode.messages if m.agent == agent)
            if spoken and tokens < SHIFT_TOKENS:
                chosen.append(episode)
                tokens += spoken
        return self._scorer.batch(agent_sequences(chosen, agent))

    def _fisher(self, agent: str, outcome: UpdateOutcome, seed: int) -> FisherReading | None:
        messages = self._config.diagnostics.fisher_messages
        if not messages or outcome.accepted_reading is None:
            return None
        return fisher_reading(
            self._scorer,
            self._playable.bank,
            agent,
            self._before,
            self._now,
            messages=messages,
            discount=self._discount,
            measured_kl=outcome.accepted_reading.message_sum_kl,
            seed=seed,
        )


def surrogate_by_group(log_ratio_M: np.ndarray, episode_M: np.ndarray, episodes: list[Episode]) -> np.ndarray:
    """The centred surrogate of each group of episodes, in its order: sum (w - 1) (R - the others' mean), undiscounted."""
    group_E = np.array([episode.group for episode in episodes])
    advantage_E = leave_one_out([episode.reward for episode in episodes], group_E)
    terms_E = centred_surrogate(np.minimum(log_ratio_M, LARGEST_LOG_RATIO), episode_M, advantage_E)
    _, index_E = np.unique(group_E, return_inverse=True)
    return np.bincount(index_E, weights=terms_E) / np.bincount(index_E)


def probe_plan(config: TeamTRConfig, items: list[Item], stage: int) -> PlayPlan:
    return PlayPlan.of(config.rollout, items, f"{config.seed}/probe/stage {stage}", config.diagnostics.probe_episodes_per_item)
