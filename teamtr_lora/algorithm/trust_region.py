"""The trust region's arithmetic: the adaptive penalty, the adaptive radius, and the search for the step length."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teamtr_lora.algorithm.variants.gain import GainRule

if TYPE_CHECKING:
    from teamtr_lora.algorithm.clustered import ClusteredMean

ESTIMATORS = ("exact", "k3", "k1")  # of the KL: all are logged, and trust_region.estimator gates

# KL is quadratic in the step length, so alpha * sqrt(delta / bound) aims at the boundary; aiming a little inside saves a try.
AIM = 0.97
# A stretch worth less than this factor is not worth another evaluation.
WORTHWHILE_STRETCH = 1.1
# In region the surrogate is nearly linear in the step: where this short a step gains nothing, no step does.
SHORTEST = 0.05
BETA_RANGE = (1e-4, 1e4)
# An adaptive radius changes by at most the first factor in one update, and stays within the second of its target.
MOST_CHANGE, RADIUS_RANGE = 1.5, 10.0


def track_target(radius: float, kl: float, target: float) -> float:
    """`adaptive_radius`: the next radius. The gate compares an upper bound with it, so accepted steps have a mean KL below the
    radius; this moves the radius until that mean is the target."""
    if not 0 < kl < math.inf:
        return radius
    factor = min(max(target / kl, 1 / MOST_CHANGE), MOST_CHANGE)
    return min(max(radius * factor, target / RADIUS_RANGE), target * RADIUS_RANGE)


def adapt_beta(beta: float, kl: float, delta: float) -> float:
    """Doubles the penalty when the step is far outside the region, halves it when it is far inside."""
    if kl > 1.5 * delta:
        beta *= 2
    elif kl < delta / 1.5:
        beta /= 2
    return min(max(beta, BETA_RANGE[0]), BETA_RANGE[1]) if beta else 0.0


@dataclass(frozen=True)
class GateReading:
    """What the gate measured for current + alpha (candidate - current)."""

    alpha: float
    kl: ClusteredMean
    gain: ClusteredMean  # surrogate of this candidate minus that of the current policy

    def in_region(self, delta: float) -> bool:
        return self.kl.bound <= delta


@dataclass(frozen=True)
class StepDecision:
    accepted: GateReading | None  # None: rejected
    readings: list[GateReading] = field(default_factory=list)

    @property
    def shown(self) -> GateReading | None:
        """The reading to report: the accepted one, or the last that was tried."""
        return self.accepted or (self.readings[-1] if self.readings else None)


def choose_step(
    measure: Callable[[float], GateReading], *, delta: float, rule: GainRule, fill: bool, max_stretch: float, evaluations: int
) -> StepDecision:
    """The largest alpha found whose KL bound is within delta, if `rule` allows its surrogate gain; none: reject.

    Starts from the optimizer's own step, alpha = 1, and shrinks until it fits. With `fill` it also lengthens a step that
    stopped short of the boundary, as TRPO's line search does, up to `max_stretch`.
    """
    readings: list[GateReading] = []
    best: GateReading | None = None
    alpha = 1.0
    while len(readings) < evaluations:
        reading = measure(alpha)
        readings.append(reading)
        reach = math.sqrt(delta / reading.kl.bound) if 0 < reading.kl.bound < math.inf else math.inf
        if reading.in_region(delta) and rule.allows(reading.gain):
            best = reading
            longer = min(max_stretch, alpha * AIM * reach)
            if not fill or len(readings) > 1 and alpha < 1 or longer < alpha * WORTHWHILE_STRETCH:
                break
            alpha = longer
        elif best is not None:  # the stretch went too far: keep the length that is known to be good
            break
        elif reading.in_region(delta):
            alpha /= 4
            if not rule.shortens or alpha < SHORTEST:
                break
        else:
            alpha *= min(0.9, AIM * reach) if math.isfinite(reading.kl.bound) else 0.25
    return StepDecision(best, readings)
