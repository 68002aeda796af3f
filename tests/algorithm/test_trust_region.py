"""The adaptive penalty, what is asked of the gain, and the search for the step length."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teamtr_lora.algorithm.clustered import ClusteredMean
from teamtr_lora.algorithm.trust_region import (
    BETA_RANGE,
    MOST_CHANGE,
    RADIUS_RANGE,
    GateReading,
    StepDecision,
    adapt_beta,
    choose_step,
    track_target,
)
from teamtr_lora.algorithm.variants.gain import GAINS, GainRule, Positive, Veto

RULES = st.sampled_from([kind() for kind in GAINS.values()])


def test_beta_doubles_outside_halves_inside_and_stays_between() -> None:
    assert adapt_beta(0.1, 0.0151, 0.01) == 0.2
    assert adapt_beta(0.1, 0.0149, 0.01) == 0.1
    assert adapt_beta(0.1, 0.01, 0.01) == 0.1
    assert adapt_beta(0.1, 0.0067, 0.01) == 0.1
    assert adapt_beta(0.1, 0.0066, 0.01) == 0.05
    assert adapt_beta(BETA_RANGE[1], 1.0, 0.01) == BETA_RANGE[1]
    assert adapt_beta(BETA_RANGE[0], 0.0, 0.01) == BETA_RANGE[0]
    assert adapt_beta(0.0, 1.0, 0.01) == 0.0, "no penalty asked for, none given"
    assert adapt_beta(0.1, math.nan, 0.01) == 0.1


def quadratic(c: float, gain: float = 1.0, error: float = 0.0):
    """KL grows with the square of the step, the gain with the step; `error`: of the gain's mean."""

    def measure(alpha: float) -> GateReading:
        kl, mean = c * alpha**2, gain * alpha
        return GateReading(alpha, ClusteredMean(kl, 0.0, kl), ClusteredMean(mean, error, mean + 2 * error))

    return measure


def search(measure, rule: GainRule | None = None, *, delta=0.01, fill=True, max_stretch=4.0, evaluations=6) -> StepDecision:
    return choose_step(measure, delta=delta, rule=rule or Veto(), fill=fill, max_stretch=max_stretch, evaluations=evaluations)


@pytest.mark.parametrize("c", [0.01 * f for f in (1e-3, 0.05, 0.1, 0.3, 0.7, 0.83, 0.9, 1.0, 1.01, 1.2, 1.6, 4.0, 50.0, 1e4)])
def test_a_quadratic_kl_is_filled_to_the_boundary(c: float) -> None:
    for rule in (Veto(), Positive(), GainRule()):
        decision = search(quadratic(c), rule, max_stretch=100.0)
        assert decision.accepted is not None
        assert 0.8 <= decision.accepted.alpha / math.sqrt(0.01 / c) <= 1.0
        assert len(decision.readings) <= 3


def test_shrink_never_lengthens_and_stretch_is_limited() -> None:
    short = search(quadratic(1e-6), fill=False)
    assert short.accepted is not None and short.accepted.alpha == 1.0 and len(short.readings) == 1
    limited = search(quadratic(1e-6))
    assert limited.accepted is not None and limited.accepted.alpha == 4.0
    long = search(quadratic(0.04), fill=False)
    assert long.accepted is not None and 0.45 <= long.accepted.alpha <= 0.5


def test_rules_by_what_the_held_out_gain_is() -> None:
    """veto: harm has to be shown, and rounding shows none. positive: a gain has to be seen. none: whatever."""
    seen = {"gain": (0.3, 0.5), "perhaps": (0.01, 0.2), "zero": (0.0, 0.0), "noise": (-0.1, 0.05), "harm": (-0.3, -2e-6)}
    seen["rounding"] = (-7e-8, -5e-8)
    allowed = {
        name: {word for word, (m, b) in seen.items() if kind().allows(ClusteredMean(m, 0.1, b))} for name, kind in GAINS.items()
    }
    assert allowed == {
        "veto": {"gain", "perhaps", "zero", "noise", "rounding"},
        "positive": {"gain", "perhaps"},
        "none": {"gain", "perhaps", "zero", "noise", "harm", "rounding"},
    }
    asked = {name: (kind.in_sample, kind.shortens) for name, kind in GAINS.items()}
    assert asked == {"veto": (True, False), "positive": (False, True), "none": (False, False)}


