"""Diagnostics against closed forms and brute force; and that noise alone reads as nothing."""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teamtr_lora.algorithm.occupancy import (
    ContextKey,
    Excess,
    MonitorTerms,
    Reliability,
    context_shift,
    length_bin,
    reliability,
    stability,
    stale_gap,
    subsampled,
    token_shift,
    total_variation,
    trajectory_log_weights,
    weight_degeneracy,
)

# --- stale gap ---


def test_gap_is_the_mean_over_all_splits() -> None:
    stale, fresh = np.array([0.1, 0.5, -0.2, 0.3]), np.array([0.0, 0.2, 0.1, -0.1])
    splits = [(list(one), [i for i in range(4) if i not in one]) for one in itertools.combinations(range(4), 2)]
    reading = stale_gap(stale, fresh, splits=20_000)
    assert reading.value == pytest.approx(np.mean([abs(stale[b].mean() - fresh[a].mean()) for a, b in splits]), abs=2e-3)
    assert reading.null == pytest.approx(np.mean([abs(fresh[b].mean() - fresh[a].mean()) for a, b in splits]), abs=2e-3)
    assert reading.signed == pytest.approx((stale - fresh).mean())
    assert reading.standard_error == pytest.approx((stale - fresh).std(ddof=1) / 2)


def test_gap_of_one_policy_is_noise_and_reads_as_nothing() -> None:
    """Items differ more than episodes do, which the null must contain too."""
    rng = np.random.default_rng(0)
    readings = []
    for _ in range(400):
        item = rng.normal(size=16)
        readings.append(stale_gap(item + 0.3 * rng.normal(size=16), item + 0.3 * rng.normal(size=16), splits=40))
    excess = np.array([r.excess for r in readings])
    assert np.mean([r.value for r in readings]) > 0.3  # what would have been reported
    assert abs(excess.mean()) < 4 * excess.std() / 20 < 0.02


def test_a_real_gap_is_found() -> None:
    rng = np.random.default_rng(0)
    item = rng.normal(size=64)
    reading = stale_gap(item + 2 + 0.1 * rng.normal(size=64), item + 0.1 * rng.normal(size=64))
    assert reading.value == pytest.approx(2, abs=0.2) and reading.excess > 1.5
    assert reading.signed == pytest.approx(2, abs=5 * reading.standard_error)
    with pytest.raises(ValueError, match="same items"):
        stale_gap([1.0, 2.0], [1.0, 2.0, 3.0])


# --- context shift ---


def test_total_variation() -> None:
    assert total_variation([1, 1, 0], [0, 2, 2]) == pytest.approx(0.5)
    assert (
        total_variation([3, 1], [30, 10]) == 0 and total_variation([1, 0], [0, 9]) == 1 and total_variation([0, 0], [1, 1]) == 1
    )


@pytest.mark.parametrize(("moved", "per_group", "least"), [(0.0, 8, 0.0), (0.3, 8, 0.09), (0.3, 200, 0.24)])
def test_context_shift_is_the_true_one_after_the_null(moved: float, per_group: int, least: float) -> None:
    rng, groups, keys, runs = np.random.default_rng(0), 40, 30, 20
    fresh_p = np.full(keys, 1 / keys)
    stale_p = fresh_p + np.repeat([moved / 15, -moved / 15], 15)
    group = np.repeat(np.arange(groups), per_group)
    readings = []
    for seed in range(runs):
        stale, fresh = (rng.choice(keys, size=groups * per_group, p=p).tolist() for p in (stale_p, fresh_p))
        readings.append(context_shift(stale, group, fresh, group, splits=10, seed=seed))
    if per_group == 8:
        assert np.mean([r.null for r in readings]) > 0.15  # the bias of counting
    excess = np.array([r.excess for r in readings])
    error = excess.std() / math.sqrt(runs)
    assert least <= excess.mean() <= moved if moved else abs(excess.mean()) < 4 * error


def test_hashes_of_the_whole_text_say_nothing() -> None:
    """The paper's D_occ: every context is unique, so one policy is at distance 1 from itself."""
    stale, fresh = [f"stale {i}" for i in range(20)], [f"fresh {i}" for i in range(20)]
    assert context_shift(stale, range(20), fresh, range(20)) == Excess(1.0, 1.0)


def test_keys_are_coarse() -> None:
    assert [length_bin(n) for n in (0, 1, 2, 3, 4, 7, 8)] == [0, 1, 2, 2, 3, 3, 4]
    one = ContextKey(1, "solver", "42", length_bin(100))
    assert one == ContextKey(1, "solver", "42", length_bin(127)) != ContextKey(1, "solver", "43", length_bin(100))


# --- importance weights ---


def test_weights_of_a_lognormal() -> None:
    sigma, rng = 0.8, np.random.default_rng(0)
    reading = weight_degeneracy(rng.normal(-(sigma**2) / 2, sigma, size=400_000))
    normal = NormalDist(-(sigma**2) / 2, sigma)
    assert reading.ess == pytest.approx(math.exp(-(sigma**2)), rel=0.02)
    assert reading.p95 == pytest.approx(math.exp(normal.inv_cdf(0.95)), rel=0.02)
    assert reading.p99 == pytest.approx(math.exp(normal.inv_cdf(0.99)), rel=0.02)
    assert reading.over_ten == pytest.approx(1 - normal.cdf(math.log(10)), rel=0.2)
    assert reading.mean == pytest.approx(1, abs=0.01)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=30))
