"""Kinds of trust region (eq:tr): what penalises, stops, shortens or rejects an agent's step.

Every kind is measured on episodes that the step was not fitted to, and then on those it was; kinds differ in what they do with
the readings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Protocol

from teamtr_lora.algorithm.trust_region import GateReading, StepDecision, adapt_beta, choose_step, track_target
from teamtr_lora.algorithm.variants.gain import GAINS, GainRule


class RegionSettings(Protocol):
    @property
    def delta(self) -> float: ...
    @property
    def step(self) -> str: ...
    @property
    def max_stretch(self) -> float: ...
    @property
    def backtracks(self) -> int: ...
    @property
    def gain(self) -> str: ...


class TrustRegion:
    """Holds nothing back: what the kinds below have in common, and where a new kind starts from."""

    words: ClassVar[str]
    gates: ClassVar[bool] = False  # a step outside the region is never accepted

    def __init__(self, settings: RegionSettings) -> None:
        self.settings = settings

    @property
    def gain_rule(self) -> GainRule:
        """What is asked of a step's surrogate gain: nothing, where the region holds no step back."""
        return GainRule()

    def penalty(self, beta: float) -> float:
        """The weight of the KL in the surrogate (eq:ppo_obj) at the start of an update; `beta` is the agent's from before."""
        return beta

    def next_penalty(self, beta: float, kl: float, radius: float) -> float:
        """The weight after a pass that measured `kl` in-sample."""
        return beta

    def stops(self, kl: float, radius: float) -> bool:
        """Whether optimization ends where the in-sample KL is `kl`."""
        return False

    def choose(self, measure: Callable[[float], GateReading], radius: float) -> StepDecision:
        """How much of the optimizer's step is kept; `measure(alpha)` reads current + alpha (candidate - current).

        Here the whole of it, unless it is broken: infinite or NaN.
        """
        whole = measure(1.0)
        sound = math.isfinite(whole.kl.mean) and math.isfinite(whole.gain.mean)
        return StepDecision(whole if sound else None, [whole])

    def shorter(self, chosen: GateReading, radius: float) -> float | None:
        """The length to try instead of the chosen one, whose KL bound on the messages it was fitted to is now known. None: it
        stays."""
        return None

    def next_radius(self, radius: float, kl: float) -> float:
        """The agent's radius after an accepted step of mean KL `kl`."""
        return radius


class PenaltyFixed(TrustRegion):
    """The KL penalty with the weight beta_initial, and nothing else (the fixed-penalty baseline)."""

    words = "only the KL penalty in the surrogate, of fixed weight"


class PenaltyAdaptive(TrustRegion):
    """The KL penalty alone, its weight doubled far outside the region and halved far inside (PPO's adaptive penalty)."""

    words = "only the KL penalty, whose weight doubles and halves to keep the KL near delta"

    def next_penalty(self, beta: float, kl: float, radius: float) -> float:
        return adapt_beta(beta, kl, radius)


class Unbounded(TrustRegion):
    """No trust region at all."""

    words = "nothing holds an update back"

    def penalty(self, beta: float) -> float:
        return 0.0


class Gate(PenaltyAdaptive):
    """The default: adaptive penalty, early stop where the in-sample KL reaches the radius, then the step is shortened until its
    KL bound is within the radius, on held-out messages and on those it was fitted to. A step that the rule `gain` does not
    allow is rejected."""

    words = "every update is measured on held-out messages and shrunk or rejected if out of region"
    gates = True

    @property
    def gain_rule(self) -> GainRule:
        return GAINS[self.settings.gain]()

    def stops(self, kl: float, radius: float) -> bool:
        return kl >= radius

    def choose(self, measure: Callable[[float], GateReading], radius: float) -> StepDecision:
        settings = self.settings
        return choose_step(
            measure,
            delta=radius,
            rule=self.gain_rule,
            fill=settings.step == "fill",
            max_stretch=settings.max_stretch,
            evaluations=settings.backtracks,
        )

    def shorter(self, chosen: GateReading, radius: float) -> float | None:
        return None if chosen.in_region(radius) else chosen.shortened(radius)


class AdaptiveRadius(Gate):
    """The gate, with a radius that moves until accepted steps have a mean KL of delta: the gate compares an upper bound with the
    radius, so with a fixed one their mean stays below it."""

    words = "the same, with a radius that moves until steps have a mean KL of delta"

    def next_radius(self, radius: float, kl: float) -> float:
        return track_target(radius, kl, self.settings.delta)


REGIONS: dict[str, type[TrustRegion]] = {
    "gate": Gate,
    "adaptive_radius": AdaptiveRadius,
    "penalty_adaptive": PenaltyAdaptive,
    "penalty_fixed": PenaltyFixed,
    "none": Unbounded,
}
