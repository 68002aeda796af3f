"""Intervals and paired tests against brute force, numpy and scipy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teamtr_lora.common.paired import NO_SPREAD, bootstrap_intervals, mcnemar_p_value, paired_test, sign_flip_p_value
from teamtr_lora.evaluation.statistics import standard_error


def test_bootstrap_intervals_of_a_mean_are_the_normal_ones_for_many_items() -> None:
    rng = np.random.default_rng(3)
    values = rng.random((800, 2)) < [0.3, 0.8]
    for column, interval in enumerate(bootstrap_intervals(values.astype(float))):
        mean, error = values[:, column].mean(), standard_error(values[:, column].tolist())
        assert interval is not None and error is not None
        assert interval == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.15 * error)


def test_bootstrap_against_drawing_items_one_by_one() -> None:
    """Skewed values of few items, where the normal interval would be wrong."""
    values = np.array([0.0, 0, 0, 0, 0, 0, 1, 0.25, 0, 5])
    rng = np.random.default_rng(8)
    means = [rng.choice(values, len(values)).mean() for _ in range(20_000)]
    (interval,) = bootstrap_intervals(values[:, None])
    assert interval == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.06)


def test_bootstrap_is_seeded_shared_and_has_nothing_to_say_about_one_item() -> None:
    values = np.random.default_rng(0).random((20, 1))
    table = np.hstack([values, 2 * values + 1])
    first, second = bootstrap_intervals(table)
    assert first is not None and second is not None
    assert second == pytest.approx([2 * end + 1 for end in first]), "the columns share the draws"
    assert bootstrap_intervals(table) == [first, second] != bootstrap_intervals(table, seed=1)
    assert bootstrap_intervals(table[:1]) == [None, None]


def test_values_without_spread_have_no_interval() -> None:
    """Width 0 would call a mean of two items certain; rounding is no spread either."""
    for first, second in (([0.5, 0.0], [1.0, 0.5]), ([0.4, 0.1], [0.7, 0.4]), ([0.0] * 9, [1.0] * 9)):
        test = paired_test(first, second)
        assert (test.low, test.high, test.no_interval) == (None, None, NO_SPREAD)
        assert test.p_value == pytest.approx(2 * 0.5 ** len(first)), "which the test still says, without an interval"
    assert paired_test([0.5], [1.0]).no_interval == "there is one item alone"
    table = np.array([[1.0, 2.0], [1.0, 3.0], [1.0, 5.0]])
    flat, spread = bootstrap_intervals(table)
    assert flat is None and spread == bootstrap_intervals(table[:, 1:])[0] and spread is not None


def test_means_that_round_apart_are_equal() -> None:
    """0.2 and 0.4 of one team's seeds are as good as 0 and 0.6 of another's; their means differ in the last bit."""
    first, second = [(0.2 + 0.4) / 2] * 6, [(0.0 + 0.6) / 2] * 6
    assert first != second
    for other in (second, [*second[:3], *first[3:]]):
        test = paired_test(first, other)
        assert (test.difference, test.p_value, test.better, test.worse, test.low) == (0, 1, 0, 0, None)


def test_bootstrap_covers_the_truth() -> None:
    """Items that differ, several samples each: the interval over items holds the true mean about as often as it says."""
    rng = np.random.default_rng(5)
    covered = 0
    for trial in range(200):
        chances = rng.beta(1, 2, size=60)
        shares = rng.binomial(4, chances) / 4
        (interval,) = bootstrap_intervals(shares[:, None], seed=trial, resamples=600)
        assert interval is not None
        covered += interval[0] <= 1 / 3 <= interval[1]
    assert 0.90 <= covered / 200 <= 0.99


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=2, max_size=9))
def test_sign_flips_against_scipy(differences: list[int]) -> None:
    from scipy.stats import permutation_test

    values = np.array(differences) / 4
    if not values.any():
        assert sign_flip_p_value(values) == 1.0
        return
    # scipy doubles the smaller tail, which is the same here: the flips' distribution is symmetric
    result = permutation_test((values,), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=False)
    assert sign_flip_p_value(values) == pytest.approx(result.pvalue)


def test_sign_flips_of_many_items_come_from_random_ones() -> None:
    from scipy.stats import norm

    values = np.random.default_rng(1).normal(0.15, 1, size=300)
    z = values.sum() / np.sqrt((values**2).sum())
    assert sign_flip_p_value(values) == pytest.approx(2 * norm.sf(abs(z)), rel=0.2)
    assert sign_flip_p_value(values) == sign_flip_p_value(values)
    assert sign_flip_p_value(np.ones(100)) == 1 / 20_001


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (5, 0), (3, 9), (40, 20), (700, 650), (3000, 2900)])
def test_mcnemar_against_scipy(better: int, worse: int) -> None:
    from scipy.stats import binomtest

    expected = binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert mcnemar_p_value(better, worse) == pytest.approx(expected, abs=1e-9)


def test_a_paired_test() -> None:
    first, second = [0.0, 0.0, 1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0, 0.0, 1.0]
    test = paired_test(first, second)
    assert (test.first, test.second, test.difference) == pytest.approx((1 / 3, 5 / 6, 0.5))
    assert (test.better, test.worse) == (4, 1)
    assert test.mcnemar_p_value == pytest.approx(0.375) == test.p_value, "with 0 and 1 sign flips are McNemar's test"
    assert test.low is not None and test.high is not None and test.low < 0.5 < test.high
    assert paired_test([0.5, 0.25], [0.5, 1.0]).mcnemar_p_value is None, "shares are neither right nor wrong"
    alike = paired_test(first, first)
    assert (alike.difference, alike.p_value, alike.mcnemar_p_value) == (0, 1, 1)
    assert (alike.low, alike.high) == (None, None), "equal on six items is not equal for certain"
    back = paired_test(second, first)
    assert (back.difference, back.p_value) == (-test.difference, test.p_value)
