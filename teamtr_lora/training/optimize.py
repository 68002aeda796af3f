"""Maximising the clipped surrogate for one agent (eq:ppo_obj), with the KL penalty and the early stop of its trust region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from teamtr_lora.algorithm.surrogate import surrogate_terms
from teamtr_lora.algorithm.token_kl import message_kl
from teamtr_lora.algorithm.variants.region import TrustRegion
from teamtr_lora.recipe import TeamTRConfig
from teamtr_lora.training.batches import MessageBatch
from teamtr_lora.training.scoring import CurrentPolicy, Scorer

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass
class Minibatch:
    """The messages of one optimizer step, and the policy that the update starts from. None: the first pass is that policy's."""

    batch: MessageBatch
    current: CurrentPolicy | None = None


@dataclass(frozen=True, kw_only=True)
class Learner:
    """What the optimization of one agent works with."""

    accelerator: Accelerator
    scorer: Scorer
    optimizer: Any
    parameters: list[torch.nn.Parameter]
    scaler: torch.amp.GradScaler
    config: TeamTRConfig
    region: TrustRegion


@dataclass
class OptimizeReport:
    steps: int = 0
    kl: float = 0.0  # in-sample, exact, at the last measurement
    clip_rate: float = 0.0  # share of messages whose ratio was clipped, then
    gradient_norm: float = 0.0
    stopped_early: bool = False
    beta: float = 0.0


class InSample(NamedTuple):
    """Means over the messages of one minibatch."""

    kl: float
    objective: float  # the clipped surrogate, without the penalty
    clip_rate: float


def optimize(learner: Learner, minibatches: list[Minibatch], *, radius: float, beta: float) -> OptimizeReport:
    """Steps until the epochs are done or the trust region says stop. The pass that makes a gradient also measures the KL, so a
    kind of region that stops at its radius never takes a step from outside."""
    region, optimizer, scaler, training = learner.region, learner.optimizer, learner.scaler, learner.config.training
    report = OptimizeReport(beta=region.penalty(beta))
    for _ in range(training.inner_epochs):
        for minibatch in minibatches:
            seen = accumulate(learner, minibatch, report.beta)
            if report.steps:  # before the first step the KL is 0 and says nothing about the penalty
                report.beta = region.next_penalty(report.beta, seen.kl, radius)
            if region.stops(seen.kl, radius):
                report.stopped_early, report.kl, report.clip_rate = True, seen.kl, seen.clip_rate
                optimizer.zero_grad(set_to_none=True)
                return report
            scaler.unscale_(optimizer)
            report.gradient_norm = float(torch.nn.utils.clip_grad_norm_(learner.parameters, training.max_grad_norm))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            report.steps += 1
    with torch.no_grad():  # no pass has measured the last step yet
        last = [accumulate(learner, minibatch, report.beta) for minibatch in minibatches]
    report.kl = sum(seen.kl for seen in last) / len(last)
    report.clip_rate = sum(seen.clip_rate for seen in last) / len(last)
    report.beta = region.next_penalty(report.beta, report.kl, radius)
    return report


def accumulate(learner: Learner, minibatch: Minibatch, beta: float) -> InSample:
    """Adds the gradient of one optimizer step, a micro-batch at a time (none under no_grad), and returns what was measured.

    A first pass sees the policy that the update starts from, and keeps it: all ratios are 1 there, and the KL and its gradient 0.
    """
    batch, config = minibatch.batch, learner.config
    count = len(batch.messages)
    totals = torch.zeros(3, dtype=torch.float64)
    first, current = minibatch.current is None, minibatch.current or CurrentPolicy([], [])
    for place, part in enumerate(batch.microbatches):
        scores, kept = learner.scorer.score_and_keep(part, None if first else current.kept[place])
        if first:
            current.kept.append(kept)
            current.logp.append(scores.logp_N.detach())
        logp_cur, kl_N = current.logp[place], torch.zeros_like(scores.logp_N) if first else scores.kl_N
        assert kl_N is not None
        advantage_M = batch.advantage_M.to(scores.logp_N.device)
        terms = surrogate_terms(
            scores.logp_N,
            logp_cur,
            part.message_N,
            advantage_M,
            clip=config.training.clip_ratio,
            clip_high=config.training.clip_ratio_high,
            ratio=config.training.ratio,
        )
        present_M = torch.zeros(count, device=advantage_M.device).index_fill(0, part.message_N.unique(), 1.0)
        objective = (terms.objective_M * present_M).sum() / count
        kl = message_kl(kl_N, part.message_N, count, config.trust_region.reduction).sum() / count
        if torch.is_grad_enabled():
            learner.accelerator.backward(learner.scaler.scale(beta * kl - objective))
        clipped = (terms.clipped_M * present_M).sum() / count
        totals += torch.stack([kl, objective, clipped]).detach().double().cpu()
    minibatch.current = current
    return InSample(*totals.tolist())
