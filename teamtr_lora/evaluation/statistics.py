"""avg@k, pass@k, pass^k, majorities, their errors and intervals over items, and paired tests: pure functions of numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 4_000
FLIPS = 20_000  # random sign flips of a permutation test
EXACT_FLIPS = 14  # up to this many items that differ, all sign flips are tried
BLOCK = 4_000_000  # numbers drawn at once

Floats = np.ndarray


def k_values(samples: int) -> list[int]:
    """1, 2, 4, ... and `samples` itself."""
    return [*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples]


def avg_at_k(successes: Sequence[int], samples: Sequence[int]) -> float:
    """The mean over items of the share of right samples."""
    return math.fsum(c / n for c, n in zip(successes, samples, strict=True)) / len(successes)


def pass_at_k(successes: Sequence[int], samples: Sequence[int], k: int) -> float:
    """Unbiased pass@k: 1 - C(n-c, k) / C(n, k) averaged over items (Chen et al., 2021). Needs n >= k samples an item."""
    return math.fsum(item_pass_at_k(c, n, k) for c, n in zip(successes, samples, strict=True)) / len(successes)


def item_pass_at_k(successes: int, samples: int, k: int) -> float:
    """The chance that at least one of k samples is right."""
    return 1 - item_all_of_k(samples - successes, samples, k)


def item_all_of_k(successes: int, samples: int, k: int) -> float:
    """pass^k, the chance that all of k samples are right: C(c, k) / C(n, k), unbiased (Yao et al., 2024, tau-bench)."""
    if k > samples:
        raise ValueError(f"k = {k} needs at least {k} samples an item, got {samples}")
    return math.comb(successes, k) / math.comb(samples, k)


def majority(votes: Sequence[str | None], successes: Sequence[bool]) -> float:
    """maj@K of one item: the chance that its most frequent answer is right.

    Samples without an answer do not vote. Answers with equally many votes win with equal chances, which is the expectation over
    random tie-breaks; an answer is as right as the samples that state it are on average. No vote at all is wrong.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    right: Counter[str] = Counter()
    for vote, success in zip(votes, successes, strict=True):
        if vote is not None and success:
            right[vote] += 1
    leaders = [vote for vote, count in counts.items() if count == most]
    return sum(right[vote] / most for vote in leaders) / len(leaders)


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean over items; None where one item gives no spread to judge by."""
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (count - 1) / count)


def bootstrap_intervals(values_I_M: Floats, *, seed: int = 0, resamples: int = RESAMPLES) -> list[tuple[float, float] | None]:
    """Percentile intervals of the mean of each column; rows are items, resampled whole, so an item's samples stay together.

    The columns share the draws. One item has no interval.
    """
    items, columns = values_I_M.shape
    if items < 2:
        return [None] * columns
    rng = np.random.default_rng(seed)
    block = max(1, BLOCK // items)
    means = []
    for start in range(0, resamples, block):
        # how often each item is drawn, rather than which: one product gives all the means
        counts_B_I = rng.multinomial(items, np.full(items, 1 / items), size=min(block, resamples - start))
        means.append(counts_B_I @ values_I_M / items)
    tail = (1 - CONFIDENCE) / 2
    low_M, high_M = np.quantile(np.concatenate(means), [tail, 1 - tail], axis=0)
    return [(float(low), float(high)) for low, high in zip(low_M, high_M, strict=True)]


@dataclass(frozen=True)
class PairedTest:
    """`difference` is second minus first, in the measure's own unit; the p-values are two-sided."""

    first: float
    second: float
    difference: float
    low: float | None  # bootstrap over items, percentile
    high: float | None
    p_value: float  # of equal means: sign flips of the items' differences
    mcnemar_p_value: float | None  # exact, where every item is simply right or wrong
    better: int  # items on which the second is better, and worse
    worse: int


def paired_test(first: Sequence[float], second: Sequence[float], *, seed: int = 0) -> PairedTest:
    """Both measured on the same items in the same order."""
    a, b = np.asarray(first, float), np.asarray(second, float)
    differences = b - a
    (interval,) = bootstrap_intervals(differences[:, None], seed=seed)
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    binary = bool(np.isin(np.concatenate([a, b]), [0.0, 1.0]).all())
    return PairedTest(
        first=float(a.mean()),
        second=float(b.mean()),
        difference=float(differences.mean()),
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        p_value=sign_flip_p_value(differences, seed=seed),
        mcnemar_p_value=mcnemar_p_value(better, worse) if binary else None,
        better=better,
        worse=worse,
    )


def sign_flip_p_value(differences: Floats, *, seed: int = 0) -> float:
    """How often flipping each item's difference at random gives a mean at least as far from 0; exact for few items."""
    moved = differences[differences != 0]
    if not len(moved):
        return 1.0
    observed = abs(moved.sum()) * (1 - 1e-12)  # equal sums in another order are equal
    if len(moved) <= EXACT_FLIPS:
        signs = 1 - 2.0 * (np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved)) & 1)
        return float((abs(signs @ moved) >= observed).mean())
    rng = np.random.default_rng(seed)
    block, reached = max(1, BLOCK // len(moved)), 0
    for start in range(0, FLIPS, block):
        signs = rng.integers(0, 2, size=(min(block, FLIPS - start), len(moved)), dtype=np.int8) * 2.0 - 1
        reached += int((abs(signs @ moved) >= observed).sum())
    return (reached + 1) / (FLIPS + 1)


def mcnemar_p_value(better: int, worse: int) -> float:
    """Exact: the discordant items fall on either side with equal chance."""
    count, term, tail = better + worse, 1, 0
    for i in range(min(better, worse) + 1):
        tail += term
        term = term * (count - i) // (i + 1)  # the next binomial coefficient
    return min(1.0, float(2 * tail / 2**count))
