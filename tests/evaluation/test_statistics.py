"""avg@k, pass@k, pass^k, majorities and errors against brute force, numpy and scipy."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teamtr_lora.evaluation.statistics import (
    avg_at_k,
    item_all_of_k,
    item_pass_at_k,
    k_values,
    majority,
    pass_at_k,
    standard_error,
)


@pytest.mark.parametrize("samples", range(1, 8))
def test_measures_at_k_are_shares_of_all_subsets_of_k(samples: int) -> None:
    for successes in range(samples + 1):
        outcomes = [True] * successes + [False] * (samples - successes)
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(outcomes, k))
            assert item_pass_at_k(successes, samples, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
            assert item_all_of_k(successes, samples, k) == pytest.approx(sum(map(all, subsets)) / len(subsets))


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


def test_the_ks_are_powers_of_two_and_the_last() -> None:
    assert [k_values(n) for n in (1, 2, 3, 4, 25, 64)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 8, 16, 25], [1, 2, 4, 8, 16, 32, 64],
    ]  # fmt: skip


@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=8), st.sampled_from("abcd"))
def test_a_majority_is_the_expectation_over_random_tie_breaks(votes: list[str | None], right: str) -> None:
    counts = {vote: votes.count(vote) for vote in set(votes) - {None}}
    winners = [vote for vote in counts if counts[vote] == max(counts.values())]
    expected = sum(vote == right for vote in winners) / len(winners) if winners else 0.0
    assert majority(votes, [vote == right for vote in votes]) == pytest.approx(expected)


def test_an_answer_is_as_right_as_its_samples() -> None:
    """Where success is not decided by the answer alone."""
    assert majority(["a", "a", "b"], [True, False, True]) == 0.5
    assert majority([None, None], [True, False]) == 0.0
