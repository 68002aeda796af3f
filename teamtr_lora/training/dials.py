"""What an update says for the agent's next one: its penalty, radius, slope and learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from teamtr_lora.algorithm.step_size import MOST_CHANGE, next_rate
from teamtr_lora.algorithm.trust_region import StepDecision
from teamtr_lora.algorithm.variants.chosen import Variants
from teamtr_lora.algorithm.variants.radii import RADII, gain_slope, smoothed
from teamtr_lora.recipe import TeamTRConfig, TrustRegionSection
from teamtr_lora.runs.run_state import Dials
from teamtr_lora.training.gate import CandidateReading
from teamtr_lora.training.optimize import OptimizeReport


def after_update(
    dials: Dials, config: TeamTRConfig, optimized: OptimizeReport, step: StepDecision, readings: dict[float, CandidateReading]
) -> Dials:
    """`readings`: by alpha. A rejected step gained nothing, whatever was measured for it, and moves no radius."""
    assert step.shown is not None
    region, reading, gain = Variants.of(config).region, readings[step.shown.alpha], 0.0
    beta, rate, radius = optimized.beta, dials.rate, dials.radius
    if not optimized.stopped_early:  # the gate is the first to measure the last step
        beta = region.next_penalty(beta, step.readings[0].kl.mean, radius)  # the first is of the optimizer's own step
    if config.training.learning_rate == "auto" and region.gates:
        rate = _next_rate(optimized, step, radius)
    if step.accepted:
        gain = reading.gain.mean
        radius = region.next_radius(radius, reading.kl[config.trust_region.estimator].mean)
    return Dials(beta, radius, smoothed(dials.slope, gain_slope(gain, reading.kl["exact"].mean)), rate)


def _next_rate(optimized: OptimizeReport, step: StepDecision, radius: float) -> float:
    at = step.accepted or step.readings[0]
    unbounded = 1.0 if math.isfinite(at.kl.mean) else 0.0  # one group has no bound; a KL that is no number is much too far
    reach = at.alpha * math.sqrt(radius / at.bound) if 0 < at.bound < math.inf else unbounded
    most = 1.0 if optimized.overshot else MOST_CHANGE
    if step.refused:  # it went too far for the episodes it was fitted to, whatever the radius is
        most = 1 / MOST_CHANGE
    return next_rate(optimized.learning_rate, reach, taken=optimized.steps, planned=optimized.planned, most=most)


def in_the_next_stage(dials: Mapping[str, Dials], region: TrustRegionSection) -> dict[str, Dials]:
    """The team's dials, with the radii of another stage."""
    radii = {agent: own.radius for agent, own in dials.items()}
    slopes = {agent: own.slope for agent, own in dials.items()}
    radii = RADII[region.radii]().next_stage(radii, slopes, region.delta)
    return {agent: replace(own, radius=radii[agent]) for agent, own in dials.items()}
