"""One agent's update: advantages, surrogate, gate, backtracking. Accepts inside the trust region, or adapter and
optimizer are as before."""

from __future__ import annotations

import copy
import logging
import math
import random
import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator

from teamtr_lora.algorithm.advantage import GroupAdvantages, group_advantages
from teamtr_lora.algorithm.radii import gain_slope, gain_weighted_radii, smoothed
from teamtr_lora.algorithm.trust_region import REGION_POLICIES, GateReading, StepDecision, choose_step, track_target
from teamtr_lora.base.bank import Snapshot
from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.recipe import TeamTRConfig, TrainingSection, TrustRegionSection
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.runs.metrics import CertificateTerms
from teamtr_lora.team import Episode, agent_sequences
from teamtr_lora.training.certificate_terms import certificate_terms
from teamtr_lora.training.gate import CandidateReading, gate_pass, read_candidate, sampler_gap
from teamtr_lora.training.optimize import OptimizeReport, optimize
from teamtr_lora.training.optimizers import build_optimizer
from teamtr_lora.training.scoring import CurrentPolicy, MessageBatch, Scorer, keep_current, message_batch

logger = logging.getLogger(__name__)

Decision = Literal["accepted", "shrunk", "rejected", "skipped"]


@dataclass(frozen=True)
class UpdateOutcome:
    decision: Decision  # shrunk is an acceptance at alpha < 1
    version: AdapterVersion  # the agent's version afterwards
    delta: float  # the agent's radius in this stage
    advantages: GroupAdvantages
    optimized: OptimizeReport
    step: StepDecision
    readings: dict[float, CandidateReading]  # everything measured on held-out messages, by alpha
    gap: dict[str, float] | None  # None: nothing was measured
    terms: CertificateTerms | None  # None: nothing was accepted
    seconds: dict[str, float]
    messages: int
    trained_tokens: int
    log_weight_E: np.ndarray | None = None  # where the episodes were another team's: what they were weighted by

    @property
    def accepted(self) -> bool:
        return self.decision in ("accepted", "shrunk")


@dataclass
class _Split:
    """Messages for the gradient, in optimizer minibatches, and messages held out for the gate."""

    fit: list[MessageBatch]
    held: MessageBatch
    held_groups: set[int]
    informative: set[int]  # groups of either side whose episodes differ in their return


