"""The gate: what a candidate's KL and surrogate gain are on messages held out from the gradient, and how much of it is kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from teamtr_lora.algorithm.clustered import ClusteredMean, clustered_mean, mean_with_known_zeros
from teamtr_lora.algorithm.surrogate import surrogate_terms
from teamtr_lora.algorithm.token_kl import k1_terms, k3_terms, message_kl
from teamtr_lora.algorithm.trust_region import GateReading, StepDecision
from teamtr_lora.algorithm.variants.reduction import REDUCTIONS
from teamtr_lora.algorithm.variants.region import TrustRegion
from teamtr_lora.base.bank import AdapterBank, Snapshot
from teamtr_lora.base.memory import memory_phase
from teamtr_lora.recipe import TeamTRConfig
from teamtr_lora.training.batches import MessageBatch
from teamtr_lora.training.scoring import CurrentPolicy, Scorer, by_token, keep_current, tokens_of, unknown


@dataclass(frozen=True)
class CandidateReading:
    """Everything logged about one candidate on the held-out messages."""

    kl: dict[str, ClusteredMean]  # by estimator, in the recipe's reduction
    token_mean_kl: float
    message_sum_kl: float
    discounted_kl: float  # def:kltok
    gain: ClusteredMean  # of the surrogate without clipping, over the current policy's
    log_ratio_M: Tensor  # log of each message's ratio, candidate to current
    kl_M: Tensor  # exact KL of each message, summed over its tokens
    group_M: Tensor
    terms_N: dict[str, Tensor]  # by estimator: what every token adds to its message's KL, in the order of the micro-batches

    @property
    def log_ratio_max(self) -> float:
        return float(self.log_ratio_M.abs().max())


@contextmanager
def gate_pass(scorer: Scorer, *, tf32: bool | None = None) -> Iterator[None]:
    """Passes inside have no gradients and strict float32 arithmetic: they measure the policy as it is defined, whatever the
    base's precision. With `tf32` (None: as the recipe says) matrix products are rounded to TF32, which is faster on a GPU."""
    strict = nullcontext() if scorer.exact_already else scorer.strict(tf32=scorer.tf32 if tf32 is None else tf32)
    with memory_phase("gate"), torch.no_grad(), strict:
        yield


@torch.no_grad()
def read_candidate(
    scorer: Scorer,
    batch: MessageBatch,
    current: CurrentPolicy,
    config: TeamTRConfig,
    discount: float,
    mixed: Collection[int] | None = None,
) -> CandidateReading:
    """Scores the adapter as it is now against the kept current policy. Call inside `gate_pass`. `mixed`: groups that differ in
    return, also in episodes that are not in the batch; None: those that do in the batch.

    Every micro-batch is scored by one rank; means are over all tokens and messages, in one order."""
    logp, kls = unknown(batch), unknown(batch)
    for place in scorer.passes(batch):
        scores = scorer.read(batch.microbatches[place], current.states[place])
        assert scores.kl_N is not None
        logp[place], kls[place] = scores.logp_N, scores.kl_N
    kl_N, logp_N, logp_cur_N = (by_token(scorer.ranks, batch, values) for values in (kls, logp, current.logp))
    count, message_N = len(batch.messages), tokens_of(batch, "message_N")
    terms_N = {"exact": kl_N, "k3": k3_terms(logp_cur_N, logp_N), "k1": k1_terms(logp_cur_N, logp_N)}
    training = config.training
    terms = surrogate_terms(logp_N, logp_cur_N, message_N, batch.advantage_M, clip=training.clip_ratio, ratio=training.ratio)
    reduction, sums = config.trust_region.reduction, message_kl(kl_N, message_N, count, "message_sum")
    lengths = message_N.bincount(minlength=count).float()
    share_M = batch.weight_M.double() / batch.weight_M.double().sum()
    differ = batch.group_M[batch.advantage_M != 0] if mixed is None else torch.tensor(sorted(mixed), dtype=torch.long)
    even_M = ~torch.isin(batch.group_M, differ)  # no step gains or loses in these
    judged = batch.group_M, config.trust_region.confidence, batch.weight_M

    def mean(values_M: Tensor) -> ClusteredMean:
        return clustered_mean(values_M, *judged)

    return CandidateReading(
        kl={name: mean(message_kl(values_N, message_N, count, reduction)) for name, values_N in terms_N.items()},
        token_mean_kl=float((share_M * sums / lengths.clamp(min=1)).sum()),
        message_sum_kl=float((share_M * sums).sum()),
        discounted_kl=_discounted(sums, batch, discount),
        gain=mean_with_known_zeros(terms.unclipped_M - batch.advantage_M, even_M, *judged),
        log_ratio_M=terms.log_ratio_M,
        kl_M=sums,
        group_M=batch.group_M,
        terms_N={name: REDUCTIONS[reduction].of_message(n, lengths[message_N]) for name, n in terms_N.items()},
    )


