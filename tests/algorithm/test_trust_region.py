"""The confidence bound, the adaptive penalty and the search for the step length."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teamtr_lora.algorithm.clustered import ClusteredMean, clustered_mean
from teamtr_lora.algorithm.trust_region import BETA_RANGE, GateReading, StepDecision, adapt_beta, choose_step


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-10, 10)), min_size=2, max_size=40), st.sampled_from([0.8, 0.95, 0.99]))
def test_clustered_mean_is_the_sandwich_estimate(pairs: list[tuple[int, float]], confidence: float) -> None:
    from scipy.stats import norm

    clusters, values = [c * 11 for c, _ in pairs], np.array([v for _, v in pairs])
    got = clustered_mean(torch.tensor(values), torch.tensor(clusters), confidence)
    assert got.mean == pytest.approx(values.mean(), abs=1e-12)
    names = sorted(set(clusters))
    if len(names) == 1:
        assert got.bound == math.inf and got.standard_error == math.inf
        return
    residual = values - values.mean()
    scores = [sum(r for r, c in zip(residual, clusters, strict=True) if c == name) for name in names]
    error = math.sqrt(len(names) / (len(names) - 1) * sum(s * s for s in scores)) / len(values)
    assert got.standard_error == pytest.approx(error, rel=1e-9, abs=1e-12)
    assert got.bound == pytest.approx(values.mean() + norm.ppf(confidence) * error, rel=1e-9, abs=1e-12)


def test_clusters_of_one_give_the_textbook_standard_error() -> None:
    values = torch.tensor([1.0, 4.0, 2.0, 9.0, 5.0])
    got = clustered_mean(values, torch.arange(5), 0.95)
    assert got.standard_error == pytest.approx(float(values.std(unbiased=True)) / math.sqrt(5))
    assert got.bound == pytest.approx(got.mean + 1.6448536 * got.standard_error)


def test_repeated_messages_do_not_buy_confidence() -> None:
    """Copies of each cluster's message are no new information: the bound must not shrink, as a naive one would."""
    values, cluster = torch.tensor([0.1, 0.5, 0.2, 0.9]), torch.arange(4)
    once = clustered_mean(values, cluster, 0.95)
    copied = clustered_mean(values.repeat_interleave(20), cluster.repeat_interleave(20), 0.95)
    assert copied.standard_error == pytest.approx(once.standard_error)


def test_the_bound_covers_the_true_mean_about_as_often_as_it_says() -> None:
    """Messages share a group effect: 30 groups of 6. Nominal 95%; a bound blind to groups would cover near 75%."""
    generator = torch.Generator().manual_seed(0)
    groups, size, trials = 30, 6, 1500
    cluster = torch.arange(groups).repeat_interleave(size)
    effect = torch.randn(trials, groups, generator=generator).repeat_interleave(size, dim=1)
    values = 1.0 + effect + 0.5 * torch.randn(trials, groups * size, generator=generator)
    covered = sum(clustered_mean(values[t], cluster, 0.95).bound >= 1.0 for t in range(trials)) / trials
    assert 0.92 < covered < 0.975


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


def quadratic(c: float, gain: float = 1.0):
    def measure(alpha: float) -> GateReading:
        kl = c * alpha**2
        return GateReading(alpha, ClusteredMean(kl, 0.0, kl), gain * alpha)

    return measure


@pytest.mark.parametrize("c", [0.01 * f for f in (1e-3, 0.05, 0.1, 0.3, 0.7, 0.83, 0.9, 1.0, 1.01, 1.2, 1.6, 4.0, 50.0, 1e4)])
def test_a_quadratic_kl_is_filled_to_the_boundary(c: float) -> None:
    decision = choose_step(quadratic(c), delta=0.01, fill=True, max_stretch=100.0, evaluations=6)
    assert decision.accepted is not None
    assert 0.8 <= decision.accepted.alpha / math.sqrt(0.01 / c) <= 1.0
    assert len(decision.readings) <= 3


