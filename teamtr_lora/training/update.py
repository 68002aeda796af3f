"""One agent's update, from top to bottom: advantages, division of the episodes, optimization, judgement, accept or put back.

It is given the `Material` of window.py, and goes on in batches.py (episodes to tensors), scoring.py (forward passes), optimize.py
(the steps), gate.py (the judgement) and dials.py (what it says for the agent's next update).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from teamtr_lora.algorithm.advantage import GroupAdvantages, group_advantages, message_discount
from teamtr_lora.algorithm.trust_region import StepDecision
from teamtr_lora.algorithm.variants.chosen import Variants
from teamtr_lora.algorithm.variants.reduction import REDUCTIONS
from teamtr_lora.base.bank import Snapshot
from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.recipe import TeamTRConfig, TrainingSection
from teamtr_lora.rollout.credit import recredited
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.runs.checkpoint import Optimizers
from teamtr_lora.runs.run_state import Dials, RunState
from teamtr_lora.team import Episode, TokenSequence, agent_sequences
from teamtr_lora.training.batches import MessageBatch, first_of_groups, judging_weights
from teamtr_lora.training.dials import after_update, in_the_next_stage
from teamtr_lora.training.gate import CandidateReading, Judge, Judging
from teamtr_lora.training.optimize import InSample, Learner, Minibatch, OptimizeReport, measure_in_sample, optimize
from teamtr_lora.training.optimizers import build_loss_scaler, build_optimizer, restore_state
from teamtr_lora.training.phase_clock import PhaseClock
from teamtr_lora.training.scoring import Scorer, keep_current, message_log_ratios, sampler_gap, weight_by_sampler
from teamtr_lora.training.window import Material, PlayedEpisodes

logger = logging.getLogger(__name__)

FITTED_TRIES = 6  # lengths that are measured on the messages that the step was fitted to; mostly the first is in region

Decision = Literal["accepted", "shrunk", "rejected", "skipped"]


@dataclass(frozen=True, kw_only=True)
class UpdateOutcome:
    decision: Decision  # shrunk is an acceptance at alpha < 1
    version: AdapterVersion  # the agent's version afterwards
    delta: float  # the agent's radius in this stage
    material: Material
    advantages: GroupAdvantages  # of the newest rollout
    messages: int
    trained_tokens: int = 0
    optimized: OptimizeReport
    step: StepDecision = field(default_factory=lambda: StepDecision(None))
    readings: dict[float, CandidateReading] = field(default_factory=dict)  # by alpha: everything that was measured
    judging: Judging | None = None  # None: nothing was judged
    gap: dict[str, float] | None = None  # between sampler and trainer; None: not measured
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    log_ratio_E: np.ndarray | None = None  # log of how much likelier the accepted step makes each episode of the material

    @property
    def accepted(self) -> bool:
        return self.decision in ("accepted", "shrunk")

    @property
    def accepted_reading(self) -> CandidateReading | None:
        """The reading of the step that was accepted; None where none was."""
        return self.readings[self.step.accepted.alpha] if self.step.accepted else None

    @property
    def shown(self) -> CandidateReading | None:
        """The reading that is reported: see StepDecision.shown."""
        return self.readings[self.step.shown.alpha] if self.step.shown else None


@dataclass(frozen=True)
class Split:
    fit: list[MessageBatch]  # for the gradient: one batch an optimizer step
    judging: Judging


class AgentUpdater:
    """Updates agents, and holds what lasts between updates: each agent's optimizer and dials."""

    def __init__(self, playable: PlayableTeam, config: TeamTRConfig) -> None:
        self._playable, self._config = playable, config
        self._variants = Variants.of(config)
        base, agents = playable.base, playable.team.names
        self.discount = message_discount(config.training.discount, playable.team.router.max_messages)
        self.scorer = Scorer.of(playable, config)
        if config.training.gradient_checkpointing:
            playable.bank.enable_gradient_checkpointing()
        self.dials = dict.fromkeys(agents, Dials.before_updates(config.trust_region))
        self.optimizers = {
            agent: build_optimizer(config.training, list(playable.bank.parameters(agent).values())) for agent in agents
        }
        self.scaler = build_loss_scaler(base.device, half_precision=base.dtype == torch.float16)

    def store(self, state: RunState) -> None:
        """Puts there what the next update goes on from, but for the optimizers' moments."""
        scorer = self.scorer
        state.dials, state.loss_scaler = dict(self.dials), self.scaler.state_dict()
        state.gate_tf32, state.training_float32_sum = scorer.tf32, scorer.float32_sum
        state.tokens_per_microbatch = scorer.tokens_per_microbatch

    def resume(self, state: RunState, optimizers: Optimizers) -> None:
        for agent, (tensors, scalars) in optimizers.items():
            restore_state(self.optimizers[agent], tensors, scalars)
        self.dials.update(state.dials)
        self.scorer.tf32, self.scorer.float32_sum = state.gate_tf32, state.training_float32_sum
        if self.scaler.is_enabled() and state.loss_scaler:  # a rebased team has none yet
            self.scaler.load_state_dict(state.loss_scaler)
        chosen_by_us = self._config.training.tokens_per_microbatch == "auto"
        if state.tokens_per_microbatch and chosen_by_us:  # free memory may differ today: the run goes on with its own size
            self.scorer.tokens_per_microbatch = state.tokens_per_microbatch

    def update(self, agent: str, material: Material, split_seed: int, stage: int = 1) -> UpdateOutcome:
        """Maximises the surrogate for `agent` on `material`, and keeps as much of the step as the trust region allows. `stage`:
        the number of the stage, by which the learning rate may fall."""
        bank, clock = self._playable.bank, PhaseClock()
        bank.activate(agent)
        advantages = self._advantages(agent, material)
        split = self._split(agent, material, advantages, split_seed)
        if split is None:
            return self._skipped(agent, material, advantages[0])

        minibatches = [Minibatch(batch) for batch in split.fit]
        before, optimizer_before = bank.snapshot(agent), copy.deepcopy(self.optimizers[agent].state_dict())
        put_back = partial(self._put_back, agent, before, optimizer_before)
        try:
            with self._learning(agent, put_back) as learner:
                optimized = self._optimize(agent, learner, minibatches, stage)
            clock.lap("optimize")
            judge = Judge(
                self.scorer, bank, self._config, self.discount, agent, split.judging, before, candidate=bank.snapshot(agent)
            )

            def in_sample() -> list[InSample]:
                with self._learning(agent, put_back) as learner:
                    return measure_in_sample(learner, minibatches, optimized, whole=material.reused_E is not None)

            step, seen = self._decide(judge, optimized, in_sample, clock)
            gap, log_ratio_E = self._sampler_gap(judge), None
            if step.accepted is not None and material.reused_E is not None:
                known = [(each.batch, own.log_ratio_M) for each, own in zip(minibatches, seen, strict=True)]
                known += [(split.judging.batch, judge.readings[step.accepted.alpha].log_ratio_M)]
                log_ratio_E = self._log_ratios(agent, material, known, before)
        except BaseException:  # an interrupt too: half an update is no version of the agent
            put_back()
            raise

        radius = self.dials[agent].radius
        self.dials[agent] = after_update(self.dials[agent], self._config, optimized, step, judge.readings)
        decision: Decision = "rejected"
        if step.accepted is None:
            put_back()
        else:
            bank.commit(agent)
            decision = "shrunk" if step.accepted.alpha < 1 else "accepted"
        clock.lap("in_sample")
        return UpdateOutcome(
            decision=decision,
            version=bank.version(agent),
            delta=radius,
            material=material,
            advantages=advantages[0],
            messages=self._messages(agent, material),
            trained_tokens=sum(batch.tokens for batch in split.fit),
            optimized=optimized,
            step=step,
            readings=judge.readings,
            judging=split.judging,
            gap=gap,
            seconds=clock.seconds,
            log_ratio_E=log_ratio_E,
        )

    def _advantages(self, agent: str, material: Material) -> list[GroupAdvantages]:
        """Of the newest rollout, then of each earlier one."""
        return [part_advantages(part, agent, self._config.training, self.discount) for part in material.parts]

    def _split(self, agent: str, material: Material, advantages: list[GroupAdvantages], seed: int) -> Split | None:
        """What the update learns from and what judges it, as batches. None where there is too little: Adam moves every parameter
        even when the gradient is noise, so without reward variance on both sides there is no update."""
        newest, least = material.newest.episodes, self._config.training.min_informative_groups
        advantage_E = np.concatenate([part.clipped_E.numpy() for part in advantages])
        weight_E = np.exp(material.message_log_weights(agent))
        informative = {e.group for e, advantage in zip(material.episodes, advantage_E, strict=True) if advantage != 0}
        mixed = informative & {episode.group for episode in newest}
        earlier = sorted(informative - mixed)
        division = self._variants.reuse.divide(newest, mixed, len(earlier) >= least, seed)
        groups = [*(group for group in division.fit if group in mixed), *earlier]  # the others have no gradient
        sequences = agent_sequences(material.episodes, agent)
        fit = self._fit(sequences, groups, advantage_E, weight_E)
        judging = self._judging(material, sequences, set(division.judge), mixed, advantage_E, weight_E)
        enough = len(groups) >= least and bool(mixed & judging.groups)
        return Split(fit, judging) if fit and judging.batch.messages and enough else None

    def _fit(
        self, sequences: list[TokenSequence], groups: list[int], advantage_E: np.ndarray, weight_E: np.ndarray
    ) -> list[MessageBatch]:
        """One batch an optimizer step, of about as many groups each."""
        steps, segments = max(1, min(self._config.training.minibatches_per_epoch, len(groups))), self.scorer.takes_segments
        own = [set(groups[step::steps]) for step in range(steps)]
        batches = [self._batch(sequences, each, advantage_E * weight_E, weight_E, segments=segments) for each in own]
        return [batch for batch in batches if batch.messages]

    def _judging(
        self, material: Material, sequences: list[TokenSequence], groups: set[int], mixed: set[int],
        advantage_E: np.ndarray, weight_E: np.ndarray,
    ) -> Judging:  # fmt: skip
        newest = material.newest.episodes
        most = max(1, self._config.trust_region.judging_episodes // len(groups)) if groups else 0
        read_E = np.isin(np.arange(len(material.episodes)), sorted(first_of_groups(newest, groups, most)))
        judging_E = weight_E * judging_weights(material.episodes, newest, groups, mixed)
        judged = [sequence for sequence in sequences if read_E[sequence.position]]
        # Masked messages are judged too: a step that moves them moves the team. Means over judging messages are weighted ones, of
        # the gain as of the KL, so the advantages have no weights in them.
        segments = self.scorer.tf32 and self.scorer.quick
        batch = self._batch(judged, groups, advantage_E, judging_E, masked=False, segments=segments)
        return Judging(batch=batch, groups=groups, mixed=mixed, weight_E=judging_E, read_E=read_E)

    def _batch(
        self, sequences: list[TokenSequence], groups: set[int], advantage_E: np.ndarray, weight_E: np.ndarray,
        *, segments: bool, masked: bool = True,
    ) -> MessageBatch:  # fmt: skip
        chosen = [sequence for sequence in sequences if sequence.episode.group in groups]
        masked = masked and self._config.rollout.truncated_messages == "mask"
        return self.scorer.batch(chosen, advantage_E.tolist(), weight_E.tolist(), mask_truncated=masked, segments=segments)

    @contextmanager
    def _learning(self, agent: str, put_back: Callable[[], None]) -> Iterator[Learner]:
        with self.scorer.training(agent) as parameters:
            yield Learner(
                scorer=self.scorer,
                optimizer=self.optimizers[agent],
                parameters=parameters,
                scaler=self.scaler,
                config=self._config,
                region=self._variants.region,
                start_again=put_back,
            )

    def _optimize(self, agent: str, learner: Learner, minibatches: list[Minibatch], stage: int) -> OptimizeReport:
        training, cap, dials = self._config.training, self._config.rollout.importance_cap, self.dials[agent]
        for minibatch in minibatches[cap is None :]:  # the first minibatch's own first pass keeps the current policy
            minibatch.current = keep_current(self.scorer, minibatch.batch)
            if cap is not None:
                weight_by_sampler(self.scorer.ranks, minibatch.batch, minibatch.current, cap, self._playable.bank.version(agent))
        probe = training.learning_rate == "auto" and dials.rate is None and self._variants.region.gates
        rate = dials.rate or training.rate_in(stage)
        return optimize(learner, minibatches, radius=dials.radius, beta=dials.beta, rate=rate, probe=probe)

    def _decide(
        self, judge: Judge, optimized: OptimizeReport, in_sample: Callable[[], list[InSample]], clock: PhaseClock
    ) -> tuple[StepDecision, list[InSample]]:
        """The length that is kept, and what was measured of it on the messages that it was fitted to. Held-out messages choose
        it; on the fitted ones only the choice is measured, and shortened until it is in region there too."""
        region, radius = self._variants.region, self.dials[judge.agent].radius
        step, seen, shorter = judge.choose(region, radius), [], None
        clock.lap("gate")
        for tries_left in reversed(range(FITTED_TRIES)):
            if step.accepted is None:
                break
            seen = in_sample()
            clock.lap("in_sample")
            step, chosen = step.fitted(optimized.kl_bound)
            shorter = region.shorter(chosen, radius)
            if shorter is None or not tries_left:
                break
            step = judge.choose_shorter(region, radius, shorter, step)
            clock.lap("gate")
        harms = region.gain_rule.in_sample and not optimized.improves
        if step.accepted is not None and (harms or shorter is not None):
            step = replace(step, accepted=None, refused=step.accepted)
        return step, seen

    def _log_ratios(
        self, agent: str, material: Material, known: list[tuple[MessageBatch, Tensor]], before: Snapshot
    ) -> np.ndarray:
        """Of every episode that is used again: the log of how much likelier the accepted step has made it. `known`: of these
        messages it has been measured on the way."""
        assert material.reused_E is not None
        log_E, seen = np.zeros(len(material.episodes)), set()
        for batch, log_ratio_M in known:
            np.add.at(log_E, batch.episode_M.numpy(), log_ratio_M.double().numpy())
            seen |= {(at, m.turn) for at, m in zip(batch.episode_M.tolist(), batch.messages, strict=True)}
        rest = [
            TokenSequence(s.ids, spans, s.episode, s.position)
            for s in agent_sequences(material.episodes, agent)
            if material.reused_E[s.position] and (spans := [x for x in s.spans if (s.position, x.message.turn) not in seen])
        ]
        if rest:
            batch = self.scorer.batch(rest, segments=self.scorer.takes_segments)
            with self.scorer.training(agent):
                log_M = message_log_ratios(self.scorer, self._playable.bank, agent, batch, before)
            np.add.at(log_E, batch.episode_M.numpy(), log_M)
        return log_E

    def _put_back(self, agent: str, adapter: Snapshot, optimizer: Any) -> None:
        """Bit for bit: after a rejection nothing of the update is left."""
        self._playable.bank.restore(agent, adapter)
        self.optimizers[agent].load_state_dict(copy.deepcopy(optimizer))  # its tensors would be changed by the next step

    def end_stage(self) -> None:
        self.dials = in_the_next_stage(self.dials, self._config.trust_region)

    def _sampler_gap(self, judge: Judge) -> dict[str, float]:
        """How far the sampler was from the current policy, by messages of the newest rollout: earlier ones may come from earlier
        policies."""
        assert judge.current is not None
        agent, reduction = judge.agent, self._config.trust_region.reduction
        gap = sampler_gap(self.scorer.ranks, judge.judging.batch, judge.current, reduction)
        radius = self.dials[agent].radius
        if gap["message_kl"] > radius:
            logger.warning(
                "%s: the sampler is KL %.2g per %s away from the trainer, more than delta = %.2g: its samples are not from "
                "the policy being updated; use the same precision on both sides or set rollout.importance_cap",
                agent, gap["message_kl"], "message" if REDUCTIONS[reduction].whole else "token", radius,
            )  # fmt: skip
        return gap

    def _messages(self, agent: str, material: Material) -> int:
        """The agent's messages in the newest rollout, without those that are masked."""
        masked = self._config.rollout.truncated_messages == "mask"
        spoken = [message for episode in material.newest.episodes for message in episode.messages if message.agent == agent]
        return sum(not (masked and message.truncated) for message in spoken)

    def _skipped(self, agent: str, material: Material, advantages: GroupAdvantages) -> UpdateOutcome:
        dials = self.dials[agent]
        return UpdateOutcome(
            decision="skipped",
            version=self._playable.bank.version(agent),
            delta=dials.radius,
            material=material,
            advantages=advantages,
            messages=self._messages(agent, material),
            optimized=OptimizeReport(beta=dials.beta, learning_rate=dials.rate or 0.0),
        )


def part_advantages(part: PlayedEpisodes, agent: str, training: TrainingSection, discount: float) -> GroupAdvantages:
    """Of a rollout that today's team would play otherwise, or of a fresh one."""
    log_weight_E, log_beside_E = part.message_and_worth_log_weights(agent)
    episodes = recredited(part.episodes, agent, np.exp(log_beside_E)) if log_beside_E.any() else part.episodes
    return episode_advantages(episodes, agent, training, discount, log_weight_E if log_weight_E.any() else None)


def episode_advantages(
    episodes: list[Episode], agent: str, training: TrainingSection, discount: float, log_weight_E: np.ndarray | None = None
) -> GroupAdvantages:
    """eq:group_adv over the team's discounted returns, or over what `agent` earned where the task says who earned what."""
    returns = torch.tensor([e.discounted_return(discount, agent) for e in episodes], dtype=torch.float64)
    return group_advantages(
        returns,
        torch.tensor([e.group for e in episodes]),
        clip=training.advantage_clip,
        eps=training.advantage_eps,
        kind=training.advantage,
        weight_E=None if log_weight_E is None else torch.from_numpy(np.exp(log_weight_E)),
    )