def _discounted(kl_M: Tensor, batch: MessageBatch, discount: float) -> float:
    """(1 - gamma) sum_t gamma^t KL_t, averaged over the episodes in which the agent spoke (def:kltok)."""
    turns = torch.tensor([m.turn for m in batch.messages], dtype=torch.float64)
    weighted = (1 - discount) * torch.pow(torch.tensor(discount, dtype=torch.float64), turns) * kl_M.double()
    weight_E = torch.zeros(int(batch.episode_M.max()) + 1).index_copy_(0, batch.episode_M, batch.weight_M)
    return float((weighted * batch.weight_M).sum() / weight_E.sum())


@dataclass(frozen=True)
class Judging:
    """What the candidate was judged on: held-out messages, their groups, and how much each episode counts."""

    batch: MessageBatch
    groups: set[int]
    mixed: set[int]  # those of the newest rollout that differ in return
    weight_E: np.ndarray
    read_E: np.ndarray  # whether the episode was read


@dataclass
class Judge:
    """Measures current + alpha (candidate - current) of one agent on held-out messages, and leaves the agent at the accepted
    length."""

    scorer: Scorer
    bank: AdapterBank
    config: TeamTRConfig
    discount: float
    agent: str
    judging: Judging
    before: Snapshot
    candidate: Snapshot
    readings: dict[float, CandidateReading] = field(default_factory=dict)  # by alpha: everything that was measured
    current: CurrentPolicy | None = None

    def choose(self, region: TrustRegion, radius: float) -> StepDecision:
        """Measures the lengths that the trust region asks for."""
        with gate_pass(self.scorer):
            self.bank.restore(self.agent, self.before)
            self.current = keep_current(self.scorer, self.judging.batch)
            step = region.choose(self._measure, radius)
            if step.accepted is not None:  # a longer one may have been tried after it
                self.bank.interpolate(self.agent, self.before, self.candidate, step.accepted.alpha)
            return step

    def choose_shorter(self, region: TrustRegion, radius: float, alpha: float, step: StepDecision) -> StepDecision:
        """`alpha` instead of the accepted length, which the messages that it was fitted to have shown to be too long."""
        with gate_pass(self.scorer):
            reading = self._measure(alpha)
        allowed = reading.in_region(radius) and region.gain_rule.allows(reading.gain)
        return replace(step, accepted=reading if allowed else None, readings=[*step.readings, reading])

    def _measure(self, alpha: float) -> GateReading:
        assert self.current is not None
        batch = self.judging.batch
        self.bank.interpolate(self.agent, self.before, self.candidate, alpha)
        found = read_candidate(self.scorer, batch, self.current, self.config, self.discount, self.judging.mixed)
        self.readings[alpha] = found
        reading = GateReading(alpha, found.kl[self.config.trust_region.estimator], found.gain)
        return self.scorer.ranks.broadcast(reading)  # one rank decides which lengths are tried, and which is taken
