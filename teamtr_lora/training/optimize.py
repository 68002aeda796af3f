"""Maximising the clipped surrogate for one agent (eq:ppo_obj), with the KL penalty and the early stop of its trust region."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from teamtr_lora.algorithm.clustered import clustered_mean
from teamtr_lora.algorithm.fixed_point import MORE_ROOM, FixedPointSum, unit_exponent
from teamtr_lora.algorithm.gradient_signal import signal_share
from teamtr_lora.algorithm.step_size import Pace
from teamtr_lora.algorithm.surrogate import surrogate_terms
from teamtr_lora.algorithm.token_kl import message_kl
from teamtr_lora.algorithm.variants.gain import ROUNDING
from teamtr_lora.algorithm.variants.region import TrustRegion
from teamtr_lora.recipe import TeamTRConfig
from teamtr_lora.training.batches import MessageBatch
from teamtr_lora.training.scoring import CurrentPolicy, Scorer, by_token, tokens_of, unknown

ENOUGH_MESSAGES = 64  # of a minibatch, for the sign of a mean over them
MOST_OVERFLOWS = 8  # of one step; each halves the factor by which the loss is scaled


@dataclass
class Minibatch:
    """The messages of one optimizer step, and the policy that the update starts from. None: the first pass is that policy's."""

    batch: MessageBatch
    current: CurrentPolicy | None = None


@dataclass(frozen=True, kw_only=True)
class Learner:
    """What the optimization of one agent works with."""

    scorer: Scorer
    optimizer: Any
    parameters: list[torch.nn.Parameter]
    scaler: torch.amp.GradScaler
    config: TeamTRConfig
    region: TrustRegion
    start_again: Callable[[], None]  # puts adapter and optimizer back to where the update began


@dataclass(kw_only=True)
class OptimizeReport:
    steps: int = 0
    planned: int = 0  # steps, had nothing stopped it
    probes: int = 0  # steps that were taken back, because the learning rate was far from the right one
    overshot: bool = False  # one of them went beyond the best of the surrogate: the radius is not what bounds this update
    learning_rate: float  # mean over the steps
    kl: float = 0.0  # in-sample, exact: of the accepted step; else as the last pass measured it
    kl_bound: float = 0.0  # of that, where a step was accepted
    gain: float | None = None  # in-sample: how much the accepted step improves the surrogate. None: not measured
    clip_rate: float = 0.0  # share of messages whose ratio was clipped, then
    gradient_norm: float = 0.0
    gradient_signal: float | None = None  # share of the first step's squared gradient that is not noise
    stopped_early: bool = False
    beta: float

    @property
    def improves(self) -> bool:
        """Whether the step improves the surrogate on the episodes that it was fitted to, by more than rounding explains."""
        return self.gain is not None and self.gain > ROUNDING


@dataclass(kw_only=True)
class InSample:
    """Means over the messages of one minibatch, and each message's log-ratio."""

    kl: float
    kl_bound: float = 0.0
    gain: float = 0.0  # of the surrogate without clipping and penalty, over the policy that the update started from
    clip_rate: float = 0.0
    signal: float | None = None  # share of the squared gradient that is not noise, where one was made
    log_ratio_M: Tensor
    kl_M: Tensor
    group_M: Tensor
    weight_M: Tensor


def in_sample_bound(kl_M: Tensor, group_M: Tensor, weight_M: Tensor, confidence: float) -> float:
    """The upper bound of the mean KL, clustered by group as the gate's; one group alone has none, and its mean is taken."""
    found = clustered_mean(kl_M, group_M, confidence, weight_M)
    return found.bound if found.standard_error < math.inf else found.mean


def optimize(
    learner: Learner, minibatches: list[Minibatch], *, radius: float, beta: float, rate: float, probe: bool
) -> OptimizeReport:
    """Steps until the epochs are done or the trust region says stop. The pass that makes a gradient also measures the steps
    before it, so a kind of region that stops at its radius never takes a step from outside. `probe`: `rate` is only where to
    start."""
    region, training = learner.region, learner.config.training
    steps = [minibatch for _ in range(training.inner_epochs) for minibatch in minibatches]
    automatic = training.learning_rate == "auto" and region.gates
    pace = Pace(rate, radius, len(steps), automatic=automatic, probe=probe)
    report = OptimizeReport(beta=region.penalty(beta), learning_rate=rate, planned=len(steps))
    passes = [*steps, steps[0]] if probe and len(steps) == 1 else steps  # a single step is probed by a further pass
    while len(pace.taken) < len(passes):
        minibatch, taken = passes[len(pace.taken)], len(pace.taken)
        seen = accumulate(learner, minibatch, report.beta)
        if pace.takes_back(seen.kl_bound, harms=minibatch is steps[0] and seen.gain <= 0):
            learner.optimizer.zero_grad(set_to_none=True)  # the pass that measured the step has made a gradient there
            learner.start_again()
            continue
        if taken:  # before the first step the KL is 0 and says nothing
            report.kl, report.clip_rate = seen.kl, seen.clip_rate
        if 0 < taken < len(steps):  # after the last step the gate's reading says what the next update's penalty is
            report.beta = region.next_penalty(report.beta, seen.kl, radius)
            pace.after(seen.kl_bound)
        if region.stops(seen.kl, radius) or pace.rate == 0 or taken == len(steps):
            report.stopped_early = taken < len(steps)
            learner.optimizer.zero_grad(set_to_none=True)
            break
        norm, signal = _step(learner, minibatch, seen, report.beta, pace.rate)
        if not math.isfinite(norm):
            break
        report.gradient_norm, report.gradient_signal = norm, report.gradient_signal if taken else signal
        pace.taken.append(pace.rate)
    report.steps, report.probes, report.overshot, report.learning_rate = len(pace.taken), pace.probes, pace.overshot, pace.mean
    return report


