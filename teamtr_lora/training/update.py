"""One agent's update, from top to bottom: advantages, division of the episodes, optimization, judgement, accept or put back.

It goes on in batches.py (episodes to tensors), scoring.py (forward passes), optimize.py (the steps) and gate.py (the judgement).
"""

from __future__ import annotations

import copy
import logging
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator

from teamtr_lora.algorithm.advantage import GroupAdvantages, group_advantages, message_discount
from teamtr_lora.algorithm.trust_region import GateReading, StepDecision
from teamtr_lora.algorithm.variants.chosen import Variants
from teamtr_lora.algorithm.variants.radii import gain_slope, smoothed
from teamtr_lora.base.bank import Snapshot
from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.recipe import TeamTRConfig, TrainingSection
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.team import Episode, TokenSequence, agent_sequences
from teamtr_lora.training.batches import MessageBatch, message_batch
from teamtr_lora.training.gate import CandidateReading, gate_pass, read_candidate
from teamtr_lora.training.optimize import Learner, Minibatch, OptimizeReport, optimize
from teamtr_lora.training.optimizers import build_optimizer
from teamtr_lora.training.scoring import Scorer, keep_current, sampler_gap, weight_by_sampler

logger = logging.getLogger(__name__)

Decision = Literal["accepted", "shrunk", "rejected", "skipped"]


@dataclass(frozen=True)
class Judging:
    """What the candidate was judged on: held-out messages, their groups, and which groups differ in return."""

    batch: MessageBatch
    groups: set[int]
    informative: set[int]  # groups of the whole rollout, judging or not


@dataclass(frozen=True, kw_only=True)
class UpdateOutcome:
    decision: Decision  # shrunk is an acceptance at alpha < 1
    version: AdapterVersion  # the agent's version afterwards
    delta: float  # the agent's radius in this stage
    advantages: GroupAdvantages
    messages: int
    trained_tokens: int = 0
    optimized: OptimizeReport
    step: StepDecision = field(default_factory=lambda: StepDecision(None))
    readings: dict[float, CandidateReading] = field(default_factory=dict)  # by alpha: everything that was measured
    judging: Judging | None = None  # None: nothing was judged
    gap: dict[str, float] | None = None  # between sampler and trainer; None: not measured
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    log_weight_E: np.ndarray | None = None  # what the episodes were weighted by; None: nothing

    @property
    def accepted(self) -> bool:
        return self.decision in ("accepted", "shrunk")

    @property
    def kept(self) -> CandidateReading | None:
        """The reading of the step that was accepted; None where none was."""
        return self.readings[self.step.accepted.alpha] if self.step.accepted else None

    @property
    def shown(self) -> CandidateReading | None:
        """The reading that is reported: of the accepted step, or of the last one that was tried."""
        return self.readings[self.step.shown.alpha] if self.step.shown else None


@dataclass(frozen=True)
class Split:
    fit: list[MessageBatch]  # for the gradient: one batch an optimizer step
    judging: Judging


