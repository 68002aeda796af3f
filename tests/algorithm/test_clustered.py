"""The mean over dependent values and its upper bound: against scipy, and by how often it covers."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from teamtr_lora.algorithm.clustered import clustered_mean, mean_with_known_zeros, student_quantile, upper_quantile

values = st.floats(-10, 10).map(lambda x: round(x, 6))  # differences far below rounding make the skewness meaningless
weights = st.sampled_from([0.25, 1.0, 1.0, 3.0])


def hall(skewness: float, student: float, count: int) -> float:
    """Hall's transformation T + lean T^2 / 3 + lean^2 T^3 / 27 + lean / 6 is monotone; where it is -student, -T is the answer."""
    lean = skewness / math.sqrt(count)
    roots = np.roots([lean**2 / 27, lean / 3, 1.0, lean / 6 + student])
    return -float(roots[np.abs(roots.imag).argmin()].real)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), values, weights), min_size=2, max_size=40), st.sampled_from([0.8, 0.9, 0.95]))
def test_mean_error_and_bound_are_those_of_a_plain_computation(rows: list[tuple[int, float, float]], confidence: float) -> None:
    clusters, value, weight = (np.array(column) for column in zip(*rows, strict=True))
    got = clustered_mean(torch.tensor(value), torch.tensor(clusters * 11), confidence, torch.tensor(weight))
    mean = float(np.average(value, weights=weight))
    assert got.mean == pytest.approx(mean, abs=1e-12)
    names = sorted(set(clusters))
    if len(names) == 1:
        assert got.bound == math.inf and got.standard_error == math.inf
        return
    pulls = np.array([float((weight * (value - mean))[clusters == name].sum()) for name in names]) / weight.sum()
    error = math.sqrt(len(names) / (len(names) - 1) * float((pulls**2).sum()))
    assert got.standard_error == pytest.approx(error, rel=1e-9, abs=1e-12)
    if error < 1e-9:
        assert got.bound == pytest.approx(mean, abs=1e-7)
        return
    quantile = float(stats.t.ppf(confidence, len(names) - 1))
    skewness = float(stats.skew(pulls, bias=False)) if len(names) > 2 else 0.0
    wanted = hall(skewness, quantile, len(names)) if skewness > 1e-4 else quantile
    if abs(skewness) < 1e-4:
        return  # on the border between both formulas, which agree there only to first order
    distance = (got.bound - mean) / error
    assert distance == pytest.approx(wanted, rel=1e-2)  # Student's quantile is an expansion
    assert distance >= quantile * (1 - 1e-2), "skewness never brings the bound closer"


def test_students_quantile_is_scipys() -> None:
    for freedom in (1, 2, 3, 4, 5, 7, 15, 31, 127):
        for confidence in (0.6, 0.8, 0.9, 0.95, 0.975, 0.99):
            wanted = float(stats.t.ppf(confidence, freedom))
            tolerance = {1: 1e-12, 2: 1e-12, 3: 5e-3, 4: 2e-3, 5: 5e-4}.get(freedom, 1e-4)
            assert student_quantile(confidence, freedom) == pytest.approx(wanted, rel=tolerance)


def test_clusters_of_one_give_the_textbook_standard_error() -> None:
    sample = torch.tensor([1.0, 4.0, 2.0, 9.0, 5.0])
    got = clustered_mean(sample, torch.arange(5), 0.95)
    assert got.standard_error == pytest.approx(float(sample.std(unbiased=True)) / math.sqrt(5))
    symmetric = clustered_mean(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), torch.arange(5), 0.95)
    assert symmetric.bound == pytest.approx(3 + 2.1318468 * symmetric.standard_error, rel=1e-3)
    left = clustered_mean(-sample, torch.arange(5), 0.95)
    assert left.bound == pytest.approx(left.mean + 2.1318468 * left.standard_error, rel=1e-3), "symmetric where it is safe"