def _step(learner: Learner, minibatch: Minibatch, seen: InSample, beta: float, rate: float) -> tuple[float, float | None]:
    """One step of the optimizer along the gradient that was accumulated when `seen` was measured. Where a scaled loss overflowed,
    it is made again with a smaller scale. Returns its norm, which is of no step if it is not finite, and its signal."""
    optimizer, scaler = learner.optimizer, learner.scaler
    for group in optimizer.param_groups:
        group["lr"] = rate
    for overflows in range(MOST_OVERFLOWS):
        if overflows:
            seen = accumulate(learner, minibatch, beta)
        scaler.unscale_(optimizer)
        norm = float(torch.nn.utils.clip_grad_norm_(learner.parameters, learner.config.training.max_grad_norm))
        if math.isfinite(norm):
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if math.isfinite(norm):
            break
    return norm, seen.signal


def accumulate(
    learner: Learner, minibatch: Minibatch, beta: float, among: Collection[int] | None = None, *, room: int = 0
) -> InSample:
    """Makes the gradient of one optimizer step (none under no_grad), and returns what was measured. Every micro-batch is computed
    by one rank; their gradients are added in fixed point, so that the sum is the same for any number of ranks.

    A first pass sees the policy that the update starts from, and keeps it: all ratios are 1 there, and the KL and its gradient 0.
    `among`: of these micro-batches only; a first pass is of all. `room`: bits more for micro-batches whose gradient is larger
    than the first one's; a pass that turns out to need them is made again.
    """
    batch, config, scorer = minibatch.batch, learner.config, learner.scorer
    count, device = len(batch.messages), scorer.device
    advantage_M, weight_M = batch.advantage_M.to(device), (batch.weight_M / batch.weight_M.sum()).to(device)
    first, current = minibatch.current is None, minibatch.current or CurrentPolicy(unknown(batch), unknown(batch))
    logp, kls = unknown(batch), unknown(batch)  # of the adapter as it is now
    gradient = _Gradient(learner, batch, room) if torch.is_grad_enabled() else None
    for place in scorer.passes(batch, among):
        part = batch.microbatches[place]
        if first:
            scores, current.states[place] = scorer.score_and_keep(part)
            current.logp[place] = scores.logp_N.detach()
        elif gradient is None:
            scores = scorer.read(part, current.states[place])
        else:
            scores, _ = scorer.score_and_keep(part, current.states[place])
        logp_cur, kl_N = current.logp[place], torch.zeros_like(scores.logp_N) if first else scores.kl_N
        assert kl_N is not None
        logp[place], kls[place] = scores.logp_N.detach(), kl_N.detach()
        if gradient is not None:
            terms = surrogate_terms(scores.logp_N, logp_cur, part.message_N, advantage_M, **_clipping(config))
            present_M = torch.zeros(count, device=device).index_fill(0, part.message_N, 1.0)
            gain = ((terms.objective_M - advantage_M) * present_M).sum() / count
            kl = (message_kl(kl_N, part.message_N, count, config.trust_region.reduction) * weight_M).sum()
            learner.scaler.scale(beta * kl - gain).backward()
            gradient.take(place, present_M.sum() / count)
    if gradient is not None and not gradient.finish():
        return accumulate(learner, minibatch, beta, among, room=room + MORE_ROOM)
    minibatch.current = current
    if among is not None:
        batch, current = batch.among(among), CurrentPolicy([], [current.logp[place] for place in among])
        logp, kls = [logp[place] for place in among], [kls[place] for place in among]
    found = _in_sample(learner, batch, current, logp, kls)
    found.signal = gradient.signal if gradient is not None else None
    return found


def _clipping(config: TeamTRConfig) -> dict[str, Any]:
    training = config.training
    return {"clip": training.clip_ratio, "clip_high": training.clip_ratio_high, "ratio": training.ratio}