def test_shrink_never_lengthens_and_stretch_is_limited() -> None:
    short = choose_step(quadratic(1e-6), delta=0.01, fill=False, max_stretch=4.0, evaluations=6)
    assert short.accepted is not None and short.accepted.alpha == 1.0 and len(short.readings) == 1
    limited = choose_step(quadratic(1e-6), delta=0.01, fill=True, max_stretch=4.0, evaluations=6)
    assert limited.accepted is not None and limited.accepted.alpha == 4.0
    long = choose_step(quadratic(0.04), delta=0.01, fill=False, max_stretch=4.0, evaluations=6)
    assert long.accepted is not None and 0.45 <= long.accepted.alpha <= 0.5


def test_no_gain_no_step() -> None:
    for gain in (0.0, -1.0):
        for c in (1e-4, 0.01, 1.0):
            decision = choose_step(quadratic(c, gain), delta=0.01, fill=True, max_stretch=4.0, evaluations=6)
            assert decision.accepted is None
            in_region = [r for r in decision.readings if r.kl.bound <= 0.01]
            assert 1 <= len(in_region) <= 3, "a direction that does not help even for a short step is given up"


def test_a_direction_that_helps_only_near_by_is_shortened() -> None:
    def measure(alpha: float) -> GateReading:
        return GateReading(alpha, ClusteredMean(0.0, 0.0, 1e-4 * alpha**2), alpha - 1.5 * alpha**2)

    decision = choose_step(measure, delta=0.01, fill=True, max_stretch=4.0, evaluations=6)
    assert decision.accepted is not None and decision.accepted.alpha == 0.25 and decision.accepted.gain > 0


def test_an_overlong_stretch_falls_back_to_what_fitted() -> None:
    """KL that jumps beyond alpha = 1: the stretch fails, the optimizer's own step stands."""

    def measure(alpha: float) -> GateReading:
        kl = 1e-3 if alpha <= 1 else 1.0
        return GateReading(alpha, ClusteredMean(kl, 0.0, kl), 1.0)

    decision = choose_step(measure, delta=0.01, fill=True, max_stretch=4.0, evaluations=6)
    assert decision.accepted is not None and decision.accepted.alpha == 1.0


def wild(seed: int, c: float, noise: float, odd: float):
    """A KL bound that is quadratic at best: noisy, non-monotone, sometimes NaN or infinite; gains of either sign."""
    rng = random.Random(seed)

    def measure(alpha: float) -> GateReading:
        bound = c * alpha**2 * math.exp(noise * rng.gauss(0, 1))
        if rng.random() < odd:
            bound = rng.choice([math.nan, math.inf, 0.0])
        return GateReading(alpha, ClusteredMean(bound, 0.0, bound), rng.gauss(0.3, 1))

    return measure


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 10**6), st.floats(1e-8, 1e4), st.sampled_from([0.0, 0.3, 2.0]), st.sampled_from([0.0, 0.3]),
    st.booleans(), st.floats(1, 10), st.integers(1, 8), st.sampled_from([1e-4, 0.01, 1.0]),
)  # fmt: skip
def test_nothing_out_of_region_is_ever_accepted(
    seed: int, c: float, noise: float, odd: float, fill: bool, stretch: float, evaluations: int, delta: float
) -> None:
    decision: StepDecision = choose_step(
        wild(seed, c, noise, odd), delta=delta, fill=fill, max_stretch=stretch, evaluations=evaluations
    )
    assert 1 <= len(decision.readings) <= evaluations
    assert decision.readings[0].alpha == 1.0
    assert all(0 < r.alpha <= (stretch if fill else 1.0) for r in decision.readings)
    if decision.accepted is not None:
        assert decision.accepted in decision.readings
        assert decision.accepted.kl.bound <= delta and decision.accepted.gain > 0
    else:
        assert not any(r.kl.bound <= delta and r.gain > 0 for r in decision.readings), "a good step was found and thrown away"


def test_the_gate_compares_the_bound_and_not_the_mean() -> None:
    """A step whose mean KL is inside the region and whose upper bound is not is shortened."""

    def measure(alpha: float) -> GateReading:
        return GateReading(alpha, ClusteredMean(0.004 * alpha**2, 0.01 * alpha**2, 0.02 * alpha**2), 1.0)

    assert not measure(1.0).acceptable(0.01)
    decision = choose_step(measure, delta=0.01, fill=True, max_stretch=4.0, evaluations=6)
    assert decision.readings[0].kl.mean < 0.01 and decision.accepted is not None and decision.accepted.alpha < 1
    assert 0.009 < decision.accepted.kl.bound <= 0.01
