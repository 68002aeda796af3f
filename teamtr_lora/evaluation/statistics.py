"""avg@k, pass@k, pass^k, majorities, and their errors over items: pure functions of numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


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