def test_equal_values_have_no_doubt() -> None:
    got = clustered_mean(torch.full((12,), 0.3), torch.arange(12) // 3, 0.95)
    assert got.bound == pytest.approx(got.mean) and got.standard_error < 1e-9
    assert clustered_mean(torch.zeros(12), torch.arange(12) // 3, 0.95).bound == 0.0


def test_repeated_messages_do_not_buy_confidence() -> None:
    """Copies of each cluster's message are no new information: the bound must not shrink, as a naive one would."""
    sample, cluster = torch.tensor([0.1, 0.5, 0.2, 0.9]), torch.arange(4)
    once = clustered_mean(sample, cluster, 0.95)
    copied = clustered_mean(sample.repeat_interleave(20), cluster.repeat_interleave(20), 0.95)
    assert copied.standard_error == pytest.approx(once.standard_error) and copied.bound == pytest.approx(once.bound)


def test_a_weight_is_as_good_as_a_copy_and_its_scale_is_nothing() -> None:
    sample, cluster, weight = torch.tensor([0.1, 0.5, 0.2, 0.9]), torch.tensor([0, 0, 1, 2]), torch.tensor([1.0, 3.0, 2.0, 1.0])
    weighted = clustered_mean(sample, cluster, 0.95, weight)
    copies = clustered_mean(sample.repeat_interleave(weight.long()), cluster.repeat_interleave(weight.long()), 0.95)
    scaled = clustered_mean(sample, cluster, 0.95, 7 * weight)
    for other in (copies, scaled):
        assert (other.mean, other.standard_error, other.bound) == pytest.approx(
            (weighted.mean, weighted.standard_error, weighted.bound)
        )


def covered(
    draw: Callable[[np.random.Generator, int], np.ndarray], truth: float, groups: int, trials: int
) -> tuple[float, float]:
    """How often the bound, and the plain normal one, is above the true mean."""
    rng, cluster = np.random.default_rng(groups), torch.arange(groups)
    ours = plain = 0
    for _ in range(trials):
        got = clustered_mean(torch.from_numpy(draw(rng, groups)), cluster, 0.95)
        ours += got.bound >= truth
        plain += got.mean + 1.6448536 * got.standard_error >= truth
    return ours / trials, plain / trials


def spikes(rng: np.random.Generator, count: int) -> np.ndarray:
    """Half of the groups hardly move, the others by an exponential amount."""
    return np.where(rng.random(count) < 0.5, 0.05, rng.exponential(1.0, count))


@pytest.mark.parametrize(("groups", "least", "plain_most"), [(8, 0.865, 0.81), (16, 0.885, 0.85), (32, 0.9, 0.885)])
def test_the_bound_covers_where_values_are_lognormal(groups: int, least: float, plain_most: float) -> None:
    """KL sits in a few contexts. Hall's bound reaches 0.88, 0.90 and 0.915 here, the plain normal one 0.775, 0.82 and 0.856."""
    ours, plain = covered(lambda rng, n: rng.lognormal(0.0, 0.9, n), math.exp(0.9**2 / 2), groups, 1500)
    assert ours >= least and plain <= plain_most and ours - plain > 0.03


@pytest.mark.parametrize(("groups", "least"), [(8, 0.9), (16, 0.92), (32, 0.93)])
def test_the_bound_covers_where_half_of_the_groups_do_not_move(groups: int, least: float) -> None:
    ours, plain = covered(spikes, 0.5 * 0.05 + 0.5, groups, 1500)
    assert ours >= least and ours > plain + 0.01


def test_the_bound_covers_the_true_mean_about_as_often_as_it_says() -> None:
    """Messages share a group effect: 30 groups of 6. Nominal 95%; a bound blind to groups would cover near 75%."""
    generator = torch.Generator().manual_seed(0)
    groups, size, trials = 30, 6, 1500
    cluster = torch.arange(groups).repeat_interleave(size)
    effect = torch.randn(trials, groups, generator=generator).repeat_interleave(size, dim=1)
    sample = 1.0 + effect + 0.5 * torch.randn(trials, groups * size, generator=generator)
    share = sum(clustered_mean(sample[t], cluster, 0.95).bound >= 1.0 for t in range(trials)) / trials
    assert 0.925 < share < 0.98


@pytest.mark.parametrize(("moving", "still", "blind_least"), [(2, 6, 0.12), (3, 5, 0.07)])
def test_groups_known_to_be_zero_lend_no_confidence(moving: int, still: int, blind_least: float) -> None:
    """Pure noise in a few groups must look negative in one case of twenty, however many groups stand still beside them. Six
    tenths of all groups move, so the judging ones are weighted. The mean is the plain weighted one."""
    rng, groups = np.random.default_rng(0), moving + still
    cluster, zero = torch.arange(groups), torch.arange(groups) >= moving
    weight = torch.where(zero, 0.4 / (still / groups), 0.6 / (moving / groups)).double()
    ours = blind = 0
    for _ in range(3000):
        values = torch.from_numpy(np.where(zero.numpy(), 0.0, rng.normal(size=groups)))
        got, plain = mean_with_known_zeros(values, zero, cluster, 0.95, weight), clustered_mean(values, cluster, 0.95, weight)
        assert got.mean == pytest.approx(plain.mean)
        ours, blind = ours + (got.bound < 0), blind + (plain.bound < 0)
    assert 0.02 < ours / 3000 < 0.065 and blind / 3000 > blind_least


def test_known_zeros_share_the_mean_and_the_bound_of_the_others() -> None:
    values, zero = torch.tensor([1.0, 2.0, 6.0, 0.0, 0.0]), torch.tensor([False, False, False, True, True])
    got, others = mean_with_known_zeros(values, zero, torch.arange(5), 0.95), clustered_mean(values[:3], torch.arange(3), 0.95)
    found = (got.mean, got.standard_error, got.bound)
    assert found == pytest.approx(tuple(0.6 * x for x in (others.mean, others.standard_error, others.bound)))
    alone = mean_with_known_zeros(values[2:], zero[2:], torch.arange(3), 0.95)
    assert alone.mean == pytest.approx(2.0) and alone.bound == math.inf, "one group tells no spread"
    assert mean_with_known_zeros(values[3:], zero[3:], torch.arange(2), 0.95).bound == 0.0
    unweighed = mean_with_known_zeros(values[2:], zero[2:], torch.arange(3), 0.95, torch.tensor([0.0, 1.0, 1.0]))
    assert (unweighed.mean, unweighed.bound) == (0.0, 0.0)


def test_values_of_one_shape_need_less_correction_the_more_there_are() -> None:
    def factor(copies: int) -> float:
        pulls = torch.tensor([7.0, *[-1.0] * 7], dtype=torch.float64).repeat(copies)
        return upper_quantile(pulls, 0.95) / student_quantile(0.95, 8 * copies - 1)

    assert 3.5 > factor(1) > factor(4) > factor(64) > 1.0
    assert upper_quantile(torch.tensor([-1.0, 1.0], dtype=torch.float64), 0.95) == student_quantile(0.95, 1)
