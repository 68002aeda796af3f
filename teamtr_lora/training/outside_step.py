"""A step that somebody else's trainer has taken, measured as the gate measures one of ours."""

from __future__ import annotations

from teamtr_lora.algorithm.advantage import message_discount
from teamtr_lora.algorithm.trust_region import GateReading, StepDecision
from teamtr_lora.algorithm.variants.chosen import Variants
from teamtr_lora.base.bank import Snapshot
from teamtr_lora.recipe import TeamTRConfig
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.team import Episode, agent_sequences
from teamtr_lora.training.gate import CandidateReading, gate_pass, read_candidate
from teamtr_lora.training.optimize import OptimizeReport
from teamtr_lora.training.scoring import Scorer, keep_current
from teamtr_lora.training.update import UpdateOutcome, episode_advantages
from teamtr_lora.training.window import Material, PlayedEpisodes


class OutsideStep:
    """Exact KL(before || after) of one agent's steps, on as many of a rollout's items as the gate would keep. The other trainer
    learns from all items, these too, so unlike the gate's this reading is in-sample."""

    def __init__(self, playable: PlayableTeam, config: TeamTRConfig, agent: str) -> None:
        self._playable, self._config, self._agent = playable, config, agent
        self.discount = message_discount(config.training.discount, playable.team.router.max_messages)
        self._scorer = Scorer.of(playable, config)
        self._before: Snapshot = {}

    def begin(self) -> None:
        """The agent is about to be changed."""
        self._before = self._playable.bank.snapshot(self._agent)

    def outcome(self, episodes: list[Episode], report: OptimizeReport) -> UpdateOutcome:
        """The agent has been changed, by learning from `episodes`, and the change is committed."""
        advantages = episode_advantages(episodes, self._agent, self._config.training, self.discount)
        reading = self._read(episodes, advantages.clipped_E.tolist())
        report.kl = reading.kl["exact"].mean
        whole = GateReading(1.0, reading.kl[self._config.trust_region.estimator], reading.gain)
        messages = [message for episode in episodes for message in episode.messages]
        return UpdateOutcome(
            decision="accepted",
            version=self._playable.bank.version(self._agent),
            delta=self._config.trust_region.delta,
            material=Material(newest=PlayedEpisodes(episodes)),
            advantages=advantages,
            messages=len(messages),
            trained_tokens=sum(len(message.token_ids) for message in messages),
            optimized=report,
            step=StepDecision(whole, [whole]),
            readings={1.0: reading},
        )

    def _read(self, episodes: list[Episode], advantage_E: list[float]) -> CandidateReading:
        bank, agent, scorer = self._playable.bank, self._agent, self._scorer
        kept = Variants.of(self._config).reuse.judging_items(self._config.rollout.items_per_stage)
        judging = [sequence for sequence in agent_sequences(episodes, agent) if sequence.episode.group < kept]
        batch = scorer.batch(judging, advantage_E)
        after = bank.snapshot(agent)
        with gate_pass(scorer):
            try:
                bank.restore(agent, self._before)
                current = keep_current(scorer, batch)
            finally:
                bank.restore(agent, after)
            return read_candidate(scorer, batch, current, self._config, self.discount)
