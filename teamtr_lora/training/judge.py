"""The judge of one update: how long a step is kept, by held-out messages and by those that it was fitted to."""

from __future__ import annotations

from dataclasses import dataclass, field

from teamtr_lora.algorithm.trust_region import GateReading, StepDecision
from teamtr_lora.algorithm.variants.region import TrustRegion
from teamtr_lora.base.bank import AdapterBank, Snapshot
from teamtr_lora.recipe import TeamTRConfig
from teamtr_lora.training.batches import MessageBatch
from teamtr_lora.training.gate import CandidateReading, gate_pass, read_candidate
from teamtr_lora.training.scoring import CurrentPolicy, Scorer, keep_current


@dataclass(kw_only=True)
class Judge:
    """Measures current + alpha (candidate - current) of one agent on held-out messages, and leaves the agent at the accepted
    length."""

    scorer: Scorer
    bank: AdapterBank
    config: TeamTRConfig
    discount: float
    agent: str
    batch: MessageBatch
    before: Snapshot
    candidate: Snapshot
    readings: dict[float, CandidateReading] = field(default_factory=dict)  # by alpha: everything that was measured
    current: CurrentPolicy | None = None

    def choose(self, region: TrustRegion, radius: float) -> StepDecision:
        """Measures the lengths that the trust region asks for."""
        with gate_pass(self.scorer):
            self.bank.restore(self.agent, self.before)
            self.current = keep_current(self.scorer, self.batch)
            step = region.choose(self._measure, radius)
            if step.accepted is not None:  # a longer one may have been tried after it
                self.bank.interpolate(self.agent, self.before, self.candidate, step.accepted.alpha)
            return step

    def choose_shorter(self, region: TrustRegion, radius: float, alpha: float, step: StepDecision) -> StepDecision:
        """`alpha` instead of the accepted length, which the messages that it was fitted to have shown to be too long."""
        with gate_pass(self.scorer):
            reading = self._measure(alpha)
        allowed = reading.in_region(radius) and region.gain_rule.allows(reading.gain)
        return StepDecision(reading if allowed else None, [*step.readings, reading])

    def _measure(self, alpha: float) -> GateReading:
        assert self.current is not None
        self.bank.interpolate(self.agent, self.before, self.candidate, alpha)
        found = read_candidate(self.scorer, self.batch, self.current, self.config, self.discount)
        self.readings[alpha] = found
        reading = GateReading(alpha, found.kl[self.config.trust_region.estimator], found.gain)
        return self.scorer.ranks.broadcast(reading)  # one rank decides which lengths are tried, and which is taken