class AgentUpdater:
    """Updates agents, and holds what lasts between updates: each agent's optimizer, penalty, radius and slope."""

    def __init__(self, playable: PlayableTeam, config: TeamTRConfig, accelerator: Accelerator) -> None:
        self._playable, self._config, self._accelerator = playable, config, accelerator
        self._variants = Variants.of(config)
        base, agents, region = playable.base, playable.team.names, config.trust_region
        self.discount = message_discount(config.training.discount, playable.team.router.max_messages)
        self.scorer = Scorer.of(playable, config)
        if config.training.gradient_checkpointing:
            playable.bank.enable_gradient_checkpointing()
        self.betas = dict.fromkeys(agents, region.beta_initial)
        self.radii = dict.fromkeys(agents, region.delta)
        self.slopes: dict[str, float | None] = dict.fromkeys(agents)
        self.optimizers = {
            agent: build_optimizer(config.training, list(playable.bank.parameters(agent).values())) for agent in agents
        }
        # gradients pass through half-precision activations on their way to the float32 adapters
        self.scaler = torch.amp.GradScaler(base.device.type, enabled=base.dtype == torch.float16, init_scale=2.0**12)

    def update(
        self, agent: str, episodes: list[Episode], split_seed: int, log_weight_E: np.ndarray | None = None
    ) -> UpdateOutcome:
        """Maximises the surrogate for `agent` on `episodes`, which today's team must have played; where another team did,
        `log_weight_E` may say how much likelier today's is to play each of them."""
        bank, clock = self._playable.bank, _PhaseClock()
        advantages = episode_advantages(episodes, agent, self._config.training, self.discount)
        weight_E = np.ones(len(episodes)) if log_weight_E is None else np.exp(log_weight_E)
        split = self._split(agent, episodes, advantages.clipped_E.numpy() * weight_E, split_seed)
        if split is None:
            return self._skipped(agent, episodes, advantages, log_weight_E)

        minibatches = [Minibatch(batch) for batch in split.fit]
        before, optimizer_before = bank.snapshot(agent), copy.deepcopy(self.optimizers[agent].state_dict())
        try:
            optimized = self._optimize(agent, minibatches)
            clock.lap("optimize")
            gap = self._sampler_gap(agent, minibatches)
            candidate = bank.snapshot(agent)
            step, readings = self._judge(agent, split.judging.batch, before, candidate)
        except BaseException:  # an interrupt too: half an update is no version of the agent
            self._put_back(agent, before, optimizer_before)
            raise

        radius = self.radii[agent]
        self.betas[agent] = optimized.beta
        self._learn_radius(agent, step, readings)
        decision: Decision = "rejected"
        if step.accepted is None:
            self._put_back(agent, before, optimizer_before)
        else:
            bank.interpolate(agent, before, candidate, step.accepted.alpha)
            bank.commit(agent)
            decision = "shrunk" if step.accepted.alpha < 1 else "accepted"
        clock.lap("gate")
        return UpdateOutcome(
            decision=decision,
            version=bank.version(agent),
            delta=radius,
            advantages=advantages,
            messages=sum(len(batch.messages) for batch in [*split.fit, split.judging.batch]),
            trained_tokens=sum(batch.tokens for batch in split.fit),
            optimized=optimized,
            step=step,
            readings=readings,
            judging=split.judging,
            gap=gap,
            seconds=clock.seconds,
            log_weight_E=log_weight_E,
        )

    def _split(self, agent: str, episodes: list[Episode], advantage_E: np.ndarray, seed: int) -> Split | None:
        """What the update learns from and what judges it, as batches. None where there is too little: Adam moves every parameter
        even when the gradient is noise, so without reward variance on both sides there is no update."""
        training = self._config.training
        informative = {episode.group for episode, advantage in zip(episodes, advantage_E, strict=True) if advantage != 0}
        division = self._variants.data_use.divide([episodes], [informative], seed)
        sequences = agent_sequences(episodes, agent)
        fit_groups = [group for share in division.fit for group in share.groups]  # there is one rollout, so all are of it
        parts = min(training.minibatches_per_epoch, len(fit_groups))
        steps = [self._batch(sequences, set(fit_groups[i::parts]), advantage_E) for i in range(parts)]
        fit, judge = [batch for batch in steps if batch.messages], set(division.judge.groups)
        judging = Judging(self._batch(sequences, judge, advantage_E), judge, informative)
        enough = len(informative - judge) >= training.min_informative_groups and bool(informative & judge)
        return Split(fit, judging) if fit and judging.batch.messages and enough else None

    def _batch(self, sequences: list[TokenSequence], groups: set[int], advantage_E: np.ndarray) -> MessageBatch:
        return message_batch(
            [sequence for sequence in sequences if sequence.episode.group in groups],
            advantage_E.tolist(),
            tokens_per_microbatch=self._config.training.tokens_per_microbatch,
            device=self.scorer.device,
            mask_truncated=self._config.rollout.truncated_messages == "mask",
            pack_width=self.scorer.pack_width,
        )

    def _optimize(self, agent: str, minibatches: list[Minibatch]) -> OptimizeReport:
        cap = self._config.rollout.importance_cap
        with self.scorer.training(agent) as parameters:
            if len(minibatches) > 1 or cap is not None:  # else the first pass of the one minibatch keeps the current policy
                for minibatch in minibatches:
                    minibatch.current = keep_current(self.scorer, minibatch.batch)
                    if cap is not None:
                        weight_by_sampler(minibatch.batch, minibatch.current, cap)
            learner = Learner(
                accelerator=self._accelerator,
                scorer=self.scorer,
                optimizer=self.optimizers[agent],
                parameters=parameters,
                scaler=self.scaler,
                config=self._config,
                region=self._variants.region,
            )
            return optimize(learner, minibatches, radius=self.radii[agent], beta=self.betas[agent])

    def _judge(
        self, agent: str, batch: MessageBatch, before: Snapshot, candidate: Snapshot
    ) -> tuple[StepDecision, dict[float, CandidateReading]]:
        """Measures current + alpha (candidate - current) at the lengths alpha that the trust region asks for."""
        bank, estimator = self._playable.bank, self._config.trust_region.estimator
        readings: dict[float, CandidateReading] = {}
        with gate_pass(self.scorer):
            bank.restore(agent, before)
            current = keep_current(self.scorer, batch)

            def measure(alpha: float) -> GateReading:
                bank.interpolate(agent, before, candidate, alpha)
                readings[alpha] = read_candidate(self.scorer, batch, current, self._config, self.discount)
                return GateReading(alpha, readings[alpha].kl[estimator], readings[alpha].gain)

            return self._variants.region.choose(measure, self.radii[agent]), readings

    def _put_back(self, agent: str, adapter: Snapshot, optimizer: Any) -> None:
        """Bit for bit: after a rejection nothing of the update is left."""
        self._playable.bank.restore(agent, adapter)
        self.optimizers[agent].load_state_dict(optimizer)

    def _learn_radius(self, agent: str, step: StepDecision, readings: dict[float, CandidateReading]) -> None:
        """A rejected step gained nothing, whatever was measured for it, and moves no radius."""
        assert step.shown is not None
        reading, gain = readings[step.shown.alpha], 0.0
        if step.accepted:
            gain = reading.gain
            kl = reading.kl[self._config.trust_region.estimator].mean
            self.radii[agent] = self._variants.region.next_radius(self.radii[agent], kl)
        self.slopes[agent] = smoothed(self.slopes[agent], gain_slope(gain, reading.kl["exact"].mean))

    def share_radii(self) -> None:
        """The next stage's radii."""
        self.radii = self._variants.radii.next_stage(self.radii, self.slopes, self._config.trust_region.delta)

    def _sampler_gap(self, agent: str, minibatches: list[Minibatch]) -> dict[str, float]:
        reduction = self._config.trust_region.reduction
        gaps = [sampler_gap(each.batch, each.current, reduction) for each in minibatches if each.current is not None]
        gap = {
            "mean_abs": sum(g["mean_abs"] for g in gaps) / len(gaps),
            "max_abs": max(g["max_abs"] for g in gaps),
            "message_kl": sum(g["message_kl"] for g in gaps) / len(gaps),
        }
        if gap["message_kl"] > self.radii[agent]:
            logger.warning(
                "%s: the sampler is KL %.2g per %s away from the trainer, more than delta = %.2g: its samples are not from "
                "the policy being updated; use the same precision on both sides or set rollout.importance_cap",
                agent, gap["message_kl"], "message" if reduction == "message_sum" else "token", self.radii[agent],
            )  # fmt: skip
        return gap

    def _skipped(
        self, agent: str, episodes: list[Episode], advantages: GroupAdvantages, log_weight_E: np.ndarray | None
    ) -> UpdateOutcome:
        masked = self._config.rollout.truncated_messages == "mask"
        return UpdateOutcome(
            decision="skipped",
            version=self._playable.bank.version(agent),
            delta=self.radii[agent],
            advantages=advantages,
            messages=sum(m.agent == agent and not (masked and m.truncated) for e in episodes for m in e.messages),
            optimized=OptimizeReport(beta=self.betas[agent]),
            log_weight_E=log_weight_E,
        )


def episode_advantages(episodes: list[Episode], agent: str, training: TrainingSection, discount: float) -> GroupAdvantages:
    """eq:group_adv over the team's discounted returns, or over what `agent` earned where the task says who earned what."""
    returns = torch.tensor([e.discounted_return(discount, agent) for e in episodes], dtype=torch.float64)
    groups = torch.tensor([e.group for e in episodes])
    return group_advantages(returns, groups, clip=training.advantage_clip, eps=training.advantage_eps, kind=training.advantage)


class _PhaseClock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.monotonic()

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase], self._started = now - self._started, now
