"""avg@k, pass@k and their standard errors over items."""

from __future__ import annotations

import math
from collections.abc import Sequence


def avg_at_k(successes: Sequence[int], samples: Sequence[int]) -> float:
    """The mean over items of the share of right samples."""
    return math.fsum(c / n for c, n in zip(successes, samples, strict=True)) / len(successes)


def pass_at_k(successes: Sequence[int], samples: Sequence[int], k: int) -> float:
    """Unbiased pass@k: 1 - C(n-c, k) / C(n, k) averaged over items (Chen et al., 2021). Needs n >= k samples an item."""
    return math.fsum(item_pass_at_k(c, n, k) for c, n in zip(successes, samples, strict=True)) / len(successes)


def item_pass_at_k(successes: int, samples: int, k: int) -> float:
    if k > samples:
        raise ValueError(f"pass@{k} needs at least {k} samples an item, got {samples}")
    return 1 - math.comb(samples - successes, k) / math.comb(samples, k)


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean over items; None where one item gives no spread to judge by."""
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (count - 1) / count)
