"""What an update says for the next one, from readings that are chosen by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from teamtr_lora.algorithm.clustered import ClusteredMean
from teamtr_lora.algorithm.trust_region import GateReading, StepDecision
from teamtr_lora.recipe import TeamTRConfig
from teamtr_lora.runs.run_state import Dials
from teamtr_lora.training.dials import after_update
from teamtr_lora.training.optimize import OptimizeReport

Config = Callable[..., TeamTRConfig]
DIALS = Dials(beta=1.0, radius=0.01, slope=2.0, rate=1e-3)


def reading(alpha: float, kl: float, bound: float | None = None) -> GateReading:
    return GateReading(alpha, ClusteredMean(kl, 0.0, bound or kl), ClusteredMean(0.3, 0.0, 0.3))


def after(config: TeamTRConfig, step: StepDecision, **report: Any) -> Dials:
    """Four steps of 4e-4 on average, as planned."""
    optimized = OptimizeReport(beta=1.0, **{"learning_rate": 4e-4, "steps": 4, "planned": 4, **report})
    logged: Any = {each.alpha: type("Logged", (), {"kl": {"exact": each.kl}, "gain": each.gain}) for each in step.readings}
    return after_update(DIALS, config, optimized, step, logged)


def test_the_penalty_goes_by_the_optimizers_own_step_and_not_by_what_was_left_of_it(config: Config) -> None:
    whole, kept = reading(1.0, 0.04), reading(0.45, 0.009)
    step = StepDecision(kept, [whole, kept])
    assert after(config(delta=0.01), step).beta == 2.0
    assert after(config(delta=0.01), step, stopped_early=True).beta == 1.0, "the last pass has measured it already"
    short = reading(1.0, 0.001)
    assert after(config(delta=0.01), StepDecision(short, [short])).beta == 0.5


def test_the_next_rate_ends_where_the_bound_of_the_kept_length_would(config: Config) -> None:
    auto, whole = config(delta=0.01, learning_rate="auto"), reading(1.0, 0.04, bound=0.05)
    kept = reading(0.5, 0.004, bound=0.0064)
    step = StepDecision(kept, [whole, kept])
    assert after(auto, step).rate == pytest.approx(4e-4 * 0.5 * math.sqrt(0.01 / 0.0064))
    assert after(auto, step, steps=2).rate == pytest.approx(4e-4 / 2), "and no less than half"
    fitted, _ = step.fitted(0.009)
    assert after(auto, fitted).rate == pytest.approx(4e-4 * 0.5 * math.sqrt(0.01 / 0.009)), "the larger of the two bounds"
    rejected = StepDecision(None, [reading(1.0, 0.008, bound=0.0144), kept])
    assert after(auto, rejected).rate == pytest.approx(4e-4 * math.sqrt(0.01 / 0.0144)), "by the optimizer's own"
    assert after(config(delta=0.01), step).rate == 1e-3, "a rate of the recipe's own stays"


def test_a_rate_does_not_grow_where_not_the_radius_bounds_the_steps(config: Config) -> None:
    """After an overshoot it stays, and it is halved where the episodes that the step was fitted to have refused it."""
    auto, short = config(delta=0.01, learning_rate="auto"), reading(1.0, 0.003, bound=0.004)
    step = StepDecision(short, [short])
    assert after(auto, step).rate == pytest.approx(4e-4 * math.sqrt(0.01 / 0.004))
    assert after(auto, step, overshot=True).rate == pytest.approx(4e-4)
    assert after(auto, StepDecision(None, [short], refused=short)).rate == pytest.approx(2e-4)
    assert after(auto, StepDecision(None, [short], refused=short), overshot=True).rate == pytest.approx(2e-4)


def test_only_an_accepted_step_has_a_gain(config: Config) -> None:
    whole = reading(1.0, 0.009)
    assert after(config(delta=0.01), StepDecision(whole, [whole])).slope == pytest.approx(1.0 + 0.5 * 0.3 / math.sqrt(0.009))
    assert after(config(delta=0.01), StepDecision(None, [whole])).slope == 1.0