def test_only_harm_that_is_shown_is_vetoed_and_it_is_not_shortened() -> None:
    for c in (1e-4, 0.01, 1.0):
        unlucky = search(quadratic(c, gain=-1e-3, error=0.1))
        assert unlucky.accepted is not None, "a negative mean within its error is no harm"
        harmful = search(quadratic(c, gain=-1.0, error=1e-6))
        assert harmful.accepted is None
        assert len([r for r in harmful.readings if r.kl.bound <= 0.01]) == 1, "under veto a step is shortened for its KL only"
        assert all(r.kl.bound > 0.01 for r in harmful.readings[:-1])


def test_no_held_out_gain_no_step_where_it_has_to_be_positive() -> None:
    for gain in (0.0, -1.0):
        for c in (1e-4, 0.01, 1.0):
            decision = search(quadratic(c, gain), Positive())
            assert decision.accepted is None
            in_region = [r for r in decision.readings if r.kl.bound <= 0.01]
            assert 1 <= len(in_region) <= 3, "a direction that does not help even for a short step is given up"


def test_a_direction_that_helps_only_near_by_is_shortened_where_the_gain_has_to_be_positive() -> None:
    def measure(alpha: float) -> GateReading:
        gain = alpha - 1.5 * alpha**2
        return GateReading(alpha, ClusteredMean(0.0, 0.0, 1e-4 * alpha**2), ClusteredMean(gain, 0.0, gain))

    decision = search(measure, Positive())
    assert decision.accepted is not None and decision.accepted.alpha == 0.25 and decision.accepted.gain.mean > 0
    assert [r.alpha for r in search(measure).readings] == [1.0] and search(measure).accepted is None
    free = search(measure, GainRule()).accepted
    assert free is not None and free.alpha == 4.0


def test_what_a_length_outside_says_is_not_exceeded() -> None:
    """Farther out the KL grows faster than with the square: from alpha = 1 alone the next length would be 1.9 again."""

    def steep(alpha: float) -> GateReading:
        kl = 0.0025 * alpha**2 * (4.0 if alpha > 1.2 else 1.0)
        return GateReading(alpha, ClusteredMean(kl, 0.0, kl), ClusteredMean(1.0, 0.0, 1.0))

    decision = search(steep)
    tried = [reading.alpha for reading in decision.readings]
    assert tried[0] == 1 and steep(tried[1]).bound > 0.01
    assert tried[2:] == [] or max(tried[2:]) <= steep(tried[1]).shortened(0.01)
    assert decision.accepted is not None and decision.accepted.bound <= 0.01


def test_an_overlong_stretch_falls_back_to_what_fitted() -> None:
    """KL that jumps beyond alpha = 1: the stretch fails, the optimizer's own step stands."""

    def measure(alpha: float) -> GateReading:
        kl = 1e-3 if alpha <= 1 else 1.0
        return GateReading(alpha, ClusteredMean(kl, 0.0, kl), ClusteredMean(1.0, 0.0, 1.0))

    decision = search(measure)
    assert decision.accepted is not None and decision.accepted.alpha == 1.0
    assert decision.readings[-1].alpha > 1.0, "a longer one was tried last"


def wild(seed: int, c: float, noise: float, odd: float):
    """A KL bound that is quadratic at best: noisy, non-monotone, sometimes NaN or infinite; gains of either sign."""
    rng = random.Random(seed)

    def measure(alpha: float) -> GateReading:
        bound = c * alpha**2 * math.exp(noise * rng.gauss(0, 1))
        if rng.random() < odd:
            bound = rng.choice([math.nan, math.inf, 0.0])
        gain = rng.gauss(0.3, 1)
        return GateReading(alpha, ClusteredMean(bound, 0.0, bound), ClusteredMean(gain, 0.2, gain + 0.4))

    return measure


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 10**6), st.floats(1e-8, 1e4), st.sampled_from([0.0, 0.3, 2.0]), st.sampled_from([0.0, 0.3]),
    st.booleans(), st.floats(1, 10), st.integers(1, 8), st.sampled_from([1e-4, 0.01, 1.0]), RULES,
)  # fmt: skip
def test_nothing_out_of_region_is_ever_accepted(
    seed: int, c: float, noise: float, odd: float, fill: bool, stretch: float, evaluations: int, delta: float, rule: GainRule
) -> None:
    decision = search(wild(seed, c, noise, odd), rule, delta=delta, fill=fill, max_stretch=stretch, evaluations=evaluations)
    assert 1 <= len(decision.readings) <= evaluations
    assert decision.readings[0].alpha == 1.0
    assert all(0 < r.alpha <= (stretch if fill else 1.0) for r in decision.readings)
    if decision.accepted is not None:
        assert decision.accepted in decision.readings
        assert decision.accepted.kl.bound <= delta and rule.allows(decision.accepted.gain)
    else:
        assert not any(r.kl.bound <= delta and rule.allows(r.gain) for r in decision.readings), "a good step was thrown away"