@settings(max_examples=50, deadline=None)
def test_weights_by_brute_force(log_weight: list[float]) -> None:
    weight = [math.exp(v) for v in log_weight]
    reading = weight_degeneracy(log_weight)
    assert reading.ess == pytest.approx(sum(weight) ** 2 / sum(w * w for w in weight) / len(weight))
    assert reading.largest == pytest.approx(max(weight)) and reading.mean == pytest.approx(sum(weight) / len(weight))
    assert reading.over_ten == sum(w > 10 for w in weight) / len(weight)
    spread = math.sqrt(sum((w - reading.mean) ** 2 for w in weight) / (len(weight) - 1) / len(weight))
    assert reading.mean_standard_error == pytest.approx(spread, abs=1e-12)


def test_weights_do_not_overflow() -> None:
    huge = weight_degeneracy([800.0, 0.0])
    assert huge.ess == pytest.approx(0.5) and math.isfinite(huge.p99 + huge.mean + huge.mean_standard_error)
    assert trajectory_log_weights([0.1, 0.2, -0.5], [0, 2, 0], 4).tolist() == pytest.approx([-0.4, 0, 0.2, 0])


# --- the KL monitor ---


def monitor_reliability(updates: list[MonitorTerms], fraction: float, repeats: int = 100) -> Reliability:
    return reliability(fraction, [subsampled(update, fraction, repeats, seed) for seed, update in enumerate(updates)])


@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_subsampling_has_its_closed_form(fraction: float) -> None:
    """Without replacement: Var = (1 - q) / q * N s^2 / M^2."""
    rng = np.random.default_rng(0)
    terms, messages, delta = rng.normal(0.0002, 0.02, size=4000), 64, 0.01
    reading = monitor_reliability([MonitorTerms(terms, messages, delta)], fraction, repeats=3000)
    deviation = math.sqrt((1 - fraction) / fraction * 4000 * terms.var(ddof=1)) / messages / delta
    assert reading.median == pytest.approx(0.6745 * deviation, rel=0.08)
    assert reading.p90 == pytest.approx(1.645 * deviation, rel=0.08)


def test_flips_are_counted_near_the_threshold_only() -> None:
    rng = np.random.default_rng(1)
    near = MonitorTerms(rng.exponential(0.0105 * 32 / 2000, size=2000), 32, 0.01)
    far = MonitorTerms(rng.exponential(0.05 * 32 / 2000, size=2000), 32, 0.01)
    full = float(near.terms_N.sum()) / 32
    assert 0.008 <= full <= 0.012
    reading = monitor_reliability([near, far], 0.5, repeats=2000)
    spread = math.sqrt(2000 * near.terms_N.var(ddof=1)) / 32
    expected = NormalDist(full, spread).cdf(0.01) if full > 0.01 else 1 - NormalDist(full, spread).cdf(0.01)
    assert reading.near_updates == 1 and reading.flip_rate == pytest.approx(expected, abs=0.04)
    assert monitor_reliability([far], 0.5).flip_rate is None
    whole = monitor_reliability([near, far], 1.0, repeats=3)
    assert whole.median == pytest.approx(0, abs=1e-9) and whole.flip_rate == 0
    with pytest.raises(ValueError, match="no update"):
        monitor_reliability([], 0.5)


# --- stability, token shift ---


def test_a_team_that_never_changes_is_as_unstable_as_its_evaluation() -> None:
    rng, samples = np.random.default_rng(0), 200
    still = stability((rng.binomial(samples, 0.8, size=4000) / samples).tolist(), samples)
    assert still.floor == pytest.approx(math.sqrt(2 * 0.16 / samples), rel=0.02)
    assert still.deviation == pytest.approx(still.floor, rel=0.05)
    few = [stability((rng.binomial(samples, 0.8, size=4) / samples).tolist(), samples) for _ in range(4000)]
    ratio = sum(one.deviation**2 for one in few) / sum(one.floor**2 for one in few)
    assert ratio == pytest.approx(1, abs=0.05), "also where improvements are few and share evaluations"
    shaken = stability([0.2, 0.8] * 20, samples)
    assert shaken.excess == pytest.approx(shaken.deviation, rel=0.01) and stability([0.5] * 3, 9).excess == 0
    with pytest.raises(ValueError, match="three evaluations"):
        stability([0.5, 0.5], 10)


def test_token_shift_by_hand() -> None:
    cur = np.array([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]])
    new = np.array([[0.6, 0.2, 0.2, 0.0], [0.2, 0.2, 0.35, 0.25]])
    with np.errstate(divide="ignore"):
        shift = token_shift(np.log(cur), np.log(new), top=2)
    assert shift.before == pytest.approx([0.45, 0.3, 0.25])
    assert shift.after == pytest.approx([(0.6 + 0.25) / 2, (0.2 + 0.35) / 2, (0.2 + 0.4) / 2])
    assert shift.moved == pytest.approx([(0.1 + 0.15) / 2, (0.1 + 0.05) / 2, (0.0 + 0.1) / 2])
    assert shift.flip_rate == 0.5


def test_the_floor_of_the_stability_by_hand() -> None:
    """Three evaluations of five samples at 1/2: each has variance 1/4 / (5 - 1), two of them an improvement's, and the sample
    variance of two improvements that share an evaluation is 3/2 of that."""
    assert stability([0.5, 0.5, 0.5], 5).floor == pytest.approx(math.sqrt(2 * (0.25 / 4) * 3 / 2))
    assert stability([0.5] * 5, 5).floor == pytest.approx(math.sqrt(2 * (0.25 / 4) * 5 / 4))
