"""Maximising the clipped surrogate for one agent (eq:ppo_obj), with the adaptive penalty and the early stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from teamtr_lora.algorithm.surrogate import sum_by_message, surrogate_terms
from teamtr_lora.algorithm.trust_region import REGION_POLICIES, adapt_beta
from teamtr_lora.recipe import TeamTRConfig
from teamtr_lora.training.scoring import CurrentPolicy, MessageBatch, Scorer

if TYPE_CHECKING:
    from accelerate import Accelerator


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
    objective: float  # the clipped surrogate, penalty left out
    clip_rate: float


def optimize(
    accelerator: Accelerator,
    scorer: Scorer,
    optimizer: Any,
    parameters: list[torch.nn.Parameter],
    minibatches: list[tuple[MessageBatch, CurrentPolicy]],
    config: TeamTRConfig,
    *,
    delta: float,
    beta: float,
    scaler: torch.amp.GradScaler,
) -> OptimizeReport:
    """Steps until the epochs are done or the in-sample KL reaches delta. KL is measured by the same pass that makes the
    gradient, so a step is never taken from outside the region."""
    policy = REGION_POLICIES[config.trust_region.kind]
    report = OptimizeReport(beta=beta if policy.penalises else 0.0)
    for _ in range(config.training.inner_epochs):
        for batch, current in minibatches:
            seen = _accumulate(accelerator, scorer, batch, current, config, report.beta, scaler)
            if report.steps and policy.adapts_beta:  # before the first step KL is 0 and says nothing about the penalty
                report.beta = adapt_beta(report.beta, seen.kl, delta)
            if seen.kl >= delta and policy.stops_early:
                report.stopped_early, report.kl, report.clip_rate = True, seen.kl, seen.clip_rate
                optimizer.zero_grad(set_to_none=True)
                return report
            scaler.unscale_(optimizer)
            report.gradient_norm = float(torch.nn.utils.clip_grad_norm_(parameters, config.training.max_grad_norm))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            report.steps += 1
    with torch.no_grad():  # the last step has not been seen by any pass yet
        last = [_accumulate(accelerator, scorer, *minibatch, config, report.beta, scaler) for minibatch in minibatches]
    report.kl = sum(seen.kl for seen in last) / len(last)
    report.clip_rate = sum(seen.clip_rate for seen in last) / len(last)
    if policy.adapts_beta:
        report.beta = adapt_beta(report.beta, report.kl, delta)
    return report


def _accumulate(
    accelerator: Accelerator,
    scorer: Scorer,
    batch: MessageBatch,
    current: CurrentPolicy,
    config: TeamTRConfig,
    beta: float,
    scaler: torch.amp.GradScaler,
) -> InSample:
    """Adds the gradient of one optimizer step, a micro-batch at a time (none under no_grad); returns what the pass has seen."""
    count = len(batch.messages)
    totals = torch.zeros(3, dtype=torch.float64)
    for part, hidden_cur, logp_cur in zip(batch.microbatches, current.hidden, current.logp, strict=True):
        scores = scorer.score(part, scorer.hidden(part), hidden_cur)
        assert scores.kl_N is not None
        advantage_M = batch.advantage_M.to(scores.logp_N.device)
        terms = surrogate_terms(
            scores.logp_N, logp_cur, part.message_N, advantage_M, clip=config.training.clip_ratio, ratio=config.training.ratio
        )
        present_M = torch.zeros(count, device=advantage_M.device).index_fill(0, part.message_N.unique(), 1.0)
        objective = (terms.objective_M * present_M).sum() / count
        kl = message_kl(scores.kl_N, part.message_N, count, config.trust_region.reduction).sum() / count
        if torch.is_grad_enabled():
            accelerator.backward(scaler.scale(beta * kl - objective))
        clipped = (terms.clipped_M * present_M).sum() / count
        totals += torch.stack([kl, objective, clipped]).detach().double().cpu()
    return InSample(*totals.tolist())


def message_kl(kl_N: Tensor, message_N: Tensor, messages: int, reduction: str) -> Tensor:
    """Per message: the sum over its tokens (eq:emp_tok_kl), or their mean with `token_mean`."""
    total_M = sum_by_message(kl_N, message_N, messages)
    if reduction == "message_sum":
        return total_M
    return total_M / sum_by_message(torch.ones_like(kl_N), message_N, messages).clamp(min=1)
