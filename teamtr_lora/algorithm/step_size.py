"""The learning rate that ends an update's steps at the edge of its trust region.

KL grows with the square of the distance, and the distance with the learning rate and the number of steps. So one reading of the
KL says what the learning rate should have been.
"""

from __future__ import annotations

import math

# A probing step aims its update at this share of the radius: the gate compares an upper bound of the KL, which is larger.
AIMED_SHARE = 0.6
# From one update to the next a learning rate changes by at most this factor: one reading is noisy.
MOST_CHANGE = 2.0
# A probe that is off by more than this factor is taken again with the learning rate that it asks for.
TOLERATED = 2.0


def probed_rate(rate: float, kl: float, radius: float, planned: int) -> float:
    """The learning rate with which `planned` steps reach the aim, if one step with `rate` has moved by `kl`."""
    if not math.isfinite(kl):
        return rate / 100
    return rate * 100 if kl <= 0 else rate * math.sqrt(AIMED_SHARE * radius / kl) / planned


def next_rate(rate: float, reach: float, *, taken: int, planned: int) -> float:
    """The learning rate of the next update, after `taken` steps that could have gone `reach` times as far to end at the edge."""
    factor = reach * taken / planned
    return rate * min(max(factor, 1 / MOST_CHANGE), MOST_CHANGE)