class AgentUpdater:
    """Holds what lasts between updates: each agent's optimizer, penalty and radius."""

    def __init__(self, playable: PlayableTeam, config: TeamTRConfig, accelerator: Accelerator) -> None:
        self._playable, self._config, self._accelerator = playable, config, accelerator
        base, training = playable.base, config.training
        self.discount = training.discount_for(playable.team.router.max_messages)
        self.scorer = Scorer.of(playable, config)
        if training.gradient_checkpointing:
            playable.bank.enable_gradient_checkpointing()
        self.betas = dict.fromkeys(playable.team.names, config.trust_region.beta_initial)
        self._policy = REGION_POLICIES[config.trust_region.kind]
        self.radii = dict.fromkeys(playable.team.names, config.trust_region.delta)
        self.slopes: dict[str, float | None] = dict.fromkeys(playable.team.names)
        self.optimizers = {
            agent: build_optimizer(training, list(playable.bank.parameters(agent).values())) for agent in playable.team.names
        }
        # gradients pass through half-precision activations on their way to the float32 adapters
        self.scaler = torch.amp.GradScaler(base.device.type, enabled=base.dtype == torch.float16, init_scale=2.0**12)

    def update(
        self, agent: str, episodes: list[Episode], split_seed: int, log_weight_E: np.ndarray | None = None
    ) -> UpdateOutcome:
        """Maximises the surrogate for `agent` on `episodes`, which the team as it is now must have played; where another team
        did, `log_weight_E` may say how much likelier this one is to play each."""
        bank, clock = self._playable.bank, _PhaseClock()
        advantages = episode_advantages(episodes, self._config.training, self.discount, agent)
        weight_E = np.ones(len(episodes)) if log_weight_E is None else np.exp(log_weight_E)
        split = self._split(agent, episodes, advantages.clipped_E.numpy() * weight_E, split_seed)
        if split is None or len(split.informative - split.held_groups) < self._config.training.min_informative_groups:
            return self._skipped(agent, episodes, advantages, log_weight_E)
        bank.activate(agent)
        with torch.no_grad():
            current = [keep_current(self.scorer, batch) for batch in split.fit]
        gap = self._sampler_gap(agent, split.fit, current)
        self._weight_by_sampler(split.fit, current)
        before, optimizer_before = bank.snapshot(agent), copy.deepcopy(self.optimizers[agent].state_dict())
        clock.lap("current")
        try:
            optimized = self._optimize(agent, list(zip(split.fit, current, strict=True)))
            clock.lap("optimize")
            candidate = bank.snapshot(agent)
            step, readings = self._search(agent, split.held, before, candidate)
        except BaseException:  # an interrupt too: half an update is no version of the agent
            bank.restore(agent, before)
            self.optimizers[agent].load_state_dict(optimizer_before)
            raise
        self.betas[agent] = optimized.beta
        radius = self.radii[agent]
        self._learn_radius(agent, step, readings)
        decision = self._conclude(agent, step, before, candidate, optimizer_before)
        clock.lap("gate")
        return UpdateOutcome(
            decision,
            bank.version(agent),
            radius,
            advantages,
            optimized,
            step,
            readings,
            gap,
            self._terms(step, readings, split, episodes),
            clock.seconds,
            messages=sum(len(batch.messages) for batch in split.fit) + len(split.held.messages),
            trained_tokens=sum(batch.tokens for batch in split.fit),
            log_weight_E=log_weight_E,
        )

    def _terms(
        self, step: StepDecision, readings: dict[float, CandidateReading], split: _Split, episodes: list[Episode]
    ) -> CertificateTerms | None:
        if step.accepted is None:
            return None
        reading = readings[step.accepted.alpha]
        groups = split.held_groups, split.informative
        return certificate_terms(reading, split.held, episodes, *groups, self._config, self.discount)

    def share_radii(self) -> None:
        """The next stage's radii; with `equal` they stay what they are."""
        if self._config.trust_region.radii == "gain_weighted":
            self.radii = gain_weighted_radii(self._config.trust_region.delta, self.slopes)

    def _learn_radius(self, agent: str, step: StepDecision, readings: dict[float, CandidateReading]) -> None:
        assert step.shown is not None
        reading = readings[step.shown.alpha]
        gain = reading.gain if step.accepted else 0.0
        if self._policy.tracks_target and step.accepted:
            target = self._config.trust_region.delta
            self.radii[agent] = track_target(self.radii[agent], reading.kl[self._config.trust_region.estimator].mean, target)
        self.slopes[agent] = smoothed(self.slopes[agent], gain_slope(gain, reading.kl["exact"].mean))

    def _optimize(self, agent: str, minibatches: list[tuple[MessageBatch, CurrentPolicy]]) -> OptimizeReport:
        with self._playable.bank.training(agent) as parameters:
            return optimize(
                self._accelerator,
                self.scorer,
                self.optimizers[agent],
                parameters,
                minibatches,
                self._config,
                delta=self.radii[agent],
                beta=self.betas[agent],
                scaler=self.scaler,
            )

    def _search(
        self, agent: str, held: MessageBatch, before: Snapshot, candidate: Snapshot
    ) -> tuple[StepDecision, dict[float, CandidateReading]]:
        """Measures current + alpha (candidate - current) on the held-out messages until a length fits."""
        bank, region = self._playable.bank, self._config.trust_region
        readings: dict[float, CandidateReading] = {}
        with gate_pass(self.scorer):
            bank.restore(agent, before)
            current = keep_current(self.scorer, held)

            def measure(alpha: float) -> GateReading:
                bank.interpolate(agent, before, candidate, alpha)
                readings[alpha] = read_candidate(self.scorer, held, current, self._config, self.discount)
                return GateReading(alpha, readings[alpha].kl[region.estimator], readings[alpha].gain)

            if not self._policy.gates:  # measured all the same: how far it went is logged, and a broken candidate never kept
                whole = measure(1.0)
                sound = math.isfinite(whole.kl.mean) and math.isfinite(whole.gain)
                return StepDecision(whole if sound else None, [whole]), readings
            step = choose_step(
                measure,
                delta=self.radii[agent],
                fill=region.step == "fill",
                max_stretch=region.max_stretch,
                evaluations=region.backtracks,
            )
        return step, readings

    def _conclude(self, agent: str, step: StepDecision, before: Snapshot, candidate: Snapshot, optimizer_before: Any) -> Decision:
        """Commits the accepted candidate as a new version, or puts adapter and optimizer back bit for bit."""
        bank = self._playable.bank
        if step.accepted is None:
            bank.restore(agent, before)
            self.optimizers[agent].load_state_dict(optimizer_before)
            return "rejected"
        bank.interpolate(agent, before, candidate, step.accepted.alpha)
        bank.commit(agent)
        return "shrunk" if step.accepted.alpha < 1 else "accepted"

    def _split(self, agent: str, episodes: list[Episode], advantage_E: np.ndarray, seed: int) -> _Split | None:
        """The two sides as batches. None when one has no message of the agent or the gate has no group to judge a gain by."""
        advantage = dict(zip(map(id, episodes), advantage_E.tolist(), strict=True))
        informative = {e.group for e in episodes if advantage[id(e)] != 0}
        fit, held = _hold_out(episodes, informative, self._config.trust_region, seed)
        parts = min(self._config.training.minibatches_per_epoch, len(fit))
        chunks = [batch for i in range(parts) if (batch := self._batch(agent, episodes, set(fit[i::parts]), advantage)).messages]
        gate = self._batch(agent, episodes, set(held), advantage)
        if not chunks or not gate.messages or not informative & set(held):
            return None
        return _Split(chunks, gate, set(held), informative)

    def _batch(self, agent: str, episodes: list[Episode], groups: set[int], advantage: dict[int, float]) -> MessageBatch:
        chosen = [e for e in episodes if e.group in groups]
        return message_batch(
            agent_sequences(chosen, agent),
            advantage,
            {id(e): i for i, e in enumerate(episodes)},
            tokens_per_microbatch=self._config.training.tokens_per_microbatch,
            mask_truncated=self._config.rollout.truncated_messages == "mask",
            device=self.scorer.device,
            pack_width=self.scorer.pack_width,
        )

    def _sampler_gap(self, agent: str, fit: list[MessageBatch], current: list[CurrentPolicy]) -> dict[str, float]:
        reduction = self._config.trust_region.reduction
        gaps = [sampler_gap(batch, kept, reduction) for batch, kept in zip(fit, current, strict=True)]
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

    def _weight_by_sampler(self, fit: list[MessageBatch], current: list[CurrentPolicy]) -> None:
        """Where the recipe caps it: truncated importance weights trainer / sampler, folded into the advantages in place."""
        cap = self._config.rollout.importance_cap
        for batch, kept in zip(fit, current, strict=True) if cap is not None else ():
            log_weight_M = torch.zeros(len(batch.messages))
            for part, logp in zip(batch.microbatches, kept.logp, strict=True):
                log_weight_M.index_add_(0, part.message_N.cpu(), (logp - part.sampler_logp_N).cpu())
            batch.advantage_M.mul_(log_weight_M.exp().clamp(max=cap))

    def _skipped(
        self, agent: str, episodes: list[Episode], advantages: GroupAdvantages, log_weight_E: np.ndarray | None
    ) -> UpdateOutcome:
        """Adam moves every parameter even when the gradient is noise: no reward variance, no update."""
        masked = self._config.rollout.truncated_messages == "mask"
        messages = sum(m.agent == agent and not (masked and m.truncated) for e in episodes for m in e.messages)
        return UpdateOutcome(
            "skipped",
            self._playable.bank.version(agent),
            self.radii[agent],
            advantages,
            OptimizeReport(beta=self.betas[agent]),
            StepDecision(None),
            {},
            None,
            None,
            {},
            messages,
            0,
            log_weight_E,
        )


