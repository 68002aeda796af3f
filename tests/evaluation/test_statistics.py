"""avg@k, pass@k and standard errors against brute force and numpy."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teamtr_lora.evaluation import avg_at_k, pass_at_k, standard_error
from teamtr_lora.evaluation.statistics import item_pass_at_k


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_success(samples: int) -> None:
    for successes in range(samples + 1):
        outcomes = [True] * successes + [False] * (samples - successes)
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(outcomes, k))
            assert item_pass_at_k(successes, samples, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_unbiased() -> None:
    """Its mean over binomial draws is 1 - (1-p)^k exactly."""
    from scipy.stats import binom

    p, n, k = 0.3, 6, 3
    mean = sum(binom.pmf(c, n, p) * item_pass_at_k(c, n, k) for c in range(n + 1))
    assert mean == pytest.approx(1 - (1 - p) ** k)


def test_pass_at_k_averages_over_items_and_needs_enough_samples() -> None:
    assert pass_at_k([0, 2, 1], [2, 2, 4], 2) == pytest.approx((0 + 1 + 0.5) / 3)
    assert pass_at_k([1], [1], 1) == 1.0
    with pytest.raises(ValueError, match="at least 3 samples"):
        pass_at_k([1], [2], 3)
    assert pass_at_k([500], [1000], 100) == pytest.approx(1.0)


@given(st.lists(st.tuples(st.integers(1, 9), st.data()), min_size=1, max_size=10))
def test_avg_at_k(rows: list[tuple[int, st.DataObject]]) -> None:
    samples = [n for n, _ in rows]
    successes = [data.draw(st.integers(0, n)) for n, data in rows]
    assert avg_at_k(successes, samples) == pytest.approx(np.mean(np.array(successes) / np.array(samples)))
    assert pass_at_k(successes, samples, 1) == pytest.approx(avg_at_k(successes, samples))


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=50))
def test_standard_error(values: list[float]) -> None:
    assert standard_error(values) == pytest.approx(np.std(values, ddof=1) / np.sqrt(len(values)), abs=1e-9)


def test_one_item_has_no_standard_error() -> None:
    assert standard_error([0.5]) is None and standard_error([]) is None