def test_a_shorter_length_is_shorter_by_a_tenth_at_least() -> None:
    gain = ClusteredMean(1.0, 0.0, 1.0)
    assert GateReading(0.5, ClusteredMean(0.0101, 0.0, 0.0101), gain).shortened(0.01) == pytest.approx(0.45)
    assert GateReading(0.5, ClusteredMean(0.04, 0.0, 0.04), gain).shortened(0.01) == pytest.approx(0.5 * 0.97 / 2)
    assert GateReading(0.5, ClusteredMean(0.0, 0.0, 0.0), gain, fitted_bound=0.04).shortened(0.01) == pytest.approx(
        0.5 * 0.97 / 2
    )


def test_the_gate_compares_the_bound_and_not_the_mean() -> None:
    """A step whose mean KL is inside the region and whose upper bound is not is shortened."""

    def measure(alpha: float) -> GateReading:
        return GateReading(alpha, ClusteredMean(0.004 * alpha**2, 0.01 * alpha**2, 0.02 * alpha**2), ClusteredMean(1.0, 0.0, 1.0))

    assert not measure(1.0).in_region(0.01) and measure(0.5).in_region(0.01)
    decision = search(measure)
    assert decision.readings[0].kl.mean < 0.01 and decision.accepted is not None and decision.accepted.alpha < 1
    assert 0.009 < decision.accepted.kl.bound <= 0.01
    assert search(measure, evaluations=1).accepted is None, "one look at a step that is inside by its mean only: refused"


def test_the_larger_of_the_two_bounds_decides_and_what_is_no_number_bounds_nothing() -> None:
    gain = ClusteredMean(1.0, 0.0, 1.0)
    for held_out, fitted, larger in [
        (0.019, 0.005, 0.019),
        (0.005, 0.019, 0.019),
        (0.01, math.nan, math.inf),
        (math.nan, 0.01, math.inf),
    ]:
        reading = GateReading(1.0, ClusteredMean(held_out, 0.0, held_out), gain, fitted_bound=fitted)
        assert reading.bound == larger and reading.in_region(0.02) is (larger < 0.02)


def test_a_second_stretch_goes_on_from_the_first() -> None:
    """A KL that grows less than the square law says: the stretched step is still far inside."""

    def measure(alpha: float) -> GateReading:
        kl = 0.005 * alpha
        return GateReading(alpha, ClusteredMean(kl, 0.0, kl), ClusteredMean(1.0, 0.0, 1.0))

    first, second, third, *_ = (reading.alpha for reading in search(measure).readings)
    assert (first, second) == (1.0, pytest.approx(0.97 * math.sqrt(2)))
    assert third == pytest.approx(second * 0.97 * math.sqrt(2 / second))


def test_a_gain_that_ends_beyond_the_whole_step_does_not_shorten_it() -> None:
    def measure(alpha: float) -> GateReading:
        gain = 1.0 if alpha <= 1 else -1.0
        return GateReading(alpha, ClusteredMean(1e-3, 0.0, 1e-3), ClusteredMean(gain, 0.0, gain))

    decision = search(measure, Positive())
    assert decision.accepted is not None and decision.accepted.alpha == 1.0 and len(decision.readings) == 2


def test_an_adaptive_radius_changes_by_a_limited_factor_either_way() -> None:
    assert track_target(0.01, 0.1, 0.01) == pytest.approx(0.01 / MOST_CHANGE)
    assert track_target(0.01, 0.001, 0.01) == pytest.approx(0.01 * MOST_CHANGE)
    assert track_target(0.01, 0.0125, 0.01) == pytest.approx(0.008)
    assert track_target(0.01, math.nan, 0.01) == track_target(0.01, 0.0, 0.01) == 0.01


def test_an_adaptive_radius_stays_within_a_factor_of_its_target() -> None:
    """However long accepted steps stay below the target, or above it."""
    for kl, end in ((1e-6, 0.01 * RADIUS_RANGE), (1.0, 0.01 / RADIUS_RANGE)):
        radius = 0.01
        for _ in range(20):
            radius = track_target(radius, kl, 0.01)
        assert radius == pytest.approx(end)