def _in_sample(learner: Learner, batch: MessageBatch, current: CurrentPolicy, logp: list[Tensor], kls: list[Tensor]) -> InSample:
    """All messages together, in one order, whichever rank has scored them."""
    config, ranks = learner.config, learner.scorer.ranks
    kl_N, logp_N, logp_cur_N = (by_token(ranks, batch, values) for values in (kls, logp, current.logp))
    message_N, count = tokens_of(batch, "message_N"), len(batch.messages)
    terms = surrogate_terms(logp_N, logp_cur_N, message_N, batch.advantage_M, **_clipping(config))
    kl_M = message_kl(kl_N, message_N, count, config.trust_region.reduction).double()
    weight_M = batch.weight_M.double() / batch.weight_M.double().sum()
    kl, bound, gain, clipped = ranks.broadcast(
        (
            float((kl_M * weight_M).sum()),
            in_sample_bound(kl_M, batch.group_M, batch.weight_M, config.trust_region.confidence),
            float((terms.unclipped_M - batch.advantage_M).double().mean()),
            float(terms.clipped_M.double().mean()),
        )
    )
    return InSample(
        kl=kl,
        kl_bound=bound,
        gain=gain,
        clip_rate=clipped,
        log_ratio_M=terms.log_ratio_M,
        kl_M=kl_M,
        group_M=batch.group_M,
        weight_M=batch.weight_M,
    )


class _Gradient:
    """The gradient of one optimizer step: a sum over micro-batches, in units that the first micro-batch's rank chooses."""

    signal: float | None = None  # share of its square that is not noise, once it is finished

    def __init__(self, learner: Learner, batch: MessageBatch, room: int) -> None:
        self._parameters, self._ranks = learner.parameters, learner.scorer.ranks
        self._device, self._addends = learner.scorer.device, len(batch.microbatches)
        self._begins, self._room = learner.scorer.owners(batch)[0] == self._ranks.rank, room
        self._sum: FixedPointSum | None = None
        # by micro-batch: the square of its gradient's length, and of its share of the messages
        self._squares = torch.zeros(self._addends, 2, dtype=torch.float64, device=self._device)
        self._clear()

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def take(self, place: int, share: Tensor) -> None:
        """Adds what the backward pass of micro-batch `place`, with this share of the messages, has left in the parameters, and
        takes it out of them. The first call of the rank that has the first micro-batch is of that one."""
        parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        vector = torch.cat([part.flatten() for part in parts])
        self._clear()
        self._opened(vector).add(vector)
        self._squares[place] = torch.stack([torch.linalg.vector_norm(vector, dtype=torch.float64), share.double()]).square()

    def _opened(self, vector: Tensor | None) -> FixedPointSum:
        if self._sum is None:
            exponent = torch.tensor([unit_exponent(vector) + self._room if self._begins and vector is not None else 0])
            self._ranks.add_up(exponent)
            size = sum(p.numel() for p in self._parameters)
            self._sum = FixedPointSum(size, int(exponent), self._addends, self._device)
        return self._sum

    def finish(self) -> bool:
        """Puts the sum over all ranks into the parameters; False where it had too little room."""
        total = self._opened(None)  # a rank without a micro-batch has none yet
        self._ranks.add_up(total.units)
        if total.too_small:
            return False
        vector, squares = total.value(), self._squares.cpu()
        for parameter, part in zip(self._parameters, vector.split([p.numel() for p in self._parameters]), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)
        self._ranks.add_up(squares)
        whole = float(torch.linalg.vector_norm(vector, dtype=torch.float64).square())
        self.signal = signal_share(whole, *squares.sum(0).tolist())
        return True


@torch.no_grad()
def measure_in_sample(
    learner: Learner, minibatches: list[Minibatch], report: OptimizeReport, *, whole: bool = True
) -> list[InSample]:
    """Measures the adapter as it is now on the messages that it was fitted to, and completes the report. Not `whole`: every n-th
    micro-batch will do where there are many messages, and micro-batches are groups in no special order. Padded ones are ordered
    by length."""
    part = not whole and learner.scorer.takes_segments
    seen = [accumulate(learner, each, report.beta, _enough_of(each.batch) if part else None) for each in minibatches]
    report.kl = sum(each.kl for each in seen) / len(seen)
    report.gain = sum(each.gain for each in seen) / len(seen)
    report.clip_rate = sum(each.clip_rate for each in seen) / len(seen)
    kl_M, group_M, weight_M = (torch.cat(parts) for parts in zip(*((s.kl_M, s.group_M, s.weight_M) for s in seen), strict=True))
    bound = in_sample_bound(kl_M, group_M, weight_M, learner.config.trust_region.confidence)
    report.kl_bound = learner.scorer.ranks.broadcast(bound)
    return seen


def _enough_of(batch: MessageBatch) -> range:
    """Micro-batches evenly spread, with about so many messages or more."""
    return range(0, len(batch.microbatches), max(1, len(batch.messages) // ENOUGH_MESSAGES))
