"""The trust region's arithmetic: the adaptive penalty, the adaptive radius, and the search for the step length."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
    fitted_bound: float | None = None  # of the exact KL on the messages that it was fitted to; None: not measured

    @property
    def bound(self) -> float:
        """The larger bound of the two: held-out messages can miss the few contexts that carry a step's KL, and those that it was
        fitted to are where it moved most. What is not a number bounds nothing."""
        bounds = (self.kl.bound,) if self.fitted_bound is None else (self.kl.bound, self.fitted_bound)
        return math.inf if any(map(math.isnan, bounds)) else max(bounds)

    def in_region(self, delta: float) -> bool:
        return self.bound <= delta

    def shortened(self, delta: float) -> float:
        """A length that should be in region, where this one is not."""
        reach = math.sqrt(delta / self.bound) if math.isfinite(self.bound) else 0.25
        return self.alpha * min(0.9, AIM * reach)


@dataclass(frozen=True)
class StepDecision:
    accepted: GateReading | None  # None: rejected
    readings: list[GateReading] = field(default_factory=list)
    refused: GateReading | None = None  # held-out episodes allowed it, those that it was fitted to did not
    radius: float | None = None  # that the readings were compared with; None: with the agent's

    def fitted(self, bound: float) -> tuple[StepDecision, GateReading]:
        """The same with the accepted step's KL bound on the messages that it was fitted to; and that step."""
        assert self.accepted is not None
        known = replace(self.accepted, fitted_bound=bound)
        readings = [known if reading is self.accepted else reading for reading in self.readings]
        return replace(self, accepted=known, readings=readings), known

    @property
    def shown(self) -> GateReading | None:
        """The reading to report: the accepted one, the refused one, or the last that was tried."""
        return self.accepted or self.refused or (self.readings[-1] if self.readings else None)


def choose_step(
    measure: Callable[[float], GateReading], *, delta: float, rule: GainRule, fill: bool, max_stretch: float, evaluations: int
) -> StepDecision:
    """The largest alpha found whose KL bound is within delta, if `rule` allows its surrogate gain; none: reject.

    Starts from the optimizer's own step, alpha = 1, and shrinks until it fits. With `fill` it also lengthens a step that
    stopped short of the boundary, as TRPO's line search does, up to `max_stretch`.
    """
    readings: list[GateReading] = []
    best: GateReading | None = None
    outside: GateReading | None = None  # the shortest step that is known to leave the region
    alpha: float | None = 1.0
    while alpha is not None and len(readings) < evaluations:
        reading = measure(alpha)
        readings.append(reading)
        if not reading.in_region(delta):
            outside = reading
        elif rule.allows(reading.gain):
            best = reading
        elif best is not None or not rule.shortens or alpha / 4 < SHORTEST:
            break
        else:
            alpha /= 4
            continue
        alpha = _next_alpha(best, outside, delta, fill=fill, max_stretch=max_stretch)
    return StepDecision(best, readings, radius=delta)


def _next_alpha(
    best: GateReading | None, outside: GateReading | None, delta: float, *, fill: bool, max_stretch: float
) -> float | None:
    """The length to measure next; None where the best one so far is good enough. What a length outside says by the square law is
    not exceeded: farther out the KL grows faster than that, in contexts that these messages may have missed."""
    if best is None:
        assert outside is not None
        return outside.shortened(delta)
    if not fill:
        return None
    if outside is not None:
        longer = outside.shortened(delta)
    else:
        longer = min(max_stretch, best.alpha * AIM * math.sqrt(delta / best.bound)) if best.bound > 0 else max_stretch
    return longer if longer >= best.alpha * WORTHWHILE_STRETCH else None