def episode_advantages(
    episodes: list[Episode], training: TrainingSection, discount: float, agent: str | None = None
) -> GroupAdvantages:
    returns = torch.tensor([e.discounted_return(discount, agent) for e in episodes], dtype=torch.float64)
    groups = torch.tensor([e.group for e in episodes])
    return group_advantages(returns, groups, clip=training.advantage_clip, eps=training.advantage_eps, kind=training.advantage)


def _hold_out(
    episodes: list[Episode], informative: set[int], region: TrustRegionSection, seed: int
) -> tuple[list[int], list[int]]:
    """Groups for the gradient and for the gate.

    Whole groups, because the messages of one are dependent; an item drawn twice stays on one side. Both sides get their share
    of the groups with reward variance: a gate without any would measure no gain and reject everything.
    """
    by_item: dict[str, list[int]] = {}
    for episode in episodes:
        groups = by_item.setdefault(episode.item_id, [])
        if episode.group not in groups:
            groups.append(episode.group)
    items = sorted(by_item)
    random.Random(seed).shuffle(items)
    mixed = [item for item in items if informative & set(by_item[item])]
    even = [item for item in items if item not in mixed]
    count = region.heldout_items(len(items))
    from_mixed = min(len(mixed) - 1, max(1, round(len(mixed) * region.holdout))) if len(mixed) > 1 else 0
    from_mixed = max(min(from_mixed, count), count - len(even))
    held = mixed[:from_mixed] + even[: count - from_mixed]
    chosen = {group for item in held for group in by_item[item]}
    fit = [group for item in items for group in by_item[item] if group not in chosen]
    return fit, sorted(chosen)


class _PhaseClock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.monotonic()

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase], self._started = now - self._started, now
