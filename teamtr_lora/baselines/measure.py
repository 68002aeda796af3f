"""How far TRL moved the agent in one update, in the same units as the gate of `train`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from teamtr_lora.algorithm.advantage import GroupAdvantages
from teamtr_lora.algorithm.trust_region import GateReading, StepDecision
from teamtr_lora.base.bank import Snapshot
from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.team import Episode, agent_sequences
from teamtr_lora.training.gate import CandidateReading, gate_pass, read_candidate
from teamtr_lora.training.optimize import OptimizeReport
from teamtr_lora.training.scoring import Scorer, keep_current, message_batch
from teamtr_lora.training.update import UpdateOutcome, episode_advantages


class StepMeter:
    """Exact KL(before || after) on as many of the rollout's items as the gate would keep. TRL learns from all items, these
    too: unlike the gate's, this reading is in-sample."""

    def __init__(self, playable: PlayableTeam, recipe: Recipe, agent: str) -> None:
        self._playable, self._recipe, self._agent = playable, recipe, agent
        self._discount = recipe.training.discount_for(playable.team.router.max_messages)
        self._scorer = Scorer.of(playable, recipe)
        self.episodes: list[Episode] = []
        self._before: Snapshot = {}

    def begin(self, episodes: list[Episode]) -> None:
        self.episodes, self._before = episodes, self._playable.bank.snapshot(self._agent)

    def check_finite(self) -> None:
        if not all(bool(torch.isfinite(tensor).all()) for tensor in self._playable.bank.tensors(self._agent).values()):
            raise UserError(
                f"baseline: TRL's update made the adapter of {self._agent!r} infinite or NaN; lower training.learning_rate = "
                f"{self._recipe.training.learning_rate:g} (the last good version is stored)"
            )

    def outcome(self, version: AdapterVersion, logs: Mapping[str, float], steps: int) -> UpdateOutcome:
        advantages = episode_advantages(self.episodes, self._recipe.training, self._discount)  # TRL's own are in no row
        reading, messages, tokens = self._read(advantages)
        gate = GateReading(1.0, reading.kl[self._recipe.trust_region.estimator], reading.gain)
        report = OptimizeReport(
            steps=steps,
            kl=reading.kl["exact"].mean,
            clip_rate=float(logs.get("clip_ratio/region_mean") or 0.0),
            gradient_norm=float(logs.get("grad_norm") or 0.0),
        )
        return UpdateOutcome(
            decision="accepted",
            version=version,
            delta=self._recipe.trust_region.delta,
            advantages=advantages,
            optimized=report,
            step=StepDecision(gate, [gate]),
            readings={1.0: reading},
            gap=None,
            terms=None,
            seconds={},
            messages=messages,
            trained_tokens=tokens,
        )

    def _read(self, advantages: GroupAdvantages) -> tuple[CandidateReading, int, int]:
        recipe, bank, agent = self._recipe, self._playable.bank, self._agent
        kept = recipe.trust_region.heldout_items(recipe.rollout.items_per_stage)
        chosen = [episode for episode in self.episodes if episode.group < kept]
        batch = message_batch(
            agent_sequences(chosen, agent),
            dict(zip(map(id, self.episodes), advantages.clipped_E.tolist(), strict=True)),
            {id(episode): i for i, episode in enumerate(self.episodes)},
            tokens_per_microbatch=recipe.training.tokens_per_microbatch,
            mask_truncated=False,
            device=self._scorer.device,
            pack_width=self._scorer.pack_width,
        )
        after = bank.snapshot(agent)
        with gate_pass(self._scorer):
            try:
                bank.restore(agent, self._before)
                current = keep_current(self._scorer, batch)
            finally:
                bank.restore(agent, after)
            reading = read_candidate(self._scorer, batch, current, recipe, self._discount)
        messages = [message for episode in self.episodes for message in episode.messages]
        return reading, len(messages), sum(len(message.token_ids) for message in messages)
