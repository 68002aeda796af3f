"""Means over items with their intervals, and paired tests of two measurements on the same items: pure functions of numbers.

numpy is imported where it is used, as this room imports without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray

CONFIDENCE = 0.95
RESAMPLES = 4_000
FLIPS = 20_000  # random sign flips of a permutation test
EXACT_FLIPS = 14  # up to this many items that differ, all sign flips are tried
ROUNDING = 1e-9  # what is closer together than this share of its size is equal
NO_SPREAD = "every item changed by the same, so nothing shows how far others would differ"
BLOCK = 4_000_000  # numbers drawn at once


def bootstrap_intervals(values_I_M: Floats, *, seed: int = 0, resamples: int = RESAMPLES) -> list[tuple[float, float] | None]:
    """Percentile intervals of the mean of each column; rows are items, resampled whole, so an item's samples stay together.

    The columns share the draws. A column without spread has no interval: resampling equal values shows nothing of how far the
    mean could be from the truth, and an interval of width 0 would call it certain.
    """
    import numpy as np

    items = len(values_I_M)
    spread_M = np.ptp(values_I_M, axis=0) > ROUNDING * np.abs(values_I_M).max(axis=0)
    if not spread_M.any():
        return [None] * len(spread_M)
    rng = np.random.default_rng(seed)
    block = max(1, BLOCK // items)
    means = []
    for start in range(0, resamples, block):
        # how often each item is drawn, rather than which: one product gives all the means
        counts_B_I = rng.multinomial(items, np.full(items, 1 / items), size=min(block, resamples - start))
        means.append(counts_B_I @ values_I_M / items)
    tail = (1 - CONFIDENCE) / 2
    low_M, high_M = np.quantile(np.concatenate(means), [tail, 1 - tail], axis=0)
    ends_M = zip(low_M.tolist(), high_M.tolist(), strict=True)
    return [ends if spread else None for ends, spread in zip(ends_M, spread_M, strict=True)]


@dataclass(frozen=True)
class PairedTest:
    """`difference` is second minus first, in the measure's own unit; the p-values are two-sided."""

    first: float
    second: float
    difference: float
    low: float | None  # bootstrap over items, percentile
    high: float | None
    no_interval: str | None  # why there is none
    p_value: float  # of equal means: sign flips of the items' differences
    mcnemar_p_value: float | None  # exact, where every item is simply right or wrong
    better: int  # items on which the second is better, and worse
    worse: int


def paired_test(first: Sequence[float], second: Sequence[float], *, seed: int = 0) -> PairedTest:
    """Both measured on the same items in the same order."""
    import numpy as np

    a, b = np.asarray(first, float), np.asarray(second, float)
    differences = b - a
    differences[np.abs(differences) <= ROUNDING * np.maximum(np.abs(a), np.abs(b))] = 0  # means of equal sums may round apart
    (interval,) = bootstrap_intervals(differences[:, None], seed=seed)
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    binary = bool(np.isin(np.concatenate([a, b]), [0.0, 1.0]).all())
    return PairedTest(
        first=float(a.mean()),
        second=float(b.mean()),
        difference=float(differences.mean()),
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        no_interval=None if interval else NO_SPREAD if len(differences) > 1 else "there is one item alone",
        p_value=sign_flip_p_value(differences, seed=seed),
        mcnemar_p_value=mcnemar_p_value(better, worse) if binary else None,
        better=better,
        worse=worse,
    )


def sign_flip_p_value(differences: Floats, *, seed: int = 0) -> float:
    """How often flipping each item's difference at random gives a mean at least as far from 0; exact for few items."""
    import numpy as np

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
